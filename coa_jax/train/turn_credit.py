"""Credit assignment for the rewards of turns: computes the advantages of each turn's tokens.

Trajectory i of a group has the reward R_i, which includes the rewards r_ij of its turns j,
multiplied by the weight w. Its advantage is A_i = s (R_i - b), where s is the scale and b the
baseline of the group. The tokens of turn k cannot change earlier rewards, so their advantage A_ik
uses the return G_ik from turn k on:

    G_ik = R_i - w sum_{j<k} r_ij
    b_k = mean over the group of G_ik
    A_ik = s (G_ik - b_k)

For such returns-to-go see Williams 1992 (https://doi.org/10.1007/BF00992696) and Sutton et al. 1999
(NIPS 12); for turns of a language model see MT-GRPO (arXiv 2505.11821). Without rewards of turns
A_ik equals A_i.

A trajectory that ended before turn k stays in the mean b_k, with the part of its reward that
belongs to no turn. The mean b_k is therefore taken over the same number of trajectories for every
turn, and a policy cannot change the weight of its turns by stopping early. For the same reason, all
turns have the same scale s.

The advantages ``batch``, ``batch_baseline`` and ``gae`` need rewards of single tokens. For these
advantages the last token of turn k has the reward A_ik - A_i(k+1), which is w r_ik minus a part of
the baseline. The sum of these rewards from turn k on is A_ik again. With a critic, the result is
generalised advantage estimation over turns (arXiv 1506.02438 eq 16).
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from coa_jax.data.trajectory import Author, Trajectory
from coa_jax.tasks import GradersConfig
from coa_jax.tasks.graders import TASK_GRADER
from coa_jax.train.algorithms import Algorithm

ENVIRONMENT = "environment"
"""Name of the reward component that is the sum of the rewards of turns."""


def weight_of_turns(graders: GradersConfig) -> float:
    """Returns the factor of turn rewards in a trajectory's reward.

    This is the weight of the reward component ``environment`` in the settings.
    """
    if not graders.rewards:
        return 1.0
    weight = graders.rewards.get(ENVIRONMENT, graders.rewards.get(TASK_GRADER))
    return 0.0 if weight is None else float(weight.get("weight", 1.0))


def turn_rewards(trajectory: Trajectory) -> np.ndarray:
    """Returns the reward of each turn of a trajectory, float64 ``[turns]``.

    A turn is a sequence of consecutive policy tokens. It ends with one or more calls to the
    environment; only the last turn of a trajectory may end without a call. The reward of a turn is
    the sum of the rewards of its calls.
    """
    ends = [end for _, end in _runs(trajectory.author == Author.POLICY)]
    rewards = np.zeros(max(len(ends), 1))
    spans = (span for span in trajectory.segments if span.author == Author.ENVIRONMENT)
    replies = [span.start for span in spans if ends and span.start >= ends[0]]
    # Only the call that ends the episode has no reply.
    replies += [len(trajectory.tokens)] * (len(trajectory.tool_calls) - len(replies))
    for call, reply in zip(trajectory.tool_calls, replies, strict=False):
        rewards[max(bisect.bisect_right(ends, reply) - 1, 0)] += call.reward or 0.0
    return rewards


def credited(
    algorithm: Algorithm, learned: Sequence[tuple[Trajectory, np.ndarray]], weight: float | None
) -> list[np.ndarray] | None:
    """Computes the advantages of the turns of a group.

    The result is None, and all turns share the advantage of the trajectory, in three cases:

    - the environment gave no rewards for turns;
    - ``weight`` is None;
    - the advantage function returns one number per token.

    Args:
        algorithm: algorithm with all settings filled in, see `Algorithm.resolve`.
        learned: trajectories with their advantages, see `advantages.advantages_of`.
        weight: weight w of the turn rewards in the reward of a trajectory; None if turns get no
            credit of their own.

    Returns:
        For each trajectory i the advantages A_ik of its turns k, see `turn_advantages`; None in the
        cases above.
    """
    group = [trajectory for trajectory, _ in learned]
    rewarded = any(call.reward is not None for t in group for call in t.tool_calls)
    if weight is None or not rewarded or any(a.ndim for _, a in learned):
        return None
    alone = algorithm.alone and algorithm.whitened
    n = len(group)
    scales = {"mean": 1.0, "batch_baseline": 1.0, "leave_one_out": n / max(n - 1, 1)}
    scale = 1.0 if alone else scales.get(algorithm.advantage)
    return turn_advantages(group, [float(a) for _, a in learned], weight, alone, scale)


def turn_advantages(
    group: Sequence[Trajectory],
    advantages: Sequence[float],
    weight: float,
    alone: bool,
    scale: float | None = None,
) -> list[np.ndarray]:
    """Computes the advantage A_ik of each turn k of each trajectory i of a group.

    ``A_ik = s (G_ik - b_k)``, where ``G_ik = R_i - w sum_{j<k} r_ij`` is the reward R_i of the
    trajectory minus the weighted rewards r_ij of its turns j before turn k, b_k is the mean of G_ik
    over the group, and s is the factor in ``A_i = s (R_i - mean of R)``, such as 1 / standard
    deviation in GRPO.

    Args:
        group: graded trajectories of one task.
        advantages: advantage A_i of each trajectory.
        weight: weight w of the turn rewards in the reward of a trajectory.
        alone: whether A_i is R_i itself, without a baseline; in that case b_k is 0.
        scale: factor s; None computes ``(max A_i - min A_i) / (max R_i - min R_i)``, and 0 if all
            rewards are equal.

    Returns:
        For each trajectory i the advantages A_ik of its turns k, float64 ``[turns]``.
    """
    values = np.array([t.reward.value if t.reward else 0.0 for t in group], np.float64)
    whole = np.asarray(advantages, np.float64)
    if scale is None:
        spread = np.ptp(values)
        scale = float(np.ptp(whole) / spread) if spread else 0.0
    rewards = [
        turn_rewards(t) * (weight if t.reward and ENVIRONMENT in t.reward.parts else 0.0)
        for t in group
    ]
    before = np.zeros((len(group), max(map(len, rewards))))  # sum of the rewards before turn k
    for row, of_turns in zip(before, rewards, strict=True):
        row[: len(of_turns)] = np.cumsum(of_turns) - of_turns
        row[len(of_turns) :] = of_turns.sum()
    baseline = 0.0 if alone else before.mean(axis=0)
    credited = whole[:, None] - scale * (before - baseline)
    return [row[: len(of_turns)] for row, of_turns in zip(credited, rewards, strict=True)]


def spread_over_tokens(mask: np.ndarray, turns: np.ndarray, at_ends: bool) -> np.ndarray:
    """Spreads the advantages of a trajectory's turns over its tokens.

    Args:
        mask: float32 ``[tokens]``, 1 for tokens that the policy wrote, 0 for all other tokens.
        turns: advantages A_k of the trajectory's turns k, float64 ``[turns]``.
        at_ends: False gives every token of turn k the value A_k. True is for algorithms that sum
            the values from a token to the end (`Algorithm.whitened`): the last token of turn k has
            the value A_k - A_(k+1), or A_k in the last turn, and all other tokens have the value 0.
            The sum from any token of turn k on is then A_k.

    Returns:
        The value of each token, float32 ``[tokens]``.
    """
    spread = np.zeros(len(mask), np.float32)
    following = np.append(turns[1:], 0.0)
    for (start, end), mine, later in zip(_runs(mask > 0), turns, following, strict=False):
        if at_ends:
            spread[end - 1] = mine - later
        else:
            spread[start:end] = mine
    return spread


def _runs(written: np.ndarray) -> list[tuple[int, int]]:
    """Returns (start, end) of each sequence of consecutive policy tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], written.astype(np.int8), [0]))))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
