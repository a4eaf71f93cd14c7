"""Time and number limits of connections."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from coa_jax.bounds import Between, Bounded, Seconds


@dataclasses.dataclass(frozen=True)
class ConnectionLimits(Bounded):
    """Limits that hold before a request reaches the application.

    Attributes:
        connections: open connections.  A further one closes the connection that has waited longest
            without a complete request.
        header_seconds: time for the headers of a request, from its first byte (from the start of
            the connection for the first request).
        body_seconds: time for the body of a request, from the end of its headers.
        idle_seconds: time between two requests of a connection.
        write_seconds: time in which a client must take some bytes of an answer.
    """

    connections: Annotated[int, Between(16, 65536)] = 512
    header_seconds: Seconds = 10.0
    body_seconds: Seconds = 30.0
    idle_seconds: Seconds = 30.0
    write_seconds: Seconds = 60.0
