"""How many calls run at a time, in whichever event loop they are made."""

from __future__ import annotations

import asyncio
import weakref


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
