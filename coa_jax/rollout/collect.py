"""Collects whole batches of trajectories, in an order that does not depend on timing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from coa_jax.engine.engine import Engine
from coa_jax.rollout.loop import rollout
from coa_jax.rollout.request import Request, RolloutConfig
from coa_jax.tools.base import Tool
from coa_jax.trajectory import Trajectory


def collect(
    runner: asyncio.Runner,
    engine: Engine | Sequence[Engine],
    tokenizer: Any,
    requests: Iterable[Request],
    tools: Sequence[Tool],
    config: RolloutConfig,
    on_finish: Callable[[Trajectory], None] | None = None,
) -> list[list[Trajectory]]:
    """Runs all requests to completion.

    Args:
        runner: event loop; the same for all calls with the same tools.
        engine, tokenizer, tools, config: see `rollout`.
        requests: requests with distinct prompt ids.
        on_finish: called with each trajectory as it ends.

    Returns:
        For each request its trajectories, ordered by sample number.
    """
    requests = list(requests)
    finished: dict[tuple[int, int], Trajectory] = {}

    async def run() -> None:
        stream = rollout(engine, tokenizer, requests, tools, config)
        # Closed here at once: the engine must be free when this function raises an error.
        async with contextlib.aclosing(stream):
            async for trajectory in stream:
                finished[trajectory.metadata["prompt_id"], trajectory.sample_id] = trajectory
                if on_finish:
                    on_finish(trajectory)

    runner.run(run())
    return [
        [finished[request.prompt_id, sample] for sample in request.samples] for request in requests
    ]
