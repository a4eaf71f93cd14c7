"""Several engines that share one queue of requests."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from coa_jax.data.trajectory import StopReason
from coa_jax.engine.engine import Engine
from coa_jax.rollout.loop import rollout
from coa_jax.rollout.request_queue import RequestQueue
from tests import tiny_policy
from tests.rollout.small_loop import BUDGET, Hangs, requests, two
from tests.tiny_policy import TASKS


def stream(wanted, tools=None):
    tools = list(tiny_policy.tools().values()) if tools is None else tools
    tokenizer = tiny_policy.policy().tokenizer
    return contextlib.aclosing(rollout(two(), tokenizer, wanted, tools, BUDGET))


def test_an_error_of_one_ends_both_and_stays_what_it_was(monkeypatch):
    decode, second = Engine.decode, two()[1]

    def broken(self):
        if self is second:
            raise RuntimeError("the device is lost")
        return decode(self)

    searching = Hangs("wiki_search", deadline=3600.0)

    async def go():
        async with stream(requests(2), [searching]) as trajectories:
            async for _ in trajectories:
                pass

    monkeypatch.setattr(Engine, "decode", broken)
    with pytest.raises(RuntimeError, match="the device is lost"):
        asyncio.run(asyncio.wait_for(go(), 60))
    assert searching.cancelled == searching.entered
    assert not any(one.any_active for one in two())


def test_an_error_of_the_reader_frees_the_slots_of_both():
    async def go():
        async with stream(requests(2)) as trajectories:
            async for _ in trajectories:
                raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        asyncio.run(go())
    assert not any(one.any_active for one in two())


def test_cancelling_the_reader_ends_the_tools_of_both():
    searching = Hangs("wiki_search", deadline=3600.0)

    async def go():
        async def consume():
            async with stream(requests(2)[:2], [searching]) as trajectories:
                async for _ in trajectories:
                    pass

        task = asyncio.create_task(consume())
        await asyncio.wait_for(searching.called(3), 60)  # more than one of them has slots
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(go())
    assert searching.cancelled == searching.entered
    assert not any(one.any_active for one in two())


def test_a_cancelled_sample_that_waits_for_one_engine_is_not_taken_by_the_other():
    request = requests(3)[0]
    queue = RequestQueue([request])
    busy, idle = queue.reader(), queue.reader()
    assert busy.sample()[0] is request and len(busy.waiting) == 3
    assert idle.sample()[0] is request and len(busy.waiting) == 2  # an idle engine takes a sample
    idle.waiting.clear()
    queue.cancel(request)
    assert idle.take_cancelled() == [request]
    assert idle.sample() is None and len(busy.waiting) == 2


def test_a_request_is_taken_back_from_whichever_has_it():
    searching = Hangs("wiki_search", deadline=3600.0)
    first, second, late = requests(2)[0], requests(2)[1], requests(1)[2]

    async def go():
        queue = RequestQueue()

        async def read():
            async with stream(queue, [searching, tiny_policy.tools()["code"]]) as trajectories:
                return [trajectory async for trajectory in trajectories]

        running = asyncio.create_task(read())
        await asyncio.sleep(0.05)  # both wait for something to do
        queue.put(first)
        queue.put(second)
        await asyncio.wait_for(searching.called(4), 60)
        queue.cancel(second)
        queue.cancel(first)
        queue.put(late)
        queue.close()
        return await asyncio.wait_for(running, 60)

    finished = asyncio.run(go())
    ended = {t.task_id for t in finished if t.stop_reason is StopReason.CANCELLED}
    assert ended == {first.task.id, second.task.id} and len(finished) == 5
    (other,) = (t for t in finished if t.stop_reason is not StopReason.CANCELLED)
    assert (other.task_id, other.stop_reason) == (late.task.id, StopReason.ANSWER)
    assert searching.cancelled == searching.entered == 4


def test_an_error_of_both_lets_slow_tools_end_and_frees_the_slots(monkeypatch):
    calls, ended = [], []

    class Reluctant:
        name, deadline = "wiki_search", 3600.0

        async def __call__(self, arguments, context):
            calls.append(context.trajectory_id)
            try:
                await asyncio.sleep(3600)
            finally:
                await asyncio.sleep(0.3)
                ended.append(context.trajectory_id)

    decode, failed = Engine.decode, []

    def broken(self):
        # The second fails while the first one waits for its tools to end.
        if len(calls) >= 2 and not failed:
            failed.append(self)
            raise RuntimeError("the device is lost")
        if failed:
            time.sleep(0.1)
            raise RuntimeError("the other one too")
        return decode(self)

    async def go():
        searches, computes = requests(1)[0], requests(3)[2]
        async with stream([searches, computes, *requests(2)[1:]], [Reluctant()]) as trajectories:
            async for _ in trajectories:
                pass

    monkeypatch.setattr(Engine, "decode", broken)
    with pytest.raises(RuntimeError):
        asyncio.run(asyncio.wait_for(go(), 60))
    assert calls and sorted(ended) == sorted(calls)
    assert not any(one.any_active for one in two())


def test_an_idle_one_takes_samples_of_a_request_that_does_not_fit_into_another():
    (request,) = requests(4, tasks=TASKS[:1])
    searching = Hangs("wiki_search", deadline=3600.0)

    async def go():
        async def consume():
            async with stream([request], [searching]) as trajectories:
                async for _ in trajectories:
                    pass

        task = asyncio.create_task(consume())
        await asyncio.wait_for(searching.called(4), 60)  # two slots each: all four run
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(go())
