"""What becomes of a grader's reward before advantages are taken from it."""

from __future__ import annotations

import dataclasses

from coa_jax.trajectory import Reward


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
) -> Reward:
    """A reward as the policy learns from it; one without a value stays without.

    Args:
        reward: of the grader.
        length: tokens of the whole trajectory, which is what the budget bounds.
        format_reward: whether a right answer counts only where the protocol was obeyed (eq 11).
        budget: tokens that a trajectory may have.
        buffer, penalty: see `overlong_penalty`.

    Returns:
        The shaped reward; where its length took something off, ``parts`` has that as ``overlong``
        and what there was before as ``earned``.
    """
    if reward.value is None:
        return reward
    value, parts = reward.value, reward.parts
    if format_reward:
        value *= parts["format"]
    if lost := overlong_penalty(length, budget, buffer, penalty):
        value, parts = value + lost, {**parts, "overlong": lost, "earned": value}
    return dataclasses.replace(reward, value=value, parts=parts)
