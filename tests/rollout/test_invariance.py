"""Slots, chunks and batch mates change neither the results nor the compiled programs."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa_jax.data.trajectory import StopReason
from coa_jax.engine.config import SamplingParams
from coa_jax.engine.engine import Engine
from coa_jax.model.tokenizer import eos_ids
from coa_jax.perf.bench.measure import compile_count
from coa_jax.tools.base import Observation
from tests import tiny_policy
from tests.rollout.small_loop import BUDGET, SHAPES, Says, engine, requests, run, tokens_of

SAMPLES = 4
HOT = SamplingParams(temperature=1.3)
PAIRS = [(task, sample) for task in range(len(tiny_policy.TASKS)) for sample in range(SAMPLES)]


@dataclasses.dataclass
class Varied:
    """Answers with 1 to 30 words that the arguments decide, each call after another delay."""

    name: str
    delays: list[float]
    deadline: float = 60.0
    made: int = 0

    async def __call__(self, arguments, context):
        self.made += 1
        await asyncio.sleep(self.delays[self.made % len(self.delays)])
        words = 1 + zlib.crc32(f"{arguments} {context.call_index}".encode()) % 30
        return Observation("The river Ume. " * words, True, "ok", 0.0)


def sampled(order, *, shared, slots, chunk, delays):
    """(task, sample) -> what a trajectory consists of, bit by bit.

    Args:
        order: the pairs of a task and a sample, as they are asked for.
        shared: whether neighbours with one prompt are a group.
        slots, chunk: of the engine.
        delays: seconds of the calls of each tool, again and again.
    """
    asked = {request.prompt_id: request for request in requests(SAMPLES, HOT)}
    groups: list[list[tuple[int, int]]] = []
    for pair in order:
        if shared and groups and groups[-1][0][0] == pair[0]:
            groups[-1].append(pair)
        else:
            groups.append([pair])
    wanted = [
        dataclasses.replace(asked[group[0][0]], samples=tuple(sample for _, sample in group))
        for group in groups
    ]
    tools = [Varied("wiki_search", delays), Varied("code", delays[::-1])]
    finished = run(wanted, tools=tools, on=engine(slots=slots, chunk=chunk))
    return {
        (t.metadata["prompt_id"], t.sample_id): (
            t.tokens.tobytes(),
            t.author.tobytes(),
            t.logp.tobytes(),
            t.stop_reason,
            t.text,
        )
        for group in finished
        for t in group
    }


@functools.cache
def reference():
    """One sample at a time: nothing shares a call of the engine with anything."""
    alone = [sampled([pair], shared=False, slots=4, chunk=8, delays=[0.0])[pair] for pair in PAIRS]
    return dict(zip(PAIRS, alone, strict=True))


def test_the_reference_is_worth_comparing_with():
    tokens, _, _, reasons, texts = zip(*reference().values(), strict=True)
    assert len(set(tokens)) > len(PAIRS) / 2
    assert StopReason.ANSWER in reasons
    assert sum(text.count("<observation>") for text in texts) > len(PAIRS) / 2


@pytest.mark.usefixtures("cpu_ops")
@pytest.mark.parametrize("slots", [4, pytest.param(16, marks=pytest.mark.slow)])
@settings(max_examples=8)
@given(
    order=st.permutations(PAIRS),
    shared=st.booleans(),
    chunk=st.sampled_from([1, 8, 32]),
    delays=st.lists(st.sampled_from([0.0, 0.005, 0.05]), min_size=1, max_size=5),
)
def test_tokens_and_log_probabilities_are_those_of_a_sample_alone(
    slots, order, shared, chunk, delays
):
    # Sorted by task, neighbours share their prompt; else nearly all come one by one.
    order = sorted(order, key=lambda pair: pair[0]) if shared else order
    found = sampled(order, shared=shared, slots=slots, chunk=chunk, delays=delays)
    assert [pair for pair in PAIRS if found[pair] != reference()[pair]] == []


@pytest.mark.parametrize(
    "shapes", [pytest.param({"slots": 1}, marks=pytest.mark.slow), {"slots": 2, "pages": 5}]
)
def test_a_prompt_is_prefilled_once_though_its_samples_do_not_fit_at_a_time(shapes, monkeypatch):
    prompts = []
    extend = Engine.extend

    def count(self, feeds):
        prompts.extend(tokens for _, start, tokens in feeds if start == 0)
        return extend(self, feeds)

    monkeypatch.setattr(Engine, "extend", count)
    wanted = requests(5, SamplingParams(), tiny_policy.TASKS[:2])
    groups = run(wanted, on=engine(**shapes))
    assert prompts == [request.prompt for request in wanted]
    assert tokens_of(groups) == tokens_of(run(wanted, on=engine(slots=16, chunk=8)))


def test_no_mix_of_settings_and_lengths_compiles_anything():
    compile_count()
    model = tiny_policy.policy()
    # Shapes that no other test has, so that there is something to compile.
    shapes = dataclasses.replace(SHAPES, slots=5, extend_buckets=(24, 72), extend_block=8)
    before = compile_count()
    fresh = Engine(model.params, model.config, shapes, eos_ids(model.tokenizer))
    fresh.warm_up()
    warm = compile_count()
    assert warm - before >= 4
    sampling = [
        SamplingParams(0.0),
        SamplingParams(1.0),
        SamplingParams(0.7, top_p=0.9),
        SamplingParams(1.5, top_k=20),
        SamplingParams(1.2, top_p=0.5, top_k=3),
    ]
    budgets = [{}, {"max_tokens": 120}, {"max_turn_tokens": 9}, {"max_observation_tokens": 5}]
    budgets += [{"max_tool_calls": 0}, {"strict": True}, {"max_tool_seconds": 30.0}]
    # Of the prompt: tokens that are cut off, tokens that are added, samples.
    changes = [(0, 0, 4), (0, 0, 4), (0, 0, 4), (20, 0, 1), (0, 37, 2), (9, 0, 7)]
    reasons = set()
    for number, budget in enumerate(budgets):
        wanted = []
        for i, (request, change) in enumerate(zip(requests() * 2, changes, strict=True)):
            cut, more, samples = change
            kept = request.prompt[: len(request.prompt) - cut] + request.prompt[:more]
            chosen = sampling[(number + i) % len(sampling)]
            wanted.append(
                dataclasses.replace(
                    request,
                    prompt=kept,
                    prompt_id=i,
                    samples=tuple(range(samples)),
                    sampling=chosen,
                )
            )
        tools = [Says("wiki_search", "Ume " * (1 + 13 * number)), Says("code", "84")]
        config = dataclasses.replace(BUDGET, **budget)
        finished = run(wanted, tools=tools, config=config, on=fresh)
        reasons |= {t.stop_reason for group in finished for t in group}
        fresh.publish(model.params)
    assert reasons >= {StopReason.ANSWER, StopReason.LENGTH, StopReason.TURNS}
    assert compile_count() == warm
