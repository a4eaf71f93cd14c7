"""The one exception of the network, with the kinds that decide what happens next."""

from __future__ import annotations

import re
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


_TOO_LARGE = frozenset({413, 414})
"""Statuses that only the size of a request explains."""

REFUSED = frozenset({400, 422})
"""Statuses of a request that makes no sense, but also of an empty account or a wrong setting."""

_ACCOUNT = re.compile(
    rb"account|api[ _-]?key|balance|billing|credit|payment|quota|subscription", re.IGNORECASE
)

_BELIEVED = 3
"""Refusals in a row that a service which has answered before may blame on the requests."""


class FetchError(Exception):
    """A request without a usable answer.

    Attributes:
        kind: why.
        message: one clause that a model can read: no addresses of ours, no secrets.
        status: the HTTP status, or None.
        retry_after: seconds that the server asked to wait, or None.
        account: whether the server speaks of the account that asks.
        said: the words of the server, without the key, for the user of the package: they may hold
            addresses, so no model reads them.
    """

    def __init__(
        self,
        kind: Kind,
        message: str,
        status: int | None = None,
        retry_after: float | None = None,
        account: bool = False,
        said: str = "",
    ):
        super().__init__(message)
        self.kind: Kind = kind
        self.message = message
        self.status = status
        self.retry_after = retry_after
        self.account = account
        self.said = said

    @property
    def transient(self) -> bool:
        """Whether another attempt may succeed."""
        if self.status is not None:
            # Also what is in no standard: 520 to 524 of Cloudflare, 529 of overloaded models.
            failed = self.status >= 500 and self.status not in (501, 505)
            return failed or self.status in (408, 409, 425, 429)
        return self.kind in TRANSIENT


def speaks_of_account(answer: bytes) -> bool:
    """Whether an error is explained by credits, a quota or a key: serper says it with a 400."""
    return _ACCOUNT.search(answer) is not None


class Blame:
    """Tells whose fault the failures of one service are; each tool has its own.

    What is not certain is a fault of ours.  A status of 400 or 422 may mean a query that makes no
    sense, but also an account without credits or a setting that the service does not take, which
    are refused in every request.  So it is the query's only if the service has answered others,
    does not speak of the account, and has not refused `_BELIEVED` requests since its last answer.
    """

    def __init__(self) -> None:
        """Knows of no answer yet."""
        self._believed = 0

    def answered(self) -> None:
        """To be told of each request that went well."""
        self._believed = _BELIEVED

    def outcome(self, error: FetchError) -> Literal["timeout", "error", "fault"]:
        """How a call ends whose service gave this; to be asked once for each."""
        if error.kind == "timeout":
            return "timeout"
        if error.status in _TOO_LARGE:
            return "error"
        if error.status not in REFUSED or error.account or not self._believed:
            return "fault"
        self._believed -= 1
        return "error"
