"""Defines the HTTP API: the routes of OpenAI, health, metrics and a page for browsers at ``/``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from coa_jax.errors import UserError
from coa_jax.serve.chat import chat_completion
from coa_jax.serve.client_requests import policy_of
from coa_jax.serve.completions import text_completion
from coa_jax.serve.errors import ShuttingDown, error_response
from coa_jax.serve.http import json_app
from coa_jax.serve.http.errors import Refused
from coa_jax.serve.http.guard import Guard, GuardRules, give_reason, is_local
from coa_jax.serve.http.refusals import RefusalLog
from coa_jax.serve.schema import ChatRequest, TextRequest
from coa_jax.serve.service import Service

_PAGE = Path(__file__).with_name("page.html")
_OPEN = ("/", "/health", "/openapi.json")
_ROUTES = (*_OPEN, "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions")
_SCHEMAS = "#/components/schemas/{model}"


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    """Describes a body in JSON, for the API description."""
    return {"content": {"application/json": {"schema": schema}}}


def _body(model: type[BaseModel]) -> dict[str, Any]:
    schema = {"$ref": _SCHEMAS.format(model=model.__name__)}
    return {"requestBody": {"required": True, **_json(schema)}}


_FIELDS = {"type": "object", "required": ["error"], "properties": {"error": {"type": "object"}}}
_ERROR = {"description": "the mistake, in OpenAI's form", **_json(_FIELDS)}
_STATUSES = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503)
_ERRORS: dict[int | str, dict[str, Any]] = {status: _ERROR for status in _STATUSES}


def make_app(services: Sequence[Service], api_key: str | None, log: RefusalLog) -> FastAPI:
    """Creates the ASGI application of running services.

    Args:
        services: the policies, as services whose contexts have been entered.
        api_key: bearer token that clients must send; None to serve everybody.
        log: log that receives a line for each refused request.
    """
    app = FastAPI(title="coa_jax", docs_url=None, redoc_url=None)
    config, meters = services[0].config, services[0].meters

    # FastAPI would parse and validate a body in the event loop, which blocks other requests. So
    # each route reads its own body.
    @app.post("/v1/chat/completions", responses=_ERRORS, openapi_extra=_body(ChatRequest))
    async def chat(request: Request) -> Response:
        """Completes a conversation; the model ``NAME-agent`` uses the server's tools."""
        return await chat_completion(services, request)

    @app.post("/v1/completions", responses=_ERRORS, openapi_extra=_body(TextRequest))
    async def completions(request: Request) -> Response:
        """Completes a text."""
        return await text_completion(services, request)

    _add_models(app, services)

    @app.get("/health", responses={403: _ERROR, 503: _ERROR})
    async def health() -> Response:
        """Reports whether requests are served."""
        if all(service.healthy and service.accepting for service in services):
            return JSONResponse({"status": "ok"})
        return error_response(ShuttingDown())

    @app.get("/metrics", responses={401: _ERROR, 403: _ERROR})
    async def metrics() -> Response:
        """Returns metrics in the text format of Prometheus."""
        return PlainTextResponse(meters.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        # Without this header, another site could show the page in a frame and trick a user into
        # pressing its button.
        headers = {"Content-Security-Policy": "frame-ancestors 'none'"}
        return FileResponse(_PAGE, media_type="text/html", headers=headers)

    handle_errors(app)
    rules = GuardRules(
        api_key=api_key,
        local=not (api_key or config.allow_no_key) and is_local(config.host),
        max_body=config.body_limit,
        routes=_ROUTES,
        open=_OPEN,
        limits=config.limits,
    )

    def count(path: str, status: int) -> None:
        meters.requests.labels(path, str(status)).inc()

    app.add_middleware(Guard, rules=rules, answer=error_response, log=log, count=count)
    _describe(app)
    return app


def _add_models(app: FastAPI, services: Sequence[Service]) -> None:
    """Adds the routes that list the models."""
    created = int(time.time())

    def about(name: str) -> dict[str, Any]:
        length = services[0].config.engine.max_length
        common = {"object": "model", "created": created, "owned_by": "coa_jax"}
        return {"id": name, **common, "max_model_len": length}

    @app.get("/v1/models", responses={401: _ERROR, 403: _ERROR})
    async def models() -> dict[str, Any]:
        """Lists each model, and each model with tools."""
        names = [service.config.name for service in services]
        ids = [id for name in names for id in (name, f"{name}-agent")]
        return {"object": "list", "data": [about(id) for id in ids]}

    @app.get("/v1/models/{name:path}", responses={401: _ERROR, 403: _ERROR, 404: _ERROR})
    async def model(name: str) -> dict[str, Any]:
        """Describes one model of the list."""
        policy_of(services, name, agents=True)
        return about(name)


def handle_errors(app: FastAPI) -> None:
    """Makes an application answer errors with error objects in OpenAI's form."""
    json_app.handle_errors(app, error_response)

    @app.exception_handler(UserError)
    async def mistaken(request: Request, error: UserError) -> Response:
        give_reason(request.scope, "the model cannot take the request")
        return error_response(Refused(400, str(error)))


def _describe(app: FastAPI) -> None:
    """Adds the schemas of the request bodies to the API description at ``/openapi.json``."""
    generate = app.openapi
    models: list[Any] = [(ChatRequest, "validation"), (TextRequest, "validation")]
    definitions = models_json_schema(models, ref_template=_SCHEMAS)[1]["$defs"]

    def openapi() -> dict[str, Any]:
        schema = generate()
        schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
