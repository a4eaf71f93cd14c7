"""The script that runs a command as several processes of one machine."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from tests.parallel.launched import ROOT

SCRIPT = str(ROOT / "launch" / "local_processes.sh")


def run(*arguments, **options):
    return subprocess.run(
        ["bash", SCRIPT, *arguments], capture_output=True, text=True, timeout=60, **options
    )


def test_every_process_knows_the_others_and_its_lines_carry_its_number():
    program = (
        "echo $COA_JAX_PROCESS_ID of $COA_JAX_NUM_PROCESSES at $COA_JAX_COORDINATOR; "
        'echo "$XLA_FLAGS $1" >&2'
    )
    done = run("2", "--devices", "4", "--port", "12345", "bash", "-c", program, "x", "an argument",
               env={**os.environ, "XLA_FLAGS": "--a"})  # fmt: skip
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [
        f"[{i}] {i} of 2 at 127.0.0.1:12345" for i in range(2)
    ]
    assert sorted(done.stderr.splitlines()) == [
        f"[{i}] --a --xla_force_host_platform_device_count=4 an argument" for i in range(2)
    ]


def test_a_dry_run_prints_the_commands(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    done = run("2", "--devices", "3", "--port", "9", "--dry-run", "touch", "a file")
    assert done.returncode == 0
    for i, line in enumerate(done.stdout.splitlines()):
        assert "XLA_FLAGS='--xla_force_host_platform_device_count=3'" in line
        assert line.endswith(
            "COA_JAX_COORDINATOR=127.0.0.1:9 COA_JAX_NUM_PROCESSES=2 "
            f"COA_JAX_PROCESS_ID={i} touch a\\ file "
        )
    assert i == 1


def test_who_died_is_named_and_the_others_are_ended_after_the_grace():
    program = "[ $COA_JAX_PROCESS_ID = 1 ] && kill -9 $$; exec sleep 50"
    began = time.monotonic()
    done = run("3", "--grace", "1", "bash", "-c", program)
    assert time.monotonic() - began < 20
    assert done.returncode == 128 + 9
    first, second, *rest = done.stderr.splitlines()
    assert first == "error: process 1 ended with exit code 137"
    assert second == "error: ending the other processes"
    assert sorted(rest) == [f"error: process {i} ended with exit code 137" for i in (0, 2)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_processes(number):
    program = "trap 'echo ended; exit 0' TERM; echo ready; while :; do sleep 0.1; done"
    with subprocess.Popen(
        ["bash", SCRIPT, "2", "bash", "-c", program],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for _ in range(2):
            assert "ready" in process.stdout.readline()
        process.send_signal(number)
        assert sorted(process.stdout.read().splitlines()) == ["[0] ended", "[1] ended"]
        assert process.wait(timeout=20) == 0


@pytest.mark.parametrize("arguments", [(), ("x",), ("0", "true"), ("2",), ("2", "--devices", "a")])
def test_a_wrong_command_line_is_refused(arguments):
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
