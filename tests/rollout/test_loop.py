"""The agent loop with a real policy and real tools."""

from __future__ import annotations

import asyncio
import dataclasses
import functools

import jax
import numpy as np
import pytest

from coa_jax.data.trajectory import Author, StopReason, format_valid
from coa_jax.engine import programs
from coa_jax.engine.config import SamplingParams
from coa_jax.engine.engine import Engine
from coa_jax.model.compute import local_compute
from coa_jax.protocol import Prompt
from coa_jax.rollout.loop import rollout
from coa_jax.rollout.request_queue import RequestQueue
from coa_jax.tasks import grade
from coa_jax.train.batch import pack
from coa_jax.train.examples import record_example, trajectory_example
from coa_jax.train.logps import token_logps
from tests import tiny_policy
from tests.rollout.small_loop import BUDGET, SHAPES, Says, engine, requests, run, tokens_of
from tests.tiny_policy import TASKS


@pytest.fixture(scope="module")
def greedy():
    return [group[0] for group in run(requests())]


@pytest.fixture(scope="module")
def sampled():
    return run(requests(4, SamplingParams(temperature=1.3)))


def test_the_policy_solves_its_tasks_with_the_real_tools(greedy):
    for task, trajectory in zip(TASKS, greedy, strict=True):
        assert trajectory.stop_reason is StopReason.ANSWER
        assert grade(task, trajectory).value == 1.0
        assert format_valid(trajectory)
        (call,) = trajectory.tool_calls
        assert (call.tool, call.outcome) == (task.metadata["kind"], "ok")
        assert 0 <= call.start <= call.end
        assert call.observation in trajectory.text
        assert trajectory.metadata["prompt_id"] == TASKS.index(task)
        assert trajectory.metadata["stage"] == "test"
    assert "84" in greedy[2].tool_calls[0].observation


def test_a_tool_knows_the_question_and_the_last_thought():
    seen = []

    class Asks:
        name, deadline = "wiki_search", 5.0

        async def __call__(self, arguments, context):
            seen.append((context.question, context.think))
            return await tiny_policy.tools()["wiki_search"](arguments, context)

    run(requests(tasks=TASKS[:1]), tools=[Asks()])
    assert seen[0] == (TASKS[0].question, "call it")


def test_a_rollout_has_the_ids_and_the_authors_of_the_distilled_record(greedy):
    tokenizer = tiny_policy.policy().tokenizer
    for record, trajectory in zip(tiny_policy.records(), greedy, strict=True):
        example = record_example(tokenizer, record, Prompt("brief"))
        # The record goes on with the end of the turn, which nobody needs after an answer.
        assert trajectory.tokens.tolist() == example.tokens[:-1].tolist()
        assert (trajectory.author == Author.POLICY).tolist() == (example.mask[:-1] == 1).tolist()
        assert np.count_nonzero(trajectory.author == Author.ENVIRONMENT) > 10
        assert not trajectory.logp[trajectory.author != Author.POLICY].any()


def test_log_probabilities_are_those_of_the_full_forward_pass(greedy, sampled):
    model = tiny_policy.policy()
    for temperature, group in ((1.0, greedy), (1.3, [t for g in sampled for t in g])):
        batch = pack([trajectory_example(t, 1.0) for t in group], SHAPES.max_length)
        score = jax.jit(
            functools.partial(token_logps, compute=local_compute(), temperature=temperature),
            static_argnames=("config",),
        )
        logps, _ = score(model.params, config=model.config, batch=batch)
        gap = np.abs((np.asarray(logps) - batch.logp) * batch.mask)
        assert batch.mask.sum() > 100
        assert gap.max() < 1e-4


def test_trajectories_do_not_depend_on_the_order_of_the_requests(sampled):
    again = run(requests(4, SamplingParams(temperature=1.3))[::-1])
    assert tokens_of(again[::-1]) == tokens_of(sampled)


def test_a_strict_rollout_ends_with_the_first_broken_rule_and_else_changes_nothing():
    wanted = requests(8, SamplingParams(temperature=1.3))
    free = [t for group in run(wanted) for t in group]
    strict = [
        t for group in run(wanted, config=dataclasses.replace(BUDGET, strict=True)) for t in group
    ]
    broken = [s.stop_reason is StopReason.VIOLATION for s in strict]
    assert any(broken) and not all(broken)
    assert sum(len(s.tokens) for s in strict) < sum(len(f.tokens) for f in free)
    for whole, part, cut in zip(free, strict, broken, strict=True):
        kept = len(part.tokens)
        assert part.tokens.tolist() == whole.tokens[:kept].tolist()
        assert not (cut and format_valid(whole))
        assert cut or (kept == len(whole.tokens) and part.stop_reason is whole.stop_reason)
        assert format_valid(part) == format_valid(whole)


def test_a_turn_has_a_budget_of_its_own():
    budget = dataclasses.replace(BUDGET, max_turn_tokens=12)
    whole, part = (run(requests(), config=config)[0][0] for config in (BUDGET, budget))
    prompt = int(np.count_nonzero(whole.author == Author.PROMPT))
    assert part.stop_reason is StopReason.TURN_LENGTH
    assert part.tokens.tolist() == whole.tokens[: prompt + 12].tolist()


def test_what_is_no_agent_has_no_budget_of_a_turn():
    budget = dataclasses.replace(BUDGET, max_turn_tokens=12)
    free = [dataclasses.replace(one, agent=False) for one in requests()]
    assert tokens_of(run(free, config=budget)) == tokens_of(run(requests()))


def test_the_prompt_of_a_group_is_prefilled_once(monkeypatch):
    fed, forked = [], []
    extend, fork = Engine.extend, Engine.fork

    def count_extend(self, feeds):
        fed.extend((slot, start, len(tokens)) for slot, start, tokens in feeds)
        return extend(self, feeds)

    def count_fork(self, source, targets, length):
        forked.extend(targets)
        return fork(self, source, targets, length)

    monkeypatch.setattr(Engine, "extend", count_extend)
    monkeypatch.setattr(Engine, "fork", count_fork)
    wanted = requests(4, tasks=TASKS[:1])
    ((*group,),) = run(wanted)
    prefills = [feed for feed in fed if feed[1] == 0]
    assert [size for _, _, size in prefills] == [len(wanted[0].prompt)]
    assert len(forked) == 3
    # Beyond the prompt only observations are fed, each with the token before it.
    observed = sum(int(np.count_nonzero(t.author == Author.ENVIRONMENT)) + 1 for t in group)
    assert sum(size for _, start, size in fed if start) == observed


def test_decoding_compiles_once_for_a_whole_run():
    fresh = engine()
    run(requests(), on=fresh, tools=[Says("code", "x " * 300)])
    before = programs.decode_chunk._cache_size(), programs.extend._cache_size()
    run(requests(3, SamplingParams(temperature=1.2)), on=fresh)
    run(requests(2), on=fresh, tools=[Says("code", "x " * 300)])
    assert (programs.decode_chunk._cache_size(), programs.extend._cache_size()) == before


def test_watchers_see_the_text_of_the_trajectory_as_it_comes(greedy):
    arrivals = []

    async def go():
        tokenizer, tools = tiny_policy.policy().tokenizer, list(tiny_policy.tools().values())
        stream = rollout(engine(), tokenizer, requests(), tools, BUDGET, on_text=arrivals.append)
        async for _ in stream:
            pass

    asyncio.run(go())
    for task, trajectory in zip(TASKS, greedy, strict=True):
        mine = [arrival for arrival in arrivals if arrival.task_id == task.id]
        assert "".join(arrival.text for arrival in mine) == trajectory.text
        (shown,) = (a for a in mine if a.author == Author.ENVIRONMENT)
        assert shown.call is not None
        assert shown.call.tool == task.metadata["kind"]


def test_requests_are_taken_only_as_slots_become_free():
    taken = []

    def lazily():
        for request in requests(2):
            taken.append(request.prompt_id)
            yield request

    async def go():
        tokenizer, tools = tiny_policy.policy().tokenizer, list(tiny_policy.tools().values())
        seen = []
        async for _ in rollout(engine(), tokenizer, lazily(), tools, BUDGET):
            seen.append(len(taken))
        return seen

    seen = asyncio.run(go())
    assert seen[0] == 2  # four slots hold two groups of two
    assert len(seen) == 6


def test_a_repeated_sample_waits_after_an_observation_for_the_policy_version_of_its_plan(greedy):
    request, recorded, on = requests()[0], greedy[0], engine()
    by_policy = recorded.author == Author.POLICY
    seen = int(np.flatnonzero(recorded.author == Author.ENVIRONMENT)[0])
    after = seen + int(np.flatnonzero(by_policy[seen:])[0])
    plan = ((0, 0), (after, 1))
    schedulers = []

    async def publish(queue):
        while not any(scheduler.waiting_for_weights for scheduler in schedulers):
            await asyncio.sleep(0.01)
        queue.publish([on.params], version=1)

    async def go():
        queue = RequestQueue([dataclasses.replace(request, plan=plan)], closed=True, version=0)
        tokenizer, tools = tiny_policy.policy().tokenizer, list(tiny_policy.tools().values())
        found = rollout(on, tokenizer, queue, tools, BUDGET, on_start=schedulers.append)
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            tasks.create_task(publish(queue))
            return [trajectory async for trajectory in found]

    (again,) = asyncio.run(go())
    assert again.metadata["policy_versions"] == [list(pair) for pair in plan]
    assert again.tokens.tolist() == recorded.tokens.tolist()
