"""Reads trajectories to learn from, in the forms in which they are published and exchanged.

Our own JSONL, LLaMA-Factory's alpaca and ShareGPT files, OpenAI ``messages``, everything that
``coa_jax.distill.export`` writes, in JSON, JSONL, parquet or TFDS.  docs/data.md shows each form.

A file that is damaged is refused.  A row from which nothing can be learned safely, for example one
with an observation that is never closed, is left out and counted.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

from absl import logging

from coa_jax import reading
from coa_jax.bounds import OneOf
from coa_jax.errors import UserError
from coa_jax.protocol import find_protocols, get_protocol, names_with_levels
from coa_jax.records.columns import columns_of, renamed
from coa_jax.records.forms import from_tfds, made_of
from coa_jax.records.rows import Row, find_files, read_rows
from coa_jax.records.split import Unusable, parts_of, parts_of_turns
from coa_jax.trajectory import DistilledRecord

__all__ = [
    "Counts",
    "LeftOut",
    "ProtocolName",
    "Read",
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
    paths = find_files(source)
    for path in paths:
        find_protocols(path)
    if protocol:
        get_protocol(protocol)
    for path in paths:
        info = columns_of(path)
        for row in read_rows(path):
            value, dropped = row.value, ""
            if isinstance(value, dict) and value.keys() == {"filter", "record"}:
                value, dropped = value["record"], str(value["filter"])
            try:
                made = made_of(renamed(value, info), f"{path.stem}:{row.number}", protocol)
            except Unusable as why:
                yield LeftOut(path, row.number, row.where, str(why))
                continue
            except reading.MALFORMED as error:
                raise UserError(f"{row.where}: {_short(reading.reason(error))}") from error
            except UserError as error:
                raise UserError(f"{row.where}: {_short(str(error))}") from None
            yield Read(made.record, row, made.tags, dropped)


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
    if counts.left_out and not records:
        first = counts.left_out[0]
        raise UserError(
            f"{first.where}: {first.reason}; none of the {len(counts.left_out)} rows can be learned"
        )
    for line in counts.lines():
        logging.warning("%s: %s", source, line)
    return records


@dataclasses.dataclass(frozen=True)
class Counts:
    """What a person should know about the rows of some files.

    Attributes:
        left_out: the rows that are not learned.
        told: protocol -> records whose tags told it.
        tags: protocol -> tags by which it was told.
    """

    left_out: list[LeftOut] = dataclasses.field(default_factory=list)
    told: Counter[str] = dataclasses.field(default_factory=Counter)
    tags: dict[str, set[str]] = dataclasses.field(default_factory=lambda: defaultdict(set))

    def add(self, found: Read | LeftOut) -> None:
        """Counts a row."""
        if isinstance(found, LeftOut):
            self.left_out.append(found)
        elif found.tags:
            self.told[found.record.protocol] += 1
            self.tags[found.record.protocol].update(found.tags)

    def lines(self) -> list[str]:
        """Returns a line for each protocol that tags told, and for each reason to leave rows out.

        The first rows of a reason are named.
        """
        lines = [
            f"records that name no protocol: {number}, by their tags {name} "
            f"({', '.join(sorted(self.tags[name]))}); set protocol if it is another"
            for name, number in self.told.items()
        ]
        reasons: dict[str, list[str]] = defaultdict(list)
        for row in self.left_out:
            reasons[row.reason].append(row.where)
        for reason, where in reasons.items():
            named = ", ".join([*where[:2], *(["..."] if where[2:] else [])])
            lines.append(f"rows left out: {len(where)}, because {reason} ({named})")
        return lines
