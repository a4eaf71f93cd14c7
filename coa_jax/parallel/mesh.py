"""The device mesh and the rules that map logical axes to it.

The mesh has three axes: ``data`` (replicas of the parameters), ``fsdp`` (batch and parameters
are both split), ``tensor`` (heads, MLP width and vocabulary are split).  The weight table names
the logical axes of each array; a rules tuple says which mesh axes a logical axis is split over.
"""

from __future__ import annotations

import functools
import itertools
import math
import types
from collections.abc import Mapping, Sequence

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
"""Training: parameters, gradients and optimiser state are split over ``fsdp`` and ``tensor``.
Between two products the tokens of a row (``length``) are split over ``tensor``, not kept by all.
A logical axis that is not listed stays whole."""

DECODE_RULES: Rules = (
    ("batch", ("data", "fsdp")),
    ("vocab", ("tensor",)),
    ("kv_heads", ("tensor",)),
    ("mlp", ("tensor",)),
)
"""Decoding: a step reads every weight once for a few tokens, so gathering them over ``fsdp``
each time would cost more than the products; they are split over ``tensor`` only."""


def make_mesh(
    data: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
    processes: int = 1,
) -> Mesh:
    """A mesh of axes ``("data", "fsdp", "tensor")`` over the first devices.

    Args:
        data: replicas; -1 (allowed for one of the three) means whatever is left.
        fsdp: parts of the batch that also split the parameters.
        tensor: parts of each layer.
        devices: to choose from; None for all of this run.
        processes: that have those devices; of None it is known.

    Raises:
        UserError: a size is not positive, more devices are asked for than there are, a process
            would be left without a device, or the devices are no whole block of a TPU slice.
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
        on_cpu = f", or on CPU set {flag}" if every else ""
        raise UserError(
            f"mesh {text} needs {need} devices, there are {count}: change the sizes{on_cpu}"
        )
    if processes > 1 and need != count:
        raise UserError(
            f"mesh {text} has {need} of the {count} devices of {processes} processes, each of "
            "which needs its part: give one size as -1, which takes what is left"
        )
    return _laid_out(sizes, devices[:need], text)


def _laid_out(sizes: Sequence[int], devices: Sequence[jax.Device], text: str) -> Mesh:
    """The mesh of sizes whose product is the number of devices; ``text`` names them in errors."""
    # Auto is asked for explicitly: the compiler places the collectives, whatever JAX's default.
    auto = (AxisType.Auto,) * 3
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices > 1 and devices[0].platform == "gpu":
        # JAX calls each node of GPUs a slice and makes no mesh of several.  In their order devices
        # of a node stand together, so that `tensor`, the last axis, stays within one.
        order = sorted(devices, key=lambda device: device.id)
        return Mesh(np.array(order, object).reshape(sizes), AXES, axis_types=auto)
    if slices > 1:
        raise UserError(
            f"mesh {text} has devices of {slices} TPU slices, a run has those of one: start it on "
            "a larger slice"
        )
    if devices[0].platform == "tpu":
        return Mesh(_on_torus(sizes, devices, text), AXES, axis_types=auto)
    return jax.make_mesh(tuple(sizes), AXES, axis_types=auto, devices=devices)


def _on_torus(sizes: Sequence[int], devices: Sequence[jax.Device], text: str) -> np.ndarray:
    """The devices ``[data, fsdp, tensor]`` of a mesh on a TPU slice.

    Where the sizes are products of the torus's own, JAX lays each axis along whole axes of the
    torus.  Elsewhere axes share one, and devices of a ``tensor`` group become a compact block.  Its
    devices are ordered as a ring of neighbours, where there is one in which those of a host follow
    each other: an engine has devices of one host.  ``data`` and ``fsdp`` are then laid over blocks.
    """
    at = [(*device.coords, device.core_on_chip) for device in devices]
    # Places between which chips make rollouts are drawn together.
    columns = [sorted(set(places)) for places in zip(*at, strict=True)]
    places = [tuple(map(list.index, columns, place)) for place in at]
    extents = [len(column) for column in columns]
    if math.prod(extents) != len(devices):
        raise UserError(
            f"mesh {text} has {len(devices)} chips that are no whole block of this TPU slice: give "
            "one size as -1, which takes all of them, and let mesh.rollout_devices leave rows of "
            "a host's chips"
        )
    data, fsdp, tensor = sizes
    try:
        one = (1,) * len(extents)
        return _over_blocks((data, fsdp, tensor), devices, places, one, split=False)
    except NotImplementedError:  # what JAX raises where axes would have to share one
        block = _block(extents, tensor)
        return _over_blocks((data, fsdp, 1), devices, places, block, split=True)


def _over_blocks(
    sizes: tuple[int, int, int],
    devices: Sequence[jax.Device],
    places: Sequence[tuple[int, ...]],
    block: Sequence[int],
    split: bool,
) -> np.ndarray:
    """Blocks of devices, in the order in which JAX lays out a slice with a chip for each block.

    Args:
        sizes: of the axes over blocks.
        devices, places: places on the torus (x, y, z, core), without holes.
        block: its extents, which divide those of the torus.
        split: whether axes may share one of the torus.

    Returns:
        ``[data, fsdp, tensor]`` devices; those of a block lie along the last axis.

    Raises:
        NotImplementedError: axes would have to share one.
    """
    members: dict[tuple[int, ...], dict[tuple[int, ...], jax.Device]] = {}
    for device, place in zip(devices, places, strict=True):
        corner = tuple(p // b for p, b in zip(place, block, strict=True))
        members.setdefault(corner, {})[place] = device
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
    """The extents of a block of ``size`` chips that divide those of a torus.

    Whole axes come first, whose ends are linked, then what is compact: 2 x 2 chips are a ring, of
    4 x 1 the ends are not linked.
    """
    divisors = [[d for d in range(1, n + 1) if n % d == 0] for n in extents]
    blocks = [block for block in itertools.product(*divisors) if math.prod(block) == size]

    def rank(block: tuple[int, ...]) -> tuple[bool, int, tuple[int, ...]]:
        whole = all(b in (1, n) for b, n in zip(block, extents, strict=True))
        return (not whole, sum(block), tuple(-b for b in block))

    return min(blocks, key=rank)


def _ring(members: Mapping[tuple[int, ...], jax.Device]) -> list[jax.Device]:
    """Devices by place, as a ring of neighbours in which those of a host follow each other.

    Without such a ring, or for so many devices that the search would be long, those of a host
    follow each other in the order of their places.
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
        stays = sum(members[place].process_index == host for place in path) < hosts[host]
        for place, device in members.items():
            goes_on = near(path[-1], place) and (device.process_index == host) == stays
            if place not in path and goes_on and (found := grow([*path, place])):
                return found
        return None

    found = None
    if len(members) <= 16:
        found = next(filter(None, (grow([place]) for place in sorted(members))), None)
    order = found or sorted(members, key=lambda place: (members[place].process_index, place))
    return [members[place] for place in order]


def sharding_for(
    mesh: Mesh | AbstractMesh,
    axes: Sequence[str | None],
    rules: Rules = RULES,
    shape: Sequence[int] | None = None,
) -> NamedSharding:
    """The sharding of an array with the given logical axes.

    Where ``shape`` is given, a dimension that its mesh axes do not divide is split over the
    longest prefix of them that does, which may be none: with 2 key/value heads on 4-way
    ``tensor``, that dimension is replicated and the others are split as usual.  A mesh axis
    that an earlier dimension uses is not used again.

    Args:
        mesh: see :func:`make_mesh`.
        axes: one logical axis a dimension; None or one without a rule stays whole.
        rules: :data:`RULES` or :data:`DECODE_RULES`.
        shape: the array's shape.
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


def constrain(x: jax.Array, mesh: Mesh | None, *axes: str | None) -> jax.Array:
    """Tells the compiler how a value is split by the training rules; without a mesh the value."""
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, sharding_for(mesh, axes, shape=x.shape))


def gather(
    x: jax.Array,
    mesh: Mesh | None,
    axes: Sequence[str | None],
    whole: Sequence[str],
) -> jax.Array:
    """A value split over some logical axes no longer, whose gradient is split over them again.

    The gradient is a sum over the devices that have had the value.  Told only how the value lies
    the compiler makes the whole sum on each of them; told this it leaves each one its part.

    Args:
        x: split as ``axes`` say.
        mesh: None returns the value.
        axes: logical axes, one a dimension.
        whole: those of them that every device gets all of.
    """
    if mesh is None:
        return x
    kept = [None if axis in whole else axis for axis in axes]
    before, after = (sharding_for(mesh, names, shape=x.shape) for names in (axes, kept))
    return _moved(x, before, after)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _moved(x: jax.Array, before: NamedSharding, after: NamedSharding) -> jax.Array:
    x = jax.lax.with_sharding_constraint(x, before)
    return jax.lax.with_sharding_constraint(x, after)


def _moved_fwd(x: jax.Array, before: NamedSharding, after: NamedSharding) -> tuple[jax.Array, None]:
    return _moved(x, before, after), None


def _moved_bwd(
    before: NamedSharding, after: NamedSharding, saved: None, g: jax.Array
) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(g, before),)


_moved.defvjp(_moved_fwd, _moved_bwd)
