"""An evaluation that is killed and restarted writes the same file as an undisturbed one."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coa_jax.data.trajectory import read_trajectories
from coa_jax.model.api import save_model
from tests import tiny_policy
from tests.evaluation.tiny_evaluation import MANY, policy_of, results, run
from tests.killing import lines_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds the policy and an evaluation that nobody killed."""
    path = tmp_path_factory.mktemp("kill")
    save_model(tiny_policy.policy(), path / "model")
    run(path / "whole", MANY, policy_of(MANY))
    return path


def kill_once(folder, name, more, delay):
    """Kills a process some samples after it began to add any; whether it was still running."""
    traces = folder / name / "traces.jsonl"
    before = lines_of(traces)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.evaluation.tiny_evaluation", str(folder), name],
        cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    end = time.monotonic() + 200
    try:
        while process.poll() is None and lines_of(traces) < before + more:
            assert time.monotonic() < end
            time.sleep(0.001)
        time.sleep(delay)
        return process.poll() is None
    finally:
        process.kill()
        _, errors = process.communicate()
        assert process.returncode in (0, -9), errors.decode()[-2000:]


def check(folder, name):
    traces = folder / name / "traces.jsonl"
    whole = [line for line in traces.read_bytes().split(b"\n")[:-1] if line]
    (folder / "kept.jsonl").write_bytes(b"\n".join(whole) + b"\n")
    before = {(t.task_id, t.sample_id): t for t in read_trajectories(folder / "kept.jsonl")}
    assert len(before) == len(whole), "a sample was run twice"
    assert 0 < len(before) < 3 * MANY.samples
    run(folder / name, MANY, policy_of(MANY))
    assert results(folder / name) == results(folder / "whole")
    after = {(t.task_id, t.sample_id): t for t in read_trajectories(traces)}
    assert len(after) == 3 * MANY.samples
    for key, earlier in before.items():
        assert after[key].metadata["seconds"] == earlier.metadata["seconds"]


@pytest.mark.slow
def test_samples_differ_and_so_the_files_could(folder):
    found = {t.text for t in read_trajectories(folder / "whole" / "traces.jsonl")}
    assert len(found) > MANY.samples


def test_a_killed_evaluation_goes_on_to_the_same_file(folder):
    assert kill_once(folder, "once", 3, 0.0)
    check(folder, "once")


@pytest.mark.slow
def test_an_evaluation_that_is_killed_again_and_again_goes_on_to_the_same_file(folder):
    chance = random.Random(7)
    killed = sum(
        kill_once(folder, "often", chance.randrange(1, 9), chance.uniform(0, 0.05))
        for _ in range(5)
    )
    assert killed >= 3
    check(folder, "often")
