"""Rotary positions (arXiv 2104.09864) and the scalings with which models reach longer contexts."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from coa_jax.model.config import ModelConfig


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


def rope_tables(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of positions ``[B, T]``, float32 ``[B, T, 1, 1, K / 2]`` each."""
    angles = positions[..., None].astype(jnp.float32) * rope_frequencies(config)
    return jnp.cos(angles)[:, :, None, None], jnp.sin(angles)[:, :, None, None]


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the two halves of the last axis; ``cos`` and ``sin`` broadcast against them."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
