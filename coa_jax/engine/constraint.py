"""Tables that tell the decoding program which tokens a protocol allows, and where turns end.

A token is allowed in a state of the byte automaton (`protocol.grammar`) if the token's bytes have
transitions from that state, and if further tokens can continue from the resulting state. Most
tokens of a vocabulary share their transitions with many other tokens. The transition table
therefore has one column per kind of token, where a kind is all tokens with the same transitions,
and the set of allowed tokens has one bit per token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from coa_jax.errors import UserError
from coa_jax.protocol.grammar import DEAD, OBSERVED, ByteAutomaton

FREE = 0
"""The state in which every token is allowed, and in which a sequence stays after any token."""

_WORD = 32
_IDENTITY, _NOWHERE = 0, 1  # the transition functions that keep a state, and that forbid a token


class ConstraintTables(NamedTuple):
    """Tables that say which tokens the policy may write in which state of its protocol.

    The tables are NumPy arrays, or lie on a device. Two tokens are of the same kind if, in every
    state, the next state after either of them is the same.

    Attributes:
        allowed: uint32 ``[states, ceil(tokens / 32)]``, for each state one bit per token, which is
            1 if the token is allowed; the lowest bit of a word belongs to the word's first token.
            None if every token is allowed, and the tables only say where the policy must stop.
        next_state: int32 ``[states, kinds]``, the state that follows a state when a token of a kind
            is written; `DEAD` if the token is not allowed.
        kind: int32 ``[tokens]``, kind of each token.
        ends: bool ``[states]``, True for states in which the policy must not write a token, because
            an observation or the end of the trajectory follows.
    """

    allowed: Any
    next_state: Any
    kind: Any
    ends: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Constraint:
    """Limits the tokens that the policy may sample to those that its protocol allows.

    `watch_for_ends` makes constraints that allow every token, and only end the turns.

    Attributes:
        tables: the tables for decoding, on the host.
        start: maps the name of a protocol to the state before the first token that the policy
            writes.
        observed: int32 ``[states]``, state after an observation; `DEAD` for states in which no
            observation is expected.
    """

    tables: ConstraintTables
    start: Mapping[str, int]
    observed: np.ndarray

    @property
    def restricts(self) -> bool:
        """Whether some tokens are not allowed in some states."""
        return self.tables.allowed is not None

    def __str__(self) -> str:
        """Describes the constraint in one line."""
        (states, kinds), tokens = self.tables.next_state.shape, len(self.tables.kind)
        size = sum(table.nbytes for table in self.tables if table is not None) / 1e6
        return (
            f"{', '.join(self.start)}: {states} states, {tokens} tokens of {kinds} kinds, "
            f"{size:.1f} MB"
        )


def make_constraint(
    automata: Mapping[str, ByteAutomaton], tokens: Sequence[bytes], vocab_size: int
) -> Constraint:
    """Creates the constraint of a run from the automata of protocols and a vocabulary.

    Args:
        automata: automaton of each protocol, by name.
        tokens: bytes of each token; b"" for tokens that may never be written.
        vocab_size: number of columns of the logits; columns beyond ``tokens`` are never allowed.

    Raises:
        UserError: the vocabulary cannot spell a text that a protocol requires.
    """
    starts, symbols = _join(automata)
    tokens = [*tokens, *[b""] * (vocab_size - len(tokens))][:vocab_size]
    kind, after = _compose(symbols[:, :OBSERVED], tokens)
    observed = symbols[:-1, OBSERVED]
    ends = (symbols[:-1, :OBSERVED] == DEAD).all(1)
    after = _without_dead_ends(after, observed, ends)
    lost = [name for name, state in starts.items() if (after[state] == DEAD).all()]
    if lost:
        raise UserError(
            f"the vocabulary cannot spell the {lost[0]} protocol, because it lacks characters of "
            "its tags or forms: set constrain to False, or use another tokenizer"
        )
    tables = ConstraintTables(_pack(after != DEAD, kind), after, kind, ends)
    return Constraint(tables, starts, observed)


def watch_for_ends(
    automata: Mapping[str, ByteAutomaton], tokens: Sequence[bytes], vocab_size: int
) -> Constraint:
    """Creates a constraint that forbids no token, but stops decoding at the end of a turn.

    A turn ends at a closing tag of a tool or of the answer.

    Args:
        automata: automaton of each protocol's closing tags (`grammar.closing_tags`), by name.
        tokens: bytes of each token; b"" for tokens without text.
        vocab_size: number of columns of the logits; columns beyond ``tokens`` have no text.
    """
    starts, symbols = _join(automata)
    tokens = [*tokens, *[b""] * (vocab_size - len(tokens))][:vocab_size]
    kind, after = _compose(symbols[:, :OBSERVED], tokens, empty=_IDENTITY)
    ends = np.concatenate([[False], *(automaton.answered for automaton in automata.values())])
    return Constraint(ConstraintTables(None, after, kind, ends), starts, symbols[:-1, OBSERVED])


def _join(automata: Mapping[str, ByteAutomaton]) -> tuple[dict[str, int], np.ndarray]:
    """Returns the first state of each automaton, and the transitions of all automata in one table.

    The state `FREE` is the first row of the table, the state `DEAD` the last row.
    """
    starts: dict[str, int] = {}
    blocks = [np.full((1, OBSERVED + 1), FREE, np.int32)]
    count = 1
    for name, automaton in automata.items():
        starts[name] = count
        table = automaton.transitions
        blocks.append(np.where(table == DEAD, DEAD, table + count).astype(np.int32))
        count += len(table)
    return starts, np.concatenate([*blocks, np.full((1, OBSERVED + 1), DEAD, np.int32)])


def _compose(
    transitions: np.ndarray, tokens: Sequence[bytes], empty: int = _NOWHERE
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the kind of each token, and the next state for each state and kind.

    All tokens are read in parallel, byte by byte. After each byte, tokens with the same transitions
    from every state are merged, so few transition functions are computed.

    Args:
        transitions: int32 ``[states + 1, 256]``, next state for each state and byte; the last is
            `DEAD`.
        tokens: the bytes of each token.
        empty: what a token without bytes does: `_IDENTITY` or `_NOWHERE`.

    Returns:
        The kinds, int32 ``[tokens]``, and the next states, int32 ``[states, kinds]``.
    """
    size = np.array([len(token) for token in tokens])
    width = max(int(size.max(initial=0)), 1)
    text = np.frombuffer(b"".join(t.ljust(width, b"\0") for t in tokens), np.uint8)
    text = text.reshape(len(tokens), width)
    identity = np.append(np.arange(len(transitions) - 1, dtype=np.int32), DEAD)
    nowhere = np.append(np.int32(FREE), np.full(len(identity) - 1, DEAD, np.int32))
    functions = [identity, nowhere]
    number = {function.tobytes(): index for index, function in enumerate(functions)}
    kind = np.zeros(len(tokens), np.int64)
    columns = np.ascontiguousarray(transitions.T)
    for at in range(width):
        # A prefix without transitions has no transitions with further bytes either.
        left = np.flatnonzero((size > at) & (kind != _NOWHERE))
        pairs, inverse = np.unique(kind[left] * 256 + text[left, at], return_inverse=True)
        composed = np.empty(len(pairs), np.int64)
        for index, pair in enumerate(pairs.tolist()):
            function = columns[pair % 256][functions[pair // 256]]
            composed[index] = number.setdefault(function.tobytes(), len(functions))
            if composed[index] == len(functions):
                functions.append(function)
        kind[left] = composed[inverse]
    kind[size == 0] = empty
    used, kind = np.unique(kind, return_inverse=True)
    return kind.astype(np.int32), np.stack([functions[i][:-1] for i in used], axis=1)


def _without_dead_ends(after: np.ndarray, observed: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Forbids transitions to states that bytes, but no further tokens, could continue.

    The answer must remain reachable: the loop grows the set of states from which the answer can be
    reached.
    """
    answered = ends & (observed == DEAD)
    live = answered.copy()
    live[FREE] = True
    while True:
        # The appended entry belongs to `DEAD`.
        reach = np.append(live, False)
        leads_on = reach[after].any(1) | reach[observed] | live
        if (leads_on == live).all():
            return np.where(reach[after], after, DEAD).astype(np.int32)
        live = leads_on


def _pack(allowed: np.ndarray, kind: np.ndarray) -> np.ndarray:
    """Packs ``allowed[:, kind]`` into bits, uint32 ``[states, ceil(tokens / 32)]``."""
    words = -(-len(kind) // _WORD)
    packed = np.zeros((len(allowed), words), np.uint32)
    for state, row in enumerate(allowed):
        bits = np.packbits(row[kind], bitorder="little")
        packed[state] = np.pad(bits, (0, 4 * words - len(bits))).view("<u4")
    return packed


def allowed_tokens(allowed: jax.Array, state: jax.Array, vocab_size: int) -> jax.Array:
    """Returns whether each token is allowed in each of the given states.

    Args:
        allowed: the table `ConstraintTables.allowed`.
        state: states of the constraint, int32 of any shape.
        vocab_size: number of tokens.

    Returns:
        bool ``[..., vocab_size]``, where ``...`` is the shape of ``state``.
    """
    words = allowed[state][..., None]
    bits = words >> jnp.arange(_WORD, dtype=jnp.uint32) & 1
    return bits.reshape(*state.shape, -1)[..., :vocab_size].astype(bool)


def token_states(
    constraint: Constraint, start: int, tokens: Sequence[int], written: Sequence[bool]
) -> np.ndarray:
    """Returns the state of the constraint in which each token was sampled, int32 ``[tokens]``.

    Args:
        constraint: constraint of the run.
        start: state before the first token that the policy wrote.
        tokens: ids of the trajectory's tokens.
        written: for each token, whether the policy wrote it; all other tokens get the state `FREE`.

    Raises:
        ValueError: a token of the policy is not allowed at its position.
    """
    states, tables = np.full(len(tokens), FREE, np.int32), constraint.tables
    state = start
    for index, (token, by_policy) in enumerate(zip(tokens, written, strict=True)):
        if not by_policy:
            state = int(constraint.observed[state]) if tables.ends[state] else state
            continue
        states[index] = state
        state = int(tables.next_state[state, tables.kind[token]])
        if state == DEAD:
            raise ValueError(f"token {index} is {token}, which its protocol does not allow there")
    return states
