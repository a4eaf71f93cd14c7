"""Gives random access to rows of parquet, ArrayRecord, TFDS and the Hugging Face Hub.

Each function opens one kind of file or data set. It returns the number of rows, and a function that
reads the row at an index. The returned function can be pickled; a process that unpickles the
function opens the file again. Open files are cached by path and `stamp`, so that a rewritten file
is opened again.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coa_jax.config.installed import missing
from coa_jax.data.data_sets import open_hub, open_tfds
from coa_jax.errors import UserError
from coa_jax.files import jsonl, untrusted

Opened = tuple[int, Callable[[int], Any]]
"""(number of rows, function that reads the row at an index)."""

_HELD = 1 << 30  # maximum number of bytes of decoded parquet in memory


def stamp(path: Path) -> str:
    """Returns a text that changes whenever the file or data set at a path is rewritten."""
    if str(path).startswith("hf:"):
        return str(_hub(path)._fingerprint)
    if str(path).startswith("tfds:"):
        return ""  # the name of a TFDS data set includes its version
    status = (path if path.exists() else path.parent / "dataset_info.json").stat()
    return f"{status.st_size}:{status.st_mtime_ns}"


# --- ArrayRecord files of JSON -------------------------------------------------------------


def array_record(path: Path) -> Opened:
    """Opens an ArrayRecord file whose records are JSON, for random access to its rows.

    The result is the number of rows, and a function that reads the row at an index.

    Raises:
        UserError: the file is not an ArrayRecord file, or its end is missing.
    """
    seen = stamp(path)
    try:
        size = _array_record(path, seen).num_records()
    except RuntimeError as error:
        raise UserError(f"{path}: not an ArrayRecord file, or its end is missing") from error
    return size, functools.partial(_array_record_row, path, seen)


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


def parquet(path: Path) -> Opened:
    """Opens a parquet file for random access to its rows.

    The result is the number of rows, and a function that reads the row at an index.

    A parquet file is decoded one row group at a time. If the decoded file has more than 1 GiB, only
    some row groups stay in memory, so that reading rows in random order is slow.

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
    except (pyarrow.ArrowException, ValueError) as error:
        why = untrusted.reason(error)
        raise UserError(f"{path}: damaged parquet ({why}); fetch it again") from error
    held = min(len(groups), _HELD * len(groups) // max(size, 1)) or 1
    return int(ends[-1]), functools.partial(_parquet_row, path, stamp(path), ends, held)


def _parquet_row(path: Path, seen: str, ends: np.ndarray, held: int, index: int) -> Any:
    group = int(np.searchsorted(ends, index, side="right")) - 1
    table = _row_groups(path, seen, held)(group)
    return table.slice(index - int(ends[group]), 1).to_pylist()[0]


@functools.lru_cache(maxsize=64)
def _row_groups(path: Path, seen: str, held: int) -> Callable[[int], Any]:
    """Returns a function that reads a row group as an Arrow table.

    The function keeps the last ``held`` row groups in memory.
    """
    import pyarrow.parquet

    @functools.lru_cache(maxsize=held)
    def table(group: int) -> Any:
        with pyarrow.parquet.ParquetFile(path) as file:
            return file.read_row_group(group)

    return table


# --- data sets -----------------------------------------------------------------------------


def data_set(path: Path) -> Opened:
    """Opens a data set of the Hugging Face Hub or of TFDS for random access to its rows.

    The result is the number of rows, and a function that reads the row at an index.

    Args:
        path: ``hf:NAME:CONFIG:SPLIT``, ``tfds:NAME:SPLIT``, or ``FOLDER/SPLIT`` with the folder of
            a prepared TFDS data set.

    Raises:
        UserError: a library is not installed, or the data set, its configuration or its split does
            not exist.
    """
    if str(path).startswith("hf:"):
        # A pickled data set consists of the paths of its files, so that workers download nothing.
        return len(_hub(path)), _hub(path).__getitem__
    seen = stamp(path)
    return len(_tfds(path, seen)), functools.partial(_tfds_row, path, seen)


def _tfds_row(path: Path, seen: str, index: int) -> Any:
    return _tfds(path, seen)[index]


@functools.cache
def _hub(path: Path) -> Any:
    return open_hub(str(path), "train")


@functools.lru_cache(maxsize=64)
def _tfds(path: Path, seen: str) -> Sequence[Any]:
    named = str(path).startswith("tfds:")
    return open_tfds(str(path) if named else f"tfds:{path.parent}:{path.name}", "train")
