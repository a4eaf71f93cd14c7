"""Reads trajectories to learn from, in the forms in which they are published and exchanged.

Our own JSONL, LLaMA-Factory's alpaca and ShareGPT files, OpenAI ``messages``, everything that
``coa_jax.distill.export`` writes, in JSON, JSONL, parquet, ArrayRecord, TFDS or on the hub.
docs/data.md shows each form.

A file that is damaged is refused.  A row from which nothing can be learned safely, for example one
with an observation that is never closed, is left out and counted.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from absl import logging

from coa_jax import reading
from coa_jax.bounds import OneOf
from coa_jax.errors import UserError
from coa_jax.protocol import find_protocols, get_protocol, names_with_levels
from coa_jax.records.columns import columns_of, renamed
from coa_jax.records.forms import from_tfds, made_of
from coa_jax.records.rows import Row, find_files, open_rows, read_rows
from coa_jax.records.split import Unusable, parts_of, parts_of_turns
from coa_jax.records.tables import stamp
from coa_jax.trajectory import DistilledRecord

__all__ = [
    "Counts",
    "LeftOut",
    "ProtocolName",
    "Read",
    "Records",
    "from_tfds",
    "iterate_records",
    "parts_of",
    "parts_of_turns",
    "read_records",
]


def _protocols() -> tuple[str, ...]:
    return ("", *names_with_levels())


ProtocolName = Annotated[str, OneOf(_protocols)]
"""Setting: the protocol of records that name none; "" to tell it by their tags."""


class LeftOut(NamedTuple):
    """A row that is not learned, and why."""

    path: Path
    number: int
    where: str
    reason: str


class Read(NamedTuple):
    """A row that became a record.

    Attributes:
        record: the record.
        row: the row it comes from.
        tags: the tags that told its protocol; none where row or setting name the protocol.
        dropped: name of the filter, for a row of the ``dropped/`` files of ``coa_jax.distill``.
    """

    record: DistilledRecord
    row: Row
    tags: tuple[str, ...] = ()
    dropped: str = ""


def iterate_records(source: str | os.PathLike[str], protocol: str = "") -> Iterator[Read | LeftOut]:
    """Yields what became of each row, one row at a time.

    Args:
        source: files, as for `rows.find_files`.
        protocol: protocol of the rows that name none; "" to tell it by their tags.

    Raises:
        UserError: a file cannot be read, or a row is damaged; the message names file and row.
    """
    for path in _opened(source, protocol):
        info = columns_of(path)
        for row in read_rows(path):
            yield _found(row, info, protocol)


def _opened(source: str | os.PathLike[str], protocol: str) -> list[Path]:
    """Returns the files of a source, whose protocols are known from now on."""
    paths = find_files(source)
    for path in paths:
        find_protocols(path)
    if protocol:
        get_protocol(protocol)
    return paths


def _found(row: Row, info: Mapping[str, Any], protocol: str) -> Read | LeftOut:
    """Makes a record of a row, see `iterate_records`."""
    value, dropped = row.value, ""
    if isinstance(value, dict) and value.keys() == {"filter", "record"}:
        value, dropped = value["record"], str(value["filter"])
    try:
        made = made_of(renamed(value, info), f"{row.path.stem}:{row.number}", protocol)
    except Unusable as why:
        return LeftOut(row.path, row.number, row.where, str(why))
    except reading.MALFORMED as error:
        raise UserError(f"{row.where}: {_short(reading.reason(error))}") from error
    except UserError as error:
        raise UserError(f"{row.where}: {_short(str(error))}") from None
    return Read(made.record, row, made.tags, dropped)


class Records:
    """The rows of some files, each read when it is asked for.

    Memory holds where the rows begin, 16 bytes a row.  An instance can be sent to another process.
    """

    def __init__(self, source: str | os.PathLike[str], protocol: str = "") -> None:
        """Opens the files.

        Args:
            source: files, as for `rows.find_files`.
            protocol: protocol of the rows that name none; "" to tell it by their tags.

        Raises:
            UserError: a file cannot be read, or is damaged where its rows begin and end.
        """
        self.source, self.protocol = os.fspath(source), protocol
        paths = _opened(source, protocol)
        self._files = [open_rows(path) for path in paths]
        self._columns = [columns_of(path) for path in paths]
        self._ends = list(itertools.accumulate(map(len, self._files)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Read | LeftOut:
        """Reads a row.

        Raises:
            UserError: the row is damaged; the message names file and row.
        """
        if not 0 <= index < len(self):
            raise IndexError(index)
        file = bisect.bisect_right(self._ends, index)
        rows = self._files[file]
        row = rows[index - self._ends[file] + len(rows)]
        return _found(row, self._columns[file], self.protocol)

    def stamps(self) -> list[str]:
        """Returns a text for each file that changes when the file is written anew."""
        return [f"{rows.path.absolute()} {len(rows)} {stamp(rows.path)}" for rows in self._files]


def _short(reason: str) -> str:
    """Returns a reason without the middle of a long text that it quotes."""
    return reason if len(reason) <= 300 else f"{reason[:150]} ... {reason[-140:]}"


def read_records(source: str | os.PathLike[str], protocol: str = "") -> list[DistilledRecord]:
    """Reads all records of some files; logs how many rows are left out, and inferred protocols.

    Args:
        source: files, as for `rows.find_files`.
        protocol: protocol of the rows that name none; "" to tell it by their tags.

    Raises:
        UserError: as for `iterate_records`, or no row of several can be learned.
    """
    records: list[DistilledRecord] = []
    counts = Counts()
    for found in iterate_records(source, protocol):
        counts.add(found)
        if isinstance(found, Read):
            records.append(found.record)
    if not records:
        counts.check_some()
    for line in counts.lines():
        logging.warning("%s: %s", source, line)
    return records


@dataclasses.dataclass(frozen=True)
class Counts:
    """What a person should know about the rows of some files.

    Attributes:
        left_out: reason -> rows that are left out for it, and the places of the first two.
        told: protocol -> records whose tags told it.
        tags: protocol -> tags by which it was told.
    """

    left_out: dict[str, tuple[int, tuple[str, ...]]] = dataclasses.field(default_factory=dict)
    told: Counter[str] = dataclasses.field(default_factory=Counter)
    tags: dict[str, set[str]] = dataclasses.field(default_factory=lambda: defaultdict(set))

    def add(self, found: Read | LeftOut) -> None:
        """Counts a row."""
        if isinstance(found, LeftOut):
            self._leave_out(found.reason, 1, (found.where,))
        elif found.tags:
            self.told[found.record.protocol] += 1
            self.tags[found.record.protocol].update(found.tags)

    def merge(self, later: Counts) -> None:
        """Adds what was counted of later rows."""
        for reason, (number, where) in later.left_out.items():
            self._leave_out(reason, number, where)
        self.told.update(later.told)
        for name, tags in later.tags.items():
            self.tags[name].update(tags)

    def _leave_out(self, reason: str, number: int, where: tuple[str, ...]) -> None:
        before, first = self.left_out.get(reason, (0, ()))
        self.left_out[reason] = before + number, (*first, *where)[:2]

    def check_some(self) -> None:
        """Raises UserError where rows are left out; called where no row is a record."""
        for reason, (_, where) in self.left_out.items():
            number = sum(number for number, _ in self.left_out.values())
            raise UserError(f"{where[0]}: {reason}; none of the {number} rows can be learned")

    def lines(self) -> list[str]:
        """Returns a line for each protocol that tags told, and for each reason to leave rows out.

        The first rows of a reason are named.
        """
        lines = [
            f"records that name no protocol: {number}, by their tags {name} "
            f"({', '.join(sorted(self.tags[name]))}); set protocol if it is another"
            for name, number in self.told.items()
        ]
        for reason, (number, where) in self.left_out.items():
            named = ", ".join([*where, *(["..."] if number > 2 else [])])
            lines.append(f"rows left out: {number}, because {reason} ({named})")
        return lines
