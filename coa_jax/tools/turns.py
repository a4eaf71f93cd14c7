"""Work and event loops: how many calls run at a time, and what needs a loop of its own."""

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
    """A semaphore for each event loop: one belongs to a loop, a tool may live through several."""

    def __init__(self, count: int):
        self._count = count
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    def here(self) -> asyncio.Semaphore:
        """The semaphore of the running loop."""
        loop = asyncio.get_running_loop()
        return self._by_loop.setdefault(loop, asyncio.Semaphore(self._count))


def apart(work: Callable[[], T]) -> T:
    """Does what runs event loops of its own: in a thread if one runs here already, as in Jupyter.

    Ctrl-C ends the work there, too.
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
    """Runs a coroutine to its end, whether or not an event loop runs in this thread."""
    return apart(lambda: asyncio.run(coroutine))
