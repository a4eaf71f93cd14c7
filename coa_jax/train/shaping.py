"""Reward shaping: changes to the reward of a grader before advantages are computed."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from coa_jax.config.fields import Bounded, Text
from coa_jax.data.trajectory import Reward, Trajectory

Verdict = Annotated[
    str,
    Text(20, r"score|mask|-?\d+(\.\d+)?", 'score, mask, or what is added, such as "-0.5"'),
]
"""Change to a reward: ``score`` keeps the reward, ``mask`` removes it, a number is added to it."""


@dataclasses.dataclass(frozen=True)
class StopRewards(Bounded):
    """Changes to the reward of a trajectory that ended without an answer, by stop reason.

    ``score`` keeps the reward. ``mask`` removes the reward, so the policy is not trained on the
    trajectory. A number such as ``-0.5`` is added to the reward. By default, the stop reasons
    ``deadline`` and ``tool_time`` mask the reward, because they depend on the load of the machine
    rather than on the policy.

    Attributes:
        length: change if the token budget of the trajectory was used up.
        turn_length: change if the token budget of one turn was used up.
        turns: change if the maximum number of tool calls was reached.
        eos: change if the policy ended its turn without an answer.
        violation: change if the policy broke a rule of the protocol.
        deadline: change if the time limit of the trajectory was reached.
        tool_time: change if the limit on the trajectory's waiting time for tools was reached.
    """

    length: Verdict = "score"
    turn_length: Verdict = "score"
    turns: Verdict = "score"
    eos: Verdict = "score"
    violation: Verdict = "score"
    deadline: Verdict = "mask"
    tool_time: Verdict = "mask"

    def added(self, trajectory: Trajectory) -> float | None:
        """Returns the number that is added to a trajectory's reward because of its stop reason.

        The result is None if the reward is removed.
        """
        verdict = getattr(self, trajectory.stop_reason, "score")
        if verdict == "mask":
            return None
        return 0.0 if verdict == "score" else float(verdict)


def overlong_penalty(length: int, budget: int, buffer: int, penalty: float) -> float:
    """Computes DAPO's soft overlong punishment (arXiv 2503.14476 eq 13).

    The punishment is a number to add to the reward: 0 up to ``budget - buffer`` tokens, falling
    linearly to ``-penalty`` at ``budget`` tokens, and ``-penalty`` for longer trajectories. (In the
    code release of Chain-of-Agents, the punishment keeps falling beyond the budget.)

    Args:
        length: number of tokens of the trajectory.
        budget: maximum number of tokens of a trajectory.
        buffer: number of tokens over which the punishment grows, ending at the budget; 0 for no
            punishment.
        penalty: absolute value of the punishment at the budget.
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
    """Returns the shaped reward that the policy is trained on.

    If the graders gave no value (``reward.value`` is None), the reward is returned unchanged.

    Args:
        reward: reward that the graders gave.
        length: number of tokens of the whole trajectory, including prompt and observations.
        format_reward: whether a positive reward becomes 0 if the trajectory breaks a rule of the
            protocol (eq 11 of the Chain-of-Agents paper).
        budget: maximum number of tokens of a trajectory.
        buffer, penalty: size of the punishment for long trajectories, see `overlong_penalty`.
        stop: number to add because of the stop reason, see `StopRewards`.

    Returns:
        The shaped reward, whose ``parts`` record the changes. If ``stop`` is not 0,
        ``parts["stop"]`` is ``stop``. If the length lowered the reward, ``parts["overlong"]`` is
        the punishment, and ``parts["earned"]`` is the reward before the punishment.
    """
    if reward.value is None:
        return reward
    value, parts = reward.value, reward.parts
    if format_reward:
        value = min(value, value * parts["format"])  # a penalty stays
    if stop:
        value, parts = value + stop, {**parts, "stop": stop}
    if lost := overlong_penalty(length, budget, buffer, penalty):
        value, parts = value + lost, {**parts, "overlong": lost, "earned": value}
    return dataclasses.replace(reward, value=value, parts=parts)
