"""Compiles a protocol to a finite automaton over bytes, for constrained decoding.

The automaton accepts texts that obey the protocol. A policy that writes only the bytes that the
automaton allows never violates a rule, because every allowed text can be continued to a complete
trajectory without violations. The order of segments comes from `automaton.advance` and
`automaton.allowed_after`, and the bodies of segments come from `body_languages`.

After a tool call no byte is allowed until the environment has answered. After the answer no byte is
allowed at all. Between segments a few spaces and line ends are allowed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np

from coa_jax.protocol.automaton import State, advance, allowed_after
from coa_jax.protocol.body_languages import BLANKS_BETWEEN, MAY_SHOW_TAGS, outcomes
from coa_jax.protocol.formats import Protocol
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

DEAD = -1
"""Entry of the transition table that means that the byte is not allowed."""

OBSERVED = 256
"""The symbol that stands for an observation, in addition to the bytes 0 to 255."""


@dataclasses.dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """A deterministic finite automaton over bytes.

    State 0 is the start. Every state can be reached from the start, and an answer can be reached
    from every state.

    Attributes:
        transitions: int32 of shape ``[states, 257]``, the next state for each byte value from 0 to
            255, and for the symbol `OBSERVED` (256), which stands for a whole observation. The
            value `DEAD` means that the byte or symbol is not allowed.
        answered: bool of shape ``[states]``, True for the states after a closed answer; in
            `closing_tags` also for the states after a closed tool call.
    """

    transitions: np.ndarray
    answered: np.ndarray


class _Open(NamedTuple):
    """A node in which the policy is writing.

    Attributes:
        segments: (rest of a segment that may follow, state of the protocol after the segment).
    """

    segments: tuple[tuple[Regex, State], ...]


class _Closed(NamedTuple):
    """A node in which the policy waits for the environment, or has answered."""

    state: State


_Node = _Open | _Closed
_Found = TypeVar("_Found", bound=Hashable)


def compile_protocol(protocol: Protocol) -> ByteAutomaton:
    """Builds the automaton of the byte strings that obey a protocol, for constrained decoding.

    The function takes about a second.
    """
    languages = _segment_languages(protocol)

    def start(state: State) -> _Node:
        if state.waiting or state.action == protocol.answer:
            return _Closed(state)
        targets: dict[State, Regex] = {}
        for role in sorted(allowed_after(protocol, state)):
            for regex, body in languages[role]:
                target = advance(protocol, state, role, body)
                targets[target] = targets.get(target, NOTHING) | regex
        return _Open(tuple((BLANKS_BETWEEN + regex, target) for target, regex in targets.items()))

    def follow(node: _Node) -> Iterator[tuple[list[int], _Node]]:
        if isinstance(node, _Closed):
            if node.state.waiting:
                answer = advance(protocol, node.state, protocol.observation, "")
                yield [OBSERVED], start(answer)
            return
        for group in byte_groups(regex for regex, _ in node.segments):
            after = [(derivative(regex, group[0]), target) for regex, target in node.segments]
            # A segment ends at the first closing tag, because its body cannot contain this tag.
            closed = next((target for regex, target in after if regex.nullable), None)
            live = tuple(pair for pair in after if pair[0] is not NOTHING)
            if closed is not None or live:
                yield group, _Open(live) if closed is None else start(closed)

    nodes, transitions = _explore(start(State()), follow)
    derivative.cache_clear()  # frees memory, because the derivatives are not needed again
    closed = np.array([isinstance(n, _Closed) and not n.state.waiting for n in nodes])
    return ByteAutomaton(*_minimise(*_trim(transitions, closed)))


class _Place(NamedTuple):
    """A state of the automaton of closing tags, which follows `protocol.parser.Parser`.

    Attributes:
        role: name of the open tag; "" outside tags.
        tag: the part of a tag that has been read.
        ended: whether a tool call or the answer has been closed.
    """

    role: str = ""
    tag: str = ""
    ended: bool = False


def closing_tags(protocol: Protocol) -> ByteAutomaton:
    """Returns an automaton that allows every text, and detects the tags at which decoding stops.

    ``answered`` is True after the closing tag of a tool or of the answer (`Protocol.stops`). It
    remains True after further bytes, because the token that closes the tag may have more bytes, and
    becomes False after an observation.
    """

    def read(place: _Place, byte: int) -> _Place:
        text = place.tag + chr(byte)
        for role in (place.role,) if place.role else protocol.roles:
            tag = f"</{role}>" if place.role else f"<{role}>"
            if text == tag:
                return _Place("" if place.role else role, "", place.ended or tag in protocol.stops)
            if tag.startswith(text):
                return place._replace(tag=text)
        return place._replace(tag="<" if text.endswith("<") else "")

    in_tags = sorted({ord(letter) for role in protocol.roles for letter in f"</{role}>"})
    others = sorted({*range(OBSERVED)} - {*in_tags})  # these bytes lead to the same place

    def follow(place: _Place) -> Iterator[tuple[list[int], _Place]]:
        yield others, read(place, others[0])
        for byte in in_tags:
            yield [byte], read(place, byte)
        # Without a closing tag, the observation answers a whole turn, after which no tag is open.
        yield [OBSERVED], _Place(place.role) if place.ended else _Place()

    places, transitions = _explore(_Place(), follow)
    return ByteAutomaton(transitions, np.array([place.ended for place in places]))


def _segment_languages(protocol: Protocol) -> dict[str, list[tuple[Regex, str]]]:
    """Returns, for each role, the languages of whole segments with sample bodies (`outcomes`)."""
    tags = [f"<{slash}{role}>" for role in protocol.roles for slash in ("", "/")]
    languages = {}
    for role in protocol.roles:
        form, close, plain = protocol.form_of(role), f"</{role}>", ANYTHING
        if form in MAY_SHOW_TAGS:
            forbidden = [close] if role in protocol.verbatim else tags
            plain = ~containing(union(map(literal, forbidden)))
        languages[role] = [
            (literal(f"<{role}>") + (regex & plain) + literal(close), body)
            for regex, body in outcomes(form, protocol.pass_score)
        ]
    return languages


def _explore(
    start: _Found, follow: Callable[[_Found], Iterable[tuple[list[int], _Found]]]
) -> tuple[list[_Found], np.ndarray]:
    """Returns (all nodes that can be reached, transitions as int32 of shape ``[S, 257]``)."""
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
    """Removes the states from which no answer can be reached."""
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
    """Merges states with the same continuations (Moore 1956). The start remains state 0."""
    block, count = answered.astype(np.intp), 0
    columns = np.unique(transitions, axis=1)  # saves time, because many bytes have equal columns
    while True:
        after = np.append(block, DEAD)[columns]
        rows = np.column_stack([block, after])
        _, first, block = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        if len(first) == count:
            break
        count = len(first)
    # Merged states are numbered in the order of their first state, so that the start is 0.
    order = np.argsort(first)
    number = np.empty(count, np.int32)
    number[order] = np.arange(count, dtype=np.int32)
    chosen = first[order]
    return np.append(number[block], DEAD)[transitions[chosen]].astype(np.int32), answered[chosen]
