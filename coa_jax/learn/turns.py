"""Credit for the rewards of turns: what a turn's tokens learn from.

The trajectory i of a group has the reward R_i, in which the rewards r_ij of its turns count with
the weight w, and the advantage A_i = s (R_i - b) of the algorithm, where the scale s and the
baseline b are those of the group.  The tokens of turn k have no part in what came before, so they
learn from the return from that turn on,

    G_ik = R_i - w sum_{j<k} r_ij        A_ik = s (G_ik - b_k),  b_k = mean over the group of G_ik

(return-to-go: Williams 1992, https://doi.org/10.1007/BF00992696; Sutton et al. 1999, NIPS 12; for
turns of a language model MT-GRPO, arXiv 2505.11821).  Without rewards of turns A_ik is A_i.

A trajectory that has ended before turn k stays in the mean, with what of its reward is no turn's.
So the baseline of all turns has the same share of a sample's own return, and a policy that decides
when to stop does not change the weight of its turns.  One scale for all turns has the same reason.

Where rewards stand at single tokens (algorithms with ``batch``, ``batch_baseline`` or ``gae``),
each turn has its own at its last token, A_ik - A_i(k+1), which is w r_ik with the baseline's share
taken off: the sum over later tokens, which those algorithms take, is A_ik again, and with a critic
it is generalised advantage estimation over turns (arXiv 1506.02438 eq 16).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coa_jax.learn.algorithms import Algorithm
from coa_jax.tasks import GradersConfig
from coa_jax.tasks.graders import TASKS_OWN
from coa_jax.trajectory import Author, Trajectory

ENVIRONMENT = "environment"
"""The reward that is the sum of the rewards of turns."""


def weight_of_turns(graders: GradersConfig) -> float:
    """Weight of the reward ``environment`` in the value of a trajectory, w of the module."""
    if not graders.rewards:
        return 1.0
    given = graders.rewards.get(ENVIRONMENT, graders.rewards.get(TASKS_OWN))
    return 0.0 if given is None else float(given.get("weight", 1.0))


def turn_rewards(trajectory: Trajectory) -> np.ndarray:
    """Rewards r_ij of the turns of a trajectory, float64, one for each run of policy tokens.

    Each call ends a run; the last run may end without a call.
    """
    of_calls = [call.reward or 0.0 for call in trajectory.tool_calls]
    rewards = np.zeros(max(len(_runs(trajectory.author == Author.POLICY)), len(of_calls)))
    rewards[: len(of_calls)] = of_calls
    return rewards


def has_turn_rewards(group: Sequence[Trajectory]) -> bool:
    """Whether an environment has given a reward for a turn."""
    return any(call.reward is not None for t in group for call in t.tool_calls)


def credited(
    algorithm: Algorithm, learned: Sequence[tuple[Trajectory, np.ndarray]], weight: float | None
) -> list[np.ndarray] | None:
    """`turn_advantages` of a group; None where its tokens learn from the whole.

    That is without rewards of turns, without a weight, and where the advantage is one of tokens
    already.

    Args:
        algorithm: resolved.
        learned: trajectories with their advantages, see `advantages_of`.
        weight: w.
    """
    group = [trajectory for trajectory, _ in learned]
    if weight is None or not has_turn_rewards(group) or any(a.ndim for _, a in learned):
        return None
    alone = algorithm.alone and algorithm.whitened
    return turn_advantages(group, [float(a) for _, a in learned], weight, alone)


def turn_advantages(
    group: Sequence[Trajectory], advantages: Sequence[float], weight: float, alone: bool
) -> list[np.ndarray]:
    """A_ik of each turn, float64, for each trajectory.

    Args:
        group: graded trajectories of one task.
        advantages: A_i.
        weight: w.
        alone: whether A_i is R_i itself, without a baseline: s is 1 and b_k is 0.
    """
    values = np.array([t.reward.value if t.reward else 0.0 for t in group], np.float64)
    whole = np.asarray(advantages, np.float64)
    spread = np.ptp(values)
    scale = 1.0 if alone else (np.ptp(whole) / spread if spread else 0.0)
    rewards = [
        turn_rewards(t) * (weight if t.reward and ENVIRONMENT in t.reward.parts else 0.0)
        for t in group
    ]
    before = np.zeros((len(group), max(map(len, rewards))))  # turn k has what came before it
    for row, of_turns in zip(before, rewards, strict=True):
        row[: len(of_turns)] = np.cumsum(of_turns) - of_turns
        row[len(of_turns) :] = of_turns.sum()
    baseline = 0.0 if alone else before.mean(axis=0)
    found = whole[:, None] - scale * (before - baseline)
    return [row[: len(of_turns)] for row, of_turns in zip(found, rewards, strict=True)]


def spread_over_tokens(mask: np.ndarray, turns: np.ndarray, at_ends: bool) -> np.ndarray:
    """Advantages of tokens, float32 ``[T]``.

    Args:
        mask: 1 where the policy wrote, float32 ``[T]``.
        turns: A_ik.
        at_ends: whether a later sum over tokens gives them, see the module.
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
    """Where each run of the policy's tokens begins and ends."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], written.astype(np.int8), [0]))))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
