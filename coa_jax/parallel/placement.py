"""Where a run's arrays live: its mesh, and its batches on it."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal, TypeVar

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from coa_jax.bounds import MAX_INT, Between, Bounded, Natural, Seconds
from coa_jax.parallel.mesh import make_mesh, sharding_for

T = TypeVar("T")

Axis = Annotated[int, Between(1, MAX_INT, also=(-1,))]


@dataclasses.dataclass(frozen=True)
class MeshConfig(Bounded):
    """Sizes of the mesh axes, and how long its processes wait for each other.

    Attributes:
        data, fsdp, tensor: see `make_mesh`; -1 takes what is left of the devices.
        decode_tensor: devices over which an engine splits the model, 0 for ``tensor``; a process
            has an engine for every so many of its devices.
        collectives: how the matmuls of training are split: by the ``compiler``, or by collectives
            that are written out (``manual``); ``auto`` takes the better choice for the platform.
        wait_seconds: how long a process waits where all meet for the last one to arrive.
    """

    data: Axis = 1
    fsdp: Axis = 1
    tensor: Axis = 1
    decode_tensor: Natural = 0
    collectives: Literal["auto", "compiler", "manual"] = "auto"
    wait_seconds: Seconds = 1800.0


def training_mesh(config: MeshConfig, rows: int = 0) -> Mesh | None:
    """The mesh of a configuration; None on one device, where placement is the default.

    Warnings say when devices have nothing to do, or the same as others.

    Args:
        config: sizes of the axes.
        rows: of a micro-batch; 0 where there are none.
    """
    there, mesh = jax.device_count(), None
    if (config.data, config.fsdp, config.tensor) != (1, 1, 1) or jax.process_count() > 1:
        mesh = make_mesh(config.data, config.fsdp, config.tensor)
    used = 1 if mesh is None else mesh.size
    if used < there:
        logging.warning(
            "the mesh has %d of %d devices, the others have nothing to do: config.mesh.fsdp=-1 "
            "takes what is left",
            used,
            there,
        )
    parts = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
    if rows % parts:
        logging.warning(
            "rows is %d, which mesh.data x mesh.fsdp = %d does not divide: devices compute the "
            "same rows; let rows be a multiple",
            rows,
            parts,
        )
    return mesh


def replicate(array: jax.Array, mesh: Mesh | None) -> jax.Array:
    """All of an array, which every process has, on every device of the mesh."""
    if mesh is None:
        return array
    whole, sharding = np.asarray(array), NamedSharding(mesh, PartitionSpec())
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def put_batch(batch: T, mesh: Mesh | None) -> T:
    """Splits the rows of every array ``[..., R, T]`` of a batch over the mesh's batch axes.

    Every process holds the whole batch and contributes its own rows.
    """
    if mesh is None:
        return batch

    def place(array: np.ndarray) -> jax.Array:
        sharding = sharding_for(
            mesh, (*(None,) * (array.ndim - 2), "batch", None), shape=array.shape
        )
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(place, batch)
