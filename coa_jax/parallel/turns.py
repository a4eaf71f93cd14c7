"""One order of the programs that several devices of this process run together.

While rollouts go on beside an update, two threads start programs: engines in one, the update in the
other.  A program of several devices goes into a queue of each of them.  If two threads filled the
queues at the same time, one device could have the first program before the second, and another
device the second before the first; each program would then wait for the other one for ever.  So a
thread puts its program into all queues before another thread begins.  It does not wait for the
program to end.

Programs of all processes are started by the main thread of each, in one order everywhere; engines
are of one process.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding

T = TypeVar("T")

_TURN = threading.RLock()


def turn(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """Held while a program of a mesh is started; programs of one device need no turn.

    Args:
        mesh: devices of the program; None for one device.
    """
    return contextlib.nullcontext() if mesh is None or mesh.size == 1 else _TURN


def mesh_of(array: Any) -> Mesh | None:
    """The devices on which an array lies; None for one device."""
    place = getattr(array, "sharding", None)
    if isinstance(place, NamedSharding) and isinstance(place.mesh, Mesh):
        return place.mesh
    return None


def in_turn(mesh: Mesh | None, program: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Starts a program in its turn and returns its result, which may not be there yet.

    Simulated devices of a CPU have no queues, and programs that wait for each other take the
    threads that the others need: there the program ends in its turn.
    """
    with turn(mesh):
        result = program(*arguments, **options)
        if mesh is not None and mesh.size > 1 and mesh.devices.flat[0].platform == "cpu":
            jax.block_until_ready(result)
        return result
