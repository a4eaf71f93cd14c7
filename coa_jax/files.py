"""Files that stay sound over `kill -9` and a full disk: whole rows, whole files."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coa_jax.errors import UserError


def append(path: Path, data: bytes) -> None:
    """Appends `data`, all of it or, if that fails, none of it.

    Raises:
        OSError: with the name of the file, which errors of a write do not carry otherwise.
    """
    with _naming(path), open(path, "ab", buffering=0) as file:
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


def replace(path: Path, data: bytes) -> None:
    """Replaces a file so that a reader or a crash sees the old one or the new one.

    Raises:
        OSError: with the name of the file; the old one is still there.
    """
    temporary = path.with_name(f".{path.name}.new")
    try:
        with _naming(path), open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Replaces a JSON file (see `replace`)."""
    replace(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds an object.

    Raises:
        UserError: it cannot be read or holds something else.
    """
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); mend or remove the file") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a JSON object; mend or remove the file")
    return value


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Reads the objects of a `.jsonl` file, which a run may be writing at this moment.

    A last line that does not end yet is left out.

    Raises:
        UserError: the file cannot be read or a row is not a JSON object.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: not a JSON object")
        rows.append(row)
    return rows


def cut_torn_line(path: Path) -> None:
    """Removes what follows the last newline: a row whose writer was killed half way."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        position = end = file.seek(0, os.SEEK_END)
        while position > 0:
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
