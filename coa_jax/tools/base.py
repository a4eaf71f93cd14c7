"""The contract between the rollout loop and a tool."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import math
import time
from typing import Any, Literal, Protocol, TypeVar, get_args, runtime_checkable

from coa_jax import jsonl
from coa_jax.tools.net.budget import BudgetSpentError
from coa_jax.tools.net.secrets import redact_all

Outcome = Literal["ok", "error", "timeout", "bad_call", "limit", "fault"]
"""How a call ended.

- ``ok``: the tool did its work.
- ``error``: the tool ran and reports a failure that the model can act on (an exception in its
  program, no results).
- ``timeout``: the deadline passed.
- ``bad_call``: the arguments could not be parsed.
- ``limit``: a budget is exhausted.
- ``fault``: the tool itself is broken or unreachable. The policy is not to blame, so the reward is
  masked.
"""


@dataclasses.dataclass(frozen=True)
class ToolContext:
    """What a tool may know about the trajectory that calls it.

    Attributes:
        trajectory_id: unique id of the trajectory in its run.
        call_index: number of earlier tool calls in the trajectory.
        deadline: seconds that this call may take; None for the tool's own limit.
        history: (tool, arguments) of the earlier calls, oldest first.
        outcomes: outcomes of the earlier calls; shorter than ``history`` where unknown.
        question: question of the trajectory.
        think: text of the policy's last ``think`` before the call.
    """

    trajectory_id: str = ""
    call_index: int = 0
    deadline: float | None = None
    history: tuple[tuple[str, str], ...] = ()
    outcomes: tuple[str, ...] = ()
    question: str = ""
    think: str = ""


@dataclasses.dataclass(frozen=True)
class Observation:
    """The result of a tool call.

    Attributes:
        text: text that the model reads; untrusted, and encoded as plain text only.
        ok: whether the call succeeded.
        outcome: how the call ended.
        seconds: wall time of the call.
        detail: data for logs and traces (exit code, scores); JSON values only. If ``incomplete`` is
            true, a part failed that may succeed next time, and no cache stores the answer.
        reward: reward of the turn that ends with the call; None for none.
        done: whether the episode is over.
    """

    text: str
    ok: bool
    outcome: Outcome
    seconds: float
    detail: dict[str, Any] = dataclasses.field(default_factory=dict)
    reward: float | None = None
    done: bool = False


@runtime_checkable
class Tool(Protocol):
    """A tool: maps text to text within a deadline, and never raises into the rollout loop.

    A stateful tool may define ``begin()``, which returns the tool of one trajectory. That tool's
    ``async close()`` is called at the end of the trajectory.

    Attributes:
        name: tag that calls the tool, e.g. ``wiki_search``.
        deadline: seconds after which a call is abandoned.
    """

    name: str
    deadline: float

    async def __call__(self, arguments: str, context: ToolContext) -> Observation:
        """Runs one call; ``arguments`` is the text between the tool's tags."""
        ...


def is_repeat(name: str, arguments: str, context: ToolContext) -> bool:
    """Returns whether the trajectory has made this call before, ignoring differences in blanks.

    Args:
        name: tag of the tool.
        arguments: text of the call.
        context: context of the call.
    """
    words = arguments.split()
    return any(tool == name and earlier.split() == words for tool, earlier in context.history)


def refused_query(name: str, arguments: str, context: ToolContext) -> Observation | None:
    """Returns the observation of a search that is not carried out: an empty or repeated query.

    Args:
        name: tag of the search tool.
        arguments: text of the call.
        context: context of the call.
    """
    if not arguments.split():
        text = "The query is empty. Write what to search for between the tags."
        return Observation(text, False, "bad_call", 0.0)
    if is_repeat(name, arguments, context):
        text = "This query was already searched. Use its result or search for something else."
        return Observation(text, False, "error", 0.0, {"duplicate": True})
    return None


def own_calls(name: str, context: ToolContext) -> list[tuple[str, str]]:
    """Returns (arguments, outcome) of the trajectory's earlier calls of a tool; "ok" if unknown."""
    unknown = len(context.history) - len(context.outcomes)
    outcomes = (*context.outcomes, *("ok",) * unknown)
    pairs = zip(context.history, outcomes, strict=True)
    return [(arguments, outcome) for (tool, arguments), outcome in pairs if tool == name]


def time_for(limit: float, context: ToolContext) -> float:
    """Returns the seconds that a tool may use so that it can still report a timeout itself."""
    if context.deadline is None:
        return limit
    margin = min(0.5, 0.05 + 0.1 * context.deadline)
    return min(limit, max(context.deadline - margin, 0.001))


class _Wrapper(Protocol):
    tool: Tool


W = TypeVar("W", bound=_Wrapper)


def begun(wrapper: W) -> W:
    """Begins the tool that a wrapper holds in ``tool``, for one trajectory.

    Returns:
        The wrapper if the tool has no state; else a copy of the wrapper around the begun tool.
    """
    begin = getattr(wrapper.tool, "begin", None)
    inner = wrapper.tool if begin is None else begin()
    if inner is wrapper.tool:
        return wrapper
    own = copy.copy(wrapper)
    own.tool = inner
    return own


async def call(tool: Tool, arguments: str, context: ToolContext) -> Observation:
    """Calls a tool so that no failure of the tool reaches the rollout loop.

    A passed deadline becomes ``timeout``, even if the tool ignores its cancellation. An exception
    becomes ``fault``, whatever its type, and so does an invalid observation or the cancellation of
    something the tool waits for. Only two exceptions propagate: the cancellation of the caller
    itself, and a spent budget of a tool, which ends the run. Keys are removed from the observation,
    whichever tool returned it (`redact_all`).

    Args:
        tool: the tool.
        arguments: text of the call.
        context: context of the call.
    """
    deadline = tool.deadline if context.deadline is None else min(tool.deadline, context.deadline)
    start = time.monotonic()
    task = asyncio.create_task(_observation(tool, arguments, context))
    try:
        done, _ = await asyncio.wait({task}, timeout=deadline)
        if done:
            return task.result()
        await _end(task)
        seconds = time.monotonic() - start
        text = f"The {tool.name} tool gave no result within {deadline:g} seconds."
        return Observation(text, False, "timeout", seconds)
    except BudgetSpentError:
        raise
    except (Exception, asyncio.CancelledError) as error:  # a broken tool gives a value, not a crash
        if isinstance(error, asyncio.CancelledError) and _being_cancelled():
            await _end(task)
            raise
        seconds = time.monotonic() - start
        text = f"The {tool.name} tool is not available at the moment."
        detail = redact_all({"exception": f"{type(error).__name__}: {error}"})
        return Observation(text, False, "fault", seconds, detail)


async def _observation(tool: Tool, arguments: str, context: ToolContext) -> Observation:
    """Runs the tool and validates its observation, which goes into texts, sums and files.

    Raises:
        TypeError, ValueError: the tool returned something else than a valid observation.
    """
    try:
        seen = await tool(arguments, context)
    except SystemExit as error:  # it would end the event loop
        raise RuntimeError(f"SystemExit: {error}") from error
    if not isinstance(seen, Observation) or not isinstance(seen.text, str):
        raise TypeError(f"the tool returned {seen!r:.200}, which is not an Observation with text")
    if seen.outcome not in get_args(Outcome) or not math.isfinite(seen.seconds):
        raise ValueError(f"outcome {seen.outcome!r} or seconds {seen.seconds!r} of an Observation")
    if seen.reward is not None and not math.isfinite(seen.reward):
        raise ValueError(f"reward {seen.reward!r} of an Observation")
    jsonl.dumps(seen.detail)
    return dataclasses.replace(seen, text=redact_all(seen.text), detail=redact_all(seen.detail))


_PATIENCE_S = 5.0
"""Seconds for which a cancelled tool may clean up before the loop stops waiting for it."""
_left_behind: set[asyncio.Task[Observation]] = set()  # event loops hold tasks weakly


async def _end(task: asyncio.Task[Observation]) -> None:
    """Cancels a call, and waits for a bounded time until it has ended."""
    _left_behind.add(task)
    task.add_done_callback(_forget)
    task.cancel()
    await asyncio.wait({task}, timeout=_PATIENCE_S)


def _forget(task: asyncio.Task[Observation]) -> None:
    _left_behind.discard(task)
    if not task.cancelled():
        task.exception()  # retrieved, so that asyncio does not log it


def _being_cancelled() -> bool:
    """Returns whether the current task itself is being cancelled."""
    task = asyncio.current_task()
    return task is None or bool(task.cancelling())


def unavailable(name: str) -> Observation:
    """Returns the observation of a call to a tool that the run does not have."""
    return Observation(f"The {name} tool is not available.", False, "bad_call", 0.0)
