"""Errors as OpenAI's clients read them."""

from __future__ import annotations

from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The object of an error."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_response(
    status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    """An error as an answer."""
    if status == 429:
        headers = {**(headers or {}), "Retry-After": "1"}
    return JSONResponse(error_body(status, message, param), status, headers)


def validation_response(error: RequestValidationError) -> JSONResponse:
    """The first mistake of a request, by the name of its field."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    param = ".".join(place) or None
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "this server does not know the field"
    elif first["type"] == "literal_error" and param:
        message = f"{message}; this server supports no other value"
    return error_response(400, f"{param}: {message}" if param else message, param)
