"""Where the parameters of a model lie on a mesh."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from coa_jax.model.config import ModelConfig
from coa_jax.model.weights import Params, from_paths, weight_table
from coa_jax.parallel.mesh import RULES, Rules, sharding_for


def param_shardings(config: ModelConfig, mesh: Mesh, rules: Rules = RULES) -> Params:
    """A pytree of shardings in the form of the params."""
    return from_paths(
        {
            spec.path: sharding_for(mesh, spec.axes, rules, spec.shape)
            for spec in weight_table(config)
        }
    )


def shard_params(params: Params, config: ModelConfig, mesh: Mesh, rules: Rules = RULES) -> Params:
    """Places stacked params on the mesh; values and dtypes are kept."""
    return jax.device_put(params, param_shardings(config, mesh, rules))
