"""Schedules samples on one engine: assigns samples to slots, and waits for their tools.

One coroutine owns the engine. This coroutine admits samples into free slots, extends the KV cache
with finished observations, decodes chunks in a separate thread, and runs tool calls as asyncio
tasks. A slot whose tool is running keeps its KV cache and does not decode.

A sample holds cache pages for its present length. When no page is free, a sample gives way: it
loses its slot and its pages, and later its tokens are prefilled again, before new samples start.
The sample that began last gives way first, so the one that began first always continues, and the
samples cannot block each other. A sample that has waited long for its tool gives way before others.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from coa_jax.data.trajectory import Author, StopReason, ToolCall, Trajectory
from coa_jax.engine.engine import Engine
from coa_jax.rollout.environments.base import ANSWER, RESET
from coa_jax.rollout.environments.session import ToolLoop
from coa_jax.rollout.episode import ToolRequest
from coa_jax.rollout.episodes import Episodes
from coa_jax.rollout.request import Arrival, Request, RolloutConfig, described
from coa_jax.rollout.request_queue import RequestQueue
from coa_jax.rollout.running_sample import RunningSample, prefills_of, source_of, unstarted
from coa_jax.tools.base import Observation, Tool

_LONG_WAIT_S = 5.0
"""Time in seconds after which a sample that waits for its tool gives way before others."""


class Scheduler:
    """Runs the requests of an queue on one engine: slots, decoding and tool calls."""

    def __init__(
        self,
        engine: Engine,
        episodes: Episodes,
        queue: RequestQueue,
        tools: Sequence[Tool],
        config: RolloutConfig,
        on_text: Callable[[Arrival], None] | None,
    ):
        """Takes an engine whose slots are all free; `rollout` describes the arguments."""
        if config.constrain and not (engine.constraint and engine.constraint.restricts):
            raise ValueError("config.constrain is set, but the engine has no constraint")
        self.engine, self.episodes, self.config = engine, episodes, config
        self.tools = {tool.name: tool for tool in tools}
        self.queue, self.reader = queue, queue.reader()
        self.version = queue.version
        # Time that samples spent in slots, and the part of this time spent waiting for tools.
        self.occupied_s = self.waiting_s = 0.0
        self._counted = asyncio.get_running_loop().time()
        self.on_text = on_text
        self.free = deque(range(engine.config.slots))
        self.running: dict[int, RunningSample] = {}
        self.parked: dict[int, RunningSample] = {}  # number -> sample that gave way
        self.begun = 0  # number of samples so far
        self.gave_way = False  # whether a sample gave way since the last `admit`
        # Slot -> request whose prompt is in the slot's KV cache, even if the sample has ended.
        self.cached: dict[int, Request] = {}
        self.ended: list[Trajectory] = []  # since the last `turn`
        self.ending: set[asyncio.Future[Any]] = set()  # cancelled tasks that still run
        self.closing: set[asyncio.Task[None]] = set()  # environments that are being closed
        # A thread of its own, because tools may block all default threads of the event loop.
        self.thread = ThreadPoolExecutor(1, "engine")
        self.device_call: asyncio.Future[Any] | None = None

    async def admit(self) -> bool:
        """Loads published weights and starts samples; returns whether any sample is running.

        Samples start only in free slots.
        """
        self._count()
        self._cancel()
        await self._take_weights()
        self.gave_way = False
        placed: list[tuple[Request, int, int]] = []
        forks: dict[int, list[int]] = {}
        back, prefills, full = self._take_back()
        while not full and self.free and (first := self.reader.sample()):
            request, sample = first
            length, limit = len(request.prompt), self._limit(request)
            if length >= limit:  # the prompt leaves no room for a token
                self.reader.waiting.popleft()
                self._refuse(request, sample, StopReason.LENGTH)
                continue
            source, common = source_of(request, self.cached, self.free)
            slot = source if source is not None and source in self.free else self.free[0]
            first_chunk = min(length + self.engine.config.chunk, limit)
            if not self._reserve(slot, first_chunk, source, common, spare=len(self.running)):
                break
            if source is not None and source not in self.cached:
                source, common = None, 0  # its pages were needed
            fresh = source is None or self.cached[source] is not request
            self.reader.waiting.popleft()
            self.free.remove(slot)
            self.cached[slot] = request
            placed.append((request, sample, slot))
            if fresh and length:  # otherwise the environment's reset gives the prompt
                start = max(common - 1, 0)  # decoding has written the newest common token again
                prefills.append((slot, start, request.prompt[start:]))
            elif source not in (None, slot):
                forks.setdefault(source, []).append(slot)
        if prefills or forks:
            lengths = {source: len(self.cached[source].prompt) for source in forks}
            await self._on_device(self._prefill, prefills, forks, lengths)
        for run in back:
            self._write(run, run.rule)
        for request, sample, slot in placed:
            self._start(request, sample, slot)
        return bool(self.running or self.parked or self.ended)

    def _take_back(self) -> tuple[list[RunningSample], list[tuple[int, int, Sequence[int]]], bool]:
        """Gives slots and pages to samples that gave way and can go on, the oldest first.

        Returns:
            The samples, what must be prefilled for them, and whether one of them got no place.
        """
        back: list[RunningSample] = []
        prefills: list[tuple[int, int, Sequence[int]]] = []
        for number, run in sorted(self.parked.items()):
            if run.must_pause(self.version) or (run.tool is not None and not run.tool.done()):
                continue
            common = self._place(run)
            while common is None and not back and self.running and self._all_paused:
                self._free_pages()
                common = self._place(run)
            if common is None:
                return back, prefills, True
            del self.parked[number]
            self._computes(run)
            run.restarts.append((len(run.episode.tokens), self.version or 0))
            prefills.append((run.slot, common, run.episode.context[common:]))
            back.append(run)
        return back, prefills, False

    def _place(self, run: RunningSample) -> int | None:
        """Gives a sample that gave way a slot and pages.

        Returns:
            The number of tokens that the cache contains already, because other samples of the
            request have them; None if there is no slot, or too few pages are free.
        """
        if not self.free:
            return None
        source, common = source_of(run.request, self.cached, self.free)
        # Only whole pages are shared, so nothing has to be copied.
        page = self.engine.config.page_size
        common = max(common - 1, 0) // page * page
        slot = source if source is not None and source in self.free else self.free[0]
        positions, spare = len(run.episode.context) + self.engine.config.chunk, len(self.running)
        if not self._reserve(slot, positions, source, common + 1, spare):
            return None
        self.free.remove(slot)
        run.slot, self.running[slot] = slot, run
        there = source is not None and source in self.cached
        self.cached[slot] = run.request
        return common if there else 0

    @property
    def _all_paused(self) -> bool:
        """Whether all samples in slots hold pages, and wait for a later policy version."""
        runs = self.running.values()
        return all(run.episode.context and run.must_pause(self.version) for run in runs)

    def _make_room(self, needs: Mapping[int, int]) -> None:
        """Gives samples the pages that they need; samples give way where too few pages are free.

        Args:
            needs: slot -> number of tokens for which its sample needs pages.
        """
        for run in sorted((self.running[slot] for slot in needs), key=lambda run: run.number):
            slot = run.slot
            while self.running.get(slot) is run and not self.engine.grow(slot, needs[slot]):
                self._free_pages()

    def _free_pages(self) -> None:
        """Releases a cached prompt of a free slot; if there is none, a sample gives way."""
        if cached := [slot for slot in self.free if self.engine.pages.covers(slot, 1)]:
            self.engine.release(cached[0])
            self.cached.pop(cached[0], None)
            return
        now = asyncio.get_running_loop().time()
        runs = [run for run in self.running.values() if run.episode.context]
        waiting = [run for run in runs if run.tool is not None and not run.tool.done()]
        longest = min(waiting, key=lambda run: run.called, default=None)
        if longest is None or now - longest.called < _LONG_WAIT_S:
            longest = max(runs, key=lambda run: run.number)
        longest.rule = self.engine.give_way(longest.slot)
        self._leave(longest)
        self.cached.pop(longest.slot, None)
        self.parked[longest.number], self.gave_way = longest, True

    def _leave(self, run: RunningSample) -> None:
        """Takes the slot of a sample."""
        del self.running[run.slot]
        self.free.append(run.slot)

    async def _repeat_restarts(self) -> None:
        """Computes the KV caches again of samples that repeat a sample which had given way."""
        feeds = [
            (run.slot, 0, run.episode.context)
            for run in self.running.values()
            if run.request.restarts and run.take_restarts(self.version)
        ]
        if feeds:
            await self._on_device(self.engine.extend, feeds)
        for slot, _, _ in feeds:
            run = self.running[slot]
            self.engine.set_limit(slot, run.limit_now(self.version))
            self.engine.set_active(slot, run.can_decode(self.version))

    async def arrival(self) -> bool:
        """Waits until the queue changes, and returns True; returns False if the queue is closed."""
        if self.queue.closed:
            return False
        await self.reader.changed()
        return True

    def restart(self, version: int) -> None:
        """Tells the scheduler that another caller has loaded new parameters into the engine.

        Call this method only while no sample is running. Prompts in the cache, computed by the old
        parameters, are discarded.
        """
        if self.all_begun:
            raise RuntimeError("the parameters have changed under samples that are running")
        self.version = version
        self.cached.clear()

    @property
    def waiting_for_weights(self) -> int:
        """Number of running samples that wait until a later policy version is published."""
        paused = sum(run.must_pause(self.version) for run in self.all_begun)
        return paused if self.reader.weights is None else 0

    @property
    def all_begun(self) -> list[RunningSample]:
        """All samples that have begun and not ended, in slots or not."""
        return [*self.running.values(), *self.parked.values()]

    def _count(self) -> None:
        now = asyncio.get_running_loop().time()
        passed, self._counted = now - self._counted, now
        self.occupied_s += passed * len(self.running)
        self.waiting_s += passed * sum(run.tool is not None for run in self.running.values())

    async def _take_weights(self) -> None:
        """Loads the newest parameters, if any were published since the last program call."""
        if self.reader.weights is None:
            return
        (params, self.version, recompute), self.reader.weights = self.reader.weights, None
        self.engine.publish(params)
        self.cached.clear()  # the old parameters computed these cached prompts
        if recompute and self.running:
            begun = [run for run in self.running.values() if run.episode.context]
            for run in begun:
                self._computes(run)
            feeds = [(run.slot, 0, run.episode.context) for run in begun]
            await self._on_device(self.engine.extend, feeds)
        for run in self.running.values():
            if run.request.plan:
                self.engine.set_limit(run.slot, run.limit_now(self.version))
            if run.can_decode(self.version):
                self.engine.set_active(run.slot, True)

    def _computes(self, run: RunningSample) -> None:
        """Records which policy version computes the next forward pass of a sample."""
        if self.version is not None:
            run.episode.computed_by(self.version)

    def _limit(self, request: Request) -> int:
        """Returns the maximum length of a whole trajectory, in tokens."""
        return min(request.max_tokens or self.config.max_tokens, self.engine.config.max_length)

    def _cancel(self) -> None:
        """Ends the samples of cancelled requests, running or waiting for a slot."""
        for request in self.reader.take_cancelled():
            if self.queue.drop(request):
                self.reader.waiting.extend((request, sample) for sample in request.samples)
            for waiting in [pair for pair in self.reader.waiting if pair[0] is request]:
                self.reader.waiting.remove(waiting)
                self._refuse(*waiting, StopReason.CANCELLED)
            for run in [run for run in self.all_begun if run.request is request]:
                if run.tool is not None:
                    self._end(run.tool)
                self._finish(run, StopReason.CANCELLED)

    def _end(self, task: asyncio.Future[Any]) -> None:
        """Cancels a task without waiting for its end; `close` waits."""
        task.cancel()
        self.ending.add(task)
        task.add_done_callback(self.ending.discard)

    def _reserve(
        self, slot: int, positions: int, source: int | None, length: int, spare: int
    ) -> bool:
        """Reserves pages for a slot; if necessary, releases prompts in the cache of free slots."""
        for other in (None, *self.free):
            if other is not None and other not in (slot, source):
                self.engine.release(other)
                self.cached.pop(other, None)
            if self.engine.reserve(slot, positions, source, length, spare):
                return True
            self.cached.pop(slot, None)  # `reserve` has taken the pages of the cached prompt
            source = None if source == slot else source
        return False

    def _prefill(
        self,
        prefills: Sequence[tuple[int, int, Sequence[int]]],
        forks: Mapping[int, Sequence[int]],
        lengths: Mapping[int, int],
    ) -> None:
        self.engine.extend(prefills)
        for source, slots in forks.items():
            self.engine.fork(source, slots, lengths[source])

    async def _on_device(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls the engine in a separate thread, so that tools run while the device computes.

        A thread cannot be stopped. `close` therefore waits for the call when the rollout is
        cancelled; else the call could activate slots that are already free.
        """
        loop = asyncio.get_running_loop()
        self.device_call = loop.run_in_executor(self.thread, function, *arguments)
        return await asyncio.shield(self.device_call)

    def _refuse(self, request: Request, sample: int, reason: StopReason) -> None:
        """Ends a sample that cannot start; its trajectory has no policy tokens."""
        metadata = described(request, self.config, 0.0, self.engine.config)
        metadata |= unstarted(request, self._limit(request), self.version)
        episode = self.episodes.begin(request, sample)
        self.ended.append(episode.finish(reason, request.task.gold, metadata))

    def _start(self, request: Request, sample: int, slot: int) -> None:
        opened = request.environment
        environment = opened(sample, self.tools) if opened else ToolLoop(self.tools)
        now, episode = asyncio.get_running_loop().time(), self.episodes.begin(request, sample)
        number, limit = self.begun, self._limit(request)
        run = RunningSample(request, episode, number, slot, limit, now, environment)
        self.begun += 1
        self.running[slot] = run
        self._computes(run)
        if request.prompt:
            self._write(run)
        else:
            run.tool = asyncio.create_task(self._call(run, None))

    def _write(self, run: RunningSample, rule: int | None = None) -> None:
        """Starts decoding a sample whose prompt, or whole context, is in the KV cache.

        Args:
            run: the sample.
            rule: state of the constraint of a sample that goes on; None for a new sample.
        """
        request = run.request
        self.engine.start(
            run.slot,
            len(run.episode.context),
            last_token=run.episode.context[-1],
            limit=run.limit_now(self.version),
            key=(request.seed, request.prompt_id, run.episode.sample_id),
            sampling=request.sampling,
            protocol=self._protocol(request),
            rule=rule,
        )
        self.engine.set_active(run.slot, run.can_decode(self.version))

    def _protocol(self, request: Request) -> str | None:
        """Returns the name of the protocol under whose constraint a request is sampled, if any."""
        constraint, name = self.engine.constraint, request.task.protocol
        if not request.agent or constraint is None:
            return None
        if constraint.restricts != self.config.constrain:
            return None  # other samples of this engine are constrained
        return name if constraint.restricts or name in constraint.start else None

    async def _begin(self) -> None:
        """Prefills the prompts that environments have provided, and ends samples without one."""
        prompts: dict[tuple[int, ...], list[RunningSample]] = {}
        for run in [run for run in self.running.values() if run.is_reset]:
            observation, start = run.take_result()
            if observation.ok:
                prompt = self.episodes.prompt(run.environment.begun)
                self._computes(run)
                run.episode.begin(prompt, run.environment.question)
                if len(prompt) < run.limit:
                    prompts.setdefault(prompt, []).append(run)
                    continue
            else:
                run.episode.tool_calls.append(
                    run.record(ToolRequest(RESET, ""), observation, start)
                )
            self._finish(run, self._spent(run) or StopReason.FAULT)
        for run in (begun := list(itertools.chain(*prompts.values()))):
            self._write(run)
        self._make_room({run.slot: len(run.episode.context) for run in begun})
        placed = {
            prompt: left
            for prompt, runs in prompts.items()
            if (left := [run for run in runs if run.number not in self.parked])
        }
        if placed:
            await self._on_device(self._prefill, *prefills_of(placed))

    async def turn(self) -> list[Trajectory]:
        """Continues the running samples, and returns the trajectories that have ended.

        The method appends the results of finished tool calls, decodes up to `EngineConfig.chunk`
        tokens of each sample, and starts new tool calls. If all samples wait, the method waits
        until one of them can continue.
        """
        await self._begin()
        await self._repeat_restarts()  # before an observation, and after it
        await self._collect()
        await self._repeat_restarts()
        if self.engine.any_active:
            await self._decode()
        elif not self.ended and self.all_begun and not self.gave_way and not self._has_result():
            calls = {
                run.tool for run in self.all_begun if run.tool is not None and not run.tool.done()
            }
            news = asyncio.ensure_future(self.reader.changed())
            try:
                await asyncio.wait({*calls, news}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._end(news)
        ended, self.ended = self.ended, []
        return ended

    def _has_result(self) -> bool:
        """Returns whether a sample in a slot can take the result of its tool call.

        A turn of the policy may have several calls. `_collect` begins the next one, which may end
        while the engine computes the observation of the one before.
        """
        return any(
            run.tool is not None and run.tool.done() and not run.must_pause(self.version)
            for run in self.running.values()
        )

    async def _decode(self) -> None:
        """Decodes one chunk, and gives its tokens to the samples."""
        decoding = [run for run in self.running.values() if run.can_decode(self.version)]
        self._make_room({run.slot: self.engine.reach(run.slot) for run in decoding})
        if not self.engine.any_active:
            return
        for run in decoding:
            if run.number not in self.parked:
                self._computes(run)
        chunk = await self._on_device(self.engine.decode)
        for run in list(self.running.values()):
            if run.tool is None and chunk.count[run.slot]:
                count = int(chunk.count[run.slot])
                tokens = chunk.tokens[run.slot, :count].tolist()
                self._advance(run, tokens, chunk.logps[run.slot, :count].tolist())
                self._check_ended(run, bool(chunk.active[run.slot]))
        await asyncio.sleep(0)

    def _advance(self, run: RunningSample, tokens: Sequence[int], logps: Sequence[float]) -> None:
        """Gives a sample its new tokens, up to the token that calls a tool or ends the sample."""
        episode = run.episode
        limit = self.config.max_turn_tokens if run.request.agent else 0
        for token, logp in zip(tokens, logps, strict=True):
            if not math.isfinite(logp):  # the logits are NaN, so no token was really sampled
                return self._finish(run, StopReason.FAULT)
            event = episode.feed(token, logp)
            self._tell(run, Author.POLICY, episode.take_text() if self.on_text else "")
            if event is None and limit and episode.turn_tokens >= limit:
                event = StopReason.TURN_LENGTH
            if event is None:
                continue
            event = run.asked(event)
            over = event if isinstance(event, StopReason) else self._begin_call(run, event)
            if over:
                return self._finish(run, over)
            # Discards the tokens that were sampled after the closing tag.
            self.engine.truncate(run.slot, len(episode.context), token)
            return self.engine.set_active(run.slot, False)
        if spent := self._spent(run):
            self._finish(run, spent)

    def _begin_call(self, run: RunningSample, request: ToolRequest) -> StopReason | None:
        """Starts a tool call; returns the stop reason if a budget does not permit the call."""
        calls = len(run.episode.tool_calls)
        if calls >= self.config.max_tool_calls and request.tool != ANSWER:
            return StopReason.TURNS
        if self._room(run) <= 0 and request.tool not in run.environment.own:
            return StopReason.LENGTH  # a call of the environment may still end the episode
        run.tool_request, run.called = request, asyncio.get_running_loop().time()
        run.tool = asyncio.create_task(self._call(run, request))
        return None

    def _check_ended(self, run: RunningSample, active: bool) -> None:
        """Checks that each sample decodes, waits for a tool, or waits for parameters."""
        if not active and run.can_decode(self.version) and self.running.get(run.slot) is run:
            raise RuntimeError(f"slot {run.slot} has ended, but its sample has not")

    async def _call(
        self, run: RunningSample, request: ToolRequest | None
    ) -> tuple[Observation, float]:
        """Runs a tool call, or resets the environment; returns (observation, start time)."""
        clock = asyncio.get_running_loop().time
        start = clock()
        if request is not None and request.error:
            return Observation(request.error, False, "bad_call", 0.0), start
        context = run.context(self.config, start)
        if request is None:
            observation = await run.environment.reset(context)
        else:
            observation = await run.environment.act(request.tool, request.arguments, context)
        run.tool_seconds += clock() - start
        return observation, start

    async def _collect(self) -> None:
        """Appends the results of finished tool calls to their episodes and to the KV cache."""
        feeds: list[tuple[int, int, Sequence[int]]] = []
        for run in list(self.running.values()):
            request = run.tool_request
            if run.tool is None or request is None or not run.tool.done():
                continue
            if run.must_pause(self.version):
                continue
            self._computes(run)
            observation, start = run.take_result()
            episode, over = run.episode, run.ended_by(request, observation)
            start_at = len(episode.context) - 1  # the newest token is not in the KV cache yet
            budget, body, frame = self._room(run), observation.text, episode.frame
            ids: list[int] = []
            if budget > 0 and over in (None, StopReason.ENVIRONMENT):
                ids, body = self.episodes.encode(episode, observation.text, budget)
            elif over is None:
                over = StopReason.LENGTH
            record = run.record(request, dataclasses.replace(observation, text=body), start)
            text = body.join(frame) if ids else ""
            episode.observe(ids, text, record)
            self._tell(run, Author.ENVIRONMENT, text, record)
            most = run.limit - self.config.max_turn_tokens
            if self.config.cut_context and len(episode.context) > most:
                start_at = min(start_at, episode.cut(most))
            over = over or self._spent(run)
            if not over and (further := episode.next_call()):
                over = self._begin_call(run, further)
            if over:
                self._finish(run, over)
            else:
                self.engine.observe(run.slot)
                feeds.append((run.slot, start_at, episode.context[start_at:]))
        fed = {slot: self.running[slot] for slot, _, _ in feeds}
        self._make_room({slot: len(run.episode.context) for slot, run in fed.items()})
        feeds = [feed for feed in feeds if self.running.get(feed[0]) is fed[feed[0]]]
        if feeds:
            await self._on_device(self.engine.extend, feeds)
        for slot, _, _ in feeds:
            self.engine.set_active(slot, self.running[slot].can_decode(self.version))

    def _tell(
        self, run: RunningSample, author: Author, text: str, call: ToolCall | None = None
    ) -> None:
        if self.on_text and text:
            task, sample = run.request.task, run.episode.sample_id
            self.on_text(Arrival(task.id, sample, author, text, call))

    def _room(self, run: RunningSample) -> int:
        """Returns the number of tokens left for the body of an observation."""
        used = len(run.episode.context)
        if self.config.cut_context:  # removing older steps can make more room
            used = min(used, 2 * self.config.max_turn_tokens + len(run.request.prompt))
        return run.limit - used - self.episodes.frame(run.episode)

    def _spent(self, run: RunningSample) -> StopReason | None:
        """Returns the stop reason if a budget of the trajectory is exhausted, else None."""
        return run.used_up(self.config, asyncio.get_running_loop().time())

    def _finish(self, run: RunningSample, reason: StopReason) -> None:
        if self.parked.pop(run.number, None) is None:
            self.engine.set_active(run.slot, False)
            self._leave(run)
        seconds, shapes = asyncio.get_running_loop().time() - run.began, self.engine.config
        metadata = described(run.request, self.config, seconds, shapes) | run.described()
        if run.environment.holds:
            closing = asyncio.create_task(run.environment.close())
            self.closing.add(closing)
            closing.add_done_callback(self.closing.discard)
        if self.config.cut_context:
            metadata["cut_tokens"] = len(run.episode.tokens) - len(run.episode.context)
        self.ended.append(run.episode.finish(reason, run.request.task.gold, metadata))
        # The last bytes may be an incomplete character, which only `finish` turns into text.
        self._tell(run, Author.POLICY, run.episode.take_text())

    async def close(self) -> None:
        """Cancels running tool calls, closes the environments of samples, and frees every slot."""
        self.queue.leave(self.reader)
        self.thread.shutdown(wait=False)
        if self.device_call is not None:
            await asyncio.wait([self.device_call])
        for run in self.all_begun:
            if run.tool is not None:
                self._end(run.tool)
        await asyncio.gather(*self.ending, return_exceptions=True)
        left = (run.environment.close() for run in self.all_begun if run.environment.holds)
        await asyncio.gather(*self.closing, *left, return_exceptions=True)
        for slot in list(self.running):
            self.engine.set_active(slot, False)
        self.running.clear()
        self.parked.clear()
