"""Keeps a common order of the multi-device programs that several threads of a process launch.

If rollouts continue during an update, two threads launch programs: one thread launches those of the
engines, the other thread those of the update. A multi-device program enters a queue of each of its
devices. If two threads filled the queues at the same time, two devices could have two programs in
opposite order, and both programs would wait for each other forever. A thread therefore puts its
program into all queues before another thread begins. The thread does not wait until the program has
ended.

Programs that span processes are launched only by the main threads, in the same order in every
process. The programs of an engine belong to one process. The barriers of checkpoints launch no
programs: the processes wait through JAX's coordination service.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding

T = TypeVar("T")

_LAUNCH_LOCK = threading.RLock()


@contextlib.contextmanager
def launch_lock(mesh: Mesh | None) -> Iterator[Callable[[Any], Any]]:
    """Holds a lock while a multi-device program is launched, so that programs cannot deadlock.

    Without the lock, two devices could get the programs of two threads in opposite order, and both
    programs would wait forever. A program for a single device needs no lock: the context manager
    then has no effect.

    The simulated devices of a CPU have no queues: a waiting program occupies threads that the
    running program may need, which is a deadlock too. On a CPU, the lock is therefore held until
    the program has ended.

    Args:
        mesh: devices on which the program runs; None for one device.

    Yields:
        A function to which the caller passes the result of the program inside the block. It returns
        the result; on a CPU, it first waits until the program has ended.
    """
    if mesh is None or mesh.size == 1:
        yield lambda result: result
        return
    waits = mesh.devices.flat[0].platform == "cpu"
    with _LAUNCH_LOCK:
        yield jax.block_until_ready if waits else lambda result: result


def mesh_of(array: Any) -> Mesh | None:
    """Returns the mesh over which an array is sharded; None for an array on one device."""
    sharding = getattr(array, "sharding", None)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return sharding.mesh
    return None


def launch_alone(
    mesh: Mesh | None, program: Callable[..., T], *arguments: Any, **options: Any
) -> T:
    """Launches a program while no other thread launches a multi-device program; see `launch_lock`.

    Args:
        mesh: devices on which the program runs; None for one device.
        program: function that launches the program on the devices.
        *arguments: arguments of the program.
        **options: keyword arguments of the program.

    Returns:
        The result of the program, which the devices may still be computing.
    """
    with launch_lock(mesh) as finish:
        return finish(program(*arguments, **options))
