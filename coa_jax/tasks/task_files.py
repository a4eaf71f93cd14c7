"""Reads rows of data files in any format: JSON, JSON lines, parquet, CSV, TSV."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import decimal
import functools
import hashlib
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coa_jax.config.installed import missing
from coa_jax.errors import UserError
from coa_jax.files import jsonl, untrusted
from coa_jax.protocol import get_protocol
from coa_jax.tasks.base import Task

Row = Mapping[str, Any]

SUFFIXES = (".jsonl", ".json", ".parquet")
"""Suffixes of files whose path alone is a task source, without a name such as ``gaia:``."""
_MOST_ROWS = 100_000_000
_LISTS = ("data", "Data", "rows")  # keys of the list of rows in JSON files


def split_source(source: str) -> tuple[str, str]:
    """Splits a source of the form ``PATH:protocol=NAME``.

    Returns:
        (path, name of the protocol). The name is "" for a source of the form ``PATH``.

    Raises:
        UserError: the source has another option, or the protocol is unknown.
    """
    suffix = next(suffix for suffix in SUFFIXES if suffix in source)
    path, _, rest = source.rpartition(suffix)
    protocol = rest.removeprefix(":protocol=")
    if rest and (protocol == rest or not protocol):
        raise UserError(f"{source}: option {rest!r} is not understood; use :protocol=NAME")
    if protocol:
        get_protocol(protocol)
    return path + suffix, protocol


def read_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Yields the rows of a file, each as a mapping from field name to value.

    Args:
        path: the file. Its suffix determines the format: ``.parquet``, ``.jsonl``, ``.csv`` or
            ``.tsv``. A file with any other suffix is read as JSON.
        columns: names of the fields that the caller uses. The other columns of a parquet file are
            not read. None reads all columns.

    Raises:
        UserError: the file cannot be read, or contains something other than rows.
    """
    if not os.path.lexists(path):
        raise UserError(f"{path}: cannot be read: no such file; download it or correct the path")
    number = 0
    readers: dict[str, Callable[[Path], Iterator[Any]]] = {
        ".parquet": functools.partial(_parquet, columns=columns),
        ".jsonl": lambda path: jsonl.read_lines(path, lambda row: row),
        ".csv": _table,
        ".tsv": _table,
    }
    try:
        for number, row in enumerate(readers.get(path.suffix, _json)(path), 1):
            if not isinstance(row, Mapping):
                kind = type(row).__name__
                raise UserError(f"{path}: row {number}: expected an object, found {kind}")
            yield row
    except (OSError, csv.Error, NotImplementedError, *untrusted.MALFORMED) as error:
        why = untrusted.reason(error)
        raise UserError(f"{path}: cannot be read after row {number}: {why}") from error


def _json(path: Path) -> Iterator[Any]:
    rows = untrusted.read_json(path, limit=None)
    if isinstance(rows, dict):
        rows = next((rows[key] for key in _LISTS if isinstance(rows.get(key), list)), None)
    if not isinstance(rows, list):
        raise UserError(f"{path}: expected a list of objects")
    yield from rows


def _table(path: Path) -> Iterator[Any]:
    file = io.StringIO(untrusted.read_text(path), newline="")
    rows = csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
    for row in rows:
        if None in row or None in row.values():
            raise ValueError(f"line {rows.line_num} does not have as many fields as line 1")
        yield row


def _parquet(path: Path, columns: Sequence[str] | None = None) -> Iterator[Any]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise missing(f"{path}: reading parquet", "pyarrow", "tasks") from None
    with untrusted.open_file(path) as raw, pyarrow.parquet.ParquetFile(raw) as file:
        if file.metadata.num_rows > _MOST_ROWS:
            raise ValueError(f"it claims to have {file.metadata.num_rows:,} rows")
        there = file.schema_arrow.names
        wanted = None if columns is None else [name for name in columns if name in there]
        # Batches are small, because a row with tests may have megabytes.
        for batch in file.iter_batches(batch_size=64, columns=wanted):
            yield from map(plain, batch.to_pylist())


def plain(value: Any) -> Any:
    """Converts a value from a data file to a JSON value.

    Dates, decimals, durations and bytes become strings, and NumPy arrays become lists. Values in
    dicts and lists are converted too.
    """
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, datetime.date | datetime.time):  # includes datetime
        return value.isoformat()
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return str(value) if isinstance(value, decimal.Decimal | datetime.timedelta) else value


def golds(value: Any) -> tuple[str, ...]:
    """Converts the value of a row's answer field to a tuple of accepted answers.

    Args:
        value: a string, a number, or a list of strings and numbers.

    Raises:
        ValueError: the value has another type, or an answer is empty.
    """
    values = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(v, str | int | float) and not isinstance(v, bool) for v in values):
        raise ValueError("an answer must be a string, a number or a list of them")
    gold = tuple(str(v).strip() for v in values)
    if not gold or not all(gold):
        raise ValueError("an answer is empty")
    return gold


def add_tasks(
    tasks: list[Task], rows: Iterable[Row], make: Callable[[Row, int], Task | None], where: object
) -> None:
    """Converts the rows of a file to tasks, and appends them to the tasks of earlier files.

    If several tasks have the same id, the first task keeps it. The id of a later task becomes
    ``ID#ROW``, with the row number of this task. If another file has led to the same ``ID#ROW``,
    the id becomes ``ID#ROW.COUNT``.

    Args:
        tasks: tasks of earlier files; the function changes this list.
        rows: the rows.
        make: function that converts a row to a task. If the function returns None, the row is left
            out. Its second argument is the number of the task, from 1, for rows without an id.
        where: name of the file, used in error messages.

    Raises:
        UserError: a row cannot become a task; the message begins with ``where: row i:``.
    """
    seen = {task.id for task in tasks}
    for number, row in enumerate(rows, 1):
        try:
            task = make(row, len(tasks) + 1)
        except untrusted.MALFORMED as error:
            raise UserError(f"{where}: row {number}: {untrusted.reason(error)}") from error
        if task is None:
            continue
        found, copies = task.id, 1
        while found in seen:
            found = f"{task.id}#{number}" if copies == 1 else f"{task.id}#{number}.{copies}"
            copies += 1
        seen.add(found)
        tasks.append(dataclasses.replace(task, id=found))


def draw(tasks: Sequence[Task], n: int | None, seed: int) -> list[Task]:
    """Chooses ``n`` tasks at random, in random order. The same arguments give the same result.

    Args:
        tasks: tasks to choose from.
        n: number of tasks, at most all. None returns all tasks in their present order.
        seed: seed of the random choice and order.
    """
    if n is None:
        return list(tasks)

    def place(task: Task) -> str:
        return hashlib.sha256(f"{seed}\n{task.id}".encode(errors="replace")).hexdigest()

    return sorted(tasks, key=place)[:n]
