"""The command reproduces two hundred recorded rollouts of every kind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import random
from pathlib import Path

import pytest

from coa_jax.data.trajectory import StopReason, Trajectory, read_trajectories
from coa_jax.engine.config import EngineConfig, SamplingParams
from coa_jax.engine.engine import Engine
from coa_jax.model.api import Model, save_model
from coa_jax.model.encode import prompt_ids
from coa_jax.model.tokenizer import eos_ids
from coa_jax.protocol import Prompt
from coa_jax.rollout.loop import rollout
from coa_jax.rollout.request import Request, RolloutConfig
from coa_jax.tools.base import Observation
from tests import forked, tiny_policy
from tests.trajectory_files import write_trajectories

REPOSITORY = Path(__file__).resolve().parents[2]
ROLLOUTS = 200
PROTOCOLS = ("generalist", "mhqa", "code", "web_wiki")
SAMPLING = (
    SamplingParams(0.0),
    SamplingParams(0.7, top_p=0.9),
    SamplingParams(1.0),
    SamplingParams(1.3, top_k=40),
    SamplingParams(1.3, top_p=0.95, top_k=50),
)
BUDGET = RolloutConfig(max_tokens=448, max_tool_calls=2, max_observation_tokens=32)
BUDGETS = (
    BUDGET,
    dataclasses.replace(BUDGET, max_turn_tokens=60),
    dataclasses.replace(BUDGET, max_tool_calls=0),
    dataclasses.replace(BUDGET, max_tokens=110, max_observation_tokens=7),
    dataclasses.replace(BUDGET, strict=True),
    dataclasses.replace(BUDGET, max_tool_seconds=0.05),
)


@dataclasses.dataclass
class Fickle:
    """A real tool that adds another number at each call, or hangs, or breaks."""

    tool: object
    name: str
    deadline: float = 1.0
    made: int = 0

    async def __call__(self, arguments, context) -> Observation:
        self.made += 1
        if self.made % 17 == 0:
            await asyncio.sleep(3600)
        if self.made % 19 == 0:
            raise OSError("the server is gone")
        seen = await self.tool(arguments, context)
        await asyncio.sleep(0.06)  # longer than the smallest budget of tool time
        return dataclasses.replace(seen, text=f"{seen.text} ({self.made})")


async def record(model: Model, tools: list[Fickle]) -> list[Trajectory]:
    """Rollouts over all pairs of a budget and a protocol, each way of sampling among them."""
    shapes = EngineConfig(8, 448, chunk=8, extend_buckets=(64,))
    engine = Engine(model.params, model.config, shapes, eos_ids(model.tokenizer))
    ways = itertools.cycle(SAMPLING)
    kept: list[Trajectory] = []
    for number, budget in enumerate(BUDGETS):
        wanted = [
            Request(
                task=dataclasses.replace(task, protocol=protocol),
                prompt=prompt_ids(model.tokenizer, task, Prompt("brief")),
                seed=number,
                prompt_id=1000 * number + i,
                samples=(0, 1, 2),
                sampling=next(ways),
            )
            for i, (protocol, task) in enumerate(itertools.product(PROTOCOLS, tiny_policy.TASKS))
        ]
        stream = rollout(engine, model.tokenizer, wanted, tools, budget)
        async with contextlib.aclosing(stream):
            kept += [trajectory async for trajectory in stream]
    return random.Random(0).sample(kept, ROLLOUTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("replay")
    tools = [Fickle(tool, name) for name, tool in tiny_policy.tools().items()]
    save_model(tiny_policy.policy(), path / "model")
    write_trajectories(path / "traces.jsonl", asyncio.run(record(tiny_policy.policy(), tools)))
    return path


def replay(folder: Path, traces: str, *arguments: str) -> str:
    flags = (f"--model={folder / 'model'}", f"--limit={ROLLOUTS}")
    words = ["-m", "coa_jax.rollout.replay", str(folder / traces), *flags, *arguments]
    done = forked.run(words, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_records_are_of_every_kind(folder):
    kept = read_trajectories(folder / "traces.jsonl")
    assert len(kept) == ROLLOUTS
    assert {t.protocol for t in kept} == set(PROTOCOLS)
    assert {
        SamplingParams(**{k: t.metadata["sampling"][k] for k in ("temperature", "top_p", "top_k")})
        for t in kept
    } == set(SAMPLING)
    assert {t.stop_reason for t in kept} >= {
        StopReason.ANSWER, StopReason.LENGTH, StopReason.TURNS, StopReason.TURN_LENGTH,
        StopReason.VIOLATION, StopReason.TOOL_TIME,
    }  # fmt: skip
    outcomes = [call.outcome for t in kept for call in t.tool_calls]
    assert len(outcomes) > ROLLOUTS / 3
    assert {"ok", "timeout", "fault", "bad_call"} <= set(outcomes)


@pytest.mark.slow
def test_two_hundred_of_two_hundred_come_out_again(folder):
    out = replay(folder, "traces.jsonl")
    assert f"identical: {ROLLOUTS}, different: 0" in out
    assert "largest difference of log-probabilities: 0\n" in out


@pytest.mark.slow
def test_neither_the_chunks_nor_the_order_decide(folder):
    kept = read_trajectories(folder / "traces.jsonl")
    write_trajectories(folder / "shuffled.jsonl", random.Random(1).sample(kept, ROLLOUTS))
    out = replay(folder, "shuffled.jsonl", "--chunk=3")
    assert f"identical: {ROLLOUTS}, different: 0" in out
    assert "largest difference of log-probabilities: 0\n" in out
