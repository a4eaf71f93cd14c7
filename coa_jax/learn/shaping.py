"""What becomes of a grader's reward before advantages are taken from it."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from coa_jax.bounds import Bounded, Text
from coa_jax.trajectory import Reward, Trajectory

Verdict = Annotated[
    str,
    Text(20, r"score|mask|-?\d+(\.\d+)?", 'score, mask, or what is added, such as "-0.5"'),
]
"""What becomes of a reward: it counts (``score``), it is None (``mask``), or a number is added."""


@dataclasses.dataclass(frozen=True)
class StopRewards(Bounded):
    """What becomes of the reward of a trajectory without an answer, by why it stopped.

    What depends on the load of the machine is no verdict on the policy, and masks by default.
    ``score`` keeps the reward, ``mask`` removes it, and a number is added to it.

    Attributes:
        length: the token budget ran out.
        turn_length: the budget of tokens that the policy may write in a row ran out.
        turns: the policy made as many tool calls as it may.
        eos: the policy ended its turn without an answer.
        violation: the policy broke a rule of the protocol.
        deadline: the time of the trajectory ran out.
        tool_time: the time in which the trajectory may wait for tools ran out.
    """

    length: Verdict = "score"
    turn_length: Verdict = "score"
    turns: Verdict = "score"
    eos: Verdict = "score"
    violation: Verdict = "score"
    deadline: Verdict = "mask"
    tool_time: Verdict = "mask"

    def masks(self, trajectory: Trajectory) -> bool:
        """Whether a trajectory has no reward."""
        return self._of(trajectory) == "mask"

    def added(self, trajectory: Trajectory) -> float:
        """What is added to its reward."""
        verdict = self._of(trajectory)
        return 0.0 if verdict in ("score", "mask") else float(verdict)

    def _of(self, trajectory: Trajectory) -> str:
        return str(getattr(self, trajectory.stop_reason, "score"))


def overlong_penalty(length: int, budget: int, buffer: int, penalty: float) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476 eq 13), in tokens.

    0 up to ``budget - buffer`` tokens, then falling linearly to ``-penalty`` at the budget, and
    never below: the release of the paper falls without bound.
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
    """A reward as the policy learns from it; one without a value stays without.

    Args:
        reward: of the grader.
        length: tokens of the whole trajectory, which is what the budget bounds.
        format_reward: whether a right answer counts only where the protocol was obeyed (eq 11).
        budget: tokens that a trajectory may have.
        buffer, penalty: see `overlong_penalty`.
        stop: what is added for why it stopped, see `StopRewards`.

    Returns:
        The shaped reward; ``parts`` has what was added as ``stop`` and, where its length took
        something off, that as ``overlong`` and what there was before as ``earned``.
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
