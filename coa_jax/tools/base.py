"""The contract between the agent loop and a tool."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from coa_jax import jsonl
from coa_jax.tools.net.budget import BudgetSpentError
from coa_jax.tools.net.secrets import redact_all

Outcome = Literal["ok", "error", "timeout", "bad_call", "limit", "fault"]
"""How a call ended.

``ok`` the tool did its work; ``error`` the tool ran and reports a failure that the model can
act on (an exception in its program, no results); ``timeout`` the deadline passed; ``bad_call``
the arguments could not be understood; ``limit`` a budget was used up; ``fault`` the tool itself
is broken or unreachable, which is nobody's mistake and masks the reward.
"""


@dataclasses.dataclass(frozen=True)
class ToolContext:
    """What a call may know about the trajectory that makes it.

    Attributes:
        trajectory_id: unique for a trajectory in a run.
        call_index: number of earlier tool calls in the trajectory.
        deadline: seconds that this call may take, or None for the tool's own limit.
        history: (tool, arguments) of the earlier calls, oldest first.
        outcomes: how those ended; shorter where that is not known.
        question: what the trajectory is asked.
        think: what the policy wrote in the last ``think`` before the call.
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
    """What a tool call gave back.

    Attributes:
        text: what the model reads; untrusted, and encoded as plain text only.
        ok: whether the call did what was asked.
        outcome: how the call ended.
        seconds: wall time of the call.
        detail: figures for logs and traces (exit code, scores); JSON values only.  ``incomplete``
            is true where a part failed that may come next time: no cache keeps the answer.
        reward: of the turn that ends with the call; None for none.
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
    """A tool agent: pure text in and out, with a deadline; never raises to the loop.

    One that has state may have ``begin()``, which gives the tool of one trajectory, and that
    ``async close()``, which is called at its end.

    Attributes:
        name: the tag that calls it, e.g. ``wiki_search``.
        deadline: seconds after which a call is abandoned.
    """

    name: str
    deadline: float

    async def __call__(self, arguments: str, context: ToolContext) -> Observation:
        """Runs one call; ``arguments`` is the text between the tool's tags."""
        ...


def is_repeat(name: str, arguments: str, context: ToolContext) -> bool:
    """Whether the trajectory has made this call of a tool before; blanks do not count."""
    words = arguments.split()
    return any(tool == name and earlier.split() == words for tool, earlier in context.history)


def own_calls(name: str, context: ToolContext) -> list[tuple[str, str]]:
    """(arguments, outcome) of the trajectory's earlier calls of a tool; "ok" where not known."""
    unknown = len(context.history) - len(context.outcomes)
    outcomes = (*context.outcomes, *("ok",) * unknown)
    pairs = zip(context.history, outcomes, strict=True)
    return [(arguments, outcome) for (tool, arguments), outcome in pairs if tool == name]


def time_for(limit: float, context: ToolContext) -> float:
    """Seconds that a tool may take, so that its own words about a timeout come in time."""
    if context.deadline is None:
        return limit
    margin = min(0.5, 0.05 + 0.1 * context.deadline)
    return min(limit, max(context.deadline - margin, 0.001))


async def call(tool: Tool, arguments: str, context: ToolContext) -> Observation:
    """Calls a tool so that nothing it does can hurt the loop.

    A deadline that passes becomes ``timeout``, also where the tool does not heed its cancellation.
    An exception becomes ``fault``, whatever its kind, and so do an observation that is none and the
    cancellation of what a tool waits for.  Only cancellation of the caller itself is let through,
    and that the budget of a tool is spent, which ends the run.
    No key is in the observation, whatever tool gave it (`redact_all`).
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
    except (Exception, asyncio.CancelledError) as error:  # a broken tool is a value, not a crash
        if isinstance(error, asyncio.CancelledError) and _being_cancelled():
            await _end(task)
            raise
        seconds = time.monotonic() - start
        text = f"The {tool.name} tool is not available at the moment."
        detail = redact_all({"exception": f"{type(error).__name__}: {error}"})
        return Observation(text, False, "fault", seconds, detail)


async def _observation(tool: Tool, arguments: str, context: ToolContext) -> Observation:
    """What a tool returns, checked: it goes into texts, sums and files.

    Raises:
        TypeError, ValueError: it is not what a tool has to return.
    """
    try:
        seen = await tool(arguments, context)
    except SystemExit as error:  # which would end the event loop
        raise RuntimeError(f"SystemExit: {error}") from error
    if not isinstance(seen, Observation) or not isinstance(seen.text, str):
        raise TypeError(f"the tool returned {seen!r:.200}, which is no Observation of text")
    if seen.outcome not in get_args(Outcome) or not math.isfinite(seen.seconds):
        raise ValueError(f"outcome {seen.outcome!r} or seconds {seen.seconds!r} of an Observation")
    if seen.reward is not None and not math.isfinite(seen.reward):
        raise ValueError(f"reward {seen.reward!r} of an Observation")
    jsonl.dumps(seen.detail)
    return dataclasses.replace(seen, text=redact_all(seen.text), detail=redact_all(seen.detail))


_PATIENCE_S = 5.0
"""How long a cancelled tool may take to put away what it has, before nobody waits for it."""
_left_behind: set[asyncio.Task[Observation]] = set()  # an event loop holds tasks weakly


async def _end(task: asyncio.Task[Observation]) -> None:
    """Cancels a call, and waits for its end within bounds."""
    _left_behind.add(task)
    task.add_done_callback(_forget)
    task.cancel()
    await asyncio.wait({task}, timeout=_PATIENCE_S)


def _forget(task: asyncio.Task[Observation]) -> None:
    _left_behind.discard(task)
    if not task.cancelled():
        task.exception()  # else it is told as never retrieved


def _being_cancelled() -> bool:
    """Whether somebody has asked the current task itself to end."""
    task = asyncio.current_task()
    return task is None or bool(task.cancelling())


def unavailable(name: str) -> Observation:
    """What a call of a tool that is not there gives: the tag is of the protocol, not of the run."""
    return Observation(f"The {name} tool is not available.", False, "bad_call", 0.0)
