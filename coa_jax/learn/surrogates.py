"""Surrogates of the policy gradient, token by token: PPO's clip, GSPO's and CISPO's.

Each takes float32 ``[R, T]`` arrays that are 0 where the policy did not write and returns a loss
for each token, which `losses.policy_loss` weighs and sums.  ``r`` is the ratio of the policy that
learns to the one that sampled, ``A`` the advantage.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from coa_jax.learn.algorithms import Algorithm
from coa_jax.learn.batch import Batch

_BOUND = 20.0  # of a log-ratio; beyond it exp would overflow


class Surrogate(NamedTuple):
    """A loss for each token and whether its ratio lies beyond the bound that its advantage meets.

    That cuts its gradient off, but not in CISPO, where the bound is one of the weight.

    Attributes:
        loss: float32 ``[R, T]``.
        below: bool ``[R, T]``, the ratio of a token with A < 0 lies under the lower bound.
        above: bool ``[R, T]``, the ratio of a token with A > 0 lies over the upper bound.
    """

    loss: jax.Array
    below: jax.Array
    above: jax.Array


def surrogate(
    algorithm: Algorithm, logp: jax.Array, log_ratio: jax.Array, advantage: jax.Array, batch: Batch
) -> Surrogate:
    """The surrogate that an algorithm names."""
    if algorithm.loss == "clip":
        return clip(algorithm, log_ratio, advantage)
    if algorithm.loss == "sequence_clip":
        return sequence_clip(algorithm, log_ratio, advantage, batch)
    if algorithm.loss == "cispo":
        return cispo(algorithm, logp, log_ratio, advantage)
    raise ValueError(f"no surrogate {algorithm.loss!r}")


def clip(algorithm: Algorithm, log_ratio: jax.Array, advantage: jax.Array) -> Surrogate:
    """PPO's clipped surrogate (arXiv 1707.06347 eq 7), as GRPO (2402.03300) and the paper use it.

    ``-min(r A, clip(r, 1 - low, 1 + high) A)``, with ``high > low`` as in DAPO (2503.14476 eq 8).
    With a dual clip c the loss of a token with A < 0 is at most ``-c A`` (1912.09729 eq 4).
    """
    ratio = jnp.exp(jnp.clip(log_ratio, -_BOUND, _BOUND))
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    loss = jnp.maximum(-advantage * ratio, -advantage * jnp.clip(ratio, low, high))
    if algorithm.dual_clip:
        bounded = jnp.minimum(loss, -advantage * algorithm.dual_clip)
        loss = jnp.where(advantage < 0, bounded, loss)
    return Surrogate(loss, (advantage < 0) & (ratio < low), (advantage > 0) & (ratio > high))


def sequence_clip(
    algorithm: Algorithm, log_ratio: jax.Array, advantage: jax.Array, batch: Batch
) -> Surrogate:
    """GSPO's clipped surrogate (arXiv 2507.18071 eq 5 and 7): one ratio for a whole sequence.

    ``s = exp(mean of log r over the sequence's policy tokens)`` takes the place of r; all tokens of
    a sequence have its loss, so that normalisation by sequence gives the mean over sequences.
    """
    count = segment_sums(batch.mask, batch.segment_ids)
    mean = segment_sums(log_ratio, batch.segment_ids) / jnp.maximum(count, 1.0)
    return clip(algorithm, mean, advantage)


def cispo(
    algorithm: Algorithm, logp: jax.Array, log_ratio: jax.Array, advantage: jax.Array
) -> Surrogate:
    """CISPO (MiniMax-M1, arXiv 2506.13585 eq 4): the weight is clipped, no gradient is.

    ``-stop_gradient(clip(r, 1 - low, 1 + high)) A log p``.
    """
    ratio = jax.lax.stop_gradient(jnp.exp(jnp.clip(log_ratio, -_BOUND, _BOUND)))
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    loss = -jnp.clip(ratio, low, high) * advantage * logp
    return Surrogate(loss, (advantage < 0) & (ratio < low), (advantage > 0) & (ratio > high))


def segment_sums(x: ArrayLike, segment_ids: ArrayLike) -> jax.Array:
    """For each token the sum of ``x [R, T]`` over its own sequence of a packed row."""
    x, ids = jnp.asarray(x), jnp.asarray(segment_ids)
    rows, length = x.shape
    sums = jnp.zeros((rows, length + 1), x.dtype)
    sums = jax.vmap(lambda row, at, value: row.at[at].add(value))(sums, ids, x)
    return jnp.take_along_axis(sums, ids, axis=1)
