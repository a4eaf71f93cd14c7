"""A real tool server on a local port, in a thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from coa_jax.sandbox.isolation import Isolation
from coa_jax.serve import tool_server
from coa_jax.serve.http.limits import ConnectionLimits
from coa_jax.serve.http.refusals import RefusalLog
from coa_jax.tools.bm25 import Index
from tests.serve.http.live import running


@contextlib.contextmanager
def serving(
    index: Index,
    isolation: Isolation | None = None,
    key: str | None = None,
    limits: ConnectionLimits | None = None,
    log: RefusalLog | None = None,
    libraries: tuple[str, ...] = (),
) -> Iterator[str]:
    """Its address; it ends with the context."""
    limits, log = limits or ConnectionLimits(), log or RefusalLog()
    app = tool_server.make_app(index, isolation, key, True, limits, log, libraries)
    with running(app, limits, log) as address:
        yield address
