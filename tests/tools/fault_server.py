"""A real local server that misbehaves in each way in which servers do."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

PAGE = (
    "<html><head><title>Lighthouses</title></head><body><nav>Home</nav><article><h1>Lighthouses"
    "</h1><p>The lighthouse of Aland was built in 1868 and is 42 metres tall.</p><p>Its keeper"
    " wrote a diary of the storms that came in from the sea every winter.</p></article>"
    "<footer>Imprint</footer></body></html>"
)


class FaultServer:
    """Pages by path; what is asked is counted and kept."""

    def __init__(self) -> None:
        self.hits: Counter[str] = Counter()
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.pages: dict[str, Callable[[Handler], None]] = dict(PAGES)
        handler = type("Bound", (Handler,), {"owner": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.closing = threading.Event()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def serve(self) -> None:
        self._server.serve_forever(poll_interval=0.02)

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def running() -> Iterator[FaultServer]:
    server = FaultServer()
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(5)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    owner: FaultServer
    body = b""

    def do_GET(self) -> None:
        self.parts = urlsplit(self.path)
        self.query = {k: v[0] for k, v in parse_qs(self.parts.query).items()}
        size = int(self.headers.get("content-length") or 0)
        self.body = self.rfile.read(size)
        self.owner.hits[self.parts.path] += 1
        headers = {k.lower(): v for k, v in self.headers.items()}
        self.owner.requests.append((self.command, self.path, headers, self.body))
        page = self.owner.pages.get(self.parts.path, missing)
        with contextlib.suppress(ConnectionError):
            page(self)

    do_POST = do_GET

    def answer(self, content: bytes, status: int = 200, **headers: str) -> None:
        names = {k.replace("_", "-"): v for k, v in headers.items()}
        names = {"content-type": "text/html", "content-length": str(len(content)), **names}
        self.send_response(status)
        for name, value in names.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def json(self, value: object, status: int = 200) -> None:
        self.answer(json.dumps(value).encode(), status, content_type="application/json")

    def wait(self, seconds: float) -> None:
        self.owner.closing.wait(seconds)

    def log_message(self, *arguments: object) -> None:
        pass


def missing(handler: Handler) -> None:
    handler.answer(b"not here", 404)


def hang(handler: Handler) -> None:
    handler.wait(30)


def drip(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("content-type", "text/html")
    handler.end_headers()
    for _ in range(600):
        handler.wfile.write(b"x")
        handler.wfile.flush()
        handler.wait(0.05)
        if handler.owner.closing.is_set():
            return


def drop(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("content-length", "1000")
    handler.end_headers()
    handler.wfile.write(b"only this")


def reset(handler: Handler) -> None:
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


def garbage(handler: Handler) -> None:
    handler.wfile.write(b"\x00\x01 this is no HTTP \xff\r\n\r\n")


def big(handler: Handler) -> None:
    """100 MB without saying so."""
    handler.send_response(200)
    handler.send_header("content-type", "text/html")
    handler.end_headers()
    piece = b"<p>" + b"y" * 65533
    for _ in range(1600):
        handler.wfile.write(piece)


def endless_headers(handler: Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    for _ in range(100_000):
        handler.wfile.write(b"X-More: " + b"z" * 1000 + b"\r\n")


BOMB = gzip.compress(bytes(64 << 20))
"""64 MiB of zeros in 64 kB."""


def loop(handler: Handler) -> None:
    handler.answer(b"", 302, location=f"/loop?n={int(handler.query.get('n', 0)) + 1}")


def redirect(handler: Handler) -> None:
    handler.answer(b"", 302, location=handler.query["to"])


def flaky(handler: Handler) -> None:
    """Fails twice, then works."""
    if handler.owner.hits["/flaky"] <= 2:
        handler.answer(b"busy", 503)
    else:
        handler.answer(PAGE.encode())


def busy(handler: Handler) -> None:
    handler.answer(b"slow down", 429, retry_after="3600")


LATIN1 = PAGE.replace("keeper", "gardien âgé").encode("latin-1")

PAGES: dict[str, Callable[[Handler], None]] = {
    "/page": lambda h: h.answer(PAGE.encode()),
    "/robots.txt": missing,
    "/hang": hang,
    "/drip": drip,
    "/drop": drop,
    "/reset": reset,
    "/garbage": garbage,
    "/500": lambda h: h.answer(b"<h1>Internal error</h1>", 500),
    "/429": busy,
    "/flaky": flaky,
    "/malformed": lambda h: h.answer(b'{"organic": [', content_type="application/json"),
    "/notjson": lambda h: h.answer(b"<html>login</html>", content_type="application/json"),
    "/deep": lambda h: h.answer(b"[" * 200_000, content_type="application/json"),
    "/big": big,
    "/declared": lambda h: h.answer(b"", content_length=str(100 << 20)),
    "/headers": endless_headers,
    "/bomb": lambda h: h.answer(BOMB, content_encoding="gzip"),
    "/badgzip": lambda h: h.answer(b"\x1f\x8b\x08nonsense", content_encoding="gzip"),
    "/cutgzip": lambda h: h.answer(gzip.compress(PAGE.encode())[:-30], content_encoding="gzip"),
    "/gzip": lambda h: h.answer(gzip.compress(PAGE.encode()), content_encoding="gzip"),
    "/deflate": lambda h: h.answer(zlib.compress(PAGE.encode()), content_encoding="deflate"),
    "/brotli": lambda h: h.answer(b"\x0b\x02\x80", content_encoding="br"),
    "/loop": loop,
    "/redirect": redirect,
    "/nowhere": lambda h: h.answer(b"", 302, location="http://[::bad"),
    "/latin1": lambda h: h.answer(LATIN1, content_type="text/html; charset=utf-8"),
    "/klingon": lambda h: h.answer(PAGE.encode(), content_type="text/html; charset=klingon"),
    "/binary": lambda h: h.answer(bytes(range(256)) * 40, content_type="application/octet-stream"),
    "/noise": lambda h: h.answer(bytes(range(256)) * 40),
    "/empty": lambda h: h.answer(b""),
}  # fmt: skip

FAULTS = (
    "/hang", "/drip", "/drop", "/reset", "/garbage", "/500", "/429", "/malformed", "/notjson",
    "/deep", "/big", "/declared", "/headers", "/bomb", "/badgzip", "/cutgzip", "/brotli", "/loop",
    "/nowhere", "/binary", "/noise", "/empty", "/missing",
)  # fmt: skip
"""Paths from which no tool gets what it asked for."""


def stopwatch() -> Callable[[], float]:
    start = time.monotonic()
    return lambda: time.monotonic() - start


def wait_until(condition: Callable[[], object], seconds: float = 5.0) -> bool:
    """Whether a condition came true in time."""
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return bool(found)
