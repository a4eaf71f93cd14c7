"""Keeps the last lines that a program writes to its stderr, for error messages."""

from __future__ import annotations

import os
import threading

_BYTES, _LINES = 8192, 3


class LastWords:
    """Keeps the end of a program's stderr. A thread reads it continuously, so that no file grows.

    Attributes:
        file: file object that the program gets as its stderr.
    """

    def __init__(self) -> None:
        """Opens a pipe for stderr, and starts the thread that reads the pipe."""
        reader, writer = os.pipe()
        self.file = open(writer, "w")  # noqa: SIM115 - the caller that starts the program closes it
        self._kept = b""
        self._thread = threading.Thread(target=self._read, args=(reader,), daemon=True)
        self._thread.start()

    def _read(self, reader: int) -> None:
        with open(reader, "rb", buffering=0) as stream:
            while piece := stream.read(1 << 16):
                self._kept = (self._kept + piece)[-_BYTES:]

    def text(self) -> str:
        """Returns the last lines of stderr, joined into one line.

        If the program has ended, this method first waits for the end of stderr.
        """
        self._thread.join(1.0 if self.file.closed else 0.0)
        tail = self._kept
        if len(tail) == _BYTES:  # the first line may begin in the middle of an API key
            tail = tail.partition(b"\n")[2]
        lines = tail.decode("utf-8", "replace").strip().splitlines()
        return " ".join(" ".join(lines[-_LINES:]).split())
