"""Defines the limits on the number of connections and on their times."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from coa_jax.config.fields import Between, Bounded, Seconds


@dataclasses.dataclass(frozen=True)
class ConnectionLimits(Bounded):
    """Limits that apply before a request reaches the application.

    Attributes:
        connections: maximum number of open connections. If a further connection is opened, the
            server closes the one that has waited longest without sending a complete request.
        header_seconds: maximum seconds from the first byte of a request to the end of its headers.
            For the first request of a connection, the time begins with the connection.
        body_seconds: maximum seconds from the end of the headers to the end of the body.
        idle_seconds: maximum seconds between two requests of a connection.
        write_seconds: maximum seconds for which a client may accept no byte of a response.
    """

    connections: Annotated[int, Between(16, 65536)] = 512
    header_seconds: Seconds = 10.0
    body_seconds: Seconds = 30.0
    idle_seconds: Seconds = 30.0
    write_seconds: Seconds = 60.0
