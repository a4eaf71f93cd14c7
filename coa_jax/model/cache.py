"""The KV cache: keys and values of earlier tokens, stored in pages of positions.

The page table of a sequence lists the page of its positions ``0 .. page_size - 1``, the page of the
next ``page_size`` positions, and so on. Sequences with the same beginning may share pages.
Attention iterates over the pages of all sequences in parallel, up to the last page of the longest
sequence, and adds each page to a running softmax. The contribution of a page depends only on the
page's own sequence, and a page beyond the end of a sequence contributes exactly nothing. The
numerical results of a sequence therefore depend neither on the other sequences of the batch nor on
which pages hold the sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from coa_jax.model.attention import paged
from coa_jax.model.attention.causal import Attend
from coa_jax.model.compute import REFERENCE, Compute
from coa_jax.model.config import ModelConfig


class LayerCache(NamedTuple):
    """The KV cache of one layer, in separate buffers, so that a write copies no other layer.

    Keys and values have different layouts, so that two products read memory in order: the product
    of a token's query with the keys, and the product of the token's attention weights with the
    values. On CPUs, this is twice as fast as storing keys in the layout of the values.

    Attributes:
        keys: ``[pages, kv_heads, head_dim, page_size]``; a page holds ``page_size`` positions.
        values: ``[pages, kv_heads, page_size, head_dim]``.
        key_scales, value_scales: float32 ``[pages, kv_heads, page_size]``, scales of int8 keys and
            values; None for other dtypes.
    """

    keys: jax.Array
    values: jax.Array
    key_scales: jax.Array | None = None
    value_scales: jax.Array | None = None


LayerPages = LayerCache | paged.Pages
"""Pages of one layer, in the layout of the reference implementation or of a kernel."""


class Cache(NamedTuple):
    """The KV cache of all layers, and the page tables of the sequences of a call.

    Attributes:
        layers: pages of each layer.
        table: int32 ``[batch, max_pages]``, page numbers of each sequence, in the order of the
            positions that the pages hold. Entries after a sequence's last page may be any valid
            page number.
    """

    layers: tuple[LayerPages, ...]
    table: jax.Array

    def attention(
        self,
        pages: LayerPages,
        positions: jax.Array,
        compute: Compute,
        window: int | None = None,
    ) -> Attend:
        """Returns the function that computes the attention of one layer over the KV cache.

        The function first writes the keys and values of new tokens to the pages. Then each new
        token attends to all positions of its sequence up to its own.

        Args:
            pages: pages of the layer.
            positions: positions of the new tokens, int32 ``[batch, tokens]``.
            compute: names the attention implementation, which determines the layout of the pages.
            window: number of positions that a token of the layer sees; None for all positions.
        """

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, LayerPages]:
            with jax.named_scope("write"):
                written = write(pages, self.table, k, v, positions, compute)
            with jax.named_scope("attend"):
                return attend_to(written, q, self.table, positions, compute, window), written

        return attend


def cache_size(compute: Compute, cache: Cache) -> int:
    """Returns the maximum number of positions of a sequence in the KV cache.

    A token at a position of this number or more is treated as padding.
    """
    return cache.table.shape[1] * paged.page_size(compute.attention, cache.layers[0])


def page_axis(compute: Compute) -> int:
    """Returns the index of the axis that numbers the pages in the arrays of the KV cache.

    This axis has the same index in the arrays of keys, values and scales.
    """
    return 1 if compute.attention == "pallas_gpu" else 0


def layer_axes(config: ModelConfig, compute: Compute, tensor: int) -> tuple[str | None, ...]:
    """Returns the logical names of the four axes of cached keys, which determine the sharding.

    Only the axis of the heads has a name. All other axes are None, because they are not sharded.
    Cached values have the same names, and scales the first three. If the number of heads is not
    divisible by ``tensor``, the axis of the heads is None too.

    Args:
        config: the architecture.
        compute: names the attention implementation, which determines the layout of the pages.
        tensor: size of the mesh axis ``tensor``.
    """
    heads = None if config.num_kv_heads % tensor else "kv_heads"
    axis = {"xla": 1, "pallas_gpu": 0, "ragged_paged": 2}[compute.attention]
    return tuple(heads if index == axis else None for index in range(4))


def init_layers(
    config: ModelConfig,
    pages: int,
    page_size: int,
    dtype: Any = jnp.float32,
    compute: Compute = REFERENCE,
) -> tuple[LayerPages, ...]:
    """Creates the empty pages of a KV cache, for all layers.

    Args:
        config: the architecture.
        pages: number of pages of each layer.
        page_size: number of positions of a page.
        dtype: dtype of keys and values; for ``int8`` the pages have scales too.
        compute: names the attention implementation, which determines the layout of the pages.
    """
    heads, width = config.num_kv_heads, config.head_dim

    def layer() -> LayerPages:
        if compute.attention == "ragged_paged":
            return (jnp.zeros((pages, page_size, 2 * heads, width), dtype),)
        if compute.attention == "pallas_gpu":
            shape = (heads, pages, page_size, width)
            return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)
        keys = jnp.zeros((pages, heads, width, page_size), dtype)
        values = jnp.zeros((pages, heads, page_size, width), dtype)
        if jnp.dtype(dtype) != jnp.int8:
            return LayerCache(keys, values)
        scales = (jnp.zeros((pages, heads, page_size), jnp.float32) for _ in range(2))
        return LayerCache(keys, values, *scales)

    return tuple(layer() for _ in range(config.num_layers))


def write(
    layer: LayerPages,
    table: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    compute: Compute,
) -> LayerPages:
    """Writes the keys and values of new tokens to the KV cache of one layer.

    Keys and values at positions outside the cache are dropped.

    Args:
        layer: pages of the layer.
        table: int32 ``[batch, max_pages]``, page numbers of each sequence; no two sequences may
            write to the same page.
        k, v: new keys and values ``[batch, tokens, kv_heads, head_dim]``.
        positions: positions of the new tokens, int32 ``[batch, tokens]``.
        compute: names the attention implementation, which determines the layout of the pages.
    """
    index, offset = jnp.divmod(positions, paged.page_size(compute.attention, layer))
    inside = index < table.shape[1]
    page = jnp.take_along_axis(table, jnp.where(inside, index, 0), axis=1)
    # A page number outside the pool, to which scatter drops writes.
    page = jnp.where(inside, page, jnp.iinfo(jnp.int32).max)
    if not isinstance(layer, LayerCache):
        k, v = k.astype(layer[0].dtype), v.astype(layer[0].dtype)
        if compute.attention == "ragged_paged":
            b, t, n, width = k.shape
            pairs = jnp.stack((k, v), axis=3).reshape(b, t, 2 * n, width)
            return (layer[0].at[page, offset].set(pairs, mode="drop"),)
        return tuple(
            pool.at[:, page, offset].set(jnp.moveaxis(x, 2, 0), mode="drop")
            for pool, x in zip(layer, (k, v), strict=True)
        )
    at, scales = (page, slice(None), offset), {}
    if layer.key_scales is None or layer.value_scales is None:
        k, v = k.astype(layer.keys.dtype), v.astype(layer.values.dtype)
    else:
        (k, key_scale), (v, value_scale) = quantize(k), quantize(v)
        scales = {
            "key_scales": layer.key_scales.at[at].set(key_scale, mode="drop"),
            "value_scales": layer.value_scales.at[at].set(value_scale, mode="drop"),
        }
    return layer._replace(
        keys=layer.keys.at[page, :, :, offset].set(k, mode="drop"),
        values=layer.values.at[at].set(v, mode="drop"),
        **scales,
    )


def quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantises vectors along the last axis to int8, with one float32 scale per vector.

    Args:
        x: keys or values, ``[..., head_dim]``.

    Returns:
        The int8 numbers ``[..., head_dim]`` and the scales, float32 ``[...]``. A vector of x is
        approximately its numbers times its scale.
    """
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1), 1e-30) / 127.0
    return jnp.round(x / scale[..., None]).astype(jnp.int8), scale


def attend_to(
    layer: LayerPages,
    q: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    compute: Compute,
    window: int | None = None,
) -> jax.Array:
    """Computes the attention of new tokens over the KV cache of one layer.

    A token attends to the positions up to and including its own.

    Args:
        layer: pages that already hold the keys and values of the new tokens.
        q: queries, ``[batch, tokens, kv_heads, group, head_dim]``. A group consists of the query
            heads that share a key/value head.
        table: int32 ``[batch, max_pages]``, page numbers of each sequence.
        positions: positions of the new tokens, int32 ``[batch, tokens]``; the results of tokens
            outside the cache are meaningless.
        compute: names the attention implementation, which determines the layout of the pages.
        window: number of positions that a token sees, its own and those before; None for all
            positions.

    Returns:
        The attended values, float32, in the shape of q.
    """
    if not isinstance(layer, LayerCache):
        return paged.attend_with_kernel(compute, q, layer, table, positions, window)

    def part(buffer: jax.Array, scales: jax.Array | None, page: jax.Array, axis: int) -> jax.Array:
        values = buffer.at[page].get(mode="promise_in_bounds")
        if scales is None:
            return values
        scale = scales.at[page].get(mode="promise_in_bounds")
        return values.astype(jnp.float32) * jnp.expand_dims(scale, axis)

    def read(page: jax.Array) -> tuple[jax.Array, jax.Array]:
        keys = part(layer.keys, layer.key_scales, page, 2)
        return keys, part(layer.values, layer.value_scales, page, 3)

    return paged.walk(compute, q, read, table, layer.values.shape[2], positions, window)
