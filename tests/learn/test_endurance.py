"""Two thousand steps of a stream on a virtual clock, with faulty tools and a judge that is down."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from coa_jax.learn import learner, rl
from coa_jax.learn.step import OptimizerConfig
from coa_jax.learn.stream import Stream
from coa_jax.model.api import Model, save_model
from coa_jax.run_dir import RunDir
from coa_jax.tasks import judge
from coa_jax.tasks.graders import GradersConfig
from coa_jax.tasks.judge import JudgeConfig
from coa_jax.tools.net.chat import ChatConfig
from coa_jax.tools.net.errors import FetchError
from tests import tiny_policy
from tests.learn.tiny_runs import STREAM, rl_config, rows
from tests.virtual_clock import VirtualClock

STEPS = 2_000
HOUR = 3_600.0
DOWN = (HOUR, 2 * HOUR)
"""When the judge is down, in seconds of the clock that jumps."""


CHANCE = random.Random(1)


async def reply(config: ChatConfig, messages: object) -> str:
    """The transport of a judge whose connection is refused for an hour."""
    await asyncio.sleep(0.3)
    if DOWN[0] <= asyncio.get_running_loop().time() < DOWN[1]:
        raise FetchError("unreachable", "connection refused")
    correct = CHANCE.random() < 0.5
    return json.dumps({"rationale": "so", "judgement": "correct" if correct else "incorrect"})


class Faulty:
    """The search of the tiny policy: slow with a long tail, and three of ten calls fail."""

    def __init__(self, seed: int):
        self.search = tiny_policy.tools()["wiki_search"]
        self.name, self.deadline = self.search.name, self.search.deadline
        self.chance = random.Random(seed)
        self.failed = 0

    async def __call__(self, arguments, context):
        await asyncio.sleep(self.chance.lognormvariate(-0.7, 1.6))
        if self.chance.random() < 0.3:
            self.failed += 1
            raise RuntimeError("the index has gone away")
        return await self.search(arguments, context)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    model = tiny_policy.policy()
    save_model(Model(model.config, model.params, model.tokenizer), tmp_path / "model")
    lines = [
        json.dumps({"id": task.id, "question": task.question, "answer": task.gold[0]})
        for task in tiny_policy.TASKS[:2]
    ]
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_faulty_tools_and_a_judge_that_is_down_cost_no_step_and_no_memory(folder, monkeypatch):
    clock, memory, tool = VirtualClock(), list[int](), Faulty(0)
    real = learner.update

    def update(*arguments, **named):
        memory.append(psutil.Process().memory_info().rss)
        with clock.hold():
            return real(*arguments, **named)

    def stream(*arguments, **named):
        return Stream(*arguments, **named, loop_factory=clock.new_loop)

    monkeypatch.setattr(judge, "chat", reply)
    monkeypatch.setattr(learner, "update", update)
    monkeypatch.setattr(rl, "Stream", stream)
    config = rl_config(
        folder / "model",
        folder / "tasks.jsonl",
        **{
            **STREAM,
            "num_tasks": 2,
            "temperature": 1.0,
            "optimizer": OptimizerConfig(1e-6, total_steps=STEPS, final_ratio=1.0),
            "checkpoint_every": 500,
            "graders": GradersConfig(
                judge_all=True,
                judge=JudgeConfig(ChatConfig("http://judge.invalid/v1", "m"), patience=2 * HOUR),
            ),
        },
    )
    with RunDir(folder / "run") as run:
        rl.train(config, run, folder / "run" / "out", [tool])

    history = rows(folder / "run", "rl")
    assert [row["step"] for row in history] == list(range(1, STEPS + 1))
    assert clock.now > DOWN[1] and tool.failed > STEPS
    # The judge's hour makes steps late; no step is learned from samples without a verdict.
    learned = [row["group/used"] for row in history]
    assert np.mean(learned) > 0.5
    later = np.asarray(memory[STEPS // 4 :], float)
    slope = np.polyfit(np.arange(len(later)), later, 1)[0]
    assert slope < 10_000, f"resident memory grows by {slope:.0f} bytes a step"
