"""The endpoint of agent programs, without a policy."""

from __future__ import annotations

import asyncio
import types

import httpx
import pytest

from coa_jax.serve.agents.app import make_app
from coa_jax.serve.http.refusals import RefusalLog
from tests.serve.live import CONFIG


@pytest.mark.parametrize("path", ["/reward", "/v1/chat/completions"])
def test_a_session_that_ends_while_a_body_arrives_is_no_failure_of_the_server(path):
    sessions = {"key": object()}
    app = make_app(types.SimpleNamespace(config=CONFIG), sessions, RefusalLog())

    async def body():
        yield b'{"reward"'
        sessions.clear()
        yield b": 1}"

    async def post() -> int:
        headers = {"Content-Type": "application/json", "Authorization": "Bearer key"}
        wire = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=wire, base_url="http://agents") as client:
            return (await client.post(path, content=body(), headers=headers)).status_code

    assert asyncio.run(post()) == 401
