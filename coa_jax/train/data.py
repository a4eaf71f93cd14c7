"""The input pipeline of runs over a fixed set of examples.

Every update of a run is a pure function of the update's number: its examples, the rows into which
they are packed, and the random changes to records depend only on the seed and the position in the
data. The state of the pipeline is therefore one integer, the index of the next example. This holds
for any number of processes that train or read. The layout of the rows follows from token counts,
which `train.lengths` computes once, so a process tokenises only the rows of its own devices. The
library grain prepares the next updates during a training step.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import parent_process
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np
from absl import flags

from coa_jax.data.records import Records, SkippedRow
from coa_jax.data.trajectory import DistilledRecord
from coa_jax.errors import UserError
from coa_jax.protocol import Prompt, known_protocols, restore_protocols
from coa_jax.tasks.base import one_with_level
from coa_jax.tasks.mixture import alternate
from coa_jax.train.batch import Batch, Example, empty_batch, first_fit, pack
from coa_jax.train.examples import record_example

if TYPE_CHECKING:
    import grain

T = TypeVar("T")

Change = Callable[[DistilledRecord, np.random.Generator], DistilledRecord]
"""A function that changes a record at random, each time that the record is trained on."""

Augmentation = Callable[[Any, Sequence[DistilledRecord], Prompt], Change]
"""A function that creates a `Change` from the tokenizer, all records, and the prompt style."""


# --- examples that are tokenised on demand --------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class RecordReader:
    """Reads records from files and tokenises them.

    Attributes:
        records: the rows of the files.
        tokenizer: tokenizer of the policy.
        prompt: prompt style in which the policy sees the records' questions.
        level: level of the protocol rules, ``lenient`` or ``paper``, see `tasks.base.with_level`.
        format: format of the conversations, such as ``tags``, see `tasks.base.with_level`.
    """

    records: Records
    tokenizer: Any
    prompt: Prompt
    level: str = ""
    format: str = ""

    def record(self, index: int) -> DistilledRecord:
        """Reads the record at the row ``index``.

        Raises:
            UserError: the row is invalid. Because it was valid when `train.lengths` counted the
                tokens of all rows, the file has changed since.
        """
        entry = self.records[index]
        if isinstance(entry, SkippedRow):
            raise UserError(f"{entry.row.where}: {entry.reason}; the file changed during the run")
        return one_with_level(entry.record, self.level, self.format)

    def example(self, record: DistilledRecord) -> Example:
        """Tokenises a record in the prompt style, level and format of this reader."""
        return record_example(self.tokenizer, record, self.prompt)

    def __call__(self, index: int) -> Example:
        return self.example(self.record(index))


@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
    """N sequences to train on, which are tokenised on demand; only their lengths are in memory.

    Attributes:
        sizes: number of tokens of each example, int32 ``[N]``.
        losses: number of tokens of each example that have a loss once the example is packed, int32
            ``[N]``.
        makers: functions that create examples. A maker is called with an index into its own data.
        owner: for each example, the index in ``makers`` of the function that creates the example,
            int32 ``[N]``.
        indices: index of each example in the data of its maker, int64 ``[N]``.
    """

    sizes: np.ndarray
    losses: np.ndarray
    makers: tuple[Callable[[int], Example], ...]
    owner: np.ndarray
    indices: np.ndarray

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Example:
        """Creates the example with an index.

        Raises:
            UserError: the number of tokens of the example differs from ``sizes``: the data have
                changed.
        """
        example = self.makers[self.owner[index]](int(self.indices[index]))
        if len(example.tokens) != self.sizes[index]:
            raise UserError(
                f"an example has {len(example.tokens)} tokens and had {self.sizes[index]} when the "
                "run began: the data changed; start the command again"
            )
        return example

    def changed(self, index: int, length: int, change: Change, rng: np.random.Generator) -> Example:
        """Changes the record of an example, and returns the tokenised result.

        Args:
            index: index of the example; its maker must be a `RecordReader`.
            length: maximum number of tokens of the returned example. If the changed record has more
                tokens, the method returns the example of the unchanged record.
            change: function that changes the record.
            rng: generator of the random numbers for the change.
        """
        maker = self.makers[self.owner[index]]
        assert isinstance(maker, RecordReader)
        record = maker.record(int(self.indices[index]))
        example = maker.example(change(record, rng))
        return example if len(example.tokens) <= length else maker.example(record)


def examples_of(
    maker: Callable[[int], Example], sizes: np.ndarray, losses: np.ndarray, indices: np.ndarray
) -> Examples:
    """Creates `Examples` from a single function that makes all of the examples.

    Args:
        maker: function that creates the example at an index of its data.
        sizes: number of tokens of each example, int32 ``[N]``.
        losses: number of tokens with a loss in each packed example, int32 ``[N]``.
        indices: index of each example in the data of the maker, int64 ``[N]``.
    """
    return Examples(sizes, losses, (maker,), np.zeros(len(sizes), np.int32), indices)


def examples_in_memory(examples: Sequence[Example]) -> Examples:
    """Creates `Examples` from a list of examples that are already tokenised."""
    sizes = np.array([len(example.tokens) for example in examples], np.int32)
    losses = np.array([loss_tokens(example) for example in examples], np.int32)
    return examples_of(list(examples).__getitem__, sizes, losses, np.arange(len(examples)))


def loss_tokens(example: Example) -> int:
    """Returns the number of tokens of an example that have a loss in a packed row.

    Packing masks the first token of a sequence, because no token precedes it.
    """
    return int(np.sum(example.mask[1:], dtype=np.float64))


def join(parts: Sequence[Examples]) -> Examples:
    """Concatenates several collections of examples into a single collection.

    The examples keep their order.
    """
    firsts = np.cumsum([0, *(len(part.makers) for part in parts)])
    owners = [part.owner + first for part, first in zip(parts, firsts[:-1], strict=True)]
    return Examples(
        np.concatenate([part.sizes for part in parts]),
        np.concatenate([part.losses for part in parts]),
        tuple(maker for part in parts for maker in part.makers),
        np.concatenate(owners).astype(np.int32),
        np.concatenate([part.indices for part in parts]),
    )


# --- updates --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """The data of one optimiser update: this process's rows, and counts over all processes.

    Attributes:
        batches: micro-batches of the update, each with only the rows that this process computes.
        rows: number of rows of a micro-batch over all processes; 0 if ``batches`` already contains
            the rows of all processes.
        lengths: number of tokens of each sequence of the update over all processes, row by row.
        tokens: number of tokens with a loss over all processes.
        cursor: position in the stream of examples at which the next update begins.
    """

    batches: list[Batch]
    rows: int
    lengths: list[int]
    tokens: float
    cursor: int


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class UpdateSequence(Sequence[Update]):
    """The base class of sequences of updates, each of which is created on demand.

    The method `make_update` of a subclass determines how an update is created.

    Attributes:
        order: index of the example at each position of the endless stream of examples.
        batch_size: number of examples per update.
        rows: number of rows of a micro-batch over all processes.
        length: number of tokens of a row.
        cursor: position in the stream at which the first update begins.
        number: number of updates in the sequence.
    """

    order: grain.MapDataset
    batch_size: int
    rows: int
    length: int
    cursor: int = 0
    number: int = 0

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, number: int) -> Update:  # type: ignore[override]
        if not 0 <= number < self.number:
            raise IndexError(number)
        start = self.cursor + number * self.batch_size
        return self.make_update(range(start, start + self.batch_size))

    @abc.abstractmethod
    def make_update(self, positions: range) -> Update:
        """Creates the update whose examples are at the given positions of the stream."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Updates(UpdateSequence):
    """An `UpdateSequence` that packs several examples into a row.

    Each process creates only its own rows.

    Attributes:
        examples: all examples; none has more tokens than a row.
        own: indices of the rows of a micro-batch that this process computes, see
            `placement.own_rows`.
        change: random change of the records, see `Change`; None to leave the records unchanged.
    """

    examples: Examples
    own: Sequence[int]
    change: Change | None = None

    def make_update(self, positions: range) -> Update:
        """Creates the update whose examples are at the given positions of the stream."""
        if self.change is None:
            indices = np.array([self.order[position] for position in positions])
            sizes, losses = self.examples.sizes[indices], self.examples.losses[indices]
            chosen: Callable[[int], Example] = lambda k: self.examples[int(indices[k])]  # noqa: E731
        else:
            # Lengths are known only after the random change, so each process creates all examples.
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
        """The stream of changed examples; each position has its own random numbers."""
        change = self.change
        assert change is not None

        def changed(index: int, rng: np.random.Generator) -> Example:
            return self.examples.changed(index, self.length, change, rng)

        return self.order.random_map(changed)


@dataclasses.dataclass(frozen=True, eq=False)
class MicroBatches(Sequence[Batch]):
    """Micro-batches with the rows that this process computes; each is created on demand.

    Attributes:
        layout: for each row, the indices of its examples, see `first_fit`.
        example: function that takes the index of an example and returns the example.
        rows: number of rows of a micro-batch over all processes.
        length: number of tokens of a row.
        own: indices of the rows of a micro-batch that this process computes.
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
    """Returns an endless stream of example indices, shuffled anew in every epoch.

    Args:
        parts: number of examples of each part of the data; most runs have one part. The indices of
            the second part begin after those of the first part, and so on.
        weights: relative frequency of each part in the stream.
        seed: seed of the order.
    """
    ends = np.cumsum(parts).tolist()
    spans = [range(end - size, end) for end, size in zip(ends, parts, strict=True)]
    order: grain.MapDataset = alternate(spans, weights, seed)
    return order


# --- reading ahead --------------------------------------------------------------------------


@contextlib.contextmanager
def read_ahead(source: Sequence[T], workers: int, buffer: int = 2) -> Iterator[Iterator[T]]:
    """Iterates over a sequence whose items are created in the background, ahead of their use.

    This is a context manager: ``with read_ahead(...) as items``. Its end stops the workers.

    Args:
        source: sequence that creates an item when the item is accessed.
        workers: number of worker processes that create items; 0 for a thread of this process.
        buffer: maximum number of finished items that the thread, or each worker, holds.
    """
    import grain

    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=buffer)
    ahead = grain.MapDataset.source(source).to_iter_dataset(options)
    if workers:
        if not flags.FLAGS.is_parsed():  # e.g. in a notebook; grain reads flags
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
    """Prepares a worker process.

    The worker process registers the protocols that the run has registered. The worker ignores
    SIGINT and SIGTERM, which only the training process handles, and exits when the training process
    ends.
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
