"""Advantage estimators: how much better each sample, or each token, was than expected.

The first part of the module has estimators that compare the samples of a group. A config selects an
estimator by name, or names a function of your own by its import path (`algorithms.ADVANTAGES`,
docs/extending.md). The second part computes advantages of single tokens: GAE, whitening, and the
advantages that a teacher gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from coa_jax.config.extensions import explain_errors_of
from coa_jax.config.fields import format_value
from coa_jax.data.trajectory import Trajectory
from coa_jax.errors import UserError
from coa_jax.train.algorithms import Algorithm, marked
from coa_jax.train.batch import Batch

_BOUND = 20.0  # largest absolute difference of two log-probabilities


# --- advantages of a group (eq 10 of the Chain-of-Agents paper) ----------------------------


def advantages_of(
    algorithm: Algorithm, group: Sequence[Trajectory]
) -> list[tuple[Trajectory, np.ndarray]]:
    """Computes the advantages of the graded trajectories of a group.

    A sample that could not be graded gets no advantage, and does not enter the baseline of the
    other samples.

    Args:
        algorithm: algorithm with all settings filled in, see `Algorithm.resolve`.
        group: the samples of one task.

    Returns:
        Pairs of a graded trajectory and its advantage, float32. The advantage is a scalar ``[]``
        that holds for all tokens, or an array ``[T]`` with one number per token. If
        `Algorithm.whitened` is true, each pair holds rewards in place of advantages, which
        `experience.complete_experience` turns into advantages of tokens.

    Raises:
        UserError: the advantage function fails, or returns a number that is not finite or an array
            of another shape.
    """
    graded = [t for t in group if t.reward is not None and t.reward.value is not None]
    if not graded:
        return []
    name, where = algorithm.advantage, "algorithm.advantage"
    values = [t.reward.value for t in graded if t.reward is not None]
    with explain_errors_of(algorithm.advantage_call, name, where):
        returned = algorithm.advantage_call(
            rewards=np.array(values, np.float64),
            lengths=np.array([t.num_policy_tokens for t in graded]),
            trajectories=graded,
        )
    try:
        arrays = [np.asarray(value, np.float32) for value in returned]
    except (TypeError, ValueError):
        arrays = []
    fit = len(arrays) == len(graded) and all(
        value.shape in ((), t.tokens.shape) for value, t in zip(arrays, graded, strict=True)
    )
    if not fit or not all(np.isfinite(value).all() for value in arrays):
        raise UserError(
            f"{where}: {name} returned {format_value(returned)} for the rewards {values}; an "
            f"advantage function returns, for each of the {len(graded)} samples, a finite number "
            "or an array with a finite number per token"
        )
    if algorithm.of_sequence and any(value.ndim for value in arrays):
        raise UserError(
            f"{where}: {name} returned a number per token; the sequence-level ratio of "
            f"algorithm.loss={algorithm.loss} needs one advantage per sequence: give loss=clip"
        )
    return list(zip(graded, arrays, strict=True))


def has_signal(rewards: Sequence[float | None] | np.ndarray) -> bool:
    """Returns whether the graded rewards of a group differ, so that the group can train the policy.

    If all rewards are equal, all advantages of the group are zero. Samples without a reward (None)
    are ignored.
    """
    return len({reward for reward in rewards if reward is not None}) > 1


def less_mean(rewards: np.ndarray) -> np.ndarray:
    """Subtracts the mean reward of a group: ``R - mean(R)`` (Dr. GRPO, arXiv 2503.20783 §3.2).

    Args:
        rewards: rewards of the samples of one task, float ``[samples]``.

    Returns:
        Advantages ``[samples]``; exactly 0 if all rewards are equal.
    """
    # In floating point the mean of equal numbers may differ from them in the last bit.
    return rewards - rewards.mean() if has_signal(rewards) else np.zeros_like(rewards)


def standard_scores(rewards: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    """Standardises rewards within a group: ``(R - mean(R)) / (std(R) + eps)``.

    This is the advantage of GRPO (arXiv 2402.03300 §4.1.2).

    Args:
        rewards: rewards of the samples of one task, float ``[samples]``.
        eps: number that is added to the standard deviation.
    """
    return less_mean(rewards) / (rewards.std() + eps)


def less_others(rewards: np.ndarray) -> np.ndarray:
    """Subtracts from each reward the mean reward of the other samples of the group.

    For n samples, the result is ``(R - mean(R)) n / (n - 1)``.

    This is the advantage of RLOO (arXiv 2402.14740 eq 5).
    """
    return less_mean(rewards) * (len(rewards) / max(len(rewards) - 1, 1))


@marked(whitened=True, alone=True)
def of_step(rewards: np.ndarray) -> np.ndarray:
    """Returns the rewards unchanged; `gae` and `whiten` later compute advantages from them.

    `whiten` standardises the advantages over the whole step.
    This is the advantage of REINFORCE++ (arXiv 2501.03262).
    """
    return rewards


@marked(whitened=True)
def of_step_less_mean(rewards: np.ndarray) -> np.ndarray:
    """Returns ``R - mean(R)``, from which `gae` and `whiten` later compute advantages.

    `whiten` standardises the advantages over the whole step.
    This is the advantage of REINFORCE++ baseline (arXiv 2501.03262).
    """
    return less_mean(rewards)


@marked(critic=True, alone=True)
def of_critic(rewards: np.ndarray) -> np.ndarray:
    """Returns the rewards unchanged; `gae` later computes advantages with a critic's values."""
    return rewards


@marked(alone=True)
def nothing(rewards: np.ndarray) -> np.ndarray:
    """Returns 0 for every sample; all advantages then come from a teacher, see `distillation`."""
    return np.zeros_like(rewards)


# --- advantages of tokens ------------------------------------------------------------------


def gae(
    rewards: jax.Array,
    values: jax.Array | np.ndarray,
    batch: Batch,
    *,
    gamma: float,
    lam: float,
) -> tuple[jax.Array, jax.Array]:
    """Computes advantages by generalised advantage estimation (arXiv 1506.02438 eq 16).

    ``A_t = d_t + gamma lam A_t'`` with ``d_t = r_t + gamma V_t' - V_t``, where t' is the next
    policy token in the same sequence; ``A_t'`` and ``V_t'`` are 0 after the last policy token. If
    all values V are 0 and ``lam`` is 1, the advantages are discounted sums of rewards.

    Args:
        rewards: reward at each token, float32 ``[R, T]`` for R packed rows of T tokens.
        values: value of the state before each token, float32 ``[R, T]``; zeros without a critic.
        batch: the packed rows; the function reads only ``mask`` and ``segment_ids``.
        gamma: discount factor.
        lam: trace decay (lambda).

    Returns:
        The advantages A and the returns A + V. Each of the two arrays is float32 ``[R, T]``, and is
        0 at tokens that the policy did not write.
    """

    def step(carry: tuple[jax.Array, ...], column: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        next_advantage, next_value, next_segment = carry
        reward, value, on, segment = column
        same = segment == next_segment
        delta = reward + gamma * jnp.where(same, next_value, 0.0) - value
        advantage = delta + gamma * lam * jnp.where(same, next_advantage, 0.0)
        current = (advantage, value, segment)
        carry = tuple(jnp.where(on, new, old) for new, old in zip(current, carry, strict=True))
        return carry, jnp.where(on, advantage, 0.0)

    on = jnp.asarray(batch.mask).T > 0
    segments = jnp.asarray(batch.segment_ids).T
    columns = (jnp.where(on, rewards.T, 0.0), jnp.where(on, values.T, 0.0), on, segments)
    zeros = jnp.zeros(on.shape[1], jnp.float32)
    start = (zeros, zeros, jnp.full_like(segments[0], -1))
    advantages: jax.Array
    _, advantages = jax.lax.scan(step, start, columns, reverse=True)
    return advantages.T, jnp.where(on, advantages + columns[1], 0.0).T


def whiten(batches: Sequence[Batch]) -> list[Batch]:
    """Standardises advantages to mean 0 and variance 1 over all policy tokens of a step.

    REINFORCE++ calls this global normalisation (arXiv 2501.03262); for PPO see Andrychowicz et al.
    (arXiv 2006.05990 §3.5). If all advantages are equal, they become 0.

    Args:
        batches: all micro-batches of the step; the function reads only ``advantage``, ``mask`` and
            ``copies``.

    Returns:
        The batches with standardised advantages, which are 0 at tokens that the policy did not
        write.
    """

    def moments(mean: float) -> np.ndarray:
        each = [jax.device_get(_moments(b.advantage, b.counts, jnp.float32(mean))) for b in batches]
        count, *sums = np.sum(np.asarray(each, np.float64), axis=0)
        return np.asarray(sums) / max(count, 1.0)

    mean, _ = moments(0.0)
    _, variance = moments(mean)
    # A smaller variance is rounding error of the mean.
    scale = 1.0 / np.sqrt(variance + 1e-8) if variance > (1e-6 * mean) ** 2 else 0.0
    how = jnp.float32(mean), jnp.float32(scale)
    return [b._replace(advantage=_standardise(b.advantage, b.mask, *how)) for b in batches]


@jax.jit
def _moments(
    advantage: jax.Array, counts: jax.Array, mean: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the number of policy tokens, and the sums of their differences to a mean.

    The second of the two sums is that of the squared differences.
    """
    centred = jnp.where(counts > 0, advantage - mean, 0.0)
    return jnp.sum(counts), jnp.sum(counts * centred), jnp.sum(counts * centred * centred)


@jax.jit
def _standardise(
    advantage: jax.Array, mask: jax.Array, mean: jax.Array, scale: jax.Array
) -> jax.Array:
    return jnp.where(mask > 0, (advantage - mean) * scale, 0.0)


def distillation(old: ArrayLike, teacher: ArrayLike) -> jax.Array:
    """Returns the advantages ``log p_teacher - log p_old`` of tokens that the policy sampled.

    The expectation of the advantage at a token is the negative reverse KL divergence of the two
    distributions at this token, ``-KL(old || teacher)``. The advantage of a token does not depend
    on the tokens after it. This is on-policy distillation (Lu et al. 2025,
    https://thinkingmachines.ai/blog/on-policy-distillation; Agarwal et al., arXiv 2306.13649 §3; Gu
    et al., arXiv 2306.08543 eq 1).

    Args:
        old: log-probabilities of the tokens under the old policy, float32 ``[R, T]``.
        teacher: log-probabilities of the same tokens under the teacher, float32 ``[R, T]``.

    Returns:
        Advantages, float32 ``[R, T]``, clipped to the range from -20 to 20.
    """
    return jnp.clip(jnp.asarray(teacher) - old, -_BOUND, _BOUND)
