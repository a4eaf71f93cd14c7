"""Attention of new tokens over a paged cache: one version for all platforms, and kernels.

All sequences share the pages of the cache. A page table lists, for each sequence, the pages that
hold its positions, in order.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from coa_jax.model.attention import prefill_gpu
from coa_jax.model.attention.choice import platform_of
from coa_jax.model.compute import Compute
from coa_jax.parallel.mesh import split_over

_MASKED = -1e30
"""Score of a key that a query may not see. It is finite, so that no result becomes NaN."""

Pages = tuple[jax.Array, ...]
"""The cache pages of one layer. The attention kernel determines their arrays:

==============  =================================================================================
kernel          arrays
==============  =================================================================================
pallas_gpu      keys, values ``[kv_heads, pages, page_size, head_dim]``
ragged_paged    one ``[pages, page_size, 2 * kv_heads, head_dim]``: a head's keys, its values, the
                next head's keys, ...
==============  =================================================================================
"""


def attend_with_kernel(
    compute: Compute,
    q: jax.Array,
    pages: Pages,
    table: jax.Array,
    positions: jax.Array,
    window: int | None = None,
) -> jax.Array:
    """Computes the attention of new tokens over the KV cache, with a kernel for GPUs or TPUs.

    A token attends to the positions up to and including its own. The keys and values of the new
    tokens must already be in the pages.

    Args:
        compute: name of the kernel, and dtype of its matmuls. On a mesh, the heads are sharded over
            the mesh axis ``tensor``; pages and sequences are not sharded.
        q: queries after the rotary embedding, ``[batch, tokens, kv_heads, group, head_dim]``.
            A group consists of the query heads that share a key/value head.
        pages: cache pages of the layer, in the layout of the kernel, see `Pages`.
        table: page numbers of each sequence, int32 ``[batch, max_pages]``; entries after a
            sequence's last page may be any page number.
        positions: int32 ``[batch, tokens]``, positions of the new tokens. A row holds consecutive
            positions, which may be followed by padding with positions of ``max_pages * page_size``
            or more. The results of padding are finite, but meaningless.
        window: number of positions that a token sees, its own and those before; None for all
            positions.

    Returns:
        The attended values, float32, in the shape of q.
    """
    name, mesh = compute.attention, compute.mesh
    heads = "kv_heads" if mesh is None or q.shape[2] % mesh.shape["tensor"] == 0 else None
    pool = (heads, None, None, None) if name == "pallas_gpu" else (None, None, heads, None)
    kernel = functools.partial(_KERNELS[name], interpret=compute.interpret)
    if name == "pallas_gpu":  # programs are also compiled for devices that this process lacks
        device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
        kernel = functools.partial(kernel, capability=platform_of(device)[1])
    if window is not None:  # only for kernels with windows, see `choice.unmet`
        kernel = functools.partial(kernel, window=window)
    queries = (None, None, heads, None, None)
    run = split_over(mesh, kernel, queries, (None, None), (None,), *(pool for _ in pages))
    # A row that consists of padding reads no more pages than a row whose first position is 0.
    start = positions[:, 0]
    start = jnp.where(start < table.shape[1] * page_size(name, pages), start, 0)
    q = (q * q.shape[-1] ** -0.5).astype(compute.dtype)
    return run(q, table, start + q.shape[1], *pages).astype(jnp.float32)


def page_size(attention: str, pages: Any) -> int:
    """Returns the number of positions of a cache page, for any implementation of attention.

    Args:
        attention: name of the implementation, which determines the layout of the pages.
        pages: the pages of one layer, in this layout.
    """
    return pages[0].shape[1] if attention == "ragged_paged" else pages[1].shape[2]


def walk(
    compute: Compute,
    q: jax.Array,
    read: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    table: jax.Array,
    size: int,
    positions: jax.Array,
    window: int | None = None,
) -> jax.Array:
    """Computes the attention of new tokens over the KV cache, with matmuls and a running softmax.

    Each iteration of a loop reads one page of every sequence. The loop ends after the last page of
    the longest sequence. With a window, the loop begins with the first page that a token sees.

    Args:
        compute: dtype and backend of the computation.
        q: queries after the rotary embedding, ``[batch, tokens, kv_heads, group, head_dim]``.
            A group consists of the query heads that share a key/value head.
        read: function that takes one page number per sequence, int32 ``[batch]``, and returns the
            keys ``[batch, kv_heads, head_dim, page_size]`` and the values ``[batch, kv_heads,
            page_size, head_dim]`` of these pages.
        table: page numbers of each sequence, int32 ``[batch, max_pages]``.
        size: number of positions of a page.
        positions: positions of the new tokens, int32 ``[batch, tokens]``.
        window: number of positions that a token sees, its own and those before; None for all
            positions.

    Returns:
        The attended values, float32, in the shape of q.
    """
    ops, dtype = compute.ops, compute.dtype

    def attend(q: jax.Array, table: jax.Array, positions: jax.Array) -> jax.Array:
        b, t, n, g, width = q.shape
        # The queries of all heads of a group form the rows of one matmul with the group's keys.
        q = q.transpose(0, 2, 3, 1, 4).reshape(b, n, g * t, width) * width**-0.5
        ends = jnp.broadcast_to(positions[:, None, None], (b, 1, g, t)).reshape(b, 1, g * t, 1)
        inside = positions < table.shape[1] * size
        count = jnp.max(jnp.where(inside, positions // size + 1, 0))
        first: Any = 0
        if window is not None:
            earliest = jnp.maximum(positions - window + 1, 0)
            first = jnp.min(jnp.where(inside, earliest // size, count))

        def fold(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            largest, total, attended = carry
            k, v = read(table[:, index])
            visible = (at := index * size + jnp.arange(size)) <= ends
            if window is not None:
                visible &= at > ends - window
            scores = jnp.where(visible, ops.einsum("bnqk,bnks->bnqs", q, k, dtype), _MASKED)
            larger = jnp.maximum(largest, jnp.max(scores, axis=-1, keepdims=True))
            weights = jnp.exp(scores - larger)
            keep = jnp.exp(largest - larger)
            total = total * keep + ops.row_sum(weights)[..., None]
            new = ops.einsum("bnqs,bnsk->bnqk", weights, v, dtype)
            return larger, total, attended * keep + new

        empty = jnp.zeros((b, n, g * t, 1), jnp.float32)
        start = (empty + _MASKED, empty, jnp.zeros(q.shape, jnp.float32))
        _, total, attended = jax.lax.fori_loop(first, count, fold, start)
        return (attended / total).reshape(b, n, g, t, width).transpose(0, 3, 1, 2, 4)

    result: jax.Array = ops.over_rows(attend, q, table, positions)
    return result


# --- kernels -------------------------------------------------------------------------------
#
# A kernel's arguments include scaled q in the dtype of the matmuls, and lengths, int32 [B]: the
# number of positions that the last token of each row sees. The token before the last one sees one
# position less.


def _ragged_paged(
    q: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    pages: jax.Array,
    *,
    interpret: bool,
    window: int | None = None,
) -> jax.Array:
    """Computes attention with the TPU kernel, for any number of new tokens per sequence."""
    from jax.experimental.pallas.ops.tpu import ragged_paged_attention as ops

    b, t, n, g, width = q.shape
    # Block sizes are given explicitly, because the kernel's own table looks up the device of this
    # process rather than the compilation target. 512 positions and 32 tokens fit into the target's
    # memory.
    kernel = functools.partial(
        ops.ragged_paged_attention,
        num_kv_pages_per_block=min(table.shape[1], max(1, 512 // pages.shape[1])),
        num_queries_per_block=min(b * t, 32),
    )
    run: Callable[..., jax.Array] = ops.ref_ragged_paged_attention if interpret else kernel
    out = run(
        q.reshape(b * t, n * g, width),
        pages,
        lengths,
        table,
        jnp.arange(b + 1, dtype=jnp.int32) * t,
        jnp.full((1,), b, jnp.int32),
        sliding_window=window,
    )
    return out.reshape(q.shape)


def _pallas_gpu(
    q: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    interpret: bool,
    capability: float,
) -> jax.Array:
    """Computes attention on a GPU: one new token per sequence with the Triton kernel of JAX.

    Several new tokens are computed with a kernel of this project, because the kernel of JAX takes
    only one.

    If there are few sequences, most of a GPU would be idle. For one new token, the pages of a
    sequence are therefore split into parts, whose results are merged. The table is padded to whole
    parts.
    """
    if q.shape[1] > 1:
        return prefill_gpu.attend(
            q, table, lengths, keys, values, interpret=interpret, capability=capability
        )
    with warnings.catch_warnings():  # deprecated without a successor (docs/kernels.md)
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    b, _, n, g, width = q.shape
    block = max(1, 128 // keys.shape[2])
    parts = min(16, -(-table.shape[1] // block))
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % (block * parts))))
    out = paged_attention(
        q.reshape(b, n * g, width),
        keys,
        values,
        table,
        lengths,
        pages_per_compute_block=block,
        k_splits=parts,
        interpret=interpret,
    )
    return out.reshape(q.shape)


_KERNELS: dict[str, Callable[..., jax.Array]] = {
    "ragged_paged": _ragged_paged,
    "pallas_gpu": _pallas_gpu,
}
