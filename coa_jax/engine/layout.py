"""The placement of decoding: groups of devices, and an engine's arrays on them.

A group consists of ``tensor`` devices of one process. It holds one copy of the parameters, sharded
by heads, MLP width and vocabulary, and runs its own engine. Groups share nothing, so no group ever
waits for another group. One compiled program converts the training parameters, which are sharded
over all devices of all processes, into the copies of all groups.

Groups consist either of the training devices, or of devices that are reserved for rollouts. With
reserved devices, the program makes the copies on training devices, and a transfer within each
process moves the copies to the reserved devices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from coa_jax.engine.config import EngineConfig
from coa_jax.errors import UserError
from coa_jax.model.attention.choice import Case, platform_of, resolve
from coa_jax.model.cache import LayerPages, init_layers, layer_axes
from coa_jax.model.compute import Compute, KernelLayout, backend_for
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import (
    Adapted,
    DecodeParams,
    Params,
    decode_shardings,
    join,
    unstack,
    without_adapters,
)
from coa_jax.parallel import launch_order
from coa_jax.parallel.launch_order import launch_alone
from coa_jax.parallel.mesh import AXES, DECODE_RULES, sharding_for


def decode_mesh(mesh: Mesh, tensor: int = 0) -> Mesh:
    """Arranges the devices of a training mesh into device groups, each of which decodes.

    A device group lies within one process, because each process has its own engines and tools. The
    devices keep the order of the training mesh, because the program of `publish` uses both meshes,
    and JAX allows one device order per program. In this order, the devices of a process need not be
    consecutive: on TPUs the order follows the torus, in which a v5p host has, for example, 2 x 2
    chips of a 4 x 4 x 8 slice. The returned mesh therefore may need several axes to describe a
    group.

    Args:
        mesh: training mesh.
        tensor: number of devices of a group; 0 for the number over which training shards a layer.

    Returns:
        A mesh whose axes ``tensor0``, ``tensor1``, ... run within a group. The other axes,
        ``data0``, ``data1``, ..., run over the groups.

    Raises:
        UserError: the devices cannot be arranged into such groups.
    """
    tensor = tensor or mesh.shape["tensor"]
    devices = mesh.devices.reshape(-1)
    if tensor < 1 or devices.size % tensor:
        raise UserError(f"mesh.decode_tensor is {tensor}: it must divide {devices.size} devices")
    processes = np.array([device.process_index for device in devices])
    shape, names = group_axes(processes, tensor)
    if math.prod(shape) == devices.size:
        groups = Mesh(devices.reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))
        if all(len({d.process_index for d in group}) == 1 for group in groups_of(groups, tensor)):
            return groups
    raise UserError(
        f"{tensor} devices that decode together span processes: set mesh.decode_tensor to "
        f"a divisor of the {np.count_nonzero(processes == processes[0])} devices of a process"
    )


def rollout_mesh(devices: Sequence[jax.Device], tensor: int, train: int, count: int) -> Mesh:
    """Arranges devices that are reserved for rollouts into device groups, like `decode_mesh`.

    Args:
        devices: reserved devices of all processes, sorted by process.
        tensor: number of devices of a group.
        train: number of training devices of a process. ``tensor`` must divide it, because groups of
            ``tensor`` training devices make the copies of the parameters for the engines.
        count: number of reserved devices of a process; ``tensor`` must divide it.

    Raises:
        UserError: the devices of a process cannot be arranged into such groups.
    """
    if count % tensor or train % tensor:
        raise UserError(
            f"mesh.decode_tensor is {tensor}: it must divide, in each process, the {count} "
            f"mesh.rollout_devices and the {train} training devices"
        )
    return Mesh(
        np.array(devices, object).reshape(-1, tensor),
        ("data0", "tensor0"),
        axis_types=(AxisType.Auto,) * 2,
    )


def run_groups(mesh: Mesh | None, tensor: int, aside: Sequence[jax.Device] = ()) -> Mesh | None:
    """Returns the mesh of a run's device groups for decoding, over all processes.

    The result is None if a single device trains and decodes.

    Args:
        mesh: training mesh; None for one device.
        tensor: number of devices of a group; 0 for the number over which training shards a layer.
        aside: devices reserved for rollouts, see `rollout_mesh`; () decodes on the training
            devices.

    Raises:
        UserError: the devices cannot be arranged into groups, see `decode_mesh` and `rollout_mesh`.
    """
    if aside:
        size = tensor or (1 if mesh is None else mesh.shape["tensor"])
        count = len(aside) // jax.process_count()
        return rollout_mesh(aside, size, 1 if mesh is None else len(mesh.local_devices), count)
    return None if mesh is None else decode_mesh(mesh, tensor)


def group_axes(processes: np.ndarray, tensor: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns the sizes and names of the axes of a `decode_mesh`.

    Args:
        processes: int ``[devices]``, index of the process of each device.
        tensor: number of devices of a group.

    Returns:
        The sizes and the names of the axes. If the devices of a process are not placed regularly,
        the product of the sizes is not the number of devices, or groups span processes. The caller
        must check both.
    """
    shape, names, rest = [], [], processes.size
    strides = _strides(np.flatnonzero(processes == processes[0])[:tensor].tolist())
    for number, (stride, size) in enumerate(reversed(strides)):
        shape += [rest // (stride * size), size]
        names += [f"data{number}", f"tensor{number}"]
        rest = stride
    return (*shape, rest), (*names, f"data{len(strides)}")


def groups_of(mesh: Mesh, tensor: int) -> np.ndarray:
    """Returns the devices of a `decode_mesh` as an array ``[groups, tensor]``, one row per group.

    ``tensor`` is the number of devices in a group.
    """
    last = [mesh.axis_names.index(name) for name in _split_axes(mesh)]
    first = [i for i in range(mesh.devices.ndim) if i not in last]
    return mesh.devices.transpose(*first, *last).reshape(-1, tensor)


def _strides(places: Sequence[int]) -> list[tuple[int, int]]:
    """Returns (stride, size) of each axis of a regular set of indices that begins with 0.

    For example, the indices 0, 1, 8, 9 have an axis of size 2 with stride 1 and an axis of size 2
    with stride 8. For an irregular set, the product of the sizes is less than the number of
    indices.
    """
    factors, known = [], 1
    while known < len(places):
        distance, size = places[known] - places[0], 1
        block = np.asarray(places[:known])
        while np.array_equal(places[size * known : (size + 1) * known], block + size * distance):
            size += 1
        if size == 1:
            break
        factors.append((distance, size))
        known *= size
    return factors or [(1, 1)]


def shares_base(
    model_config: ModelConfig, mesh: Mesh | None, dtype: str, decode_dtype: str, tensor: int = 0
) -> bool:
    """Returns whether engines can decode with the very arrays that are frozen in training.

    This is the case if only adapters are trained, in the dtype of the engines, on devices whose
    parts of the base are the parts that decoding needs: a single device, or a mesh that does not
    split parameters over ``fsdp`` and whose ``tensor`` groups are the device groups.

    Args:
        model_config: the architecture, with the adapters.
        mesh: training mesh, on which the engines decode too; None for one device.
        dtype, decode_dtype: dtype of the frozen parameters, and of the engines.
        tensor: number of devices of a device group, see `decode_mesh`.
    """
    if not model_config.lora.rank or dtype != decode_dtype:
        return False
    if mesh is None:
        return True
    size = mesh.shape["tensor"]
    if mesh.shape["fsdp"] > 1 or (tensor or size) != size:
        return False
    return bool((groups_of(decode_mesh(mesh, size), size) == mesh.devices.reshape(-1, size)).all())


def share_base(base: Params, model_config: ModelConfig) -> DecodeParams:
    """Converts frozen parameters to the layout for decoding, and deletes those of the layers.

    One array after the other is converted, so that there are never two copies of all layers.

    Args:
        base: parameters without adapters in the layout for training, placed as `shares_base` needs.
        model_config: the architecture, without adapters.
    """
    mesh, (device, *_) = mesh_of(base), jax.tree.leaves(base)[0].devices()
    kernels = kernels_for(device.platform, alone=mesh is None)
    places = None if mesh is None else decode_shardings(model_config, mesh, kernels)
    shared: Params = {}
    layers: list[Params] = [{} for _ in range(model_config.num_layers)]
    for path, array in flatten_dict(base).items():
        change = functools.partial(unstack, config=model_config, kernels=kernels)
        program = jax.jit(change, out_shardings=None if places is None else _only(places, path))
        part = launch_alone(mesh, program, unflatten_dict({path: array}))
        shared = join(shared, part.shared)
        layers = list(map(join, layers, part.layers))
        if path[0] == "layers":  # other arrays may be results themselves
            array.delete()
    return DecodeParams(shared, tuple(layers), kernels)


def _only(params: DecodeParams, path: tuple[str, ...]) -> DecodeParams:
    """Returns the part of a tree in the layout for decoding that belongs to one training array."""
    if path[0] != "layers":
        leaf = flatten_dict(params.shared)[path]
        empty: tuple[Params, ...] = ({},) * len(params.layers)
        return DecodeParams(unflatten_dict({path: leaf}), empty, params.kernels)
    leaves = (flatten_dict(layer)[path[1:]] for layer in params.layers)
    layers = tuple(unflatten_dict({path[1:]: leaf}) for leaf in leaves)
    return DecodeParams({}, layers, params.kernels)


def publish(
    params: Params | Adapted, model_config: ModelConfig, config: EngineConfig, tensor: int = 0
) -> list[DecodeParams]:
    """Copies training parameters into the layout for decoding, one copy per device group.

    Adapters stay beside the parameters that they adapt, and stay float32: nothing is merged.
    The result holds only the copies for the device groups of this process. If there are several
    processes, all of them must call this function. The platform determines the order of the axes of
    weight matrices, see `KernelLayout`.

    Args:
        params: training parameters, on one device or on a mesh; or the adapters alone. Then the
            result holds adapters, which `DecodeParams.with_adapters` joins to other parameters. A
            base that is shared with the engines is not copied, see `shares_base`.
        model_config: the architecture.
        config: settings of the engines that will use the copies.
        tensor: number of devices of a device group, see `decode_mesh`.
    """
    if isinstance(params, Adapted):
        new = publish(params.adapters, model_config, config, tensor)
        return [
            base.with_adapters(part)
            for base, part in zip(_local_parts(params.base, model_config), new, strict=True)
        ]
    alone = "embed" not in params
    dtype, mesh = config.dtype, mesh_of(params)
    if mesh is None:
        (device,) = jax.tree.leaves(params)[0].devices()
        kernels = kernels_for(device.platform, alone=True)
        return [publish_program(model_config, dtype, None, kernels, alone)(params)]
    groups = decode_mesh(mesh, tensor)
    kernels = kernels_for(mesh.devices.flat[0].platform)
    everywhere = launch_alone(
        mesh, publish_program(model_config, dtype, groups, kernels, alone), params
    )

    def places(group: np.ndarray) -> DecodeParams:
        shardings = decode_shardings(model_config, _group_mesh(group), kernels)
        return shardings.adapters() if alone else shardings

    return [
        jax.tree.map(_part, everywhere, places(group))
        for group in groups_of(groups, tensor_size(groups))
        if group[0].process_index == jax.process_index()
    ]


def _local_parts(base: DecodeParams, model_config: ModelConfig) -> list[DecodeParams]:
    """Returns the parts of a shared base on the device groups of this process, without copies."""
    mesh = mesh_of(base)
    if mesh is None:
        return [base]
    model_config = without_adapters(model_config)
    return [
        jax.tree.map(_part, base, decode_shardings(model_config, _group_mesh(group), base.kernels))
        for group in mesh.devices.reshape(-1, mesh.shape["tensor"])
        if group[0].process_index == jax.process_index()
    ]


def kernels_for(platform: str, alone: bool = False) -> KernelLayout:
    """Returns the order of the axes of an engine's weight matrices.

    Args:
        platform: platform of the engine's devices.
        alone: whether the parameters are on a single device, and not on a mesh.
    """
    if alone and backend_for(platform) == "cpu":
        return "outputs_first"
    return "matrices" if platform == "tpu" else "inputs_first"


def copy_to_devices(
    parts: Sequence[DecodeParams], places: Sequence[Sharding | DecodeParams]
) -> list[DecodeParams]:
    """Copies parameters to other devices of this process, in one transfer between devices.

    Args:
        parts: copies that `publish` returned.
        places: sharding of each result, on the devices to which the parameters are copied. If there
            are more results than copies, the function starts again with the first copy.
    """
    sources = [parts[number % len(parts)] for number in range(len(places))]
    return jax.device_put(sources, list(places))


def places_of(model_config: ModelConfig, mesh: Mesh) -> list[Sharding | DecodeParams]:
    """Returns the sharding of the engines' parameters on each device group of this process.

    Args:
        model_config: the architecture.
        mesh: mesh of the reserved devices, from `rollout_mesh`.

    Returns:
        One entry per group, as `copy_to_devices` expects: a single sharding for a group of one
        device, else a tree of shardings.
    """
    return [
        decode_shardings(model_config, _group_mesh(group), kernels_for(group[0].platform))
        if group.size > 1
        else jax.sharding.SingleDeviceSharding(group[0])
        for group in mesh.devices
        if group[0].process_index == jax.process_index()
    ]


@functools.lru_cache
def publish_program(
    model_config: ModelConfig,
    dtype: str,
    mesh: Mesh | None,
    kernels: KernelLayout = "inputs_first",
    adapters: bool = False,
) -> Any:
    """Returns the compiled program that converts the training layout to the decoding layout.

    Args:
        model_config: the architecture.
        dtype: dtype of the copies, except for adapters.
        mesh: mesh of all device groups, see `decode_mesh`; None for one device.
        kernels: order of the axes of weight matrices in the copies.
        adapters: whether the program converts the adapters alone.
    """

    def program(params: Params) -> DecodeParams:
        copies = unstack(params, model_config, kernels)
        return jax.tree.map(lambda x: x.astype(dtype), copies).with_adapters(copies.adapters())

    if mesh is None:
        return jax.jit(program)
    # This scheduler of the TPU compiler starts the gathers of many layers at once, which needs more
    # memory (7B model on v5e:2x4: 5.8 GB of temporary arrays instead of 3.9).
    tpu = mesh.devices.flat[0].platform == "tpu"
    options = {"xla_tpu_enable_latency_hiding_scheduler": "false"} if tpu else None
    places = _places(model_config, mesh, kernels)
    places = places.adapters() if adapters else places
    return jax.jit(program, out_shardings=places, compiler_options=options)


def _places(model_config: ModelConfig, mesh: Mesh, kernels: KernelLayout) -> DecodeParams:
    """Returns the shardings of the copies of all groups of a `decode_mesh`."""
    names, size = _split_axes(mesh), tensor_size(mesh)

    def everywhere(sharding: NamedSharding) -> NamedSharding:
        spec = PartitionSpec(*(names if part == "tensor" else part for part in sharding.spec))
        return NamedSharding(mesh, spec)

    group = AbstractMesh((1, 1, size), AXES, axis_types=(AxisType.Auto,) * 3)
    return jax.tree.map(everywhere, decode_shardings(model_config, group, kernels))


def tensor_size(mesh: Mesh) -> int:
    """Returns the number of devices in a group of a `decode_mesh`."""
    return math.prod(mesh.shape[name] for name in _split_axes(mesh))


def _split_axes(mesh: Mesh) -> tuple[str, ...]:
    """Returns the names of the axes of a `decode_mesh` that run within a group."""
    return tuple(name for name in mesh.axis_names if name.startswith("tensor"))


def _group_mesh(devices: np.ndarray) -> Mesh:
    return Mesh(devices.reshape(1, 1, -1), AXES, axis_types=(AxisType.Auto,) * 3)


def _part(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Returns the part of an array that lies on one group, without copying the data."""
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    devices = sharding.mesh.devices.reshape(-1)
    if devices.size == 1:
        return shards[devices[0]]
    return jax.make_array_from_single_device_arrays(
        array.shape, sharding, [shards[d] for d in devices]
    )


def replicated_sharding(params: DecodeParams) -> Sharding:
    """Returns the sharding that replicates an array on all devices that hold ``params``."""
    mesh = mesh_of(params)
    if mesh is None:
        (device,) = jax.tree.leaves(params)[0].devices()
        return jax.sharding.SingleDeviceSharding(device)
    return NamedSharding(mesh, PartitionSpec())


def engine_compute(
    model_config: ModelConfig, config: EngineConfig, params: DecodeParams
) -> Compute:
    """Returns the dtype, operations and sharding of an engine on the devices of its parameters.

    Args:
        model_config: the architecture.
        config: settings of the engine.
        params: parameters in the layout for decoding.

    Raises:
        UserError: the configured attention cannot run on these devices, or with these dtypes.
    """
    mesh = mesh_of(params)
    platform, capability = platform_of(next(iter(jax.tree.leaves(params)[0].devices())))
    split = mesh.shape["tensor"] if mesh is not None else 1
    case = paged_case(model_config, config, split, platform, capability)
    return Compute(
        config.dtype,
        attention=resolve("paged", config.attention, case, "engine.attention"),
        backend=backend_for(platform),
        mesh=mesh,
        collectives="none",
        kernels=params.kernels,
    )


def paged_case(
    model_config: ModelConfig,
    config: EngineConfig,
    tensor: int,
    platform: str,
    capability: float = 0.0,
) -> Case:
    """Returns the platform, dtype and shapes of an engine's attention over the cache.

    Args:
        model, config: the architecture, and the settings of the engine.
        tensor: number of devices of a group.
        platform, capability: platform and compute capability of the devices, see
            `model.attention.choice.Case`.
    """
    heads = model_config.num_kv_heads
    dtypes = (config.dtype, config.cache_dtype or config.dtype)
    # A kernel has one dtype for operands and cache; the case names the dtype that the kernel will
    # reject.
    dtype = next((name for name in dtypes if name not in ("bfloat16", "float16")), config.dtype)
    heads = heads if heads % tensor else heads // tensor  # all heads if they cannot be sharded
    shape = (heads, model_config.num_groups, model_config.head_dim, config.page_size)
    return Case(platform, dtype, *shape, capability, windowed=model_config.local is not None)


def new_pages(
    params: DecodeParams, model_config: ModelConfig, config: EngineConfig, compute: Compute
) -> tuple[LayerPages, ...]:
    """Allocates empty pages on the devices of the parameters, sharded by key/value heads.

    Args:
        params: parameters in the layout for decoding.
        model_config: the architecture.
        config: settings of the engine.
        compute: settings of the computation; its attention determines the layout of the pages.
    """
    return launch_alone(compute.mesh, _new_pages(model_config, config, compute), params)


def abstract_pages(
    model_config: ModelConfig, config: EngineConfig, compute: Compute
) -> tuple[LayerPages, ...]:
    """Returns the shapes and, on a mesh, the shardings of the result of `new_pages`.

    Args:
        model_config: the architecture.
        config: settings of the engine.
        compute: settings of the computation; its attention determines the layout of the pages, and
            its mesh their shardings.
    """
    dtype, mesh = config.cache_dtype or config.dtype, compute.mesh
    shapes = jax.eval_shape(
        lambda: init_layers(model_config, config.num_pages, config.page_size, dtype, compute)
    )
    if mesh is None:
        return shapes
    axes = list(layer_axes(model_config, compute, mesh.shape["tensor"]))
    while axes and axes[-1] is None:
        axes.pop()  # programs name the sharding of their results in this form

    def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = sharding_for(mesh, axes[: x.ndim], DECODE_RULES, x.shape)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(placed, shapes)


@functools.lru_cache
def _new_pages(model_config: ModelConfig, config: EngineConfig, compute: Compute) -> Any:
    dtype, places = config.cache_dtype or config.dtype, None

    def program(params: DecodeParams) -> tuple[LayerPages, ...]:
        return init_layers(model_config, config.num_pages, config.page_size, dtype, compute)

    if compute.mesh is not None:
        places = jax.tree.map(lambda x: x.sharding, abstract_pages(model_config, config, compute))
    # The parameters remain arguments of the program. Otherwise JAX would not tie the cache to their
    # devices, and would compile programs twice: for a new cache, and for a cache that a program
    # returned.
    return jax.jit(program, keep_unused=True, out_shardings=places)


def mesh_of(params: Params | Adapted | DecodeParams) -> Mesh | None:
    """Returns the mesh over which parameters are sharded; None if they are on one device."""
    mesh = launch_order.mesh_of(jax.tree.leaves(params)[0])
    return None if mesh is None or mesh.size == 1 else mesh
