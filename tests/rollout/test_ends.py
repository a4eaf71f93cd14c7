"""A slot stops at the token that closes a tool call or the answer, and nothing else changes."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from coa_jax.data.trajectory import StopReason, ToolCall
from coa_jax.engine.config import SamplingParams
from coa_jax.engine.constraint import watch_for_ends
from coa_jax.engine.engine import Engine
from coa_jax.model.tokenizer import eos_ids
from coa_jax.protocol import get_protocol
from coa_jax.protocol.grammar import closing_tags
from coa_jax.rollout.constrain import constraint_or_ends
from coa_jax.rollout.detokenize import TokenTable
from coa_jax.rollout.episode import Episode
from tests import tiny_policy
from tests.rollout.small_loop import BUDGET, SHAPES, engine, requests, run

PIECES = (
    *(b"<", b">", b"</", b"<think>", b"</think>", b"<answer>", b"</answer>", b"think", b"a"),
    *(b"<wiki_search>", b"</wiki_search>", b"search>\n", b"></", b"><think>", b"</wiki_"),
    *(
        b"<code>",
        b"</code><plan>x",
        b"</plan",
        b">",
        b"\xc3",
        b"\xa9",
        b"<<",
        b"</answer>\xe2",
        b"<foo>",
        b"",
    ),
)
PROTOCOL = get_protocol("generalist")


class Pieces(TokenTable):
    def __init__(self):
        self._bytes = list(PIECES)


@functools.cache
def watch():
    return watch_for_ends({PROTOCOL.name: closing_tags(PROTOCOL)}, PIECES, len(PIECES) + 3)


def begun():
    return Episode(
        task_id="", sample_id=0, question="", protocol=PROTOCOL, prompt=(1,), table=Pieces(),
        end_tokens=frozenset(),
    )  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=60))
def test_a_token_ends_a_turn_where_the_parser_of_the_episode_finds_a_call_or_the_answer(tokens):
    made, episode = watch(), begun()
    state = made.start[PROTOCOL.name]
    for token in tokens:
        event = episode.feed(token, 0.0)
        state = made.tables.next_state[state, made.tables.kind[token]]
        assert made.tables.ends[state] == (event is not None)
        if event is StopReason.ANSWER:
            return
        if event is not None:
            call = ToolCall(event.tool, event.arguments, "seen", "ok", True, 0.0, 0.0)
            episode.observe((1,), "seen", call)
            state = made.observed[state]


def test_a_token_without_text_changes_nothing():
    made = watch()
    states = np.arange(len(made.tables.ends))
    for token in range(PIECES.index(b""), len(PIECES) + 3):
        assert (made.tables.next_state[:, made.tables.kind[token]] == states).all()


@functools.cache
def stopping(chunk):
    model = tiny_policy.policy()
    ends = constraint_or_ends(
        BUDGET, model.tokenizer, model.config.vocab_size, [tiny_policy.PROTOCOL]
    )
    shapes = dataclasses.replace(SHAPES, chunk=chunk)
    return Engine(model.params, model.config, shapes, eos_ids(model.tokenizer), ends)


def thrown_away(on):
    """(trajectories, tokens that were sampled beyond an end, tool calls)"""
    on.restart()
    groups = run(requests(8, SamplingParams(1.2)), on=on)
    found = [t for group in groups for t in group]
    kept = sum(t.num_policy_tokens for t in found)
    return found, on.meter.decoded_tokens - kept, sum(len(t.tool_calls) for t in found)


def test_no_token_is_sampled_beyond_an_end_and_the_trajectories_are_the_same():
    for chunk in (8, 32):
        before, lost, calls = thrown_away(engine(chunk=chunk))
        after, still_lost, again = thrown_away(stopping(chunk))
        print(f"chunk {chunk}: {calls} calls, thrown away {lost} tokens before, {still_lost} now")
        assert calls == again > 15
        assert lost > 2 * calls
        assert still_lost == 0
        for one, other in zip(before, after, strict=True):
            assert one.tokens.tobytes() == other.tokens.tobytes()
            assert one.logp.tobytes() == other.logp.tobytes()
            assert (one.text, one.stop_reason) == (other.text, other.stop_reason)
