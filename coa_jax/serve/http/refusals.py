"""Logs refused requests, one line each, without their content and with a limited rate."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

_BURST, _PER_SECOND = 20, 1.0


class RefusalLog:
    """Writes a line for each refused request.

    A line contains the time, the status, the route, the address of the client and the reason. The
    log can write 20 lines at once, and regains one line per second. If requests got no line, the
    next line contains their number.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        """Creates a log.

        Args:
            stream: output stream; None for stderr.
            clock: function that returns monotonic time in seconds.
        """
        self._stream, self._clock = stream, clock
        self._tokens, self._last, self._left_out = float(_BURST), clock(), 0

    def note(self, status: int, route: str, client: str, reason: str) -> None:
        """Logs a refused request.

        Args:
            status: HTTP status of the response.
            route: method and path, one of a fixed set of names and never text of the client.
            client: address of the client, without the port.
            reason: reason in one line, without content of the request.
        """
        now = self._clock()
        self._tokens = min(_BURST, self._tokens + (now - self._last) * _PER_SECOND)
        self._last = now
        if self._tokens < 1:
            self._left_out += 1
            return
        self._tokens -= 1
        more = f" ({self._left_out} more were refused before)" if self._left_out else ""
        self._left_out = 0
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        line = f"{stamp} refused {status} {route} from {client}: {' '.join(reason.split())}{more}"
        print(line, file=self._stream or sys.stderr, flush=True)
