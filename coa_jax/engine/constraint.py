"""Which tokens a protocol allows next, as tables that the decode program reads.

A token is allowed in a state of the byte automaton (`protocol.grammar`) if its bytes lead on from
there, and if some tokens lead on from where they end.  Most tokens of a vocabulary do the same
thing in every state, so that the tables need a column for each kind of token only, and one bit a
token to say whether it is allowed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from coa_jax.errors import UserError
from coa_jax.protocol.grammar import DEAD, OBSERVED, ByteAutomaton

FREE = 0
"""The state in which every token is allowed, and which none leaves."""

_WORD = 32


class ConstraintTables(NamedTuple):
    """What the programs read, for S states, V tokens of K kinds.

    Attributes:
        allowed: uint32 ``[S, ceil(V / 32)]``, one bit a token, the lowest first.
        next_state: int32 ``[S, K]``, `DEAD` for none.
        kind: int32 ``[V]``, kind of each token.
        ends: bool ``[S]``, whether the policy may write nothing there.
    """

    allowed: jax.Array
    next_state: jax.Array
    kind: jax.Array
    ends: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Constraint:
    """The protocols of a run over one vocabulary.

    Attributes:
        tables: on the default device.
        start: protocol -> state before the first token.
        next_state, kind, ends: as in the tables, on the host.
        observed: int32 ``[S]``, state after an observation, `DEAD` where none is waited for.
    """

    tables: ConstraintTables
    start: Mapping[str, int]
    next_state: np.ndarray
    kind: np.ndarray
    ends: np.ndarray
    observed: np.ndarray

    def __str__(self) -> str:
        """One line."""
        states, kinds = self.next_state.shape
        size = sum(table.nbytes for table in self.tables) / 1e6
        return (
            f"{', '.join(self.start)}: {states} states, {len(self.kind)} tokens of {kinds} kinds, "
            f"{size:.1f} MB"
        )


def make_constraint(
    automata: Mapping[str, ByteAutomaton], tokens: Sequence[bytes], vocab_size: int
) -> Constraint:
    """Puts the automata of some protocols and a vocabulary together.

    Args:
        automata: by name of the protocol.
        tokens: bytes of each token; empty for those that may never be written.
        vocab_size: V, columns of the logits; those beyond ``tokens`` are never allowed.

    Raises:
        UserError: the vocabulary cannot spell what a protocol asks for.
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
            "its tags or forms: set constrain to False, or take another tokenizer"
        )
    tables = ConstraintTables(
        allowed=jnp.asarray(_pack(after != DEAD, kind)),
        next_state=jnp.asarray(after),
        kind=jnp.asarray(kind),
        ends=jnp.asarray(ends),
    )
    return Constraint(
        tables=tables,
        start=starts,
        next_state=after,
        kind=kind,
        ends=ends,
        observed=observed,
    )


def _join(automata: Mapping[str, ByteAutomaton]) -> tuple[dict[str, int], np.ndarray]:
    """First state of each, and transitions of all, with the free state first, the dead one last."""
    starts: dict[str, int] = {}
    blocks = [np.full((1, OBSERVED + 1), FREE, np.int32)]
    count = 1
    for name, automaton in automata.items():
        starts[name] = count
        table = automaton.transitions
        blocks.append(np.where(table == DEAD, DEAD, table + count).astype(np.int32))
        count += len(table)
    return starts, np.concatenate([*blocks, np.full((1, OBSERVED + 1), DEAD, np.int32)])


def _compose(transitions: np.ndarray, tokens: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Kind of each token, and where each kind leads from each state.

    Tokens are read byte by byte, all at a time.  After each byte, those that have led to the same
    place from every state are one, so that few functions of the states are ever computed.

    Args:
        transitions: int32 ``[S + 1, 256]``; the last state is the dead one.
        tokens: V byte strings.

    Returns:
        int32 ``[V]`` and int32 ``[S, K]``.
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
    for place in range(width):
        # What leads nowhere so far leads nowhere.
        left = np.flatnonzero((size > place) & (kind != 1))
        pairs, inverse = np.unique(kind[left] * 256 + text[left, place], return_inverse=True)
        composed = np.empty(len(pairs), np.int64)
        for index, pair in enumerate(pairs.tolist()):
            function = columns[pair % 256][functions[pair // 256]]
            composed[index] = number.setdefault(function.tobytes(), len(functions))
            if composed[index] == len(functions):
                functions.append(function)
        kind[left] = composed[inverse]
    kind[size == 0] = 1
    used, kind = np.unique(kind, return_inverse=True)
    return kind.astype(np.int32), np.stack([functions[i][:-1] for i in used], axis=1)


def _without_dead_ends(after: np.ndarray, observed: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Forbids what no further tokens can follow, though bytes could.

    An answer has to stay in reach: the loop grows the set of the states from which it is.
    """
    answered = ends & (observed == DEAD)
    live = answered.copy()
    live[FREE] = True
    while True:
        # The appended entry is that of `DEAD`.
        reach = np.append(live, False)
        leads_on = reach[after].any(1) | reach[observed] | live
        if (leads_on == live).all():
            return np.where(reach[after], after, DEAD).astype(np.int32)
        live = leads_on


def _pack(allowed: np.ndarray, kind: np.ndarray) -> np.ndarray:
    """Bits of ``allowed[:, kind]``, uint32 ``[S, ceil(V / 32)]``."""
    words = -(-len(kind) // _WORD)
    packed = np.zeros((len(allowed), words), np.uint32)
    for state, row in enumerate(allowed):
        bits = np.packbits(row[kind], bitorder="little")
        packed[state] = np.pad(bits, (0, 4 * words - len(bits))).view("<u4")
    return packed


def allowed_tokens(allowed: jax.Array, state: jax.Array, vocab_size: int) -> jax.Array:
    """Whether each token is allowed: bool ``[..., V]`` for states int32 ``[...]``.

    Args:
        allowed: see `ConstraintTables`.
        state: states.
        vocab_size: V.
    """
    words = allowed[state][..., None]
    bits = words >> jnp.arange(_WORD, dtype=jnp.uint32) & 1
    return bits.reshape(*state.shape, -1)[..., :vocab_size].astype(bool)


def token_states(
    constraint: Constraint, start: int, tokens: Sequence[int], written: Sequence[bool]
) -> np.ndarray:
    """The state under which each token of a trajectory was sampled, int32 ``[T]``.

    Args:
        constraint: under which it was.
        start: state before the first token that the policy wrote.
        tokens: ids.
        written: whether the policy wrote the token; for others the state is `FREE`.

    Raises:
        ValueError: a token of the policy is not allowed where it stands.
    """
    states = np.full(len(tokens), FREE, np.int32)
    state = start
    for place, (token, by_policy) in enumerate(zip(tokens, written, strict=True)):
        if not by_policy:
            state = int(constraint.observed[state]) if constraint.ends[state] else state
            continue
        states[place] = state
        state = int(constraint.next_state[state, constraint.kind[token]])
        if state == DEAD:
            raise ValueError(f"token {place} is {token}, which its protocol does not allow there")
    return states
