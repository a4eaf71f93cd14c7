"""Defines the exception of the network tools. Its kind determines how a failure is handled."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

Kind = Literal[
    "refused", "timeout", "unreachable", "status", "too_large", "redirects", "type", "malformed"
]
"""Why a request has no usable answer.

* ``refused``: the address or the scheme is not allowed.
* ``timeout``: a deadline passed.
* ``unreachable``: the connection could not be opened, or broke.
* ``status``: the server returned an error status.
* ``too_large``: the answer has more bytes than allowed.
* ``redirects``: there were too many redirects.
* ``type``: the answer has a media type that the request does not accept.
* ``malformed``: the content of the answer does not have the expected format.
"""

_TOO_LARGE = frozenset({413, 414})
"""HTTP statuses that only the size of a request causes."""

REFUSED = frozenset({400, 422})
"""HTTP statuses of an invalid request. Some services also use them for an account without credits
or an invalid setting.
"""

_ACCOUNT = re.compile(
    rb"account|api[ _-]?key|balance|billing|credit|payment|quota|subscription", re.IGNORECASE
)

_BELIEVED = 3
"""Number of consecutive rejections after an answer that are attributed to the requests."""


@dataclasses.dataclass(eq=False)
class FetchError(Exception):
    """Raised if a request of a network tool has no usable answer.

    Attributes:
        kind: why there is no usable answer.
        message: the failure in a few words for observations, such as "the server took too long". It
            contains no private addresses and secrets.
        status: HTTP status; None if there is none.
        retry_after: seconds that the server asked the client to wait; None if the server did not
            ask.
        account: whether the server's error message concerns the user's account, such as its
            credits.
        said: error message of the server for the user, without the API key. It may contain private
            addresses, so it is not part of observations.
    """

    kind: Kind
    message: str
    status: int | None = None
    retry_after: float | None = None
    account: bool = False
    said: str = ""

    def __str__(self) -> str:
        return self.message

    @property
    def transient(self) -> bool:
        """Whether the failure may be temporary, so that another attempt may succeed."""
        if self.status is not None:
            # Includes statuses that no standard defines, such as 520 to 524 of Cloudflare.
            failed = self.status >= 500 and self.status not in (501, 505)
            return failed or self.status in (408, 409, 425, 429)
        return self.kind in ("timeout", "unreachable", "malformed")


def speaks_of_account(answer: bytes) -> bool:
    """Returns whether the body of an error mentions an account, credits, a quota or an API key.

    The status alone does not show the cause. For example, serper.dev returns the status 400 both
    for invalid queries and for missing credits.
    """
    return _ACCOUNT.search(answer) is not None


class FaultDetector:
    """Decides whether a failed call is a mistake of the policy or a fault of the service.

    The status 400 or 422 may mean an invalid query. It may also mean an account without credits or
    an unsupported setting, which make every request fail. Such a status therefore counts as a
    mistake of the policy only if all of these conditions hold, and otherwise as a fault:

    * The service has answered an earlier query.
    * The error does not concern the account.
    * The service has not rejected three other requests since its last answer.

    Each tool has its own object of this class.
    """

    def __init__(self) -> None:
        """Creates the object of a tool whose service has not answered yet."""
        self._believed = 0

    def answered(self) -> None:
        """Records that the service has answered a request; must be called after each success."""
        self._believed = _BELIEVED

    def outcome(self, error: FetchError) -> Literal["timeout", "error", "fault"]:
        """Decides the outcome of a failed call, and records the failure.

        The method must be called exactly once per failure.

        Args:
            error: the failure.

        Returns:
            ``timeout`` if the time limit passed, ``error`` for a mistake of the policy, or
            ``fault`` for a fault of the service.
        """
        if error.kind == "timeout":
            return "timeout"
        if error.status in _TOO_LARGE:
            return "error"
        if error.status not in REFUSED or error.account or not self._believed:
            return "fault"
        self._believed -= 1
        return "error"
