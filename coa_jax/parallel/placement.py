"""Places a run on its devices: the training mesh, the devices for rollouts, and batches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from coa_jax.errors import UserError
from coa_jax.parallel.config import MeshConfig
from coa_jax.parallel.mesh import make_mesh, sharding_for
from coa_jax.parallel.processes import barrier

T = TypeVar("T")


def split_devices(
    devices: Sequence[Any], count: int, owners: Sequence[int] = ()
) -> tuple[list[Any], list[Any]]:
    """Splits devices into devices for training and devices that are reserved for rollouts.

    Args:
        devices: devices of all processes.
        count: number of devices of each process that are reserved for rollouts; these are the last
            ones of the process in the order of ``devices``.
        owners: index of the process that owns each device; () reads the owners from the devices.

    Returns:
        The devices for training, in the given order; and the devices for rollouts, sorted by
        process.

    Raises:
        UserError: a process would have no device left for training.
    """
    theirs: dict[int, list[Any]] = {}
    for device, owner in zip(devices, owners or [d.process_index for d in devices], strict=True):
        theirs.setdefault(owner, []).append(device)
    least = min(map(len, theirs.values()))
    if count and count >= least:
        fault = f"mesh.rollout_devices is {count}, and a process has only {least}"
        raise UserError(f"{fault}: leave at least one device for training")
    aside = [device for own in theirs.values() for device in own[len(own) - count :]]
    taken = set(aside)
    return [device for device in devices if device not in taken], aside


def rollout_devices(config: MeshConfig) -> list[jax.Device]:
    """Returns the devices of all processes that the settings reserve for rollouts.

    The list is empty if the same devices train and sample.
    """
    return split_devices(jax.devices(), config.rollout_devices)[1]


def training_mesh(config: MeshConfig, rows: int = 0, *, rollouts: bool = False) -> Mesh | None:
    """Creates the training mesh of a run; returns None if the run uses a single device.

    The function logs a warning if devices stay idle, or if several devices compute the same rows.

    Args:
        config: sizes of the axes.
        rows: number of rows of a micro-batch; 0 for a run without micro-batches.
        rollouts: whether the run has rollouts.

    Raises:
        UserError: the sizes do not fit the devices, or devices are reserved for rollouts in a run
            without rollouts.
    """
    aside = config.rollout_devices
    if aside and not rollouts:
        raise UserError(f"mesh.rollout_devices is {aside}, and this run has no rollouts: give 0")
    devices, _ = split_devices(jax.devices(), aside)
    processes, sizes = jax.process_count(), (config.data, config.fsdp, config.tensor)
    mesh = None
    if sizes != (1, 1, 1) or processes > 1:
        try:
            mesh = make_mesh(*sizes, devices, processes) if aside else make_mesh(*sizes)
        except UserError as error:
            beside = f" (beside {aside} mesh.rollout_devices of each process)" if aside else ""
            raise UserError(f"{error}{beside}") from error
    used = 1 if mesh is None else mesh.size
    if used < len(devices):
        message = f"the mesh has {used} of {len(devices)} devices, and the others are idle"
        logging.warning("%s: config.mesh.fsdp=-1 takes the remaining devices", message)
    parts = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
    if rows % parts:
        message = f"rows is {rows}, which mesh.data x mesh.fsdp = {parts} does not divide"
        logging.warning("%s: several devices compute the same rows; give a multiple", message)
    if mesh is not None and processes > 1 and devices[0].platform == "cpu":
        barrier("the mesh", config.wait_seconds)
        _find_each_other(mesh)
    return mesh


def _find_each_other(mesh: Mesh) -> None:
    """Connects the groups of CPU devices, with a small program that sums over each group.

    The communication library Gloo fails if a process reaches the first sum of a group more than 30
    s after another process, and the compilation of a training step may take longer.
    """
    axes = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    for count in range(1, len(axes) + 1):
        for group in itertools.combinations(axes, count):

            def total(group: tuple[str, ...] = group) -> jax.Array:
                return jax.lax.psum(jax.lax.axis_index(mesh.axis_names), group)

            # The result varies along the axes outside the group, so `check_vma` would refuse it.
            summed = jax.shard_map(
                total, mesh=mesh, in_specs=(), out_specs=PartitionSpec(), check_vma=False
            )
            jax.block_until_ready(jax.jit(summed)())


def replicate(array: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Places a copy of an array on every device of the mesh.

    Args:
        array: the array, which every process must have.
        mesh: mesh of the run; None returns the array unchanged.
    """
    if mesh is None:
        return array
    whole, sharding = np.asarray(array), NamedSharding(mesh, PartitionSpec())
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def own_rows(mesh: Mesh | None, rows: int) -> list[int]:
    """Returns the indices of the batch rows that this process computes, in ascending order.

    Args:
        mesh: mesh of the run; None for one device.
        rows: number of rows of the micro-batch.
    """
    if mesh is None:
        return list(range(rows))
    sharding = sharding_for(mesh, ("batch", None), shape=(rows, 1))
    parts = sharding.addressable_devices_indices_map((rows, 1)).values()
    return sorted({row for part in parts if part for row in range(*part[0].indices(rows))})


def put_batch(batch: T, mesh: Mesh | None, rows: int = 0) -> T:
    """Splits the rows of every array ``[..., rows, tokens]`` of a batch over the mesh's batch axes.

    Args:
        batch: arrays on the host.
        mesh: mesh of the run; None for one device.
        rows: number of rows of the whole batch, if the arrays have only the rows of this process
            (`own_rows`); 0 if the arrays have all rows.
    """
    if mesh is None:
        return batch
    own = own_rows(mesh, rows) if rows else []

    def place(array: np.ndarray) -> jax.Array:
        *outer, count, length = array.shape
        shape = (*outer, rows or count, length)
        sharding = sharding_for(mesh, (*(None,) * len(outer), "batch", None), shape=shape)

        def part(index: Any) -> np.ndarray:
            if not rows:
                return array[index]
            start, stop, _ = index[-2].indices(rows)
            first = own.index(start)
            return array[(*index[:-2], slice(first, first + stop - start), index[-1])]

        return jax.make_array_from_callback(shape, sharding, part)

    return jax.tree.map(place, batch)
