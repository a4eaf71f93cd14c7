"""The exception of the network tools, with kinds that decide how a failure is handled."""

from __future__ import annotations

import re
from typing import Literal

Kind = Literal[
    "refused", "timeout", "unreachable", "status", "too_large", "redirects", "type", "malformed"
]
"""Why there is no answer.

- ``refused``: the address or scheme is not allowed.
- ``timeout``: a deadline passed.
- ``unreachable``: there was no connection, or it broke.
- ``status``: the server returned an error status.
- ``too_large``: the answer has more bytes than allowed.
- ``redirects``: there were too many redirects.
- ``type``: the media type is not wanted.
- ``malformed``: the content does not match its headers.
"""

TRANSIENT: frozenset[Kind] = frozenset({"timeout", "unreachable", "malformed"})
"""Kinds for which another attempt may succeed; for an error status, its number decides."""


_TOO_LARGE = frozenset({413, 414})
"""Statuses caused only by the size of a request."""

REFUSED = frozenset({400, 422})
"""Statuses of an invalid request, but also of an empty account or a wrong setting."""

_ACCOUNT = re.compile(
    rb"account|api[ _-]?key|balance|billing|credit|payment|quota|subscription", re.IGNORECASE
)

_BELIEVED = 3
"""Number of consecutive rejections that a service which has answered before may attribute to
requests.
"""


class FetchError(Exception):
    """A request without a usable answer.

    Attributes:
        kind: why there is no answer.
        message: one clause that a model may read: without private addresses and secrets.
        status: the HTTP status, or None.
        retry_after: seconds that the server asked to wait, or None.
        account: whether the server's error concerns the account of the caller.
        said: the server's own text, without the key, for the user. It may contain addresses, so
            models do not read it.
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
            # This includes non-standard statuses: 520 to 524 of Cloudflare, 529 of overloaded
            # models.
            failed = self.status >= 500 and self.status not in (501, 505)
            return failed or self.status in (408, 409, 425, 429)
        return self.kind in TRANSIENT


def speaks_of_account(answer: bytes) -> bool:
    """Returns whether an error text mentions credits, a quota or a key.

    Serper returns it with a 400.
    """
    return _ACCOUNT.search(answer) is not None


class Blame:
    """Decides whether the query or the service is to blame for a failure; each tool has its own.

    Uncertain failures count as faults. A status of 400 or 422 may mean an invalid query, but also
    an account without credits or an unsupported setting, which fail for every request. So the query
    is to blame only if the service has answered other queries, its error does not concern the
    account, and it has not rejected `_BELIEVED` requests since its last answer.
    """

    def __init__(self) -> None:
        """Starts without any answer."""
        self._believed = 0

    def answered(self) -> None:
        """Must be called after each successful request."""
        self._believed = _BELIEVED

    def outcome(self, error: FetchError) -> Literal["timeout", "error", "fault"]:
        """Returns the outcome of a failed call; must be called once per failure."""
        if error.kind == "timeout":
            return "timeout"
        if error.status in _TOO_LARGE:
            return "error"
        if error.status not in REFUSED or error.account or not self._believed:
            return "fault"
        self._believed -= 1
        return "error"
