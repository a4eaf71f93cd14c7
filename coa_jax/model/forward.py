"""One forward pass for training, prefill and decoding.

Shape letters: B batch, T new tokens, S cache positions, D hidden, N key/value heads, G query
heads per key/value head, K head width, F MLP width, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from coa_jax.model import lora
from coa_jax.model.attention.causal import Attend, Unfolded, causal_attention
from coa_jax.model.attention.choice import REFERENCE, Attention
from coa_jax.model.cache import Cache, Layer, attend, write
from coa_jax.model.config import ModelConfig
from coa_jax.model.products import (
    OutputMajor,
    column_sum,
    computed_once,
    multiply,
    project,
    row_sum,
)
from coa_jax.model.remat import MIDDLE, MLP, Remat, rematerialize
from coa_jax.model.rope import apply_rope, frequencies
from coa_jax.model.split_products import STREAM, narrow, widen
from coa_jax.model.weights import Params
from coa_jax.parallel.mesh import constrain

_WEIGHTS = {
    "qkv": ("embed", "kv_heads", None, None),
    "out": ("kv_heads", None, None, "embed"),
    "gate_up": ("embed", None, "mlp"),
    "down": ("mlp", "embed"),
}
"""Logical axes of the matrices of a layer that are split, see `weights.weight_table`."""


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square normalisation over the last axis, in float32."""
    return _rms_norm(eps, x.astype(jnp.float32), scale)


# The gradients of the next two are written out because XLA makes slow loops on CPUs of what
# differentiation gives (docs/findings.md): sums fused with what they add up, and a concatenation
# of padded halves.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rms_norm(eps: float, x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * _inverse_rms(eps, x) * scale


def _inverse_rms(eps: float, x: jax.Array) -> jax.Array:
    return jax.lax.rsqrt(row_sum(x * x)[..., None] / x.shape[-1] + eps)


def _rms_norm_fwd(
    eps: float, x: jax.Array, scale: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _rms_norm(eps, x, scale), (x, scale)


def _rms_norm_bwd(
    eps: float, saved: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, scale = saved
    inverse = _inverse_rms(eps, x)
    x, scaled = x * inverse, g * scale
    dx = inverse * (scaled - x * (row_sum(scaled * x)[..., None] / x.shape[-1]))
    return dx, column_sum(g * x).astype(scale.dtype)


_rms_norm.defvjp(_rms_norm_fwd, _rms_norm_bwd)


@jax.custom_vjp
def swiglu(gate_up: jax.Array) -> jax.Array:
    """``silu(gate) * up`` of both ``[..., 2, F]``, float32 ``[..., F]``."""
    return jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]


def _swiglu_fwd(gate_up: jax.Array) -> tuple[jax.Array, jax.Array]:
    return swiglu(gate_up), gate_up


def _swiglu_bwd(gate_up: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    # One formula for both halves: XLA computes what it has to stack three times as slowly on CPUs.
    share = jax.nn.sigmoid(gate_up[..., :1, :])
    slope = 1 + gate_up[..., :1, :] * (1 - share)
    of_gate = jnp.arange(2)[:, None] == 0
    other = jnp.flip(gate_up, axis=-2)
    return (g[..., None, :] * share * other * jnp.where(of_gate, slope, 1.0),)


swiglu.defvjp(_swiglu_fwd, _swiglu_bwd)


def _layer(
    config: ModelConfig,
    dtype: Any,
    attention: Attention,
    x: jax.Array,
    layer: dict[str, jax.Array],
    cos: jax.Array,
    sin: jax.Array,
    attend_to: Attend | None,
    cache: Layer | None,
    table: jax.Array | None,
    positions: jax.Array,
) -> tuple[jax.Array, Layer | None]:
    """One decoder layer on the residual stream ``x [B,T,D]``; returns it and the new cache.

    On one device x is ``[1,B*T,D]``, and ``cos`` and ``sin`` are like it, see `forward`.
    """
    c = config
    mesh = attention.mesh if cache is None else None

    with jax.named_scope("norm"):
        # Rounded before it is sent to the devices that share the row's products.
        h = rms_norm(x, layer["attn_norm"], c.rms_eps).astype(dtype)
    with jax.named_scope("qkv"):
        qkv = widen(h, layer["qkv"], dtype, mesh, _WEIGHTS["qkv"])
        if "lora" in layer:
            qkv = lora.add_qkv(qkv, h, layer, dtype)
    if c.qkv_bias:
        qkv = qkv + layer["qkv_bias"]
    q, k, v = jnp.split(qkv, (c.num_groups, c.num_groups + 1), axis=3)
    if c.qk_norm:
        q = rms_norm(q, layer["q_norm"], c.rms_eps)
        k = rms_norm(k, layer["k_norm"], c.rms_eps)
    with jax.named_scope("rope"):
        q, k = (apply_rope(x, cos, sin) for x in (q, k))
    k, v = k[:, :, :, 0], v[:, :, :, 0]
    if attend_to is not None:
        attended = attend_to(q, k, v)
    else:
        assert cache is not None
        assert table is not None
        with jax.named_scope("write"):
            cache = write(cache, table, k, v, positions, attention)
        with jax.named_scope("attend"):
            attended = attend(q, cache, table, positions, dtype, attention)
    # Where an operand lies also says where its gradient does.
    attended = constrain(attended.astype(dtype), mesh, "batch", None, "kv_heads", None, None)
    with jax.named_scope("out"):
        x = x + narrow(attended, layer["out"], dtype, mesh, _WEIGHTS["out"])
        if "lora" in layer:
            x = lora.add_one("o", "btngk,ngkd->btd", x, attended, layer, dtype)
    x = checkpoint_name(x, MIDDLE)
    with jax.named_scope("norm"):
        h = rms_norm(x, layer["mlp_norm"], c.rms_eps).astype(dtype)
    with jax.named_scope("mlp"):
        gate_up = widen(h, layer["gate_up"], dtype, mesh, _WEIGHTS["gate_up"])
        if "lora" in layer:
            gate_up = lora.add_gate_up(gate_up, h, layer, dtype)
        gate_up = constrain(gate_up, mesh, "batch", None, None, "mlp")
        # Kept in float32: as bfloat16, XLA converts all layers' at once to float32 on CPUs.
        h = checkpoint_name(swiglu(gate_up), MLP).astype(dtype)
        h = constrain(h, mesh, "batch", None, "mlp")
        x = x + narrow(h, layer["down"], dtype, mesh, _WEIGHTS["down"])
        if "lora" in layer:
            x = lora.add_one("down", "btf,fd->btd", x, h, layer, dtype)
        return x, cache


def forward(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array | np.ndarray,
    positions: jax.Array | np.ndarray,
    segment_ids: jax.Array | np.ndarray | None = None,
    cache: Cache | None = None,
    dtype: Any = jnp.float32,
    remat: Remat = False,
    attention: Attention = REFERENCE,
    unfolded: Unfolded | None = None,
) -> tuple[jax.Array, Cache | None]:
    """Runs the decoder.

    Args:
        params: stacked layers (scanned) or a tuple of per-layer dicts (unrolled; decoding); with
            adapters or without, see `lora.attach`.
        config: the architecture.
        tokens: int32 ``[B, T]``.
        positions: int32 ``[B, T]``; with a cache also where the new keys and values go.
            Positions outside the cache are not written.
        segment_ids: int32 ``[B, T]``; tokens attend within their own segment only.  Without a
            cache; None means one segment a row.
        cache: keys and values of earlier tokens; a token at position p reads positions 0..p.
        dtype: of the operands of products; they accumulate in float32.
        remat: what of a layer's activations the backward pass computes again, see `model.remat`.
        attention: causal without a cache, with one paged.
        unfolded: rows as attention sees them, where sequences share a prompt; without a cache.

    Returns:
        Final hidden states, float32 ``[B, T, D]``, and the new cache (None without one).
    """
    positions = jnp.broadcast_to(jnp.asarray(positions), tokens.shape)
    inv_freq, factor = frequencies(config)
    angles = positions[..., None].astype(jnp.float32) * inv_freq
    cos, sin = (computed_once(factor * f(angles))[:, :, None, None] for f in (jnp.cos, jnp.sin))
    attend_to = None
    if cache is None:
        attend_to = causal_attention(attention, tokens.shape, segment_ids, dtype, unfolded)
    x = params["embed"][tokens].astype(jnp.float32)
    x = constrain(x, attention.mesh if cache is None else None, *STREAM)
    if attend_to is not None and attention.one_device:
        # To all but attention the tokens of one device are one row.  XLA multiplies such matrices
        # on CPUs as they are; of products over two axes, as gradients of weights would be, it
        # copies the operands first.
        x, cos, sin = (a.reshape(1, -1, *a.shape[2:]) for a in (x, cos, sin))
        attend_to = _in_rows(attend_to, tokens.shape)
    step = functools.partial(_layer, config, dtype, attention)
    if isinstance(params["layers"], tuple):
        old = cache.layers if cache is not None else (None,) * len(params["layers"])
        table = cache.table if cache is not None else None
        new = []
        for layer, entry in zip(params["layers"], old, strict=True):
            x, entry = step(x, layer, cos, sin, attend_to, entry, table, positions)
            new.append(entry)
        if cache is not None:
            cache = cache._replace(layers=tuple(entry for entry in new if entry is not None))
    elif cache is not None:
        raise ValueError("a cache needs unstacked layers: see weights.unstack_layers")
    else:
        body = lambda x, layer: (  # noqa: E731
            step(x, layer, cos, sin, attend_to, None, None, positions)[0],
            None,
        )
        x, _ = jax.lax.scan(rematerialize(body, remat), x, params["layers"])
    x = x.reshape(*tokens.shape, -1)
    return rms_norm(x, params["final_norm"], config.rms_eps), cache


def _in_rows(attend_to: Attend, shape: tuple[int, ...]) -> Attend:
    """Attention in rows of ``shape [B, T]`` for arguments ``[1, B * T, ...]``."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        attended = attend_to(*(x.reshape(*shape, *x.shape[2:]) for x in (q, k, v)))
        return attended.reshape(q.shape)

    return attend


@jax.named_scope("head")
def unembed(
    params: Params, config: ModelConfig, hidden: jax.Array, dtype: Any = jnp.float32
) -> jax.Array:
    """Logits, float32 ``[..., V]``, of hidden states ``[..., D]``."""
    if "head" in params:
        return multiply(hidden, params["head"], dtype)
    if isinstance(params["layers"], tuple):
        return multiply(hidden, OutputMajor(params["embed"]), dtype)
    return project("...d,vd->...v", hidden, params["embed"], dtype)
