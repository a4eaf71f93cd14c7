"""Finds the files that a setting names, and reads single rows of these files.

The first bytes of a file determine its format (parquet, a JSON list, or one JSON object per line),
and not its name. Rows are read when they are accessed: `open_rows` keeps only the position of each
row in memory, with 16 bytes per row. A row larger than `LONGEST` is refused before it is decoded.
"""

from __future__ import annotations

import array
import codecs
import contextlib
import dataclasses
import functools
import glob
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from coa_jax.data import tables
from coa_jax.data.data_sets import local_tfds
from coa_jax.errors import UserError
from coa_jax.files import jsonl, untrusted
from coa_jax.storage import local

LONGEST = 16 << 20
"""Maximum size of a row in bytes. A trajectory of 32,768 tokens has only about 150 kB."""

SUFFIXES = (".json", ".jsonl", ".parquet", ".array_record")
_LISTS = ("data", "rows", "records")  # keys of the list of rows, if a file is a JSON object
_COMPRESSED = {b"\x1f\x8b": "gunzip", b"\x28\xb5\x2f\xfd": "unzstd", b"PK\x03\x04": "unzip"}


class Row(NamedTuple):
    """A row of a file.

    Attributes:
        path: the file.
        number: line number of the row in a JSONL file, or row number in a file of another format,
            counted from 1.
        where: file and row, as text for messages.
        value: JSON value of the row.
    """

    path: Path
    number: int
    where: str
    value: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """A sequence of the rows of a file. A row is read when it is accessed.

    Pickling an object of this class does not copy the rows.

    Attributes:
        path: the file.
        size: number of rows.
        read: function that returns the JSON value of the row at an index.
        lines: line number of each row of a JSONL file, counted from 1; None for other files.
    """

    path: Path
    size: int
    read: Callable[[int], Any]
    lines: np.ndarray | None = None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Row:
        """Reads a row.

        Raises:
            UserError: the row cannot be read, or is not JSON. The message names the file and the
                row.
        """
        if not 0 <= index < self.size:
            raise IndexError(index)
        number = index + 1 if self.lines is None else int(self.lines[index])
        where = f"{self.path}: row {number}" if self.lines is None else f"{self.path}:{number}"
        try:
            return Row(self.path, number, where, self.read(index))
        except UserError:
            raise
        except Exception as error:  # TFDS, Arrow and ArrayRecord each have errors of their own
            raise UserError(f"{where}: {untrusted.reason(error)}") from error


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
        if is_data_set(path) or (is_tfds(path.parent) and not path.exists()):
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


def is_data_set(path: Path) -> bool:
    """Returns whether a path is the name of a data set, such as ``hf:openai/gsm8k``."""
    return str(path).startswith(("hf:", "tfds:"))


def is_tfds(folder: Path) -> bool:
    """Returns whether a folder contains a data set that TFDS has prepared."""
    return (folder / "features.json").is_file() and (folder / "dataset_info.json").is_file()


def open_rows(path: Path) -> Rows:
    """Opens a file or data set for random access to its rows.

    Raises:
        UserError: the file cannot be read, or is so damaged that its rows cannot be separated.
    """
    if is_data_set(path) or (is_tfds(path.parent) and not path.exists()):
        return Rows(path, *tables.data_set(path))
    try:
        with untrusted.open_file(path) as file:
            start = file.read(4)
            if start == b"PAR1":
                return Rows(path, *tables.parquet(path))
            if path.suffix == ".array_record":
                return Rows(path, *tables.array_record(path))
            if program := _COMPRESSED.get(start[:2], _COMPRESSED.get(start)):
                raise UserError(f"{path}: is compressed; unpack it with {program} first")
            file.seek(0)
            if _first_character(file) == b"[":
                spans = np.fromiter(_list_spans(path, file), np.dtype((np.int64, 2)))
                return Rows(path, len(spans), functools.partial(_span, path, spans))
            return _open_lines(path, file)
    except OSError as error:
        hint = untrusted.made_by(path) if isinstance(error, FileNotFoundError) else ""
        raise UserError(f"{path}: cannot be read: {error.strerror or error}{hint}") from error


def _first_character(file: IO[bytes]) -> bytes:
    """Returns the first byte that is not white space, and moves to the beginning of the file."""
    found = b""
    while not found and (chunk := file.read(1 << 20)):
        found = chunk.removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    file.seek(0)
    return found


# --- JSON lines ----------------------------------------------------------------------------


def _open_lines(path: Path, file: IO[bytes]) -> Rows:
    starts, lines = array.array("q"), array.array("q")
    number = at = 0
    while line := file.readline(LONGEST + 1):
        number += 1
        if len(line) > LONGEST:
            raise UserError(f"{path}:{number}: {_too_long('line')}")
        if number == 1 and (rows := _document(file, line)) is not None:
            return Rows(path, len(rows), rows.__getitem__)
        if not line.isspace():
            starts.append(at)
            lines.append(number)
        at += len(line)
    places = np.asarray(starts, np.int64)
    read = functools.partial(_line, path, places)
    return Rows(path, len(places), read, np.asarray(lines, np.int64))


def _line(path: Path, starts: np.ndarray, index: int) -> Any:
    with untrusted.open_file(path) as file:
        file.seek(int(starts[index]))
        line = file.readline(LONGEST + 1)
    try:
        return jsonl.loads(line)
    except (ValueError, RecursionError) as error:
        if line.endswith(b"\n"):
            raise
        raise ValueError(f"{untrusted.reason(error)} (the last line is cut off)") from error


def _document(file: IO[bytes], line: bytes) -> list[Any] | None:
    """Returns the rows of a file that is a single JSON object, which may have several lines.

    The result is None if each line of the file is a row. The position in the file then stays
    unchanged.
    """
    with contextlib.suppress(ValueError, RecursionError):
        return _wrapped(jsonl.loads(line))
    here = file.tell()
    file.seek(0)
    text = file.read(LONGEST + 1)
    file.seek(here)
    if len(text) <= LONGEST:
        with contextlib.suppress(ValueError, RecursionError):
            value = jsonl.loads(text)
            return _wrapped(value) or [value]
    return None


def _wrapped(value: Any) -> list[Any] | None:
    """Returns the list of rows in an object that contains only this list; None otherwise."""
    if isinstance(value, dict) and len(value) == 1:
        ((key, rows),) = value.items()
        if key in _LISTS and isinstance(rows, list):
            return rows
    return None


def _too_long(what: str) -> str:
    return f"a {what} of more than {LONGEST >> 20} MiB, which no trajectory has"


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


def _list_spans(path: Path, file: IO[bytes]) -> Iterator[tuple[int, int]]:
    """Yields the byte range [start, end) of each item of a JSON list.

    Only strings and brackets are found here. An item is decoded when the item is read.
    """
    number, depth, start = 1, 0, 0
    for at, end, sign in _tokens(file):
        if end - start > LONGEST:
            raise UserError(f"{path}: row {number}: {_too_long('row')}, or not JSON")
        if sign in b"[{":
            depth += 1
        elif sign in b"]}":
            depth -= 1
        if depth == 0:
            if sign != b"]":
                raise UserError(f"{path}: row {number}: not JSON: expected ']', found '}}'")
            if number > 1 or os.pread(file.fileno(), at - start, start).strip():
                yield start, at
            file.seek(end)
            if any(block.strip() for block in iter(lambda: file.read(_BLOCK), b"")):
                raise UserError(
                    f"{path}: text follows the list of rows; a file must contain one list"
                )
            return
        if depth == 1 and sign == b",":
            yield start, at
            number, start = number + 1, end
        elif not start:
            start = end  # the opening bracket of the list
    raise UserError(f"{path}: row {number}: not JSON: the list of rows has no end")


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
