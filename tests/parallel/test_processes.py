"""Real processes that work together over gloo, some of which die or never start."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.parallel.launched import ROOT, launch

PROGRAM = """
import os, signal, sys, time
from coa_jax.run.command import run_main

def main(argv):
    import jax
    from coa_jax.parallel import processes
    from coa_jax.parallel.transfer import gather
    case, me = os.environ["CASE"], processes.index()
    assert processes.count() == jax.process_count() == 2 and me == jax.process_index()
    mine = processes.local_items(list(range(7)))
    # Of very different sizes, and once more than the smallest message.
    items = [(n, "x" * 10**n) for n in mine]
    merged = gather(items, "gathering", 60)
    assert [(n, len(text)) for n, text in merged] == [(n, 10**n) for n in range(7)]
    for turn in range(3):
        told = processes.all_gather([turn, me], "telling", 60)
        assert told == [[turn, 0], [turn, 1]]
    print("gathered", mine, flush=True)
    if me == int(case[-1]):
        processes.set_activity("rollouts of step 3")
        if "kill" in case:
            processes.barrier("rollouts", 60)
            if "freeze" in case:
                time.sleep(1)  # so that the other has heard what this one is at
                os.kill(os.getpid(), signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGKILL)
        if case.startswith("fail"):
            raise KeyError("no such thing")
        if case.startswith("unread"):
            silence(1)
            print("rollouts", flush=True)
        if case.startswith("late"):
            time.sleep(6)
    if "kill" in case:
        processes.barrier("rollouts", 60)
        time.sleep(60)
    if case.startswith("late to tell"):
        processes.all_gather(0, "the update of step 3", 1.5)
    elif case.startswith("late to end"):
        from coa_jax.train.stop import Stop
        assert Stop().agreed(1.5, due=me == 1) == (False, False)
        assert Stop().agreed(1.5, due=True) == (False, True)
    elif case.startswith("late"):
        processes.barrier("the update of step 3", 1.5)
    if case.startswith("late"):
        print("met", flush=True)
    if case.startswith("fail"):
        time.sleep(60)
    if case.startswith("unread"):
        silence(2)
        processes.barrier("the update of step 3", 60)

def silence(stream):
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, stream)

run_main(main)
"""


def run(tmp_path, case, grace=60):
    (tmp_path / "program.py").write_text(PROGRAM)
    command, env = str(tmp_path / "program.py"), {"CASE": case, "COA_JAX_LOST_SECONDS": "2"}
    return launch(2, 2, command, timeout=120, grace=grace, **env)


def lines(text, process):
    return [line[4:] for line in text.splitlines() if line.startswith(f"[{process}] ")]


JOIN = """
from coa_jax.errors import UserError
from coa_jax.parallel import processes
try:
    processes.join()
except UserError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"COA_JAX_COORDINATOR": "node01"}, "COA_JAX_COORDINATOR is 'node01'; give HOST:PORT"),
        ({"COA_JAX_COORDINATOR": ":80"}, "COA_JAX_COORDINATOR is ':80'; give HOST:PORT"),
        ({"COA_JAX_COORDINATOR": "a:b"}, "COA_JAX_COORDINATOR is 'a:b'; give HOST:PORT"),
        ({"COA_JAX_LOST_SECONDS": "inf"}, "COA_JAX_LOST_SECONDS is 'inf'; give seconds above 0"),
        ({"COA_JAX_LOST_SECONDS": "0"}, "COA_JAX_LOST_SECONDS is '0'; give seconds above 0"),
        ({}, "cannot join the other processes (coordinator_address should be defined"),
    ],
)
def test_an_environment_in_which_nobody_can_join_is_explained(variables, message):
    rest = {"COA_JAX_NUM_PROCESSES": "2", "COA_JAX_PROCESS_ID": "0", "TPU_SKIP_MDS_QUERY": "1"}
    done = subprocess.run(
        [sys.executable, "-c", JOIN],
        capture_output=True, text=True, env={**os.environ, **rest, **variables}, timeout=120,
    )  # fmt: skip
    assert done.stdout.startswith(message), done.stdout + done.stderr


IMPORTS = """
import importlib, pkgutil
from jax._src import xla_bridge
import coa_jax
for module in pkgutil.iter_modules(coa_jax.__path__):
    importlib.import_module(f"coa_jax.{module.name}")
    assert not xla_bridge.backends_are_initialized(), module.name
import coa_jax.cli.distill, coa_jax.cli.evaluate
assert not xla_bridge.backends_are_initialized()
"""


def test_no_entry_point_uses_jax_before_it_has_joined_the_others():
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_processes_gather_in_order_and_a_killed_one_is_named(tmp_path):
    done = run(tmp_path, "kill 1")
    assert lines(done.stdout, 0)[-1:] == ["gathered [0, 2, 4, 6]"], done.stderr
    assert lines(done.stdout, 1)[-1:] == ["gathered [1, 3, 5]"], done.stderr
    assert done.returncode == 128 + 9
    assert "error: process 1 ended with exit code 137" in done.stderr
    assert "error: process 0 ended with exit code 3" in done.stderr
    (line,) = lines(done.stderr, 0)
    assert re.match(
        r"error: process 1 \(.*, pid \d+\) has sent no heartbeat for [2345] s; its last activity: "
        r".*rollouts.*; run the same command again to continue$",
        line,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("late to end 1", "the end of a step"),
        pytest.param("late 1", "the update of step 3", marks=pytest.mark.slow),
        pytest.param("late to tell 1", "the update of step 3", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_is_slow_is_named_and_waited_for(tmp_path, case, what):
    done = run(tmp_path, case)
    assert done.returncode == 0, done.stderr
    assert [lines(done.stdout, process)[-1] for process in (0, 1)] == ["met", "met"]
    told = [line for line in lines(done.stderr, 0) if f"{what}: waiting for " in line]
    assert len(told) >= 2  # every 1.5 of about 6 seconds
    assert re.search(r"waiting for [1-3] s for process 1 \(.*, pid \d+\), which is at: ", told[0])
    assert told[-1].endswith("rollouts of step 3")


@pytest.mark.slow
def test_the_others_end_with_the_process_that_coordinates(tmp_path):
    done = run(tmp_path, "kill 0")
    assert done.returncode == 128 + 9
    assert "error: process 0 ended with exit code 137" in done.stderr
    assert "error: process 1 ended with exit code 3" in done.stderr
    assert re.match(
        r"error: process 0, the coordinator at 127.0.0.1:\d+, is gone; run the same command again",
        lines(done.stderr, 1)[-1],
    )


@pytest.mark.slow
def test_a_frozen_coordinator_is_named_though_its_service_does_not_answer(tmp_path):
    done = run(tmp_path, "kill or rather freeze 0", grace=5)
    assert done.returncode == 3
    line = lines(done.stderr, 1)[-1]
    assert re.match(
        r"error: process 0 \(.*, pid \d+\) has sent no heartbeat for [2345] s; its last activity: "
        r"rollouts of step 3; run the same command again to continue$",
        line,
    )


@pytest.mark.slow
def test_a_process_that_fails_ends_the_others_at_once_and_says_why(tmp_path):
    done = run(tmp_path, "fail 1")
    assert done.returncode == 1
    assert any("KeyError: 'no such thing'" in line for line in lines(done.stderr, 1))
    (line,) = lines(done.stderr, 0)
    assert "error: process 1 (" in line and "has failed: KeyError('no such thing')" in line
    # No launcher shall start it again, whichever process it asks.
    assert [f"process {n} ended with exit code 1" in done.stderr for n in (0, 1)] == [True, True]


@pytest.mark.slow
def test_a_process_whose_output_nobody_reads_ends_the_others_at_once(tmp_path):
    done = run(tmp_path, "unread 0", grace=20)
    assert done.returncode == 141
    # Process 1 ends by itself, although nobody reads its output: a killed process has another code.
    assert "process 1 ended with exit code 141" in done.stderr


STOPPING = """
import os, signal, threading, time
from coa_jax.run.command import run_main

def main(argv):
    from coa_jax.train.stop import stop_on_sigterm
    from coa_jax.parallel import processes
    me, abandoned = processes.index(), threading.Event()
    pids = processes.all_gather(os.getpid(), "pids", 60)
    with stop_on_sigterm(abandoned.set) as stop:
        assert not abandoned.wait(2.5) and stop.agreed(60) == (False, False)
        if me == 1:
            os.kill(pids[0], signal.SIGTERM)  # which waits for this one
            assert abandoned.wait(30)
        if os.environ["CASE"] == "all_gather":
            told = processes.all_gather(abandoned.is_set(), "rollouts", 60)
            assert told == [False, True], told
        else:
            processes.barrier("rollouts", 60)
        assert abandoned.wait(30) and stop.agreed(60) == (True, False)
    print("stopped", flush=True)

run_main(main)
"""


@pytest.mark.parametrize("case", [pytest.param("all_gather", marks=pytest.mark.slow), "barrier"])
def test_a_request_to_stop_reaches_the_others_though_its_process_waits_for_them(tmp_path, case):
    (tmp_path / "program.py").write_text(STOPPING)
    done = launch(2, 1, str(tmp_path / "program.py"), timeout=200, CASE=case)
    assert done.returncode == 0, done.stderr
    assert [lines(done.stdout, process)[-1] for process in (0, 1)] == ["stopped"] * 2


LATE = """
import time
from coa_jax.run.command import run_main

def main(argv):
    import jax, jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec
    from coa_jax.parallel import processes
    from coa_jax.parallel.placement import training_mesh
    from coa_jax.parallel.config import MeshConfig
    mesh = training_mesh(MeshConfig(1, 2, 2))
    place = NamedSharding(mesh, PartitionSpec(("fsdp", "tensor")))
    rows = jax.make_array_from_callback((4,), place, lambda index: jnp.ones(4)[index])
    if processes.index() == 1:
        time.sleep(45)  # compiles a large program
    print("sum", float(jax.jit(jnp.sum)(rows)), flush=True)

run_main(main)
"""


@pytest.mark.slow
def test_a_process_that_compiles_for_long_is_waited_for_at_the_first_collective(tmp_path):
    (tmp_path / "program.py").write_text(LATE)
    done = launch(2, 2, str(tmp_path / "program.py"), timeout=200)
    assert done.returncode == 0, done.stderr
    assert [lines(done.stdout, process)[-1] for process in (0, 1)] == ["sum 4.0"] * 2
