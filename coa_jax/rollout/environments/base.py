"""Defines the interface of environments; docs/environments.md explains how to write one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Literal, Protocol

from coa_jax.config.extensions import Extension, ExtensionKind, find, refuse_result
from coa_jax.config.fields import Natural, Seconds
from coa_jax.config.preflight import Needs, Probe, code_needs, code_probes
from coa_jax.errors import UserError
from coa_jax.tasks import Task
from coa_jax.tasks.prompts import read_messages

TURN = "turn"
"""Value of `ToolCall.tool` if the action is a whole turn of the policy instead of a tag."""
RESET = "reset"
"""Value of `ToolCall.tool` for a failed reset; a successful reset is not recorded as a call."""
ANSWER = "answer"
"""Value of `ToolCall.tool` and `Turn.tag` if the action is the policy's answer."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """An action of the policy, to which the environment must respond.

    If the environment has ``tools`` (see `Environment`), an action is a tag of these tools, else a
    whole turn of the policy. The final answer is an action, too.

    Attributes:
        text: body of the tag; for a whole turn, everything that the policy wrote since the last
            observation.
        tag: tag that the policy used; ``answer`` for the policy's final answer; "" for a whole
            turn.
        number: index, from 0, of the action among all actions that the environment has received in
            this trajectory.
    """

    text: str
    tag: str = ""
    number: int = 0


@dataclasses.dataclass(frozen=True)
class Step:
    """The response of an environment to an action of the policy.

    Attributes:
        observation: text that the policy reads next.
        reward: reward of this turn; None for no reward.
        done: whether the episode ends with this action.
    """

    observation: str = ""
    reward: float | None = None
    done: bool = False


ResetMessages = str | Sequence[tuple[str, str]] | Sequence[Mapping[str, str]]


class Environment(Protocol):
    """The interface of an environment. Each trajectory has an object of its own.

    The methods may be async. Methods that are not async are called in a separate thread.

    A class may have two more attributes:

    - ``tools``, a dict that maps tags to the descriptions that the policy reads. With ``tools``,
      the policy acts through these tags, which the protocol of its tasks must contain. Without
      ``tools``, each whole turn of the policy is an action: at the end of every turn, `step` is
      called, and the policy reads the observation as the next message.
    - ``together = True``, which means that the objects of a task's samples depend on each other,
      for example because they play one game. They share a dict, see ``group`` in `ENVIRONMENTS`.
    """

    def reset(self, task: Task) -> ResetMessages | Awaitable[ResetMessages]:
        """Starts an episode of the environment.

        Args:
            task: the task of the trajectory.

        Returns:
            Either a text, which replaces the question in the prompt; or all messages of the prompt
            as pairs (role, text). The last message must be a user message.
        """
        ...

    def step(self, turn: Turn) -> Step | Awaitable[Step]:
        """Responds to an action of the policy.

        Args:
            turn: the action.

        Returns:
            A `Step`, or a tuple (observation, reward, done) with the same meanings.
        """
        ...

    def close(self) -> Awaitable[None] | None:
        """Releases the resources of the episode.

        This method is optional. It is called at the end of every episode, even after an error.
        """
        ...


ENVIRONMENTS = ExtensionKind(
    "environment",
    "coa_jax.environments",
    {
        "openenv": "coa_jax.rollout.environments.openenv:OpenEnv",
        "textarena": "coa_jax.rollout.environments.textarena:TextArena",
    },
    offers=("task", "seed", "sample", "samples", "group"),
)
"""An environment class, or a function that returns an environment; called for each trajectory.

It receives those of the following arguments that it has parameters for: ``task``, the task;
``seed``, a number that is the same for all samples of a task; ``samples``, the numbers of the
samples of the task that run together; ``sample``, the number of the trajectory among these samples;
``group``, a dict that the environments of these samples share.
"""

_STEP = "a Step or (observation: str, reward: float | None, done: bool) from step"


@dataclasses.dataclass(frozen=True)
class EnvironmentConfig(Extension):
    """Settings of the environment of a run, which responds to the policy in addition to the tools.

    Attributes:
        path: an environment, given as ``package.module:name`` or as a short name; "" for no
            environment, so that the policy only calls tools.
        options: keyword arguments with which the environment is created.
        deadline_s: time limit of each call of ``reset``, ``step`` or ``close``, in seconds.
        concurrency: maximum number of calls of ``reset`` and ``step`` that run at the same time; 0
            for no limit.
        credit: rewards that count for the tokens of a turn in training. With ``turn``, these are
            the rewards of the same turn and of later turns; with ``trajectory``, the rewards of all
            turns count for every token. See `train.turn_credit`.
    """

    deadline_s: Seconds = 60.0
    concurrency: Natural = 0
    credit: Literal["turn", "trajectory"] = "turn"

    def __bool__(self) -> bool:
        return bool(self.path)

    def needs(self) -> Needs:
        """Returns what the environment needs, such as packages, see `config.preflight.Needs`."""
        return code_needs(ENVIRONMENTS, self.path, self.options)

    def probes(self) -> dict[str, Probe]:
        """Returns the check, before a run, whether the environment can start.

        The result is {"environment": attribute ``probe`` of the environment's class}; {} for a
        class without this attribute, see `config.preflight`.
        """
        return code_probes(ENVIRONMENTS, self.path, self.options, "environment")


def tags_of(config: EnvironmentConfig) -> dict[str, str]:
    """Returns the tags by which the policy acts in an environment, with their descriptions.

    The result maps each tag to its description; {} if each whole turn is an action.

    Raises:
        UserError: the environment does not exist, or its attribute ``tools`` is invalid.
    """
    if not config:
        return {}
    environment = find(ENVIRONMENTS, config.path, "config.environment.path")
    tools = getattr(environment, "tools", {})
    if not isinstance(tools, Mapping) or not all(
        isinstance(text, str) for pair in tools.items() for text in pair
    ):
        expected = "tools as a dict from tags to their descriptions"
        raise refuse_result(ENVIRONMENTS, config.path, tools, expected, "config.environment.path")
    if taken := {TURN, RESET, ANSWER} & set(tools):
        raise UserError(f"config.environment.path: {taken.pop()!r} cannot be a tool's tag")
    return dict(tools)


def read_step(value: Any, path: str) -> Step:
    """Checks the result of `Environment.step` and converts it to a `Step`.

    Args:
        value: the result.
        path: name of the environment, used in the error message.

    Raises:
        MisfitError: the result is neither a `Step` nor a tuple (observation, reward, done).
    """
    step = Step(*value) if isinstance(value, tuple | list) and len(value) == 3 else value
    fits = isinstance(step, Step) and isinstance(step.observation, str)
    if not fits or step.done not in (True, False) or isinstance(step.reward, str):
        raise refuse_result(ENVIRONMENTS, path, value, _STEP, "config.environment")
    try:
        reward = None if step.reward is None else float(step.reward)
    except (TypeError, ValueError):
        reward = math.nan
    if reward is not None and not math.isfinite(reward):
        raise refuse_result(ENVIRONMENTS, path, value, _STEP, "config.environment")
    return Step(step.observation, reward, bool(step.done))


def read_reset(value: Any, path: str) -> str | tuple[tuple[str, str], ...]:
    """Checks the result of `Environment.reset` and converts messages to pairs.

    Args:
        value: the result.
        path: name of the environment, used in the error message.

    Returns:
        The text, or the messages as pairs (role, text).

    Raises:
        MisfitError: the result is neither a text nor messages.
    """
    if isinstance(value, str):
        return value
    names = ("role", "content")
    try:
        rows = [t if isinstance(t, Mapping) else dict(zip(names, t, strict=True)) for t in value]
        return tuple(read_messages(rows).turns)
    except (TypeError, ValueError):
        expected = "a text, or messages that end with the user's, from reset"
        raise refuse_result(ENVIRONMENTS, path, value, expected, "config.environment") from None
