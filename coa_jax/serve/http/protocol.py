"""Adds limits on headers, chunks, times and connections to uvicorn's HTTP/1.1 protocol.

Without these limits, uvicorn waits for headers forever, parses all received data at once, and never
closes the connection of a client that stops reading.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from coa_jax.serve.http.limits import ConnectionLimits
from coa_jax.serve.http.refusals import RefusalLog

_HEADERS_END = re.compile(rb"\n\r?\n")
_FRAMING = re.compile(rb"\n(content-length|transfer-encoding)[ \t]*:", re.IGNORECASE)
_HEADER_BYTES, _HEADER_LINES = 16 << 10, 100
_PENDING_BYTES = 64 << 10
_SLICE = 1 << 10
_TURN_S = 0.002
_LINGER_S = 2.0


class Connections:
    """The connections of one server, which take turns at parsing the data they have received.

    The HTTP parser h11 needs about 20 microseconds per chunk, so a body of many tiny chunks would
    block the event loop. Therefore a connection parses at most 1 KiB of a chunked body before the
    next connection parses, and every 2 ms the event loop can do other work. Headers are parsed
    before bodies.
    """

    def __init__(self, limits: ConnectionLimits, log: RefusalLog):
        self.limits, self.log = limits, log
        self.waiting: dict[GuardedProtocol, None] = {}
        self._headers: deque[GuardedProtocol] = deque()
        self._bodies: deque[GuardedProtocol] = deque()
        self._scheduled = False

    def wants_turn(self, connection: GuardedProtocol) -> None:
        """Queues a connection that has received data, until the connection may parse the data.

        If no other connection is waiting, it parses its first data before the method returns.
        """
        queue = self._headers if connection.awaits_request else self._bodies
        queue.append(connection)
        if not self._scheduled:
            self._take_turns()

    def _take_turns(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + _TURN_S
        self._scheduled = True  # a turn may request another turn
        while queue := self._headers or self._bodies:
            connection = queue.popleft()
            if connection.take_turn():
                self.wants_turn(connection)
            if loop.time() > end:
                loop.call_soon(self._take_turns)
                return
        self._scheduled = False


class GuardedProtocol(H11Protocol):
    """One HTTP/1.1 connection of uvicorn, with the limits of `ConnectionLimits`."""

    def __init__(self, shared: Connections, **options: Any):
        super().__init__(**options)
        self._shared, self._limits = shared, shared.limits
        self._pending = bytearray()
        self._queued = False
        self._chunked_wire = self._chunked_body = 0
        self._timer: asyncio.TimerHandle | None = None
        self._phase = ""

    @property
    def awaits_request(self) -> bool:
        """Whether the next bytes belong to the headers of a request."""
        return self.conn.their_state is h11.IDLE

    # --- callbacks of the transport ----------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the connection's time limits (callback of `asyncio.Protocol`).

        If there are too many connections, the one that has waited longest for a request is closed.
        """
        super().connection_made(transport)
        self._wait("first")
        if len(self.connections) > self._limits.connections:
            oldest = next(iter(self._shared.waiting))
            oldest._log_refusal(503, "too many connections; this one had no complete request")
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the connection's time limits (callback of `asyncio.Protocol`)."""
        self._wait("")
        self._pending.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Stores received bytes until they may be parsed (callback of `asyncio.Protocol`)."""
        self._unset_keepalive_if_required()
        self._pending += data
        if len(self._pending) > _PENDING_BYTES:
            self.transport.pause_reading()
        if self._phase == "idle":
            self._wait("headers")
        self._ask_for_turn()

    def pause_writing(self) -> None:
        """Starts the time limit for a slow reader (callback of `asyncio.Protocol`)."""
        super().pause_writing()
        self._watch_writing(self.transport.get_write_buffer_size())

    # --- parsing, by turns -----------------------------------------------------------------

    def _ask_for_turn(self) -> None:
        if self._pending and not self._queued:
            self._queued = True
            self._shared.wants_turn(self)

    def take_turn(self) -> bool:
        """Parses a part of the received data; returns whether there is more to parse."""
        self._queued = False
        piece = b"" if self.transport.is_closing() else self._next_piece()
        if not piece:
            return False
        cycle = self.cycle
        before = len(cycle.body) if cycle else 0
        super().data_received(piece)
        same = cycle is self.cycle and self.conn.their_state is h11.SEND_BODY
        if cycle and same and self._is_chunked:
            self._check_chunks(len(piece), len(cycle.body) - before)
        self._wait_for_more()
        if len(self._pending) <= _PENDING_BYTES and not self.flow.read_paused:
            self.transport.resume_reading()
        self._queued = bool(self._pending) and self.conn.their_state is not h11.DONE
        return self._queued

    def _next_piece(self) -> bytes:
        """Returns the bytes that h11 parses next; b"" while h11 must wait."""
        pending, size = self._pending, len(self._pending)
        if self.conn.their_state is h11.DONE:
            return b""
        if self.awaits_request and pending[0] > 32:  # h11 immediately refuses control characters
            end = _HEADERS_END.search(pending, 0, _HEADER_BYTES)
            if end is None and size < _HEADER_BYTES:
                return b""
            if end is None or pending.count(b"\n", 0, end.end()) > _HEADER_LINES:
                self._refuse(431, f"the headers exceed {_HEADER_BYTES} bytes or {_HEADER_LINES}")
                return b""
            size = end.end()
            # RFC 9112, section 6.1: with both, a proxy and this server may see different requests.
            if len({name.lower() for name in _FRAMING.findall(pending, 0, size)}) > 1:
                self._refuse(400, "Content-Length and Transfer-Encoding exclude each other")
                return b""
            self._chunked_wire = self._chunked_body = 0
        elif self.conn.their_state is h11.SEND_BODY and self._is_chunked:
            size = _SLICE
        piece = bytes(pending[:size])
        del pending[:size]
        return piece

    @property
    def _is_chunked(self) -> bool:
        return any(name == b"transfer-encoding" for name, _ in self.headers)

    def _check_chunks(self, wire: int, body: int) -> None:
        self._chunked_wire += wire
        self._chunked_body += body
        if self._chunked_wire > 2 * _SLICE + 1.25 * self._chunked_body:
            self._log_refusal(400, "the body comes in chunks of a few bytes")
            self.transport.abort()

    def on_response_complete(self) -> None:
        """Prepares the connection for its next request, after a response was sent completely."""
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.SEND_BODY:
            # The client is still sending a refused body. If the connection were reset, the client
            # would lose the response.
            self.loop.call_later(_LINGER_S, self._stop_lingering)
        self._wait_for_more()
        self._ask_for_turn()

    def _stop_lingering(self) -> None:
        if self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY:
            self.transport.abort()

    # --- time ------------------------------------------------------------------------------

    def _wait_for_more(self) -> None:
        if self.awaits_request:
            self._wait("headers" if self._pending else "idle")
        else:
            self._wait("body" if self.conn.their_state is h11.SEND_BODY else "")

    def _wait(self, phase: str) -> None:
        """Sets what the connection waits for, and starts the time limit.

        Args:
            phase: "first" for the first request, "headers" for the rest of the headers, "idle" for
                the next request, "body" for a body (whose time the guard limits), or "" if a whole
                request has arrived.
        """
        if phase == self._phase or (phase == "headers" and self._phase == "first"):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._phase, self._timer = phase, None
        self._shared.waiting.pop(self, None)
        if phase:
            self._shared.waiting[self] = None
        if phase and phase != "body":
            limits = self._limits
            seconds = limits.idle_seconds if phase == "idle" else limits.header_seconds
            self._timer = self.loop.call_later(seconds, self._time_out)

    def _time_out(self) -> None:
        if self._pending and not self.transport.is_closing():
            seconds = self._limits.header_seconds
            self._refuse(408, f"the headers were not complete after {seconds:g} s")
        else:
            self.transport.abort()

    def _watch_writing(self, before: int) -> None:
        """Closes the connection if the client accepts no data of a response for `write_seconds`."""

        def look() -> None:
            now = self.transport.get_write_buffer_size()
            if self.transport.is_closing() and not now:
                return
            if now >= before > 0:
                self._log_refusal(408, "the client stopped reading its answer")
                self.transport.abort()
            elif self.flow.write_paused:
                self._watch_writing(now)

        self.loop.call_later(self._limits.write_seconds, look)

    # --- refusals --------------------------------------------------------------------------

    def _log_refusal(self, status: int, reason: str) -> None:
        client = self.client[0] if self.client else "-"
        self._shared.log.note(status, "-", client, reason)

    def _refuse(self, status: int, reason: str) -> None:
        self._log_refusal(status, reason)
        self._pending.clear()
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
        start = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
        for event in (start, h11.Data(data=reason.encode() + b"\n"), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuses a request that is not valid HTTP; `H11Protocol` calls this method."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(400, "the request is not valid HTTP/1.1")
        else:  # the response has already begun
            self._log_refusal(400, "the request is not valid HTTP/1.1")
            self.transport.abort()
