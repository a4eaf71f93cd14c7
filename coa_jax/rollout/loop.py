"""The rollout loop: compiled decoding interleaved with tools that run concurrently.

`Scheduler` runs the loop of one engine. Several engines run one loop each and take their requests
from the same inbox; their trajectories come out of one stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any, TypeVar

from coa_jax.engine.engine import Engine
from coa_jax.rollout.detokenize import token_table
from coa_jax.rollout.episodes import Episodes, TextEpisodes
from coa_jax.rollout.inbox import Inbox
from coa_jax.rollout.request import Arrival, Request, RolloutConfig
from coa_jax.rollout.scheduler import Scheduler
from coa_jax.tools.base import Tool
from coa_jax.trajectory import Trajectory

T = TypeVar("T")


def rollout(
    engine: Engine | Sequence[Engine],
    tokenizer: Any,
    requests: Iterable[Request] | Inbox,
    tools: Sequence[Tool],
    config: RolloutConfig,
    on_text: Callable[[Arrival], None] | None = None,
    on_tokens: Callable[[int], None] | None = None,
    on_start: Callable[[Scheduler], None] | None = None,
) -> AsyncGenerator[Trajectory, None]:
    """Runs requests to completion; the policy's text decides which tools are called.

    Args:
        engine, requests, tools, config, on_text, on_tokens, on_start: see `run_episodes`.
        tokenizer: tokenizer of the policy.

    Returns:
        A generator of trajectories, see `run_episodes`.
    """
    engines = _all(engine)
    episodes = TextEpisodes(
        tokenizer,
        token_table(tokenizer),
        frozenset(int(t) for t in engines[0].stop_tokens),
        config.max_observation_tokens,
        config.strict,
    )
    return run_episodes(engines, episodes, requests, tools, config, on_text, on_tokens, on_start)


async def run_episodes(
    engine: Engine | Sequence[Engine],
    episodes: Episodes,
    requests: Iterable[Request] | Inbox,
    tools: Sequence[Tool],
    config: RolloutConfig,
    on_text: Callable[[Arrival], None] | None = None,
    on_tokens: Callable[[int], None] | None = None,
    on_start: Callable[[Scheduler], None] | None = None,
) -> AsyncGenerator[Trajectory, None]:
    """Runs requests to completion and yields trajectories as they finish.

    Args:
        engine: one engine, or several that run concurrently with the same stop tokens; all slots
            must be free. A request goes to an engine with free slots; an idle engine takes over
            samples that wait at another engine. The choice does not change a trajectory.
        episodes: how samples begin and continue.
        requests: consumed lazily, so a generator can keep the slots busy indefinitely; or an inbox,
            where requests arrive at any time.
        tools: tools, found by name. A call of a missing tool is answered with "unavailable".
        config: budgets.
        on_text: called with the text of policy and environment as it arrives.
        on_tokens: called with the number of tokens that the policy has written since the last call.
        on_start: called with the scheduler of each engine.

    Yields:
        Ungraded trajectories, in the order in which they finish.
    """
    inbox = requests if isinstance(requests, Inbox) else Inbox(requests, closed=True)
    schedulers: list[Scheduler] = []
    try:
        for one in _all(engine):
            schedulers.append(Scheduler(one, episodes, inbox, tools, config, on_text, on_tokens))
            if on_start is not None:
                on_start(schedulers[-1])
        async with contextlib.aclosing(_merged(list(map(_run, schedulers)))) as stream:
            async for trajectory in stream:
                yield trajectory
    finally:
        # Not inside one of the loops, where the end of another loop would cancel it.
        await asyncio.gather(*(scheduler.close() for scheduler in schedulers))


def _all(engine: Engine | Sequence[Engine]) -> Sequence[Engine]:
    return [engine] if isinstance(engine, Engine) else engine


async def _run(scheduler: Scheduler) -> AsyncGenerator[Trajectory, None]:
    while await scheduler.admit() or await scheduler.arrival():
        for trajectory in await scheduler.turn():
            yield trajectory


async def _merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Merges several streams: yields items as they arrive, and closes the streams at the end.

    The first error of a stream ends all streams.
    """
    coming = {asyncio.ensure_future(anext(stream)): stream for stream in streams}
    try:
        while coming:
            await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            for arrived in [future for future in coming if future.done()]:
                stream = coming.pop(arrived)
                try:
                    value = arrived.result()
                except StopAsyncIteration:
                    continue
                yield value
                # Not earlier: a slow consumer must not be flooded.
                coming[asyncio.ensure_future(anext(stream))] = stream
    finally:
        for future in coming:
            future.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
