"""The engines of all clients: requests go into the running agent loop, events come out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from coa_jax.engine.engine import Engine
from coa_jax.model.api import Model
from coa_jax.protocol import Prompt
from coa_jax.rollout.detokenize import token_table
from coa_jax.rollout.inbox import Inbox
from coa_jax.rollout.loop import run_episodes
from coa_jax.serve.config import ServeConfig
from coa_jax.serve.meters import Meters
from coa_jax.serve.samples import Event, ServedEpisodes, Visit
from coa_jax.serve.score import Scored, score
from coa_jax.tasks.prompts import load_prompt
from coa_jax.tools.base import Tool


class Refused(Exception):
    """A request that is not served, with the HTTP status that says so."""

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param = status, message, param


class Service:
    """A policy that answers many clients at a time; an asynchronous context manager."""

    def __init__(
        self,
        model: Model,
        engines: Sequence[Engine],
        tools: Sequence[Tool],
        config: ServeConfig,
        prompt: Prompt | None = None,
    ):
        """Takes engines over, whose slots are all free.

        Args:
            model: the policy.
            engines: engines that decode with it.
            tools: tools of the agent.
            config: settings of the server.
            prompt: how questions are put to the agent; None for what the config names.
        """
        self.prompt = prompt or load_prompt(config.rollout.prompt_style, config.model)
        self.model, self.engines, self.config = model, engines, config
        self.tools = tools
        self.table = token_table(model.tokenizer)
        self.slots = sum(engine.config.slots for engine in engines)
        self.meters = Meters(self.slots)
        self.accepting = True
        self._visits: set[Visit] = set()
        self._samples = 0  # that wait or run
        self._scored = 0  # requests in progress that want scores
        # Those of the event loop may all be taken by tools that block.
        self._scorer = ThreadPoolExecutor(1, "score")
        self._inbox = Inbox()
        self._loop: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Service:
        self._loop = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancels what is in progress."""
        self.accepting = False
        for visit in self._visits:
            self._inbox.cancel(visit)
        self._inbox.close()
        if self._loop is not None:
            await asyncio.gather(self._loop, return_exceptions=True)
        self._scorer.shutdown(wait=False, cancel_futures=True)

    @property
    def healthy(self) -> bool:
        """Whether the agent loop runs."""
        return self._loop is not None and not self._loop.done()

    @property
    def loop(self) -> asyncio.Task[None]:
        """The agent loop; before the server's end it ends by an exception only."""
        assert self._loop is not None
        return self._loop

    @property
    def busy(self) -> bool:
        """Whether a request is in progress."""
        return bool(self._visits or self._scored)

    async def drain(self, seconds: float) -> None:
        """Accepts nothing any more and waits for what is in progress, at most so long."""
        self.accepting = False
        end = time.monotonic() + seconds
        while self.busy and time.monotonic() < end:
            await asyncio.sleep(0.05)

    @contextlib.contextmanager
    def scoring(self, wanted: bool) -> Iterator[None]:
        """Keeps a place for a request, if it wants scores, from before its completions to its end.

        Raises:
            Refused: too many requests want some, or the server is about to end.
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
        """Log-probabilities of a text, computed beside the decoding of others, one text at a time.

        To be called within `scoring`.
        """
        engine, loop = self.engines[0], asyncio.get_running_loop()
        arguments = engine.params, engine.model, engine.config.dtype, ids
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
        episodes = ServedEpisodes(
            self.model.tokenizer,
            self.table,
            frozenset(int(token) for token in self.engines[0].stop_tokens),
            self.config.rollout.max_observation_tokens,
            self.config.rollout.strict,
        )
        stream = run_episodes(self.engines, episodes, self._inbox, self.tools, self.config.rollout)
        async with contextlib.aclosing(stream) as finished:
            async for _ in finished:
                self._samples -= 1
                self._report()

    async def events(self, visit: Visit) -> AsyncGenerator[Event, None]:
        """Runs a request; its samples' events as they come.

        A consumer that goes away, by closing the generator or by being cancelled, cancels it.

        Raises:
            Refused: too many requests wait, or the server is about to end.
        """
        self._check_accepting()
        wanted = len(visit.samples)
        if self._samples + wanted > self.slots + self.config.max_waiting:
            raise Refused(429, f"{self._samples} completions run or wait already; try again later")
        self._visits.add(visit)
        self._samples += wanted
        self._report()
        self._inbox.put(visit)
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
                self._inbox.cancel(visit)
            self.meters.seconds.observe(time.monotonic() - began)

    async def _next(self, visit: Visit) -> Event:
        """The next event; an engine that broke down meanwhile ends the wait with its exception."""
        assert self._loop is not None
        getting = asyncio.ensure_future(visit.events.get())
        try:
            await asyncio.wait({getting, self._loop}, return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                return getting.result()
        finally:
            getting.cancel()
        self._loop.result()  # raises, where it broke down
        raise Refused(503, "the server is shutting down")

    def _report(self) -> None:
        running = min(self._samples, self.slots)
        self.meters.running.set(running)
        self.meters.waiting.set(self._samples - running)
