"""Requests that are added and cancelled while other requests run."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import pytest

from coa_jax.data.trajectory import StopReason
from coa_jax.engine.config import SamplingParams
from coa_jax.rollout.loop import rollout
from coa_jax.rollout.request_queue import RequestQueue
from coa_jax.rollout.running_sample import unstarted
from coa_jax.tasks import grade
from coa_jax.tools.base import Observation
from tests import tiny_policy
from tests.rollout.small_loop import BUDGET, engine, requests, run, tokens_of


@dataclasses.dataclass
class Slow:
    """A tool that never answers, and says when it is called and when it is cancelled."""

    name: str
    called: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    deadline: float = 3600.0

    async def __call__(self, arguments, context) -> Observation:
        self.called.set()
        try:
            await asyncio.sleep(3600)
        finally:
            self.cancelled.set()
        raise AssertionError


def stream(queue, tools=None):
    tokenizer = tiny_policy.policy().tokenizer
    tools = list(tiny_policy.tools().values()) if tools is None else tools
    return contextlib.aclosing(rollout(engine(), tokenizer, queue, tools, BUDGET))


async def all_of(queue, tools=None):
    async with stream(queue, tools) as trajectories:
        return [trajectory async for trajectory in trajectories]


def test_requests_that_arrive_one_by_one_get_the_tokens_of_a_batch():
    wanted = requests(2, SamplingParams(temperature=1.3))

    async def scenario():
        queue = RequestQueue()

        async def visitors():
            for request in wanted:
                await asyncio.sleep(0.05)
                queue.put(request)
            queue.close()

        visiting = asyncio.create_task(visitors())
        finished = await all_of(queue)
        await visiting
        return finished

    finished = asyncio.run(scenario())
    by_key = {(t.metadata["prompt_id"], t.sample_id): t for t in finished}
    groups = [[by_key[request.prompt_id, s] for s in request.samples] for request in wanted]
    assert tokens_of(groups) == tokens_of(run(wanted))


def test_a_rollout_that_has_nothing_to_do_waits_until_the_inbox_is_closed():
    async def scenario():
        queue = RequestQueue()
        running = asyncio.create_task(all_of(queue))
        await asyncio.sleep(0.05)
        assert not running.done()
        queue.close()
        return await asyncio.wait_for(running, 5)

    assert asyncio.run(scenario()) == []
    closed = RequestQueue(closed=True)
    with pytest.raises(RuntimeError, match="closed"):
        closed.put(requests()[0])


def test_a_cancelled_request_frees_its_slots_and_ends_its_tools():
    (searching,) = requests(6)[:1]  # more samples than slots
    late = requests()[1]

    async def scenario():
        queue, tool = RequestQueue([searching]), Slow("wiki_search")
        code = tiny_policy.tools()["code"]
        running = asyncio.create_task(all_of(queue, [tool, code]))
        await asyncio.wait_for(tool.called.wait(), 60)
        queue.put(late)
        queue.cancel(late)
        queue.cancel(searching)
        queue.put(requests()[2])
        queue.close()
        finished = await asyncio.wait_for(running, 60)
        assert tool.cancelled.is_set()
        return finished

    finished = asyncio.run(scenario())
    ended = [t for t in finished if t.stop_reason is StopReason.CANCELLED]
    assert sorted((t.task_id, t.sample_id) for t in ended) == sorted(
        [(searching.task.id, sample) for sample in range(6)] + [(late.task.id, 0)]
    )
    assert all(grade(searching.task, t).value is None for t in ended)
    (other,) = (t for t in finished if t.stop_reason is not StopReason.CANCELLED)
    assert (other.task_id, other.stop_reason) == (requests()[2].task.id, StopReason.ANSWER)
    assert not engine().any_active


def test_a_prompt_without_room_for_an_answer_names_the_policy_and_warns(caplog, monkeypatch):
    # The warning is logged once in a process, and an earlier test may have caused it.
    monkeypatch.setattr("absl.logging._log_counter_per_token", {})
    asked = dataclasses.replace(requests()[0], max_tokens=len(requests()[0].prompt))
    told = unstarted(asked, asked.max_tokens, 3)
    assert (told, unstarted(asked, asked.max_tokens, None)) == ({"policy_versions": [[0, 3]]}, {})
    assert f"the prompt has {asked.max_tokens} tokens" in caplog.text
    ((refused,),) = run([asked])
    assert (refused.stop_reason, len(refused.tokens)) == (StopReason.LENGTH, asked.max_tokens)


def test_a_request_may_have_a_smaller_budget_than_the_rollout():
    whole, *others = requests()
    budget = len(whole.prompt) + 3
    (short,), (usual,) = run([dataclasses.replace(whole, max_tokens=budget), others[0]])
    assert (len(short.tokens), short.stop_reason) == (budget, StopReason.LENGTH)
    assert usual.stop_reason is StopReason.ANSWER
