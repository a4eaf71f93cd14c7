"""Opens files, folders, URLs and data sets as sequences of rows, each with its file and number.

The first bytes of a file determine its format (parquet, a JSON list, or one JSON object per line);
only CSV, TSV and ArrayRecord files are known by their names. Rows are read when they are accessed:
`open_rows` keeps only the positions of the rows in memory, with at most 24 bytes per row. A row
larger than a limit is refused before it is decoded.
"""

from __future__ import annotations

import array
import codecs
import csv
import dataclasses
import datetime
import decimal
import functools
import glob
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from coa_jax.config.installed import missing
from coa_jax.config.preflight import Needs
from coa_jax.data.data_sets import is_data_set, is_tfds, local_tfds, open_hub, open_tfds
from coa_jax.data.trace_shards import AGENT_FILE
from coa_jax.errors import UserError
from coa_jax.files import jsonl, untrusted
from coa_jax.storage import local

SUFFIXES = (".json", ".jsonl", ".parquet", ".array_record", ".csv", ".tsv")

Fields = Mapping[str, Any]
"""The content of a row: field name -> JSON value."""

Columns = Callable[[list[str]], Iterable[str]] | None
"""A function from the names of all columns of a table to the names of the columns to read.

None reads all columns.
"""


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

    Pickling an object of this class does not copy the rows. A process that unpickles the object
    opens the file again.

    Attributes:
        path: the file.
        size: number of rows.
        read: function that returns the row at an index, as a JSON value.
        stamp: text that is different after the file has been rewritten.
        lines: number of the line at which each row begins, counted from 1; None for files without
            lines.
        stream: function that returns an iterator over all rows, which needs less memory or time
            than ``read``; None if there is no such function.
    """

    path: Path
    size: int
    read: Callable[[int], Any]
    stamp: str
    lines: np.ndarray | None = None
    stream: Callable[[], Iterator[Any]] | None = None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Row:
        """Reads a row.

        Raises:
            UserError: the row cannot be read, or is not an object. The message names the file and
                the row.
        """
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._row(index, functools.partial(self.read, index))

    def __iter__(self) -> Iterator[Row]:
        """Reads all rows in order; only a few rows are in memory at a time.

        Raises:
            UserError: as in `__getitem__`.
        """
        values = self.stream() if self.stream else map(self.read, range(len(self)))
        for index in range(len(self)):
            yield self._row(index, functools.partial(next, values))

    def _row(self, index: int, read: Callable[[], Any]) -> Row:
        number = index + 1 if self.lines is None else int(self.lines[index])
        where = f"{self.path}: row {number}" if self.lines is None else f"{self.path}:{number}"
        try:
            value = read()
        except UserError:
            raise
        except Exception as error:  # TFDS, Arrow and ArrayRecord each have errors of their own
            if self.path.is_file() and _stamp(self.path) != self.stamp:
                raise UserError(
                    f"{self.path}: the data changed; start the command again"
                ) from error
            raise UserError(f"{where}: {untrusted.reason(error)}") from error
        if not isinstance(value, dict):
            raise UserError(f"{where}: expected an object, found {type(value).__name__}")
        return Row(self.path, number, where, value)


def files_need(source: str) -> Needs:
    """Returns the packages that read the files or data sets which a setting names."""
    signs = {"tasks": ".parquet", "hub": "hf:", "tfds": "tfds:"}
    return Needs(tuple(extra for extra, sign in signs.items() if sign in source))


def find_files(source: str | os.PathLike[str]) -> list[Path]:
    """Returns the files that a setting such as ``data`` names.

    A source is one of the following, or several of them joined by commas:

    * the path or URL of a file,
    * a pattern with ``*``, for all matching files,
    * a folder, for all its files with one of `SUFFIXES`; or for the ATIF documents
      ``trajectory.json`` in its subfolders, if the folder itself has no files but JSON documents,
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
            matches = sorted(map(Path, glob.glob(name)))
            if not matches:
                raise UserError(f"{name}: no file matches; correct the pattern")
            files += matches
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
    files = [p for p in sorted(folder.iterdir()) if p.suffix in SUFFIXES and p.name[0] not in "._"]
    kinds = sorted({path.suffix for path in files})
    # Documents of agents, in the folder of a job: its other files are settings and results.
    is_job = {path.name for path in files} <= {"config.json", "result.json", AGENT_FILE}
    if is_job and (documents := sorted(folder.rglob(AGENT_FILE))):
        return documents
    if len(kinds) != 1:
        listed = " and ".join(kinds) or f"no {', '.join(SUFFIXES)}"
        raise UserError(f"{folder}: holds {listed} files; give a pattern such as {folder}/*.jsonl")
    return files


def open_rows(
    path: Path, *, columns: Columns = None, longest: int = untrusted.MAX_LINE, **data_set: str
) -> Rows:
    """Opens a file or data set for random access to its rows.

    Args:
        path: a result of `find_files`.
        columns: the columns of a parquet file or of a data set of the Hub to read. All other
            formats ignore this argument.
        longest: maximum size, in bytes, of a row of a JSON, JSONL, CSV or TSV file.
        data_set: the arguments of `data_sets.open_hub` or `data_sets.open_tfds` besides the source,
            for a data set. The split is ``train`` by default.

    Raises:
        UserError: the file or data set cannot be read, its library is not installed, or it is so
            damaged that its rows cannot be separated.
    """
    if is_data_set(path):
        return _data_set(path, columns, **data_set)
    try:
        with untrusted.open_file(path) as file:
            start = file.read(4)
            if start == b"PAR1" or path.suffix == ".parquet":
                return _parquet(path, columns)
            if path.suffix == ".array_record":
                return _array_record(path)
            if fault := untrusted.fault_of_text(start):
                raise UserError(f"{path}: {fault}")
            if path.suffix in (".csv", ".tsv"):
                return _table(path, file, longest)
            items = _list_items(path, file, longest)
            return _lines(path, file, longest) if items is None else _rows(path, items, jsonl.loads)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error


def _data_set(
    path: Path,
    columns: Columns = None,
    split: str = "train",
    revision: str = "",
    data_dir: str = "",
    setting: str = "",
) -> Rows:
    source = str(path)
    if source.startswith("hf:"):
        rows = open_hub(source, split, revision, setting)
        names = [name for name, kind in rows.features.items() if "decode=True" not in repr(kind)]
        # Columns of images, audio and video are left out, because decoding them takes long.
        chosen = rows.select_columns(list(columns(names) if columns else names))
        # A pickled data set consists of the paths of its files, so that workers download nothing.
        read, stream = functools.partial(_plain_row, chosen), functools.partial(map, plain, chosen)
        return Rows(path, len(chosen), read, str(rows._fingerprint), stream=stream)
    from_tfds = source.startswith("tfds:")  # such a name includes the version of the data set
    stamp = "" if from_tfds else _stamp(path.parent / "dataset_info.json")
    source = source if from_tfds else f"tfds:{path.parent}:{path.name}"
    rows = open_tfds(source, split, data_dir, setting)
    return Rows(path, len(rows), functools.partial(_plain_row, rows), stamp)


def _plain_row(rows: Sequence[Any], index: int) -> Any:
    return plain(rows[index])


def _stamp(path: Path) -> str:
    """Returns a text that changes whenever the file at a path is rewritten."""
    status = path.stat()
    return f"{status.st_size}:{status.st_mtime_ns}"


def plain(value: Any) -> Any:
    """Converts a value of a table to a JSON value, if it has a JSON form.

    Dates, decimals, durations and UTF-8 bytes become strings, and NumPy arrays become lists. Values
    in dicts and lists are converted too. Other bytes, such as images, stay bytes.
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


# --- files in which each row has its own bytes ---------------------------------------------------


def _rows(
    path: Path, places: Sequence[int], decode: Callable[[bytes], Any], lines: Sequence[int] = ()
) -> Rows:
    """Opens a file, given the start and end of each row in bytes, [2 n]."""
    pairs = np.asarray(places, np.int64).reshape(-1, 2)
    read = functools.partial(_row_at, path, pairs, decode)
    numbers = np.asarray(lines, np.int64) if len(lines) else None
    return Rows(path, len(pairs), read, _stamp(path), numbers)


def _row_at(path: Path, pairs: np.ndarray, decode: Callable[[bytes], Any], index: int) -> Any:
    start, end = map(int, pairs[index])
    with untrusted.open_file(path) as file:
        file.seek(start)
        return decode(file.read(end - start))


# --- JSON lines ----------------------------------------------------------------------------


def _lines(path: Path, file: IO[bytes], longest: int) -> Rows:
    """Opens a file in which each line is a row; blank lines are skipped."""
    places, lines = array.array("q"), array.array("q")
    number = at = 0
    file.seek(0)
    while line := file.readline(longest + 1):
        number += 1
        if len(line) > longest:
            raise UserError(f"{path}:{number}: a line of more than {longest >> 20} MiB")
        if not line.isspace():
            places.extend((at, at + len(line)))
            lines.append(number)
        at += len(line)
    return _rows(path, places, _line, lines)


def _line(line: bytes) -> Any:
    try:
        return jsonl.loads(line.rstrip(b"\r\n"))  # or messages would count the line break
    except (ValueError, RecursionError) as error:
        if line.endswith(b"\n"):
            raise
        raise ValueError(f"{untrusted.reason(error)} (the last line is cut off)") from error


# --- a JSON list ---------------------------------------------------------------------------


_LISTS = ("data", "Data", "rows", "records")
"""Keys of the list of rows, if a file is a JSON object."""
_BLOCK = 1 << 20  # number of bytes of a JSON list that are read at a time
_BLANKS = re.compile(r"[ \t\n\r]*")
_parse = json.JSONDecoder(parse_int=str).raw_decode  # numbers may have too many digits for `int`


class JsonValues:
    """The JSON values of a file, one after the other; only one of them is in memory at a time.

    The file is decoded as Latin-1, so that each byte is a character. A value that is needed is
    decoded again as UTF-8.
    """

    def __init__(self, file: IO[bytes], longest: int) -> None:
        self.file, self.longest = file, longest
        file.seek(0)
        start = len(codecs.BOM_UTF8) if file.read(3) == codecs.BOM_UTF8 else 0
        file.seek(start)
        self.text, self.base, self.at = "", start, 0  # text from the byte ``base``, index in it

    def fill(self) -> bool:
        """Drops the text before the position and reads more; returns False at the end."""
        have = len(self.text) - self.at
        block = self.file.read(max(_BLOCK, min(have, self.longest + 1 - have)))
        self.text = self.text[self.at :] + block.decode("latin-1")
        self.base, self.at = self.base + self.at, 0
        return bool(block)

    def sign(self) -> str:
        """Moves to the next character that is not white space; returns it, or "" at the end."""
        while True:
            self.at = _BLANKS.match(self.text, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.text) or not self.fill():
                return self.text[self.at : self.at + 1]

    def value(self) -> tuple[int, int, Any]:
        """Moves over a value; returns its start and end in bytes, and the value in Latin-1."""
        self.sign()
        while True:
            try:
                (value, end), fault = _parse(self.text, self.at), ""
            except RecursionError:
                raise ValueError("nested too deeply") from None
            except json.JSONDecodeError as error:
                value, end = None, len(self.text)
                fault = f"not JSON: {untrusted.what_is_not_json(error)}"
            if end - self.at > self.longest:
                raise ValueError(f"a row of more than {self.longest >> 20} MiB, or not JSON")
            if not fault:
                break
            if not self.fill():
                raise ValueError(fault)
        start, self.at = self.at, end
        return self.base + start, self.base + end, value


def _list_items(path: Path, file: IO[bytes], longest: int) -> array.array[int] | None:
    """Finds the start and end in bytes of each item of the list in a file; the result is [2 n].

    The file contains a list, or an object with a list in one of the fields `_LISTS`. If an object
    of several lines has no such list, then the object itself is the only item. In all other files
    each line is a row, and the result is None.
    """
    values, places = JsonValues(file, longest), array.array("q")
    if values.sign() != "[":
        try:
            return _object_items(values, places)
        except ValueError:  # each line is a row, which may be damaged
            return None
    try:
        add_items(values, places)
    except ValueError as error:
        raise UserError(f"{path}: row {len(places) // 2 + 1}: {error}") from error
    if values.sign():
        raise UserError(f"{path}: text follows the list of rows; a file must contain one list")
    return places


def add_items(values: JsonValues, places: array.array[int]) -> None:
    """Moves over a list, and appends the start and end of each item to ``places``."""
    values.at += 1
    sign = values.sign()
    while sign != "]":
        places.extend(values.value()[:2])
        sign = values.sign()
        if sign == ",":
            values.at += 1
        elif sign != "]":
            raise ValueError(f"not JSON: expected ',' or ']', found {sign or 'the end'}")
    values.at += 1


def _object_items(values: JsonValues, places: array.array[int]) -> array.array[int] | None:
    """Finds the items of the object that is the only value of a file, see `_list_items`."""
    if values.sign() != "{":
        return None
    start = values.base + values.at
    sign, listed = ",", False
    while sign == ",":
        values.at += 1
        key = values.value()[2]
        if values.sign() != ":":
            return None
        values.at += 1
        if values.sign() == "[" and key in _LISTS and not listed:
            add_items(values, places)
            listed = True
        else:
            values.value()
        sign = values.sign()
    values.at += 1
    end = values.base + values.at
    if sign != "}" or values.sign():
        return None
    if listed:
        return places
    one_line = b"\n" not in os.pread(values.file.fileno(), end - start, start)
    return None if one_line or end - start > values.longest else array.array("q", (start, end))


# --- CSV and TSV -----------------------------------------------------------------------------

csv.field_size_limit(untrusted.MAX_LINE)  # of the process; the default is 128 kB


def _table(path: Path, file: IO[bytes], longest: int) -> Rows:
    """Opens a CSV or TSV file, whose first line has the names of the columns.

    A row maps each name to the text of its cell, or to None if the cell is empty.
    """
    delimiter = "\t" if path.suffix == ".tsv" else ","
    names: list[str] = []
    places, lines = array.array("q"), array.array("q")
    for start, end, line, cells in _records(path, file, delimiter, longest):
        if names and len(cells) != len(names):
            raise UserError(
                f"{path}:{line}: the number of cells is {len(cells)}, but the table has "
                f"{len(names)} columns"
            )
        if names:
            places.extend((start, end))
            lines.append(line)
        elif twice := {name for name in cells if cells.count(name) > 1}:
            raise UserError(f"{path}:{line}: several columns have the name {min(twice)!r}")
        names = names or cells
    return _rows(path, places, functools.partial(_cells, names, delimiter), lines)


def _records(
    path: Path, file: IO[bytes], delimiter: str, longest: int
) -> Iterator[tuple[int, int, int, list[str]]]:
    """Yields each row of a table: its first and last byte, its first line and its cells."""
    file.seek(0)
    at = start = len(codecs.BOM_UTF8) if file.read(3) == codecs.BOM_UTF8 else 0
    file.seek(at)
    text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="")
    line = first = 1

    def record_lines() -> Iterator[str]:
        nonlocal at, line
        while part := text.readline(longest + 1):
            encoded = part.encode("utf-8", "surrogateescape")
            encoded.decode()  # raises an error that names the byte
            at, line = at + len(encoded), line + 1
            if at - start > longest:
                raise UserError(f"{path}:{first}: a row of more than {longest >> 20} MiB")
            yield part

    reader = csv.reader(record_lines(), delimiter=delimiter, strict=True)
    try:
        for cells in reader:
            if cells:  # not a blank line
                yield start, at, first, cells
            start, first = at, line
    except (csv.Error, ValueError) as error:
        raise UserError(f"{path}:{first}: not a table: {untrusted.reason(error)}") from error


def _cells(names: list[str], delimiter: str, encoded: bytes) -> dict[str, str | None]:
    text = io.StringIO(encoded.decode(), newline="")
    (cells,) = csv.reader(text, delimiter=delimiter, strict=True)
    return {name: cell or None for name, cell in zip(names, cells, strict=True)}


# --- ArrayRecord files of JSON -------------------------------------------------------------


def _array_record(path: Path) -> Rows:
    """Opens an ArrayRecord file whose records are JSON.

    Raises:
        UserError: the file is not an ArrayRecord file, or its end is missing.
    """
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    try:
        rows = ArrayRecordDataSource(os.fspath(path))
    except RuntimeError as error:
        raise UserError(f"{path}: not an ArrayRecord file, or its end is missing") from error
    return Rows(path, len(rows), functools.partial(_json_record, rows), _stamp(path))


def _json_record(rows: Sequence[bytes], index: int) -> Any:
    return jsonl.loads(rows[index])


# --- parquet -------------------------------------------------------------------------------


_HELD = 1 << 30  # maximum number of bytes of decoded parquet in memory
_MOST_ROWS = 100_000_000
_BATCH = 64  # rows of a parquet file that are decoded together; a row may have megabytes


def _parquet(path: Path, columns: Columns) -> Rows:
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
    keep = min(len(groups), _HELD * len(groups) // max(size, 1)) or 1
    chosen = None if columns is None else tuple(columns(names))
    read = functools.partial(_parquet_row, path, _stamp(path), chosen, ends, keep)
    stream = functools.partial(_parquet_rows, path, chosen)
    return Rows(path, int(ends[-1]), read, _stamp(path), stream=stream)


def _parquet_row(
    path: Path, stamp: str, columns: tuple[str, ...] | None, ends: np.ndarray, keep: int, index: int
) -> Any:
    group = int(np.searchsorted(ends, index, side="right")) - 1
    table = _row_groups(path, stamp, columns, keep)(group)
    return plain(table.slice(index - int(ends[group]), 1).to_pylist()[0])


@functools.lru_cache(maxsize=64)
def _row_groups(
    path: Path, stamp: str, columns: tuple[str, ...] | None, keep: int
) -> Callable[[int], Any]:
    """Returns a function that reads a row group as an Arrow table.

    The function keeps the last ``keep`` row groups in memory.
    """
    import pyarrow.parquet

    @functools.lru_cache(maxsize=keep)
    def table(group: int) -> Any:
        with pyarrow.parquet.ParquetFile(path) as file:
            return file.read_row_group(group, columns)

    return table


def _parquet_rows(path: Path, columns: tuple[str, ...] | None) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(_BATCH, columns=columns):
            yield from map(plain, batch.to_pylist())
