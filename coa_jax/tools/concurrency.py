"""Limits concurrent calls in event loops; calls blocking functions, and coroutines from outside."""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import functools
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
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


def guarded(function: Callable[..., T]) -> Callable[..., T]:
    """Returns a function that raises RuntimeError in place of exceptions that cannot be awaited.

    After StopIteration, the caller of a thread would wait forever. CancelledError would cancel the
    caller, and e.g. SystemExit would end the event loop.
    """

    def call(*arguments: Any, **named: Any) -> T:
        try:
            return function(*arguments, **named)
        except BaseException as raised:
            special = isinstance(raised, StopIteration | CancelledError)
            if isinstance(raised, Exception) and not special:
                raise
            raise RuntimeError(repr(raised)) from raised

    return call


def settle(result: Future[T], function: Callable[[], T]) -> None:
    """Calls a function, and sets its result or its exception as the result of a future."""
    try:
        result.set_result(guarded(function)())
    except Exception as raised:  # noqa: BLE001 - the awaiting caller gets the error
        result.set_exception(raised)


async def call_in_thread(function: Callable[[], T]) -> T:
    """Calls a blocking function in a daemon thread of its own, and returns its result.

    A function that hangs occupies no thread of other calls, as it would with `asyncio.to_thread`,
    and does not prevent the event loop or the process from ending.
    """
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()
    work = functools.partial(contextvars.copy_context().run, function)
    threading.Thread(target=settle, args=(result, work), daemon=True).start()
    return await asyncio.wrap_future(result)


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
