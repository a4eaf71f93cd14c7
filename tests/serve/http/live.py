"""A real server of an application on a local port, in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from starlette.types import ASGIApp

from coa_jax.serve.http.limits import ConnectionLimits
from coa_jax.serve.http.refusals import RefusalLog
from coa_jax.serve.http.server import Server, address_of, listen


@contextlib.contextmanager
def running(
    app: ASGIApp, limits: ConnectionLimits, log: RefusalLog, grace: int | None = None
) -> Iterator[str]:
    """Its address; it ends with the context, ``grace`` seconds later if requests are running."""
    server, listener = Server(app, limits, log), listen("127.0.0.1", 0, "")
    if grace is not None:
        server.config.timeout_graceful_shutdown = grace
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    address = address_of(listener)
    thread.start()
    try:
        yield address
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
