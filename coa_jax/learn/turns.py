"""Credit assignment for rewards of turns: advantages of the tokens of each turn.

Trajectory i of a group has the reward R_i, which includes the rewards r_ij of its turns j with the
weight w.  Its advantage is A_i = s (R_i - b), where the scale s and the baseline b are those of the
group.  The tokens of turn k cannot change earlier rewards, so their advantage uses the return from
turn k on:

    G_ik = R_i - w sum_{j<k} r_ij        A_ik = s (G_ik - b_k),  b_k = mean over the group of G_ik

(return-to-go: Williams 1992, https://doi.org/10.1007/BF00992696; Sutton et al. 1999, NIPS 12; for
turns of a language model: MT-GRPO, arXiv 2505.11821).  Without rewards of turns A_ik equals A_i.

A trajectory that ended before turn k stays in the mean b_k, with the part of its reward that
belongs to no turn.  The share of a sample's own return in the baseline is therefore the same for
all turns, and a policy cannot change the weight of its turns by stopping early.  All turns share
one scale s for the same reason.

The advantages ``batch``, ``batch_baseline`` and ``gae`` need rewards of single tokens.  For them
the last token of turn k has the reward A_ik - A_i(k+1), which is w r_ik minus the baseline's part.
Their sum over later tokens is A_ik again; with a critic it is generalised advantage estimation over
turns (arXiv 1506.02438 eq 16).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coa_jax.learn.algorithms import Algorithm
from coa_jax.tasks import GradersConfig
from coa_jax.tasks.graders import TASKS_OWN
from coa_jax.trajectory import Author, Trajectory

ENVIRONMENT = "environment"
"""Name of the reward that is the sum of the rewards of turns."""


def weight_of_turns(graders: GradersConfig) -> float:
    """Weight w of the reward ``environment`` in the reward of a trajectory."""
    if not graders.rewards:
        return 1.0
    given = graders.rewards.get(ENVIRONMENT, graders.rewards.get(TASKS_OWN))
    return 0.0 if given is None else float(given.get("weight", 1.0))


def turn_rewards(trajectory: Trajectory) -> np.ndarray:
    """Rewards r_ij of the turns of a trajectory, float64 ``[turns]``.

    A turn is a run of consecutive policy tokens.  A call to the environment ends each turn, except
    possibly the last.
    """
    of_calls = [call.reward or 0.0 for call in trajectory.tool_calls]
    rewards = np.zeros(max(len(_runs(trajectory.author == Author.POLICY)), len(of_calls)))
    rewards[: len(of_calls)] = of_calls
    return rewards


def has_turn_rewards(group: Sequence[Trajectory]) -> bool:
    """Whether an environment gave a reward for any turn of a group."""
    return any(call.reward is not None for t in group for call in t.tool_calls)


def credited(
    algorithm: Algorithm, learned: Sequence[tuple[Trajectory, np.ndarray]], weight: float | None
) -> list[np.ndarray] | None:
    """Advantages of the turns of a group; None if all turns of a trajectory share its advantage.

    That is the case without rewards of turns, without a weight, and if the advantage function
    returns one number per token.

    Args:
        algorithm: a resolved algorithm, see `Algorithm.resolve`.
        learned: trajectories with their advantages, see `advantages.advantages_of`.
        weight: w; None for no credit of turns.

    Returns:
        See `turn_advantages`.
    """
    group = [trajectory for trajectory, _ in learned]
    if weight is None or not has_turn_rewards(group) or any(a.ndim for _, a in learned):
        return None
    alone = algorithm.alone and algorithm.whitened
    return turn_advantages(group, [float(a) for _, a in learned], weight, alone)


def turn_advantages(
    group: Sequence[Trajectory], advantages: Sequence[float], weight: float, alone: bool
) -> list[np.ndarray]:
    """Computes the advantages A_ik of the turns of a group.

    Args:
        group: graded trajectories of one task.
        advantages: A_i of each trajectory.
        weight: w.
        alone: whether A_i is R_i itself, without a baseline: s is 1 and b_k is 0.

    Returns:
        For each trajectory A_ik, float64 ``[turns]``.
    """
    values = np.array([t.reward.value if t.reward else 0.0 for t in group], np.float64)
    whole = np.asarray(advantages, np.float64)
    spread = np.ptp(values)
    scale = 1.0 if alone else (np.ptp(whole) / spread if spread else 0.0)
    rewards = [
        turn_rewards(t) * (weight if t.reward and ENVIRONMENT in t.reward.parts else 0.0)
        for t in group
    ]
    before = np.zeros((len(group), max(map(len, rewards))))  # sum of the rewards before turn k
    for row, of_turns in zip(before, rewards, strict=True):
        row[: len(of_turns)] = np.cumsum(of_turns) - of_turns
        row[len(of_turns) :] = of_turns.sum()
    baseline = 0.0 if alone else before.mean(axis=0)
    found = whole[:, None] - scale * (before - baseline)
    return [row[: len(of_turns)] for row, of_turns in zip(found, rewards, strict=True)]


def spread_over_tokens(mask: np.ndarray, turns: np.ndarray, at_ends: bool) -> np.ndarray:
    """Spreads the advantages of turns over tokens.

    Args:
        mask: 1 where the policy wrote, float32 ``[T]``.
        turns: A_ik of one trajectory, float64 ``[turns]``.
        at_ends: False gives every token of turn k the advantage A_ik.  True gives only its last
            token A_ik - A_i(k+1), for algorithms that sum over later tokens.

    Returns:
        Float32 ``[T]``.
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
    """(start, end) of each run of consecutive policy tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], written.astype(np.int8), [0]))))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
