"""Shares the engines among all clients: takes their requests and returns events of samples."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from coa_jax.data.trajectory import Trajectory
from coa_jax.engine.engine import Engine
from coa_jax.model.api import Model
from coa_jax.model.tokenizer import encode_plain
from coa_jax.protocol import Prompt
from coa_jax.rollout.detokenize import token_table
from coa_jax.rollout.sampler import EngineSampler
from coa_jax.serve.config import ServeConfig
from coa_jax.serve.errors import ShuttingDown
from coa_jax.serve.http.errors import Refused
from coa_jax.serve.prometheus import ServerMetrics
from coa_jax.serve.samples import Event, ServedEpisodes, ServedRequest
from coa_jax.serve.score import Scored, score
from coa_jax.tasks.prompts import load_prompt
from coa_jax.tools.base import Tool

T = TypeVar("T")


class Service:
    """A policy that serves many clients concurrently with its engines.

    The service is an asynchronous context manager, which runs the rollout loop while it is entered.
    """

    def __init__(
        self,
        model: Model,
        engines: Sequence[Engine],
        tools: Sequence[Tool],
        config: ServeConfig,
        prompt: Prompt | None = None,
        version: int | None = None,
        recompute: bool = False,
        meters: ServerMetrics | None = None,
    ):
        """Sets up a service.

        Args:
            model: the policy; only its tokenizer and its architecture are used.
            engines: decoding engines whose slots are all free.
            tools: tools of the agent.
            config: settings of the server.
            prompt: instructions of the agent's prompt; None for those that the config names.
            version, recompute: as in `EngineSampler`.
            meters: metrics of the server; None for a server of this policy only.
        """
        self.prompt = prompt or load_prompt(config.rollout.prompt_style, config.model)
        self.model, self.engines, self.config = model, engines, config
        self.tools = tools
        self.table = token_table(model.tokenizer)
        self.slots = sum(engine.config.slots for engine in engines)
        self.accepting = True
        self._served_requests: set[ServedRequest] = set()
        self._samples = 0  # number of samples that wait or run
        self.meters = meters or ServerMetrics()
        self.meters.watch(self.slots, lambda: self._samples)
        self._places = collections.Counter[str]()  # number of requests in each kind of `_limited`
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
        self._loop.add_done_callback(self._tell_visits)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancels the requests in progress, and ends the rollout loop."""
        self.accepting = False
        for served in self._served_requests:
            self.sampler.cancel(served)
        self.sampler.close()
        if self._loop is not None:
            await asyncio.gather(self._loop, return_exceptions=True)
        for threads in (self._scorer, self._readers):
            threads.shutdown(wait=False, cancel_futures=True)

    @property
    def healthy(self) -> bool:
        """Whether the rollout loop, which samples all completions, is running."""
        return self._loop is not None and not self._loop.done()

    @property
    def loop(self) -> asyncio.Task[None]:
        """The asyncio task of the rollout loop. If it ends before the server, the loop failed."""
        assert self._loop is not None
        return self._loop

    @property
    def busy(self) -> bool:
        """Whether a request is in progress."""
        return bool(self._served_requests or self._places["want scores"])

    async def drain(self, seconds: float) -> None:
        """Shuts the service down gracefully: refuses new requests, and waits for those in progress.

        Args:
            seconds: maximum time to wait.
        """
        self.accepting = False
        end = time.monotonic() + seconds
        while self.busy and time.monotonic() < end:
            await asyncio.sleep(0.05)

    @contextlib.contextmanager
    def _limited(self, kind: str, most: int) -> Iterator[None]:
        if self._places[kind] >= most:
            raise Refused(429, f"{self._places[kind]} requests {kind} already; try again later")
        self._places[kind] += 1
        try:
            yield
        finally:
            self._places[kind] -= 1

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager that counts a request while it is parsed and tokenised.

        Raises:
            Refused: too many requests are being parsed.
        """
        return self._limited("are read", self.slots + self.config.max_waiting)

    def read(self, function: Callable[..., T], *arguments: Any) -> Awaitable[T]:
        """Calls a function that parses or tokenises a request, in a thread.

        The event loop, which serves the other clients, therefore does not wait.
        """
        return asyncio.get_running_loop().run_in_executor(self._readers, function, *arguments)

    def render(self, function: Callable[[], T]) -> Awaitable[T]:
        """Calls a function that formats many log-probabilities, in the thread that computes them.

        The event loop, which serves the other clients, therefore does not wait.
        """
        return asyncio.get_running_loop().run_in_executor(self._scorer, function)

    def scoring(self, needed: bool) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager that counts a request for log-probabilities until it ends.

        Enter it before sampling, so that no completion is sampled for a request that is refused.

        Args:
            needed: whether the request needs log-probabilities. If False, it is not counted.

        Raises:
            Refused: too many requests need log-probabilities, or the server is shutting down.
        """
        if not needed:
            return contextlib.nullcontext()
        self._check_accepting()
        return self._limited("want scores", self.config.max_waiting)

    async def score(self, ids: Sequence[int]) -> list[Scored]:
        """Returns the log-probabilities of the tokens of a text.

        Texts are scored one at a time, while the engines decode. The caller must be inside the
        context of `scoring`.
        """
        engine = self.engines[0]
        if not self.healthy:
            raise ShuttingDown
        try:
            return await self.render(
                lambda: score(engine.params, engine.model, engine.compute, ids)
            )
        except asyncio.CancelledError:
            if self.healthy:
                raise
            raise ShuttingDown from None

    def _check_accepting(self) -> None:
        if not self.accepting or not self.healthy:
            raise ShuttingDown

    async def _run(self) -> None:
        async with contextlib.aclosing(self.sampler.finished()) as finished:
            async for trajectory in finished:
                self._samples -= 1
                self._ended(trajectory)

    def _submit(self, served: ServedRequest) -> None:
        """Submits the samples of a request to the rollout loop."""
        self.sampler.submit(served)

    def _ended(self, trajectory: Trajectory) -> None:
        """Is called when a sample has left the engines; subclasses may override it."""

    async def events(self, served: ServedRequest) -> AsyncGenerator[Event, None]:
        """Runs a request and yields the events of its samples.

        If the generator is closed or its consumer is cancelled, the request is cancelled.

        Raises:
            Refused: too many completions are waiting, or the server is shutting down.
        """
        self._check_accepting()
        num_samples = len(served.samples)
        if self._samples + num_samples > self.slots + self.config.max_waiting:
            raise Refused(429, f"{self._samples} completions run or wait already; try again later")
        self._served_requests.add(served)
        self._samples += num_samples
        self._submit(served)
        unfinished, began, first = num_samples, time.monotonic(), True
        try:
            while unfinished:
                event = await served.events.get()
                if event is None:
                    self.loop.result()  # raises the exception if the loop failed
                    raise ShuttingDown
                if first and event.text:
                    self.meters.first_text.observe(time.monotonic() - began)
                    first = False
                if event.finish is not None:
                    unfinished -= 1
                    self.meters.finished(served, event)
                yield event
        finally:
            self._served_requests.discard(served)
            if unfinished:
                self.sampler.cancel(served)
            self.meters.seconds.observe(time.monotonic() - began)

    def _tell_visits(self, _: asyncio.Task[None]) -> None:
        """Ends the wait of all requests, because the rollout loop has ended."""
        for served in self._served_requests:
            served.events.put_nowait(None)
