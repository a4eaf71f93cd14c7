"""Advantages of single tokens, in packed rows: generalised advantage estimation and whitening.

Only tokens that the policy wrote are actions.  What the environment wrote between two of them is
part of the transition: it has no value, no reward, no advantage, and takes no part in means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coa_jax.learn.batch import Batch


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
