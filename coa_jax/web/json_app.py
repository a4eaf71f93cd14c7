"""Creates an application whose routes accept and return JSON, with a limit on their requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from coa_jax.web.bodies import parse_json
from coa_jax.web.errors import ClientGone, Refused
from coa_jax.web.guard import STATUS_WORDS, Guard, Rules, body_of, give_reason, while_connected
from coa_jax.web.refusals import RefusalLog


class Room:
    """Limits how many requests of a route run, and how many wait; refuses further requests."""

    def __init__(self, running: int, waiting: int):
        """Creates an empty room.

        Args:
            running: maximum number of running requests.
            waiting: maximum number of waiting requests.
        """
        self._places = asyncio.Semaphore(running)
        self._left = running + waiting

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Waits for a place, and holds the place during a ``with`` block.

        Raises:
            Refused: too many requests are waiting (status 429).
        """
        if self._left < 1:
            raise Refused(429, "too many requests wait for this path; try again later")
        self._left -= 1
        try:
            async with self._places:
                yield
        finally:
            self._left += 1


class JsonRoute:
    """A route that receives a JSON object and answers with JSON."""

    def __init__(
        self,
        answer: Callable[[Any], Awaitable[bytes]],
        *,
        values: int,
        running: int,
        waiting: int,
    ):
        """Describes a route.

        Args:
            answer: function that returns a JSON text for the parsed body. It is cancelled if the
                client disconnects.
            values: maximum number of JSON values of a body, see `parse_json`.
            running: maximum number of running requests.
            waiting: maximum number of waiting requests.
        """
        self.answer, self.values = answer, values
        self.room = Room(running, waiting)


def make_app(routes: Mapping[str, JsonRoute], rules: Rules, log: RefusalLog) -> ASGIApp:
    """Creates an application with the given routes and ``GET /health``, behind a guard.

    Args:
        routes: routes by path.
        rules: rules of the guard.
        log: log that receives a line for each refused request.
    """
    parsing = ThreadPoolExecutor(1, "parse")

    def endpoint(route: JsonRoute) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            content, loop = body_of(request.scope), asyncio.get_running_loop()

            async def work() -> bytes:
                arguments = content, route.values, route.values
                async with route.room.place():
                    return await route.answer(
                        await loop.run_in_executor(parsing, parse_json, *arguments)
                    )

            found = await while_connected(request.receive, work())
            return Response(found, media_type="application/json")

        return answer

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        give_reason(request.scope, error.reason)
        return error_response(error)

    async def gone(_: Request, error: Exception) -> Response:
        return Response(status_code=499)  # the client has left

    async def broken(_: Request, error: Exception) -> Response:
        return error_response(Refused(500, "the server failed; its log has the reason"))

    async def unknown(_: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        return error_response(Refused(status, STATUS_WORDS.get(status, "the request is refused")))

    app = Starlette(
        routes=[
            Route("/health", health, methods=["GET"]),
            *(Route(path, endpoint(route), methods=["POST"]) for path, route in routes.items()),
        ],
        exception_handlers={
            Refused: refused,
            ClientGone: gone,
            404: unknown,
            405: unknown,
            Exception: broken,
        },
    )
    app.add_middleware(
        Guard, rules=rules, answer=error_response, log=log, count=lambda path, status: None
    )
    return app


def error_response(error: Refused) -> Response:
    """Returns an error response of the form ``{"error": "..."}``."""
    return JSONResponse({"error": error.message}, error.status)


def dumps(value: Any, depth: int = 4) -> str:
    """Serialises a large value to JSON part by part, so that other threads can run in between.

    A single call of `json.dumps` would hold Python's GIL until the whole value is serialised.

    Args:
        value: the value to serialise.
        depth: depth of nesting down to which containers are split into parts.
    """
    if depth and isinstance(value, dict):
        parts = (f"{json.dumps(key)}: {dumps(item, depth - 1)}" for key, item in value.items())
        return f"{{{', '.join(parts)}}}"
    if depth and isinstance(value, list | tuple):
        return f"[{', '.join([dumps(item, depth - 1) for item in value])}]"
    return json.dumps(value)
