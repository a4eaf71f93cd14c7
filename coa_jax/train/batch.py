"""Packs sequences of tokens into the rows of arrays on which a policy is trained."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from coa_jax.errors import UserError
from coa_jax.model.attention.causal import Unfolded


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
    """One sequence of T tokens to train on.

    Attributes:
        tokens: token ids, int32 ``[T]``.
        mask: float32 ``[T]``, 1 for tokens that the policy wrote, 0 for all other tokens.
        logp: float32 ``[T]``, log-probability with which the token was sampled; 0 for tokens that
            the policy did not sample.
        advantage: advantage of each token, float32 ``[T]``.
        more: further arrays ``[T]``; each key is the field of `Batch` to which the array belongs.
    """

    tokens: np.ndarray
    mask: np.ndarray
    logp: np.ndarray
    advantage: np.ndarray
    more: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)


class Batch(NamedTuple):
    """R packed rows of T tokens, in which index t of every array describes token t of a row.

    Attributes:
        tokens: token ids, int32 ``[R, T]``.
        positions: position of each token in its sequence, counted from 0, int32 ``[R, T]``.
        segment_ids: index, within the row, of the sequence that contains the token, counted from 1,
            int32 ``[R, T]``; 0 marks padding.
        mask: float32 ``[R, T]``, 1 for tokens that have a loss, 0 for all other tokens.
        logp: sampling log-probabilities, float32 ``[R, T]``.
        advantage: advantage of each token, float32 ``[R, T]``.
        rule: int32 ``[R, T]``, state of the constraint under which the token was sampled; see
            `engine.constraint.token_states`. None without a constraint.
        weight: weight of each token's loss, float32 ``[R, T]``, see `objectives.weigh`; None if
            every weight is 1.
        old_logp: log-probabilities under the trainer before the step's updates, float32 ``[R, T]``.
        ref_logp: log-probabilities under the run's initial policy, float32 ``[R, T]``.
        value: the critic's values before the step's updates, float32 ``[R, T]``.
        returns: the values that the critic is trained to predict, float32 ``[R, T]``.
        teacher_logp: log-probabilities under a teacher, float32 ``[R, T]``.
        age: int32 ``[R, T]``, number of steps between the policy version that sampled a token and
            the policy version that is trained on the token; None if the newest version sampled all
            tokens.
        copies: number of samples that each sequence stands for, float32 ``[R, T]``, see
            `merge_identical`; None if every sequence is one sample.
        unfolded: layout of the rows inside attention, where each sequence has its own copy of a
            prompt that the row stores only once; None if no sequences share a prompt.
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
    teacher_logp: jax.Array | np.ndarray | None = None
    age: np.ndarray | None = None
    copies: np.ndarray | None = None
    unfolded: Unfolded | None = None

    @property
    def counts(self) -> np.ndarray:
        """Number of samples in which each token has a loss, float32 ``[R, T]``."""
        return self.mask if self.copies is None else self.mask * self.copies


def merge_identical(examples: Sequence[Example]) -> list[Example]:
    """Merges examples whose arrays are all equal, such as samples that share all tokens.

    An update is a sum over sequences, and each loss treats every sequence by itself. So a merged
    example, counted as often as it occurred, gives the same gradients.

    Returns:
        The first of each set of identical examples, with ``copies`` in ``more``.
    """
    merged: dict[bytes, list[Example]] = {}
    for example in examples:
        arrays = (example.tokens, example.mask, example.logp, example.advantage)
        key = b"".join(x.tobytes() for x in (*arrays, *example.more.values()))
        merged.setdefault(key, []).append(example)
    return [
        dataclasses.replace(
            same[0],
            more={**same[0].more, "copies": np.full(len(same[0].tokens), len(same), np.float32)},
        )
        for same in merged.values()
    ]


def pack(examples: Sequence[Example], length: int, unfolded: int = 0) -> Batch:
    """Packs sequences into rows: the longest first, each into the first row with enough space.

    If ``unfolded`` is above 0, sequences with the same prompt share a row. The first of these
    sequences is stored with the whole prompt. Every further sequence is stored with only the last
    token of the prompt, from which its first sampled token is predicted. Inside attention, the row
    is expanded to ``unfolded`` positions, where every sequence begins with the whole prompt.

    The result depends only on the examples and their order.

    Args:
        examples: the sequences. The prompt of a sequence consists of all tokens before the first
            token with a loss. The field ``more`` of all sequences must have the same keys.
        length: number of tokens of a row, T.
        unfolded: number of positions of a row inside attention, E; 0 if sequences do not share
            prompts.

    Raises:
        UserError: a sequence is longer than a row.
    """
    rows = _fill(examples, length, unfolded)
    batch = empty_batch(max(len(rows), 1), length, unfolded)
    more: dict[str, Any] = {  # zeros are padding, as is the state `FREE`
        name: np.zeros(batch.tokens.shape, values.dtype)
        for name, values in (examples[0].more.items() if examples else ())
    }
    batch = batch._replace(**more)
    for number, row in enumerate(rows):
        _lay_out(row, jax.tree.map(operator.itemgetter(number), batch))
    return batch


def unpack(
    batches: Sequence[Batch], examples: Sequence[Example], length: int, unfolded: int = 0
) -> list[Example]:
    """Converts packed micro-batches back to examples, with the arrays that were added since.

    Args:
        batches: the micro-batches that `pack` and `split_rows` made of the examples, with the
            scores, values or advantages that were added since.
        examples: the same examples as in the call of `pack`.
        length: the same length as in the call of `pack`.
        unfolded: the same number as in the call of `pack`.
    """
    gained = [name for name in _GAINED if getattr(batches[0], name) is not None]
    arrays = {name: np.concatenate([getattr(b, name) for b in batches]) for name in gained}
    shortened: dict[int, Example] = {}
    for number, row in enumerate(_fill(examples, length, unfolded)):
        at = 0
        for example, skipped, _ in row.members:
            end = at + len(example.tokens) - skipped
            # The skipped tokens of a shared prompt have no loss.
            more = {k: np.pad(v[number, at:end], (skipped, 0)) for k, v in arrays.items()}
            advantage = more.pop("advantage")
            shortened[id(example)] = dataclasses.replace(
                example, advantage=advantage, more={**example.more, **more}
            )
            at = end
    return [shortened[id(example)] for example in examples]


_GAINED = ("advantage", "old_logp", "ref_logp", "value", "returns")


def first_fit(sizes: Sequence[int] | np.ndarray, length: int) -> list[list[int]]:
    """Assigns sequences to rows: the longest first, each to the first row with enough space.

    Args:
        sizes: number of tokens of each sequence; sequences of equal size keep their order.
        length: number of tokens of a row.

    Returns:
        For each row, the indices of its sequences.

    Raises:
        UserError: a sequence is longer than a row.
    """
    rows: list[list[int]] = []
    sizes = np.asarray(sizes, np.int64)
    free = np.full(len(sizes), length)
    for number in np.argsort(-sizes, kind="stable").tolist():
        _check_size(int(sizes[number]), length)
        row = int(np.argmax(free >= sizes[number]))
        if row == len(rows):
            rows.append([])
        rows[row].append(number)
        free[row] -= sizes[number]
    return rows


def _check_size(size: int, length: int) -> None:
    if size > length:
        raise UserError(
            f"a sequence has {size} tokens and the batch rows {length}: raise row_length or "
            "drop long sequences"
        )


def _fill(examples: Sequence[Example], length: int, unfolded: int) -> list[_Row]:
    """Assigns the examples to rows; see `pack`."""
    rows: list[_Row] = []
    if not unfolded:
        for members in first_fit([len(example.tokens) for example in examples], length):
            rows.append(_Row())
            for number in members:
                rows[-1].add(examples[number], b"")
        return rows
    for example in _in_order(examples):
        size = len(example.tokens)
        _check_size(size, length)
        prompt = _prompt(example)
        with_room = [row for row in rows if row.has_room(size, prompt, length, unfolded)]
        if not with_room:
            rows.append(_Row())
        sharing = [row for row in with_room if prompt in row.prompts]
        (sharing or with_room or rows[-1:])[0].add(example, prompt)
    return rows


def _prompt(example: Example) -> bytes:
    """Returns the tokens that sequences with the same prompt can share, as bytes.

    The last token of the prompt is not shared, because the first sampled token of each sequence is
    predicted from it.
    """
    first = int(np.argmax(example.mask > 0)) if example.mask.any() else 0
    return example.tokens[: max(first - 1, 0)].astype(np.int32).tobytes()


def _in_order(examples: Sequence[Example]) -> list[Example]:
    """Orders examples for packing with shared prompts: the largest prompt group comes first."""
    groups: dict[bytes, list[Example]] = {}
    for example in examples:
        groups.setdefault(_prompt(example), []).append(example)
    largest = sorted(groups.values(), key=lambda group: -sum(len(e.tokens) for e in group))
    return [e for group in largest for e in sorted(group, key=lambda e: -len(e.tokens))]


@dataclasses.dataclass
class _Row:
    """A row that is being filled.

    Attributes:
        members: for each sequence, a tuple of the example, the number of shared prompt tokens that
            are not stored again, and the index in the row at which the shared prompt begins.
        prompts: for each prompt, the index in the row at which the prompt begins.
        size: number of tokens stored so far.
        unfolded: number of positions used so far in attention.
    """

    members: list[tuple[Example, int, int]] = dataclasses.field(default_factory=list)
    prompts: dict[bytes, int] = dataclasses.field(default_factory=dict)
    size: int = 0
    unfolded: int = 0

    def left_out(self, prompt: bytes) -> int:
        """Returns the number of prompt tokens that the row has stored already."""
        return len(prompt) // 4 if prompt in self.prompts else 0

    def has_room(self, size: int, prompt: bytes, length: int, unfolded: int) -> bool:
        """Returns whether a sequence of ``size`` tokens fits into the row."""
        fits = self.size + size - self.left_out(prompt) <= length
        return fits and self.unfolded + size <= unfolded

    def add(self, example: Example, prompt: bytes) -> None:
        """Adds a sequence."""
        skipped = self.left_out(prompt)
        source = self.prompts.setdefault(prompt, self.size)
        self.members.append((example, skipped, source))
        self.size += len(example.tokens) - skipped
        self.unfolded += len(example.tokens)


def _lay_out(row: _Row, batch: Batch) -> None:
    """Writes a row's sequences into the row's arrays ``[T]`` and, for attention, ``[E]``."""
    at = start = 0
    for segment, (example, skipped, source) in enumerate(row.members, start=1):
        size = len(example.tokens)
        end = at + size - skipped
        span, own = slice(at, end), slice(skipped, None)
        arrays = {name: getattr(example, name) for name in ("tokens", "mask", "logp", "advantage")}
        for name, values in {**arrays, **example.more}.items():
            getattr(batch, name)[span] = values[own]
        batch.positions[span] = np.arange(skipped, size)
        batch.segment_ids[span] = segment
        # The first token of a sequence cannot be predicted: no token precedes it.
        batch.mask[at : at + 1] = 0.0
        if batch.unfolded is not None:
            whole = slice(start, start + size)
            shared, new = np.arange(source, source + skipped), np.arange(at, end)
            batch.unfolded.places[whole] = np.concatenate((shared, new))
            batch.unfolded.segment_ids[whole] = segment
            batch.unfolded.back[span] = np.arange(start + skipped, start + size)
        at, start = end, start + size


def empty_batch(rows: int, length: int, unfolded: int = 0) -> Batch:
    """Creates a batch that consists of padding alone; `pack` fills such a batch.

    Args:
        rows: number of rows, R.
        length: number of tokens of a row, T.
        unfolded: number of positions of a row inside attention, where each sequence has its own
            copy of a prompt that the row stores once; 0 if no prompts are shared.
    """
    shape = (rows, length)
    tokens, positions, segments = (np.zeros(shape, np.int32) for _ in range(3))
    mask, logp, advantage = (np.zeros(shape, np.float32) for _ in range(3))
    batch = Batch(tokens, positions, segments, mask, logp, advantage)
    if unfolded:
        arrays = (np.zeros((rows, size), np.int32) for size in (unfolded, unfolded, length))
        batch = batch._replace(unfolded=Unfolded(*arrays))
    return batch


def split_rows(batch: Batch, rows: int) -> list[Batch]:
    """Splits a batch into micro-batches of ``rows`` rows; fills up the last with padding rows."""
    missing = -batch.tokens.shape[0] % rows
    batch = jax.tree.map(  # zeros are padding
        lambda x: np.concatenate((x, np.zeros((missing, *x.shape[1:]), x.dtype))), batch
    )
    parts = [slice(at, at + rows) for at in range(0, batch.tokens.shape[0], rows)]
    return [jax.tree.map(operator.itemgetter(part), batch) for part in parts]


def stack(batches: Sequence[Batch], capacity: int) -> Batch:
    """Stacks micro-batches ``[R, T]`` to arrays ``[capacity, R, T]``; unused entries are zeros."""

    def stacked(*arrays: Any) -> np.ndarray:
        out = np.zeros((capacity, *arrays[0].shape), arrays[0].dtype)
        np.stack(arrays, out=out[: len(arrays)])
        return out

    return jax.tree.map(stacked, *batches)
