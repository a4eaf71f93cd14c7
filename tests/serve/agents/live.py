"""Samples of the tiny policy, taken by an agent program."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from coa_jax.data.trajectory import Trajectory
from coa_jax.engine.config import SamplingParams
from coa_jax.model.params import Params
from coa_jax.rollout.agent_config import AgentConfig
from coa_jax.rollout.request import Request, RolloutConfig
from coa_jax.serve.agents.sampler import AgentSampler
from tests import tiny_policy
from tests.rollout.small_loop import engine, requests

LENGTH = 384
BUDGET = RolloutConfig(max_tokens=LENGTH)
HERE = "tests.serve.agents.functions"


def one(samples: int = 1, task: int = 0, temperature: float = 1.0) -> Request:
    """A request for samples of a task."""
    made = requests(samples, SamplingParams(temperature), [tiny_policy.TASKS[task]])[0]
    return dataclasses.replace(made, metadata={"stage": "test"})


def sampler(
    function: str = "",
    *,
    length: int = LENGTH,
    budget: RolloutConfig = BUDGET,
    params: Params | None = None,
    **settings: Any,
) -> AgentSampler:
    """A sampler for an agent of `functions`, or for another program by its settings."""
    named = {"function": f"{HERE}:{function}"} if function else {}
    config = AgentConfig(**{"seconds": 60.0, **named, **settings})
    engines = [engine(max_length=length)]
    if params is not None:
        engines = [engine.__wrapped__(max_length=length)]  # the other tests share the engine above
        engines[0].publish(params)
    return AgentSampler(tiny_policy.policy(), engines, config, budget, 0)


def solve(
    on: AgentSampler,
    wanted: Sequence[Request],
    begun: Callable[[AgentSampler], Any] = lambda _: None,
) -> list[Trajectory]:
    """The trajectories of requests, by sample; ``begun`` is called when programs may run."""
    count = sum(len(request.samples) for request in wanted)

    async def run() -> list[Trajectory]:
        for request in wanted:
            on.submit(request)
        asyncio.get_running_loop().call_later(1.0, begun, on)
        found: list[Trajectory] = []
        async with asyncio.timeout(120), contextlib.aclosing(on.finished()) as finished:
            async for trajectory in finished:
                found.append(trajectory)
                if len(found) == count:
                    break
        return found

    found = asyncio.run(run())
    assert not engine(max_length=LENGTH).any_active
    return sorted(found, key=lambda t: (t.metadata["prompt_id"], t.sample_id))
