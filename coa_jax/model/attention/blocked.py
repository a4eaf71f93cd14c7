"""Causal attention of plain products, in blocks of queries, for every platform.

Shape letters: see `causal`; Q is the queries of a block with those of its group, G * t of them.

Queries are attended in blocks that read the keys up to their own end only.  As in FlashAttention
(Dao et al., arXiv 2205.14135) the backward pass computes the weights of a block again, from the
logarithms of the softmax's denominators; no scores are kept.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from coa_jax.model.products import project
from coa_jax.model.remat import ATTENTION

_BLOCK = 128
"""Queries that are attended together: later keys are not even multiplied."""

_MASKED = -1e30


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend_causally(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, dtype: Any
) -> jax.Array:
    """Attention of the first T tokens to themselves.

    Args:
        q: float32 ``[B, T, N, G, K]``.
        k, v: float32 ``[B, T, N, K]``.
        mask: bool ``[B, T, T]``, which keys a query sees; none after itself.
        dtype: of the operands of products.

    Returns:
        float32, like q.
    """
    return _fwd(q, k, v, mask, dtype)[0]


def _fwd(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, dtype: Any
) -> tuple[jax.Array, Any]:
    scaled, keys, values = (
        _queries_first(q) * q.shape[-1] ** -0.5,
        k.swapaxes(1, 2),
        v.swapaxes(1, 2),
    )
    outs, sums = [], []
    for start, end in _blocks(q.shape[1]):
        scores = _scores(scaled, keys, mask, start, end, dtype)
        largest = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - largest)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        out = project("bnqs,bnsk->bnqk", _flat(weights), values[:, :, :end], dtype)
        outs.append(out.reshape(*total.shape[:-1], -1) / total)
        sums.append((largest + jnp.log(total))[..., 0])
    attended = checkpoint_name(jnp.concatenate(outs, axis=3), ATTENTION)
    log_sums = checkpoint_name(jnp.concatenate(sums, axis=3), ATTENTION)
    return attended.transpose(0, 3, 1, 2, 4), (q, k, v, mask, attended, log_sums)


def _bwd(dtype: Any, saved: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    q, k, v, mask, attended, log_sums = saved
    scale = q.shape[-1] ** -0.5
    scaled, keys, values = _queries_first(q) * scale, k.swapaxes(1, 2), v.swapaxes(1, 2)
    d_out = _queries_first(cotangent)
    inner = jnp.sum(d_out * attended, axis=-1)
    d_queries, d_keys, d_values = [], jnp.zeros_like(keys), jnp.zeros_like(values)
    for start, end in _blocks(q.shape[1]):
        block = (slice(None),) * 3 + (slice(start, end),)
        # Of a masked score nothing is left: the exponential of -1e30 is 0.
        scores = _scores(scaled, keys, mask, start, end, dtype)
        weights = jnp.exp(scores - log_sums[block][..., None])
        above = _flat(d_out[block])
        slope = project("bnqk,bnsk->bnqs", above, values[:, :, :end], dtype)
        d_scores = _flat(weights * (slope.reshape(weights.shape) - inner[block][..., None]))
        d_query = project("bnqs,bnsk->bnqk", d_scores, keys[:, :, :end], dtype)
        d_queries.append(scale * d_query.reshape(*weights.shape[:-1], -1))
        d_key = project("bnqs,bnqk->bnsk", d_scores, _flat(scaled[block]), dtype)
        d_value = project("bnqs,bnqk->bnsk", _flat(weights), above, dtype)
        d_keys = d_keys.at[:, :, :end].add(d_key)
        d_values = d_values.at[:, :, :end].add(d_value)
    d_q = jnp.concatenate(d_queries, axis=3).transpose(0, 3, 1, 2, 4)
    return d_q, d_keys.swapaxes(1, 2), d_values.swapaxes(1, 2), None


attend_causally.defvjp(_fwd, _bwd)


def _blocks(length: int) -> list[tuple[int, int]]:
    """First and last + 1 query of each block."""
    return [(start, min(start + _BLOCK, length)) for start in range(0, length, _BLOCK)]


def _queries_first(x: jax.Array) -> jax.Array:
    """``[B, T, N, G, K]`` as ``[B, N, G, T, K]``."""
    return x.transpose(0, 2, 3, 1, 4)


def _flat(x: jax.Array) -> jax.Array:
    """``[B, N, G, t, ...]`` as ``[B, N, Q, ...]``: a group is rows of one product with its head."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _scores(
    scaled: jax.Array, keys: jax.Array, mask: jax.Array, start: int, end: int, dtype: Any
) -> jax.Array:
    """Masked scores ``[B, N, G, t, end]`` of a block."""
    queries = scaled[:, :, :, start:end]
    scores = project("bnqk,bnsk->bnqs", _flat(queries), keys[:, :, :end], dtype)
    seen = mask[:, None, None, start:end, :end]
    return jnp.where(seen, scores.reshape(*queries.shape[:-1], -1), _MASKED)
