"""Causal attention of plain products, in blocks of queries, for every platform.

Shape letters: see `causal`; t queries of a block, and Q = G * t, those of all heads of a group.

Queries are attended in blocks that read the keys up to their own end only.  As in FlashAttention
(Dao et al., arXiv 2205.14135) the backward pass computes the weights of a block again, from the
logarithms of the softmax's denominators; no scores are kept.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from coa_jax.model.ops import einsum
from coa_jax.model.remat import ATTENTION

_BLOCK = 128
"""Queries that are attended together: keys after the last of them are not even multiplied."""

_MASKED = -1e30


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend_causally(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, dtype: Any
) -> jax.Array:
    """Attention of T tokens to themselves.

    Args:
        q: float32 ``[B, T, N, G, K]``.
        k, v: float32 ``[B, T, N, K]``.
        mask: bool ``[B, T, T]``, which keys a query sees: itself, and none after itself.
        dtype: dtype of the matmul operands.

    Returns:
        float32, like q.
    """
    return _fwd(q, k, v, mask, dtype)[0]


def _fwd(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, dtype: Any
) -> tuple[jax.Array, Any]:
    # Products round their operands to the same values, and the backward pass reads no others.
    scaled = (_heads_first(q) * q.shape[-1] ** -0.5).astype(dtype)
    keys, values = (x.swapaxes(1, 2).astype(dtype) for x in (k, v))
    outs, sums = [], []
    for start, end in _blocks(q.shape[1]):
        scores = _scores(scaled, keys, mask, start, end, dtype)
        largest = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - largest)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        out = einsum("bnqs,bnsk->bnqk", _flat(weights), values[:, :, :end], dtype)
        outs.append(out.reshape(*total.shape[:-1], -1) / total)
        sums.append((largest + jnp.log(total))[..., 0])
    attended = checkpoint_name(jnp.concatenate(outs, axis=3), ATTENTION)
    log_sums = checkpoint_name(jnp.concatenate(sums, axis=3), ATTENTION)
    return _length_first(attended), (scaled, keys, values, mask, attended, log_sums)


def _bwd(dtype: Any, saved: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    scaled, keys, values, mask, attended, log_sums = saved
    # Rounded in both of its products alike: the slopes of a query that sees one key only, and of
    # one whose weight lies on one, are differences of the two that have to vanish.
    d_out = _heads_first(cotangent).astype(dtype)
    inner = jnp.sum(d_out * attended, axis=-1)
    d_queries = []
    d_keys, d_values = (jnp.zeros(x.shape, jnp.float32) for x in (keys, values))
    for start, end in _blocks(mask.shape[1]):
        block = np.s_[:, :, :, start:end]
        # Of a masked score nothing is left: the exponential of -1e30 is 0.
        scores = _scores(scaled, keys, mask, start, end, dtype)
        weights = jnp.exp(scores - log_sums[block][..., None])
        above = _flat(d_out[block])
        slope = einsum("bnqk,bnsk->bnqs", above, values[:, :, :end], dtype)
        d_scores = _flat(weights * (slope.reshape(weights.shape) - inner[block][..., None]))
        d_query = einsum("bnqs,bnsk->bnqk", d_scores, keys[:, :, :end], dtype)
        d_queries.append(d_query.reshape(*weights.shape[:-1], -1))
        d_key = einsum("bnqs,bnqk->bnsk", d_scores, _flat(scaled[block]), dtype)
        d_value = einsum("bnqs,bnqk->bnsk", _flat(weights), above, dtype)
        d_keys = d_keys.at[:, :, :end].add(d_key)
        d_values = d_values.at[:, :, :end].add(d_value)
    d_q = _length_first(jnp.concatenate(d_queries, axis=3)) * scaled.shape[-1] ** -0.5
    return d_q, d_keys.swapaxes(1, 2), d_values.swapaxes(1, 2), None


attend_causally.defvjp(_fwd, _bwd)


def _blocks(length: int) -> list[tuple[int, int]]:
    """First and last + 1 query of each block."""
    return [(start, min(start + _BLOCK, length)) for start in range(0, length, _BLOCK)]


def _heads_first(x: jax.Array) -> jax.Array:
    """``[B, T, N, G, K]`` as ``[B, N, G, T, K]``."""
    return x.transpose(0, 2, 3, 1, 4)


def _length_first(x: jax.Array) -> jax.Array:
    """``[B, N, G, T, K]`` as ``[B, T, N, G, K]``."""
    return x.transpose(0, 3, 1, 2, 4)


def _flat(x: jax.Array) -> jax.Array:
    """``[B, N, G, t, ...]`` as ``[B, N, Q, ...]``: a group is rows of one product with its head."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _scores(
    scaled: jax.Array, keys: jax.Array, mask: jax.Array, start: int, end: int, dtype: Any
) -> jax.Array:
    """Masked scores ``[B, N, G, t, end]`` of a block."""
    queries = scaled[:, :, :, start:end]
    scores = einsum("bnqk,bnsk->bnqs", _flat(queries), keys[:, :, :end], dtype)
    seen = mask[:, None, None, start:end, :end]
    return jnp.where(seen, scores.reshape(*queries.shape[:-1], -1), _MASKED)
