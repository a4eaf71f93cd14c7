"""Queues rollout requests, which can be added and cancelled while rollouts run.

The queue also delivers new weights to the engines. An engine loads new weights between two program
calls.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence

from coa_jax.model.params import DecodeParams
from coa_jax.rollout.request import Request


class RequestQueue:
    """The queue of rollout requests that several engines share.

    All callers must be tasks of one event loop. Each engine takes requests through an
    `RequestQueueReader` of its own. The rollout ends when the queue is closed and all requests have
    finished.
    """

    def __init__(
        self, requests: Iterable[Request] = (), *, closed: bool = False, version: int | None = None
    ):
        """Creates an queue with initial requests.

        Args:
            requests: initial requests. They are consumed lazily, and before requests from `put`.
            closed: whether the queue is closed from the start, so that no request can be added.
            version: policy version of the engines' weights; None if trajectories do not record
                policy versions.
        """
        self.version = version
        self._source = iter(requests)
        self._queue: deque[Request] = deque()
        self.readers: list[RequestQueueReader] = []
        self._cancelled: list[Request] = []  # requests cancelled while there was no reader
        self.closed = closed

    def reader(self) -> RequestQueueReader:
        """Creates and registers an engine's reader, which takes requests until `leave`."""
        reader = RequestQueueReader(self, self._cancelled)
        self._cancelled = []
        self.readers.append(reader)
        return reader

    def leave(self, reader: RequestQueueReader) -> None:
        """Unregisters the reader of an engine, so that it takes no more requests."""
        self.readers.remove(reader)

    def _tell(self) -> None:
        for reader in self.readers:
            reader.news.set()

    def put(self, request: Request) -> None:
        """Adds a request to the end of the queue.

        Raises:
            RuntimeError: the queue is closed.
        """
        if self.closed:
            raise RuntimeError("the queue is closed")
        self._queue.append(request)
        self._tell()

    def cancel(self, request: Request) -> None:
        """Ends all samples of a request that have not finished.

        Args:
            request: the request; the same object as in `put`, not an equal one.
        """
        if not self.readers:
            self._cancelled.append(request)
        for reader in self.readers:
            reader.cancelled.append(request)
        self._tell()

    def publish(self, parts: Sequence[DecodeParams], version: int, recompute: bool = False) -> None:
        """Delivers new parameters, which each engine loads after its present chunk of tokens.

        Args:
            parts: one copy of the parameters for each engine's group of devices, see
                `engine.layout.publish`.
            version: policy version of the parameters.
            recompute: whether the engines recompute the KV caches of running samples with the new
                parameters.
        """
        self.version = version
        count = len(self.readers) // len(parts)
        for index, reader in enumerate(self.readers):
            reader.weights = (parts[index // count], version, recompute)
        self._tell()

    def close(self) -> None:
        """Declares that no more requests will be added; the rollout ends after the last request."""
        self.closed = True
        self._tell()

    def take_request(self) -> Request | None:
        """Removes the next request from the queue and returns it; None if the queue is empty."""
        request = next(self._source, None)
        return request or (self._queue.popleft() if self._queue else None)

    def drop(self, request: Request) -> bool:
        """Removes a request from the queue; returns False if an engine has already taken it."""
        left = deque(other for other in self._queue if other is not request)
        queued, self._queue = len(left) < len(self._queue), left
        return queued


class RequestQueueReader:
    """Takes requests from an queue for one engine.

    Attributes:
        waiting: (request, sample number) of each sample that waits for a slot of this engine.
        weights: (parameters, policy version, whether to recompute KV caches) of the last
            `RequestQueue.publish`; None if the engine has already loaded these parameters.
        cancelled: requests that were cancelled since the last `take_cancelled`.
        news: event that is set when the queue changes.
    """

    def __init__(self, queue: RequestQueue, cancelled: list[Request]):
        """Creates a reader.

        Args:
            queue: the queue of requests that all engines share.
            cancelled: requests that were cancelled before the reader existed.
        """
        self.weights: tuple[DecodeParams, int, bool] | None = None
        self._queue, self.cancelled = queue, cancelled
        self.news = asyncio.Event()
        self.waiting: deque[tuple[Request, int]] = deque()

    def sample(self) -> tuple[Request, int] | None:
        """Returns the engine's next sample; None if no sample is left.

        The sample is the first in ``waiting``, and stays there until the caller removes it. If
        ``waiting`` is empty, these samples are moved to it:

        1. all samples of the next request in the queue,
        2. or, if the queue is empty, one sample of the reader that has the most waiting samples.
           Samples of cancelled requests are neither counted nor moved.
        """
        while not self.waiting and (request := self._queue.take_request()):
            self.waiting.extend((request, sample) for sample in request.samples)
        if not self.waiting:
            longest = max(self._queue.readers, key=lambda reader: len(reader._spare()))
            if spare := longest._spare():
                self.waiting.append(longest.waiting[spare[-1]])
                del longest.waiting[spare[-1]]
        return self.waiting[0] if self.waiting else None

    def _spare(self) -> list[int]:
        """Returns the positions in ``waiting`` of the samples that other readers may take.

        A cancelled sample is left to its reader, which ends the sample without an engine.
        """
        gone = {id(request) for request in self.cancelled}
        return [at for at, (request, _) in enumerate(self.waiting) if id(request) not in gone]

    def take_cancelled(self) -> list[Request]:
        """Returns the requests that were cancelled since the last call of this method.

        Every reader gets them, because several engines may sample a request. Each engine ends the
        samples that it has.
        """
        cancelled, self.cancelled = self.cancelled, []
        return cancelled

    async def changed(self) -> None:
        """Waits until the queue has changed since the last call of this method.

        `RequestQueue.put`, `RequestQueue.cancel`, `RequestQueue.publish` and `RequestQueue.close`
        change the queue.
        """
        await self.news.wait()
        self.news.clear()
