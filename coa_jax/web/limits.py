"""Limits on times and numbers of connections."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from coa_jax.bounds import Between, Bounded, Seconds


@dataclasses.dataclass(frozen=True)
class ConnectionLimits(Bounded):
    """Limits that apply before a request reaches the application.

    Attributes:
        connections: maximum number of open connections. A further one closes the connection that
            has waited longest without a complete request.
        header_seconds: time for the headers of a request, from its first byte (from the start of
            the connection for the first request).
        body_seconds: time for the body of a request, from the end of its headers.
        idle_seconds: time between two requests of a connection.
        write_seconds: time within which a client must accept some bytes of a response.
    """

    connections: Annotated[int, Between(16, 65536)] = 512
    header_seconds: Seconds = 10.0
    body_seconds: Seconds = 30.0
    idle_seconds: Seconds = 30.0
    write_seconds: Seconds = 60.0
