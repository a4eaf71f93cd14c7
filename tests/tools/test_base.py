"""A call of a tool is an observation, whatever the tool does."""

from __future__ import annotations

import asyncio

import pytest

from coa_jax.tools.base import ToolContext, call


class Waits:
    """A tool that waits for what somebody else may cancel."""

    name, deadline = "waits", 30.0

    def __init__(self):
        self.entered = asyncio.Event()
        self.future = asyncio.get_running_loop().create_future()

    async def __call__(self, arguments, context):
        self.entered.set()
        return await self.future


async def begin():
    tool = Waits()
    task = asyncio.create_task(call(tool, "", ToolContext()))
    await tool.entered.wait()
    return tool, task


def test_a_tool_whose_own_wait_was_cancelled_is_a_fault():
    async def go():
        tool, task = await begin()
        tool.future.cancel()
        return await task

    seen = asyncio.run(go())
    assert (seen.ok, seen.outcome) == (False, "fault")
    assert seen.detail["exception"].startswith("CancelledError")


def test_a_caller_that_is_cancelled_gets_no_observation():
    async def go():
        tool, task = await begin()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert tool.future.cancelled()

    asyncio.run(go())
