"""Rows of a run in a folder of shards: each file holds rows of one step, all of them or none.

A shard is named after its phase, step and number (``rl-00000012-00.jsonl.gz``), so that a run that
resumes drops the steps that it will write again without reading them.  No shard is appended to:
neither a compressed file nor an ArrayRecord survives a kill in the middle of that.
"""

from __future__ import annotations

import errno
import gzip
import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from coa_jax import files
from coa_jax.errors import UserError
from coa_jax.storage import local

FORMATS = ("jsonl.gz", "array_record")
"""JSON lines packed with gzip; ArrayRecord, packed with zstd, of one JSON object in a record."""

_SUFFIXES = (".jsonl", *(f".{form}" for form in FORMATS))
_LEVEL = 3  # of gzip: higher ones take several times as long for a few per cent


def write(folder: Path, form: str, phase: str, step: int, rows: Iterable[bytes]) -> None:
    """Writes a shard, none where there is no row.  One process writes to a folder.

    Args:
        folder: of the shards; made if need be.
        form: one of `FORMATS`.
        phase, step: of all rows.
        rows: JSON without line ends; one is in memory at a time.

    Raises:
        OSError: e.g. the disk is full; nothing is left behind.
    """
    rows = iter(rows)
    first = list(itertools.islice(rows, 1))
    if not first:
        return
    fill = _array_record if form == "array_record" else _gzip
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob(f"{phase}-{step:08d}-*")))
    path = folder / f"{phase}-{step:08d}-{number:02d}.{form}"
    files.replace_with(path, lambda file: fill(file, itertools.chain(first, rows)))


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
    except RuntimeError as error:  # all that this library raises
        full = os.strerror(errno.ENOSPC) in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error), file.name) from error


def rewind(folder: Path, phase: str, step: int) -> None:
    """Removes the shards of a phase after a step, and what a kill left of an unfinished one."""
    for path in folder.glob(".*.new"):
        path.unlink()
    for path in folder.glob(f"{phase}-*-*"):
        name, its_step, _ = path.name.rsplit("-", 2)
        if name == phase and int(its_step) > step:
            path.unlink()


def of_run(folder: Path) -> list[Path]:
    """The files with the trajectories of a run: `traces.jsonl`, then the shards in `traces/`."""
    plain = folder / "traces.jsonl"
    return [*([plain] if plain.exists() else []), *_shards(folder / "traces")]


def parts(path: str | os.PathLike[str]) -> list[Path]:
    """The files with the trajectories of a run directory, of a folder of shards, or one file.

    Raises:
        UserError: a folder without any, or a file of another kind.
    """
    path = Path(local(os.fspath(path)))
    one = path.name.endswith(_SUFFIXES) or not path.exists()
    found = [path] if one else of_run(path) or _shards(path)
    if not found:
        wanted = ", ".join(_SUFFIXES)
        raise UserError(f"{path}: no file of trajectories, whose names end in {wanted}")
    return found


def _shards(folder: Path) -> list[Path]:
    names = (path for path in folder.glob("[!.]*") if path.name.endswith(_SUFFIXES[1:]))
    return sorted(names)
