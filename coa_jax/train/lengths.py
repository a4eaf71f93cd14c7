"""Counts the tokens of records, which decide which records are used and how rows are packed.

Each process of a run counts the tokens of a part of the records, with worker processes if there are
many records, and the processes exchange their counts. The folder ``$COA_JAX_LENGTHS`` (default:
`storage.cache_folder`) caches the counts. The name of a cache file depends on the records' files,
the tokenizer and the prompt style. A later run with the same data reads the cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import os
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from coa_jax.data.records import Counts, Records, SkippedRow
from coa_jax.errors import UserError
from coa_jax.files import durable, untrusted
from coa_jax.model.chat_template import chat_template
from coa_jax.parallel import processes
from coa_jax.parallel.transfer import gather
from coa_jax.protocol import Prompt
from coa_jax.run.progress import progress
from coa_jax.storage import cache_folder, is_url
from coa_jax.tasks.base import one_with_level
from coa_jax.tasks.prompts import Wording, wording_of
from coa_jax.train.config import SFTConfig
from coa_jax.train.data import Examples, RecordReader, examples_of, loss_tokens, read_ahead

_VERSION = 2  # version of the cache's file format and of the conversion of rows
_CHUNK = 64  # number of rows that a worker counts at a time
_FEW = 32  # with at most this many chunks, no worker is started


@dataclasses.dataclass(frozen=True)
class TokenCounts:
    """The number of tokens of each record in files of training data.

    A row of such a file holds one record, or cannot be used and is left out.

    Attributes:
        sizes: number of tokens of each row's record, int32 ``[rows]``; 0 for a row that is left
            out.
        losses: number of tokens with a loss in each row's record, int32 ``[rows]``.
        counts: how many rows are left out for each reason, and for how many records each protocol
            was inferred from the record's tags.
        wording: summary of the prompts of all records, see `tasks.prompts.Wording`.
    """

    sizes: np.ndarray
    losses: np.ndarray
    counts: Counts
    wording: Wording


def _measured(reader: RecordReader, chunk: int) -> TokenCounts:
    """Counts the tokens of a chunk of rows."""
    rows = range(chunk * _CHUNK, min((chunk + 1) * _CHUNK, len(reader.records)))
    sizes, losses = (np.zeros(len(rows), np.int32) for _ in range(2))
    counts, wording = Counts(), Wording()
    for at, row in enumerate(rows):
        entry = reader.records[row]
        counts.add(entry)
        if isinstance(entry, SkippedRow):
            continue
        record = one_with_level(entry.record, reader.level, reader.format)
        wording += wording_of(record, reader.prompt)
        example = reader.example(record)
        sizes[at], losses[at] = len(example.tokens), loss_tokens(example)
    return TokenCounts(sizes, losses, counts, wording)


def measure(reader: RecordReader, workers: int, seconds: float) -> TokenCounts:
    """Counts the tokens of all rows of a reader, or reads the counts from the cache.

    All processes of a run must call this function, in the same order.

    Args:
        reader: reads and tokenises the rows.
        workers: number of worker processes of this host that tokenise; 0 to tokenise in this
            process.
        seconds: number of seconds to wait for the slowest process, see `processes.barrier`.

    Raises:
        UserError: a file cannot be read.
    """
    path = _folder(reader.records.source) / f"{_digest(reader)}.npz"
    known = _read(path, len(reader.records))
    known_everywhere = processes.all_gather(known is not None, "known lengths of records", seconds)
    if known is not None and all(known_everywhere):
        return known
    chunks = range(-(-len(reader.records) // _CHUNK))
    count = functools.partial(_measured, reader)
    import grain

    mine = grain.MapDataset.source(processes.local_items(chunks)).map(count)
    workers = workers if len(mine) > _FEW else 0
    shown = len(chunks) > _FEW and processes.index() == 0
    with (
        read_ahead(mine, workers, buffer=2 * max(workers, 1)) as results,
        progress("LENGTHS", total=len(mine) * _CHUNK, enabled=shown) as bar,
    ):
        parts = []
        for part in results:
            parts.append(part)
            bar.update(len(part.sizes))
    whole = _merged(gather(parts, "lengths of records", seconds))
    with contextlib.suppress(OSError):  # the cache only saves time
        _write(path, whole)
    return whole


def read_parts(
    config: SFTConfig, tokenizer: Any, prompt: Prompt, paths: Sequence[str]
) -> tuple[list[RecordReader], list[TokenCounts]]:
    """Opens files of records with the settings of a run, and counts the tokens of their records.

    Args:
        config: settings of the run.
        tokenizer: tokenizer of the policy.
        prompt: prompt of the policy.
        paths: the files or data sets.
    """
    readers = [
        RecordReader(Records(path, config.protocol), tokenizer, prompt, config.level, config.format)
        for path in paths
    ]
    workers, seconds = config.data_workers, config.mesh.wait_seconds
    return readers, [measure(reader, workers, seconds) for reader in readers]


def _merged(parts: Sequence[TokenCounts]) -> TokenCounts:
    empty = np.zeros(0, np.int32)
    counts = Counts()
    for part in parts:
        counts.merge(part.counts)
    return TokenCounts(
        np.concatenate([empty, *(part.sizes for part in parts)]),
        np.concatenate([empty, *(part.losses for part in parts)]),
        counts,
        sum((part.wording for part in parts), Wording()),
    )


def fitting(reader: RecordReader, measured: TokenCounts, length: int) -> Examples:
    """Selects the records with at most ``length`` tokens, and returns them as training examples.

    A log message states how many records are omitted for which reason, and which protocols were
    inferred from tags.

    Args:
        reader: reads and tokenises the rows.
        measured: token counts of all rows of the reader.
        length: maximum number of tokens of an example.

    Raises:
        UserError: the source has no record, or no record has at most ``length`` tokens.
    """
    source, sizes = reader.records.source, measured.sizes
    number = int(np.count_nonzero(sizes))
    if not number:
        measured.counts.check_some()
        raise UserError(f"{source}: holds no record")
    for line in measured.counts.lines():
        logging.warning("%s: %s", source, line)
    kept = np.flatnonzero((sizes > 0) & (sizes <= length))
    if not len(kept):
        raise UserError(
            f"{source}: none of the {number} records fits in {length} tokens, the shortest has "
            f"{sizes[sizes > 0].min()}: raise row_length"
        )
    if len(kept) < number:
        logging.warning(
            "%s: %d of %d records have more than %d tokens and are left out",
            source, number - len(kept), number, length,
        )  # fmt: skip
    return examples_of(reader, sizes[kept], measured.losses[kept], kept)


# --- the cache ------------------------------------------------------------------------------


def _folder(source: str) -> Path:
    folder = os.environ.get("COA_JAX_LENGTHS")
    if folder and is_url(folder):
        raise UserError(f"COA_JAX_LENGTHS is {folder}; give a local folder")
    return Path(folder) if folder else cache_folder("lengths", source)


def _digest(reader: RecordReader) -> str:
    """Returns a hash of everything that the lengths depend on."""
    first: list[int] = []
    if len(reader.records) and not isinstance(entry := reader.records[0], SkippedRow):
        # If another version of this package tokenises differently, the token ids of this record
        # differ.
        record = one_with_level(entry.record, reader.level, reader.format)
        first = reader.example(record).tokens.tolist()
    tokenizer = reader.tokenizer
    parts = (
        _VERSION,
        reader.records.stamps(),
        (reader.records.protocol, reader.level, reader.format, repr(reader.prompt)),
        (tokenizer.backend_tokenizer.to_str(), chat_template(tokenizer)),
        first,
    )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _read(path: Path, number: int) -> TokenCounts | None:
    """Reads the counts of ``number`` rows from the cache; returns None if the file is unusable."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            sizes, losses = stored["sizes"], stored["losses"]
            notes = json.loads(str(stored["notes"]))
        counts = notes["counts"]
        if not sizes.shape == losses.shape == (number,):
            return None
        return TokenCounts(
            sizes,
            losses,
            Counts(
                {why: _tuples(rows) for why, rows in counts["left_out"].items()},
                Counter(counts["told"]),
                {name: set(tags) for name, tags in counts["tags"].items()},
            ),
            Wording(**{name: _tuples(value) for name, value in notes["wording"].items()}),
        )
    except (OSError, EOFError, zipfile.BadZipFile, *untrusted.MALFORMED):
        return None


def _tuples(value: Any) -> Any:
    """Turns the lists of a JSON value into tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _write(path: Path, measured: TokenCounts) -> None:
    counts: dict[str, Any] = {
        "left_out": measured.counts.left_out,
        "told": measured.counts.inferred,
        "tags": {name: sorted(tags) for name, tags in measured.counts.tags.items()},
    }
    notes = json.dumps({"counts": counts, "wording": dataclasses.asdict(measured.wording)})
    buffer = io.BytesIO()
    np.savez(buffer, sizes=measured.sizes, losses=measured.losses, notes=np.array(notes))
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.replace(path, buffer.getvalue())
