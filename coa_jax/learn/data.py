"""The SFT input pipeline: a shuffled, endless stream whose position is one integer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grain
import numpy as np
from absl import logging

from coa_jax.errors import UserError
from coa_jax.learn.augment import NamePieces, rename
from coa_jax.learn.batch import Batch, Example, pack, record_example, split_rows
from coa_jax.trajectory import DistilledRecord


def tokenize_records(
    tokenizer: Any, records: Sequence[DistilledRecord], *, style: str, length: int, source: str
) -> tuple[list[Example], list[DistilledRecord]]:
    """Examples of at most ``length`` tokens, and the records that they come from.

    A warning counts those that are longer.

    Raises:
        UserError: all of them are; ``source`` is the file that it names.
    """
    examples = [record_example(tokenizer, record, style) for record in records]
    fits = [len(example.tokens) <= length for example in examples]
    if not any(fits):
        raise UserError(
            f"{source}: none of the {len(records)} records fits in {length} tokens: raise "
            "row_length"
        )
    if not all(fits):
        dropped = len(fits) - sum(fits)
        logging.warning(
            "%s: %d of %d records have more than %d tokens and are left out",
            source, dropped, len(records), length,
        )  # fmt: skip
    kept = [example for example, fit in zip(examples, fits, strict=True) if fit]
    return kept, [record for record, fit in zip(records, fits, strict=True) if fit]


def example_stream(
    tokenizer: Any,
    records: Sequence[DistilledRecord],
    *,
    style: str,
    length: int,
    seed: int,
    rename_share: float,
    keep: frozenset[str],
) -> grain.MapDataset:
    """All records, epoch after epoch, each epoch in another order.

    Args:
        tokenizer: of the policy.
        records: none longer than ``length`` tokens.
        style: of the prompts.
        length: a renamed record that outgrows it is used as it was.
        seed: of the order and of the renaming.
        rename_share: share of the records that are renamed, see `augment.rename`.
        keep: words that are not names.
    """

    pieces = NamePieces.of(tokenizer) if rename_share else NamePieces((), ())

    def example(record: DistilledRecord, rng: np.random.Generator) -> Example:
        if rng.random() < rename_share:
            renamed = record_example(tokenizer, rename(record, keep, pieces, rng), style)
            if len(renamed.tokens) <= length:
                return renamed
        return record_example(tokenizer, record, style)

    stream = grain.MapDataset.source(list(records)).seed(seed).shuffle().repeat()
    return stream.random_map(example)


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
