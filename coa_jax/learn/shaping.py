"""Reward shaping: changes to a grader's reward before advantages are computed."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from coa_jax.bounds import Bounded, Text
from coa_jax.trajectory import Reward, Trajectory

Verdict = Annotated[
    str,
    Text(20, r"score|mask|-?\d+(\.\d+)?", 'score, mask, or what is added, such as "-0.5"'),
]
"""Treatment of a reward: ``score`` keeps it, ``mask`` removes it, and a number is added to it."""


@dataclasses.dataclass(frozen=True)
class StopRewards(Bounded):
    """Treatment of the reward of a trajectory without an answer, by its stop reason.

    ``score`` keeps the reward, ``mask`` removes it, and a number is added to it.  Stop reasons that
    depend on the load of the machine (``deadline`` and ``tool_time``) say nothing about the policy,
    so they mask by default.

    Attributes:
        length: the token budget of the trajectory was used up.
        turn_length: the token budget of one turn was used up.
        turns: the maximum number of tool calls was reached.
        eos: the policy ended its turn without an answer.
        violation: the policy broke a rule of the protocol.
        deadline: the time limit of the trajectory was reached.
        tool_time: the limit on the trajectory's waiting time for tools was reached.
    """

    length: Verdict = "score"
    turn_length: Verdict = "score"
    turns: Verdict = "score"
    eos: Verdict = "score"
    violation: Verdict = "score"
    deadline: Verdict = "mask"
    tool_time: Verdict = "mask"

    def masks(self, trajectory: Trajectory) -> bool:
        """Whether the reward of a trajectory is removed."""
        return self._of(trajectory) == "mask"

    def added(self, trajectory: Trajectory) -> float:
        """The number to add to the reward of a trajectory; 0 for ``score`` and ``mask``."""
        verdict = self._of(trajectory)
        return 0.0 if verdict in ("score", "mask") else float(verdict)

    def _of(self, trajectory: Trajectory) -> str:
        return str(getattr(self, trajectory.stop_reason, "score"))


def overlong_penalty(length: int, budget: int, buffer: int, penalty: float) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476 eq 13).

    The punishment is 0 up to ``budget - buffer`` tokens, falls linearly to ``-penalty`` at the
    budget, and stays there.  (In the code release of Chain-of-Agents it falls without bound.)

    Args:
        length: tokens of the trajectory.
        budget: maximum number of tokens of a trajectory.
        buffer: tokens before the budget over which the punishment grows; 0 for no punishment.
        penalty: punishment at the budget.
    """
    if not buffer:
        return 0.0
    return -penalty * min(max(length - (budget - buffer), 0) / buffer, 1.0)


def shape_reward(
    reward: Reward,
    length: int,
    *,
    format_reward: bool,
    budget: int,
    buffer: int,
    penalty: float,
    stop: float = 0.0,
) -> Reward:
    """Returns the reward that the policy is trained on; a reward without a value is unchanged.

    Args:
        reward: reward of the graders.
        length: tokens of the whole trajectory, prompt and observations included.
        format_reward: whether a correct answer counts only if the trajectory obeys the protocol
            (paper eq 11).
        budget: maximum number of tokens of a trajectory.
        buffer: see `overlong_penalty`.
        penalty: see `overlong_penalty`.
        stop: number to add for the stop reason, see `StopRewards`.

    Returns:
        The shaped reward.  Its ``parts`` have ``stop``, if it is not 0, and, if the length lowered
        the reward, the change as ``overlong`` and the reward before it as ``earned``.
    """
    if reward.value is None:
        return reward
    value, parts = reward.value, reward.parts
    if format_reward:
        value *= parts["format"]
    if stop:
        value, parts = value + stop, {**parts, "stop": stop}
    if lost := overlong_penalty(length, budget, buffer, penalty):
        value, parts = value + lost, {**parts, "overlong": lost, "earned": value}
    return dataclasses.replace(reward, value=value, parts=parts)
