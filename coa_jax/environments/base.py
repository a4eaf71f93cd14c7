"""The contract between a trajectory and its environment; docs/environments.md explains it."""

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
"""Stands in `ToolCall.tool` for a whole turn of the policy, which no tag calls."""
RESET = "reset"
"""Stands there for a reset that failed; one that went well is no call."""
ANSWER = "answer"
"""Stands there, and in `Turn.tag`, for the policy's answer."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """What the policy did.

    Attributes:
        text: the body of the tag; without one, all that the policy wrote since it last read.
        tag: the tool of the environment that it called, ``answer`` where it answered, "" for a
            whole turn.
        number: of earlier turns of the trajectory that the environment has seen.
    """

    text: str
    tag: str = ""
    number: int = 0


@dataclasses.dataclass(frozen=True)
class Step:
    """What came of a turn.

    Attributes:
        observation: what the policy reads next.
        reward: of this turn; None for none.
        done: whether the episode is over.
    """

    observation: str = ""
    reward: float | None = None
    done: bool = False


Messages = str | Sequence[tuple[str, str]] | Sequence[Mapping[str, str]]


class Environment(Protocol):
    """The state of one trajectory.  Methods may be async; others run in one thread of their own.

    A class may also have an attribute ``tools``, tag -> what the policy is told of it.  With tools
    the policy acts by these tags, which its protocol must have.  Without, its whole turns are its
    actions: the end of a turn asks for a step, and the observation is the next message.  With the
    attribute ``together`` the samples of a task act with each other, see `ENVIRONMENTS`.
    """

    def reset(self, task: Task) -> Messages | Awaitable[Messages]:
        """Begins an episode.

        Returns:
            What the policy is asked, a text that the prompt style puts to it as it does a question;
            or all messages as they are, (role, text) pairs that end with the user's.
        """
        ...

    def step(self, turn: Turn) -> Step | Awaitable[Step]:
        """Answers a turn; ``(observation, reward, done)`` will do for a `Step`."""
        ...

    def close(self) -> Awaitable[None] | None:
        """Puts away what the episode holds; always called, also after an error.  Optional."""
        ...


ENVIRONMENTS = Kind(
    "environment",
    "coa_jax.environments",
    {"textarena": "coa_jax.environments.textarena:TextArena"},
    offers=("task", "seed", "sample", "samples", "group"),
)
"""A class of environments, or a function that makes one; it is called for each trajectory.

It may ask for ``task``; for ``seed``, a number that is the same for all samples of a task; for
``sample``, the number of the trajectory among the ``samples`` of the task that run together; and
for ``group``, a dict that the environments of these samples share.
"""

_STEP = (
    "a coa_jax.environments.Step or (observation: str, reward: float | None, done: bool) from step"
)


@dataclasses.dataclass(frozen=True)
class EnvironmentConfig(Extension):
    """The environment of a run.

    Attributes:
        path: ``package.module:name`` or a short name; "" for the loop of tools alone.
        options: its settings.
        deadline_s: seconds that a reset, a step or a close may take.
        concurrency: resets and steps that run at a time; 0 for any number.
        credit: whether a turn's tokens learn from what came from that turn on (``turn``), or all
            tokens from the whole (``trajectory``); see `learn.turns`.
    """

    deadline_s: Seconds = 60.0
    concurrency: Natural = 0
    credit: Literal["turn", "trajectory"] = "turn"

    def __bool__(self) -> bool:
        return bool(self.path)


def tags_of(config: EnvironmentConfig) -> dict[str, str]:
    """The tags by which the policy acts, with what it is told of each; none for whole turns.

    Raises:
        UserError: the environment is not there, or its ``tools`` are no such mapping.
    """
    if not config:
        return {}
    found = find(ENVIRONMENTS, config.path, "config.environment.path")
    tools = getattr(found, "tools", {})
    if not isinstance(tools, Mapping) or not all(
        isinstance(text, str) for pair in tools.items() for text in pair
    ):
        wanted = "tools as a dict from tags to what the policy is told of them"
        raise refuse_result(ENVIRONMENTS, config.path, tools, wanted, "config.environment.path")
    if taken := {TURN, RESET, ANSWER} & set(tools):
        raise UserError(f"config.environment.path: {taken.pop()!r} cannot be a tool's tag")
    return dict(tools)


def read_step(value: Any, path: str) -> Step:
    """What ``step`` gave.

    Raises:
        MisfitError: it is none.
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
    """What ``reset`` gave: a text, or (role, text) of each message.

    Raises:
        MisfitError: it is neither.
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
    """The name of an environment in sentences."""
    return path.rpartition(":")[2] if is_path(path) else path
