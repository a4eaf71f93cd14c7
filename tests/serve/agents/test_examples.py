"""The agent programs of examples/ train and evaluate the tiny policy."""

from __future__ import annotations

import dataclasses
import functools
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from coa_jax.data.trajectory import StopReason, read_trajectories
from coa_jax.engine.config import EngineConfig
from coa_jax.evaluation.policy import load_sampler
from coa_jax.rollout.agent_config import AgentConfig
from coa_jax.rollout.request import RolloutConfig
from coa_jax.train.optimizer import OptimizerConfig
from tests import tiny_policy
from tests.evaluation import tiny_evaluation
from tests.train.tiny_runs import rl_config, rows, run_rl

EXAMPLES = Path(__file__).parents[3] / "examples"
LENGTH = 768
COMMANDS = {"curl_agent": ("bash", "agent.sh"), "smolagents_agent": (sys.executable, "agent.py")}


@pytest.mark.parametrize("name", [*COMMANDS, "verifiers"])
def test_an_example_says_how_to_run_it(name):
    readme = (EXAMPLES / name / "README.md").read_text()
    assert f"examples/{name}/agent" in readme and "docs/agents.md" in readme


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_program_runs_two_steps_and_an_evaluation(name, tmp_path, monkeypatch):
    program, file = COMMANDS[name]
    if name == "curl_agent" and not (shutil.which("curl") and shutil.which("jq")):
        pytest.skip("needs curl and jq")
    if name == "smolagents_agent":
        pytest.importorskip("smolagents")
        monkeypatch.setenv("MAX_TOKENS", "24")
    agent = AgentConfig(command=shlex.join([program, str(EXAMPLES / name / file)]), seconds=300.0)
    tiny_policy.write_rl_inputs(tmp_path)
    shapes, budget = EngineConfig(4, LENGTH, 8, (64,)), RolloutConfig(LENGTH)
    config = rl_config(
        tmp_path / "model", tmp_path / "tasks.jsonl", agent=agent, groups=1, temperature=2.0,
        engine=shapes, rollout=budget, row_length=LENGTH,
        optimizer=OptimizerConfig(1e-3, total_steps=2, final_ratio=1.0, weight_decay=0.0),
    )  # fmt: skip
    run_rl(tmp_path / "rl", config)
    history = rows(tmp_path / "rl", "rl")
    assert [row["step"] for row in history] == [1, 2]
    for row in history:
        assert row["agent/turns"] >= 2
        assert row.get("mismatch/abs_logp_max", 0.0) < 1e-4
        assert row.get("stop/fault", 0.0) == 0
        if name == "curl_agent":  # whose rewards differ, so that there is something to learn
            assert row["optim/grad_norm"] > 0
            assert row["agent/sequences"] == 1
    sampled = read_trajectories(tmp_path / "rl" / "traces.jsonl")
    assert all(t.reward is not None and t.reward.value is not None for t in sampled)
    evaluation = dataclasses.replace(
        tiny_evaluation.CONFIG, samples=1, agent=agent, rollout=budget, engine=shapes
    )
    policy = functools.partial(load_sampler, tiny_policy.policy, evaluation, (), tiny_policy.TASKS)
    tiny_evaluation.run(tmp_path / "evaluation", evaluation, policy)
    found = read_trajectories(tmp_path / "evaluation" / "traces.jsonl")
    assert len(found) == 3
    assert StopReason.FAULT not in {t.stop_reason for t in found}
