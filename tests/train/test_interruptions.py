"""What every trainer promises of a run that is killed or asked to stop.

A run that is killed (kill -9) and started again ends with the same bits. SIGTERM saves the run and
ends it with exit code 143; started again, the run ends with the same bits. The runs of SFT are
those of the command line. The same promises are tested elsewhere for an evaluation during training
(test_held_out.py), for several processes (tests/parallel/test_training.py), and for a directory in
a bucket (tests/storage/test_runs.py).
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from coa_jax.data.trajectory import read_trajectories
from coa_jax.train.rl import replay_steps
from coa_jax.train.rl_config import RLConfig
from coa_jax.train.stop import end_run
from tests import tiny_policy
from tests.killing import assert_same_run, copy_compiled
from tests.train.killed_runs import kill_once, stop_after_a_step
from tests.train.tiny_runs import PHASE, STEPS, config_of, run_kind, write_graded

KINDS = ("sft", "dpo", "rft", "rl", "agents", "stream")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("interruptions")
    tiny_policy.write_sft_inputs(path)
    write_graded(path / "traces.jsonl")
    return tiny_policy.write_rl_inputs(path)


@pytest.fixture(scope="module")
def kind(request, folder) -> str:
    """A kind of run; the run that nobody interrupted is in its folder."""
    if request.param != "stream":  # samples of a stream depend on time
        run_kind(request.param, folder, f"{request.param}-whole")
    copy_compiled(folder / f"{request.param}-compiled")
    return request.param


def kinds(*fast: str) -> pytest.MarkDecorator:
    """All kinds of runs; a kind that `fast` does not name runs in the slow suite only."""
    marked = [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in KINDS]
    return pytest.mark.parametrize("kind", marked, indirect=True, scope="module")


def go_on_to_the_same_bits(kind: str, folder: Path, name: str) -> None:
    """Starts a run again; it ends like the whole run or, if it streams, as its record says."""
    run_kind(kind, folder, name)
    config = config_of(kind, folder)
    if kind == "stream":
        assert isinstance(config, RLConfig)
        repeated = replay_steps(config, folder / name)
        assert repeated.steps == STEPS[kind] and repeated.identical, str(repeated)
        kept = read_trajectories(folder / name / "traces.jsonl")
        assert any("restarts" in t.metadata for t in kept)  # a sample gave way to others
    else:
        assert_same_run(folder / f"{kind}-whole", folder / name, PHASE[kind], STEPS[kind])


@kinds("sft")
def test_a_killed_run_ends_with_the_same_bits(kind, folder):
    assert kill_once(kind, folder, f"{kind}-killed", random.Random(7))
    go_on_to_the_same_bits(kind, folder, f"{kind}-killed")


@kinds("rl")
def test_sigterm_saves_and_the_run_goes_on_to_the_same_bits(kind, folder):
    name = f"{kind}-stopped"
    code, errors = stop_after_a_step(kind, folder, name)
    assert code == 128 + signal.SIGTERM, errors
    assert "Traceback" not in errors
    assert "SIGTERM: the run saves its state" in errors  # at once, and not after the step
    (line,) = [line for line in errors.splitlines() if line.startswith("stopped by SIGTERM")]
    done = int(line.split()[5])
    assert 1 <= done < STEPS[kind], line
    assert str(done) in os.listdir(folder / name / "checkpoints" / PHASE[kind])
    assert not (folder / name / "model").exists()
    go_on_to_the_same_bits(kind, folder, name)


def test_a_launch_script_chooses_the_exit_code_of_a_stopped_run(monkeypatch):
    monkeypatch.setenv("COA_JAX_STOP_CODE", "3")
    with pytest.raises(SystemExit) as ended:
        end_run(1, 2)
    assert ended.value.code == 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "rl"], indirect=True, scope="module")
def test_a_run_killed_at_twenty_random_moments_ends_with_the_same_bits(kind, folder):
    chance, kills, part = random.Random(11), 0, 0
    while kills < 20:
        name = f"{kind}-often-{part}"
        if kill_once(kind, folder, name, chance):
            kills += 1
            continue
        go_on_to_the_same_bits(kind, folder, name)  # it came to its end; the next one begins anew
        part += 1
    go_on_to_the_same_bits(kind, folder, name)
