"""Helpers for event loops: limits on concurrent calls, and blocking calls of coroutines."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class Turns:
    """A semaphore per event loop: a semaphore belongs to one loop, and a tool may outlive it."""

    def __init__(self, count: int):
        self._count = count
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    def here(self) -> asyncio.Semaphore:
        """Returns the semaphore of the running loop."""
        loop = asyncio.get_running_loop()
        return self._by_loop.setdefault(loop, asyncio.Semaphore(self._count))


def apart(work: Callable[[], T]) -> T:
    """Runs a function that starts event loops; uses a thread if a loop runs here, as in Jupyter.

    Ctrl-C ends the function there too.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
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


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to completion, whether or not an event loop runs in this thread."""
    return apart(lambda: asyncio.run(coroutine))
