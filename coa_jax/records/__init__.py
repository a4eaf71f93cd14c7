"""Reads trajectories to learn from, in the forms in which they are published and exchanged.

Our own JSONL, LLaMA-Factory's alpaca and ShareGPT files, OpenAI ``messages``, everything that
``coa_jax.distill.export`` writes, in JSON, JSONL, parquet or TFDS.  docs/data.md shows each form.

A file that is damaged is refused.  A row from which nothing can be learned safely, for example one
with an observation that is never closed, is left out and counted.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from absl import logging

from coa_jax import files, jsonl
from coa_jax.errors import UserError
from coa_jax.protocol import get_protocol
from coa_jax.records.forms import from_tfds, made_of, renamed
from coa_jax.records.rows import Row, find_files, read_rows
from coa_jax.records.split import Unusable, parts_of, parts_of_turns
from coa_jax.trajectory import DistilledRecord

__all__ = [
    "LeftOut",
    "Read",
    "check_protocol",
    "from_tfds",
    "iterate_records",
    "parts_of",
    "parts_of_turns",
    "read_records",
]


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


def check_protocol(name: str) -> None:
    """Refuses the name of an unknown protocol; "" leaves the protocol open.

    Raises:
        UserError: no protocol has this name.
    """
    if name:
        get_protocol(name)


def iterate_records(source: str | os.PathLike[str], protocol: str = "") -> Iterator[Read | LeftOut]:
    """Yields what became of each row, one row at a time.

    Args:
        source: files, as for `rows.find_files`.
        protocol: protocol of the rows that name none; "" to tell it by their tags.

    Raises:
        UserError: a file cannot be read, or a row is damaged; the message names file and row.
    """
    check_protocol(protocol)
    for path in find_files(source):
        info = _columns(path)
        for row in read_rows(path):
            value, dropped = row.value, ""
            if isinstance(value, dict) and value.keys() == {"filter", "record"}:
                value, dropped = value["record"], str(value["filter"])
            try:
                made = made_of(renamed(value, info), f"{path.stem}:{row.number}", protocol)
            except Unusable as why:
                yield LeftOut(path, row.number, row.where, str(why))
                continue
            except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
                raise UserError(f"{row.where}: {jsonl.why(error)}") from error
            except UserError as error:
                raise UserError(f"{row.where}: {error}") from None
            yield Read(made.record, row, made.tags, dropped)


def read_records(source: str | os.PathLike[str], protocol: str = "") -> list[DistilledRecord]:
    """Reads all records of some files; logs how many rows are left out, and inferred protocols.

    Args:
        source: files, as for `rows.find_files`.
        protocol: protocol of the rows that name none; "" to tell it by their tags.

    Raises:
        UserError: as for `iterate_records`, or no row of several can be learned.
    """
    records: list[DistilledRecord] = []
    left_out: list[LeftOut] = []
    told: dict[str, Counter[str]] = defaultdict(Counter)
    for found in iterate_records(source, protocol):
        if isinstance(found, LeftOut):
            left_out.append(found)
            continue
        records.append(found.record)
        if found.tags:
            told[found.record.protocol].update((*found.tags, ""))
    if left_out and not records:
        first = left_out[0]
        raise UserError(
            f"{first.where}: {first.reason}; none of the {len(left_out)} rows can be learned"
        )
    for line in summary(left_out, told):
        logging.warning("%s", line)
    return records


def summary(left_out: list[LeftOut], told: dict[str, Counter[str]]) -> list[str]:
    """Returns lines on the rows that are left out and on the protocols that tags told.

    Args:
        left_out: the rows.
        told: protocol -> how often each tag decided, and under "" the number of records.
    """
    lines = []
    for name, tags in told.items():
        number = tags.pop("")
        lines.append(
            f"{number} records name no protocol; by their tags it is {name} "
            f"({', '.join(sorted(tags))}); the setting protocol says otherwise"
        )
    reasons: dict[str, list[LeftOut]] = defaultdict(list)
    for row in left_out:
        reasons[row.reason].append(row)
    for reason, rows in reasons.items():
        also = f", {rows[1].where}" if rows[1:] else ""
        more = ", ..." if rows[2:] else ""
        lines.append(f"{len(rows)} rows are left out: {reason} ({rows[0].where}{also}{more})")
    return lines


def _columns(path: Path) -> dict[str, Any]:
    """Returns what LLaMA-Factory's ``dataset_info.json`` beside a file says of its columns."""
    info = path.parent / "dataset_info.json"
    if not info.is_file() or (path.parent / "features.json").is_file():
        return {}
    try:
        entries = [e for e in files.read_json_object(info).values() if isinstance(e, dict)]
    except RecursionError:
        raise UserError(f"{info}: nested too deeply; mend or remove the file") from None
    return next((entry for entry in entries if entry.get("file_name") == path.name), {})
