"""A constrained policy cannot break its protocol, and is sampled, learned and replayed as such."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coa_jax.data.trajectory import Author, StopReason, format_valid, trajectory_violations
from coa_jax.engine import programs
from coa_jax.engine.config import EngineConfig, SamplingParams
from coa_jax.engine.constraint import DEAD
from coa_jax.engine.engine import Engine
from coa_jax.model.api import Model
from coa_jax.model.compute import local_compute
from coa_jax.model.config import ModelConfig
from coa_jax.model.encode import prompt_ids
from coa_jax.model.params import bind, init_params
from coa_jax.model.tokenizer import eos_ids
from coa_jax.protocol import Prompt, get_protocol, protocol_names
from coa_jax.rollout.collect import collect
from coa_jax.rollout.constrain import constraint_for
from coa_jax.rollout.episode import Episode
from coa_jax.rollout.loop import rollout
from coa_jax.rollout.replay import recording, replay
from coa_jax.rollout.request import Request, RolloutConfig
from coa_jax.tasks import Task
from coa_jax.train.batch import pack
from coa_jax.train.examples import trajectory_example
from coa_jax.train.logps import token_logps
from tests.rollout.small_loop import Says
from tests.tiny_tokenizer import train_tokenizer

SHAPES = EngineConfig(slots=16, max_length=320, chunk=16, extend_buckets=(64,))
BUDGET = RolloutConfig(320, 4, 32, constrain=True, strict=True)
NAMES = ("generalist", "web", "mhqa", "web_wiki:paper", "code:paper")
# A tool that writes what would break the rules if the policy had written it.
TOOLS = [
    Says(tool, "</think><answer>no</answer>")
    for tool in ("wiki_search", "web_search", "crawl_page", "code", "visual_inspector")
]


@functools.cache
def untrained() -> Model:
    """A policy that has learnt nothing, and likes closing tags and what forms are made of.

    Else nearly all of its rollouts would spend their budget in the first body.
    """
    roles = {role for name in protocol_names() for role in get_protocol(name).roles}
    tags = sorted(f"<{slash}{role}>" for role in roles for slash in ("", "/"))
    tokenizer = train_tokenizer(["score good fair poor ```py ```"] * 3, 320, tags=tags)
    config = ModelConfig("llama", 330, 32, 64, 2, 4, 2, 8, tie_embeddings=False)
    params = init_params(config, jax.random.key(0))
    liked = [f"</{role}>" for role in roles] + [*"1234`", "score", "Ċ"]
    embed, head = params["embed"]["embedding"], params["head"]["kernel"]
    likes = np.array(tokenizer.convert_tokens_to_ids(liked))
    # What all hidden states have in common, and what of it speaks for a token.
    params["embed"]["embedding"] = embed.at[:, 0].set(1.0)
    params["head"]["kernel"] = head.at[0, likes].set(0.6)
    return Model(config, params, tokenizer)


@functools.cache
def engine(shapes=SHAPES) -> Engine:
    model = untrained()
    constraint = constraint_for(BUDGET, model.tokenizer, model.config.vocab_size, NAMES)
    return Engine(model.params, model.config, shapes, eos_ids(model.tokenizer), constraint)


def requests(samples: int, **sampling) -> list[Request]:
    tokenizer = untrained().tokenizer
    return [
        Request(
            task=(task := Task(name, "Why?", name, (), "tests")),
            prompt=prompt_ids(tokenizer, task, Prompt("brief")),
            seed=1,
            prompt_id=number,
            samples=tuple(range(samples)),
            sampling=SamplingParams(**sampling),
        )
        for number, name in enumerate(NAMES)
    ]


def sample(wanted, config=BUDGET, on=None):
    with asyncio.Runner() as runner:
        groups = collect(runner, on or engine(), untrained().tokenizer, wanted, TOOLS, config)
    return [trajectory for group in groups for trajectory in group]


def broken_rules(trajectory) -> set[str]:
    """Kinds of violations, but for those of a text that the budget has cut off."""
    *spans, last = trajectory.segments
    if last.author is Author.POLICY and last.role is None:
        # It may have been cut in the middle of a tag.
        last = dataclasses.replace(last, text=re.sub(r"<\w*$", "", last.text))
    whole = dataclasses.replace(trajectory, segments=(*spans, last))
    kinds = {violation.kind for violation in trajectory_violations(whole)}
    cut = trajectory.stop_reason in (StopReason.LENGTH, StopReason.TURNS)
    return kinds - {"unclosed", "missing_answer"} if cut else kinds


@functools.cache
def sampled():
    return sample(requests(4, temperature=1.3))


def check_valid(trajectories):
    reasons = {t.stop_reason for t in trajectories}
    assert reasons <= {StopReason.ANSWER, StopReason.LENGTH, StopReason.TURNS}
    assert StopReason.ANSWER in reasons
    for trajectory in trajectories:
        assert broken_rules(trajectory) == set(), trajectory.text
        assert (trajectory.stop_reason is StopReason.ANSWER) == format_valid(trajectory)


@pytest.mark.slow
def test_a_row_that_ended_without_its_episode_is_an_error_and_no_wait_for_ever(monkeypatch):
    feed = Episode.feed

    def ignore(self, token, logp):
        feed(self, token, logp)

    monkeypatch.setattr(Episode, "feed", ignore)

    async def go():
        tokenizer = untrained().tokenizer
        stream = rollout(engine(), tokenizer, requests(2, temperature=1.3), TOOLS, BUDGET)
        async with asyncio.timeout(300), contextlib.aclosing(stream):
            async for _ in stream:
                pass

    with pytest.raises(RuntimeError, match=r"^slot \d+ has ended"):
        asyncio.run(go())


@pytest.mark.slow
def test_an_untrained_policy_obeys_every_protocol():
    check_valid(sampled())
    assert len({t.protocol for t in sampled() if t.tool_calls}) >= 4
    free = sample(requests(2, temperature=1.3), dataclasses.replace(BUDGET, constrain=False))
    assert {t.stop_reason for t in free} <= {StopReason.VIOLATION, StopReason.EOS}


@pytest.mark.slow
def test_a_thousand_untrained_rollouts_are_all_valid():
    groups = requests(170, temperature=1.3)  # a group for each protocol of this process
    trajectories = sample(groups)
    assert len(trajectories) == 170 * len(groups) >= 1020
    check_valid(trajectories)


@pytest.mark.slow
def test_greedy_and_truncated_sampling_obey_as_well():
    for sampling in ({"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 2}):
        for trajectory in sample(requests(1, **sampling)):
            assert broken_rules(trajectory) == set(), trajectory.text


def policy_tokens(trajectory):
    """(state of the constraint, token, log-probability, index) of each."""
    made = engine().constraint
    example = trajectory_example(trajectory, 0.0, made)
    for index in np.flatnonzero(example.mask):
        yield example.more["rule"][index], example.tokens[index], example.logp[index], index


def test_log_probabilities_are_those_among_the_allowed_tokens():
    model, made, compute = untrained(), engine().constraint, local_compute()

    @jax.jit
    def scores(ids):
        decoder = bind(model.config, model.params)
        hidden, _ = decoder(ids, jnp.arange(ids.shape[1])[None], compute)
        return decoder.logits(hidden, compute)[0]

    forced = 0
    for trajectory in sampled()[::3]:
        ids = np.zeros((1, SHAPES.max_length), np.int32)
        ids[0, : len(trajectory.tokens)] = trajectory.tokens
        logits = np.asarray(scores(ids), np.float64) / 1.3
        for state, token, logp, index in policy_tokens(trajectory):
            may = made.tables.next_state[state, made.tables.kind] != DEAD
            assert may[token]
            expected = logits[index - 1, token] - np.logaddexp.reduce(logits[index - 1, may])
            assert logp == pytest.approx(expected, abs=1e-4)
            forced += may.sum() == 1
            assert logp == 0 or may.sum() > 1
    assert forced > 10


def test_the_loss_sees_the_distribution_that_was_sampled():
    model, made = untrained(), engine().constraint
    batch = pack([trajectory_example(t, 1.0, made) for t in sampled()], SHAPES.max_length)
    score = jax.jit(
        functools.partial(token_logps, compute=local_compute(), temperature=1.3),
        static_argnames=("config",),
    )
    allowed = made.tables.allowed
    logps, entropies = score(model.params, config=model.config, batch=batch, allowed=allowed)
    assert np.abs((np.asarray(logps) - batch.logp) * batch.mask).max() < 1e-4
    assert batch.mask.sum() > 1000
    one = (np.bitwise_count(np.asarray(allowed)).sum(1) == 1)[batch.rule]
    assert (np.abs(entropies)[one] < 1e-6).all() and one.any()
    free, _ = score(model.params, config=model.config, batch=batch._replace(rule=None))
    assert np.abs((np.asarray(free) - batch.logp) * batch.mask).max() > 1
    with pytest.raises(ValueError, match=r"`allowed` .*`rule`"):
        score(model.params, config=model.config, batch=batch)


def test_a_slot_ends_with_the_token_that_closes_a_call_or_the_answer():
    made, fresh = engine().constraint, engine()
    prompt = requests(1)[2].prompt
    fresh.extend([(0, 0, prompt)])
    fresh.start(
        0,
        len(prompt),
        last_token=prompt[-1],
        limit=320,
        key=(0, 0, 3),
        sampling=SamplingParams(),
        protocol="mhqa",
    )
    fresh.set_active(0, True)
    states = []
    while fresh.any_active:
        chunk = fresh.decode()
        states += chunk.tokens[0, : chunk.count[0]].tolist()
    state = made.start["mhqa"]
    for token in states[:-1]:
        state = made.tables.next_state[state, made.tables.kind[token]]
        assert not made.tables.ends[state]
    state = made.tables.next_state[state, made.tables.kind[states[-1]]]
    assert made.tables.ends[state] and len(prompt) + len(states) < 320
    with pytest.raises(ValueError, match="slot 0 is constrained"):
        fresh.truncate(0, len(prompt) + 1, states[0])


def test_a_constrained_rollout_says_so_and_comes_out_again():
    chosen = [t for t in sampled() if t.protocol == "mhqa"]
    assert all(t.metadata["rollout"]["constrain"] for t in chosen)
    comparisons = replay(untrained(), [recording(t) for t in chosen])
    assert all(c.identical for c in comparisons)
    assert max(float(c.logp_gaps().max()) for c in comparisons) < 1e-5


def test_traces_from_before_the_option_are_read_as_unconstrained():
    (trajectory, *_) = sampled()
    budgets = {k: v for k, v in trajectory.metadata["rollout"].items() if k != "constrain"}
    old = dataclasses.replace(trajectory, metadata={**trajectory.metadata, "rollout": budgets})
    assert recording(trajectory).rollout.constrain and not recording(old).rollout.constrain


def test_a_constrained_rollout_needs_an_engine_with_the_constraint():
    model = untrained()
    bare = Engine(model.params, model.config, SHAPES, eos_ids(model.tokenizer))
    with pytest.raises(ValueError, match=r"^config\.constrain is set"):
        sample(requests(1), on=bare)


def test_one_program_serves_constrained_and_free_slots():
    sample(requests(1))  # compiles, if this is the first test of its process
    before = programs.decode_chunk._cache_size()
    sample(requests(1), dataclasses.replace(BUDGET, constrain=False))
    sample(requests(1, top_k=3))
    assert programs.decode_chunk._cache_size() == before
