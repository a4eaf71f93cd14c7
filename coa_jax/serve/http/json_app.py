"""Creates an application whose routes accept and return JSON, with a limit on their requests."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from coa_jax.serve.http.bodies import parse_json
from coa_jax.serve.http.errors import ClientGone, Refused
from coa_jax.serve.http.guard import (
    STATUS_WORDS,
    Guard,
    GuardRules,
    body_of,
    give_reason,
    while_connected,
)
from coa_jax.serve.http.refusals import RefusalLog


class JsonRoute:
    """A route that receives a JSON object and answers with JSON.

    One limit applies to the requests that run at the same time, and another limit to the requests
    that wait. Further requests are refused.
    """

    def __init__(
        self, answer: Callable[[Any], Awaitable[bytes]], *, values: int, running: int, waiting: int
    ):
        """Creates a route.

        Args:
            answer: function that returns a JSON text for the parsed body. It is cancelled if the
                client disconnects.
            values: maximum number of JSON values of a body, see `parse_json`.
            running: maximum number of running requests.
            waiting: maximum number of waiting requests.
        """
        self._answer, self._values = answer, values
        self._places, self._left = asyncio.Semaphore(running), running + waiting

    async def run(self, body: bytearray, threads: ThreadPoolExecutor) -> bytes:
        """Waits until a request may run, and returns the answer of the route's function to it.

        Args:
            body: body of the request, which is parsed in one of the ``threads``.
            threads: threads in which bodies are parsed.

        Raises:
            Refused: too many requests are waiting (status 429), or the body is not valid.
        """
        if self._left < 1:
            raise Refused(429, "too many requests wait for this path; try again later")
        self._left -= 1
        limits = self._values, self._values
        try:
            async with self._places:
                parsing = asyncio.get_running_loop().run_in_executor
                return await self._answer(await parsing(threads, parse_json, body, *limits))
        finally:
            self._left += 1


def make_app(routes: Mapping[str, JsonRoute], rules: GuardRules, log: RefusalLog) -> ASGIApp:
    """Creates an application with the given routes and ``GET /health``, behind a guard.

    Args:
        routes: routes by path.
        rules: rules of the guard.
        log: log that receives a line for each refused request.
    """
    parsing = ThreadPoolExecutor(1, "parse")

    async def answer(route: JsonRoute, request: Request) -> Response:
        work = route.run(body_of(request.scope), parsing)
        content = await while_connected(request.receive, work)
        return Response(content, media_type="application/json")

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    app = Starlette(routes=[Route("/health", health, methods=["GET"])])
    for path, route in routes.items():
        app.add_route(path, functools.partial(answer, route), methods=["POST"])
    handle_errors(app, error_response)
    app.add_middleware(Guard, rules=rules, answer=error_response, log=log)
    return app


def handle_errors(app: Starlette, answer: Callable[[Refused], Response]) -> None:
    """Installs exception handlers in an application, which answer with error responses.

    Args:
        app: the application.
        answer: function that makes the response to a refused request.
    """

    async def refused(request: Request, error: Refused) -> Response:
        give_reason(request.scope, error.reason)
        return answer(error)

    async def gone(_: Request, error: ClientGone) -> Response:
        return Response(status_code=499)  # only metrics see this status: the client has left

    async def unrouted(_: Request, error: HTTPException) -> Response:
        status = error.status_code
        response = answer(Refused(status, STATUS_WORDS.get(status, error.detail)))
        response.headers.update(error.headers or {})
        return response

    async def broken(_: Request, error: Exception) -> Response:
        # The traceback is only logged: it may contain names and contents of files.
        return answer(Refused(500, "the server failed; its log has the reason"))

    handlers: dict[type[Exception], Any] = {
        Refused: refused,
        ClientGone: gone,
        HTTPException: unrouted,
        Exception: broken,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


def error_response(error: Refused) -> Response:
    """Returns the HTTP response to a refused request, with the body ``{"error": "..."}``."""
    return JSONResponse({"error": error.message}, error.status)
