"""Stores the trajectories of a run in shards: files that each hold rows of a single step.

The name of a shard contains its phase, step and number, as in ``rl-00000012-00.jsonl.gz``. A
resumed run can therefore remove the shards of the steps that it will repeat, and need not read any
file for this. A shard is written atomically and never extended, because a kill during an append
would damage a compressed file or an ArrayRecord.
"""

from __future__ import annotations

import errno
import gzip
import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from coa_jax.errors import UserError
from coa_jax.files import durable

SHARD_FORMATS = ("jsonl.gz", "array_record")
"""Formats of shards: gzip-compressed JSON lines, or an ArrayRecord file with zstd compression.

A record of an ArrayRecord file holds one JSON object.
"""

_SUFFIXES = (".jsonl", *(f".{form}" for form in SHARD_FORMATS))
_FILES = (*_SUFFIXES, ".json")  # an ATIF document, or a list of them
_LEVEL = 3  # gzip level: higher levels take several times as long and save a few per cent

AGENT_FILE = "trajectory.json"
"""Name of the ATIF document of each trial in a job folder of Harbor."""


def write_shard(folder: Path, form: str, phase: str, step: int, rows: Iterable[bytes]) -> None:
    """Writes a shard, or nothing if there are no rows; only one process may write to a folder.

    Args:
        folder: folder of the shards; it is created if necessary.
        form: format of the shard, one of `SHARD_FORMATS`.
        phase: phase of the run to which all rows belong, such as ``sft`` or ``rl``.
        step: step to which all rows belong.
        rows: JSON texts without newlines. Only one row is in memory at a time.

    Raises:
        OSError: the file cannot be written, for example because the disk is full. No partial file
            remains.
    """
    rows = iter(rows)
    first = list(itertools.islice(rows, 1))
    if not first:
        return
    fill = _array_record if form == "array_record" else _gzip
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob(f"{phase}-{step:08d}-*")))
    path = folder / f"{phase}-{step:08d}-{number:02d}.{form}"
    durable.replace_with(path, lambda file: fill(file, itertools.chain(first, rows)))


def _gzip(file: IO[bytes], rows: Iterable[bytes]) -> None:
    with gzip.GzipFile(filename="", mode="wb", compresslevel=_LEVEL, fileobj=file) as packed:
        for row in rows:
            packed.write(row + b"\n")


def _array_record(file: IO[bytes], rows: Iterable[bytes]) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(file.name, "group_size:1")  # each record can be read alone
    try:
        for row in rows:
            writer.write(row)
        writer.close()
    except RuntimeError as error:  # the library raises no other exceptions
        full = os.strerror(errno.ENOSPC) in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error), file.name) from error


def rewind_shards(folder: Path, phase: str, step: int) -> None:
    """Removes the shards that a phase wrote after a step, and partial files of a killed process.

    Args:
        folder: folder of the shards.
        phase: phase of the run whose shards are removed, such as ``sft`` or ``rl``.
        step: last step whose shards stay.
    """
    for path in folder.glob(".*.new"):
        path.unlink()
    for path in folder.glob(f"{phase}-*-*"):
        name, its_step, _ = path.name.rsplit("-", 2)
        if name == phase and int(its_step) > step:
            path.unlink()


def trace_files_of_run(folder: Path) -> list[Path]:
    """Returns the files with a run's trajectories: `traces.jsonl`, then the shards in `traces/`."""
    plain = folder / "traces.jsonl"
    return [*([plain] if plain.exists() else []), *_shards(folder / "traces")]


def trace_files(path: str | os.PathLike[str]) -> list[Path]:
    """Returns the trajectory files at a path.

    Args:
        path: a run directory, a folder of shards, a folder whose subfolders contain ATIF documents
            with the name ``trajectory.json``, or a single trajectory file.

    Raises:
        UserError: the folder has no trajectory file, or the name of the file has another suffix.
    """
    from coa_jax.storage import local  # here: writing shards needs no buckets

    path = Path(local(os.fspath(path)))
    one = (path.name.endswith(_FILES) and not path.is_dir()) or not path.exists()
    files = (
        [path]
        if one
        else trace_files_of_run(path) or _shards(path) or sorted(path.rglob(AGENT_FILE))
    )
    if not files:
        suffixes = ", ".join(_FILES)
        raise UserError(f"{path}: no file of trajectories; their names end in {suffixes}")
    return files


def _shards(folder: Path) -> list[Path]:
    names = (path for path in folder.glob("[!.]*") if path.name.endswith(_SUFFIXES[1:]))
    return sorted(names)
