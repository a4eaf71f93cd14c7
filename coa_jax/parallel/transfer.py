"""Moves data between the processes of a run, over the network of the devices.

`gather` gives the items of all processes to every process. `from_first` copies a folder of files
from process 0 to the other processes, so that only one host downloads the files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import jax
import numpy as np
from absl import logging

from coa_jax.errors import UserError
from coa_jax.parallel import processes
from coa_jax.parallel.turns import turn

T = TypeVar("T")

_SMALLEST = 1 << 16  # bytes; payloads are padded to powers of two, so that few programs compile

_BLOCK = 1 << 24
"""Number of bytes of a file that one program copies."""

_LOG_SECONDS = 60.0

Fetched = tuple[str, Callable[[Path], Any]]
"""(name of a folder, function that writes the files of the folder into the given empty folder)."""


def gather(items: Sequence[T], what: str, seconds: float) -> list[T]:
    """Gathers the items of all processes, and returns all of them in every process.

    Args:
        items: items of this process, which pickle can serialise.
        what: name of the operation, used in messages.
        seconds: interval at which a waiting process logs which processes are missing.

    Returns:
        The items of all processes. If `processes.share` split a sequence into the items, they are
        in the order of this sequence.
    """
    if processes.count() == 1:
        return list(items)
    from jax.experimental import multihost_utils

    payload = np.frombuffer(pickle.dumps(list(items)), np.uint8)
    processes.meet(what, seconds)
    with turn(jax.sharding.Mesh(jax.devices(), "all")):
        sizes = multihost_utils.process_allgather(np.asarray([payload.size], np.int32)).reshape(-1)
        width = max(_SMALLEST, 1 << (int(sizes.max()) - 1).bit_length())
        padded = np.zeros(width, np.uint8)
        padded[: payload.size] = payload
        rows = np.asarray(multihost_utils.process_allgather(padded))
    parts = [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]
    total = sum(map(len, parts))
    return [parts[at % len(parts)][at // len(parts)] for at in range(total)]


def from_first(root: Path, fetch: Callable[[], Fetched], what: str) -> Path:
    """Creates a folder in process 0, and copies it to the processes that do not see its files.

    All processes must call this function, in their main threads and in the same order. The folder
    is kept: a later run, or another process with the same ``root``, uses the folder again.

    Args:
        root: folder for this folder and others; each host may have its own.
        fetch: function that finds or downloads the files. Only process 0 calls this function. The
            name that it returns must change with the content of the files.
        what: description of the files, used in messages.

    Returns:
        Path of the folder.

    Raises:
        UserError: ``fetch`` raised this error, or a process cannot read or write a file. All
            processes raise the error.
    """
    first = processes.index() == 0
    name, sizes, fault = "", dict[str, int](), ""
    if first:
        try:
            name, fill = fetch()
            sizes = _filled(root / name, fill)
        except (UserError, OSError) as error:
            fault = _reason(what, error)
    name, sizes, fault = processes.exchange([name, sizes, fault], what, _LOG_SECONDS)[0]
    if fault:
        raise UserError(fault)
    folder = root / name
    present = _sizes(folder) == sizes
    if not all(processes.exchange(present, f"{what}: copies", _LOG_SECONDS)):
        logging.info("%s: process 0 sends %d bytes", what, sum(sizes.values()))
        fault = _send(folder, sizes, what) if first else _receive(folder, sizes, what)
        faults = processes.exchange(fault, f"{what}: end of the copies", _LOG_SECONDS)
        if any(faults):
            raise UserError(next(filter(None, faults)))
    return folder


def _reason(what: str, error: Exception) -> str:
    if isinstance(error, UserError):
        return str(error)
    return f"{what}: {error} (process {processes.index()} on {socket.gethostname()})"


def _sizes(folder: Path) -> dict[str, int]:
    """Returns the number of bytes of each file in a folder, by its path in the folder."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in found}


def _filled(folder: Path, fill: Callable[[Path], Any]) -> dict[str, int]:
    """Creates a folder unless the folder exists; returns the sizes of its files."""
    with _lock(folder, wait=True):
        if not folder.exists():
            with _replacing(folder) as part:
                fill(part)
    return _sizes(folder)


@contextlib.contextmanager
def _lock(folder: Path, *, wait: bool) -> Iterator[bool]:
    """Locks the creation of a folder between the processes that see the folder.

    The value of the context manager is False if another process has the lock and ``wait`` is False.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f".{folder.name}.lock"), "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


@contextlib.contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Returns an empty folder that takes the place of ``folder`` at the end; needs the lock."""
    part = folder.with_name(f".{folder.name}.part")  # a killed process may have left this folder
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        yield part
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _send(folder: Path, sizes: Mapping[str, int], what: str) -> str:
    """Sends the files of a folder; returns the reason if a file cannot be read, otherwise "".

    The other processes wait for every block, so this function sends zeros after a fault.
    """
    fault = ""
    for name, size in sizes.items():
        with contextlib.ExitStack() as closing:
            file: IO[bytes] | None = None
            for count in _blocks(size):
                block = b""
                try:
                    file = file or closing.enter_context(open(folder / name, "rb"))
                    block = file.read(count)
                except OSError as error:
                    fault = fault or _reason(what, error)
                _broadcast(block, count)
    return fault


def _receive(folder: Path, sizes: Mapping[str, int], what: str) -> str:
    """Writes the files that process 0 sends; returns the reason if this fails, otherwise "".

    Processes that see the same folder write it only once. Every process receives all blocks,
    because each block is a program of all processes.
    """
    places = [(name, count) for name, size in sizes.items() for count in _blocks(size)]
    blocks = ((name, _broadcast(b"", count)) for name, count in places)
    try:
        with _lock(folder, wait=False) as mine:
            if mine and _sizes(folder) != sizes:
                with _replacing(folder) as part:
                    for name in sizes:
                        (part / name).parent.mkdir(parents=True, exist_ok=True)
                        (part / name).touch()
                    for name, block in blocks:
                        with open(part / name, "ab") as file:
                            file.write(block)
    except OSError as error:
        return _reason(what, error)
    finally:
        for _ in blocks:
            pass
    return ""


def _blocks(size: int) -> Iterator[int]:
    """Yields the number of bytes of each block of a file with ``size`` bytes."""
    return (min(_BLOCK, size - at) for at in range(0, size, _BLOCK))


def _broadcast(block: bytes, count: int) -> bytes:
    """Returns the block of process 0, which has ``count`` bytes, in every process."""
    from jax.experimental import multihost_utils

    # Padding to powers of two limits the number of compiled programs.
    padded = np.zeros(1 << (count - 1).bit_length(), np.uint8)
    padded[: len(block)] = np.frombuffer(block, np.uint8)
    with turn(jax.sharding.Mesh(jax.devices(), "all")):
        found: Any = multihost_utils.broadcast_one_to_all(padded)
    return np.asarray(found)[:count].tobytes()
