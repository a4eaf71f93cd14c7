"""Files that stay sound over `kill -9` and a full disk: whole rows, whole files."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from coa_jax import reading
from coa_jax.errors import UserError


def append(path: Path, data: bytes) -> None:
    """Appends `data`, all of it or, if that fails, none of it.

    Raises:
        OSError: with the name of the file, which errors of a write do not carry otherwise.
    """
    with _naming(path), open(path, "ab", buffering=0, opener=_without_waiting) as file:
        size = file.tell()
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            # A device cannot be shortened, and the error of the write is the one to report.
            with contextlib.suppress(OSError):
                file.truncate(size)
            raise


def _without_waiting(path: str, flags: int) -> int:
    """Opens a file; a pipe that nobody reads is an error and no reason to wait."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def replace(path: Path, data: bytes) -> None:
    """Replaces a file so that a reader or a crash sees the old one or the new one.

    Raises:
        OSError: with the name of the file; the old one is still there.
    """

    def write(file: IO[bytes]) -> None:
        file.write(data)

    replace_with(path, write)


def replace_with(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Replaces a file with what ``write`` writes; see `replace`."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        with _naming(path), open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def replace_folder(new: Path, path: Path) -> None:
    """Moves a finished folder to where an older one may stand, which is removed only afterwards.

    Args:
        new: in the file system of ``path``; it is gone afterwards.
        path: where it goes.

    Raises:
        OSError: it cannot be moved; the older one is still there.
    """
    old = None
    if path.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
        os.replace(path, old)
    try:
        os.replace(new, path)
    except OSError:
        if old is not None:
            os.replace(old, path)
        raise
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def make_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Makes a folder that other processes may make too: readers see a complete folder or none.

    Args:
        path: where it goes; a folder of another process there is as good.
        fill: writes its content.

    Raises:
        OSError: it cannot be made; nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        fill(fresh)
        try:
            os.rename(fresh, path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def cache_folder(name: str) -> Path:
    """``$XDG_CACHE_HOME/coa_jax/NAME`` or ``~/.cache/coa_jax/NAME``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "coa_jax" / name


def write_json(path: Path, value: Any) -> None:
    """Replaces a JSON file (see `replace`)."""
    try:
        data = json.dumps(value, indent=2, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        data = json.dumps(value, indent=2).encode()
    replace(path, data + b"\n")


def read_json_object(path: Path, limit: int | None = reading.SMALL) -> dict[str, Any]:
    """Reads a JSON file that holds an object; for the limit see `reading.read_bytes`.

    Raises:
        UserError: the file cannot be read or holds something else.
    """
    value = reading.read_json(path, limit)
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a JSON object; mend or remove the file")
    return value


def parse_row(line: bytes, where: str) -> dict[str, Any]:
    """Parses a line of a `.jsonl` file; ``where`` names it in errors.

    Raises:
        UserError: the line is not a JSON object.
    """
    try:
        row = reading.parse_json(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: {reading.reason(error)}") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a JSON object")
    return row


def drop_last_rows(path: Path, goes: Callable[[dict[str, Any]], bool | None]) -> None:
    """Drops rows near the end of a `.jsonl` file; no byte of the others changes.

    Only rows from the end to the first one that ends the search are read, however long the file is.
    A crash leaves the file with all of these rows or with none.

    Args:
        path: the file, of whole rows; it need not be there.
        goes: called with rows from the last one on: whether the row goes, or None to keep it and
            all before it.

    Raises:
        UserError: a row that was read is not a JSON object, or not one that ``goes`` can read.
        OSError: see `replace`.
    """
    if not path.exists():
        return
    kept: list[tuple[int, int]] = []  # place and length of rows, the last one first
    first, behind = None, 0
    with reading.open_file(path) as file:
        for place, line in _lines_backwards(file):
            where = f"{path}, byte {place}"
            try:
                verdict = goes(parse_row(line, where))
            except reading.MALFORMED as error:
                raise UserError(f"{where}: {reading.reason(error)}") from error
            if verdict is None:
                break
            if verdict:
                first, behind = place, len(kept)
            else:
                kept.append((place, len(line)))
    if first is None:
        return
    rest = kept[:behind][::-1]
    if not rest:
        with _naming(path):
            os.truncate(path, first)
        return

    def write(new: IO[bytes]) -> None:
        with open(path, "rb") as old:
            for place, length in ((0, first), *rest):
                old.seek(place)
                _copy(old, new, length)

    replace_with(path, write)


def _lines_backwards(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Place and bytes of each line, the last one first."""
    position, block = file.seek(0, os.SEEK_END), b""
    while position or block:
        start = block.rfind(b"\n", 0, max(len(block) - 1, 0)) + 1
        if not start and position:
            _check_line(file, len(block))
            size = min(position, max(65536, len(block)))
            position -= size
            file.seek(position)
            block = file.read(size) + block
            continue
        yield position + start, block[start:]
        block = block[:start]


def _check_line(file: IO[bytes], length: int) -> None:
    """Raises UserError for a line that no writer of ours wrote: its search would not end."""
    if length > reading.MAX_LINE:
        raise UserError(f"{file.name}: its last line has more than {reading.MAX_LINE:,} bytes")


def _copy(source: IO[bytes], target: IO[bytes], count: int) -> None:
    while count:
        block = source.read(min(count, 1 << 20))
        target.write(block)
        count -= len(block)


def cut_torn_line(path: Path) -> None:
    """Removes what follows the last newline: a row whose writer was killed half way."""
    if not path.exists():
        return
    reading.open_file(path).close()
    with open(path, "rb+") as file:
        position = end = file.seek(0, os.SEEK_END)
        while position > 0:
            _check_line(file, end - position)
            start = max(0, position - 65536)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                position = start + newline + 1
                break
            position = start
        if position < end:
            file.truncate(position)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
