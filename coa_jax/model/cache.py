"""Keys and values of earlier tokens, in pages of positions.

Shape letters: B sequences, T new tokens, P pages, S positions of a page, C pages of a sequence, N
key/value heads, G query heads per key/value head, K head width.

A sequence's table says which page holds its positions ``0 .. S - 1``, which one the next S, and so
on; sequences with the same beginning may name the same pages.  Attention walks over the pages of
all sequences in step, as far as the longest one reaches, and folds each page into a running
softmax.  What a page adds depends on its own sequence alone, and a page beyond a sequence's end
adds exactly nothing: the numbers of a sequence depend neither on the other sequences of the batch
nor on where its pages lie.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from coa_jax.model.attention import paged
from coa_jax.model.attention.choice import REFERENCE, Attention
from coa_jax.model.config import ModelConfig


class LayerCache(NamedTuple):
    """Pages of one layer; one buffer per layer and part, so that a write never copies the others.

    Attributes:
        keys: ``[P, N, K, S]``, values: ``[P, N, S, K]``: the layouts in which one token's product
            with either reads memory in order (on CPUs twice as fast as keys like values).
        key_scales, value_scales: float32 ``[P, N, S]`` of int8 keys and values, else None.
    """

    keys: jax.Array
    values: jax.Array
    key_scales: jax.Array | None = None
    value_scales: jax.Array | None = None


Layer = LayerCache | paged.Pages
"""Pages of one layer in the layout of the reference or of a kernel."""


class Cache(NamedTuple):
    """Pages of all layers, and where the sequences of this call have theirs.

    Attributes:
        layers: those of each layer.
        table: int32 ``[B, C]``, pages in the order of their positions.  What stands behind a
            sequence's last page does not matter, so long as it is the number of some page.
    """

    layers: tuple[Layer, ...]
    table: jax.Array


def cache_size(attention: Attention, cache: Cache) -> int:
    """Positions that a sequence may have; a token at or beyond that is padding."""
    first = cache.layers[0]
    if isinstance(first, LayerCache):
        return cache.table.shape[1] * first.values.shape[2]
    return cache.table.shape[1] * paged.page_size(attention.implementation, first)


def page_axis(attention: Attention) -> int:
    """The axis of all buffers of a layer along which its pages lie."""
    return 1 if attention.implementation == "pallas_gpu" else 0


def layer_axes(
    config: ModelConfig, attention: Attention, tensor: int
) -> tuple[str | None, str | None, str | None, str | None]:
    """Logical axes of the buffers of a layer; of scales, which have fewer, the first ones.

    Heads that ``tensor`` devices cannot split stay together, whatever axis they are part of.
    """
    heads = None if config.num_kv_heads % tensor else "kv_heads"
    if attention.implementation == "xla":
        return (None, heads, None, None)
    return paged.pool_axes(attention.implementation, heads)


def init_layers(
    config: ModelConfig,
    pages: int,
    page_size: int,
    dtype: Any = jnp.float32,
    attention: Attention = REFERENCE,
) -> tuple[Layer, ...]:
    """Empty pages of all layers in an implementation's layout; of ``int8`` also their scales."""
    heads, width = config.num_kv_heads, config.head_dim

    def layer() -> Layer:
        if attention.implementation != "xla":
            name = attention.implementation
            return paged.init_pages(name, pages, page_size, heads, width, dtype)
        keys = jnp.zeros((pages, heads, width, page_size), dtype)
        values = jnp.zeros((pages, heads, page_size, width), dtype)
        if jnp.dtype(dtype) != jnp.int8:
            return LayerCache(keys, values)
        scales = (jnp.zeros((pages, heads, page_size), jnp.float32) for _ in range(2))
        return LayerCache(keys, values, *scales)

    return tuple(layer() for _ in range(config.num_layers))


def write(
    layer: Layer,
    table: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    attention: Attention = REFERENCE,
) -> Layer:
    """Puts new keys and values ``[B, T, N, K]`` at their positions ``[B, T]``.

    Those outside the cache are dropped.
    """
    if not isinstance(layer, LayerCache):
        return paged.write_pages(attention.implementation, layer, table, k, v, positions)
    pages, page_size = layer.keys.shape[0], layer.keys.shape[3]
    index, offset = jnp.divmod(positions, page_size)
    inside = index < table.shape[1]
    page = jnp.take_along_axis(table, jnp.where(inside, index, 0), axis=1)
    page = jnp.where(inside, page, pages)
    at = (page, slice(None), offset)
    if layer.key_scales is None or layer.value_scales is None:
        k, v = k.astype(layer.keys.dtype), v.astype(layer.values.dtype)
        scales = {}
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
    """Vectors of the last axis as int8 and one float32 factor each: ``int8 * factor`` is near x."""
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1), 1e-30) / 127.0
    return jnp.round(x / scale[..., None]).astype(jnp.int8), scale


def attend(
    q: jax.Array,
    layer: Layer,
    table: jax.Array,
    positions: jax.Array,
    dtype: Any,
    attention: Attention = REFERENCE,
) -> jax.Array:
    """Attention of new tokens to all positions up to their own.

    Args:
        q: ``[B, T, N, G, K]``.
        layer: already holds the keys and values of the new tokens.
        table: int32 ``[B, C]``.
        positions: int32 ``[B, T]``; of a token outside the cache the result means nothing.
        dtype: of the operands of products.
        attention: the implementation whose layout the layer has.

    Returns:
        float32, like q.
    """
    if not isinstance(layer, LayerCache):
        return paged.attend_paged(attention, q, layer, table, positions, dtype)
    return _attend(q, layer, table, positions, dtype)


def _attend(
    q: jax.Array, layer: LayerCache, table: jax.Array, positions: jax.Array, dtype: Any
) -> jax.Array:
    """`attend` as the reference does it."""

    def part(buffer: jax.Array, scales: jax.Array | None, page: jax.Array, axis: int) -> jax.Array:
        values = buffer.at[page].get(mode="promise_in_bounds")
        if scales is None:
            return values
        scale = scales.at[page].get(mode="promise_in_bounds")
        return values.astype(jnp.float32) * jnp.expand_dims(scale, axis)

    def read(page: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (
            part(layer.keys, layer.key_scales, page, 2),
            part(layer.values, layer.value_scales, page, 3),
        )

    return paged.walk(q, read, table, layer.keys.shape[3], positions, dtype)
