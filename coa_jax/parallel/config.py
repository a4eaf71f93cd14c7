"""Settings of the mesh, and of the devices on which rollouts run."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from coa_jax.config.fields import MAX_INT, Between, Bounded, Natural, Seconds

Axis = Annotated[int, Between(1, MAX_INT, also=(-1,))]


@dataclasses.dataclass(frozen=True)
class MeshConfig(Bounded):
    """Sizes of the mesh axes, and the devices on which rollouts run.

    One of ``data``, ``fsdp`` and ``tensor`` may be -1; this axis then takes the remaining devices.

    Attributes:
        data: number of replicas of the parameters.
        fsdp: number of parts of batch and parameters; -1 for all devices.
        tensor: number of parts of each layer (of its heads, MLP width and vocabulary).
        decode_tensor: number of devices over which a decoding engine splits the model; 0 takes the
            value of ``tensor``. The devices of a process are divided among engines of this size.
        rollout_devices: number of devices of each process that are reserved for rollouts. The last
            devices of the process are reserved; the mesh consists of all other devices. With 0, the
            same devices train and sample.
        collectives: strategy for the matmuls of training on a mesh. ``compiler`` leaves the
            collectives to XLA, ``manual`` writes them explicitly, and ``auto`` is ``manual`` on
            TPUs and ``compiler`` elsewhere.
        wait_seconds: number of seconds after which a process that waits for other processes logs
            which of them are missing. The process then continues to wait.
    """

    data: Axis = 1
    fsdp: Axis = 1
    tensor: Axis = 1
    decode_tensor: Natural = 0
    rollout_devices: Natural = 0
    collectives: Literal["auto", "compiler", "manual"] = "auto"
    wait_seconds: Seconds = 600.0
