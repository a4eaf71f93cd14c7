"""Reads untrusted files with bounded memory and time, and explains each error in one line.

Only regular files are opened, so a pipe or a device never blocks a command. The size of a file, the
nesting of JSON values and the digits of numbers are bounded, because parsers and recursive code
fail in various ways on larger input.
"""

from __future__ import annotations

import codecs
import gzip
import json
import os
import stat
import zlib
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from coa_jax.errors import UserError

MAX_DEPTH = 100
"""Maximum nesting of JSON values.

Recursive code uses up to four stack frames per level, of which Python allows 1,000.
"""
SMALL = 16 << 20
"""Maximum size in bytes of a file that holds a configuration or a result."""
MAX_LINE = 256 << 20
"""Maximum length in bytes of a line in a `.jsonl` file."""
MALFORMED = (
    *(KeyError, IndexError, TypeError, ValueError, AttributeError),
    *(OverflowError, ZeroDivisionError, RecursionError, MemoryError),
)
"""Exceptions that indicate damaged data if they occur while the content of a file is processed.
"""

_DIGITS = 309  # more digits exceed every float
_KINDS = {
    stat.S_ISDIR: "a directory",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}
_MAKERS = {
    "runs/debug": "debug-files",
    "weights/SmolLM2-135M-Instruct": "fetch smollm2",
    "weights/all-MiniLM-L6-v2": "fetch minilm",
}
"""Maps folders, as configs and docs name them, to the commands that write the folders."""
_PACKED = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2"}
_WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_ONLY_DIGITS = bytes(ord("0") if chr(code).isdigit() else 0 for code in range(128)) + bytes(128)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def machine_memory() -> int:
    """Returns the size of the machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def whole_limit() -> int:
    """Returns the maximum size, in bytes, of a file that may be read into memory as a whole."""
    return machine_memory() // 4


def made_by(path: str | os.PathLike[str]) -> str:
    """Returns a hint for an error message about a missing path that a ``coa-jax`` command creates.

    The hint is " (`coa-jax COMMAND` makes it)", or "" for other paths.
    """
    text = os.fspath(path)
    for folder, command in _MAKERS.items():
        if f"/{folder}/" in f"/{text}/":
            return f" (`coa-jax {command}` makes it)"
    return ""


def open_file(path: str | os.PathLike[str]) -> IO[bytes]:
    """Opens a regular file for reading, without blocking.

    Raises:
        UserError: the file does not exist, may not be read, or is not a regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        hint = made_by(path) if isinstance(error, FileNotFoundError) else ""
        raise UserError(f"{path}: cannot be read: {error.strerror}{hint}") from error
    except ValueError as error:  # a null byte in the name
        raise UserError(f"{str(path)!r}: cannot be read: {error}") from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = next((name for test, name in _KINDS.items() if test(mode)), "of another kind")
        raise UserError(f"{path}: cannot be read: it is {kind}; give a regular file")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: str | os.PathLike[str], limit: int | None = None) -> bytes:
    """Reads the content of a file.

    Args:
        path: the file.
        limit: maximum size in bytes; None for the result of `whole_limit`.

    Raises:
        UserError: the file cannot be read, is not a regular file, or is larger than the limit.
    """
    limit = whole_limit() if limit is None else limit
    with open_file(path) as file:
        try:
            if (size := os.fstat(file.fileno()).st_size) <= limit:
                # Files in /proc report no size. A read of ``limit`` bytes would allocate a buffer
                # of this size.
                data = file.read(min(limit, max(size, 1 << 20)) + 1)
                size = max(size, len(data))
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if size > limit:
        raise UserError(f"{path}: cannot be read: it has {size:,} bytes, the limit is {limit:,}")
    return data


def read_text(path: str | os.PathLike[str], limit: int | None = None) -> str:
    """Reads the text of a UTF-8 file, and drops a byte order mark.

    Raises:
        UserError: `read_bytes` fails, or the file is not UTF-8.
    """
    try:
        return _decoded(read_bytes(path, limit))
    except ValueError as error:
        raise UserError(f"{path}: {reason(error)}") from error


def read_json(path: str | os.PathLike[str], limit: int | None = SMALL) -> Any:
    """Reads the JSON value of a file. A file ``*.gz`` is decompressed.

    Raises:
        UserError: the file cannot be read, is larger than ``limit`` bytes, is not JSON, is nested
            too deeply, or contains a number with too many digits (see `parse_json`).
    """
    data = read_bytes(path, limit)
    if os.fspath(path).endswith(".gz"):
        data = _decompressed(data, path, whole_limit() if limit is None else limit)
    try:
        return parse_json(data)
    except (ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{path}: {reason(error)}; correct the file or fetch it again") from error


def _decompressed(data: bytes, path: str | os.PathLike[str], limit: int) -> bytes:
    """Decompresses the content of a gzip file to at most ``limit`` bytes."""
    stream = zlib.decompressobj(wbits=31)  # 31: with the header and the checksum of gzip
    try:
        content = stream.decompress(data, limit + 1)
    except zlib.error as error:
        raise UserError(f"{path}: damaged: {error}; fetch it again") from error
    if len(content) > limit:
        raise UserError(f"{path}: cannot be read: the limit is {limit:,} bytes after decompression")
    if not stream.eof:
        raise UserError(f"{path}: damaged: the end is missing; fetch it again")
    return content


def parse_json(data: bytes | str, **hooks: Any) -> Any:
    """Parses a JSON value, which may be nested up to `MAX_DEPTH` levels.

    Args:
        data: the JSON text, as UTF-8 or as a string.
        hooks: keyword arguments of ``json.loads``.

    Raises:
        ValueError, RecursionError: the data is not JSON, is nested too deeply, or contains an
            integer with more digits than any float has; `reason` explains the exception.
    """
    text = _decoded(data) if isinstance(data, bytes) else data
    raw = text.encode("utf-8", "replace") if isinstance(data, str) else data
    if b"0" * _DIGITS in raw.translate(_ONLY_DIGITS):
        hooks = {**hooks, "parse_int": _integer}
    value = json.loads(text, **hooks)
    brackets = np.frombuffer(raw.translate(None, _NO_BRACKETS), np.uint8)
    # Closing brackets have the bit 4 set, opening brackets do not. Brackets in strings are counted
    # too.
    steps = np.where(brackets & 4, -1, 1).cumsum(dtype=np.int32)
    if steps.size and steps.max() > MAX_DEPTH and _is_deep(value):
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    return value


def fault_of_text(start: bytes) -> str:
    """Returns why a file is not UTF-8 text, given its first bytes; "" if it may be such text.

    The reason is that the file is compressed, or encoded in UTF-16.
    """
    packed = next((name for head, name in _PACKED.items() if start.startswith(head)), None)
    if packed:
        return f"compressed with {packed}; unpack it first"
    return "encoded in UTF-16; save it as UTF-8" if start.startswith(_WIDE) else ""


def _decoded(data: bytes) -> str:
    if fault := fault_of_text(data):
        raise ValueError(fault)
    return data.removeprefix(codecs.BOM_UTF8).decode()


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) >= _DIGITS:
        raise ValueError(f"a number has {len(digits):,} digits")
    return int(digits)


def _is_deep(value: Any) -> bool:
    """Returns whether a list or an object is nested more than `MAX_DEPTH` levels."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def reason(error: BaseException) -> str:
    """Explains in one line an exception that damaged data caused, for an error message.

    The exception comes from `parse_json`, or from code that reads the parsed value. For example, a
    KeyError means that a field is missing.
    """
    if isinstance(error, KeyError):
        return f"the field {error} is missing"
    if isinstance(error, json.JSONDecodeError):
        line = f" of line {error.lineno}" if error.lineno > 1 else ""
        return f"not JSON: {what_is_not_json(error)} at column {error.colno}{line}"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: byte {error.start}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, MemoryError):
        return "too large for the memory of this machine"
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]} ..."


def what_is_not_json(error: json.JSONDecodeError) -> str:
    """Returns the parser's message without a final "at" or "starting at"."""
    return error.msg.rstrip(": ").removesuffix(" at").removesuffix(" starting")


def lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, bytes]]:
    """Yields a pair for each line of a file: the line number, from 1, and the bytes of the line.

    A file ``*.gz`` is decompressed. A file ``*.array_record`` is read as ArrayRecord, and each of
    its records counts as a line.

    Raises:
        UserError: the file cannot be opened, a line has more than `MAX_LINE` bytes, or a compressed
            file is damaged.
    """
    suffix = os.path.splitext(path)[1]
    with open_file(path) as raw, gzip.open(raw) if suffix == ".gz" else raw as file:
        packed = suffix == ".array_record"
        rows = _records(path) if packed else iter(lambda: file.readline(MAX_LINE + 1), b"")
        number = 0
        try:
            for number, line in enumerate(rows, 1):
                if len(line) > MAX_LINE:
                    raise UserError(f"{path}:{number}: the line has more than {MAX_LINE:,} bytes")
                yield number, line
        except (EOFError, gzip.BadGzipFile, zlib.error, RuntimeError) as error:
            raise UserError(f"{path}: damaged after {number} rows: {reason(error)}") from error
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def _records(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Yields each record of an ArrayRecord file with a newline; holds one record in memory."""
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(os.fspath(path), "readahead_buffer_size:0")
    if not reader.ok():
        raise RuntimeError("not an ArrayRecord file, or its end is missing")
    try:
        for _ in range(reader.num_records()):
            yield reader.read() + b"\n"
    finally:
        reader.close()
