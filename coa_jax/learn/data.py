"""The SFT input pipeline: a shuffled, endless stream whose position is one integer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np
from absl import logging

from coa_jax.errors import UserError
from coa_jax.learn.batch import Batch, Example, pack, record_example, split_rows
from coa_jax.protocol import Prompt
from coa_jax.tasks.mixture import alternate
from coa_jax.trajectory import DistilledRecord

Change = Callable[[DistilledRecord, np.random.Generator], DistilledRecord]
"""What a record becomes each time that it is learned."""

Augmentation = Callable[[Any, Sequence[DistilledRecord], Prompt], Change]
"""Makes the change from the policy's tokenizer, all records, and how questions are put."""


def fitting_records(
    tokenizer: Any, records: Sequence[DistilledRecord], *, prompt: Prompt, length: int, source: str
) -> tuple[list[DistilledRecord], int]:
    """Returns the records of at most ``length`` tokens, and the tokens of the longest of them.

    A warning counts the longer records.

    Raises:
        UserError: there is no record, or none fits; ``source`` is the file that it names.
    """
    if not records:
        raise UserError(f"{source}: holds no record")
    sizes = [len(record_example(tokenizer, record, prompt).tokens) for record in records]
    kept = [record for record, size in zip(records, sizes, strict=True) if size <= length]
    if not kept:
        raise UserError(
            f"{source}: none of the {len(records)} records fits in {length} tokens: raise "
            "row_length"
        )
    if len(kept) < len(records):
        logging.warning(
            "%s: %d of %d records have more than %d tokens and are left out",
            source, len(records) - len(kept), len(records), length,
        )  # fmt: skip
    return kept, max(size for size in sizes if size <= length)


def example_stream(
    tokenizer: Any,
    parts: Sequence[Sequence[DistilledRecord]],
    *,
    prompt: Prompt,
    length: int,
    seed: int,
    weights: Sequence[float] = (1.0,),
    change: Change | None = None,
) -> grain.MapDataset:
    """All records of each part, epoch after epoch, each epoch in another order.

    Args:
        tokenizer: tokenizer of the policy.
        parts: records of at most ``length`` tokens; one part for most runs.
        prompt: how the records' questions are put to the policy.
        length: tokens of a row; a record that is longer once it is changed is used as it was.
        seed: seed of the order and of the changes.
        weights: how often records of each part come, in proportion to the others.
        change: see `Change`; None to leave the records as they are.
    """

    def example(record: DistilledRecord, rng: np.random.Generator) -> Example:
        if change is not None:
            changed = record_example(tokenizer, change(record, rng), prompt)
            if len(changed.tokens) <= length:
                return changed
        return record_example(tokenizer, record, prompt)

    return alternate([list(part) for part in parts], weights, seed).random_map(example)


def next_batches(
    stream: grain.MapDataset, cursor: int, *, batch_size: int, rows: int, length: int
) -> tuple[list[Batch], int]:
    """The micro-batches of one update, and the cursor of the next.

    Args:
        stream: of examples, none longer than ``length``.
        cursor: index of the first example that was not used yet; a run's whole data state.
        batch_size: examples of an update.
        rows: rows of a micro-batch.
        length: tokens of a row.
    """
    end = cursor + batch_size
    examples = [stream[index] for index in range(cursor, end)]
    return split_rows(pack(examples, length), rows), end
