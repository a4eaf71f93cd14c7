"""Task sets of ``verifiers`` train the tiny policy.

The programs run in this environment if it has ``verifiers``, and otherwise with the interpreter
``COA_JAX_VERIFIERS``.  The environment also needs ``uv``, which installs the harnesses of
``verifiers``.  Without either environment the tests are skipped.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from coa_jax.config.extensions import importable
from coa_jax.data.trajectory import read_trajectories
from coa_jax.engine.config import EngineConfig
from coa_jax.evaluation.policy import load_sampler
from coa_jax.evaluation.run import load
from coa_jax.model.api import save_model
from coa_jax.rollout.agent_config import AgentConfig
from coa_jax.rollout.request import RolloutConfig
from coa_jax.train.algorithms import Algorithm
from coa_jax.train.optimizer import OptimizerConfig
from tests import tiny_policy
from tests.evaluation import tiny_evaluation
from tests.train.tiny_runs import rl_config, rows, run_rl

HERE = sys.executable if find_spec("verifiers") else ""
PYTHON = os.environ.get("COA_JAX_VERIFIERS", HERE)
EXAMPLE = Path(__file__).parents[3] / "examples" / "verifiers"
pytestmark = pytest.mark.skipif(not PYTHON, reason="needs verifiers")

# One turn; two weighted rewards behind a system message; a game of several turns; a tool over MCP,
# which an untrained policy does not call: test_table.py does.
SETS = {
    "vowels": """
class Task(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def share(self, trace: vf.Trace) -> float:
        text = trace.last_reply
        return sum(letter in "aeiou" for letter in text) / max(len(text), 1)

class Words(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        asked = ("Say a word.", "Say another word.", "Say a third word.")
        return [Task(vf.TaskData(prompt=text), self.config.task) for text in asked]

__all__ = ["Words"]
""",
    "brevity": """
class Data(vf.TaskData):
    most: int

class Task(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.75)
    async def short(self, trace: vf.Trace) -> float:
        return 1.0 / (1 + len(trace.last_reply))

    @vf.reward(weight=0.25)
    async def within(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) <= self.data.most)

class Short(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        for i in range(3):
            data = Data(prompt=f"What is {i}?", system_prompt="Be short.", most=4 * i)
            yield Task(data, self.config.task)

__all__ = ["Short"]
""",
    "letters": """
class Task(vf.Task[vf.TaskData]):
    pass

class Config(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class Game(vf.Env[Config]):
    async def run(self, task, agents):
        found = set()
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(2):
                if segment.terminated:
                    break
                found |= set(segment.last_reply)
                segment = await interaction.turn(f"{len(found)} letters. More.")
        interaction.trace.record_reward("letters", len(found) / 256, 1.0)

class Letters(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        return [Task(vf.TaskData(prompt="Say letters."), self.config.task) for _ in range(3)]

__all__ = ["Game", "Letters"]
""",
    "rivers": """
class Rivers(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "rivers"

    @vf.tool
    def length(self, name: str) -> str:
        "Returns the length of a river."
        return {"Ume": "470 km"}.get(name, "unknown")

class Config(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()

class Task(vf.Task[vf.TaskData, vf.State, Config]):
    @classmethod
    def toolsets(cls, config: Config) -> list[vf.Toolset]:
        return [Rivers(config.tools)]

    @vf.reward(weight=1.0)
    async def found(self, trace: vf.Trace) -> float:
        return float(bool(trace.tool_messages) and "470" in trace.last_reply)

class SetConfig(vf.TasksetConfig):
    task: Config = Config()

class Lengths(vf.Taskset[Task, SetConfig]):
    def load(self):
        data = vf.TaskData(prompt="How long is the Ume?")
        return [Task(data, self.config.task) for _ in range(3)]

__all__ = ["Lengths"]

if __name__ == "__main__":
    Rivers.run()
""",
}

# Published sets, from the folder environments/ of the repository of verifiers, with their seats and
# completions per sample: tools over MCP; a tool server that samples share; a game against itself.
PUBLISHED = {
    "glossary": (["agent"], 1),
    "scratchpad": (["agent"], 1),
    "kuhn_poker": (["player0", "player1"], 2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("verifiers")
    save_model(tiny_policy.policy(), path / "model")
    for name, text in SETS.items():
        (path / f"{name}.py").write_text(f"import verifiers.v1 as vf\n{text}")
    return path


@pytest.fixture(autouse=True)
def environment(folder, monkeypatch):
    importable(EXAMPLE)
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[3]}:{folder}")
    monkeypatch.setenv("PATH", f"{Path(PYTHON).parent}:{os.environ['PATH']}")


def trained_and_evaluated(
    folder: Path, name: str, seats: list[str], length: int, **settings: object
) -> list[dict[str, float]]:
    """Two steps of RL and an evaluation through a task set; returns the metrics of the steps."""
    source = "tasks:load"
    options = [f"--env.{seat}.harness.id null --env.{seat}.runtime.type subprocess"
               for seat in seats]  # fmt: skip
    program = [PYTHON, str(EXAMPLE / "agent.py"), name, *" ".join(options).split()]
    agent = AgentConfig(command=shlex.join([*program, "--sampling.max-tokens", "12"]), seconds=900)
    budget, shapes = RolloutConfig(length), EngineConfig(4, length, 8, (64,))
    run = folder / f"{name}-rl"
    optimizer = OptimizerConfig(1e-3, total_steps=2, final_ratio=1.0, weight_decay=0.0)
    run_rl(run, rl_config(
        folder / "model", source, agent=agent, optimizer=optimizer, groups=1, temperature=2.0,
        rollout=budget, engine=shapes, row_length=length, **settings,
    ))  # fmt: skip
    history = rows(run, "rl")
    assert [row["step"] for row in history] == [1, 2]
    for row in history:
        assert row["mismatch/abs_logp_max"] < 1e-4
        assert row["agent/sequences"] == 1
    config = dataclasses.replace(
        tiny_evaluation.CONFIG, tasks=source, num_tasks=2, agent=agent, rollout=budget,
        engine=shapes,
    )  # fmt: skip
    tasks = load(config)
    policy = functools.partial(load_sampler, tiny_policy.policy, config, (), tasks)
    tiny_evaluation.run(folder / f"{name}-evaluation", config, policy, tasks)
    found = read_trajectories(folder / f"{name}-evaluation" / "traces.jsonl")
    assert len(found) == 4
    assert all("fault" not in t.metadata and t.num_policy_tokens for t in found)
    return history


@pytest.mark.parametrize("name", ["vowels", "brevity", "letters"])
def test_a_task_set_runs_two_steps_and_an_evaluation(folder, name):
    seat = "player" if name == "letters" else "agent"
    for row in trained_and_evaluated(folder, name, [seat], 192):
        assert row["agent/turns"] == (3 if name == "letters" else 1)
        assert 0 < row["reward/max"] <= 1


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_task_set_runs_two_steps_and_an_evaluation(folder, name):
    if subprocess.run([PYTHON, "-c", f"import {name}"], check=False).returncode:
        pytest.skip(f"{name} is not installed beside verifiers")
    seats, turns = PUBLISHED[name]
    # An untrained policy solves nothing there: all groups learn, whatever their rewards.
    settings = {"algorithm": Algorithm("grpo"), "group_size": 2, "max_sampled": 1.0}
    for row in trained_and_evaluated(folder, name, seats, 1024, **settings):
        assert row["agent/turns"] >= turns
