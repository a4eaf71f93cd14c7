"""Where the parameters of a model lie on a mesh."""

from __future__ import annotations

import jax
from jax.sharding import AbstractMesh, Mesh

from coa_jax.model.config import ModelConfig
from coa_jax.model.weights import Params, from_paths, weight_table
from coa_jax.parallel.mesh import DECODE_RULES, RULES, Rules, sharding_for


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


def decode_shardings(config: ModelConfig, mesh: Mesh | AbstractMesh) -> Params:
    """Shardings of the decoding layout, see `weights.unstack_layers`, by the rules of decoding."""

    def place(axes: tuple[str, ...], shape: tuple[int, ...]) -> jax.sharding.NamedSharding:
        return sharding_for(mesh, axes, DECODE_RULES, shape)

    table = {spec.path: spec for spec in weight_table(config)}
    top = {path: place(s.axes, s.shape) for path, s in table.items() if path[0] != "layers"}
    layer = {path[1]: place(s.axes[1:], s.shape[1:]) for path, s in table.items() if len(path) > 1}
    return {**from_paths(top), "layers": (layer,) * config.num_layers}
