"""Samples and grades groups continuously, in a background thread, while updates run.

A free slot of an engine is refilled immediately. A trajectory is graded and written to disk as soon
as it finishes; if grading takes more than a second, the trajectory is first written without its
grades. A group can enter a step when all of its samples are graded. `admission.Ledger` decides
which tasks are sampled and which groups form a step.

With N processes, process i samples the tasks whose index is i modulo N. The processes tell each
other which groups have finished, so all processes compose the same steps. The background thread
runs no program that spans several processes, because such programs must be launched in the same
order in every process. Only the main thread can guarantee this order.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from coa_jax.data.trajectory import StopReason, Trajectory
from coa_jax.parallel import processes
from coa_jax.rollout.request import Request
from coa_jax.rollout.sampler import Sampler
from coa_jax.tasks import Task
from coa_jax.train.admission import Composition, Ledger
from coa_jax.train.run_records import GRADING, Spool, oldest_of
from coa_jax.train.task_pool import Score

_NEWS_S = 0.25
"""Number of seconds between two exchanges of processes that have no news."""
_UNGRADED_S = 1.0
"""Number of seconds of grading after which a trajectory is written to disk without its grades."""


@dataclasses.dataclass(frozen=True)
class LocalShare:
    """The part of a step's samples that this process sampled: whole groups, or parts of groups.

    Attributes:
        composition: names the groups that the step uses.
        groups: graded groups of this process that the step considered, used or not, by task index.
        dropped: groups of this process that were dropped because they were too old; some of their
            samples may be missing.
        figures: seconds and counts since the previous step. Besides the figures of
            `Sampler.figures`, these are ``seconds``, the elapsed wall-clock time; ``reward_s``, the
            time of grading, summed over trajectories; ``left_out``, the number of samples that were
            left out (see `RLConfig.late_samples`); and ``slots``, the number of slots.
    """

    composition: Composition
    groups: dict[int, list[Trajectory]]
    dropped: list[list[Trajectory]]
    figures: dict[str, float]


@dataclasses.dataclass(eq=False)
class _Group:
    """The samples of a task, whether in flight or finished.

    Attributes:
        request: request for the samples.
        size: number of samples, whether in flight or finished.
        done: trajectories by sample index, with those rewards that need no other sample.
        members: the whole group with the rewards to train on; [] until all samples are graded.
        grading: running asyncio tasks that grade samples.
        ended: indices of the samples that have finished, whether graded or not.
    """

    request: Request
    size: int
    done: dict[int, Trajectory]
    members: list[Trajectory] = dataclasses.field(default_factory=list)
    grading: set[asyncio.Task[None]] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        self.ended = set(self.done)


class GroupStream:
    """Samples and grades the groups of a run in a background thread, and hands out steps.

    A group is all samples of one task. `start` begins sampling, and `step` waits for the groups of
    the next step.
    """

    def __init__(
        self,
        ledger: Ledger,
        sampler: Sampler,
        spool: Spool,
        *,
        ask: Callable[[int], Request],
        grade: Callable[[Task, Trajectory], Awaitable[Trajectory]],
        complete: Callable[[Task, Sequence[Trajectory]], Awaitable[Sequence[Trajectory]]],
        has_signal: Callable[[Sequence[Trajectory]], bool],
        wait_seconds: float,
        leave_out: bool = False,
        score: Callable[[Sequence[Trajectory]], Score] = lambda group: (0, 0),
        kept: Mapping[tuple[int, int], Sequence[Trajectory]] | None = None,
        loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    ):
        """Prepares the stream; sampling begins with `start`.

        Args:
            ledger: decides which tasks are sampled and which groups form a step. Its version must
                be that of the sampler.
            sampler: sampler of this process.
            spool: stores every graded trajectory.
            ask: function that returns the request for all samples of the task with an index.
            grade: function that adds to a finished trajectory those rewards that need no other
                sample.
            complete: function that adds to all trajectories of a group the rewards to train on.
            has_signal: function that returns whether a step can train on a group.
            wait_seconds: number of seconds to wait for the slowest process, see
                `processes.all_gather`.
            leave_out: whether a group may be completed without its late samples, see `_leave_out`.
            score: function that returns the numbers of solved and of graded samples of a group, for
                the ledger's pool.
            kept: trajectories that the run had finished before it was resumed, see `Spool.read`.
            loop_factory: creates the event loop; None for asyncio's default.
        """
        self._ledger, self._sampler, self._spool = ledger, sampler, spool
        self._request, self._grade, self._complete = ask, grade, complete
        self._has_signal, self._score, self._leaves_out = has_signal, score, leave_out
        self._wait_seconds, self._kept = wait_seconds, dict(kept or {})
        self._version = ledger.version
        self._groups: dict[int, _Group] = {}
        self._attempts: dict[int, int] = {}
        self._late: list[list[Trajectory]] = []
        self._events: list[list[Any]] = []
        self._in_flight = 0  # samples that were requested, but not yet returned by the sampler
        self._reward_s = self._left_out = 0.0
        self._before: dict[str, float] = {}
        self._shares: queue.SimpleQueue[LocalShare | BaseException] = queue.SimpleQueue()
        self._loop = (loop_factory or asyncio.new_event_loop)()
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self._task: asyncio.Task[None] | None = None
        self._abandoned = False

    # --- called by the main thread ---------------------------------------------------------

    def start(self) -> None:
        """Starts the background thread, and with it the sampling."""
        self._thread.start()

    def step(self) -> LocalShare | None:
        """Waits for this process's share of the next step; returns None after `abandon`.

        Raises:
            Exception: the error that ended the stream's thread.
        """
        share = self._shares.get()
        if isinstance(share, asyncio.CancelledError):
            return None
        if isinstance(share, BaseException):
            raise share
        return share

    def publish(self, weights: Any, version: int) -> None:
        """Gives new weights to the sampler; see `Sampler.publish`."""

        def publish() -> None:
            self._sampler.publish(weights, version)
            self._version = version
            if self._ledger.rules.max_staleness == 0:
                self._before = self._counts()  # nothing was sampled since the previous step
            self._news.set()

        self._call(publish)

    def prune(self, state: Mapping[str, Any]) -> None:
        """Removes the files of trajectories that no resumed run would need; see `Spool.prune`."""
        self._call(lambda: self._spool.prune(state, self._ledger.rules.max_staleness))

    def abandon(self) -> None:
        """Asks the stream to end, and returns at once; signal handlers may call this method."""
        if not self._abandoned:
            self._abandoned = True  # a second cancellation would interrupt the stream's cleanup
            self._call(lambda: self._task.cancel() if self._task else None)

    def close(self) -> None:
        """Abandons the stream, and waits until its thread has ended."""
        self.abandon()
        if self._thread.ident is None:
            self._loop.close()
        else:
            self._thread.join()

    def _call(self, function: Callable[[], Any]) -> None:
        """Runs a function in the event loop, if the loop is still running."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    # --- in the thread of the stream -------------------------------------------------------

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._main())
            except* asyncio.CancelledError as group:
                self._shares.put(group.exceptions[0])
            except* Exception as group:  # raised again by `step`
                self._shares.put(group.exceptions[0])

    async def _main(self) -> None:
        self._task, self._news = asyncio.current_task(), asyncio.Event()
        self._clock = asyncio.get_running_loop().time
        self._before = self._counts()
        if self._abandoned:
            raise asyncio.CancelledError
        async with asyncio.TaskGroup() as tasks:
            sampling = tasks.create_task(self._sample(tasks))
            await self._decide(tasks)
            sampling.cancel()
            for group in self._groups.values():
                self._discard(group)

    async def _sample(self, tasks: asyncio.TaskGroup) -> None:
        """Starts to grade each trajectory when the sampler has finished it."""
        # Close the generator here rather than at garbage collection, so that the engines are free
        # afterwards.
        async with contextlib.aclosing(self._sampler.finished()) as finished:
            async for trajectory in finished:
                self._in_flight -= 1
                group = self._groups.get(trajectory.metadata["prompt_id"])
                current = group and group.request.metadata == _origin(trajectory, group.request)
                complete = trajectory.stop_reason != StopReason.CANCELLED
                if group and current and complete and len(group.ended) < group.size:
                    group.ended.add(trajectory.sample_id)
                    self._work(tasks, group, self._finish(group, trajectory))
                self._news.set()

    def _work(
        self, tasks: asyncio.TaskGroup, group: _Group, coroutine: Coroutine[Any, Any, None]
    ) -> None:
        """Starts a background task that grades; `_discard` can cancel the task."""
        task = tasks.create_task(coroutine)
        group.grading.add(task)
        task.add_done_callback(group.grading.discard)

    async def _finish(self, group: _Group, trajectory: Trajectory) -> None:
        began = self._clock()
        # If grading takes long, a run that is killed meanwhile must not lose the trajectory.
        loop = asyncio.get_running_loop()
        waits = dataclasses.replace(trajectory, metadata={**trajectory.metadata, GRADING: True})
        saving = loop.call_later(_UNGRADED_S, self._spool.add, waits)
        try:
            graded = await self._grade(group.request.task, trajectory)
        finally:
            saving.cancel()
        self._reward_s += self._clock() - began
        self._spool.add(graded)
        group.done[graded.sample_id] = graded
        await self._check_whole(group)

    async def _check_whole(self, group: _Group) -> None:
        if len(group.done) == group.size:
            members = [group.done[number] for number in sorted(group.done)]
            group.members = list(await self._complete(group.request.task, members))
            signal, index = self._has_signal(group.members), group.request.prompt_id
            score = list(self._score(group.members))
            self._events.append(["end", index, signal, oldest_of(members), score])
            self._news.set()

    async def _decide(self, tasks: asyncio.TaskGroup) -> None:
        """Reports the news of all processes to the ledger, and carries out its decisions."""
        ledger = self._ledger
        while not ledger.complete:
            self._cancel_late(tasks)
            events, self._events = self._events, []
            news = (self._version, events)
            messages = await processes.all_gather_async(
                news, "news of rollouts", self._wait_seconds
            )
            ledger.version = min(version for version, _ in messages)
            for _, news in messages:
                for kind, *arguments in news:
                    (ledger.end if kind == "end" else ledger.late)(*arguments)
            while (composition := ledger.next_step()) is not None:
                await self._hand_over(composition)
            for index in ledger.admit():
                if index % processes.count() == processes.index():
                    self._ask(index, tasks)
            if not self._events:
                pause = _NEWS_S if processes.count() > 1 else None
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), pause)
            self._news.clear()

    def _ask(self, index: int, tasks: asyncio.TaskGroup) -> None:
        """Requests the samples of a group that had not finished before the run was resumed."""
        before = self._groups.pop(index, None)
        if before is not None:
            self._discard(before)
        request = self._request(index)
        attempt = self._attempts[index] = self._attempts.get(index, -1) + 1
        oldest = self._ledger.oldest_useful
        kept = {
            sample: attempts[-1]
            for sample in request.samples
            if (attempts := self._kept.pop((index, sample), ()))
            and oldest_of(attempts[-1:]) >= oldest
        }
        done = {sample: one for sample, one in kept.items() if GRADING not in one.metadata}
        missing = tuple(sample for sample in request.samples if sample not in kept)
        metadata = {**request.metadata, "attempt": attempt}
        size = len(request.samples)
        request = dataclasses.replace(request, samples=missing, metadata=metadata)
        group = self._groups[index] = _Group(request, size, done)
        group.ended |= kept.keys()
        for sample in kept.keys() - done.keys():
            del kept[sample].metadata[GRADING]
            self._work(tasks, group, self._finish(group, kept[sample]))
        if missing:
            self._in_flight += len(missing)
            self._sampler.submit(request)
        elif len(done) == size:
            self._work(tasks, group, self._check_whole(group))

    def _discard(self, group: _Group) -> None:
        """Cancels a group; the group's finished trajectories are reported as too old."""
        self._sampler.cancel(group.request)
        for task in list(group.grading):
            task.cancel()
        if group.done:
            self._late.append(list(group.done.values()))

    def _cancel_late(self, tasks: asyncio.TaskGroup) -> None:
        """Discards or completes groups in flight that later steps cannot train on."""
        oldest = self._ledger.oldest_useful
        for index, group in list(self._groups.items()):
            versions = [oldest_of([trajectory]) for trajectory in group.done.values()]
            running = self._sampler.oldest(group.request)
            versions += [] if running is None else [running]
            age = min(versions, default=oldest + 1) - oldest
            if not self._ledger.is_open(index):  # the ledger has given the task up
                self._discard(self._groups.pop(index))
            elif len(group.done) == group.size:
                continue
            elif age == 0 and self._leaves_out:
                self._leave_out(group, tasks)
            elif age < 0:
                self._discard(self._groups.pop(index))
                self._events.append(["late", index])

    def _leave_out(self, group: _Group, tasks: asyncio.TaskGroup) -> None:
        """Completes a group that only the next step can train on, by cancelling its late samples.

        A group with fewer than two finished samples continues, and may become too old.
        """
        ended = len(group.ended)
        if 2 <= ended < group.size:
            self._sampler.cancel(group.request)
            self._left_out += group.size - ended
            group.size = ended
            if len(group.done) == ended:  # else the last grading task checks the group
                self._work(tasks, group, self._check_whole(group))

    async def _hand_over(self, composition: Composition) -> None:
        """Passes this process's share of a step to the main thread."""
        mine = [i for i in composition.examined if i % processes.count() == processes.index()]
        groups = {}
        for index in mine:
            groups[index] = self._groups.pop(index).members
            del self._attempts[index]
        late, self._late = self._late, []
        if self._ledger.rules.max_staleness == 0:
            # The next weights may reuse the memory of the current weights, so wait until no sample
            # is in flight.
            for group in self._groups.values():
                self._discard(group)
            self._groups, self._attempts, self._late = {}, {}, []
            while self._in_flight:
                self._news.clear()
                await self._news.wait()
        counts = self._counts()
        figures = {name: counts[name] - self._before.get(name, 0.0) for name in counts}
        self._before = counts
        self._shares.put(
            LocalShare(composition, groups, late, {**figures, "slots": counts["slots"]})
        )

    def _counts(self) -> dict[str, float]:
        clock = {"seconds": self._clock(), "reward_s": self._reward_s, "left_out": self._left_out}
        return {**self._sampler.figures(), **clock}


def _origin(trajectory: Trajectory, request: Request) -> dict[str, Any]:
    """Returns those entries of a trajectory's metadata that come from its request."""
    return {name: trajectory.metadata.get(name) for name in request.metadata}
