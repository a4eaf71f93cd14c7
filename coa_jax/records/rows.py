"""Rows of record files: which files a setting means, and their JSON values one after the other.

A file is recognised by its first bytes, not by its name: parquet, a JSON list, or one JSON object a
line.  Rows are read one at a time, so that memory does not grow with the file, and a row larger
than `LONGEST` is refused before it is decoded.
"""

from __future__ import annotations

import codecs
import glob
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from coa_jax import jsonl, reading
from coa_jax.errors import UserError
from coa_jax.installed import missing
from coa_jax.storage import local

LONGEST = 16 << 20
"""Bytes of a row; a trajectory of 32,768 tokens has about 150 kB."""

SUFFIXES = (".json", ".jsonl", ".parquet")
_LISTS = ("data", "rows", "records")  # keys under which a JSON object may hold its list of rows
_COMPRESSED = {b"\x1f\x8b": "gunzip", b"\x28\xb5\x2f\xfd": "unzstd", b"PK\x03\x04": "unzip"}
_CHUNK = 1 << 20
_BLANKS = re.compile(r"[ \t\r\n]*")


class Row(NamedTuple):
    """A row of a file.

    Attributes:
        path: the file.
        number: line of a JSONL file; place in the list or table of the other files, from 1.
        where: how messages name the row.
        value: the JSON value.
    """

    path: Path
    number: int
    where: str
    value: Any


def find_files(source: str | os.PathLike[str]) -> list[Path]:
    """Returns the files that a setting names.

    Args:
        source: a path or a URL; several with commas; a pattern with ``*``; a folder, of which all
            files with one of `SUFFIXES` are taken; or ``FOLDER/SPLIT`` of a TFDS data set.

    Raises:
        UserError: a file is missing, or a folder holds files of several kinds.
    """
    text = os.fspath(source)
    names = [text] if os.path.exists(text) else [name.strip() for name in text.split(",")]
    files: list[Path] = []
    for name in map(local, filter(None, names)):
        path = Path(name)
        if is_tfds(path.parent) and not path.exists():
            files.append(path)
        elif path.is_dir() and is_tfds(path):
            raise UserError(f"{path}: is a TFDS data set; name a split of it, as in {path}/train")
        elif path.is_dir():
            files += _in_folder(path)
        elif any(sign in name for sign in "*?[") and not path.exists():
            found = sorted(map(Path, glob.glob(name)))
            if not found:
                raise UserError(f"{name}: no file has such a name; mend the pattern")
            files += found
        else:
            files.append(path)
    if not files:
        raise UserError("no data file is named; give the path of one")
    return files


def _in_folder(folder: Path) -> list[Path]:
    if (folder / "dataset_info.json").is_file():
        raise UserError(
            f"{folder}: may hold the same records in several files (it has a dataset_info.json); "
            "name the file to read"
        )
    found = [p for p in sorted(folder.iterdir()) if p.suffix in SUFFIXES and p.name[0] not in "._"]
    kinds = sorted({path.suffix for path in found})
    if len(kinds) != 1:
        held = " and ".join(kinds) or f"no {', '.join(SUFFIXES)}"
        raise UserError(f"{folder}: holds {held} files; give a pattern such as {folder}/*.jsonl")
    return found


def is_tfds(folder: Path) -> bool:
    """Whether a folder is a data set that TFDS has prepared."""
    return (folder / "features.json").is_file() and (folder / "dataset_info.json").is_file()


def read_rows(path: Path) -> Iterator[Row]:
    """Yields the rows of a file.

    Raises:
        UserError: the file cannot be read, or a row is not JSON; the message names file and row.
    """
    if is_tfds(path.parent) and not path.exists():
        yield from _numbered(path, _tfds(path))
        return
    try:
        with reading.open_file(path) as file:
            start = file.read(4)
            if start == b"PAR1":
                yield from _numbered(path, _parquet(path))
                return
            for magic, program in _COMPRESSED.items():
                if start.startswith(magic):
                    raise UserError(f"{path}: is compressed; give the file that {program} makes")
            file.seek(0)
            if _first_character(file) == b"[":
                yield from _numbered(path, _list_items(path, file))
            else:
                yield from _lines(path, file)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error


def _numbered(path: Path, values: Iterator[Any]) -> Iterator[Row]:
    for number, value in enumerate(values, start=1):
        yield Row(path, number, f"{path}: row {number}", value)


def _first_character(file: IO[bytes]) -> bytes:
    """Returns the first byte that is not white space, and goes back to the beginning."""
    found = b""
    while not found:
        chunk = file.read(_CHUNK)
        if not chunk:
            break
        found = chunk.removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    file.seek(0)
    return found


# --- JSON ----------------------------------------------------------------------------------


def _lines(path: Path, file: IO[bytes]) -> Iterator[Row]:
    number = 0
    while line := file.readline(LONGEST + 1):
        number += 1
        where = f"{path}:{number}"
        if len(line) > LONGEST:
            raise UserError(f"{where}: {_too_long('line')}")
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        try:
            value = jsonl.loads(line.decode())
        except (ValueError, RecursionError) as error:
            if number == 1:
                document = _document(file)
                if document is not None:
                    yield from _numbered(path, iter(document))
                    return
            torn = "" if line.endswith(b"\n") else " (the last line is cut off)"
            raise UserError(f"{where}: {reading.reason(error)}{torn}") from error
        rows = _wrapped(value)
        if rows is None:
            yield Row(path, number, where, value)
        else:
            yield from _numbered(path, iter(rows))


def _document(file: IO[bytes]) -> list[Any] | None:
    """Returns the rows of a file that is one JSON object over several lines, or None."""
    file.seek(0)
    text = file.read(LONGEST + 1)
    if len(text) > LONGEST:
        return None
    try:
        value = jsonl.loads(text.removeprefix(codecs.BOM_UTF8).decode())
    except (ValueError, RecursionError):
        return None
    return _wrapped(value) or [value]


def _wrapped(value: Any) -> list[Any] | None:
    """Returns the list of rows that an object only wraps, or None."""
    if isinstance(value, dict) and len(value) == 1:
        ((key, rows),) = value.items()
        if key in _LISTS and isinstance(rows, list):
            return rows
    return None


def _list_items(path: Path, file: IO[bytes]) -> Iterator[Any]:
    """Yields the items of a JSON list; the list is never in memory as a whole."""
    reader = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    text, at, number, ended = "", 0, 0, False

    def where() -> str:
        return f"{path}: row {number + 1}"

    def more() -> None:
        nonlocal text, at, ended
        try:
            chunk = reader.read(max(_CHUNK, len(text) - at))
        except UnicodeDecodeError as error:
            raise UserError(f"{where()}: not UTF-8 ({error.reason})") from error
        text, at, ended = text[at:] + chunk, 0, not chunk

    def skip_blanks() -> str:
        """Returns the next character that is not white space, "" at the end of the file."""
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
                    value, end = jsonl.DECODER.raw_decode(text, at)
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
            at = end
            yield value
            number += 1
            mark = skip_blanks()
            at += 1
            if mark == "]":
                break
            if mark != ",":
                found = repr(mark) if mark else "the end of the file"
                raise UserError(f"{where()}: not JSON: expected ',' or ']', found {found}")
    if skip_blanks():
        raise UserError(f"{path}: text follows the list of rows; a file holds one list")


def _too_long(what: str) -> str:
    return f"a {what} of more than {LONGEST >> 20} MiB, which no trajectory has"


# --- binary files --------------------------------------------------------------------------


def _parquet(path: Path) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise missing(f"{path}: parquet", "pyarrow", "tasks") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=64):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: damaged parquet ({reason}); fetch it again") from error


def _tfds(path: Path) -> Iterator[Any]:
    try:
        import tensorflow_datasets as tfds
    except ImportError:
        raise missing(f"{path}: a TFDS data set", "tensorflow-datasets", "tfds") from None
    try:
        builder = tfds.builder_from_directory(str(path.parent))
        known = list(builder.info.splits)
        source = builder.as_data_source(split=path.name) if path.name in known else None
    except Exception as error:  # TFDS, ArrayRecord and protobuf each have errors of their own
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path.parent}: damaged TFDS data set ({reason})") from error
    if source is None:
        raise UserError(f"{path}: no such split; {path.parent} has {', '.join(known) or 'none'}")
    for number in range(len(source)):
        try:
            yield source[number]
        except Exception as error:
            raise UserError(f"{path}: row {number + 1}: cannot be read ({error})") from error
