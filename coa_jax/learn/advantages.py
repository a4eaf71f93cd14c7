"""Advantages: which samples, and which of their tokens, were better than expected.

First come the functions over a group of samples, which configs choose by name and to which those of
your own are equal (`algorithms.ADVANTAGES`, docs/extending.md); then what makes advantages of
single tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from coa_jax.bounds import shown
from coa_jax.errors import UserError
from coa_jax.extensions import tried
from coa_jax.learn.algorithms import Algorithm, marked
from coa_jax.learn.batch import Batch
from coa_jax.trajectory import Trajectory

_BOUND = 20.0  # of differences of log-probabilities


# --- advantages of a group (paper eq 10) ---------------------------------------------------


def advantages_of(
    algorithm: Algorithm, group: Sequence[Trajectory]
) -> list[tuple[Trajectory, np.ndarray]]:
    """The graded trajectories of a group with their advantages.

    A sample that could not be graded neither counts for the others nor learns.

    Args:
        algorithm: resolved.
        group: samples of one task.

    Returns:
        Each graded one with its advantage, float32, for all of its tokens ``[]`` or by token
        ``[T]``.  Where the advantage is `whitened`, rewards stand in their place.

    Raises:
        UserError: the function of the advantage fails, or gives something else than finite numbers.
    """
    graded = [t for t in group if t.reward is not None and t.reward.value is not None]
    if not graded:
        return []
    name, where = algorithm.advantage, "algorithm.advantage"
    values = [t.reward.value for t in graded if t.reward is not None]
    found = tried(
        algorithm.advantage_call,
        name,
        where,
        rewards=np.array(values, np.float64),
        lengths=np.array([t.num_policy_tokens for t in graded]),
        trajectories=graded,
    )
    try:
        given = [np.asarray(value, np.float32) for value in found]
    except (TypeError, ValueError):
        given = []
    fit = len(given) == len(graded) and all(
        value.shape in ((), t.tokens.shape) for value, t in zip(given, graded, strict=True)
    )
    if not fit or not all(np.isfinite(value).all() for value in given):
        raise UserError(
            f"{where}: {name} gave {shown(found)} for the rewards {values}; an advantage gives a "
            f"finite number for each of the {len(graded)} samples, or for each an array of a "
            "number a token"
        )
    if algorithm.of_sequence and any(value.ndim for value in given):
        raise UserError(
            f"{where}: {name} gave a number a token; the ratio of sequences of "
            f"algorithm.loss={algorithm.loss} needs one advantage a sequence: give loss=clip"
        )
    return list(zip(graded, given, strict=True))


def has_signal(rewards: Sequence[float | None] | np.ndarray) -> bool:
    """Whether a group's graded rewards differ, so that its gradient is not zero."""
    return len({reward for reward in rewards if reward is not None}) > 1


def less_mean(rewards: np.ndarray) -> np.ndarray:
    """``R - mean`` (Dr.GRPO, arXiv 2503.20783 §3.2); 0 where rewards do not differ."""
    # The mean of equal numbers need not be that number in floating point.
    return rewards - rewards.mean() if has_signal(rewards) else np.zeros_like(rewards)


def standard_scores(rewards: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    """``(R - mean) / (std + eps)`` (GRPO, arXiv 2402.03300 §4.1.2)."""
    return less_mean(rewards) / (rewards.std() + eps)


def less_others(rewards: np.ndarray) -> np.ndarray:
    """R less the mean of the others: ``(R - mean) n / (n - 1)`` (RLOO, arXiv 2402.14740 eq 5)."""
    return less_mean(rewards) * (len(rewards) / max(len(rewards) - 1, 1))


@marked(whitened=True, alone=True)
def of_step(rewards: np.ndarray) -> np.ndarray:
    """R itself, whitened over the step (REINFORCE++, arXiv 2501.03262)."""
    return rewards


@marked(whitened=True)
def of_step_less_mean(rewards: np.ndarray) -> np.ndarray:
    """``R - mean``, whitened over the step (REINFORCE++ with baseline, arXiv 2501.03262)."""
    return less_mean(rewards)


@marked(critic=True, alone=True)
def of_critic(rewards: np.ndarray) -> np.ndarray:
    """R itself, from which `gae` takes the values of a critic."""
    return rewards


@marked(alone=True)
def nothing(rewards: np.ndarray) -> np.ndarray:
    """0, where a teacher alone says what is better, see `distillation`."""
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
    """Generalised advantage estimation (Schulman et al., arXiv 1506.02438 eq 16).

    ``A_t = d_t + gamma lam A_t'``, ``d_t = r_t + gamma V_t' - V_t``, where t' is the policy's next
    token in the same sequence, with nothing after its last.  Values of 0 and lam 1 give discounted
    sums of rewards.

    Args:
        rewards, values: float32 ``[R, T]``.
        batch: ``mask`` and ``segment_ids`` are read.
        gamma, lam: discount and trace decay.

    Returns:
        Advantages and returns ``A + V``, float32 ``[R, T]``, 0 where the policy did not write.
    """

    def step(carry: tuple[jax.Array, ...], column: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        next_advantage, next_value, next_segment = carry
        reward, value, on, segment = column
        same = segment == next_segment
        delta = reward + gamma * jnp.where(same, next_value, 0.0) - value
        advantage = delta + gamma * lam * jnp.where(same, next_advantage, 0.0)
        found = (advantage, value, segment)
        carry = tuple(jnp.where(on, new, old) for new, old in zip(found, carry, strict=True))
        return carry, jnp.where(on, advantage, 0.0)

    on = jnp.asarray(batch.mask).T > 0
    segments = jnp.asarray(batch.segment_ids).T
    columns = (jnp.where(on, rewards.T, 0.0), jnp.where(on, values.T, 0.0), on, segments)
    zeros = jnp.zeros(on.shape[1], jnp.float32)
    start = (zeros, zeros, jnp.full_like(segments[0], -1))
    advantages: jax.Array
    _, advantages = jax.lax.scan(step, start, columns, reverse=True)
    return advantages.T, jnp.where(on, advantages + columns[1], 0.0).T


def whiten(batches: Sequence[Batch], eps: float = 1e-8) -> list[Batch]:
    """Advantages less their mean, over their standard deviation, over all tokens of the policy.

    Global normalisation as in REINFORCE++ (arXiv 2501.03262); for PPO see Andrychowicz et al.
    (arXiv 2006.05990 §3.5).  Advantages that do not differ become 0.
    """
    sums = [jax.device_get(_sums(b.advantage, b.mask, jnp.float32(0.0))) for b in batches]
    count = max(sum(float(np.sum(s[0])) for s in sums), 1.0)
    mean = sum(float(s[1]) for s in sums) / count
    around = [jax.device_get(_sums(b.advantage, b.mask, jnp.float32(mean))) for b in batches]
    variance = sum(float(s[2]) for s in around) / count
    # Below that it is the rounding of the mean.
    scale = 1.0 / np.sqrt(variance + eps) if variance > (1e-6 * mean) ** 2 else 0.0
    return [
        b._replace(
            advantage=_standardise(b.advantage, b.mask, jnp.float32(mean), jnp.float32(scale))
        )
        for b in batches
    ]


@jax.jit
def _sums(
    advantage: jax.Array, mask: jax.Array, mean: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    centred = jnp.where(mask > 0, advantage - mean, 0.0)
    return jnp.sum(mask), jnp.sum(centred), jnp.sum(centred * centred)


@jax.jit
def _standardise(
    advantage: jax.Array, mask: jax.Array, mean: jax.Array, scale: jax.Array
) -> jax.Array:
    return jnp.where(mask > 0, (advantage - mean) * scale, 0.0)


def distillation(old: ArrayLike, teacher: ArrayLike) -> jax.Array:
    """Advantages ``log p_teacher - log p_old`` of tokens that the policy sampled.

    Their mean is less the reverse KL divergence from the teacher, one token at a time, without a
    sum over later ones (on-policy distillation: Lu et al. 2025, https://thinkingmachines.ai/blog/
    on-policy-distillation; Agarwal et al., arXiv 2306.13649 §3; Gu et al., arXiv 2306.08543 eq 1).
    """
    return jnp.clip(jnp.asarray(teacher) - old, -_BOUND, _BOUND)
