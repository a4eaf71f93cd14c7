"""Runs a batch of requests, and returns the trajectories in an order independent of timing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from coa_jax.data.trajectory import Trajectory
from coa_jax.engine.engine import Engine
from coa_jax.rollout.loop import rollout
from coa_jax.rollout.request import Request, RolloutConfig
from coa_jax.tools.base import Tool


def collect(
    runner: asyncio.Runner,
    engine: Engine | Sequence[Engine],
    tokenizer: Any,
    requests: Iterable[Request],
    tools: Sequence[Tool],
    config: RolloutConfig,
    on_finish: Callable[[Trajectory], None] | None = None,
) -> list[list[Trajectory]]:
    """Samples the trajectories of all requests, and waits until all trajectories have ended.

    A request asks for one or more trajectories of one task.

    Args:
        runner: runner of the event loop. All calls with the same tools must use the same runner.
        engine: engine that decodes, or several engines that share the requests.
        tokenizer: tokenizer of the policy.
        requests: the requests. No two requests may have the same prompt id.
        tools: tools that the policy can call.
        config: budgets of the trajectories, such as the maximum number of tokens.
        on_finish: function that is called with each trajectory as soon as the trajectory ends.

    Returns:
        One list per request, in the order of the requests. Each list contains the request's
        trajectories in the order of ``Request.samples``.
    """
    requests = list(requests)
    finished: dict[tuple[int, int], Trajectory] = {}

    async def run() -> None:
        stream = rollout(engine, tokenizer, requests, tools, config)
        # The stream is closed at once, so that the engine is free when this function raises.
        async with contextlib.aclosing(stream):
            async for trajectory in stream:
                finished[trajectory.metadata["prompt_id"], trajectory.sample_id] = trajectory
                if on_finish:
                    on_finish(trajectory)

    runner.run(run())
    return [
        [finished[request.prompt_id, sample] for sample in request.samples] for request in requests
    ]
