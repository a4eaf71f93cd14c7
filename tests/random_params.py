"""Random parameters drawn with NumPy, for which JAX compiles nothing, and small architectures."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from coa_jax.model.config import LinearRope, LocalAttention, ModelConfig
from coa_jax.model.params import Params, specs


def random_params(config: ModelConfig, seed: int = 0) -> Params:
    """Parameters of which all, scales and biases too, deviate by 0.02 from their usual values."""
    rng, usual = np.random.default_rng(seed), 1 - config.norm_offset
    return unflatten_dict(
        {
            path: jnp.asarray(
                rng.normal(usual if path[-1] == "scale" else 0, 0.02, spec.shape).astype("float32")
            )
            for path, spec in specs(config).items()
        }
    )


def gemma3(config: ModelConfig, window: int) -> ModelConfig:
    """A Gemma 3 of the sizes of another architecture, in which every other layer is local."""
    layers = tuple(index % 2 == 0 for index in range(config.num_layers))
    return dataclasses.replace(
        config,
        architecture="gemma3",
        local=LocalAttention(window, layers, rope_theta=100.0),
        rope_scaling=LinearRope(8.0),
        norm_offset=1.0,
        post_norms=True,
        activation="gelu_tanh",
        scale_embeddings=True,
        qkv_bias=False,
        qk_norm=True,
        query_scalar=1.3 * config.head_dim,
    )
