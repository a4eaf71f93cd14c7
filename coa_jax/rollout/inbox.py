"""Requests of a rollout: all known before it begins, or put in and taken back while it runs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from coa_jax.rollout.request import Request


class Inbox:
    """Where the agent loop finds its requests; a server puts each in when it arrives.

    For one event loop, whose tasks are the only callers.  Several readers share the requests: each
    goes to the first that takes it.  A rollout ends when the inbox is closed and what was in it has
    finished.
    """

    def __init__(self, requests: Iterable[Request] = (), *, closed: bool = False):
        """Holds requests already.

        Args:
            requests: consumed lazily, before those that are put in.
            closed: whether they are all.
        """
        self._source = iter(requests)
        self._queue: deque[Request] = deque()
        self._readers: list[Reader] = []
        self._cancelled: list[Request] = []  # before there was a reader
        self.closed = closed

    def reader(self) -> Reader:
        """Somebody who takes requests from now on, until `leave`."""
        reader = Reader(self._cancelled)
        self._cancelled = []
        self._readers.append(reader)
        return reader

    def leave(self, reader: Reader) -> None:
        """A reader that takes no more requests."""
        self._readers.remove(reader)

    def _tell(self) -> None:
        for reader in self._readers:
            reader.news.set()

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
        for reader in self._readers:
            reader.cancelled.append(request)
        if not self._readers:
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
    """What one of an inbox's readers has not seen yet."""

    def __init__(self, cancelled: list[Request]):
        """Has requests to end already."""
        self.cancelled, self.news = cancelled, asyncio.Event()

    def take_cancelled(self) -> list[Request]:
        """The requests that were cancelled since the last call; another reader may have them."""
        cancelled, self.cancelled = self.cancelled, []
        return cancelled

    async def changed(self) -> None:
        """Returns when something was put in, cancelled or closed since the last return."""
        await self.news.wait()
        self.news.clear()
