"""Causal attention with ordinary matmuls, in blocks of queries, for every platform.

A block of queries reads only the keys up to the block's own end. As in FlashAttention (Dao et al.,
arXiv 2205.14135), the backward pass computes the scores of a block again, so no scores are stored.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from coa_jax.model.ops import einsum
from coa_jax.model.remat import ATTENTION

_BLOCK = 128
"""Number of queries in a block."""

_MASKED = -1e30


def attend_causally(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    dtype: Any,
    positions: jax.Array | None = None,
    window: Any = None,
) -> jax.Array:
    """Computes causal self-attention over whole sequences, in blocks of queries.

    Args:
        q: queries, float32 ``[batch, length, kv_heads, group, head_dim]``. A group consists of
            the query heads that share a key/value head.
        k, v: keys and values, float32 ``[batch, length, kv_heads, head_dim]``.
        mask: bool ``[batch, length, length]``; ``mask[b, i, j]`` says whether token i sees token j,
            and is False for j > i.
        dtype: dtype of the matmul operands.
        positions: positions of the tokens in their sequences, int32 ``[batch, length]``; None
            without a window.
        window: number of positions that a token sees, its own and those before; an int, or an
            int32 scalar; None for all positions.

    Returns:
        The attended values, float32, in the shape of q.
    """
    # Matmuls round their operands to these values anyway, so it suffices to save the rounded values
    # for the backward pass.
    scaled = (q * q.shape[-1] ** -0.5).transpose(0, 2, 3, 1, 4).astype(dtype)
    keys, values = (x.swapaxes(1, 2).astype(dtype) for x in (k, v))
    # `prevent_cse=False` is safe, because XLA cannot merge the two passes within the scan over
    # layers.
    attend = jax.checkpoint(functools.partial(_attend_block, dtype=dtype), prevent_cse=False)
    length = q.shape[1]
    blocks = [(start, min(start + _BLOCK, length)) for start in range(0, length, _BLOCK)]
    parts = [
        attend(
            scaled[:, :, :, a:b],
            keys[:, :, :b],
            values[:, :, :b],
            mask[:, a:b, :b],
            None if positions is None else (positions[:, a:b], positions[:, :b]),
            window,
        )
        for a, b in blocks
    ]
    attended = checkpoint_name(jnp.concatenate(parts, axis=3), ATTENTION)
    return attended.transpose(0, 3, 1, 2, 4)


def _attend_block(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    positions: tuple[jax.Array, jax.Array] | None,
    window: Any,
    dtype: Any,
) -> jax.Array:
    """Computes the attention of one block of queries; returns float32 in the shape of q.

    The shape of q is ``[batch, kv_heads, group, queries, head_dim]``, that of k and v ``[batch,
    kv_heads, keys, head_dim]``, and that of the mask ``[batch, queries, keys]``. The positions are
    those of the queries ``[batch, queries]`` and those of the keys ``[batch, keys]``.
    """
    if positions is not None:
        # Computed here and not once for all blocks, so that the backward pass saves no mask.
        of_queries, of_keys = positions
        mask = mask & (of_queries[:, :, None] - of_keys[:, None] < window)
    b, n, g, t, width = q.shape
    # The queries of all heads of a group form the rows of one matmul with the keys of the group.
    scores = einsum("bnqk,bnsk->bnqs", q.reshape(b, n, g * t, width), k, dtype)
    scores = jnp.where(mask[:, None, None], scores.reshape(b, n, g, t, -1), _MASKED)
    weights = jax.nn.softmax(scores).reshape(b, n, g * t, -1)
    return einsum("bnqs,bnsk->bnqk", weights, v, dtype).reshape(q.shape)
