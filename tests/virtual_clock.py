"""Event loops on a clock that jumps: hours of sleeping cost no time.

    clock = VirtualClock()
    with asyncio.Runner(loop_factory=clock.new_loop) as runner:
        runner.run(asyncio.sleep(3600))
    assert clock.now == 3600

The clock stands while anything runs: a callback, a call in an executor, or a block under `hold`.
When nothing runs, the clock jumps to the next timer.  It does not wait for sockets, pipes or
processes, so do not use it with code that waits for one of these under a timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Any


class VirtualClock:
    """A clock and the loops that live on it, each in a thread of its own.

    Attributes:
        now: seconds since the clock was made.
    """

    def __init__(self, call_seconds: float = 0.0):
        """Takes the seconds that a call of an executor is to last on this clock."""
        self.now = 0.0
        self._call_seconds = call_seconds
        self._lock = threading.Lock()
        self._held = 0
        self._loops: list[_Loop] = []

    def new_loop(self) -> asyncio.AbstractEventLoop:
        """An event loop on this clock; a ``loop_factory`` of `asyncio.Runner`."""
        loop = _Loop(self, self._call_seconds)
        self._loops.append(loop)
        return loop

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Stops the clock while the block is run, in any thread."""
        with self._lock:
            self._held += 1
        try:
            yield
        finally:
            with self._lock:
                self._held -= 1
            for loop in self._loops:
                with contextlib.suppress(RuntimeError):  # it is closed
                    loop.call_soon_threadsafe(lambda: None)

    def module(self) -> types.SimpleNamespace:
        """The module ``time`` with this clock as ``monotonic`` and ``perf_counter``.

        For ``monkeypatch.setattr(module_under_test, "time", clock.module())``.
        """
        mine = dict.fromkeys(("monotonic", "perf_counter"), lambda: self.now)
        return types.SimpleNamespace(**{**vars(time), **mine})

    def jump(self, seconds: float) -> bool:
        """Advances unless it is held; returns whether it did."""
        with self._lock:
            if self._held:
                return False
            self.now += seconds
        return True


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose timers wait for the clock alone."""

    def __init__(self, clock: VirtualClock, call_seconds: float):
        self.clock, self.call_seconds, self.calls = clock, call_seconds, 0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.clock.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        self.calls += 1
        call = super().run_in_executor(executor, func, *args)
        result = self.create_future()
        call.add_done_callback(lambda _: self._returned(call, result))
        result.add_done_callback(lambda _: call.cancel())
        return result

    def _returned(self, call: asyncio.Future[Any], result: asyncio.Future[Any]) -> None:
        self.calls -= 1
        if self.call_seconds:
            self.call_later(self.call_seconds, _pass_on, call, result)
        else:
            _pass_on(call, result)

    async def shutdown_default_executor(self, *arguments: Any) -> None:
        self.calls += 1  # it waits for threads
        try:
            await super().shutdown_default_executor(*arguments)
        finally:
            self.calls -= 1


def _pass_on(call: asyncio.Future[Any], result: asyncio.Future[Any]) -> None:
    if result.done():  # cancelled by who waits
        return
    if call.cancelled():
        result.cancel()
    elif error := call.exception():
        result.set_exception(error)
    else:
        result.set_result(call.result())


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Jumps where a loop would wait for a timer."""

    def __init__(self, loop: _Loop):
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        if found := super().select(0):
            return found
        if self._loop.calls or not self._loop.clock.jump(timeout):
            return super().select(None)  # a thread will wake the loop
        return []
