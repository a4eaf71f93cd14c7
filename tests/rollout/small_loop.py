"""A small engine, requests for the tiny policy, and a rollout of them with real tools."""

from __future__ import annotations

import asyncio
import dataclasses
import functools

from coa_jax.data.trajectory import DistilledRecord, Trajectory
from coa_jax.engine.config import EngineConfig, SamplingParams
from coa_jax.engine.engine import Engine
from coa_jax.model.api import Model
from coa_jax.model.encode import prompt_ids
from coa_jax.model.tokenizer import eos_ids
from coa_jax.protocol import Prompt
from coa_jax.rollout.collect import collect
from coa_jax.rollout.request import Request, RolloutConfig
from coa_jax.tasks import Task
from coa_jax.tools.base import Observation, Tool
from tests import tiny_policy
from tests.tiny_policy import TASKS

SHAPES = EngineConfig(slots=4, max_length=192, chunk=8, extend_buckets=(64,))
BUDGET = RolloutConfig(max_tokens=192, max_tool_calls=3, max_observation_tokens=48)
GREEDY = SamplingParams(temperature=0.0)


@functools.cache
def engine(**changes):
    model = tiny_policy.policy()
    shapes = dataclasses.replace(SHAPES, **changes)
    return Engine(model.params, model.config, shapes, eos_ids(model.tokenizer))


@functools.cache
def two() -> tuple[Engine, Engine]:
    """Of two slots each; they run the programs of `engine(slots=2)`."""
    first = engine(slots=2)
    return first, Engine(first.params, first.model, first.config, first.stop_tokens)


def requests(samples=1, sampling=GREEDY, tasks=TASKS):
    tokenizer = tiny_policy.policy().tokenizer
    return [
        Request(
            task=task,
            prompt=prompt_ids(tokenizer, task, Prompt("brief")),
            seed=7,
            prompt_id=TASKS.index(task),
            samples=tuple(range(samples)),
            sampling=sampling,
            metadata={"stage": "test"},
        )
        for task in tasks
    ]


def run(wanted, *, tools=None, config=BUDGET, on=None, runner=None):
    """Trajectories of each request, with the real tools where no other is given."""
    replaced = {tool.name: tool for tool in tools or ()}
    given = list({**tiny_policy.tools(), **replaced}.values())
    on = on or engine()
    with asyncio.Runner() as loop:
        return collect(runner or loop, on, tiny_policy.policy().tokenizer, wanted, given, config)


def collect_with(model, on, wanted, tools, config):
    """Trajectories of requests to another policy."""
    with asyncio.Runner() as loop:
        return collect(loop, on, model.tokenizer, wanted, tools, config)


QUERIES, SEEN = ("one", "two", "six"), "seen"
SEARCH = Task("search", "Which?", tiny_policy.PROTOCOL, ("Ume",), "tests")


@functools.cache
def searching() -> tuple[Model, Engine]:
    """A policy that has learnt to search three times, whose searches find `SEEN`."""
    parts = []
    for number, query in enumerate(QUERIES):
        begin = "<think>t</think>\n<plan>p</plan>\n" if not number else ""
        parts += [("policy", f"{begin}<think>{query}</think>\n<wiki_search>{query}</wiki_search>"),
                  ("environment", tiny_policy.observed(SEEN))]  # fmt: skip
    parts.append(("policy", "<think>one two six one two six</think>\n<answer>Ume</answer>"))
    record = DistilledRecord(
        SEARCH.id, SEARCH.question, SEARCH.protocol, SEARCH.gold, tuple(parts), "Ume"
    )
    model = tiny_policy.learn([record])
    return model, Engine(model.params, model.config, SHAPES, eos_ids(model.tokenizer))


def search(tool: Tool, config: RolloutConfig = BUDGET) -> tuple[Request, Trajectory]:
    """The greedy rollout of `searching`, with a ``wiki_search`` of its own."""
    model, on = searching()
    prompt = prompt_ids(model.tokenizer, SEARCH, Prompt("brief"))
    request = Request(SEARCH, prompt, 7, 0, (0,), GREEDY)
    ((trajectory,),) = collect_with(model, on, [request], [tool], config)
    return request, trajectory


def tokens_of(groups: list[list[Trajectory]]) -> list[list[list[int]]]:
    return [[t.tokens.tolist() for t in group] for group in groups]


@dataclasses.dataclass
class Says:
    """A tool that answers with a fixed text."""

    name: str
    text: str
    deadline: float = 5.0

    async def __call__(self, arguments, context):
        return Observation(self.text, True, "ok", 0.0)


@dataclasses.dataclass
class Hangs:
    """A tool that never answers; it counts its calls, and those that were cancelled."""

    name: str
    deadline: float = 0.3
    entered: int = 0
    cancelled: int = 0

    async def __call__(self, arguments, context):
        self.entered += 1
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def called(self, times):
        while self.entered < times:
            await asyncio.sleep(0.01)
