"""Defines the exceptions for requests that a server refuses or that nobody waits for."""

from __future__ import annotations


class Refused(Exception):
    """Raised if the server refuses a request.

    Attributes:
        status: HTTP status of the response.
        message: message for the client.
        param: name of the invalid field of the request; None if no single field is invalid.
        reason: reason for the server's log. It must not contain text from the client, because the
            log records no content of requests.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, reason: str | None = None
    ):
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.reason = message if reason is None else reason


class ClientGone(Exception):
    """Raised if the client has closed its connection before it received the response."""
