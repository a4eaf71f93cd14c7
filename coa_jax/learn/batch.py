"""From trajectories and distilled records to packed arrays, by token ids and authors alone."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from coa_jax.engine.constraint import FREE, Constraint, token_states
from coa_jax.errors import UserError
from coa_jax.model.tokenizer import chat_ids, encode_plain, end_of_turn_id
from coa_jax.protocol import get_protocol, render_prompt
from coa_jax.trajectory import Author, DistilledRecord, Trajectory


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
    """One sequence to learn from.

    Attributes:
        tokens: int32 ``[T]``.
        mask: float32 ``[T]``, 1 where the policy wrote the token.
        logp: float32 ``[T]``, log-probability under which it was sampled; 0 elsewhere.
        advantage: float32 ``[T]``.
        rule: int32 ``[T]``, state of the constraint under which it was sampled, `FREE` where it was
            not; None for sequences sampled without a constraint.
    """

    tokens: np.ndarray
    mask: np.ndarray
    logp: np.ndarray
    advantage: np.ndarray
    rule: np.ndarray | None = None


class Batch(NamedTuple):
    """Packed rows, R rows of T tokens.  Arrays of index t describe token t.

    Attributes:
        tokens: int32 ``[R, T]``.
        positions: int32 ``[R, T]``, from 0 in each sequence.
        segment_ids: int32 ``[R, T]``, from 1; 0 is padding.
        mask: float32 ``[R, T]``, 1 where the token has a loss.
        logp: float32 ``[R, T]``, sampling log-probabilities.
        advantage: float32 ``[R, T]``.
        rule: int32 ``[R, T]``, see `Example`; None where nothing is constrained.
        weight: float32 ``[R, T]``, of the tokens' losses, see `learn.normalise`; None for 1.
        old_logp: float32 ``[R, T]``, log-probabilities of the trainer before a step's updates.
        ref_logp: float32 ``[R, T]``, log-probabilities of the policy that the run began with.
        value: float32 ``[R, T]``, the critic's values before a step's updates.
        returns: float32 ``[R, T]``, what it learns.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray
    mask: np.ndarray
    logp: np.ndarray
    advantage: np.ndarray
    rule: np.ndarray | None = None
    weight: jax.Array | np.ndarray | None = None
    old_logp: jax.Array | np.ndarray | None = None
    ref_logp: jax.Array | np.ndarray | None = None
    value: jax.Array | np.ndarray | None = None
    returns: jax.Array | np.ndarray | None = None


def prompt_ids(tokenizer: Any, protocol: str, question: str, style: str) -> tuple[int, ...]:
    """Ids of a task's prompt: one user message and the opening of the assistant's turn."""
    text = render_prompt(get_protocol(protocol), question, style=style)
    return tuple(chat_ids(tokenizer, text))


def record_example(tokenizer: Any, record: DistilledRecord, style: str) -> Example:
    """Tokenises a distilled record part by part; the policy's parts carry the loss.

    Parts of the environment are split as the agent loop encodes them, so that training sees the
    ids that a rollout produces.  The end of the turn is learned after the last part.
    """
    prompt = prompt_ids(tokenizer, record.protocol, record.question, style)
    tokens, mask = list(prompt), [0.0] * len(prompt)
    observation = get_protocol(record.protocol).observation
    for author, text in record.parts:
        if author == "policy":
            ids = encode_plain(tokenizer, text)
        else:
            ids = environment_ids(tokenizer, observation, text)
        tokens += ids
        mask += [float(author == "policy")] * len(ids)
    tokens.append(end_of_turn_id(tokenizer))
    mask.append(1.0)
    zeros = np.zeros(len(tokens), np.float32)
    return Example(np.asarray(tokens, np.int32), np.asarray(mask, np.float32), zeros, zeros)


def environment_ids(tokenizer: Any, observation: str, text: str) -> list[int]:
    """Ids of an observation in its surface form: head, body and tail, each encoded alone."""
    head, tail = f"\n<{observation}>\n", f"\n</{observation}>\n\n"
    if not text.startswith(head) or not text.endswith(tail):
        return encode_plain(tokenizer, text)
    body = text[len(head) : len(text) - len(tail)]
    parts = (head, body, tail)
    return [token for part in parts for token in encode_plain(tokenizer, part)]


def trajectory_example(
    trajectory: Trajectory, advantage: float, constraint: Constraint | None = None
) -> Example:
    """A sampled trajectory with one advantage for all of its policy tokens.

    What follows the last policy token has no loss and is left out.

    Args:
        trajectory: with its log-probabilities.
        advantage: of the whole.
        constraint: under which it was sampled.

    Raises:
        ValueError: it was not sampled under that constraint.
    """
    written = np.flatnonzero(trajectory.author == Author.POLICY)
    end = int(written[-1]) + 1 if written.size else 0
    tokens, by_policy = trajectory.tokens[:end], trajectory.author[:end] == Author.POLICY
    mask = by_policy.astype(np.float32)
    rule = None
    if constraint is not None:
        start = constraint.start[trajectory.protocol]
        rule = token_states(constraint, start, tokens.tolist(), by_policy.tolist())
    return Example(
        tokens,
        mask,
        trajectory.logp[:end].astype(np.float32),
        mask * np.float32(advantage),
        rule,
    )


def pack(examples: Sequence[Example], length: int) -> Batch:
    """Puts sequences into rows of ``length``: the longest first, each into the first row with room.

    The result depends on the examples and their order only.  All were sampled under a constraint,
    or none was.

    Raises:
        UserError: a sequence is longer than a row.
    """
    rows: list[list[Example]] = []
    room: list[int] = []
    for example in sorted(examples, key=lambda e: -len(e.tokens)):
        size = len(example.tokens)
        if size > length:
            raise UserError(
                f"a sequence has {size} tokens and the batch rows {length}: raise row_length or "
                "drop long sequences"
            )
        row = next((i for i, left in enumerate(room) if left >= size), None)
        if row is None:
            rows.append([])
            room.append(length)
            row = len(rows) - 1
        rows[row].append(example)
        room[row] -= size
    constrained = any(example.rule is not None for example in examples)
    batch = empty_batch(max(len(rows), 1), length, constrained)
    for row, members in enumerate(rows):
        at = 0
        for segment, example in enumerate(members, start=1):
            span = slice(at, at + len(example.tokens))
            batch.tokens[row, span] = example.tokens
            batch.positions[row, span] = np.arange(len(example.tokens))
            batch.segment_ids[row, span] = segment
            batch.mask[row, span] = example.mask
            # The first token of a sequence has no predecessor to be predicted from.
            batch.mask[row, at : at + 1] = 0.0
            batch.logp[row, span] = example.logp
            batch.advantage[row, span] = example.advantage
            if batch.rule is not None:
                batch.rule[row, span] = example.rule
            at += len(example.tokens)
    return batch


def empty_batch(rows: int, length: int, constrained: bool = False) -> Batch:
    """A batch of padding."""
    shape = (rows, length)
    batch = Batch(
        *(np.zeros(shape, np.int32) for _ in range(3)),
        *(np.zeros(shape, np.float32) for _ in range(3)),
    )
    return batch._replace(rule=np.full(shape, FREE, np.int32)) if constrained else batch


def split_rows(batch: Batch, rows: int) -> list[Batch]:
    """Splits a batch into micro-batches of ``rows`` rows, the last one padded."""
    missing = -batch.tokens.shape[0] % rows
    if missing:
        padding = empty_batch(missing, batch.tokens.shape[1], batch.rule is not None)
        batch = jax.tree.map(lambda *pair: np.concatenate(pair), batch, padding)
    parts = [slice(at, at + rows) for at in range(0, batch.tokens.shape[0], rows)]
    return [jax.tree.map(operator.itemgetter(part), batch) for part in parts]


def stack(batches: Sequence[Batch], capacity: int) -> Batch:
    """Micro-batches of one shape as arrays ``[capacity, R, T]``; zeros follow the last one."""

    def stacked(*arrays: Any) -> np.ndarray:
        out = np.zeros((capacity, *arrays[0].shape), arrays[0].dtype)
        for i, array in enumerate(arrays):
            out[i] = array
        return out

    return jax.tree.map(stacked, *batches)
