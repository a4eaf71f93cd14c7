"""Gives random access to rows of CSV, TSV, parquet and ArrayRecord files.

Each function opens one kind of file. The functions in the result can be pickled; a process that
unpickles such a function opens the file again. Open files are cached by path and `stamp`, so that a
rewritten file is opened again.
"""

from __future__ import annotations

import array
import codecs
import csv
import datetime
import decimal
import functools
import io
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from coa_jax.config.installed import missing
from coa_jax.errors import UserError
from coa_jax.files import jsonl, untrusted

Columns = Callable[[list[str]], Iterable[str]] | None
"""A function from the names of all columns of a table to the names of the columns to read.

None reads all columns.
"""

_HELD = 1 << 30  # maximum number of bytes of decoded parquet in memory
_MOST_ROWS = 100_000_000
_BATCH = 64  # rows of a parquet file that are decoded together; a row may have megabytes


class Opened(NamedTuple):
    """The rows of an opened file or data set.

    Attributes:
        size: number of rows.
        read: function that returns the row at an index, as a JSON value.
        stamp: text that is different after the file has been rewritten, see `stamp`.
        lines: number of the line at which each row begins, counted from 1; None for files without
            lines.
        stream: function that returns an iterator over all rows, which needs less memory or time
            than ``read``; None if there is no such function.
    """

    size: int
    read: Callable[[int], Any]
    stamp: str
    lines: np.ndarray | None = None
    stream: Callable[[], Iterator[Any]] | None = None


def stamp(path: Path) -> str:
    """Returns a text that changes whenever the file at a path is rewritten."""
    status = path.stat()
    return f"{status.st_size}:{status.st_mtime_ns}"


def plain(value: Any) -> Any:
    """Converts a value of a table to a JSON value.

    Dates, decimals, durations and UTF-8 bytes become strings, and NumPy arrays become lists. Values
    in dicts and lists are converted too. Bytes that are not UTF-8 stay bytes.
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
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    return str(value) if isinstance(value, decimal.Decimal | datetime.timedelta) else value


# --- CSV and TSV -----------------------------------------------------------------------------


def delimited(path: Path, longest: int) -> Opened:
    """Opens a CSV or TSV file, whose first line has the names of the columns.

    A row maps each name to the text of its cell, or to None if the cell is empty.

    Args:
        path: the file; the cells of a file ``*.tsv`` are separated by tabs.
        longest: maximum size of a row in bytes.

    Raises:
        UserError: a row has more bytes, or has another number of cells than the first line, or the
            file is not CSV in UTF-8.
    """
    names: list[str] = []
    starts, lines = array.array("q"), array.array("q")
    with untrusted.open_file(path) as file:
        begin = len(codecs.BOM_UTF8) if file.read(3) == codecs.BOM_UTF8 else 0
        file.seek(begin)
        for start, line, cells in _records(path, file, begin, 1, longest):
            if not cells:  # a blank line
                continue
            if names and len(cells) != len(names):
                raise UserError(
                    f"{path}:{line}: the number of cells is {len(cells)}, but the table has "
                    f"{len(names)} columns"
                )
            if names:
                starts.append(start)
                lines.append(line)
            names = names or cells
    numbers = np.asarray(lines, np.int64)
    places = np.asarray(starts, np.int64)
    read = functools.partial(_cells, path, tuple(names), places, numbers, longest)
    return Opened(len(starts), read, stamp(path), numbers)


def _records(
    path: Path, file: IO[bytes], at: int, line: int, longest: int
) -> Iterator[tuple[int, int, list[str]]]:
    """Yields each record from the byte ``at``: its first byte, its first line and its cells."""
    csv.field_size_limit(max(longest, csv.field_size_limit()))  # of the process; 128 kB at first
    text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="")
    start, first = at, line

    def record_lines() -> Iterator[str]:
        nonlocal at, line
        while part := text.readline(longest + 1):
            encoded = part.encode("utf-8", "surrogateescape")
            encoded.decode()  # raises an error that names the byte
            at += len(encoded)
            line += 1
            if at - start > longest:
                raise UserError(f"{path}:{first}: a row of more than {longest >> 20} MiB")
            yield part

    delimiter = "\t" if path.suffix == ".tsv" else ","
    reader = csv.reader(record_lines(), delimiter=delimiter, strict=True)
    while True:
        start, first = at, line
        try:
            cells = next(reader, None)
        except (csv.Error, ValueError) as error:
            raise UserError(f"{path}:{first}: not a table: {untrusted.reason(error)}") from error
        if cells is None:
            return
        yield start, first, cells


def _cells(
    path: Path, names: tuple[str, ...], starts: np.ndarray, lines: np.ndarray, longest: int, i: int
) -> dict[str, str | None]:
    with untrusted.open_file(path) as file:
        file.seek(int(starts[i]))
        _, _, cells = next(_records(path, file, int(starts[i]), int(lines[i]), longest))
    return {name: cell or None for name, cell in zip(names, cells, strict=True)}


# --- ArrayRecord files of JSON -------------------------------------------------------------


def array_record(path: Path) -> Opened:
    """Opens an ArrayRecord file whose records are JSON.

    Raises:
        UserError: the file is not an ArrayRecord file, or its end is missing.
    """
    seen = stamp(path)
    try:
        size = _array_record(path, seen).num_records()
    except RuntimeError as error:
        raise UserError(f"{path}: not an ArrayRecord file, or its end is missing") from error
    return Opened(size, functools.partial(_array_record_row, path, seen), seen)


@functools.lru_cache(maxsize=256)
def _array_record(path: Path, seen: str) -> Any:
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(os.fspath(path), "readahead_buffer_size:0")
    if not reader.ok():
        raise RuntimeError
    return reader


def _array_record_row(path: Path, seen: str, index: int) -> Any:
    (row,) = _array_record(path, seen).read([index])
    return jsonl.loads(row.decode())


# --- parquet -------------------------------------------------------------------------------


def parquet(path: Path, columns: Columns = None) -> Opened:
    """Opens a parquet file.

    ``read`` decodes one row group at a time. If the decoded file has more than 1 GiB, only some row
    groups stay in memory, so that reading rows in random order is slow. ``stream`` decodes a few
    rows at a time.

    Raises:
        UserError: pyarrow is not installed, or the file is damaged.
    """
    try:
        import pyarrow.parquet
    except ImportError:
        raise missing(f"{path}: parquet", "pyarrow", "tasks") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            ends = np.cumsum([0, *(group.num_rows for group in groups)], dtype=np.int64)
            size = sum(group.total_byte_size for group in groups)
            names = file.schema_arrow.names
        if ends[-1] > _MOST_ROWS:
            raise ValueError(f"it claims to have {ends[-1]:,} rows")
    except (pyarrow.ArrowException, ValueError, OSError) as error:
        why = untrusted.reason(error)
        raise UserError(f"{path}: damaged parquet ({why}); fetch it again") from error
    held = min(len(groups), _HELD * len(groups) // max(size, 1)) or 1
    chosen = None if columns is None else tuple(columns(names))
    read = functools.partial(_parquet_row, path, stamp(path), chosen, ends, held)
    stream = functools.partial(_parquet_rows, path, chosen)
    return Opened(int(ends[-1]), read, stamp(path), stream=stream)


def _parquet_row(
    path: Path, seen: str, columns: tuple[str, ...] | None, ends: np.ndarray, held: int, index: int
) -> Any:
    group = int(np.searchsorted(ends, index, side="right")) - 1
    table = _row_groups(path, seen, columns, held)(group)
    return plain(table.slice(index - int(ends[group]), 1).to_pylist()[0])


@functools.lru_cache(maxsize=64)
def _row_groups(
    path: Path, seen: str, columns: tuple[str, ...] | None, held: int
) -> Callable[[int], Any]:
    """Returns a function that reads a row group as an Arrow table.

    The function keeps the last ``held`` row groups in memory.
    """
    import pyarrow.parquet

    @functools.lru_cache(maxsize=held)
    def table(group: int) -> Any:
        with pyarrow.parquet.ParquetFile(path) as file:
            return file.read_row_group(group, columns)

    return table


def _parquet_rows(path: Path, columns: tuple[str, ...] | None) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(_BATCH, columns=columns):
            yield from map(plain, batch.to_pylist())
