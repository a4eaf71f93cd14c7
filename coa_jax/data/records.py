"""Reads trajectories for training from data sets in all common formats.

A row may be a record of this project, an alpaca or ShareGPT row of LLaMA-Factory, a list of OpenAI
``messages``, or anything that ``coa-jax export-data`` writes. The rows may come from JSON,
JSONL, parquet and ArrayRecord files, from TFDS, or from the Hugging Face Hub. docs/data.md shows
each format.

A damaged file is refused. A row that cannot be used for training, such as a row with an observation
that is never closed, is left out and counted.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from absl import logging

from coa_jax.config.fields import OneOf
from coa_jax.data.columns import columns_of, rename_columns
from coa_jax.data.row_formats import convert_row
from coa_jax.data.row_formats import from_tfds as from_tfds
from coa_jax.data.rows import Row, find_files, open_rows
from coa_jax.data.text_parts import Unusable
from coa_jax.data.text_parts import parts_of_turns as parts_of_turns
from coa_jax.data.trajectory import DistilledRecord
from coa_jax.errors import UserError
from coa_jax.files import untrusted
from coa_jax.protocol import find_protocols, get_protocol, names_with_levels

LONGEST = 16 << 20
"""Maximum size of a row in bytes. A trajectory of 32,768 tokens has only about 150 kB."""

ProtocolName = Annotated[str, OneOf(lambda: ("", *names_with_levels()))]
"""Type of a setting for the protocol of records that name no protocol.

The value "" infers the protocol of such a record from its tags.
"""


class SkippedRow(NamedTuple):
    """A row that is left out because it cannot be used for training, see `text_parts.Unusable`.

    Attributes:
        row: where the row is, and its fields.
        reason: why the row is left out.
    """

    row: Row
    reason: str


class ReadRecord(NamedTuple):
    """A record (a trajectory to train on, as text), with the row from which it was read.

    Attributes:
        record: what the row contains.
        row: where the record was read.
        tags: tags from which the protocol was inferred; () if the row itself or the
            caller names the protocol.
        dropped: name of the filter that dropped the record, if the row comes from a ``dropped/``
            file of ``coa-jax distill``; else "".
    """

    record: DistilledRecord
    row: Row
    tags: tuple[str, ...] = ()
    dropped: str = ""


def iterate_records(
    source: str | os.PathLike[str], protocol: str = ""
) -> Iterator[ReadRecord | SkippedRow]:
    """Reads records one by one, so that only one row is in memory at a time.

    Args:
        source: files to read, see `rows.find_files`.
        protocol: protocol of rows that name no protocol; "" infers the protocol from the tags of
            each row.

    Yields:
        For each row a `ReadRecord` with the record, or a `SkippedRow` with the reason.

    Raises:
        UserError: a file cannot be read, or a row is damaged. The message names the file and the
            row.
    """
    for path in _find_files(source, protocol):
        info = columns_of(path)
        for row in open_rows(path, longest=LONGEST):
            yield _read_row(row, info, protocol)


def _find_files(source: str | os.PathLike[str], protocol: str) -> list[Path]:
    """Returns the files of a source, and registers the protocols in ``protocols.json`` nearby.

    Raises:
        UserError: no file is found, or the protocol is unknown.
    """
    paths = find_files(source)
    for path in paths:
        find_protocols(path)
    if protocol:
        get_protocol(protocol)
    return paths


def _read_row(row: Row, info: Mapping[str, Any], protocol: str) -> ReadRecord | SkippedRow:
    """Converts a row to a record, see `iterate_records`."""
    value, dropped = row.value, ""
    if value.keys() == {"filter", "record"}:
        value, dropped = value["record"], str(value["filter"])
    try:
        made = convert_row(rename_columns(value, info), f"{row.path.stem}:{row.number}", protocol)
    except Unusable as why:
        return SkippedRow(row, str(why))
    except (*untrusted.MALFORMED, UserError) as error:
        raise UserError(f"{row.where}: {untrusted.reason(error)}") from error
    return ReadRecord(made.record, row, made.tags, dropped)


class Records:
    """The rows of data files, read when accessed, as a sequence of `ReadRecord` and `SkippedRow`.

    Only the positions of the rows in the files are kept in memory, which takes at most 24 bytes per
    row. Objects of this class can be pickled.
    """

    def __init__(self, source: str | os.PathLike[str], protocol: str = "") -> None:
        """Opens the files and finds the positions of their rows.

        Args:
            source: files to read, see `rows.find_files`.
            protocol: protocol of rows that name no protocol; "" infers the protocol from the tags
                of each row.

        Raises:
            UserError: a file cannot be read, or is so damaged that its rows cannot be separated.
        """
        self.source, self.protocol = os.fspath(source), protocol
        paths = _find_files(source, protocol)
        self._files = [open_rows(path, longest=LONGEST) for path in paths]
        self._columns = [columns_of(path) for path in paths]
        self._ends = list(itertools.accumulate(map(len, self._files)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> ReadRecord | SkippedRow:
        """Reads a row; returns a `ReadRecord` with the record, or a `SkippedRow` with the reason.

        Raises:
            UserError: the row is damaged. The message names the file and the row.
        """
        if not 0 <= index < len(self):
            raise IndexError(index)
        file = bisect.bisect_right(self._ends, index)
        rows = self._files[file]
        position = index - self._ends[file] + len(rows)
        return _read_row(rows[position], self._columns[file], self.protocol)

    def stamps(self) -> list[str]:
        """Returns for each file a text that changes when the file is rewritten.

        A cache of results about the rows can use these texts as part of its key.
        """
        return [f"{rows.path.absolute()} {len(rows)} {rows.stamp}" for rows in self._files]


def read_records(source: str | os.PathLike[str], protocol: str = "") -> list[DistilledRecord]:
    """Reads all records of some files.

    The function logs how many rows are left out and why, and which protocols were inferred.

    Args:
        source: files to read, see `rows.find_files`.
        protocol: protocol of rows that name no protocol; "" infers the protocol from the tags of
            each row.

    Raises:
        UserError: a file cannot be read, a row is damaged, or all rows are left out.
    """
    counts, records = Counts(), list[DistilledRecord]()
    for outcome in iterate_records(source, protocol):
        counts.add(outcome)
        if isinstance(outcome, ReadRecord):
            records.append(outcome.record)
    if not records:
        counts.check_some()
    for line in counts.lines():
        logging.warning("%s: %s", source, line)
    return records


def records_of_rows(rows: Iterable[DistilledRecord | Mapping[str, Any]]) -> list[DistilledRecord]:
    """Converts rows from Python, such as a list of dicts or a ``datasets.Dataset``, to records.

    A row has one of the formats of docs/data.md. Records stay as they are.

    Raises:
        UserError: a row cannot be used; the message names its index.
    """
    records = []
    for index, row in enumerate(rows):
        if not isinstance(row, DistilledRecord):
            try:
                row = convert_row(dict(row), str(index)).record
            except (*untrusted.MALFORMED, UserError) as error:  # Unusable is malformed, too
                raise UserError(f"data[{index}]: {untrusted.reason(error)}") from error
        records.append(row)
    return records


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts rows that are left out and records whose protocol was inferred, for log messages.

    Attributes:
        left_out: reason -> (number of rows left out, file and row of the first two of these rows).
        inferred: inferred protocol -> number of records for which this protocol was inferred.
        tags: inferred protocol -> tags from which the protocol was inferred.
    """

    left_out: dict[str, tuple[int, tuple[str, ...]]] = dataclasses.field(default_factory=dict)
    inferred: Counter[str] = dataclasses.field(default_factory=Counter)
    tags: dict[str, set[str]] = dataclasses.field(default_factory=lambda: defaultdict(set))

    def add(self, entry: ReadRecord | SkippedRow) -> None:
        """Counts a row, which was converted (`ReadRecord`) or left out (`SkippedRow`)."""
        if isinstance(entry, SkippedRow):
            self._leave_out(entry.reason, 1, (entry.row.where,))
        elif entry.tags:
            self.inferred[entry.record.protocol] += 1
            self.tags[entry.record.protocol].update(entry.tags)

    def merge(self, later: Counts) -> None:
        """Adds the counts of other rows, which must come after the rows counted so far."""
        for reason, (number, locations) in later.left_out.items():
            self._leave_out(reason, number, locations)
        self.inferred.update(later.inferred)
        for name, tags in later.tags.items():
            self.tags[name].update(tags)

    def _leave_out(self, reason: str, number: int, locations: tuple[str, ...]) -> None:
        before, first = self.left_out.get(reason, (0, ()))
        self.left_out[reason] = before + number, (*first, *locations)[:2]

    def check_some(self) -> None:
        """Raises an error if rows were left out. Call it only if no row has become a record.

        Raises:
            UserError: rows were left out. The message contains the first reason.
        """
        for reason, (_, locations) in self.left_out.items():
            number = sum(number for number, _ in self.left_out.values())
            raise UserError(f"{locations[0]}: {reason}; none of the {number} rows can be used")

    def lines(self) -> list[str]:
        """Returns the counts as log messages, one per inferred protocol and per reason."""
        return [
            f"records that name no protocol: {number}, by their tags {name} "
            f"({', '.join(sorted(self.tags[name]))}); set protocol if this is wrong"
            for name, number in self.inferred.items()
        ] + [
            f"rows left out: {number}, because {reason} "
            f"({', '.join(locations)}{', ...' if number > 2 else ''})"
            for reason, (number, locations) in self.left_out.items()
        ]
