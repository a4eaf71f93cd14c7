"""Requests of a rollout: all known before it begins, or put in and taken back while it runs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from coa_jax.rollout.request import Request


class Inbox:
    """Where the agent loop finds its requests; a server puts each in when it arrives.

    For one event loop, whose tasks are the only callers.  Several readers share the requests.  A
    rollout ends when the inbox is closed and what was in it has finished.
    """

    def __init__(self, requests: Iterable[Request] = (), *, closed: bool = False):
        """Holds requests already.

        Args:
            requests: consumed lazily, before those that are put in.
            closed: whether they are all.
        """
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
    """

    def __init__(self, inbox: Inbox, cancelled: list[Request]):
        """Begins with requests that were cancelled before."""
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
        """Returns when something was put in, cancelled or closed since the last return."""
        await self._news.wait()
        self._news.clear()
