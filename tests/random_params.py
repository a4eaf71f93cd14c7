"""Random parameters drawn with NumPy, for which JAX compiles nothing."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from coa_jax.model.config import ModelConfig
from coa_jax.model.params import Params, specs


def random_params(config: ModelConfig, seed: int = 0) -> Params:
    """Parameters of which all, scales and biases too, deviate by 0.02 from their usual values."""
    rng = np.random.default_rng(seed)
    return unflatten_dict(
        {
            path: jnp.asarray(rng.normal(path[-1] == "scale", 0.02, spec.shape).astype("float32"))
            for path, spec in specs(config).items()
        }
    )
