"""A full context loses its oldest steps, and the policy continues from the rest."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.data.trajectory import Author, SegmentSpan, StopReason
from coa_jax.errors import UserError
from coa_jax.model.compute import local_compute
from coa_jax.rollout.context_truncation import KEPT, kept_spans
from coa_jax.rollout.request import RolloutConfig
from coa_jax.train.batch import pack
from coa_jax.train.examples import trajectory_example
from coa_jax.train.logps import token_logps
from tests.rollout.small_loop import QUERIES, SEEN, SHAPES, Says, search, searching

ROLES = st.sampled_from(["think", "plan", "reflection", "wiki_search", None, "observation"])
SPANS = st.lists(st.tuples(ROLES, st.integers(0, 9)), max_size=30)


def made(pairs):
    return [
        SegmentSpan(role, Author.ENVIRONMENT if role == "observation" else Author.POLICY, "x", 0, n)
        for role, n in pairs
    ]


@given(SPANS, st.integers(-5, 120))
def test_what_stays_is_the_newest_step_and_then_plans_and_reflections(pairs, room):
    spans, lengths = made(pairs), [n for _, n in pairs]
    stays = kept_spans(spans, lengths, room)
    places = [i for i, span in enumerate(spans) if any(span is one for one in stays)]
    assert stays == [spans[i] for i in places]  # in their order
    ends = [i for i, span in enumerate(spans) if span.author == Author.ENVIRONMENT]
    newest = ends[-2] + 1 if len(ends) > 1 else 0
    assert {*range(newest, len(spans))} <= {*places}
    total = sum(lengths)
    if total <= room:
        assert len(stays) == len(spans)
    kept = sum(lengths[i] for i in places)
    assert kept <= room or newest == 0 or places == [*range(newest, len(spans))]
    gone = [i for i in range(len(spans)) if i not in places]
    if any(spans[i].role in KEPT for i in gone):
        assert all(spans[i].role in KEPT for i in places if i < newest)
    elif gone:  # whole steps, the oldest first
        last = next(end for end in ends if end >= gone[-1])
        assert all(spans[i].role in KEPT for i in places if i <= last)


def run(config):
    request, trajectory = search(Says("wiki_search", SEEN), config)
    return request.prompt, trajectory


@pytest.mark.slow
def test_the_policy_reads_its_prompt_its_plan_and_the_newest_steps():
    whole = RolloutConfig(max_tokens=192, max_tool_calls=3, max_observation_tokens=8)
    prompt, free = run(whole)
    assert (free.answer, len(free.tool_calls)) == ("Ume", 3)
    ends = [span.end for span in free.segments if span.author == Author.ENVIRONMENT]
    longest = max(b - a for a, b in itertools.pairwise((len(prompt), *ends, len(free.tokens))))
    room = {"max_tokens": len(free.tokens) - 3, "max_turn_tokens": longest + 1}
    small = dataclasses.replace(whole, **room)
    assert run(small)[1].stop_reason is StopReason.LENGTH
    prompt, cut = run(dataclasses.replace(small, cut_context=True))
    assert cut.tokens[: ends[2]].tolist() == free.tokens[: ends[2]].tolist()  # all is recorded
    assert [call.arguments for call in cut.tool_calls[:3]] == list(QUERIES)
    assert cut.text == "".join(span.text for span in cut.segments)
    # What follows the cut was sampled from the context without the oldest step.
    spans = [span for span in cut.segments if span.end <= ends[2]]
    most = small.max_tokens - small.max_turn_tokens
    assert ends[1] <= most < ends[2]
    stays = kept_spans(spans, [s.end - s.start for s in spans], most - len(prompt))
    assert {s.text for s in spans} - {s.text for s in stays} >= {"<think>one</think>"}
    assert "<plan>p</plan>" in {s.text for s in stays}
    places = [*range(len(prompt)), *(p for s in stays for p in range(s.start, s.end))]
    places += range(ends[2], len(cut.tokens))
    places = sorted({*places})
    assert cut.metadata["cut_tokens"] == len(cut.tokens) - len(places) > 0
    read = dataclasses.replace(
        cut, tokens=cut.tokens[places], author=cut.author[places], logp=cut.logp[places]
    )
    batch = pack([trajectory_example(read, 1.0)], SHAPES.max_length)
    score = functools.partial(token_logps, compute=local_compute(), temperature=1.0)
    model, _ = searching()
    logps, _ = score(model.params, config=model.config, batch=batch)
    gap = np.abs((np.asarray(logps) - batch.logp) * batch.mask)[0]
    after = len(places) - (len(cut.tokens) - ends[2])
    assert gap[after - 1 :].max() < 1e-4 and batch.mask[0, after - 1 :].sum() > 5
    assert gap[: after - 1].max() > 1e-4  # the earlier turns were sampled from what is gone


def test_cutting_needs_to_know_how_long_a_turn_may_be():
    for turn in (0, 64, 100):
        with pytest.raises(UserError, match="cut_context needs max_turn_tokens"):
            RolloutConfig(max_tokens=192, max_turn_tokens=turn, cut_context=True)
