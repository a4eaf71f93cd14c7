"""A Triton kernel for NVIDIA GPUs: attention of several new tokens per sequence over a paged cache.

The kernel reads the pages where they are, through the page table, and computes a running softmax
as in FlashAttention (Dao et al., arXiv 2205.14135). The queries of all heads that share a key/value
head form the rows of one matmul, so the kernel reads a page once for many queries.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from coa_jax.parallel.chips import shared_memory

_ROWS, _KEYS = 64, 128
"""Maximum number of queries, and number of keys, that the kernel multiplies at a time.

The sizes, and four warps, are the fastest that were tried on an H100 (see docs/lab_notes.md).
"""

_MASKED = -1e30


def attend(
    q: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    interpret: bool,
    capability: float,
) -> jax.Array:
    """Computes the attention of new tokens over the KV cache, with a Triton kernel.

    A token attends to all positions up to and including its own.

    Args:
        q: queries, divided by the square root of ``head_dim``, in the dtype of the matmuls:
            ``[batch, tokens, kv_heads, group, head_dim]``. A group consists of the query heads
            that share a key/value head.
        table: page numbers of each sequence, int32 ``[batch, max_pages]``.
        lengths: int32 ``[batch]``, number of positions that the last new token of each sequence
            sees. Each earlier new token sees one position less than the token after it.
        keys, values: the cache pages, ``[kv_heads, pages, page_size, head_dim]``. ``page_size`` and
            ``head_dim`` are powers of two, 16 or more.
        interpret: whether the kernel is interpreted, for tests on a CPU.
        capability: compute capability of the GPU for which the kernel is compiled; 0 if unknown.

    Returns:
        The attended values in the shape and dtype of q.
    """
    with warnings.catch_warnings():  # deprecated without a successor (docs/kernels.md)
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import triton

    b, t, n, g, width = q.shape
    count, size = keys.shape[1:3]
    rows = q.transpose(0, 2, 1, 3, 4).reshape(b, n, t * g, width)
    block = min(_ROWS, max(16, pl.next_power_of_2(t * g)))
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, -(t * g) % block), (0, 0)))
    # Small pages are read several at a time.
    together = max(1, _KEYS // size)
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % together)))
    # With three stages the kernel keeps two blocks of keys and values, with two stages one.
    tiles = 2 * (block + 2 * 2 * together * size) * width
    stages = 3 if tiles <= shared_memory(capability) else 2

    def pool() -> Any:
        return pl.BlockSpec((None, count, size, width), lambda i, head, row: (head, 0, 0, 0))

    queries = pl.BlockSpec((None, None, block, width), lambda i, head, row: (row, head, i, 0))
    out = pl.pallas_call(
        functools.partial(_kernel, new=t, groups=g, together=together),
        out_shape=jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        # Blocks of the same sequence and head are next to each other, so that they find in the L2
        # cache the pages that they share.
        grid=(rows.shape[2] // block, n, b),
        in_specs=[
            queries,
            pl.BlockSpec((None, table.shape[1]), lambda i, head, row: (row, 0)),
            pl.BlockSpec((1,), lambda i, head, row: (row,)),
            pool(),
            pool(),
        ],
        out_specs=queries,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=stages),
        interpret=interpret,
        name="paged_prefill",
    )(rows, table, lengths, keys, values)
    return out[:, :, : t * g].reshape(b, n, t, g, width).transpose(0, 2, 1, 3, 4)


def _kernel(
    q_ref: Any,
    table_ref: Any,
    length_ref: Any,
    key_ref: Any,
    value_ref: Any,
    out_ref: Any,
    *,
    new: int,
    groups: int,
    together: int,
) -> None:
    """Computes a block of queries ``[rows, head_dim]`` of one sequence and one key/value head.

    Row r of all blocks together is a query of new token ``r // groups``.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    rows, width = q_ref.shape
    size = key_ref.shape[1]
    step = together * size
    q = q_ref[...]
    first = pl.program_id(0) * rows
    before = length_ref[0] - new  # number of positions before the new tokens
    ends = before + 1 + (first + jnp.arange(rows)) // groups
    # The rows at the end may be padding, and the new tokens may run over the end of the table.
    last = jnp.minimum(first + rows, new * groups) - 1
    end = jnp.minimum(before + 1 + last // groups, table_ref.shape[0] * size)

    def fold(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        largest, total, attended = carry
        pages = table_ref[pl.ds(index * together, together)]
        k = key_ref[pages].reshape(step, width)
        v = value_ref[pages].reshape(step, width)
        visible = (index * step + jnp.arange(step))[None] < ends[:, None]
        scores = jnp.where(visible, triton.dot(q, k.T), _MASKED)
        larger = jnp.maximum(largest, jnp.max(scores, axis=1))
        weights = jnp.exp(scores - larger[:, None])
        keep = jnp.exp(largest - larger)
        total = total * keep + jnp.sum(weights, axis=1)
        attended = attended * keep[:, None] + triton.dot(weights.astype(v.dtype), v)
        return larger, total, attended

    empty = jnp.zeros((rows,), jnp.float32)
    start = (empty + _MASKED, empty, jnp.zeros((rows, width), jnp.float32))
    _, total, attended = jax.lax.fori_loop(0, pl.cdiv(end, step), fold, start)
    out_ref[...] = (attended / total[:, None]).astype(out_ref.dtype)
