"""The device mesh, and the rules that map logical axes to the axes of the mesh.

The mesh has three axes: ``data`` replicates the parameters, ``fsdp`` splits the batch and the
parameters, and ``tensor`` splits heads, MLP width and vocabulary. The modules of the model name the
logical axes of each array, and rules map each logical axis to mesh axes.
"""

from __future__ import annotations

import itertools
import math
import types
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from coa_jax.errors import UserError

AXES = ("data", "fsdp", "tensor")
Rules = tuple[tuple[str, tuple[str, ...]], ...]

RULES: Rules = (
    ("batch", ("data", "fsdp")),
    ("length", ("tensor",)),
    ("vocab", ("tensor",)),
    ("embed", ("fsdp",)),
    ("kv_heads", ("tensor",)),
    ("mlp", ("tensor",)),
)
"""Rules for training, which split parameters, gradients and optimiser state.

All of these are split over ``fsdp`` and ``tensor``. Between two matmuls, the tokens of a row
(``length``) are split over ``tensor``. A logical axis without a rule is not split.
"""

DECODE_RULES: Rules = (
    ("batch", ("data", "fsdp")),
    ("vocab", ("tensor",)),
    ("kv_heads", ("tensor",)),
    ("mlp", ("tensor",)),
)
"""Rules for decoding, which split weights only over ``tensor``.

A decoding step reads every weight once for a few tokens, so gathering weights over ``fsdp`` would
take longer than the matmuls.
"""


def make_mesh(
    data: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
    processes: int = 1,
) -> Mesh:
    """Creates a device mesh with the axes ``("data", "fsdp", "tensor")``.

    The mesh has the first ``data * fsdp * tensor`` devices of ``devices``. One of the three sizes
    may be -1; this axis then takes the remaining devices.

    Args:
        data: number of replicas of the parameters.
        fsdp: number of parts into which the batch and the parameters are split.
        tensor: number of parts into which each layer is split.
        devices: available devices; None for all devices of the run.
        processes: number of processes that own ``devices``; ignored if ``devices`` is None.

    Raises:
        UserError: a size is neither positive nor -1; there are too few devices; a mesh of several
            processes leaves devices out; or the devices of the mesh belong to several TPU slices,
            or form no rectangular block of a slice.
    """
    every = devices is None
    processes = jax.process_count() if devices is None else processes
    devices = jax.devices() if devices is None else devices
    sizes, count = [data, fsdp, tensor], len(devices)
    if sizes.count(-1) == 1:
        rest = -math.prod(sizes)
        if rest > 0 and count % rest == 0:
            sizes[sizes.index(-1)] = count // rest
    text = f"data={data}, fsdp={fsdp}, tensor={tensor}"
    if min(sizes) < 1:
        raise UserError(f"mesh {text} does not fit {count} devices: give positive divisors of it")
    need = math.prod(sizes)
    if need > count:
        flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={need}"
        advice = f"change the sizes{f', or on CPU set {flag}' if every else ''}"
        raise UserError(f"mesh {text} needs {need} devices, and there are {count}: {advice}")
    if processes > 1 and need != count:
        fault = f"mesh {text} has {need} of the {count} devices of {processes} processes"
        raise UserError(f"{fault}, but it must have all of them: give -1 for one of the sizes")
    return _laid_out(sizes, devices[:need], text)


def _laid_out(sizes: Sequence[int], devices: Sequence[jax.Device], text: str) -> Mesh:
    """Creates a mesh of all given devices; ``text`` describes the sizes in error messages."""
    # `Auto` lets the compiler insert the collectives. It is given explicitly, because JAX's default
    # may change.
    auto = (AxisType.Auto,) * 3
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices > 1 and devices[0].platform == "gpu":
        # JAX treats each GPU node as a slice, and `jax.make_mesh` does not span slices. If devices
        # are sorted by id, the devices of a node are adjacent, so `tensor`, the last axis, stays
        # within a node.
        order = sorted(devices, key=lambda device: device.id)
        return Mesh(np.array(order, object).reshape(sizes), AXES, axis_types=auto)
    if slices > 1:
        fault = f"has devices of {slices} TPU slices, and a run needs a single slice"
        raise UserError(f"mesh {text} {fault}: start the run on a larger slice")
    if devices[0].platform == "tpu":
        return Mesh(_on_torus(sizes, devices, text), AXES, axis_types=auto)
    return jax.make_mesh(tuple(sizes), AXES, axis_types=auto, devices=devices)


def _on_torus(sizes: Sequence[int], devices: Sequence[jax.Device], text: str) -> np.ndarray:
    """Arranges the devices ``[data, fsdp, tensor]`` of a mesh on a TPU slice.

    If each mesh size is a product of sizes of the torus, JAX assigns whole axes of the torus to
    each mesh axis. Otherwise mesh axes share an axis of the torus: each ``tensor`` group is then a
    compact block, and ``data`` and ``fsdp`` are arranged over blocks. If possible, the devices of a
    block are ordered as a ring of neighbours in which the devices of a host are adjacent, because
    an engine needs devices of one host.
    """
    at = [(*device.coords, device.core_on_chip) for device in devices]
    # Chips that are reserved for rollouts are not in the mesh, so the coordinates are renumbered to
    # close the gaps that these chips leave.
    columns = [sorted(set(places)) for places in zip(*at, strict=True)]
    places = [tuple(map(list.index, columns, coordinates)) for coordinates in at]
    extents = [len(column) for column in columns]
    if math.prod(extents) != len(devices):
        raise UserError(
            f"mesh {text} has {len(devices)} chips that do not form a block of this TPU slice: "
            "give -1 for one size, which takes all chips, and choose mesh.rollout_devices so that "
            "whole rows of a host's chips remain"
        )
    data, fsdp, tensor = sizes
    try:
        one = (1,) * len(extents)
        return _over_blocks((data, fsdp, tensor), devices, places, one, split=False)
    except NotImplementedError:  # JAX raises it if mesh axes would share an axis of the torus
        block = _block(extents, tensor)
        return _over_blocks((data, fsdp, 1), devices, places, block, split=True)


def _over_blocks(
    sizes: tuple[int, int, int],
    devices: Sequence[jax.Device],
    places: Sequence[tuple[int, ...]],
    block: Sequence[int],
    split: bool,
) -> np.ndarray:
    """Arranges blocks of devices as JAX would arrange a slice with one chip per block.

    Args:
        sizes: sizes of the mesh axes, counted in blocks.
        devices: devices of the mesh.
        places: coordinates (x, y, z, core) of each device on the torus, without gaps.
        block: size of a block along each axis of the torus, which divides the size of the torus.
        split: whether mesh axes may share an axis of the torus.

    Returns:
        The devices, ``[data, fsdp, tensor]``; the devices of a block lie along the last axis.

    Raises:
        NotImplementedError: mesh axes would have to share an axis of the torus.
    """
    members: dict[tuple[int, ...], dict[tuple[int, ...], jax.Device]] = {}
    for device, coordinates in zip(devices, places, strict=True):
        corner = tuple(p // b for p, b in zip(coordinates, block, strict=True))
        members.setdefault(corner, {})[coordinates] = device
    chips = [
        types.SimpleNamespace(
            coords=corner[:3],
            core_on_chip=corner[3],
            devices=_ring(own) if len(own) > 1 else list(own.values()),
            **{name: getattr(devices[0], name) for name in ("platform", "device_kind")},
        )
        for corner, own in members.items()
    ]
    laid_out = mesh_utils.create_device_mesh(sizes, chips, allow_split_physical_axes=split)
    order = [device for chip in laid_out.flat for device in chip.devices]
    return np.array(order, object).reshape(*sizes[:2], -1)


def _block(extents: Sequence[int], size: int) -> tuple[int, ...]:
    """Chooses the shape of a block of ``size`` chips that divides the torus.

    Blocks of whole axes are preferred, because the ends of an axis are linked. The second choice
    are compact blocks, because 2 x 2 chips form a ring, but 4 x 1 chips only a line.
    """
    divisors = [[d for d in range(1, n + 1) if n % d == 0] for n in extents]
    blocks = [block for block in itertools.product(*divisors) if math.prod(block) == size]

    def rank(block: tuple[int, ...]) -> tuple[bool, int, tuple[int, ...]]:
        whole = all(b in (1, n) for b, n in zip(block, extents, strict=True))
        return (not whole, sum(block), tuple(-b for b in block))

    return min(blocks, key=rank)


def _ring(members: Mapping[tuple[int, ...], jax.Device]) -> list[jax.Device]:
    """Orders devices as a ring of neighbours in which the devices of a host are adjacent.

    If there is no such ring, or if there are more than 16 devices, the devices are sorted by host
    and place.
    """
    hosts: dict[int, int] = {}
    for device in members.values():
        hosts[device.process_index] = hosts.get(device.process_index, 0) + 1

    def near(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
        return sum(abs(p - q) for p, q in zip(a, b, strict=True)) == 1

    def grow(path: list[tuple[int, ...]]) -> list[tuple[int, ...]] | None:
        if len(path) == len(members):
            return path if near(path[0], path[-1]) else None
        host = members[path[-1]].process_index
        stays = sum(members[position].process_index == host for position in path) < hosts[host]
        for position, device in members.items():
            goes_on = near(path[-1], position) and (device.process_index == host) == stays
            if position not in path and goes_on and (order := grow([*path, position])):
                return order
        return None

    ring = None
    if len(members) <= 16:
        ring = next(filter(None, (grow([corner]) for corner in sorted(members))), None)
    order = ring or sorted(members, key=lambda corner: (members[corner].process_index, corner))
    return [members[corner] for corner in order]


def sharding_for(
    mesh: Mesh | AbstractMesh,
    axes: Sequence[str | None],
    rules: Rules = RULES,
    shape: Sequence[int] | None = None,
) -> NamedSharding:
    """Returns the sharding of an array whose dimensions have the given logical axes.

    The rules assign a list of mesh axes to each logical axis. A dimension is split over the longest
    prefix of its mesh axes such that the product of their sizes divides the dimension's size. If
    there is no such prefix, the dimension is replicated; an example is 2 key/value heads on a
    ``tensor`` axis of size 4. If several dimensions need the same mesh axis, only the first of them
    is split over it.

    Args:
        mesh: a mesh with the axes of `make_mesh`.
        axes: logical axis of each dimension. A dimension is not split if its axis is None or has no
            rule.
        rules: `RULES` or `DECODE_RULES`.
        shape: shape of the array; None assumes that all sizes are divisible.
    """
    table, used, spec = dict(rules), set(), []
    for i, axis in enumerate(axes):
        names: list[str] = []
        for name in table.get(axis, ()) if axis else ():
            parts = math.prod(mesh.shape[n] for n in (*names, name))
            if name in used or (shape is not None and shape[i] % parts):
                break
            names.append(name)
        used.update(names)
        spec.append(tuple(names) if len(names) > 1 else names[0] if names else None)
    return NamedSharding(mesh, PartitionSpec(*spec))


def gather_axes(
    x: jax.Array, mesh: Mesh | None, axes: Sequence[str | None], whole: Sequence[str]
) -> jax.Array:
    """Gathers a sharded array along some logical axes, and splits its gradient along the same axes.

    The gradient is a sum over the devices that have gathered the value. It gets a sharding
    constraint like the value, so each device computes only its own part of the sum (a
    reduce-scatter). Without this constraint, the compiler would compute the whole sum on every
    device.

    Args:
        x: value that is sharded by ``axes``.
        mesh: training mesh; None returns the value unchanged.
        axes: logical axis of each dimension.
        whole: logical axes along which the value is gathered.
    """
    if mesh is None:
        return x
    kept = [None if axis in whole else axis for axis in axes]
    before, after = (sharding_for(mesh, names, shape=x.shape) for names in (axes, kept))
    constrain_to = jax.lax.with_sharding_constraint

    @jax.custom_vjp
    def moved(x: jax.Array) -> jax.Array:
        return constrain_to(constrain_to(x, before), after)

    moved.defvjp(lambda x: (moved(x), None), lambda _, g: (constrain_to(g, before),))
    return moved(x)


def split_over(
    mesh: Mesh | None, function: Callable[..., jax.Array], *axes: tuple[str | None, ...]
) -> Callable[..., jax.Array]:
    """Returns a function that calls a kernel on each device of a mesh, with the device's shards.

    Args:
        mesh: the devices; None returns ``function`` unchanged.
        function: function of arrays. Its result is sharded like its first argument.
        *axes: logical axes of each argument, see `RULES`. An axis whose size is not
            divisible by the size of its mesh axes is not sharded; then each device along these mesh
            axes computes the whole axis.
    """
    if mesh is None:
        return function

    def call(*arguments: jax.Array | None) -> jax.Array:
        specs = tuple(
            PartitionSpec() if x is None else sharding_for(mesh, names, shape=x.shape).spec
            for names, x in zip(axes, arguments, strict=True)
        )
        # `check_vma` needs a record of the mesh axes over which a result varies, which kernels do
        # not provide.
        return jax.shard_map(
            function, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False
        )(*arguments)

    return call
