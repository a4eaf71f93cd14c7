"""RL and evaluation of the tiny policy through an agent program."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from coa_jax.data.trajectory import Reward, StopReason, Trajectory, read_trajectories
from coa_jax.errors import UserError
from coa_jax.evaluation.policy import load_sampler
from coa_jax.rollout.agent_config import AgentConfig
from coa_jax.rollout.request import RolloutConfig
from coa_jax.train.algorithms import Algorithm
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.train.rl import replay_steps
from coa_jax.train.run_records import checksum, oldest_of
from coa_jax.train.update import group_examples
from tests import tiny_policy
from tests.evaluation import tiny_evaluation
from tests.killing import lines_of
from tests.serve.agents import killed
from tests.serve.agents.test_program import gone
from tests.train.tiny_runs import rl_config, rows, run_rl

AGENT = AgentConfig(function="tests.serve.agents.functions:brevity", seconds=600.0)
OPTIMIZER = OptimizerConfig(1e-3, total_steps=2, final_ratio=1.0, weight_decay=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_policy.write_rl_inputs(tmp_path_factory.mktemp("agents"))


CHANGES = {"optimizer": OPTIMIZER, "temperature": 2.0}
STREAM = {
    "agent": AgentConfig(function="tests.serve.agents.functions:rewarded_team", seconds=600.0),
    "max_staleness": 2,
}


def train(folder: Path, name: str, **changes: object) -> Path:
    changes = {"agent": AGENT, **CHANGES, **changes}
    run_rl(folder / name, rl_config(folder / "model", folder / "tasks.jsonl", **changes))
    return folder / name


@pytest.fixture(scope="module")
def finished(folder):
    return train(folder, "whole")


def test_steps_learn_what_a_program_was_told(finished, folder):
    history = rows(finished, "rl")
    assert [row["step"] for row in history] == [1, 2]
    for row in history:
        assert row["mismatch/abs_logp_max"] < 1e-4
        assert row["policy/clip_low"] == row["policy/clip_high"] == 0
        assert row["optim/grad_norm"] > 0
        assert row["agent/turns"] == 2 and row["agent/sequences"] == 1
        assert row["stop/answer"] == 1
    kept = read_trajectories(finished / "traces.jsonl")
    assert {t.reward.value for t in kept} == {1 / (1 + len(t.answer)) for t in kept}


@pytest.mark.parametrize("name", ["whole", pytest.param("stream", marks=pytest.mark.slow)])
def test_a_replay_repeats_every_token_without_the_program(finished, folder, name):
    changes = {} if name == "whole" else STREAM
    if changes:
        train(folder, name, **changes)
    config = rl_config(folder / "model", folder / "tasks.jsonl", **{**CHANGES, **changes})
    absent = AgentConfig(function="nowhere:nothing")
    found = replay_steps(dataclasses.replace(config, agent=absent), folder / name)
    assert found.identical and found.steps == 2, str(found)
    kept = read_trajectories(folder / name / "traces.jsonl")
    assert found.trajectories == len([t for t in kept if t.metadata["step"]])
    assert any(t.branches for t in kept) == (name == "stream")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
def test_a_run_that_a_signal_ends_leaves_no_program_and_goes_on_to_the_same_end(folder, number):
    if not shutil.which("curl"):
        pytest.skip("needs curl")
    killed.write_script(folder)
    if not (folder / "signals-whole").exists():
        killed.run(folder, "signals-whole")
    name, numbers = f"signals-{number.name}", folder / "numbers"
    numbers.unlink()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.serve.agents.killed", str(folder), name],
        cwd=Path(__file__).parents[3], stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        # After a checkpoint, while programs of the next step run.
        end = time.monotonic() + 400
        while not rows(folder / name, "rl") or lines_of(numbers) < 6:
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(number)
        errors = process.communicate(timeout=120)[1].decode()
    finally:
        process.kill()
        process.wait()
    code = 128 + number if number == signal.SIGTERM else -number
    assert process.returncode == code, errors[-2000:]
    assert gone([int(line) for line in numbers.read_text().split()])
    killed.run(folder, name)
    left, right = (
        load_file(folder / f"signals-{run}" / "model" / "model.safetensors")
        for run in ("whole", number.name)
    )
    for key in left:
        np.testing.assert_array_equal(left[key], right[key])


def test_an_evaluation_asks_the_same_program(tmp_path):
    config = dataclasses.replace(tiny_evaluation.CONFIG, agent=AGENT, rollout=RolloutConfig(192))
    policy = functools.partial(load_sampler, tiny_policy.policy, config, (), tiny_policy.TASKS)
    outcome = tiny_evaluation.run(tmp_path, config, policy)
    found = read_trajectories(tmp_path / "traces.jsonl")
    assert len(found) == 6
    assert {t.stop_reason for t in found} == {StopReason.ANSWER}
    assert outcome["settings"]["agent"]["function"] == AGENT.function
    # A finished evaluation asks nobody again.
    tiny_evaluation.run(tmp_path, config, None)
    assert len(read_trajectories(tmp_path / "traces.jsonl")) == 6


def sample(reward: float, *lengths: int) -> Trajectory:
    """A sample with sequences of so many tokens, each two of the prompt."""

    def sequence(length: int) -> Trajectory:
        return Trajectory(
            "t", 0, "", "generalist", np.arange(length), [0, 0] + [1] * (length - 2),
            [0.0, 0.0] + [-1.0] * (length - 2), "", (), (), StopReason.ANSWER, None, (),
            {"policy_versions": [[0, length]]},
        )  # fmt: skip

    first, *others = map(sequence, lengths)
    return dataclasses.replace(first, reward=Reward(reward), branches=tuple(others))


def test_sequences_share_the_advantage_of_their_sample_which_counts_once():
    group = [sample(1.0, 5, 3, 4), sample(0.0, 6), sample(0.0, 7)]
    algorithm = Algorithm("grpo", advantage="mean").resolve(192)
    examples = group_examples(algorithm, group, None)
    assert [len(e.tokens) for e in examples] == [5, 3, 4, 6, 7]
    assert [float(e.advantage[-1]) for e in examples] == pytest.approx([2 / 3] * 3 + [-1 / 3] * 2)
    assert [int(e.mask.sum()) for e in examples] == [3, 1, 2, 4, 5]
    assert group[0].num_policy_tokens == 6
    assert oldest_of(group) == 3
    assert checksum(group[0]) != checksum(sample(1.0, 5, 3, 3))
    assert checksum(sample(1.0, 5)) == checksum(dataclasses.replace(group[0], branches=()))


@pytest.mark.parametrize(
    "changes",
    [
        {"format_reward": True},
        {"rollout": RolloutConfig(192, constrain=True)},
        {"evaluate_every": 1},
    ],
    ids=["format", "constrain", "evaluate"],
)
def test_settings_of_the_loop_of_tools_are_refused_with_a_program(folder, changes):
    with pytest.raises(
        UserError, match=f"^{next(iter(changes))}.* agent names a program; .*(coa-jax|False)"
    ):
        rl_config(folder / "model", folder / "tasks.jsonl", agent=AGENT, **changes)
