"""Exceptions for requests that are not answered."""

from __future__ import annotations


class Refused(Exception):
    """A request that the server rejects.

    Attributes:
        status: HTTP status.
        message: message for the client.
        param: the invalid field of the request, if there is one.
        reason: text for the log; it contains no text of the client.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, reason: str | None = None
    ):
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.reason = message if reason is None else reason


class ClientGone(Exception):
    """The client closed its connection."""
