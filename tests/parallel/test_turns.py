"""Programs of two threads come in one order on the devices of a process; none waits for ever."""

from __future__ import annotations

import threading
import time

import jax
import numpy as np

from coa_jax.parallel.turns import in_turn, turn
from tests.parallel.launched import launch

PROGRAM = """
import threading
from coa_jax.cli import run_main

def main(argv):
    import jax, jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from coa_jax.parallel import processes
    from coa_jax.parallel.turns import in_turn

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
            y = in_turn(mesh, run, x)
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
        threading.Thread(target=lambda: [in_turn(mesh, program) for _ in range(5)])
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 15 and max(most) == 1


def test_programs_of_one_device_do_not_wait():
    with turn(_Two()):
        waited = threading.Thread(target=in_turn, args=(None, lambda: None))
        waited.start()
        waited.join(timeout=5)
        assert not waited.is_alive()


class _Two:
    """The part of a mesh of two devices that counts."""

    size, devices = 2, np.array([jax.devices()[0]] * 2)
