"""Calls a function at regular intervals in a background thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from absl import logging


class Repeated:
    """A background thread that calls a function repeatedly until `stop` is called."""

    def __init__(self, function: Callable[[], None], seconds: float, fault: str):
        """Starts the thread.

        Args:
            function: the function. If it raises an exception, a warning is logged, and the thread
                continues.
            seconds: interval between the end of a call and the next call.
            fault: description of the failure, with which the warning begins.
        """
        self._over = threading.Event()

        def run() -> None:
            while not self._over.wait(seconds):
                try:
                    function()
                except Exception as error:  # the caller's own calls fail too if it persists
                    logging.warning("%s: %s", fault, error)

        self._thread = threading.Thread(target=run, daemon=True, name=fault)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; returns when the current call has returned."""
        self._over.set()
        self._thread.join()
