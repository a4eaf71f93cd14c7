"""Rotary position embeddings: the frequencies, with or without scaling, and the rotation."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from coa_jax.model.config import LinearRope, Llama3Rope, ModelConfig, YarnRope


def frequencies(config: ModelConfig, local: bool = False) -> tuple[jax.Array, float]:
    """Returns the frequency of each rotary component, and a factor for cosines and sines.

    Args:
        config: the architecture.
        local: whether the layer is local, see `config.LocalAttention`.

    Returns:
        The angle per position in radians, float32 ``[head_dim / 2]``, and the attention factor,
        which is 1 except with YaRN.
    """
    half = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    if local and config.local is not None and config.local.rope_theta is not None:
        return 1.0 / config.local.rope_theta**half, 1.0
    inv_freq = 1.0 / config.rope_theta**half
    scaling = config.rope_scaling
    if scaling is None:
        return inv_freq, 1.0
    if isinstance(scaling, LinearRope):
        return inv_freq / scaling.factor, 1.0
    # Fast components stay unchanged, slow components are stretched by the factor, and the
    # components between them are blended.
    if isinstance(scaling, Llama3Rope):
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        turns = scaling.original_max_position * inv_freq / (2 * math.pi)
        stays = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
        attention_factor = 1.0
    else:
        first, last = _blended(scaling, config.head_dim, config.rope_theta)
        index = jnp.arange(config.head_dim // 2, dtype=jnp.float32)
        stays = 1.0 - jnp.clip((index - first) / ((last - first) or 0.001), 0.0, 1.0)
        attention_factor = _attention_factor(scaling)
    return (1 - stays) * inv_freq / scaling.factor + stays * inv_freq, attention_factor


def _blended(scaling: YarnRope, head_dim: int, theta: float) -> tuple[float, float]:
    """Returns the indices of the first and last component that are blended."""

    def index(turns: float) -> float:
        """Returns the (fractional) index of the component with this number of turns."""
        radians = scaling.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(radians) / (2 * math.log(theta))

    first, last = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    return max(first, 0), min(last, head_dim - 1)


def _attention_factor(scaling: YarnRope) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    stretch = math.log(max(scaling.factor, 1.0))
    if scaling.mscale is None or scaling.mscale_all_dim is None:
        return 1 + 0.1 * stretch
    return (1 + 0.1 * scaling.mscale * stretch) / (1 + 0.1 * scaling.mscale_all_dim * stretch)


def rope_tables(
    config: ModelConfig, positions: jax.Array, local: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Computes the cosines and sines with which `apply_rope` rotates queries and keys.

    Args:
        config: the architecture.
        positions: positions of the tokens, int32 ``[batch, length]``.
        local: whether the tables are for local layers.

    Returns:
        Cosines and sines, each float32 ``[batch, length, 1, 1, head_dim / 2]``.
    """
    inv_freq, factor = frequencies(config, local)
    angles = (positions[..., None].astype(jnp.float32) * inv_freq)[:, :, None, None]
    return factor * jnp.cos(angles), factor * jnp.sin(angles)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Applies rotary position embeddings to queries or keys.

    Element i of the first half of a head and element i of the second half form a pair, which is
    rotated.

    Args:
        x: queries or keys, ``[..., head_dim]``.
        cos, sin: cosines and sines from `rope_tables`, ``[..., head_dim / 2]``, which broadcast
            against the halves of x.
    """
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
