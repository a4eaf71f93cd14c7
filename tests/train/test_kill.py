"""Runs that are killed or asked to stop end with the same parameters."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from tests import tiny_policy
from tests.killing import assert_same_run, copy_compiled
from tests.train.killed_runs import PHASE, kill_once, start, wait_until
from tests.train.tiny_runs import SFT_STEPS, config_of, rows, run_rl, run_sft

STEPS = {"sft": SFT_STEPS, "rl": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("kill")
    tiny_policy.write_sft_inputs(path)
    return tiny_policy.write_rl_inputs(path)


def run_here(kind: str, folder: Path, name: str) -> None:
    config = config_of(kind, folder)
    (run_sft if kind == "sft" else run_rl)(folder / name, config)  # type: ignore[operator]


@pytest.fixture(scope="module")
def kind(request, folder) -> str:
    """A kind of run; the run that nobody interrupted is in its folder."""
    run_here(request.param, folder, f"{request.param}-whole")
    copy_compiled(folder / f"{request.param}-compiled")
    return request.param


def kinds(*fast: str) -> pytest.MarkDecorator:
    """All kinds of run, those that are not named in the slow suite."""
    marked = [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in STEPS]
    return pytest.mark.parametrize("kind", marked, indirect=True, scope="module")


def assert_same(kind: str, folder: Path, name: str) -> None:
    assert_same_run(folder / f"{kind}-whole", folder / name, PHASE[kind], STEPS[kind])


@kinds("sft")
def test_a_killed_run_ends_with_bit_identical_parameters(kind, folder):
    assert kill_once(kind, folder, f"{kind}-killed", random.Random(7))
    run_here(kind, folder, f"{kind}-killed")
    assert_same(kind, folder, f"{kind}-killed")


@kinds()
def test_a_run_killed_at_twenty_random_moments_ends_with_bit_identical_parameters(kind, folder):
    chance, kills, part = random.Random(11), 0, 0
    while kills < 20:
        name = f"{kind}-often-{part}"
        if kill_once(kind, folder, name, chance):
            kills += 1
            continue
        assert_same(kind, folder, name)  # it came to its end; the next one begins anew
        part += 1
    run_here(kind, folder, name)
    assert_same(kind, folder, name)


@kinds("rl")
def test_sigterm_saves_and_the_run_goes_on_to_the_same_parameters(kind, folder):
    name = f"{kind}-stopped"
    with start(kind, folder, name) as process:
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
    assert_same(kind, folder, name)
