"""Where decoding happens: groups of devices, and what of an engine lies on them.

A group of ``tensor`` devices of one process holds a copy of the parameters, split by heads, MLP
width and vocabulary, and serves an engine of its own.  Groups share nothing, so that none of them
ever waits for another.  Training parameters, which all devices of all processes hold in parts,
become the copies of all groups in one compiled program.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from coa_jax.engine.config import EngineConfig
from coa_jax.errors import UserError
from coa_jax.model.attention.choice import Attention, Case, platform_of, resolve
from coa_jax.model.cache import Layer, init_layers, layer_axes
from coa_jax.model.config import ModelConfig
from coa_jax.model.sharding import decode_shardings
from coa_jax.model.weights import Params, unstack_layers
from coa_jax.parallel.mesh import AXES, DECODE_RULES, sharding_for


def decode_mesh(mesh: Mesh, tensor: int = 0) -> Mesh:
    """The devices of a training mesh as groups for decoding: axis ``data`` counts the groups.

    Args:
        mesh: of training.
        tensor: devices of a group; 0 for as many as training splits a layer over.

    Raises:
        UserError: the devices cannot be split like that, or a group would span processes: an
            engine and its tools belong to one process.
    """
    tensor = tensor or mesh.shape["tensor"]
    devices = mesh.devices.reshape(-1)
    if tensor < 1 or devices.size % tensor:
        raise UserError(f"mesh.decode_tensor is {tensor}: it must divide {devices.size} devices")
    groups = devices.reshape(-1, 1, tensor)
    for group in groups.reshape(-1, tensor):
        if len({device.process_index for device in group}) > 1:
            raise UserError(
                f"{tensor} devices that decode together span processes: set mesh.decode_tensor to "
                f"a divisor of the {jax.local_device_count()} devices of a process"
            )
    return Mesh(groups, AXES, axis_types=(AxisType.Auto,) * 3)


def publish(params: Params, model: ModelConfig, dtype: str, tensor: int = 0) -> list[Params]:
    """Copies training parameters into the decoding layout, one for each group of this process.

    With several processes, all of them call this.

    Args:
        params: stacked, on one device or on a training mesh.
        model: the architecture.
        dtype: of the copies.
        tensor: see `decode_mesh`.
    """
    mesh = _mesh_of(params)
    if mesh is None:
        return [_publish(model, dtype, None)(params)]
    mesh = decode_mesh(mesh, tensor)
    everywhere = _publish(model, dtype, mesh)(params)
    return [
        jax.tree.map(functools.partial(_part, devices=group), everywhere)
        for group in mesh.devices.reshape(-1, mesh.shape["tensor"])
        if group[0].process_index == jax.process_index()
    ]


@functools.lru_cache
def _publish(model: ModelConfig, dtype: str, mesh: Mesh | None) -> Any:
    """One compiled program from the training layout to the decoding layout."""

    def program(params: Params) -> Params:
        return jax.tree.map(lambda x: x.astype(dtype), unstack_layers(params, model))

    places = None if mesh is None else decode_shardings(model, mesh)
    return jax.jit(program, out_shardings=places)


def _part(array: jax.Array, devices: np.ndarray) -> jax.Array:
    """What of an array lies on one group, without a copy."""
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    if devices.size == 1:
        return shards[devices[0]]
    assert isinstance(array.sharding, NamedSharding)
    group = Mesh(devices.reshape(1, 1, -1), AXES, axis_types=(AxisType.Auto,) * 3)
    return jax.make_array_from_single_device_arrays(
        array.shape, NamedSharding(group, array.sharding.spec), [shards[d] for d in devices]
    )


def replicated(params: Params) -> Sharding:
    """All of an array on every device of the parameters."""
    mesh = _mesh_of(params)
    if mesh is None:
        (device,) = jax.tree.leaves(params)[0].devices()
        return SingleDeviceSharding(device)
    return NamedSharding(mesh, PartitionSpec())


def choose_attention(model: ModelConfig, config: EngineConfig, params: Params) -> Attention:
    """The implementation of attention over the cache, where the parameters are.

    Raises:
        UserError: the one that the config names cannot run there, or not in these dtypes.
    """
    mesh = _mesh_of(params)
    platform, capability = platform_of(next(iter(jax.tree.leaves(params)[0].devices())))
    split = mesh.shape["tensor"] if mesh is not None else 1
    heads = model.num_kv_heads
    dtypes = (config.dtype, config.cache_dtype or config.dtype)
    case = Case(
        platform,
        # A kernel has one dtype for both: name the one that it will not take.
        next((dtype for dtype in dtypes if dtype not in ("bfloat16", "float16")), config.dtype),
        heads if heads % split else heads // split,  # all of them where they cannot be split
        model.num_groups,
        model.head_dim,
        config.page_size,
        capability,
    )
    return Attention(resolve("paged", config.attention, case, "engine.attention"), mesh)


def new_layers(
    params: Params, model: ModelConfig, config: EngineConfig, attention: Attention
) -> tuple[Layer, ...]:
    """Empty pages on the devices of the parameters, split by key/value heads as these are."""
    return _new_layers(model, config, attention)(params)


@functools.lru_cache
def _new_layers(model: ModelConfig, config: EngineConfig, attention: Attention) -> Any:
    dtype = config.cache_dtype or config.dtype

    def program(params: Params) -> tuple[Layer, ...]:
        return init_layers(model, config.num_pages, config.page_size, dtype, attention)

    places, mesh = None, attention.mesh
    if mesh is not None:
        axes = list(layer_axes(model, attention, mesh.shape["tensor"]))
        while axes and axes[-1] is None:
            axes.pop()  # as programs name the sharding of what they return
        places = jax.tree.map(
            lambda x: sharding_for(mesh, axes[: x.ndim], DECODE_RULES, x.shape),
            jax.eval_shape(program, None),
        )
    # Unless the parameters stay arguments, JAX does not tie the cache to their devices, and
    # compiles a program anew that meets first a new cache and then one that a program has returned.
    return jax.jit(program, keep_unused=True, out_shardings=places)


def _mesh_of(params: Params) -> Mesh | None:
    """The mesh of several devices on which parameters lie; None for one device."""
    placed = jax.tree.leaves(params)[0].sharding
    if not isinstance(placed, NamedSharding) or placed.num_devices == 1:
        return None
    assert isinstance(placed.mesh, Mesh)
    return placed.mesh
