"""The constraint tables agree, for every token, with reading its bytes one by one."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa_jax.engine.constraint import FREE, allowed_tokens, make_constraint, token_states
from coa_jax.errors import UserError
from coa_jax.protocol import get_protocol
from coa_jax.protocol.grammar import DEAD, OBSERVED, compile_protocol

CHARACTERS = [bytes([byte]) for byte in range(256)]


@functools.cache
def automaton(name):
    return compile_protocol(get_protocol(name))


def read(built, state, token):
    for byte in token:
        state = int(built.transitions[state, byte]) if state != DEAD else DEAD
    return state


def expected_allowed(built, tokens):
    """By state the tokens that can be part of a way to the answer, with sets and loops."""
    steps = {
        state: {i: to for i, t in enumerate(tokens) if t and (to := read(built, state, t)) != DEAD}
        for state in range(len(built.transitions))
    }
    live = set(np.flatnonzero(built.answered).tolist())
    while True:
        more = {
            state
            for state, found in steps.items()
            if not live.isdisjoint({*found.values(), int(built.transitions[state, OBSERVED])})
        }
        if more <= live:
            return {s: {i: to for i, to in f.items() if to in live} for s, f in steps.items()}
        live |= more


PIECES = [
    *(
        b"",
        b"think",
        b"</",
        b">\n",
        b"><",
        b">x",
        b"</think>",
        b"</think>\n<plan>",
        b"</wiki_search>",
    ),
    *(b"an", b" a", b"a b", b"\xe2\x80\x83", b"\n\n\n", b"\n\n\n\n\n", b"search>", b"sw"),
]


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), max_size=12), st.sets(st.sampled_from(b"<>/thinkplsw_ \n"))
)
def test_the_tables_equal_a_walk_over_the_bytes_of_every_token(pieces, missing):
    tokens = [*pieces, *(c for c in CHARACTERS if c[0] not in missing)]
    built = automaton("mhqa")
    expected = expected_allowed(built, tokens)
    if not expected[0]:
        with pytest.raises(UserError, match=r" mhqa .* constrain "):
            make_constraint({"mhqa": built}, tokens, 300)
        return
    made = make_constraint({"mhqa": built}, tokens, 300)
    first = made.start["mhqa"]
    states = jnp.arange(made.tables.next_state.shape[0])
    allowed = np.asarray(allowed_tokens(made.tables.allowed, states, 300))
    assert allowed[FREE].all()
    for state, found in expected.items():
        assert np.flatnonzero(allowed[first + state]).tolist() == sorted(found)
        after = made.tables.next_state[first + state, made.tables.kind]
        assert {i: after[i] - first for i in found} == found
        assert (np.delete(after, list(found)) == DEAD).all()


@pytest.mark.slow
def test_every_state_that_can_be_reached_has_an_allowed_token_or_ends_a_turn():
    # Without v no call of the visual inspector can be finished, without a newline no program.
    tokens = [c for c in CHARACTERS if c not in (b"v", b"\n")] + [b"<vi", b"\n\n\n\n\n"]
    made = make_constraint({"universal": automaton("universal")}, tokens, len(tokens))
    reached, todo = set(), [made.start["universal"]]
    while todo:
        state = todo.pop()
        if state in reached or state == DEAD:
            continue
        reached.add(state)
        after = made.tables.next_state[state]
        assert made.tables.ends[state] != (after != DEAD).any()
        todo += [*np.unique(after), made.observed[state]]
    text = b"<think>a</think><plan>a</plan><think>a</think><"
    state = made.start["universal"]
    for byte in text:
        state = made.tables.next_state[state, made.tables.kind[tokens.index(bytes([byte]))]]
    may = {
        tokens[i] for i in np.flatnonzero(made.tables.next_state[state, made.tables.kind] != DEAD)
    }
    assert may == {b"w", b"c", b"s"}  # web_search, crawl_page, suggested_answer


def test_several_protocols_stand_side_by_side():
    names = ("mhqa", "code")
    both = make_constraint({n: automaton(n) for n in names}, CHARACTERS, 256)
    for name in names:
        alone = make_constraint({name: automaton(name)}, CHARACTERS, 256)
        shift = both.start[name] - alone.start[name]
        own = slice(both.start[name], both.start[name] + len(automaton(name).transitions))
        after = both.tables.next_state[own][:, both.tables.kind]
        expected = alone.tables.next_state[1:][:, alone.tables.kind]
        assert (after == np.where(expected == DEAD, DEAD, expected + shift)).all()


def test_states_of_a_trajectory_are_recomputed_from_its_tokens():
    made = make_constraint({"mhqa": automaton("mhqa")}, CHARACTERS, 256)
    turn = b"<think>a</think><wiki_search>b</wiki_search>"
    tokens = [7, 8, *turn, 60, 61, 62, *b"<think>"]
    written = [False] * 2 + [True] * len(turn) + [False] * 3 + [True] * 7
    states = token_states(made, made.start["mhqa"], tokens, written)
    assert states[2] == made.start["mhqa"]
    assert (states[[0, 1, -8, -9, -10]] == FREE).all()
    closed = made.tables.next_state[states[2 + len(turn) - 1], made.tables.kind[ord(">")]]
    assert made.tables.ends[closed] and states[-7] == made.observed[closed]
    with pytest.raises(ValueError, match="token 3 is 98"):
        token_states(made, made.start["mhqa"], list(b"<thb"), [True] * 4)


def test_a_vocabulary_that_lacks_letters_of_a_tag_is_refused():
    tokens = [c for c in CHARACTERS if c != b"k"]
    with pytest.raises(UserError, match=r" mhqa .* constrain "):
        make_constraint({"mhqa": automaton("mhqa")}, tokens, 256)
