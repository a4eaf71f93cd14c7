"""The input pipeline of runs over a fixed set of examples.

Every update of a run is a pure function of its number: which examples it has, in which rows they
stand, and how they are changed depend on the seed and the position in the data alone.  So the state
of the pipeline is one integer, the index of the next example, whatever the number of processes that
train or read.  Token counts, which `learn.lengths` takes once, decide the rows; a process
tokenises only the rows that its own devices compute.  grain reads updates ahead of the step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import parent_process
from typing import Any, TypeVar

import grain
import jax
import numpy as np
from absl import flags

from coa_jax.errors import UserError
from coa_jax.learn.batch import Batch, Example, empty_batch, first_fit, pack, record_example
from coa_jax.protocol import Prompt, known_protocols, restore_protocols
from coa_jax.records import LeftOut, Records
from coa_jax.tasks.base import one_with_level
from coa_jax.tasks.mixture import alternate
from coa_jax.trajectory import DistilledRecord

T = TypeVar("T")

Change = Callable[[DistilledRecord, np.random.Generator], DistilledRecord]
"""What a record becomes each time that it is learned."""

Augmentation = Callable[[Any, Sequence[DistilledRecord], Prompt], Change]
"""Makes the change from the policy's tokenizer, all records, and how questions are put."""


# --- examples that are made when they are needed --------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class RecordReader:
    """Reads records and tokenises them.

    Attributes:
        records: rows of the files.
        tokenizer: tokenizer of the policy.
        prompt: how the records' questions are put to the policy.
        level, format: see `tasks.base.with_level`.
    """

    records: Records
    tokenizer: Any
    prompt: Prompt
    level: str = ""
    format: str = ""

    def record(self, place: int) -> DistilledRecord:
        """Reads the record of a row, which must not be one that is left out."""
        found = self.records[place]
        if isinstance(found, LeftOut):
            raise UserError(f"{found.where}: {found.reason}; the file changed during the run")
        return one_with_level(found.record, self.level, self.format)

    def example(self, record: DistilledRecord) -> Example:
        """Tokenises a record."""
        return record_example(self.tokenizer, record, self.prompt)

    def __call__(self, place: int) -> Example:
        return self.example(self.record(place))


@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
    """Sequences to learn from, of which memory holds only the sizes.

    Attributes:
        sizes: int32 ``[N]``, tokens of each.
        losses: int32 ``[N]``, tokens of each that have a loss once it is packed.
        makers: what makes them.
        owner: int32 ``[N]``, index of the maker of each.
        place: int64 ``[N]``, place of each in the data of its maker.
    """

    sizes: np.ndarray
    losses: np.ndarray
    makers: tuple[Callable[[int], Example], ...]
    owner: np.ndarray
    place: np.ndarray

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Example:
        """Makes an example.

        Raises:
            UserError: it has another length than it had when lengths were taken.
        """
        example = self.makers[self.owner[index]](int(self.place[index]))
        if len(example.tokens) != self.sizes[index]:
            raise UserError(
                f"an example has {len(example.tokens)} tokens and had {self.sizes[index]} when the "
                "run began: the data changed; start the command again"
            )
        return example

    def changed(self, index: int, length: int, change: Change, rng: np.random.Generator) -> Example:
        """Makes an example of a record that is changed first.

        A record that has more than ``length`` tokens once it is changed is used as it was.
        """
        maker = self.makers[self.owner[index]]
        assert isinstance(maker, RecordReader)
        record = maker.record(int(self.place[index]))
        example = maker.example(change(record, rng))
        return example if len(example.tokens) <= length else maker.example(record)


def examples_of(
    maker: Callable[[int], Example], sizes: np.ndarray, losses: np.ndarray, place: np.ndarray
) -> Examples:
    """The examples that one maker makes; for the arrays see `Examples`."""
    return Examples(sizes, losses, (maker,), np.zeros(len(sizes), np.int32), place)


def examples_in_memory(examples: Sequence[Example]) -> Examples:
    """Examples that are there already."""
    sizes = np.array([len(example.tokens) for example in examples], np.int32)
    losses = np.array([loss_tokens(example) for example in examples], np.int32)
    return examples_of(list(examples).__getitem__, sizes, losses, np.arange(len(examples)))


def loss_tokens(example: Example) -> int:
    """Tokens that have a loss once the example is packed: the first one never has."""
    return int(np.sum(example.mask[1:], dtype=np.float64))


def join(parts: Sequence[Examples]) -> Examples:
    """The examples of all parts, one part after the other."""
    firsts = np.cumsum([0, *(len(part.makers) for part in parts)])
    owners = [part.owner + first for part, first in zip(parts, firsts[:-1], strict=True)]
    return Examples(
        np.concatenate([part.sizes for part in parts]),
        np.concatenate([part.losses for part in parts]),
        tuple(maker for part in parts for maker in part.makers),
        np.concatenate(owners).astype(np.int32),
        np.concatenate([part.place for part in parts]),
    )


# --- updates --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """What a process holds of the data of an update.

    Attributes:
        batches: micro-batches, with the rows that this process computes.
        rows: rows of a whole micro-batch; 0 where ``batches`` has all of them.
        lengths: tokens of each sequence of the whole update, row by row.
        tokens: tokens of the whole update that have a loss.
        cursor: index of the first example after the update.
    """

    batches: list[Batch]
    rows: int
    lengths: list[int]
    tokens: float
    cursor: int


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Updates(Sequence[Update]):
    """The updates of a run from a cursor on, each made when it is asked for.

    Attributes:
        examples: none longer than ``length``.
        order: gives the index of the example at each position of the stream.
        cursor: position at which the first update begins.
        number: how many updates there are.
        batch_size: examples of an update.
        rows: rows of a micro-batch.
        length: tokens of a row.
        own: rows of a micro-batch that this process computes, see `placement.own_rows`.
        change: see `Change`; None to leave the records as they are.
    """

    examples: Examples
    order: grain.MapDataset
    cursor: int
    number: int
    batch_size: int
    rows: int
    length: int
    own: Sequence[int]
    change: Change | None = None

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, number: int) -> Update:  # type: ignore[override]
        if not 0 <= number < self.number:
            raise IndexError(number)
        start = self.cursor + number * self.batch_size
        positions = range(start, start + self.batch_size)
        if self.change is None:
            indices = np.array([self.order[position] for position in positions])
            sizes, losses = self.examples.sizes[indices], self.examples.losses[indices]
            chosen: Callable[[int], Example] = lambda k: self.examples[int(indices[k])]  # noqa: E731
        else:
            # A change decides the length, so that each process makes all examples of the update.
            made = [self._changed[position] for position in positions]
            sizes = np.array([len(example.tokens) for example in made])
            losses = np.array([loss_tokens(example) for example in made])
            chosen = made.__getitem__
        layout = first_fit(sizes, self.length)
        return Update(
            list(MicroBatches(layout, chosen, self.rows, self.length, self.own)),
            self.rows,
            [int(sizes[k]) for row in layout for k in row],
            float(losses.sum()),
            positions.stop,
        )

    @functools.cached_property
    def _changed(self) -> grain.MapDataset:
        """The stream of changed examples; grain gives each position randomness of its own."""
        change = self.change
        assert change is not None

        def changed(index: int, rng: np.random.Generator) -> Example:
            return self.examples.changed(index, self.length, change, rng)

        return self.order.random_map(changed)


@dataclasses.dataclass(frozen=True, eq=False)
class MicroBatches(Sequence[Batch]):
    """Micro-batches with this process's rows of a layout, each made when it is asked for.

    Attributes:
        layout: numbers of the examples of each row, see `first_fit`.
        example: gives the example of a number.
        rows: rows of a whole micro-batch.
        length: tokens of a row.
        own: rows of a micro-batch that this process computes.
    """

    layout: Sequence[Sequence[int]]
    example: Callable[[int], Example]
    rows: int
    length: int
    own: Sequence[int]

    def __len__(self) -> int:
        return -(-len(self.layout) // self.rows)

    def __getitem__(self, number: int) -> Batch:  # type: ignore[override]
        if not 0 <= number < len(self):
            raise IndexError(number)
        members = self.layout[number * self.rows : (number + 1) * self.rows]
        parts = [
            pack([self.example(k) for k in members[row]], self.length)
            if row < len(members)
            else empty_batch(1, self.length)
            for row in self.own
        ]
        batch: Batch = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
        return batch


def shuffled(parts: Sequence[int], weights: Sequence[float], seed: int) -> grain.MapDataset:
    """Indices of examples without end: all of each part, epoch after epoch in another order.

    Args:
        parts: number of examples of each part, which follow each other; one part for most runs.
        weights: how often examples of each part come, in proportion to the others.
        seed: seed of the order.
    """
    ends = np.cumsum(parts).tolist()
    spans = [range(end - size, end) for end, size in zip(ends, parts, strict=True)]
    order: grain.MapDataset = alternate(spans, weights, seed)
    return order


# --- reading ahead --------------------------------------------------------------------------


@contextlib.contextmanager
def read_ahead(source: Sequence[T], workers: int, buffer: int = 2) -> Iterator[Iterator[T]]:
    """Yields the items of a sequence in their order, which are made before they are asked for.

    Args:
        source: makes an item when it is asked for.
        workers: processes that make items; 0 for a thread of this process.
        buffer: items of the thread, or of each worker, that are ready at most.
    """
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=buffer)
    ahead = grain.MapDataset.source(source).to_iter_dataset(options)
    if workers:
        if not flags.FLAGS.is_parsed():  # in a notebook; grain reads its own flags
            flags.FLAGS.mark_as_parsed()
        ahead = ahead.mp_prefetch(
            grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=1),
            functools.partial(_begin_worker, known_protocols()),
        )
    iterator = iter(ahead)
    try:
        iterator.start_prefetch()
        yield iterator
    finally:
        iterator.close()


def _begin_worker(protocols: Any, index: int, count: int) -> None:
    """Prepares a process that makes items.

    It knows the protocols that this run has added.  Signals to the whole group are for the process
    that trains, after whose end none of its workers goes on.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    restore_protocols(protocols)
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(0)

    threading.Thread(target=follow, daemon=True).start()
