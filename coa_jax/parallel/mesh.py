"""The device mesh and the rules that map logical axes to it.

The mesh has three axes: ``data`` (replicas of the parameters), ``fsdp`` (batch and parameters
are both split), ``tensor`` (heads, MLP width and vocabulary are split).  The weight table names
the logical axes of each array; a rules tuple says which mesh axes a logical axis is split over.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Sequence

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
            would be left without a device, or the axes cannot be laid along those of a TPU slice.
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
    try:
        if devices[0].platform == "tpu" and _has_holes(devices):
            return Mesh(_over_holes(sizes, devices), AXES, axis_types=auto)
        return jax.make_mesh(tuple(sizes), AXES, axis_types=auto, devices=devices)
    except NotImplementedError as error:
        raise UserError(
            f"mesh {text} cannot be laid along the axes of this TPU slice: let each size be a "
            "product of some of the slice's own sizes"
        ) from error
    except AssertionError as error:
        raise UserError(
            f"mesh {text} has {len(devices)} chips that are no whole block of this TPU slice: give "
            "one size as -1, which takes all of them, and let mesh.rollout_devices leave rows of "
            "a host's chips"
        ) from error


def _columns(devices: Sequence[jax.Device]) -> list[list[int]]:
    """The places that occur on each axis of the torus, ascending."""
    return [sorted(set(places)) for places in zip(*(d.coords for d in devices), strict=True)]


def _has_holes(devices: Sequence[jax.Device]) -> bool:
    """Whether chips are rows of a TPU slice with other chips between them."""
    return any(places[-1] - places[0] >= len(places) for places in _columns(devices))


def _over_holes(sizes: Sequence[int], devices: Sequence[jax.Device]) -> np.ndarray:
    """The devices in the order in which JAX would lay out a slice without the holes."""
    columns = _columns(devices)
    closed = [
        types.SimpleNamespace(
            device=device,
            coords=tuple(map(list.index, columns, device.coords)),
            **{name: getattr(device, name) for name in _READ},
        )
        for device in devices
    ]
    laid_out = mesh_utils.create_device_mesh(sizes, closed)
    return np.vectorize(lambda place: place.device, otypes=[object])(laid_out)


_READ = ("id", "platform", "device_kind", "process_index", "core_on_chip")
"""What JAX reads of a TPU beside its place to make a mesh."""


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
