"""Work that never ends is killed, and the next call still succeeds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coa_jax.tools.worker import WorkerBusyError, WorkerError, Workers, WorkerTimeoutError
from tests.tools.fault_server import stopwatch


def act(what, value=None):
    """Runs in the worker."""
    if what == "loop":
        while True:
            pass
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "raise":
        raise ValueError("what a value")
    if what == "print":
        print("noise " * 1000, flush=True)
    if what == "hoard":
        return len(bytearray(8 << 30))
    if what == "sleep":
        time.sleep(value)
    return [os.getpid(), value]


@pytest.fixture(scope="module")
def workers():
    return Workers("tests.tools.test_worker:act", count=2)


def test_a_process_answers_many_calls(workers):
    answers = [workers.ask("echo", i, timeout=30) for i in range(5)]
    assert [value for _, value in answers] == list(range(5))
    assert len({process for process, _ in answers}) == 1
    assert answers[0][0] != os.getpid()


@pytest.mark.parametrize("what", ["die", "raise", "hoard"])
def test_what_goes_wrong_is_an_error_and_the_next_call_works(workers, what):
    with pytest.raises(WorkerError):
        workers.ask(what, timeout=20)
    assert workers.ask("echo", 1, timeout=20)[1] == 1


def test_neither_waiting_for_others_nor_a_busy_machine_takes_a_calls_own_time():
    one = Workers("tests.tools.test_worker:act", count=1)
    one.ask("echo", timeout=30)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(one.ask, "sleep", 1.5, timeout=30)
        time.sleep(0.3)
        second = threads.submit(one.ask, "sleep", 1.0, timeout=0.5, wait=30.0)
        assert second.result()[1] == 1.0
        assert first.done()
    with pytest.raises(WorkerBusyError, match=r" 0\.5 seconds$"):
        one.ask("sleep", 30, timeout=30.0, wait=0.5)


@pytest.mark.parametrize(
    "hide",
    [
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})",
        "signal.signal(signal.SIGPROF, signal.SIG_IGN)",
    ],
    ids=["blocked", "ignored"],
)
def test_processor_time_is_limited_whatever_signals_the_parent_hides(hide):
    # In a process of its own: libtpu, which other tests load, uses SIGPROF itself.
    parent = f"""
import signal
from coa_jax.tools.worker import WorkerTimeoutError, Workers
{hide}
try:
    Workers("tests.tools.test_worker:act", count=1).ask("loop", timeout=0.5, wait=60.0)
except WorkerTimeoutError as error:
    print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", parent], capture_output=True, text=True, timeout=120
    )
    assert "processor time" in run.stdout, run.stderr


def test_an_endless_call_is_killed_in_time(workers):
    process, _ = workers.ask("echo", timeout=20)
    seconds = stopwatch()
    with pytest.raises(WorkerTimeoutError):
        workers.ask("loop", timeout=0.3)
    assert seconds() < 10
    assert not Path(f"/proc/{process}").exists()
    assert workers.ask("echo", 7, timeout=20)[1] == 7


def test_a_process_that_reads_nothing_is_killed_in_time():
    one = Workers("tests.tools.test_worker:act", count=1)
    process, _ = one.ask("echo", timeout=30)
    os.kill(process, signal.SIGSTOP)
    with pytest.raises(WorkerTimeoutError):
        one.ask("echo", "x" * (8 << 20), timeout=0.5)
    assert one.ask("echo", 1, timeout=30)[1] == 1


@pytest.mark.parametrize("wait", [None, 30.0])
def test_that_a_process_does_not_start_is_not_the_fault_of_the_call(wait):
    with pytest.raises(WorkerBusyError, match=f" {__name__}:missing "):
        Workers("tests.tools.test_worker:missing").ask(timeout=20, wait=wait)


def test_prints_are_no_answers(workers):
    assert workers.ask("print", "kept", timeout=20)[1] == "kept"


def test_calls_wait_for_a_free_process_and_no_longer_than_they_may():
    pair = Workers("tests.tools.test_worker:act", count=1)
    pair.ask("echo", timeout=20)
    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(pair.ask, "sleep", 1.0, timeout=20)
        time.sleep(0.2)
        with pytest.raises(WorkerBusyError, match=r"no process .* 0\.2 seconds$"):
            pair.ask("echo", timeout=0.2)
        assert pair.ask("echo", 3, timeout=20)[1] == 3
        assert long.result()


@pytest.mark.slow
def test_a_worker_does_not_outlive_its_parent():
    code = (
        "import os, threading\nfrom coa_jax.tools.worker import Workers\n"
        "workers = Workers('tests.tools.test_worker:act', count=1)\n"
        "print(workers.ask('echo', timeout=30)[0], flush=True)\n"
        "threading.Thread(target=workers.ask, args=('loop',), kwargs={'timeout': 1.0}).start()\n"
        "import time; time.sleep(0.2)\nos.kill(os.getpid(), 9)\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    worker = Path(f"/proc/{int(answer.stdout)}/stat")
    end = time.monotonic() + 10
    while worker.exists() and worker.read_text().split()[2] != "Z" and time.monotonic() < end:
        time.sleep(0.1)
    assert not worker.exists() or worker.read_text().split()[2] == "Z"
