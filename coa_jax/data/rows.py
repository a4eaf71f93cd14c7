"""Opens files, folders, URLs and data sets as sequences of rows, each with its place for messages.

The first bytes of a file determine its format (parquet, a JSON list, or one JSON object per line);
only CSV, TSV and ArrayRecord files are known by their names. Rows are read when they are accessed:
`open_rows` keeps only the position of each row in memory, with 16 bytes per row. A row larger than
a limit is refused before it is decoded.
"""

from __future__ import annotations

import array
import codecs
import dataclasses
import functools
import glob
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from coa_jax.data import tables
from coa_jax.data.data_sets import is_data_set, is_tfds, local_tfds, open_data_set
from coa_jax.data.tables import Columns, Opened
from coa_jax.errors import UserError
from coa_jax.files import jsonl, untrusted
from coa_jax.storage import local

SUFFIXES = (".json", ".jsonl", ".parquet", ".array_record", ".csv", ".tsv")
_LISTS = (b'"data"', b'"Data"', b'"rows"', b'"records"')
"""Keys of the list of rows, if a file is a JSON object."""

Fields = Mapping[str, Any]
"""The content of a row: field name -> JSON value."""


class Row(NamedTuple):
    """A row of a file.

    Attributes:
        path: the file.
        number: number of the line at which the row begins, in a JSONL, CSV or TSV file; or row
            number in a file of another format. Both are counted from 1.
        where: file and row, as text for messages.
        value: the fields of the row.
    """

    path: Path
    number: int
    where: str
    value: Fields


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """A sequence of the rows of a file. A row is read when it is accessed.

    Pickling an object of this class does not copy the rows.

    Attributes:
        path: the file.
        opened: number of rows, and the functions that read the rows.
    """

    path: Path
    opened: Opened

    def __len__(self) -> int:
        return self.opened.size

    def __getitem__(self, index: int) -> Row:
        """Reads a row.

        Raises:
            UserError: the row cannot be read, or is not an object. The message names the file and
                the row.
        """
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._row(index, functools.partial(self.opened.read, index))

    def __iter__(self) -> Iterator[Row]:
        """Reads all rows in order; only a few rows are in memory at a time.

        Raises:
            UserError: as in `__getitem__`.
        """
        stream = self.opened.stream
        values = stream() if stream else map(self.opened.read, range(len(self)))
        for index in range(len(self)):
            yield self._row(index, functools.partial(next, values))

    def _row(self, index: int, read: Callable[[], Any]) -> Row:
        lines = self.opened.lines
        number = index + 1 if lines is None else int(lines[index])
        where = f"{self.path}: row {number}" if lines is None else f"{self.path}:{number}"
        try:
            value = read()
        except UserError:
            raise
        except Exception as error:  # TFDS, Arrow and ArrayRecord each have errors of their own
            raise UserError(f"{where}: {untrusted.reason(error)}") from error
        if not isinstance(value, dict):
            raise UserError(f"{where}: expected an object, found {type(value).__name__}")
        return Row(self.path, number, where, value)


def find_files(source: str | os.PathLike[str]) -> list[Path]:
    """Returns the files that a setting such as ``data`` names.

    A source is one of the following, or several of them joined by commas:

    * the path or URL of a file,
    * a pattern with ``*``, for all matching files,
    * a folder, for all its files with one of `SUFFIXES`,
    * ``FOLDER/SPLIT``, for a split of a TFDS data set that is prepared in the folder,
    * ``hf:NAME:CONFIG:SPLIT`` or ``tfds:NAME:SPLIT``, a data set of `data.data_sets`. For a data
      set, the text itself is returned in place of a path.

    Raises:
        UserError: no file is named or matches, or a folder contains files of several formats.
    """
    text = os.fspath(source)
    names = [text] if os.path.exists(text) else [name.strip() for name in text.split(",")]
    files: list[Path] = []
    for name in filter(None, names):
        # `Path` would turn the "//" of a URL into "/".
        name = local_tfds(name) if name.startswith("tfds:") else local(name)
        path = Path(name)
        if is_data_set(path):
            files.append(path)
        elif path.is_dir() and is_tfds(path):
            raise UserError(f"{path}: is a TFDS data set; name its split, as in {path}/train")
        elif path.is_dir():
            files += _in_folder(path)
        elif any(sign in name for sign in "*?[") and not path.exists():
            found = sorted(map(Path, glob.glob(name)))
            if not found:
                raise UserError(f"{name}: no file matches; correct the pattern")
            files += found
        else:
            files.append(path)
    if not files:
        raise UserError("no data file is named; give the path of a file")
    return files


def _in_folder(folder: Path) -> list[Path]:
    if (folder / "dataset_info.json").is_file():
        raise UserError(
            f"{folder}: may have the same records in several files (it has a dataset_info.json); "
            "name the file to read"
        )
    found = [p for p in sorted(folder.iterdir()) if p.suffix in SUFFIXES and p.name[0] not in "._"]
    kinds = sorted({path.suffix for path in found})
    if len(kinds) != 1:
        held = " and ".join(kinds) or f"no {', '.join(SUFFIXES)}"
        raise UserError(f"{folder}: holds {held} files; give a pattern such as {folder}/*.jsonl")
    return found


def open_rows(
    path: Path, *, columns: Columns = None, longest: int = untrusted.MAX_LINE, **data_set: str
) -> Rows:
    """Opens a file or data set for random access to its rows.

    Args:
        path: a result of `find_files`.
        columns: the columns of a table to read; other formats ignore this argument.
        longest: maximum size, in bytes, of a row of a JSON, JSONL, CSV or TSV file.
        data_set: the arguments ``split``, ``revision``, ``data_dir`` and ``setting`` of
            `data_sets.open_data_set`; other formats ignore these arguments.

    Raises:
        UserError: the file cannot be read, or is so damaged that its rows cannot be separated.
    """
    if is_data_set(path):
        return Rows(path, open_data_set(path, columns, **data_set))
    try:
        with untrusted.open_file(path) as file:
            start = file.read(4)
            if start == b"PAR1" or path.suffix == ".parquet":
                return Rows(path, tables.parquet(path, columns))
            if path.suffix == ".array_record":
                return Rows(path, tables.array_record(path))
            untrusted.check_text(start)
            if path.suffix in (".csv", ".tsv"):
                return Rows(path, tables.delimited(path, longest))
            spans = _list_items(path, file, longest)
            if spans is None:
                return Rows(path, _lines(path, file, longest))
            read = functools.partial(_span, path, spans)
            return Rows(path, Opened(len(spans), read, tables.stamp(path)))
    except ValueError as error:
        raise UserError(f"{path}: {untrusted.reason(error)}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error


# --- JSON lines ----------------------------------------------------------------------------


def _lines(path: Path, file: IO[bytes], longest: int) -> Opened:
    """Opens a file in which each line is a row; blank lines are skipped."""
    starts, lines = array.array("q"), array.array("q")
    number = at = 0
    file.seek(0)
    while line := file.readline(longest + 1):
        number += 1
        if len(line) > longest:
            raise UserError(f"{path}:{number}: a line of more than {longest >> 20} MiB")
        if not line.isspace():
            starts.append(at)
            lines.append(number)
        at += len(line)
    read = functools.partial(_line, path, np.asarray(starts, np.int64), longest)
    return Opened(len(starts), read, tables.stamp(path), np.asarray(lines, np.int64))


def _line(path: Path, starts: np.ndarray, longest: int, index: int) -> Any:
    with untrusted.open_file(path) as file:
        file.seek(int(starts[index]))
        line = file.readline(longest + 1)
    try:
        return jsonl.loads(line)
    except (ValueError, RecursionError) as error:
        if line.endswith(b"\n"):
            raise
        raise ValueError(f"{untrusted.reason(error)} (the last line is cut off)") from error


# --- a JSON list ---------------------------------------------------------------------------


_TEXT = rb'[^"\\]*+(?:\\.[^"\\]*+)*+(")?'
_REST = re.compile(_TEXT, re.DOTALL)
"""The rest of a JSON string; group 1 is missing if the string does not end in this block."""
_TOKEN = re.compile(b'"' + _TEXT + rb"|[][{},]", re.DOTALL)
"""A JSON string as in `_REST`, or a sign that separates JSON values."""
_BLOCK = 1 << 20
"""Number of bytes of a JSON list that are read and scanned at a time."""


def _span(path: Path, spans: np.ndarray, index: int) -> Any:
    start, end = map(int, spans[index])
    with untrusted.open_file(path) as file:
        file.seek(start)
        return jsonl.loads(file.read(end - start))


def _list_items(path: Path, file: IO[bytes], longest: int) -> np.ndarray | None:
    """Finds the byte range [start, end) of each item of the list in a file; the result is [n, 2].

    The file contains a list, or an object with a list in one of the fields `_LISTS`. If an object
    of several lines has no such list, then the object itself is the only item. In all other files
    each line is a row, and the result is None.
    """
    first = _first_character(file)
    if first not in (b"[", b"{"):
        return None
    spans, start, end = _scan(path, file, longest)
    file.seek(end)
    if not end or any(block.strip() for block in iter(lambda: file.read(_BLOCK), b"")):
        if first == b"{":
            return None
        raise UserError(f"{path}: text follows the list of rows; a file must contain one list")
    if spans is None:
        if end - start > longest or b"\n" not in os.pread(file.fileno(), end - start, start):
            return None
        spans = array.array("q", (start, end))
    return np.asarray(spans, np.int64).reshape(-1, 2)


def _scan(path: Path, file: IO[bytes], longest: int) -> tuple[array.array[int] | None, int, int]:
    """Finds the first JSON value of a file, and the list of rows in this value.

    Only strings and brackets are found here. An item is decoded when the item is read.

    Returns:
        (start and end of each item, or None if there is no list; start of the value; its end, or 0
        if the value has no end).
    """
    spans: array.array[int] | None = None
    depth = level = value = start = 0  # depth of the items, or -1 after the list; start of an item
    key = b""

    def refuse(fault: str) -> UserError:
        return UserError(f"{path}: row {len(spans or ()) // 2 + 1}: {fault}")

    for at, end, sign in _tokens(file):
        if level > 0 and end - start > longest:
            raise refuse(f"a row of more than {longest >> 20} MiB, or not JSON")
        if sign in b"[{":
            value, depth = value if depth else at, depth + 1
            if sign == b"[" and not level and (depth == 1 or (depth == 2 and key in _LISTS)):
                spans, level, start = array.array("q"), depth, end
        elif sign == b"," and depth == level and spans is not None:
            spans.extend((start, at))
            start = end
        elif sign in b"]}":
            if depth == level and spans is not None:
                if sign != b"]":
                    raise refuse("not JSON: expected ']', found '}'")
                if spans or os.pread(file.fileno(), at - start, start).strip():
                    spans.extend((start, at))
                level = -1
            depth -= 1
            if depth == 0:
                return spans, value, end
        named = sign == b'"' and depth == 1 and end - at < 12
        key = os.pread(file.fileno(), end - at, at) if named else b""
    if level:
        raise refuse("not JSON: the list of rows has no end")
    return None, value, 0


def _first_character(file: IO[bytes]) -> bytes:
    """Returns the first byte that is not white space, and moves to the beginning of the file."""
    file.seek(0)
    found = b""
    while not found and (chunk := file.read(1 << 20)):
        found = chunk.removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    file.seek(0)
    return found


def _tokens(file: IO[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """Yields the byte range [start, end) and the first byte of each match of `_TOKEN` in a file.

    A string that ends in a later block is yielded once for each block, with its part so far.

    The file is read in blocks and not mapped into memory: if another process truncates a mapped
    file, the next access kills this process.
    """
    base, rest = 0, b""  # position of ``data`` in the file; a backslash whose next byte follows
    string = -1  # position of a string that began in an earlier block
    while block := file.read(_BLOCK):
        data, rest, at = rest + block, b"", 0
        found = _REST.match(data) if string >= 0 else None
        if found is not None and found[1]:
            yield string, base + found.end(), b'"'
            at, string = found.end(), -1
        elif found is not None:
            rest = data[found.end() :]
            yield string, base + found.end(), b'"'  # the part so far: its row may be too long
        for token in _TOKEN.finditer(data, at) if string < 0 else ():
            at, end = token.span()
            sign = data[at : at + 1]
            if sign == b'"' and not token[1]:
                string, rest = base + at, data[end:]
                break
            yield base + at, base + end, sign
        base += len(data) - len(rest)
