"""Runs that are killed or asked to stop end with the same parameters."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from coa_jax.model.api import Model, save_model
from coa_jax.trajectory import read_trajectories, write_records
from tests import tiny_policy
from tests.learn.tiny_runs import SFT_STEPS, config_of, rows, run_rl, run_sft

ROOT = Path(__file__).parents[2]
STEPS = {"sft": SFT_STEPS, "rl": 3}
PHASE = {"sft": "sft", "rl": "rl", "stream": "rl", "pool": "rl", "leave_out": "rl"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("kill")
    tiny_policy.write_untrained(path / "base")
    write_records(path / "data.jsonl", tiny_policy.records())
    model = tiny_policy.policy()
    save_model(Model(model.config, model.params, model.tokenizer), path / "model")
    lines = [
        json.dumps({"id": task.id, "question": task.question, "answer": task.gold[0]})
        for task in tiny_policy.TASKS
    ]
    (path / "tasks.jsonl").write_text("\n".join(lines) + "\n")
    return path


def run_here(kind: str, folder: Path, name: str) -> None:
    config = config_of(kind, folder)
    (run_sft if kind == "sft" else run_rl)(folder / name, config)  # type: ignore[operator]


@pytest.fixture(scope="module")
def kind(request, folder) -> str:
    """A kind of run; the run that nobody interrupted is in its folder."""
    run_here(request.param, folder, f"{request.param}-whole")
    # What was compiled here need not be compiled there.
    compiled = os.environ["JAX_COMPILATION_CACHE_DIR"]
    shutil.copytree(compiled, folder / f"{request.param}-compiled")
    return request.param


def kinds(*fast: str) -> pytest.MarkDecorator:
    """All kinds of run, those that are not named in the slow suite."""
    marked = [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in STEPS]
    return pytest.mark.parametrize("kind", marked, indirect=True, scope="module")


@contextlib.contextmanager
def started(kind: str, folder: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / f"{kind}-compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.learn.tiny_runs", kind, str(folder), name],
        cwd=ROOT,
        env={**os.environ, **cache, "JAX_PLATFORMS": "cpu"},
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


def wait_until(process: subprocess.Popen[bytes], condition) -> bool:
    """Whether a condition came true before the process ended."""
    end = time.monotonic() + 240
    while process.poll() is None:
        if condition():
            return True
        assert time.monotonic() < end
        time.sleep(0.001)
    return False


def writes_checkpoint(workdir: Path, kind: str) -> bool:
    folder = workdir / "checkpoints" / PHASE[kind]
    return folder.exists() and any("tmp" in name for name in os.listdir(folder))


def kill_once(kind: str, folder: Path, name: str, chance: random.Random) -> bool:
    """Kills a run at a random moment after it has begun to step; False if it ended before that."""
    workdir = folder / name
    with started(kind, folder, name) as process:
        # Rows that a resumed run takes back are no sign of life; a lock file with its number is.
        own = f"process {process.pid} on"
        lock = workdir / ".lock"
        wait_until(process, lambda: lock.exists() and own in lock.read_text())
        log = workdir / "metrics.jsonl"
        before = log.stat().st_size if log.exists() else 0
        moment = chance.choice(["checkpoint", "step", "step"])
        if moment == "checkpoint":
            reached = wait_until(process, lambda: writes_checkpoint(workdir, kind))
            delay = chance.uniform(0, 0.03)
        else:

            def moved() -> bool:
                return log.exists() and log.stat().st_size != before

            reached = wait_until(process, moved)
            delay = chance.uniform(0, 0.05 if kind == "sft" else 0.6)
        time.sleep(delay if reached else 0)
        if process.poll() is not None:
            errors = process.communicate()[1].decode()
            assert process.returncode == 0, errors[-3000:]
            return False
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    return True


def assert_same_run(kind: str, folder: Path, name: str) -> None:
    whole, other = folder / f"{kind}-whole", folder / name
    left, right = (load_file(p / "model" / "model.safetensors") for p in (whole, other))
    assert left.keys() == right.keys()
    for key in left:
        np.testing.assert_array_equal(left[key], right[key])
    history = [rows(p, PHASE[kind]) for p in (whole, other)]
    assert [row["step"] for row in history[1]] == list(range(1, STEPS[kind] + 1))
    assert [row.get("loss") for row in history[0]] == [row.get("loss") for row in history[1]]
    assert not list((other / "checkpoints" / PHASE[kind]).glob("damaged-*"))
    if kind != "sft":
        tokens = [
            [
                (t.metadata["step"], t.task_id, t.sample_id, t.tokens.tolist())
                for t in read_trajectories(p / "traces.jsonl")
            ]
            for p in (whole, other)
        ]
        assert tokens[0] == tokens[1]


@kinds("sft")
def test_a_killed_run_ends_with_bit_identical_parameters(kind, folder):
    assert kill_once(kind, folder, f"{kind}-killed", random.Random(7))
    run_here(kind, folder, f"{kind}-killed")
    assert_same_run(kind, folder, f"{kind}-killed")


@kinds()
def test_a_run_killed_at_twenty_random_moments_ends_with_bit_identical_parameters(kind, folder):
    chance, kills, part = random.Random(11), 0, 0
    while kills < 20:
        name = f"{kind}-often-{part}"
        if kill_once(kind, folder, name, chance):
            kills += 1
            continue
        assert_same_run(kind, folder, name)  # it came to its end; the next one begins anew
        part += 1
    run_here(kind, folder, name)
    assert_same_run(kind, folder, name)


@kinds("rl")
def test_sigterm_saves_and_the_run_goes_on_to_the_same_parameters(kind, folder):
    name = f"{kind}-stopped"
    with started(kind, folder, name) as process:
        assert wait_until(process, lambda: len(rows(folder / name, PHASE[kind])) >= 1)
        process.send_signal(signal.SIGTERM)
        errors = process.communicate(timeout=120)[1].decode()
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    (line,) = [line for line in errors.splitlines() if line.startswith("stopped by SIGTERM")]
    done = int(line.split()[5])
    assert 1 <= done < STEPS[kind], line
    folders = os.listdir(folder / name / "checkpoints" / PHASE[kind])
    assert str(done) in folders
    assert not (folder / name / "model").exists()
    run_here(kind, folder, name)
    assert_same_run(kind, folder, name)
