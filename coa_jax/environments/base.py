"""The interface of environments; docs/environments.md is its guide."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Literal, Protocol

from coa_jax.bounds import Natural, Seconds
from coa_jax.errors import UserError
from coa_jax.extensions import Extension, Kind, find, is_path, refuse_result
from coa_jax.tasks import Task
from coa_jax.tasks.prompts import read_messages

TURN = "turn"
"""Value of `ToolCall.tool` for a whole turn of the policy, without a tag."""
RESET = "reset"
"""Value of `ToolCall.tool` for a reset that failed; successful resets are not recorded as calls."""
ANSWER = "answer"
"""Value of `ToolCall.tool` and `Turn.tag` for the policy's answer."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """An action of the policy.

    Attributes:
        text: body of the tag; for a whole turn, all that the policy wrote since the last
            observation.
        tag: tag of the environment that the policy called, ``answer`` for its answer, "" for a
            whole turn.
        number: number of earlier actions of the trajectory that the environment has received.
    """

    text: str
    tag: str = ""
    number: int = 0


@dataclasses.dataclass(frozen=True)
class Step:
    """The environment's response to an action.

    Attributes:
        observation: text that the policy reads next.
        reward: reward of this turn; None for no reward.
        done: whether the episode is over.
    """

    observation: str = ""
    reward: float | None = None
    done: bool = False


Messages = str | Sequence[tuple[str, str]] | Sequence[Mapping[str, str]]


class Environment(Protocol):
    """The environment of one trajectory.

    Methods may be async; other methods of an environment run in a thread of its own.

    A class may have two more attributes.  ``tools`` is a dict from tags to their descriptions for
    the policy.  With ``tools``, the policy acts through these tags, which its protocol must have.
    Without, each whole turn of the policy is an action: the end of the turn calls `step`, and the
    observation is the next message.  ``together = True`` means that the samples of a task share an
    environment, see `ENVIRONMENTS`.
    """

    def reset(self, task: Task) -> Messages | Awaitable[Messages]:
        """Starts an episode.

        Args:
            task: the task of the trajectory.

        Returns:
            A text, which the prompt style renders like a question; or all messages of the prompt
            as (role, text) pairs, the last of which is the user's.
        """
        ...

    def step(self, turn: Turn) -> Step | Awaitable[Step]:
        """Responds to an action; may return a tuple (observation, reward, done) for a `Step`."""
        ...

    def close(self) -> Awaitable[None] | None:
        """Releases the resources of the episode; optional.  Always called, also after an error."""
        ...


ENVIRONMENTS = Kind(
    "environment",
    "coa_jax.environments",
    {
        "openenv": "coa_jax.environments.openenv:OpenEnv",
        "textarena": "coa_jax.environments.textarena:TextArena",
    },
    offers=("task", "seed", "sample", "samples", "group"),
)
"""A class of environments, or a function that creates one; it is called once per trajectory.

Its parameters may be any of ``task``; ``seed``, a number that is the same for all samples of a
task; ``samples``, the numbers of the samples of the task that run together; ``sample``, the number
of this trajectory among them; and ``group``, a dict that the environments of these samples share.
"""

_STEP = (
    "a coa_jax.environments.Step or (observation: str, reward: float | None, done: bool) from step"
)


@dataclasses.dataclass(frozen=True)
class EnvironmentConfig(Extension):
    """The environment of a run.

    Attributes:
        path: ``package.module:name`` or a short name; "" for the tool loop without an environment.
        options: keyword arguments of the environment.
        deadline_s: time limit of a reset, a step or a close, in seconds.
        concurrency: resets and steps that run at a time; 0 for no limit.
        credit: credit assignment: ``turn`` trains the tokens of a turn on the rewards from that
            turn on, ``trajectory`` trains all tokens on the whole reward; see `learn.turns`.
    """

    deadline_s: Seconds = 60.0
    concurrency: Natural = 0
    credit: Literal["turn", "trajectory"] = "turn"

    def __bool__(self) -> bool:
        return bool(self.path)


def tags_of(config: EnvironmentConfig) -> dict[str, str]:
    """The tags through which the policy acts, with their descriptions; {} for whole turns.

    Raises:
        UserError: the environment does not exist, or its ``tools`` are invalid.
    """
    if not config:
        return {}
    found = find(ENVIRONMENTS, config.path, "config.environment.path")
    tools = getattr(found, "tools", {})
    if not isinstance(tools, Mapping) or not all(
        isinstance(text, str) for pair in tools.items() for text in pair
    ):
        wanted = "tools as a dict from tags to their descriptions"
        raise refuse_result(ENVIRONMENTS, config.path, tools, wanted, "config.environment.path")
    if taken := {TURN, RESET, ANSWER} & set(tools):
        raise UserError(f"config.environment.path: {taken.pop()!r} cannot be a tool's tag")
    return dict(tools)


def read_step(value: Any, path: str) -> Step:
    """Checks and converts the result of `Environment.step`.

    Args:
        value: the result.
        path: name of the environment, for the message.

    Raises:
        MisfitError: the result is not a step.
    """
    found = value
    if isinstance(found, tuple | list) and len(found) == 3:
        found = Step(*found)
    fits = isinstance(found, Step) and isinstance(found.observation, str)
    if not fits or found.done not in (True, False) or not _is_reward(found.reward):
        raise refuse_result(ENVIRONMENTS, path, value, _STEP, "config.environment")
    reward = None if found.reward is None else float(found.reward)
    return Step(found.observation, reward, bool(found.done))


def _is_reward(value: Any) -> bool:
    try:
        return value is None or (not isinstance(value, str) and math.isfinite(float(value)))
    except (TypeError, ValueError):
        return False


def read_reset(value: Any, path: str) -> str | tuple[tuple[str, str], ...]:
    """Checks and converts the result of `Environment.reset`.

    Args:
        value: the result.
        path: name of the environment, for the message.

    Returns:
        A text, or the (role, text) pairs of messages.

    Raises:
        MisfitError: the result is neither.
    """
    if isinstance(value, str):
        return value
    try:
        rows = [
            turn if isinstance(turn, Mapping) else dict(zip(("role", "content"), turn, strict=True))
            for turn in value
        ]
        return tuple(read_messages(rows).turns)
    except (TypeError, ValueError):
        wanted = "a text, or messages that end with the user's, from reset"
        raise refuse_result(ENVIRONMENTS, path, value, wanted, "config.environment") from None


def shown_name(path: str) -> str:
    """The short name of an environment for messages."""
    return path.rpartition(":")[2] if is_path(path) else path
