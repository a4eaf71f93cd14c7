"""Opens listening sockets, and runs uvicorn without its own signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import resource
import signal
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from coa_jax.errors import UserError
from coa_jax.serve.http.limits import ConnectionLimits
from coa_jax.serve.http.protocol import Connections, GuardedProtocol
from coa_jax.serve.http.refusals import RefusalLog


def listen(host: str, port: int, mend: str) -> socket.socket:
    """Opens the socket that clients connect to.

    Args:
        host: address of this machine.
        port: port; 0 for any free port.
        mend: advice on which settings to change, with which the error message ends.

    Raises:
        UserError: this machine does not have the address, or another program uses it.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot listen on {host}:{port}: {reason}; {mend}") from error


def _allow(limits: ConnectionLimits) -> None:
    """Raises the process's limit on open files, as far as allowed, to fit all connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * limits.connections + 1024
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def address_of(listener: socket.socket) -> str:
    """Returns the URL of a listening socket, such as ``http://127.0.0.1:8000``."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """A uvicorn server with limits on connections; to end it, set ``should_exit`` to True."""

    def __init__(self, app: ASGIApp, limits: ConnectionLimits, log: RefusalLog):
        """Creates a server, which ``serve([listener])`` runs.

        Args:
            app: the application.
            limits: limits on connections.
            log: log of refused requests.
        """
        _allow(limits)
        connections = Connections(limits, log)
        config = uvicorn.Config(
            app,
            # uvicorn adds its own options.
            http=functools.partial(GuardedProtocol, connections),  # type: ignore[arg-type]
            ws="none",
            log_level="error",  # warnings concern clients, which `RefusalLog` logs
            access_log=False,
            proxy_headers=False,  # clients could forge the addresses in the log
            lifespan="off",
            timeout_keep_alive=max(1, round(limits.idle_seconds)),
            timeout_graceful_shutdown=5,
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replaces uvicorn's signal handlers by none, because `on_signals` handles signals."""
        yield


def on_signals() -> asyncio.Event:
    """Returns an event that SIGINT or SIGTERM sets; a second signal ends the process at once."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _request_stop, stop, number)
    return stop


def _request_stop(stop: asyncio.Event, number: int) -> None:
    if stop.is_set():
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    stop.set()


async def run_until_signal(server: Server, listener: socket.socket) -> None:
    """Serves until SIGINT or SIGTERM, and then stops gracefully.

    Requests in progress have a few seconds to finish.

    Args:
        server: a configured server that does not run yet.
        listener: socket that clients connect to.
    """
    stop = on_signals()
    running = asyncio.create_task(server.serve([listener]))
    print(f"serving on {address_of(listener)}", flush=True)
    waiting = asyncio.create_task(stop.wait())
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    server.should_exit = True
    await running
