"""Starts programs to kill them, and compares runs that were killed with one that was not."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from coa_jax.data.trajectory import read_trajectories
from coa_jax.files import jsonl
from coa_jax.run.run_dir import RunDir

ROOT = Path(__file__).parents[1]


def kill_when(command: Sequence[str], folder: Path, file: Path, lines: int) -> int:
    """Starts a command, kills it (-9) when a file has more than so many lines.

    Args:
        command: the program and its arguments.
        folder: where it is run.
        file: that it appends to; need not be there yet.
        lines: whole lines.

    Returns:
        The whole lines that the file was left with.
    """
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 300
        while lines_of(file) <= lines:
            assert process.poll() is None, f"ended with {process.returncode} by itself"
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
    return lines_of(file)


def lines_of(file: Path) -> int:
    """Whole lines of a file; 0 where it is not."""
    return file.read_bytes().count(b"\n") if file.exists() else 0


def copy_compiled(folder: Path) -> Path:
    """Links the programs that are compiled so far: a killed process leaves half a program."""
    compiled = os.environ["JAX_COMPILATION_CACHE_DIR"]
    return Path(shutil.copytree(compiled, folder, copy_function=os.link))


@contextlib.contextmanager
def started(
    words: Sequence[str], compiled: Path, cwd: Path = ROOT, **env: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts ``python -m WORDS`` on a CPU; at the end of the block the process is killed.

    Args:
        words: the module and its arguments.
        compiled: folder of compiled programs, see `copy_compiled`.
        cwd: folder in which the process runs.
        env: more environment variables.
    """
    settings = {"JAX_COMPILATION_CACHE_DIR": str(compiled), "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **settings, **env},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


@contextlib.contextmanager
def stopped_after(last: int) -> Iterator[None]:
    """Stops the run of the block by an exception once it has logged a step."""

    class Stopped(Exception):
        pass

    def stop(self, step, phase, **scalars):
        original(self, step, phase, **scalars)
        if step == last:
            raise Stopped

    original = RunDir.metrics
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(RunDir, "metrics", stop)
        yield


def assert_same_run(first: Path, second: Path, phase: str, steps: int) -> None:
    """Both run directories have the same parameters, losses and, of RL runs, trajectories."""
    left, right = (load_file(run / "model" / "model.safetensors") for run in (first, second))
    assert left.keys() == right.keys()
    for key in left:
        np.testing.assert_array_equal(left[key], right[key])
    history = [
        [row for row in jsonl.read_objects(run / "metrics.jsonl") if row["phase"] == phase]
        for run in (first, second)
    ]
    assert [row["step"] for row in history[1]] == list(range(1, steps + 1))
    assert [row.get("loss") for row in history[0]] == [row.get("loss") for row in history[1]]
    assert not list((second / "checkpoints" / phase).glob("damaged-*"))
    if phase == "rl":
        sampled = [
            [
                (t.metadata["step"], t.task_id, t.sample_id, t.tokens.tolist())
                for t in read_trajectories(run / "traces.jsonl")
            ]
            for run in (first, second)
        ]
        assert sampled[0] == sampled[1]
