"""Shares the engines among all clients: takes their requests and returns events of samples."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from coa_jax.engine.engine import Engine
from coa_jax.model.api import Model
from coa_jax.model.tokenizer import encode_plain
from coa_jax.protocol import Prompt
from coa_jax.rollout.detokenize import token_table
from coa_jax.rollout.sampler import EngineSampler
from coa_jax.serve.config import ServeConfig
from coa_jax.serve.meters import Meters
from coa_jax.serve.samples import Event, ServedEpisodes, Visit
from coa_jax.serve.score import Scored, score
from coa_jax.tasks.prompts import load_prompt
from coa_jax.tools.base import Tool
from coa_jax.trajectory import Trajectory
from coa_jax.web.errors import Refused

T = TypeVar("T")


class Service:
    """A policy that serves many clients concurrently; an asynchronous context manager."""

    def __init__(
        self,
        model: Model,
        engines: Sequence[Engine],
        tools: Sequence[Tool],
        config: ServeConfig,
        prompt: Prompt | None = None,
        version: int | None = None,
        recompute: bool = False,
    ):
        """Sets up a service.

        Args:
            model: the policy; only its tokenizer and its architecture are used.
            engines: decoding engines whose slots are all free.
            tools: tools of the agent.
            config: settings of the server.
            prompt: instructions of the agent's prompt; None for those that the config names.
            version, recompute: as in `EngineSampler`.
        """
        self.prompt = prompt or load_prompt(config.rollout.prompt_style, config.model)
        self.model, self.engines, self.config = model, engines, config
        self.tools = tools
        self.table = token_table(model.tokenizer)
        self.slots = sum(engine.config.slots for engine in engines)
        self.meters = Meters(self.slots)
        self.accepting = True
        self._visits: set[Visit] = set()
        self._samples = 0  # number of samples that wait or run
        self._scored = 0  # number of requests for scores in progress
        self._read = 0  # number of requests that are being parsed or tokenised
        # Blocking tools may occupy all threads of the event loop, so the service has threads of its
        # own.
        self._scorer = ThreadPoolExecutor(1, "score")
        self._readers = ThreadPoolExecutor(2, "read")
        encode_plain(model.tokenizer, " ")  # its first call is not safe in several threads
        stops = frozenset(int(token) for token in engines[0].stop_tokens)
        budgets = config.rollout
        episodes = ServedEpisodes(
            model.tokenizer, self.table, stops, budgets.max_observation_tokens, budgets.strict
        )
        self.sampler = EngineSampler(
            engines, model.tokenizer, tools, budgets, version,
            recompute=recompute, episodes=episodes,
        )  # fmt: skip
        self._loop: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Service:
        self._loop = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancels the requests in progress, and ends the rollout loop."""
        self.accepting = False
        for visit in self._visits:
            self.sampler.cancel(visit)
        self.sampler.close()
        if self._loop is not None:
            await asyncio.gather(self._loop, return_exceptions=True)
        for threads in (self._scorer, self._readers):
            threads.shutdown(wait=False, cancel_futures=True)

    @property
    def healthy(self) -> bool:
        """Whether the rollout loop is running."""
        return self._loop is not None and not self._loop.done()

    @property
    def loop(self) -> asyncio.Task[None]:
        """The task of the rollout loop, which ends before the server does only if it fails."""
        assert self._loop is not None
        return self._loop

    @property
    def busy(self) -> bool:
        """Whether a request is in progress."""
        return bool(self._visits or self._scored)

    async def drain(self, seconds: float) -> None:
        """Refuses new requests, and waits up to ``seconds`` for requests in progress."""
        self.accepting = False
        end = time.monotonic() + seconds
        while self.busy and time.monotonic() < end:
            await asyncio.sleep(0.05)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Reserves a place for a request while it is parsed and tokenised.

        Raises:
            Refused: too many requests are being parsed.
        """
        if self._read >= self.slots + self.config.max_waiting:
            raise Refused(429, f"{self._read} requests are read already; try again later")
        self._read += 1
        try:
            yield
        finally:
            self._read -= 1

    async def read(self, function: Callable[..., T], *arguments: Any) -> T:
        """Calls a function that parses or tokenises text, in a thread outside the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._readers, function, *arguments)

    async def render(self, function: Callable[..., T], *arguments: Any) -> T:
        """Calls a function that formats many log-probabilities, in the scoring thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._scorer, function, *arguments)

    @contextlib.contextmanager
    def scoring(self, wanted: bool) -> Iterator[None]:
        """Reserves a place for a request that needs log-probabilities, until the request ends.

        The place should be reserved before the completions of the request are sampled.

        Args:
            wanted: whether the request needs log-probabilities. If False, no place is reserved.

        Raises:
            Refused: too many requests need log-probabilities, or the server is shutting down.
        """
        if not wanted:
            yield
            return
        self._check_accepting()
        if self._scored >= self.config.max_waiting:
            raise Refused(429, f"{self._scored} requests want scores already; try again later")
        self._scored += 1
        try:
            yield
        finally:
            self._scored -= 1

    async def score(self, ids: Sequence[int]) -> list[Scored]:
        """Returns the log-probabilities of the tokens of a text.

        Texts are scored one at a time, while the engines decode. The caller must be inside the
        context of `scoring`.
        """
        engine, loop = self.engines[0], asyncio.get_running_loop()
        arguments = engine.params, engine.model, engine.compute, ids
        if not self.healthy:
            raise Refused(503, "the server is shutting down")
        try:
            return await loop.run_in_executor(self._scorer, score, *arguments)
        except asyncio.CancelledError:
            if self.healthy:
                raise
            raise Refused(503, "the server is shutting down") from None

    def _check_accepting(self) -> None:
        if not self.accepting or not self.healthy:
            raise Refused(503, "the server is shutting down")

    async def _run(self) -> None:
        async with contextlib.aclosing(self.sampler.finished()) as finished:
            async for trajectory in finished:
                self._samples -= 1
                self._report()
                self._ended(trajectory)

    def _submit(self, visit: Visit) -> None:
        """Submits the samples of a request to the rollout loop."""
        self.sampler.submit(visit)

    def _ended(self, trajectory: Trajectory) -> None:
        """Is called when a sample has left the engines; subclasses may override it."""

    async def events(self, visit: Visit) -> AsyncGenerator[Event, None]:
        """Runs a request and yields the events of its samples.

        If the generator is closed or its consumer is cancelled, the request is cancelled.

        Raises:
            Refused: too many completions are waiting, or the server is shutting down.
        """
        self._check_accepting()
        wanted = len(visit.samples)
        if self._samples + wanted > self.slots + self.config.max_waiting:
            raise Refused(429, f"{self._samples} completions run or wait already; try again later")
        self._visits.add(visit)
        self._samples += wanted
        self._report()
        self._submit(visit)
        left, began, first = wanted, time.monotonic(), True
        try:
            while left:
                event = await self._next(visit)
                if first and event.text:
                    self.meters.first_text.observe(time.monotonic() - began)
                    first = False
                if event.finish is not None:
                    left -= 1
                    self.meters.finished(visit, event)
                yield event
        finally:
            self._visits.discard(visit)
            if left:
                self.sampler.cancel(visit)
            self.meters.seconds.observe(time.monotonic() - began)

    async def _next(self, visit: Visit) -> Event:
        """Waits for the next event of a request; raises the exception of a failed rollout loop."""
        assert self._loop is not None
        getting = asyncio.ensure_future(visit.events.get())
        try:
            await asyncio.wait({getting, self._loop}, return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                return getting.result()
        finally:
            getting.cancel()
        self._loop.result()  # raises the exception if the loop failed
        raise Refused(503, "the server is shutting down")

    def _report(self) -> None:
        running = min(self._samples, self.slots)
        self.meters.running.set(running)
        self.meters.waiting.set(self._samples - running)
