"""RL, replay and evaluation of a tiny policy in an environment from another folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from coa_jax.data.trajectory import StopReason, read_trajectories
from coa_jax.model.api import save_model
from tests.rollout.environments import guesser
from tests.test_extension_commands import coa_jax as console

RL = """
from coa_jax.run.command import load_config

def get_config():
    config = load_config("configs/rl/tiny.py")
    config.model, config.tasks, config.num_tasks = "model", "guess:load", 4
    config.environment.path, config.temperature = "guess:Guess", 1.0
    config.groups, config.group_size, config.row_length = 2, 4, 192
    config.engine.max_length = config.rollout.max_tokens = 192
    config.rollout.max_turn_tokens, config.rollout.max_tool_calls = 12, 6
    config.algorithm.name, config.optimizer.total_steps = "reinforce++", 2
    config.tools.names = ()
    return config
"""
EVALUATE = """
import rl_config
from coa_jax.run.command import load_config

def get_config():
    config, trained = load_config("configs/evaluate/tiny.py"), rl_config.get_config()
    for name in ("model", "tasks", "environment", "engine", "rollout", "tools"):
        config[name] = trained[name]
    config.num_tasks, config.samples = 3, 2
    return config
"""


def coa_jax(folder: Path, *arguments: str) -> str:
    """Runs a command; what it printed."""
    done = console(folder, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def prepared(path: Path) -> Path:
    """Writes the policy, the example and the configs into a folder."""
    save_model(guesser.policy(), path / "model")
    shutil.copy(guesser.EXAMPLE / "guess.py", path)
    (path / "rl_config.py").write_text(RL)
    (path / "evaluate_config.py").write_text(EVALUATE)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """An empty folder with the example, a policy, the configs, and a run of two steps."""
    path = prepared(tmp_path_factory.mktemp("guessing"))
    coa_jax(path, "rl", "--config=rl_config.py", "--workdir=run")
    return path


@pytest.mark.slow
def test_two_steps_of_rl_learn_from_rewards_of_turns(folder):
    rows = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [row for row in rows if row["phase"] == "rl"]
    assert [row["step"] for row in steps] == [1, 2]
    traces = read_trajectories(folder / "run" / "traces.jsonl")
    assert {t.stop_reason for t in traces} & {StopReason.ENVIRONMENT}
    for row in steps:
        mine = [t for t in traces if t.metadata["step"] == row["step"]]
        given = [c.reward for t in mine for c in t.tool_calls if c.reward is not None]
        assert row["env/turn_reward"] == pytest.approx(np.mean(given))
        assert row["reward/mean"] == pytest.approx(sum(given) / len(mine))
        assert row["tokens"] > 0 and row["optim/grad_norm"] > 0


@pytest.mark.slow
def test_the_run_is_repeated_without_the_environment(folder):
    (folder / "guess.py").rename(folder / "guess_away.py")
    (folder / "guess.py").write_text(
        (folder / "guess_away.py").read_text().replace("def step", "def no_step")
    )
    try:
        said = coa_jax(folder, "rl", "--replay=run")
    finally:
        (folder / "guess_away.py").replace(folder / "guess.py")
    assert "parameters identical after every step" in said


@pytest.mark.slow
def test_an_evaluation_acts_in_the_environment(folder):
    coa_jax(folder, "evaluate", "--config=evaluate_config.py", "--workdir=measured")
    traces = read_trajectories(folder / "measured" / "traces.jsonl")
    assert len(traces) == 6
    assert all(t.reward.value == pytest.approx(sum(c.reward or 0 for c in t.tool_calls))
               for t in traces)  # fmt: skip
    results = json.loads((folder / "measured" / "evaluate" / "debug" / "results.json").read_text())
    assert results["settings"]["environment"] == {"path": "guess:Guess", "options": {}}


@pytest.mark.slow
def test_a_question_is_asked_in_the_environment(folder):
    said = coa_jax(
        folder, "ask", "Guess my number.", "--model=model", "--config=evaluate_config.py",
        "--max_tokens=192", "--max_turn_tokens=12", "--tools=",
    )  # fmt: skip
    assert "It is" in said or "That" in said


DYING = """
import os
import guess

class Dying(guess.Guess):
    steps = 0
    def step(self, turn):
        Dying.steps += 1
        if str(Dying.steps) == os.environ.get("DIE_AT"):
            os.kill(os.getpid(), 9)
        return super().step(turn)
"""


@pytest.mark.slow
def test_a_run_that_was_killed_ends_with_the_same_parameters(folder, monkeypatch):
    (folder / "dying.py").write_text(DYING)
    arguments = ("rl", "--config=rl_config.py", "--config.environment.path=dying:Dying")
    monkeypatch.setenv("DIE_AT", "30")
    with pytest.raises(AssertionError):
        coa_jax(folder, *arguments, "--workdir=killed")
    assert not (folder / "killed" / "model").exists()
    monkeypatch.setenv("DIE_AT", "")
    coa_jax(folder, *arguments, "--workdir=killed")
    whole, killed = (
        (folder / name / "model" / "model.safetensors").read_bytes() for name in ("run", "killed")
    )
    assert whole == killed
