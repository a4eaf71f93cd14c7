"""One forward pass for training, prefill and decoding.

Shape letters: B batch, T new tokens, S cache positions, D hidden, N key/value heads, G query
heads per key/value head, K head width, F MLP width, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coa_jax.model.config import ModelConfig
from coa_jax.model.weights import Params

Cache = tuple[tuple[jax.Array, jax.Array], ...]
"""Per layer the keys ``[B, N, K, S]`` and the values ``[B, N, S, K]``: the layouts in which one
token's product with either reads memory in order (on CPUs twice as fast as keys like values), and
one buffer per layer, so that a write never copies the others."""


def init_cache(config: ModelConfig, batch: int, size: int, dtype: Any = jnp.float32) -> Cache:
    """An empty cache of ``size`` positions for ``batch`` rows."""
    keys = (batch, config.num_kv_heads, config.head_dim, size)
    values = (batch, config.num_kv_heads, size, config.head_dim)
    return tuple(
        (jnp.zeros(keys, dtype), jnp.zeros(values, dtype)) for _ in range(config.num_layers)
    )


def cache_size(cache: Cache) -> int:
    """Positions that a cache holds."""
    return cache[0][1].shape[2]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _einsum(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """Product in the operands' dtype, accumulated and returned in float32."""
    return jnp.einsum(spec, x, w, preferred_element_type=jnp.float32)


def _einsum_fwd(
    spec: str, x: jax.Array, w: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _einsum(spec, x, w), (x, w)


def _einsum_bwd(
    spec: str, operands: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # Without this the backward products would mix a float32 cotangent with bfloat16 operands
    # and run at float32 speed.
    x, w = operands
    inputs, out = spec.split("->")
    a, b = inputs.split(",")
    g = g.astype(x.dtype)
    dx = jnp.einsum(f"{out},{b}->{a}", g, w, preferred_element_type=jnp.float32)
    dw = jnp.einsum(f"{a},{out}->{b}", x, g, preferred_element_type=jnp.float32)
    return dx.astype(x.dtype), dw.astype(w.dtype)


_einsum.defvjp(_einsum_fwd, _einsum_bwd)


def project(spec: str, x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    """``einsum(spec, x, w)`` with operands in ``dtype`` and a float32 result.

    In float32 the products are exact float32 on every platform; the default of TPUs and of
    GPUs with TF32 would round the operands.
    """
    if jnp.dtype(dtype) == jnp.float32:
        return jnp.einsum(
            spec, x.astype(jnp.float32), w.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
        )
    return _einsum(spec, x.astype(dtype), w.astype(dtype))


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square normalisation over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def rope_frequencies(config: ModelConfig) -> jax.Array:
    """Inverse frequencies ``[K / 2]`` in float32, with Llama-3 scaling where configured."""
    half = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    inv_freq = 1.0 / config.rope_theta**half
    scaling = config.rope_scaling
    if scaling is None:
        return inv_freq
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position * inv_freq / (2 * math.pi)
    # Fast components stay, slow ones are stretched by the factor, those between are blended.
    blend = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - blend) * inv_freq / scaling.factor + blend * inv_freq


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the two halves of the last axis; ``cos``/``sin`` broadcast against them."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


_BLOCK = 128
"""Queries that are attended together without a cache: later keys are not even multiplied."""


def _attend_causal(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, dtype: Any
) -> jax.Array:
    """As `_attend` for a lower triangular mask: a block of queries reads the keys up to its end."""
    length = q.shape[1]
    k = jnp.swapaxes(k, 2, 3)
    if length % _BLOCK:
        return _attend(q, k, v, mask, dtype)
    blocks = []
    for end in range(_BLOCK, length + 1, _BLOCK):
        rows = slice(end - _BLOCK, end)
        blocks.append(_attend(q[:, rows], k[..., :end], v[:, :, :end], mask[:, rows, :end], dtype))
    return jnp.concatenate(blocks, axis=1)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, dtype: Any) -> jax.Array:
    """q ``[B,T,N,G,K]``, k ``[B,N,K,S]``, v ``[B,N,S,K]``, mask ``[B,T,S]`` -> like q."""
    b, t, n, g, width = q.shape
    # The queries of a group are rows of one product with their head's keys.
    q = q.transpose(0, 2, 3, 1, 4).reshape(b, n, g * t, width) * width**-0.5
    scores = project("bnqk,bnks->bnqs", q, k, dtype).reshape(b, n, g, t, -1)
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -1e30), axis=-1)
    attended = project("bnqs,bnsk->bnqk", weights.reshape(b, n, g * t, -1), v, dtype)
    return attended.reshape(b, n, g, t, width).transpose(0, 3, 1, 2, 4)


def _layer(
    config: ModelConfig,
    dtype: Any,
    x: jax.Array,
    layer: dict[str, jax.Array],
    cos: jax.Array,
    sin: jax.Array,
    mask: jax.Array,
    cache: tuple[jax.Array, jax.Array] | None,
    positions: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
    """One decoder layer on the residual stream ``x [B,T,D]``; returns it and the new cache."""
    c = config
    h = rms_norm(x, layer["attn_norm"], c.rms_eps)
    qkv = project("btd,dnhk->btnhk", h, layer["qkv"], dtype)
    if c.qkv_bias:
        qkv = qkv + layer["qkv_bias"]
    q, k, v = jnp.split(qkv, (c.num_groups, c.num_groups + 1), axis=3)
    if c.qk_norm:
        q = rms_norm(q, layer["q_norm"], c.rms_eps)
        k = rms_norm(k, layer["k_norm"], c.rms_eps)
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    k, v = (jnp.swapaxes(part[:, :, :, 0], 1, 2) for part in (k, v))
    if cache is None:
        attended = _attend_causal(q, k, v, mask, dtype)
    else:
        k, v = cache = _write(cache, k, v, positions)
        attended = _attend(q, k, v, mask, dtype)
    x = x + project("btngk,ngkd->btd", attended, layer["out"], dtype)
    h = rms_norm(x, layer["mlp_norm"], c.rms_eps)
    gate_up = project("btd,dgf->btgf", h, layer["gate_up"], dtype)
    h = jax.nn.silu(gate_up[:, :, 0]) * gate_up[:, :, 1]
    return x + project("btf,fd->btd", h, layer["down"], dtype), cache


def _write(
    cache: tuple[jax.Array, jax.Array], k: jax.Array, v: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Puts new keys and values ``[B,N,T,K]`` at their positions; those out of range are dropped."""
    rows = jnp.arange(positions.shape[0])[:, None]
    keys, values = cache
    k, v = (jnp.swapaxes(new, 1, 2).astype(keys.dtype) for new in (k, v))
    keys = keys.at[rows, :, :, positions].set(k, mode="drop")
    return keys, values.at[rows, :, positions].set(v, mode="drop")


def forward(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array | np.ndarray,
    positions: jax.Array | np.ndarray,
    segment_ids: jax.Array | np.ndarray | None = None,
    cache: Cache | None = None,
    dtype: Any = jnp.float32,
    remat: bool = False,
) -> tuple[jax.Array, Cache | None]:
    """Runs the decoder.

    Args:
        params: stacked layers (scanned) or a tuple of per-layer dicts (unrolled; decoding).
        config: the architecture.
        tokens: int32 ``[B, T]``.
        positions: int32 ``[B, T]``; with a cache also where the new keys and values go.
            Positions outside the cache are not written.
        segment_ids: int32 ``[B, T]``; tokens attend within their own segment only.  Without a
            cache; None means one segment a row.
        cache: keys and values of earlier tokens, which may be longer than what is valid: a
            token at position p reads cache positions 0..p.
        dtype: of the operands of products; they accumulate in float32.
        remat: whether to recompute a layer's activations in the backward pass.

    Returns:
        Final hidden states, float32 ``[B, T, D]``, and the new cache (None without one).
    """
    positions = jnp.asarray(positions)
    angles = positions[..., None].astype(jnp.float32) * rope_frequencies(config)
    cos, sin = (f(angles)[:, :, None, None] for f in (jnp.cos, jnp.sin))
    if cache is None:
        steps = jnp.arange(tokens.shape[1])
        mask = jnp.broadcast_to(steps[:, None] >= steps, (tokens.shape[0], steps.size, steps.size))
        if segment_ids is not None:
            mask &= segment_ids[:, :, None] == segment_ids[:, None, :]
    else:
        mask = jnp.arange(cache_size(cache)) <= positions[..., None]
    x = params["embed"][tokens].astype(jnp.float32)
    step = functools.partial(_layer, config, dtype)
    if isinstance(params["layers"], tuple):
        old = cache if cache is not None else (None,) * len(params["layers"])
        new = []
        for layer, entry in zip(params["layers"], old, strict=True):
            x, entry = step(x, layer, cos, sin, mask, entry, positions)
            new.append(entry)
        cache = tuple(entry for entry in new if entry is not None) or None
    elif cache is not None:
        raise ValueError("a cache needs unstacked layers: see weights.unstack_layers")
    else:
        body = lambda x, layer: (step(x, layer, cos, sin, mask, None, positions)[0], None)  # noqa: E731
        x, _ = jax.lax.scan(jax.checkpoint(body) if remat else body, x, params["layers"])
    return rms_norm(x, params["final_norm"], config.rms_eps), cache


def unembed(
    params: Params, config: ModelConfig, hidden: jax.Array, dtype: Any = jnp.float32
) -> jax.Array:
    """Logits, float32 ``[..., V]``, of hidden states ``[..., D]``."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    if "head" in params:
        flat = project("xd,dv->xv", flat, params["head"], dtype)
    else:
        flat = project("xd,vd->xv", flat, params["embed"], dtype)
    return flat.reshape(*hidden.shape[:-1], config.vocab_size)
