"""Limits concurrent calls in event loops, and calls coroutines from synchronous code."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class ConcurrencyLimit:
    """A limit on concurrent calls, with a semaphore of its own for each event loop.

    A semaphore belongs to one event loop, but a tool may be used in several loops.
    """

    def __init__(self, count: int):
        self._count = count
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    def semaphore(self) -> asyncio.Semaphore:
        """Returns the semaphore of the running event loop, which is created when first needed."""
        loop = asyncio.get_running_loop()
        return self._by_loop.setdefault(loop, asyncio.Semaphore(self._count))


def run_outside_event_loop(work: Callable[[], T]) -> T:
    """Calls a function that starts event loops, and returns its result.

    If an event loop is already running in this thread, as in Jupyter, the function runs in another
    thread. Ctrl-C ends the function in both cases.
    """
    if not _in_loop():
        return work()
    threads: list[int] = []
    with ThreadPoolExecutor(1, initializer=lambda: threads.append(threading.get_ident())) as pool:
        future = pool.submit(work)
        try:
            return future.result()
        except KeyboardInterrupt:
            interrupt = ctypes.py_object(KeyboardInterrupt)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threads[0]), interrupt)
            raise


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine from synchronous code, and returns its result.

    This works even if an event loop is already running in this thread, as in Jupyter.
    """
    return run_outside_event_loop(lambda: asyncio.run(coroutine))
