"""The one exception of the network, with the kinds that decide what happens next."""

from __future__ import annotations

from typing import Literal

Kind = Literal[
    "refused", "timeout", "unreachable", "status", "too_large", "redirects", "type", "malformed"
]
"""Why there is no answer.

``refused`` an address or scheme that may not be reached; ``timeout`` a deadline passed;
``unreachable`` no connection, or it broke; ``status`` an error status; ``too_large`` more bytes
than allowed; ``redirects`` too many of them; ``type`` a media type that is not wanted;
``malformed`` bytes that are not what their headers say.
"""

TRANSIENT: frozenset[Kind] = frozenset({"timeout", "unreachable", "malformed"})
"""Kinds that another attempt may mend; an error status says so by its number."""


class FetchError(Exception):
    """A request without a usable answer.

    Attributes:
        kind: why.
        message: one clause that a model can read: no addresses of ours, no secrets.
        status: the HTTP status, or None.
        retry_after: seconds that the server asked to wait, or None.
    """

    def __init__(
        self,
        kind: Kind,
        message: str,
        status: int | None = None,
        retry_after: float | None = None,
    ):
        super().__init__(message)
        self.kind: Kind = kind
        self.message = message
        self.status = status
        self.retry_after = retry_after

    @property
    def outcome(self) -> Literal["timeout", "error", "fault"]:
        """How a call ends whose service gave this: refusing what was asked blames who asked."""
        if self.kind == "timeout":
            return "timeout"
        return "error" if self.status in (400, 413, 414, 422) else "fault"

    @property
    def transient(self) -> bool:
        """Whether another attempt may succeed."""
        if self.status is not None:
            # Also what is in no standard: 520 to 524 of Cloudflare, 529 of overloaded models.
            failed = self.status >= 500 and self.status not in (501, 505)
            return failed or self.status in (408, 425, 429)
        return self.kind in TRANSIENT
