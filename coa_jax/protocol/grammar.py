"""The texts that obey a protocol, as a finite automaton over bytes (paper §3.1).

A policy that writes only bytes that the automaton allows never breaks a rule of its protocol: any
allowed text can be continued to a trajectory without violations. The transitions come from
`automaton.advance` and `automaton.allowed_after`, the bodies from `body_languages`.

After a call the policy may write nothing until the environment has answered, and after the answer
nothing at all. Between segments at most a few blanks are allowed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from coa_jax.protocol.automaton import State, advance, allowed_after
from coa_jax.protocol.body_languages import BLANKS_BETWEEN, MAY_SHOW_TAGS, outcomes
from coa_jax.protocol.regex import (
    ANYTHING,
    NOTHING,
    Regex,
    byte_groups,
    containing,
    derivative,
    literal,
    union,
)
from coa_jax.protocol.spec import Protocol

DEAD = -1
"""No state: the byte is not allowed."""

OBSERVED = 256
"""The symbol that stands for an observation, beside the bytes 0 to 255."""


@dataclasses.dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """A deterministic automaton. Every state is reachable and leads to an answer.

    Attributes:
        transitions: int32 ``[S, 257]``, next state for each byte value, and for `OBSERVED` (the
            environment has answered); `DEAD` where the byte is not allowed. State 0 is the start.
        answered: bool ``[S]``, true for the states after a closed answer.
    """

    transitions: np.ndarray
    answered: np.ndarray


class _Open(NamedTuple):
    """The policy is writing: segments it may be in, each with the state after the segment."""

    segments: tuple[tuple[Regex, State], ...]


class _Closed(NamedTuple):
    """The policy waits for the environment, or has answered."""

    state: State


_Node = _Open | _Closed


def compile_protocol(protocol: Protocol) -> ByteAutomaton:
    """Builds the byte automaton of a protocol; takes about a second."""
    languages = _segment_languages(protocol)

    def start(state: State) -> _Node:
        if state.waiting or state.action == protocol.answer:
            return _Closed(state)
        found: dict[State, Regex] = {}
        for role in sorted(allowed_after(protocol, state)):
            for regex, body in languages[role]:
                target = advance(protocol, state, role, body)
                found[target] = found.get(target, NOTHING) | regex
        return _Open(tuple((BLANKS_BETWEEN + regex, target) for target, regex in found.items()))

    def follow(node: _Node) -> Iterator[tuple[list[int], _Node]]:
        if isinstance(node, _Closed):
            if node.state.waiting:
                answer = advance(protocol, node.state, protocol.observation, "")
                yield [OBSERVED], start(answer)
            return
        for group in byte_groups(regex for regex, _ in node.segments):
            after = [(derivative(regex, group[0]), target) for regex, target in node.segments]
            # A segment ends with its closing tag, and its body does not contain that tag.
            closed = next((target for regex, target in after if regex.nullable), None)
            live = tuple(pair for pair in after if pair[0] is not NOTHING)
            if closed is not None or live:
                yield group, _Open(live) if closed is None else start(closed)

    nodes, transitions = _explore(start(State()), follow)
    derivative.cache_clear()  # these derivatives are not needed again
    closed = np.array([isinstance(n, _Closed) and not n.state.waiting for n in nodes])
    return ByteAutomaton(*_minimise(*_trim(transitions, closed)))


def _segment_languages(protocol: Protocol) -> dict[str, list[tuple[Regex, str]]]:
    """Returns by role the languages of whole segments, each with a sample body (`outcomes`)."""
    tags = [f"<{slash}{role}>" for role in protocol.roles for slash in ("", "/")]
    languages = {}
    for role in protocol.roles:
        form, close, plain = protocol.form(role), f"</{role}>", ANYTHING
        if form in MAY_SHOW_TAGS:
            forbidden = [close] if role in protocol.verbatim else tags
            plain = ~containing(union(map(literal, forbidden)))
        languages[role] = [
            (literal(f"<{role}>") + (regex & plain) + literal(close), body)
            for regex, body in outcomes(form, protocol.pass_score)
        ]
    return languages


def _explore(
    start: _Node, follow: Callable[[_Node], Iterable[tuple[list[int], _Node]]]
) -> tuple[list[_Node], np.ndarray]:
    """Returns every reachable node, and the transitions as int32 ``[S, 257]``."""
    nodes, number = [start], {start: 0}
    rows = []
    for node in nodes:  # the loop appends to nodes
        row = np.full(OBSERVED + 1, DEAD, np.int32)
        for symbols, after in follow(node):
            if after not in number:
                number[after] = len(nodes)
                nodes.append(after)
            row[symbols] = number[after]
        rows.append(row)
    return nodes, np.stack(rows)


def _trim(transitions: np.ndarray, answered: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Removes states from which no answer is reachable."""
    live = answered
    while True:
        # Row -1 belongs to the dead state, which is never live.
        leads_on = np.append(live, False)[transitions].any(1) | live
        if (leads_on == live).all():
            break
        live = leads_on
    number = np.append(np.where(live, np.cumsum(live) - 1, DEAD), DEAD).astype(np.int32)
    return number[transitions[live]], answered[live]


def _minimise(transitions: np.ndarray, answered: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merges states that allow the same continuations (Moore 1956); the start remains state 0."""
    block, count = answered.astype(np.intp), 0
    columns = np.unique(transitions, axis=1)  # many bytes have equal columns
    while True:
        after = np.append(block, DEAD)[columns]
        rows = np.column_stack([block, after])
        _, first, block = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        if len(first) == count:
            break
        count = len(first)
    # Blocks are numbered by their first state, so that the start is 0.
    order = np.argsort(first)
    number = np.empty(count, np.int32)
    number[order] = np.arange(count, dtype=np.int32)
    chosen = first[order]
    return np.append(number[block], DEAD)[transitions[chosen]].astype(np.int32), answered[chosen]
