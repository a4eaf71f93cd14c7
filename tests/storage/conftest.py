"""Two emulated clouds for all tests of this folder."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from tests.buckets import BUCKET, SCHEMES, emulators


@pytest.fixture(scope="session")
def clouds() -> Iterator[dict[str, str]]:
    """Starts the emulators; their addresses are in the environment meanwhile."""
    with emulators() as env, pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        yield env


@pytest.fixture(params=SCHEMES)
def bucket(request: pytest.FixtureRequest, clouds: dict[str, str]) -> str:
    """An empty folder of a bucket of each store."""
    return f"{request.param}://{BUCKET}/{secrets.token_hex(4)}"
