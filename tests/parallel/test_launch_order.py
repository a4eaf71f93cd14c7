"""Programs of two threads come in one order on the devices of a process; none waits for ever."""

from __future__ import annotations

import contextlib
import threading
import time

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from coa_jax.parallel import launch_order, processes
from coa_jax.parallel.launch_order import launch_alone, launch_lock
from coa_jax.parallel.transfer import gather
from coa_jax.train.checkpoint import Checkpoints
from tests.parallel.launched import launch, launch_function

PROGRAM = """
import threading
from coa_jax.run.command import run_main

def main(argv):
    import jax, jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from coa_jax.parallel import processes
    from coa_jax.parallel.launch_order import launch_alone

    def program(devices, size):
        # A sum over all devices of a mesh, as updates and engines have many of.
        mesh = Mesh(np.array(devices), ("x",))
        place = NamedSharding(mesh, PartitionSpec("x"))
        run = jax.jit(
            jax.shard_map(
                lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=PartitionSpec("x"),
                out_specs=PartitionSpec(),
            )
        )
        host = np.ones(len(devices) * size, np.float32)
        x = jax.make_array_from_callback(host.shape, place, lambda index: host[index])
        return mesh, run, x

    def loop(devices, size, count, found):
        mesh, run, x = program(devices, size)
        for _ in range(count):
            y = launch_alone(mesh, run, x)
        found.append(float(np.asarray(y.addressable_shards[0].data)[0]))

    update, engine = [], []
    thread = threading.Thread(target=loop, args=(jax.local_devices(), 1000, 40, engine))
    thread.start()
    loop(jax.devices(), 1000, 40, update)
    thread.join()
    print("sums", update[0], engine[0], flush=True)

run_main(main)
"""


def test_an_update_of_two_processes_and_their_engines_run_beside_each_other(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = launch(2, 3, str(tmp_path / "program.py"), timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    said = sorted(line for line in done.stdout.splitlines() if "sums" in line)
    assert said == ["[0] sums 6.0 3.0", "[1] sums 6.0 3.0"]


def spread(devices) -> jax.Array:
    place = NamedSharding(Mesh(devices, "x"), PartitionSpec("x"))
    host = np.arange(64, dtype=np.float32)
    return jax.make_array_from_callback(host.shape, place, lambda index: host[index])


def save_and_gather(folder: str) -> None:
    """The part of the test below that each of two processes plays."""
    outside: list[str] = []
    allgather = multihost_utils.process_allgather

    def watched(*arguments, **options):  # `sync_global_devices` calls this function, too
        if not launch_order._LAUNCH_LOCK._is_owned():
            outside.append(what)
        return allgather(*arguments, **options)

    multihost_utils.process_allgather = watched
    local, everywhere = spread(jax.local_devices()), spread(jax.devices())
    done, rounds, total = threading.Event(), [], jax.jit(jax.numpy.sum)

    def engine():
        while not done.is_set():
            rounds.append(launch_alone(local.sharding.mesh, total, local))

    thread = threading.Thread(target=engine)
    thread.start()
    what = "open"
    with contextlib.closing(Checkpoints(folder, keep=1)) as checkpoints:
        for step in (1, 2, 3):
            what = "save"
            if step == 1 + processes.index():
                time.sleep(1)  # the other process waits
            checkpoints.save(step, {"w": everywhere}, {"step": step})
            what = "gather"
            assert gather([processes.index()], "numbers", 60) == [0, 1]
        checkpoints.wait()
        what = "restore"
        restored = checkpoints.newest({"w": everywhere})
        what = "close"
    done.set()
    thread.join()
    print("restored", restored.extra, bool(rounds), "outside:", *outside, flush=True)


@pytest.mark.slow
def test_saving_and_gathering_launch_no_program_out_of_turn_beside_engines(tmp_path):
    done = launch_function(save_and_gather, tmp_path / "c", devices=2)
    assert done.returncode == 0, done.stderr[-2000:]
    said = sorted(line for line in done.stdout.splitlines() if "restored" in line)
    assert said == [f"[{n}] restored {{'step': 3}} True outside:" for n in (0, 1)]


def test_a_thread_begins_when_the_program_of_another_is_in_all_queues():
    mesh = _Two()
    inside, most = 0, []

    def program():
        nonlocal inside
        inside += 1
        most.append(inside)
        time.sleep(0.01)  # queue after queue
        inside -= 1

    threads = [
        threading.Thread(target=lambda: [launch_alone(mesh, program) for _ in range(5)])
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 15 and max(most) == 1


def test_programs_of_one_device_do_not_wait():
    with launch_lock(_Two()):
        waited = threading.Thread(target=launch_alone, args=(None, lambda: None))
        waited.start()
        waited.join(timeout=5)
        assert not waited.is_alive()


class _Two:
    """The part of a mesh of two devices that counts."""

    size, devices = 2, np.array([jax.devices()[0]] * 2)
