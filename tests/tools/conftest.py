"""Fixtures of the tests of tools."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tools import fault_server


@pytest.fixture(scope="module")
def server() -> Iterator[fault_server.FaultServer]:
    """A server for the tests of a module, which may add pages of their own."""
    with fault_server.running() as server:
        yield server
