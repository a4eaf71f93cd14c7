"""Why a request is not answered."""

from __future__ import annotations


class Refused(Exception):
    """A request that the server does not serve.

    Attributes:
        status: HTTP status.
        message: what the client reads.
        param: the field of the request that is wrong, if it is one.
        reason: what the log says; it holds no text of the client.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, reason: str | None = None
    ):
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.reason = message if reason is None else reason


class ClientGone(Exception):
    """The client closed its connection."""
