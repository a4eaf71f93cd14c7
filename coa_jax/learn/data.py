"""The SFT input pipeline: a shuffled, endless stream whose position is one integer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grain

from coa_jax.errors import UserError
from coa_jax.learn.batch import Batch, Example, micro_batches, pack, record_example
from coa_jax.trajectory import DistilledRecord


def tokenize_records(
    tokenizer: Any, records: Sequence[DistilledRecord], *, style: str, length: int
) -> tuple[list[Example], int]:
    """Examples of at most ``length`` tokens, and how many records were longer."""
    examples = [record_example(tokenizer, record, style) for record in records]
    kept = [example for example in examples if len(example.tokens) <= length]
    if not kept:
        raise UserError(
            f"none of the {len(records)} training records fits in {length} tokens: raise row_length"
        )
    return kept, len(examples) - len(kept)


def example_stream(examples: Sequence[Example], seed: int) -> grain.MapDataset:
    """All examples, epoch after epoch, each epoch in another order."""
    return grain.MapDataset.source(list(examples)).seed(seed).shuffle().repeat()


def next_batches(
    stream: grain.MapDataset, cursor: int, *, tokens: int, rows: int, length: int
) -> tuple[list[Batch], int]:
    """The micro-batches of one update, and the cursor of the next.

    Args:
        stream: of examples.
        cursor: index of the first example that was not used yet; a run's whole data state.
        tokens: examples are taken until together they have at least this many tokens.
        rows: rows of a micro-batch.
        length: tokens of a row.
    """
    taken: list[Example] = []
    size = 0
    while size < tokens:
        example = stream[cursor]
        taken.append(example)
        size += len(example.tokens)
        cursor += 1
    return micro_batches(pack(taken, length), rows), cursor
