"""Writes error responses in OpenAI's form."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse

from coa_jax.serve.http.errors import Refused

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}


class ShuttingDown(Refused):
    """Raised if the server shuts down before it can finish a request."""

    def __init__(self) -> None:
        super().__init__(503, "the server is shutting down")


def error_body(error: Refused) -> dict[str, Any]:
    """Returns the JSON object of an error response, in OpenAI's form."""
    other = "invalid_request_error" if error.status < 500 else "server_error"
    kind = _KINDS.get(error.status, other)
    fields = {"message": error.message, "type": kind, "param": error.param, "code": error.status}
    return {"error": fields}


def error_response(error: Refused) -> JSONResponse:
    """Returns the HTTP response to a refused request."""
    headers = {"Retry-After": "1"} if error.status == 429 else None
    return JSONResponse(error_body(error), error.status, headers)
