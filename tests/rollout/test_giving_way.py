"""A sample that gives way to others, because no page is free, comes back with the same tokens."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa_jax.engine.config import SamplingParams
from coa_jax.engine.engine import Engine
from coa_jax.model.tokenizer import eos_ids
from coa_jax.rollout import scheduler
from coa_jax.rollout.constrain import constraint_or_ends
from coa_jax.rollout.loop import rollout
from coa_jax.rollout.replay import recording, replay
from tests import tiny_policy
from tests.rollout.small_loop import BUDGET, SHAPES, Hangs, Says, requests, run
from tests.rollout.test_invariance import Varied

# A sequence of the largest length has 12 pages.
POOL = dataclasses.replace(SHAPES, slots=6, page_size=16)
SAMPLES = 3


class Unsteady(Engine):
    """An engine that now and then says that no page is free."""

    refuse = staticmethod(lambda: False)

    def grow(self, slot, positions):
        return not self.refuse() and super().grow(slot, positions)


@functools.cache
def unsteady(pages):
    model, shapes = tiny_policy.policy(), dataclasses.replace(POOL, pages=pages)
    ends = constraint_or_ends(
        BUDGET, model.tokenizer, model.config.vocab_size, [tiny_policy.PROTOCOL]
    )
    return Unsteady(model.params, model.config, shapes, eos_ids(model.tokenizer), ends)


def wanted():
    return requests(SAMPLES, SamplingParams(1.3))


def check_same(groups, others):
    """Checks that both have the same tokens, and log-probabilities up to rounding.

    A sample that comes back is prefilled in larger matmuls than those of decoding, whose last bits
    are the same on some processors only.
    """
    for one, other in zip(itertools.chain(*groups), itertools.chain(*others), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert (one.stop_reason, one.text) == (other.stop_reason, other.text)
        np.testing.assert_allclose(one.logp, other.logp, rtol=1e-5, atol=1e-5)


def tools(delays):
    return [Varied("wiki_search", delays), Varied("code", delays[::-1])]


@functools.cache
def reference():
    return run(wanted(), tools=tools([0.0]), on=unsteady(0))


def restarts(groups):
    return [t.metadata.get("restarts", []) for group in groups for t in group]


def check_random_moments(pages, share, seed, delays):
    on, draw = unsteady(pages), random.Random(seed)
    on.refuse = lambda: draw.random() < share
    try:
        found = run(wanted(), tools=tools(delays), on=on)
    finally:
        del on.refuse
    check_same(found, reference())
    assert not on.any_active
    return found


MOMENTS = {
    "pages": st.sampled_from([12, 30]),
    "share": st.sampled_from([0.0, 0.1, 0.4]),
    "seed": st.integers(0, 2**32),
    "delays": st.lists(st.sampled_from([0.0, 0.005, 0.05]), min_size=1, max_size=4),
}


@pytest.mark.usefixtures("cpu_ops")
@settings(max_examples=4, deadline=None)
@given(**MOMENTS)
def test_samples_that_give_way_at_random_moments_have_the_same_tokens(pages, share, seed, delays):
    check_random_moments(pages, share, seed, delays)


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_ops")
@settings(max_examples=200, deadline=None)
@given(**MOMENTS)
def test_samples_that_give_way_200_times_have_the_same_tokens(pages, share, seed, delays):
    check_random_moments(pages, share, seed, delays)


@pytest.mark.usefixtures("cpu_ops")
def test_all_samples_end_though_all_grow_at_once_and_one_fits():
    # The policy never ends its text at this temperature, so every sample takes all 12 pages.
    endless = [
        dataclasses.replace(request, sampling=SamplingParams(4.0), agent=False, max_tokens=192)
        for request in requests(SAMPLES)
    ]
    found = run(endless, on=unsteady(12))
    check_same(found, run(endless, on=unsteady(0)))
    assert sum(len(t.tokens) > 180 for group in found for t in group) > 2
    assert sum(map(len, restarts(found))) > 2


@pytest.mark.usefixtures("cpu_ops")
def test_restarts_are_recorded_and_repeated_by_a_replay(monkeypatch):
    found = check_random_moments(12, 0.1, 5, [0.0, 0.005])
    recorded = restarts(found)
    assert sum(map(len, recorded)) > 3
    again = []
    extend = Engine.extend

    def count(self, feeds):
        again.extend(len(tokens) for _, start, tokens in feeds if start == 0)
        return extend(self, feeds)

    monkeypatch.setattr(Engine, "extend", count)
    records = [recording(t) for group in found for t in group]
    comparisons = replay(tiny_policy.policy(), records, {"pages": 0})
    assert all(c.identical and not c.logp_gaps().any() for c in comparisons)
    repeated = [c.replayed.metadata.get("restarts", []) for c in comparisons]
    assert repeated == recorded
    for position, _ in (pair for pairs in recorded for pair in pairs):
        assert position in again


def test_the_text_of_a_sample_that_gives_way_comes_once(monkeypatch):
    on, draw = unsteady(12), random.Random(1)
    on.refuse = lambda: draw.random() < 0.3
    pieces: dict[tuple[str, int], str] = {}

    def hear(arrival):
        key = arrival.task_id, arrival.sample_id
        pieces[key] = pieces.get(key, "") + arrival.text

    async def go():
        given = tools([0.0, 0.01])
        stream = rollout(on, tiny_policy.policy().tokenizer, wanted(), given, BUDGET, hear)
        async with contextlib.aclosing(stream):
            return [t async for t in stream]

    try:
        found = asyncio.run(go())
    finally:
        del on.refuse
    assert sum("restarts" in t.metadata for t in found) > 2
    assert pieces == {(t.task_id, t.sample_id): t.text for t in found}


@pytest.mark.parametrize("patience", [0.0, 1000.0])
def test_a_sample_that_waits_long_for_its_tool_gives_way_first(patience, monkeypatch):
    monkeypatch.setattr(scheduler, "_LONG_WAIT_S", patience)
    on, refusals = unsteady(30), iter([True])
    for slot in range(POOL.slots):  # else a cached prompt would be given away
        on.release(slot)
    search = Hangs("wiki_search", deadline=1.0)
    # Both searching samples begin before the program, and wait while it decodes.
    asked = [dataclasses.replace(r, samples=(0,)) for r in requests()]
    on.refuse = lambda: search.entered == 2 and next(refusals, False)
    try:
        found = run(asked, tools=[search, Says("code", "84 " * 30)], on=on)
    finally:
        del on.refuse
    first, second, program = restarts(found)
    assert (len(first), len(second), len(program)) == ((1, 0, 0) if patience == 0 else (0, 0, 1))


def test_cancelling_ends_samples_that_gave_way_and_their_tools():
    on, search = unsteady(12), Hangs("wiki_search", deadline=60.0)
    on.refuse = lambda: search.entered > 1

    async def go():
        given = [search, Says("code", "84")]
        stream = rollout(on, tiny_policy.policy().tokenizer, wanted(), given, BUDGET)
        async with contextlib.aclosing(stream):
            reader = asyncio.ensure_future(anext(stream))
            await search.called(2)
            await asyncio.sleep(0.1)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    try:
        asyncio.run(go())
    finally:
        del on.refuse
    assert search.cancelled == search.entered >= 2 and not on.any_active
