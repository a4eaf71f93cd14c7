"""The queue of rollout requests: known from the start, or added and cancelled while rollouts run.

New weights are delivered in the same way: an engine loads them between two of its programs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence

from coa_jax.model.params import DecodeParams
from coa_jax.rollout.request import Request


class Inbox:
    """The queue from which the rollout loop takes requests; a server adds each when it arrives.

    All callers must be tasks of one event loop. Several readers share the requests. A rollout ends
    when the inbox is closed and its requests have finished.
    """

    def __init__(
        self,
        requests: Iterable[Request] = (),
        *,
        closed: bool = False,
        version: int | None = None,
    ):
        """Creates an inbox with initial requests.

        Args:
            requests: initial requests, consumed lazily, before requests from `put`.
            closed: whether no further requests can be added.
            version: policy version of the engines; None if trajectories do not record a version.
        """
        self.version = version
        self._source = iter(requests)
        self._queue: deque[Request] = deque()
        self.readers: list[Reader] = []
        self._cancelled: list[Request] = []  # cancelled before there was a reader
        self.closed = closed

    def reader(self) -> Reader:
        """Registers a reader, which takes requests until `leave`."""
        reader = Reader(self, self._cancelled)
        self._cancelled = []
        self.readers.append(reader)
        return reader

    def leave(self, reader: Reader) -> None:
        """Unregisters a reader, which takes no more requests."""
        self.readers.remove(reader)

    def _tell(self) -> None:
        for reader in self.readers:
            reader.wake()

    def put(self, request: Request) -> None:
        """Adds a request to the end of the queue.

        Raises:
            RuntimeError: the inbox is closed.
        """
        if self.closed:
            raise RuntimeError("the inbox is closed")
        self._queue.append(request)
        self._tell()

    def cancel(self, request: Request) -> None:
        """Ends the samples of a request (the same object); finished samples are unaffected."""
        for reader in self.readers:
            reader.cancel(request)
        if not self.readers:
            self._cancelled.append(request)
        self._tell()

    def publish(self, parts: Sequence[DecodeParams], version: int, recompute: bool = False) -> None:
        """Delivers new parameters; each engine loads them before its next program.

        Args:
            parts: one copy per device group, from `engine.layout.publish`.
            version: policy version of the parameters.
            recompute: whether the caches of running samples are recomputed with the new parameters.
        """
        self.version = version
        count = len(self.readers) // len(parts)
        for index, reader in enumerate(self.readers):
            reader.weights = (parts[index // count], version, recompute)
        self._tell()

    def close(self) -> None:
        """Declares that no more requests will be added."""
        self.closed = True
        self._tell()

    def take(self) -> Request | None:
        """Takes the next request; None if the queue is empty."""
        request = next(self._source, None)
        return request or (self._queue.popleft() if self._queue else None)

    def drop(self, request: Request) -> bool:
        """Removes a request that no reader has taken yet; returns whether it was in the queue."""
        left = deque(other for other in self._queue if other is not request)
        found, self._queue = len(left) < len(self._queue), left
        return found


class Reader:
    """Takes requests from an inbox and distributes their samples.

    Attributes:
        waiting: samples that this reader took and that have no slot yet.
        weights: arguments of the last `Inbox.publish` that the engine has not loaded yet.
    """

    def __init__(self, inbox: Inbox, cancelled: list[Request]):
        """Creates a reader that knows the requests cancelled before."""
        self.weights: tuple[DecodeParams, int, bool] | None = None
        self._inbox, self._cancelled = inbox, cancelled
        self._news = asyncio.Event()
        self.waiting: deque[tuple[Request, int]] = deque()

    def sample(self) -> tuple[Request, int] | None:
        """Takes the next sample; None if there is none.

        The reader's own waiting samples come first. Then the reader takes a new request, whose
        prompt is prefilled once. If the queue is empty, it takes a sample from the reader with the
        most waiting.
        """
        while not self.waiting and (request := self._inbox.take()):
            self.waiting.extend((request, sample) for sample in request.samples)
        longest = max((reader.waiting for reader in self._inbox.readers), key=len)
        if not self.waiting and longest:
            self.waiting.append(longest.pop())
        return self.waiting[0] if self.waiting else None

    def cancel(self, request: Request) -> None:
        """Notes that a request was cancelled."""
        self._cancelled.append(request)

    def take_cancelled(self) -> list[Request]:
        """Returns the requests cancelled since the last call.

        Another reader may have their samples.
        """
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    def wake(self) -> None:
        """Wakes up a task that waits in `changed`."""
        self._news.set()

    async def changed(self) -> None:
        """Waits for the next event since the last return: `put`, `cancel` or `publish`."""
        await self._news.wait()
        self._news.clear()
