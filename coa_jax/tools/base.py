"""Defines the interface of tools: functions of the environment that the policy calls by tags."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import math
import time
from typing import Any, Literal, Protocol, Self, get_args, runtime_checkable

from coa_jax.files import jsonl
from coa_jax.tools.net.budget import BudgetSpentError
from coa_jax.tools.net.errors import FaultDetector, FetchError
from coa_jax.tools.net.secrets import Secret, redact_all, with_key

Outcome = Literal["ok", "error", "timeout", "bad_call", "limit", "fault"]
"""How a tool call ended.

* ``ok``: the tool did its work.
* ``error``: the tool ran, and reports a failure to which the policy can react, such as an exception
  in the policy's program or a search without results.
* ``timeout``: the deadline of the call passed.
* ``bad_call``: the arguments of the call could not be parsed.
* ``limit``: the call exceeded a limit, such as the memory of a program.
* ``fault``: the tool itself is broken or unreachable. Because this is not a mistake of the policy,
  the trajectory gets no reward.
"""


@dataclasses.dataclass(frozen=True)
class ToolContext:
    """The information about a trajectory that a tool gets with each call.

    Attributes:
        trajectory_id: id of the trajectory, unique in a run.
        call_index: number of earlier tool calls in the trajectory.
        deadline: time limit of this call in seconds; None for the time limit of the tool.
        history: (tool, arguments) of each earlier call, oldest first.
        outcomes: outcome of each earlier call. If the outcomes of the latest calls are unknown, as
            in distillation, this tuple is shorter than ``history``.
        question: question of the task.
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
        text: text that the policy reads. It is encoded as plain text and cannot contain control
            tokens, because its source is not trusted.
        ok: whether the call succeeded.
        outcome: how the call ended.
        seconds: wall time of the call in seconds.
        detail: JSON values for logs and traces, such as an exit code or scores. If the key
            ``incomplete`` has the value True, a part of the call failed and may succeed next time.
            Caches do not store such observations.
        reward: reward that an environment gives for the turn that ends with the call; None for no
            reward.
        done: whether the call ends the episode.
    """

    text: str
    ok: bool
    outcome: Outcome
    seconds: float
    detail: dict[str, Any] = dataclasses.field(default_factory=dict)
    reward: float | None = None
    done: bool = False


def observe(
    start: float, text: str, outcome: Outcome = "ok", detail: dict[str, Any] | None = None
) -> Observation:
    """Returns the observation (the result) of a tool call that ends now, with its duration.

    Args:
        start: time at which the call began, on the clock of ``time.monotonic``.
        text: text that the policy reads.
        outcome: how the call ended.
        detail: JSON values for logs and traces.
    """
    seconds = time.monotonic() - start
    return Observation(text, outcome == "ok", outcome, seconds, detail or {})


@runtime_checkable
class Tool(Protocol):
    """The interface of a tool, an asynchronous function from text to an observation.

    A tool may define ``async probe(seconds)``, which checks before a run whether the tool can be
    called. It returns (whether it can be called, one line of text). An exception UserError with
    that line means the same as False.

    A tool whose state differs between trajectories may define ``begin()``, which returns a tool for
    one trajectory. At the end of the trajectory, ``async close()`` of the returned tool is called.

    Attributes:
        name: tag with which the policy calls the tool, such as ``wiki_search``.
        deadline: time limit of a call in seconds. A call that takes longer is cancelled.
    """

    name: str
    deadline: float

    async def __call__(self, arguments: str, context: ToolContext) -> Observation:
        """Runs a call.

        Args:
            arguments: text that the policy wrote between the tags of the tool.
            context: information about the trajectory.
        """
        ...


def is_repeat(name: str, arguments: str, context: ToolContext) -> bool:
    """Returns whether the trajectory has already made this call, ignoring differences in spaces.

    Args:
        name: tag of the tool.
        arguments: text between the tags of the tool.
        context: the trajectory, with its earlier calls.
    """
    words = arguments.split()
    return any(tool == name and earlier.split() == words for tool, earlier in context.history)


def refused_query(name: str, arguments: str, context: ToolContext) -> Observation | None:
    """Returns the observation with which a search tool rejects an empty or a repeated query.

    Args:
        name: tag of the search tool.
        arguments: arguments of the call, which are the query.
        context: the trajectory, with its earlier calls.

    Returns:
        The observation; None if the query must be searched.
    """
    if not arguments.split():
        text = "The query is empty. Write what to search for between the tags."
        return Observation(text, False, "bad_call", 0.0)
    if is_repeat(name, arguments, context):
        text = "This query was already searched. Use its result or search for something else."
        return Observation(text, False, "error", 0.0, {"duplicate": True})
    return None


def failed_search(
    start: float, error: FetchError, blame: FaultDetector, **detail: Any
) -> Observation:
    """Returns the observation of a failed search: the service gave no usable answer.

    Args:
        start: time at which the call began, on the clock of ``time.monotonic``.
        error: why there is no usable answer.
        blame: decides whether the query or the service is to blame.
        detail: further details of the call.
    """
    text = f"The search failed: {error.message}. Search again, or go on without it."
    detail["error"] = f"{error.kind}: {error.message}"
    return observe(start, text, blame.outcome(error), detail)


def own_calls(name: str, context: ToolContext) -> list[tuple[str, str]]:
    """Returns (arguments, outcome) of each earlier call of a tool in the trajectory.

    If the outcome of a call is unknown, "ok" is returned in its place.

    Args:
        name: tag of the tool.
        context: context of the present call.
    """
    unknown = len(context.history) - len(context.outcomes)
    outcomes = (*context.outcomes, *("ok",) * unknown)
    pairs = zip(context.history, outcomes, strict=True)
    return [(arguments, outcome) for (tool, arguments), outcome in pairs if tool == name]


def time_for(limit: float, context: ToolContext) -> float:
    """Returns the time limit that a tool should set for its own work in a call.

    The result is a little shorter than the deadline of the call, so that the tool can report a
    timeout before the rollout loop cancels the call.

    Args:
        limit: time limit of the tool in seconds.
        context: context of the call, with its deadline.
    """
    if context.deadline is None:
        return limit
    margin = min(0.5, 0.05 + 0.1 * context.deadline)
    return min(limit, max(context.deadline - margin, 0.001))


class Wrapper:
    """A base class of tools that call another tool, the wrapped tool.

    Attributes:
        tool: the wrapped tool.
        name: name of the wrapped tool.
    """

    def __init__(self, tool: Tool):
        self.tool, self.name = tool, tool.name

    def begin(self) -> Self:
        """Prepares the tool for one trajectory, by calling ``begin`` of the wrapped tool.

        Returns:
            A copy of this object that wraps the tool that ``begin`` returned. If the wrapped tool
            has no ``begin``, this object itself is returned.
        """
        begin = getattr(self.tool, "begin", None)
        inner = self.tool if begin is None else begin()
        if inner is self.tool:
            return self
        wrapper = copy.copy(self)
        wrapper.tool = inner
        return wrapper

    async def close(self) -> None:
        """Ends the trajectory for which `begin` created this tool, and closes the wrapped tool."""
        await self.tool.close()  # type: ignore[attr-defined]


async def call_tool(tool: Tool, arguments: str, context: ToolContext) -> Observation:
    """Calls a tool, and converts failures of the tool to observations.

    * If the deadline passes, the outcome is ``timeout``, even if the tool ignores its cancellation.
    * If the tool raises an exception, returns an invalid observation, or awaits a task that is
      cancelled, the outcome is ``fault``.
    * Two exceptions are passed on to the caller: the cancellation of the caller itself, and
      `BudgetSpentError`, which ends the run.

    API keys are removed from the observation, see `redact_all`. Texts with more than a million
    characters are cut.

    Args:
        tool: the tool to call.
        arguments: text between the tags of the tool.
        context: the trajectory so far, and the time that is left.
    """
    deadline = tool.deadline if context.deadline is None else min(tool.deadline, context.deadline)
    start = time.monotonic()
    task = asyncio.create_task(_observation(tool, arguments, context))
    try:
        done, _ = await asyncio.wait({task}, timeout=deadline)
        if done:
            return task.result()
        await _cancel(task)
        text = f"The {tool.name} tool gave no result within {deadline:g} seconds."
        return observe(start, text, "timeout")
    except BudgetSpentError:
        raise
    except (Exception, asyncio.CancelledError) as error:  # a broken tool must not end the run
        caller = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and caller and caller.cancelling():
            await _cancel(task)
            raise
        text = f"The {tool.name} tool is not available at the moment."
        detail = redact_all({"exception": f"{type(error).__name__}: {error}"})
        return observe(start, text, "fault", detail)


async def _observation(tool: Tool, arguments: str, context: ToolContext) -> Observation:
    """Calls the tool and validates its observation.

    Raises:
        TypeError, ValueError: the tool returned something other than a valid observation.
    """
    try:
        seen = await tool(arguments, context)
    except SystemExit as error:  # this exception would end the event loop
        raise RuntimeError(f"SystemExit: {error}") from error
    if not isinstance(seen, Observation) or not isinstance(seen.text, str):
        raise TypeError(f"the tool returned {seen!r:.200}, which is not an Observation with text")
    if seen.outcome not in get_args(Outcome) or not math.isfinite(seen.seconds):
        raise ValueError(f"outcome {seen.outcome!r} or seconds {seen.seconds!r} of an Observation")
    if seen.reward is not None and not math.isfinite(seen.reward):
        raise ValueError(f"reward {seen.reward!r} of an Observation")
    if _characters(seen.detail) > _LONGEST:
        raise ValueError(f"the detail of an Observation has more than {_LONGEST:,} characters")
    jsonl.dumps(seen.detail)
    text = redact_all(seen.text[:_LONGEST])
    if len(seen.text) > _LONGEST:
        # The last characters may be a part of a key, which is not recognised.
        left_out = len(seen.text) - _LONGEST + _KEY
        text = f"{text[:-_KEY]}\n[... {left_out} characters left out ...]"
    return dataclasses.replace(seen, text=text, detail=redact_all(seen.detail))


def _characters(value: Any) -> int:
    """Returns the number of characters in the texts of a JSON value."""
    if isinstance(value, dict):
        return sum(_characters(key) + _characters(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(map(_characters, value))
    return len(value) if isinstance(value, str) else 1


_LONGEST, _KEY = 1 << 20, 4096
"""Maximum number of characters of an observation, which no policy can read, and of an API key."""

_PATIENCE_S = 5.0
"""Time in seconds that a cancelled tool has for cleaning up, before the loop stops waiting."""
# Cancelled tasks that still run. Event loops hold only weak references to tasks.
_left_behind: set[asyncio.Task[Observation]] = set()


async def _cancel(task: asyncio.Task[Observation]) -> None:
    """Cancels a call, and waits up to `_PATIENCE_S` until the call has ended."""
    _left_behind.add(task)
    task.add_done_callback(_retrieve_exception)
    task.cancel()
    await asyncio.wait({task}, timeout=_PATIENCE_S)


def _retrieve_exception(task: asyncio.Task[Observation]) -> None:
    _left_behind.discard(task)
    if not task.cancelled():
        task.exception()  # asyncio logs exceptions that nobody retrieves


def unavailable(name: str) -> Observation:
    """Returns the observation that tells the policy that the run has no tool ``name``."""
    return Observation(f"The {name} tool is not available.", False, "bad_call", 0.0)


async def server_answers(
    tool: Tool, url: str, arguments: str, key_env: str, seconds: float
) -> tuple[bool, str]:
    """Checks whether the server of a tool answers a harmless call.

    Args:
        tool: tool that calls the server.
        url: URL of the server.
        arguments: arguments that make the call harmless.
        key_env: environment variable with the API key; "" for no key.
        seconds: time limit for the answer.

    Returns:
        (whether the server answers, one line of text about the result).
    """
    if key_env and not Secret(key_env):
        return with_key(False, url, key_env)
    seen = await call_tool(tool, arguments, ToolContext(deadline=seconds))
    if seen.outcome not in ("fault", "timeout"):
        return with_key(True, f"{url} answers", key_env)
    return False, f"{url}: {next(iter(seen.detail.values()), seen.text)}"
