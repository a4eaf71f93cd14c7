"""Appends and replaces files so that they survive `kill -9` and a full disk without damage."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from coa_jax.errors import UserError
from coa_jax.files import untrusted


def append(path: Path, data: bytes) -> None:
    """Appends `data` to a file; after an error the file is unchanged.

    Raises:
        OSError: the data cannot be written. The error contains the name of the file.
    """
    with _naming(path), open(path, "ab", buffering=0, opener=_without_waiting) as file:
        size = file.tell()
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            # A device cannot be truncated; the error to report is that of the write.
            with contextlib.suppress(OSError):
                file.truncate(size)
            raise


def _without_waiting(path: str, flags: int) -> int:
    """Opens a file without blocking, so opening a pipe that nobody reads is an error."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def replace(path: Path, data: bytes) -> None:
    """Replaces a file atomically: readers see the old or the new content, even after a crash.

    Raises:
        OSError: the data cannot be written. The error contains the name of the file, whose old
            content is unchanged.
    """
    replace_with(path, lambda file: file.write(data))


def replace_with(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Replaces a file atomically, like `replace`, with content that a function writes.

    If several processes replace the file at the same time, one waits for the other.

    Args:
        path: the file to replace.
        write: function that writes the new content to the open file that it receives.
    """
    # The fixed name lets the next call reuse the file that a killed call left.
    temporary = path.with_name(f".{path.name}.new")
    with _naming(path), _open_alone(temporary) as file:
        try:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        except Exception:
            temporary.unlink(missing_ok=True)
            raise


def _open_alone(path: Path) -> IO[bytes]:
    """Opens an empty file for writing, which no other process writes until it is closed."""
    while True:
        file = open(path, "wb", opener=_without_emptying)  # noqa: SIM115
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                file.truncate(0)
                return file
        file.close()  # while this process waited, the other one has moved or removed the file


def _without_emptying(path: str, flags: int) -> int:
    return os.open(path, flags & ~os.O_TRUNC, 0o666)


def replace_folder(new: Path, path: Path) -> None:
    """Moves a complete folder to a path, where it replaces an older folder.

    The older folder is removed after the move.

    Args:
        new: the complete folder, in the same file system as ``path``.
        path: path to which the folder is moved.

    Raises:
        OSError: the folder cannot be moved; an older folder is unchanged.
    """
    # The fixed name lets the next call remove the folder that a killed call left.
    old = path.with_name(f".{path.name}.old")
    if replaced := path.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(path, old)
    try:
        os.replace(new, path)
    except OSError:
        if replaced:
            os.replace(old, path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def make_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Creates a folder with its content atomically: readers see the complete folder or none.

    If several processes create the same folder at the same time, the folder of the process that
    finishes first is kept.

    Args:
        path: path of the folder.
        fill: function that writes the content to the temporary folder that it receives.

    Raises:
        OSError: the folder cannot be created; no temporary files remain.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # `tempfile.mkdtemp` would deny other users access to the folder.
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fresh.mkdir()
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
    """Returns the folder of the user's cache for ``name``; the folder need not exist.

    This is ``$XDG_CACHE_HOME/coa_jax/NAME``, or else ``~/.cache/coa_jax/NAME``.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "coa_jax" / name


def write_json(path: Path, value: Any) -> None:
    """Writes a value as a JSON file, which replaces an older file atomically (see `replace`)."""
    try:
        data = json.dumps(value, indent=2, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        data = json.dumps(value, indent=2).encode()
    replace(path, data + b"\n")


def read_json_object(path: Path, limit: int | None = untrusted.SMALL) -> dict[str, Any]:
    """Reads a JSON file that contains an object.

    Raises:
        UserError: the file cannot be read, is larger than ``limit`` bytes (see
            `untrusted.read_bytes`), or contains another JSON value.
    """
    value = untrusted.read_json(path, limit)
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a JSON object; correct or remove the file")
    return value


def parse_row(line: bytes, where: str) -> dict[str, Any]:
    """Parses a line of a `.jsonl` file.

    Raises:
        UserError: the line is not a JSON object; the message begins with ``where``.
    """
    try:
        row = untrusted.parse_json(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: {untrusted.reason(error)}") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a JSON object")
    return row


def drop_last_rows(path: Path, goes: Callable[[dict[str, Any]], bool | None]) -> None:
    """Removes rows near the end of a `.jsonl` file and leaves all other rows unchanged.

    The function reads rows from the end of the file until ``goes`` ends the search, so its time
    does not depend on the size of the file. After a crash the file has all the rows to remove or
    none of them.

    Args:
        path: a file of complete rows; nothing happens if it does not exist.
        goes: function that is called with each row, from the last row backwards. It must return
            True to remove the row, False to keep the row, or None to keep this row and all rows
            before it.

    Raises:
        UserError: a row is not a JSON object, or ``goes`` cannot process it.
        OSError: the file cannot be written; the file is then unchanged.
    """
    if not path.exists():
        return
    kept: list[tuple[int, int]] = []  # position and length of rows, the last row first
    first, behind = None, 0
    for offset, line in _lines_backwards(path):
        where = f"{path}, byte {offset}"
        try:
            verdict = goes(parse_row(line, where))
        except untrusted.MALFORMED as error:
            raise UserError(f"{where}: {untrusted.reason(error)}") from error
        if verdict is None:
            break
        if verdict:
            first, behind = offset, len(kept)
        else:
            kept.append((offset, len(line)))
    if first is None:
        return
    rest = kept[:behind][::-1]
    if not rest:
        with _naming(path):
            os.truncate(path, first)
        return

    def write(new: IO[bytes]) -> None:
        with open(path, "rb") as old:
            for offset, length in ((0, first), *rest):
                old.seek(offset)
                _copy(old, new, length)

    replace_with(path, write)


def _lines_backwards(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the position and the bytes of each line, the last line first."""
    with untrusted.open_file(path) as file:
        position, block = file.seek(0, os.SEEK_END), b""
        while position or block:
            start = block.rfind(b"\n", 0, max(len(block) - 1, 0)) + 1
            if not start and position:
                _check_line(path, len(block))
                size = min(position, max(65536, len(block)))
                position -= size
                file.seek(position)
                block = file.read(size) + block
                continue
            yield position + start, block[start:]
            block = block[:start]


def _check_line(path: Path, length: int) -> None:
    """Raises UserError for a line that is too long, so that no damaged file fills the memory."""
    if length > untrusted.MAX_LINE:
        raise UserError(f"{path}: its last line has more than {untrusted.MAX_LINE:,} bytes")


def _copy(source: IO[bytes], target: IO[bytes], count: int) -> None:
    while count:
        block = source.read(min(count, 1 << 20))
        target.write(block)
        count -= len(block)


def cut_torn_line(path: Path) -> None:
    """Removes an incomplete last row, that is, text after the last newline.

    A process that is killed while it writes leaves such text.
    """
    if not path.exists():
        return
    with untrusted.open_file(path) as file:
        position = end = file.seek(0, os.SEEK_END)
        newline = -1
        while position and newline < 0:
            _check_line(path, end - position)
            start = max(0, position - 65536)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            position = start + newline + 1 if newline >= 0 else start
    if position < end:
        os.truncate(path, position)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
