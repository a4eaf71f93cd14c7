"""Runs the rollout loop, which interleaves compiled decoding with tools that run concurrently.

`Scheduler` runs the loop of one engine. With several engines, each engine has its own loop. All
loops take requests from the same queue, and their trajectories are merged into one stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any, TypeVar

from coa_jax.data.trajectory import Trajectory
from coa_jax.engine.engine import Engine
from coa_jax.rollout.detokenize import token_table
from coa_jax.rollout.episodes import Episodes, TextEpisodes
from coa_jax.rollout.request import Arrival, Request, RolloutConfig
from coa_jax.rollout.request_queue import RequestQueue
from coa_jax.rollout.scheduler import Scheduler
from coa_jax.tools.base import Tool

T = TypeVar("T")


async def rollout(
    engine: Engine | Sequence[Engine],
    tokenizer: Any,
    requests: Iterable[Request] | RequestQueue,
    tools: Sequence[Tool],
    config: RolloutConfig,
    on_text: Callable[[Arrival], None] | None = None,
    on_start: Callable[[Scheduler], None] | None = None,
    episodes: Episodes | None = None,
) -> AsyncGenerator[Trajectory, None]:
    """Runs requests, and yields each trajectory as soon as it ends.

    Args:
        engine: an engine, or several engines that run concurrently and have the same stop tokens.
            All slots must be free. A request goes to an engine with free slots, and an idle engine
            also takes samples that wait for a slot of another engine. Trajectories do not depend on
            the engine that samples them.
        tokenizer: tokenizer of the policy; None if ``episodes`` is given.
        requests: requests, or an `RequestQueue` to which requests are added at any time. An
        iterable is
            consumed lazily: the next request is taken when a slot is free.
        tools: tools that the policy can call. A call of any other tool gets the observation that
            the tool is unavailable.
        config: budgets of the trajectories.
        on_text: function that is called whenever the policy or the environment has produced text,
            with the new piece of text.
        on_start: function that is called once per engine, with the engine's scheduler, before the
            engine samples tokens.
        episodes: creates the episodes of samples, and encodes the results of tools; None for
            `TextEpisodes`, which parse the text of the policy to find tool calls.

    Yields:
        Trajectories without rewards, in the order in which they end.
    """
    engines = [engine] if isinstance(engine, Engine) else engine
    if episodes is None:
        ends = frozenset(int(token) for token in engines[0].stop_tokens)
        most = config.max_observation_tokens
        episodes = TextEpisodes(tokenizer, token_table(tokenizer), ends, most, config.strict)
    queue = requests if isinstance(requests, RequestQueue) else RequestQueue(requests, closed=True)
    schedulers: list[Scheduler] = []
    try:
        for one in engines:
            schedulers.append(Scheduler(one, episodes, queue, tools, config, on_text))
            if on_start is not None:
                on_start(schedulers[-1])
        async with contextlib.aclosing(_merged(list(map(_run, schedulers)))) as stream:
            async for trajectory in stream:
                yield trajectory
    finally:
        # Schedulers are closed here, because one loop's end cancels the code inside other loops.
        await asyncio.gather(*(scheduler.close() for scheduler in schedulers))


async def _run(scheduler: Scheduler) -> AsyncGenerator[Trajectory, None]:
    while await scheduler.admit() or await scheduler.arrival():
        for trajectory in await scheduler.turn():
            yield trajectory


async def _merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Merges several streams: yields each item when it arrives, and closes all streams at the end.

    An error in one stream ends all streams.
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
                # The next item is requested only after `yield`, so a slow consumer slows the loop.
                coming[asyncio.ensure_future(anext(stream))] = stream
    finally:
        for future in coming:
            future.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
