"""The state of a training run as shapes and places, without a byte of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from coa_jax.learn.step import OptimizerConfig, TrainState, make_optimizer
from coa_jax.model.config import ModelConfig
from coa_jax.model.lora import LoraBase, LoraConfig, lora_table
from coa_jax.model.sharding import param_shardings
from coa_jax.model.weights import Params, from_paths, init_params
from coa_jax.parallel.mesh import sharding_for


def abstract_params(model: ModelConfig, mesh: Mesh | None) -> Params:
    """Float32 training parameters; without a mesh on the first device."""
    shapes = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    if mesh is None:
        return jax.tree.map(lambda x: _placed(x, _first_device()), shapes)
    return jax.tree.map(_placed, shapes, param_shardings(model, mesh))


def abstract_split(
    model: ModelConfig, lora: LoraConfig, mesh: Mesh | None
) -> tuple[Params, LoraBase | None]:
    """What `model.lora.split` returns: what is trained, and what is kept as it is."""
    params = abstract_params(model, mesh)
    if not lora.rank:
        return params, None
    adapters: dict[tuple[str, ...], Any] = {}
    for spec in lora_table(model, lora):
        place = _first_device() if mesh is None else sharding_for(mesh, spec.axes, shape=spec.shape)
        adapters[spec.path] = jax.ShapeDtypeStruct(spec.shape, jnp.float32, sharding=place)
    return from_paths(adapters), LoraBase(params, lora)


def abstract_state(params: Params, optimizer: OptimizerConfig, mesh: Mesh | None) -> TrainState:
    """What `learn.step.init_state` returns, each array placed as it does."""
    transformation = make_optimizer(optimizer)
    whole: Sharding = jax.tree.leaves(params)[0].sharding
    whole = NamedSharding(mesh, PartitionSpec()) if mesh is not None else whole
    shapes = jax.eval_shape(transformation.init, params)
    places = optax.tree_map_params(
        transformation,
        lambda _, parameter: parameter.sharding,
        shapes,
        params,
        transform_non_params=lambda _: whole,
    )
    counters: list[Any] = [jax.ShapeDtypeStruct((), jnp.int32, sharding=whole) for _ in range(3)]
    return TrainState(params, jax.tree.map(_placed, shapes, places), *counters)


def abstract_critic(
    model: ModelConfig, optimizer: OptimizerConfig, mesh: Mesh | None
) -> TrainState:
    """The same of a critic, see `learn.value.init_critic`."""
    params = abstract_params(model, mesh)
    norm = params["final_norm"]
    body = {name: value for name, value in params.items() if name != "head"}
    whole = norm.sharding if mesh is None else NamedSharding(mesh, PartitionSpec())
    head = jax.ShapeDtypeStruct(norm.shape, jnp.float32, sharding=whole)
    return abstract_state({**body, "value_head": head}, optimizer, mesh)


def _first_device() -> Sharding:
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _placed(x: jax.ShapeDtypeStruct, place: Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
