"""The batches of a run, each sampled in the background while something else is done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """One computation at a time on an event loop in a thread that lives as long as this does.

    The thread stays, because programs of tools die with the thread that started them.
    """

    def __init__(self, compute: Callable[..., T]):
        """Takes what to compute: a function of a runner for its coroutines and of more.

        With several processes it runs no program of all of them: those come in one order
        everywhere, which is that of the main thread.
        """
        self._compute = compute
        self._pool = ThreadPoolExecutor(1, "rollouts")
        self._runner = asyncio.Runner(loop_factory=self._new_loop)
        self._future: Future[T] | None = None
        self._outermost: asyncio.Task[Any] | None = None
        self._abandoned = False

    def _new_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        loop.set_task_factory(self._new_task)
        return loop

    def _new_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> Any:
        """Remembers what the runner runs, which alone is cancelled; it ends what it has begun."""
        task = asyncio.Task(coro, loop=loop, **options)
        if not loop.is_running():
            self._outermost = task
            if self._abandoned:
                task.cancel()
        return task

    def start(self, *arguments: Any) -> None:
        """Begins a computation; the one before has been fetched."""
        assert self._future is None
        self._future = self._pool.submit(self._compute, self._runner, *arguments)

    def result(self) -> T:
        """Waits for the computation.

        Raises:
            asyncio.CancelledError: it was abandoned.
        """
        assert self._future is not None
        result = self._future.result()
        self._future = None
        return result

    def abandon(self) -> None:
        """Ends the computation, and every later one, as soon as it can be left; does not wait."""
        if self._abandoned:
            return  # cancelled again, it would be torn out of its cleaning up
        self._abandoned = True
        task = self._outermost
        if task is not None and not task.done():
            task.get_loop().call_soon_threadsafe(task.cancel)

    def close(self) -> None:
        """Abandons what runs and waits for its end."""
        self.abandon()
        self._pool.submit(self._close)
        self._pool.shutdown()

    def _close(self) -> None:
        self._runner.get_loop().set_task_factory(None)
        self._runner.close()
