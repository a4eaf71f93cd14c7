"""Finds the files that a setting names, and reads single rows of these files.

The first bytes of a file determine its format (parquet, a JSON list, or one JSON object per line),
and not its name. Rows are read when they are accessed: `open_rows` keeps only the position of each
row in memory, with 16 bytes per row. A row larger than `LONGEST` is refused before it is decoded.
"""

from __future__ import annotations

import array
import codecs
import dataclasses
import functools
import glob
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from coa_jax import jsonl, reading
from coa_jax.errors import UserError
from coa_jax.records import tables
from coa_jax.storage import local

LONGEST = 16 << 20
"""Maximum size of a row in bytes. A trajectory of 32,768 tokens has only about 150 kB."""

SUFFIXES = (".json", ".jsonl", ".parquet", ".array_record")
_LISTS = ("data", "rows", "records")  # keys of the list of rows, if a file is a JSON object
_COMPRESSED = {b"\x1f\x8b": "gunzip", b"\x28\xb5\x2f\xfd": "unzstd", b"PK\x03\x04": "unzip"}
_CHUNK = 1 << 20
_BLANKS = re.compile(r"[ \t\r\n]*")


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
        except OSError as error:
            raise UserError(f"{where}: cannot be read: {error.strerror or error}") from error
        except Exception as error:  # TFDS, Arrow and ArrayRecord each have errors of their own
            raise UserError(f"{where}: {reading.reason(error)}") from error


def find_files(source: str | os.PathLike[str]) -> list[Path]:
    """Returns the files that a setting names.

    A source is one of the following, or several of them joined by commas:

    * the path or URL of a file,
    * a pattern with ``*``, for all matching files,
    * a folder, for all its files with one of `SUFFIXES`,
    * ``FOLDER/SPLIT``, for a split of a TFDS data set that is prepared in the folder,
    * ``hf:NAME:CONFIG:SPLIT`` or ``tfds:NAME:SPLIT``, a data set of `records.data_sets`. For a data
      set, the text itself is returned in place of a path.

    Raises:
        UserError: no file is named or matches, or a folder contains files of several formats.
    """
    text = os.fspath(source)
    names = [text] if os.path.exists(text) else [name.strip() for name in text.split(",")]
    files: list[Path] = []
    for name in map(local, filter(None, names)):
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


def read_rows(path: Path) -> Iterator[Row]:
    """Yields the rows of a file or data set, see `open_rows`."""
    rows = open_rows(path)
    return (rows[index] for index in range(len(rows)))


def open_rows(path: Path) -> Rows:
    """Opens a file or data set for random access to its rows.

    Raises:
        UserError: the file cannot be read, or is so damaged that its rows cannot be separated.
    """
    if is_data_set(path) or (is_tfds(path.parent) and not path.exists()):
        return Rows(path, *tables.data_set(path))
    try:
        with reading.open_file(path) as file:
            start = file.read(4)
            if start == b"PAR1":
                return Rows(path, *tables.parquet(path))
            if path.suffix == ".array_record":
                return Rows(path, *tables.array_record(path))
            for magic, program in _COMPRESSED.items():
                if start.startswith(magic):
                    raise UserError(f"{path}: is compressed; unpack it with {program} first")
            file.seek(0)
            if _first_character(file) == b"[":
                spans = np.fromiter(_list_spans(path, file), np.dtype((np.int64, 2)))
                return Rows(path, len(spans), functools.partial(_span, path, spans))
            return _open_lines(path, file)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error


def _first_character(file: IO[bytes]) -> bytes:
    """Returns the first byte that is not white space, and moves to the beginning of the file."""
    found = b""
    while not found:
        chunk = file.read(_CHUNK)
        if not chunk:
            break
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
    with reading.open_file(path) as file:
        file.seek(int(starts[index]))
        line = file.readline(LONGEST + 1)
    try:
        return jsonl.loads(line.removeprefix(codecs.BOM_UTF8).decode())
    except (ValueError, RecursionError) as error:
        if line.endswith(b"\n"):
            raise
        raise ValueError(f"{reading.reason(error)} (the last line is cut off)") from error


def _document(file: IO[bytes], line: bytes) -> list[Any] | None:
    """Returns the rows of a file that is a single JSON object, which may have several lines.

    The result is None if each line of the file is a row. The position in the file then stays
    unchanged.
    """
    try:
        return _wrapped(jsonl.loads(line.removeprefix(codecs.BOM_UTF8).decode()))
    except (ValueError, RecursionError):
        pass
    here = file.tell()
    file.seek(0)
    text = file.read(LONGEST + 1)
    file.seek(here)
    if len(text) > LONGEST:
        return None
    try:
        value = jsonl.loads(text.removeprefix(codecs.BOM_UTF8).decode())
    except (ValueError, RecursionError):
        return None
    return _wrapped(value) or [value]


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


def _span(path: Path, spans: np.ndarray, index: int) -> Any:
    start, end = map(int, spans[index])
    with reading.open_file(path) as file:
        file.seek(start)
        return jsonl.DECODER.decode(file.read(end - start).decode())


def _list_spans(path: Path, file: IO[bytes]) -> Iterator[tuple[int, int]]:
    """Yields the byte range [start, end) of each item of a JSON list.

    Only a part of the file is in memory at a time.
    """
    bom = len(codecs.BOM_UTF8) if file.read(3) == codecs.BOM_UTF8 else 0
    file.seek(bom)
    reader = io.TextIOWrapper(file, encoding="utf-8", newline="")
    text, at, number, ended = "", 0, 0, False
    counted, byte = 0, bom  # number of counted characters of the text; number of bytes before

    def where() -> str:
        return f"{path}: row {number + 1}"

    def bytes_to(end: int) -> int:
        nonlocal counted, byte
        byte += len(text[counted:end].encode())
        counted = end
        return byte

    def more() -> None:
        nonlocal text, at, ended, counted
        bytes_to(at)
        try:
            chunk = reader.read(max(_CHUNK, len(text) - at))
        except UnicodeDecodeError as error:
            raise UserError(f"{where()}: not UTF-8 ({error.reason})") from error
        text, at, ended, counted = text[at:] + chunk, 0, not chunk, 0

    def skip_blanks() -> str:
        """Returns the next character that is not white space; "" at the end of the file."""
        nonlocal at
        while True:
            at = _BLANKS.match(text, at).end()  # type: ignore[union-attr] # matches any text
            if at < len(text) or ended:
                return text[at : at + 1]
            more()

    skip_blanks()
    at += 1  # the opening bracket
    if skip_blanks() == "]":
        at += 1
    else:
        while True:
            skip_blanks()
            while True:
                try:
                    _, end = jsonl.DECODER.raw_decode(text, at)
                    break
                except json.JSONDecodeError as error:
                    if ended:
                        raise UserError(f"{where()}: not JSON: {error.msg}") from error
                    if len(text) - at > LONGEST:
                        raise UserError(
                            f"{where()}: not JSON ({error.msg}), or {_too_long('row')}"
                        ) from error
                    more()
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{where()}: {reading.reason(error)}") from error
            start = bytes_to(at)
            at = end
            yield start, bytes_to(end)
            number += 1
            mark = skip_blanks()
            at += 1
            if mark == "]":
                break
            if mark != ",":
                found = repr(mark) if mark else "the end of the file"
                raise UserError(f"{where()}: not JSON: expected ',' or ']', found {found}")
    if skip_blanks():
        raise UserError(f"{path}: text follows the list of rows; a file must contain one list")
