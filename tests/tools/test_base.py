"""A call of a tool is an observation, whatever the tool does."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from coa_jax.tools.base import Observation, ToolContext, call_tool


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
    task = asyncio.create_task(call_tool(tool, "", ToolContext()))
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


class Does:
    """A tool that does what it is given."""

    name = "does"

    def __init__(self, act, deadline=30.0):
        self.act, self.deadline = act, deadline

    async def __call__(self, arguments, context):
        return await self.act()


def called(act, deadline=30.0):
    return asyncio.run(call_tool(Does(act, deadline), "", ToolContext()))


@pytest.mark.parametrize(
    "returned",
    [
        None,
        {"text": "a"},
        Observation(None, True, "ok", 0.0),
        Observation(b"\xff", True, "ok", 0.0),
        Observation("a", True, "ok", None),
        Observation("a", True, "ok", float("nan")),
        Observation("a", True, "weird", 0.0),
        Observation("a", True, "ok", 0.0, {"a": {1}}),
    ],
    ids=repr,
)
def test_what_is_no_observation_is_a_fault(returned):
    async def act():
        return returned

    seen = called(act)
    assert (seen.ok, seen.outcome) == (False, "fault")
    assert seen.detail["exception"].startswith(("TypeError", "ValueError"))


@pytest.mark.parametrize("error", [OSError(110, "timed out"), TimeoutError(), SystemExit(3)])
def test_an_error_of_the_tool_is_no_timeout_of_ours_and_ends_no_process(error):
    async def act():
        raise error

    assert called(act).outcome == "fault"


@pytest.mark.parametrize("place", ["text", "detail"])
def test_a_huge_result_is_cut_and_does_not_stop_the_event_loop(monkeypatch, place):
    key = "key-0123456789-0123456789"
    monkeypatch.setenv("SOME_API_KEY", key)
    huge = f"{key} {'x' * ((1 << 20) - 40)}{key}" + "y" * (200 << 20)

    async def act():
        detail = {"all": huge} if place == "detail" else {}
        return Observation("a" if detail else huge, True, "ok", 0.0, detail)

    async def timed():
        task = asyncio.create_task(call_tool(Does(act), "", ToolContext()))
        longest = 0.0
        while not task.done():
            start = time.monotonic()
            await asyncio.sleep(0)
            longest = max(longest, time.monotonic() - start)
        return task.result(), longest

    seen, longest = asyncio.run(timed())
    assert longest < 0.5
    if place == "detail":
        assert seen.outcome == "fault" and "1,048,576 characters" in seen.detail["exception"]
        return
    assert seen.ok and seen.text.startswith("[secret] xxx") and "key-" not in seen.text
    assert seen.text.endswith(" characters left out ...]") and len(seen.text) <= 1 << 20


def test_a_tool_that_does_not_heed_its_cancellation_holds_up_nobody(monkeypatch):
    monkeypatch.setattr("coa_jax.tools.base._PATIENCE_S", 0.1)

    async def act():
        end = time.monotonic() + 3
        while time.monotonic() < end:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)
        return Observation("late", True, "ok", 3.0)

    async def timed():
        began = time.monotonic()
        seen = await call_tool(Does(act, 0.05), "", ToolContext())
        return seen, time.monotonic() - began

    seen, seconds = asyncio.run(timed())
    assert seen.outcome == "timeout" and seconds < 2
