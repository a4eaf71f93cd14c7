"""Writes error responses in OpenAI's form."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse

from coa_jax.web.errors import Refused

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """Returns the JSON object of an error.

    Args:
        status: HTTP status.
        message: message for the client.
        param: name of the invalid field of the request; None if no single field is invalid.
    """
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_response(error: Refused) -> JSONResponse:
    """Returns the HTTP response to a refused request."""
    headers = {"Retry-After": "1"} if error.status == 429 else None
    body = error_body(error.status, error.message, error.param)
    return JSONResponse(body, error.status, headers)
