"""Requests of a rollout: all known before it begins, or put in and taken back while it runs.

New weights come the same way, to be taken over between two programs of an engine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence

from coa_jax.model.params import DecodeParams
from coa_jax.rollout.request import Request


class Inbox:
    """Where the agent loop finds its requests; a server puts each in when it arrives.

    For one event loop, whose tasks are the only callers.  Several readers share the requests.  A
    rollout ends when the inbox is closed and what was in it has finished.
    """

    def __init__(
        self,
        requests: Iterable[Request] = (),
        *,
        closed: bool = False,
        version: int | None = None,
    ):
        """Holds requests already.

        Args:
            requests: consumed lazily, before those that are put in.
            closed: whether they are all.
            version: policy version of the engines; None where trajectories do not say by which
                version they were sampled.
        """
        self.version = version
        self._source = iter(requests)
        self._queue: deque[Request] = deque()
        self.readers: list[Reader] = []
        self._cancelled: list[Request] = []  # before there was a reader
        self.closed = closed

    def reader(self) -> Reader:
        """Somebody who takes requests from now on, until `leave`."""
        reader = Reader(self, self._cancelled)
        self._cancelled = []
        self.readers.append(reader)
        return reader

    def leave(self, reader: Reader) -> None:
        """A reader that takes no more requests."""
        self.readers.remove(reader)

    def _tell(self) -> None:
        for reader in self.readers:
            reader.wake()

    def put(self, request: Request) -> None:
        """Adds a request behind those that wait.

        Raises:
            RuntimeError: the inbox is closed.
        """
        if self.closed:
            raise RuntimeError("the inbox is closed")
        self._queue.append(request)
        self._tell()

    def cancel(self, request: Request) -> None:
        """Ends the samples of a request (that very object); what has finished stays as it is."""
        for reader in self.readers:
            reader.cancel(request)
        if not self.readers:
            self._cancelled.append(request)
        self._tell()

    def publish(self, parts: Sequence[DecodeParams], version: int, recompute: bool = False) -> None:
        """Gives the engines new parameters, which each takes over before its next program.

        Args:
            parts: one for each group of devices, as `engine.layout.publish` makes them.
            version: policy version of the parameters.
            recompute: whether the caches of running samples are computed again with them.
        """
        self.version = version
        count = len(self.readers) // len(parts)
        for index, reader in enumerate(self.readers):
            reader.weights = (parts[index // count], version, recompute)
        self._tell()

    def close(self) -> None:
        """Says that no request will come any more."""
        self.closed = True
        self._tell()

    def take(self) -> Request | None:
        """The next request, None if there is none now."""
        request = next(self._source, None)
        return request or (self._queue.popleft() if self._queue else None)

    def drop(self, request: Request) -> bool:
        """Forgets a request that was put in and not taken yet; returns whether there was one."""
        left = deque(other for other in self._queue if other is not request)
        found, self._queue = len(left) < len(self._queue), left
        return found


class Reader:
    """Somebody who takes requests from an inbox and runs their samples.

    Attributes:
        waiting: samples that it took and has no room for yet.
        weights: arguments of the last `Inbox.publish` that the engine has not taken over yet.
    """

    def __init__(self, inbox: Inbox, cancelled: list[Request]):
        """Begins with requests that were cancelled before."""
        self.weights: tuple[DecodeParams, int, bool] | None = None
        self._inbox, self._cancelled = inbox, cancelled
        self._news = asyncio.Event()
        self.waiting: deque[tuple[Request, int]] = deque()

    def sample(self) -> tuple[Request, int] | None:
        """The first that waits; None if there is none.

        Where none does, the reader takes a request, whose prompt is then computed once; where there
        is no request either, a sample of the reader that has the most.
        """
        while not self.waiting and (request := self._inbox.take()):
            self.waiting.extend((request, sample) for sample in request.samples)
        longest = max((reader.waiting for reader in self._inbox.readers), key=len)
        if not self.waiting and longest:
            self.waiting.append(longest.pop())
        return self.waiting[0] if self.waiting else None

    def cancel(self, request: Request) -> None:
        """Tells that nobody wants a request any more."""
        self._cancelled.append(request)

    def take_cancelled(self) -> list[Request]:
        """The requests that were cancelled since the last call; another reader may have them."""
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    def wake(self) -> None:
        """Ends `changed`."""
        self._news.set()

    async def changed(self) -> None:
        """Returns when there was news since the last return: see `put`, `cancel`, `publish`."""
        await self._news.wait()
        self._news.clear()
