"""The HTTP interface: OpenAI's routes, health, metrics and the page at ``/``."""

from __future__ import annotations

import hmac
import ipaddress
import re
import time
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coa_jax.errors import UserError
from coa_jax.serve.chat import chat_completion
from coa_jax.serve.completions import text_completion
from coa_jax.serve.errors import error_response, validation_response
from coa_jax.serve.exchange import ClientGone
from coa_jax.serve.schema import ChatRequest, TextRequest
from coa_jax.serve.service import Refused, Service

_PORT = re.compile(r":[0-9]*$")
_PAGE = Path(__file__).with_name("page.html")
_OPEN = ("/", "/health", "/openapi.json")
_ROUTES = (*_OPEN, "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions")
_ERROR = {
    "description": "what is wrong, in OpenAI's form",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["error"],
                "properties": {"error": {"type": "object"}},
            }
        }
    },
}
_STATUSES = (400, 401, 403, 404, 413, 429, 503)
_ERRORS: dict[int | str, dict[str, Any]] = {s: _ERROR for s in _STATUSES}


def make_app(service: Service, api_key: str | None = None) -> FastAPI:
    """The application of a running service.

    Args:
        service: entered already.
        api_key: that clients have to send as a bearer token; None to serve anybody.
    """
    app = FastAPI(title="coa_jax", docs_url=None, redoc_url=None)
    name, created = service.config.name, int(time.time())

    @app.post("/v1/chat/completions", responses=_ERRORS)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """A completion of a conversation; of ``NAME-agent`` with the server's tools."""
        return await chat_completion(service, body, request)

    @app.post("/v1/completions", responses=_ERRORS)
    async def completions(body: TextRequest, request: Request) -> Response:
        """A completion of a text."""
        return await text_completion(service, body, request)

    @app.get("/v1/models", responses={401: _ERROR, 403: _ERROR})
    async def models() -> dict[str, Any]:
        """The model, and the model with tools."""
        kept = {"object": "model", "created": created, "owned_by": "coa_jax"}
        length = {"max_model_len": service.config.engine.max_length}
        ids = (name, f"{name}-agent")
        return {"object": "list", "data": [{"id": i, **kept, **length} for i in ids]}

    @app.get("/health", responses={403: _ERROR, 503: _ERROR})
    async def health() -> Response:
        """Whether requests are served."""
        if service.healthy and service.accepting:
            return JSONResponse({"status": "ok"})
        return error_response(503, "the server is shutting down")

    @app.get("/metrics", responses={401: _ERROR, 403: _ERROR})
    async def metrics() -> Response:
        """Meters in the text format of Prometheus."""
        return PlainTextResponse(service.meters.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        # In the frame of another site, somebody could be led to press its button.
        headers = {"Content-Security-Policy": "frame-ancestors 'none'"}
        return FileResponse(_PAGE, media_type="text/html", headers=headers)

    _handle_errors(app)

    app.add_middleware(_Guard, service=service, api_key=api_key)
    _describe_errors(app)
    return app


def is_local(name: str) -> bool:
    """Whether a host's name or address can only be this machine."""
    try:
        return name.lower() == "localhost" or ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return validation_response(error)

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        return error_response(error.status, error.message, error.param)

    @app.exception_handler(UserError)
    async def mistaken(_: Request, error: UserError) -> Response:
        return error_response(400, str(error))

    @app.exception_handler(ClientGone)
    async def gone(_: Request, error: ClientGone) -> Response:
        return Response(status_code=499)  # for the meters: nobody reads it

    @app.exception_handler(AnyHTTPException)
    async def http(_: Request, error: AnyHTTPException) -> Response:
        headers = dict(error.headers) if error.headers else None
        return error_response(error.status_code, str(error.detail), headers=headers)

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> Response:
        # The traceback goes to the log; what it says is nobody else's business.
        return error_response(500, "the server failed; its log says why")


def _describe_errors(app: FastAPI) -> None:
    """Mistakes are 400 here, as OpenAI has it, and not the 422 that FastAPI writes down."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        schema = generate()
        for operations in schema["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


class _Guard:
    """Asks for the key, refuses foreign names and bodies too large, and counts every answer."""

    def __init__(self, app: ASGIApp, service: Service, api_key: str | None):
        self.app, self.service, self.api_key = app, service, api_key
        self.limit = service.config.max_body
        self._too_large = f"a request may have {self.limit} bytes"
        # A name that a web site owns may be made to lead here (DNS rebinding), and its scripts may
        # then ask and read; they have no key.
        self._local = not api_key and is_local(service.config.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, seen = 0, 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.limit:  # to whoever reads the body, and so to the client
                raise HTTPException(413, self._too_large)
            return message

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._answer(scope)(scope, counted, watched)
        except Exception:
            status = status or 500  # which is answered further out
            raise
        finally:
            path = scope["path"] if scope["path"] in _ROUTES else "other"
            self.service.meters.requests.labels(path, str(status)).inc()

    def _answer(self, scope: Scope) -> ASGIApp:
        """The application, or what answers in its place."""
        headers = dict(scope["headers"])
        asked = headers.get(b"host", b"").decode("latin-1")
        if self._local and asked and not is_local(_PORT.sub("", asked)):
            return error_response(
                403,
                f"this server is for its own machine, as localhost or 127.0.0.1, not {asked!r}; "
                "under other names it answers with an API key or another --config.host",
            )
        if self.api_key and scope["path"] not in _OPEN:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            same = hmac.compare_digest(given.strip(), self.api_key.encode())
            if scheme.lower() != b"bearer" or not same:
                return error_response(401, "send the API key as 'Authorization: Bearer KEY'")
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self.limit:
            return error_response(413, self._too_large)
        return self.app
