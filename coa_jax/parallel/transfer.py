"""Moves data between the processes of a run, over the network of the devices.

`gather` gives the items of all processes to every process. `from_first` copies files from process 0
to the other processes, so that only one host downloads the files.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import pickle
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import jax
import numpy as np
from absl import logging

from coa_jax.errors import UserError
from coa_jax.parallel import processes
from coa_jax.parallel.launch_order import launch_lock

T = TypeVar("T")

_SMALLEST = 1 << 16  # bytes; payloads are padded to powers of two, so that few programs compile

_BLOCK = 1 << 24
"""Maximum number of bytes that one program sends."""

_LOG_SECONDS = 60.0


def gather(items: Sequence[T], what: str, seconds: float) -> list[T]:
    """Gathers the items of all processes, and returns all of them in every process.

    Args:
        items: items of this process, which pickle can serialise.
        what: name of the operation, used in messages.
        seconds: interval at which a waiting process logs which processes are missing.

    Returns:
        The items of all processes. If `processes.local_items` split a sequence into these items,
        the items are in the order of the sequence.
    """
    if processes.count() == 1:
        return list(items)
    from jax.experimental import multihost_utils

    payload = np.frombuffer(pickle.dumps(list(items)), np.uint8)
    processes.barrier(what, seconds)
    with launch_lock(jax.sharding.Mesh(jax.devices(), "all")):
        sizes = multihost_utils.process_allgather(np.asarray([payload.size], np.int32)).reshape(-1)
        width = max(_SMALLEST, 1 << (int(sizes.max()) - 1).bit_length())
        padded = np.zeros(width, np.uint8)
        padded[: payload.size] = payload
        rows = np.asarray(multihost_utils.process_allgather(padded))
    parts = [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]
    total = sum(map(len, parts))
    return [parts[at % len(parts)][at // len(parts)] for at in range(total)]


def from_first(root: Path, fetch: Callable[[], Iterable[Path]], what: str) -> list[Path]:
    """Fetches files in process 0, and copies them to the processes whose ``root`` lacks them.

    All processes must call this function, in their main threads and in the same order. The copies
    are kept: later runs, and other processes with the same ``root``, use them.

    Args:
        root: folder that contains the files; each host may have its own.
        fetch: function that finds or downloads files below ``root``, and returns their paths. Only
            process 0 calls this function. New content needs a new path, because a process that
            already has a file with the same path and size keeps its file.
        what: description of the files, used in messages.

    Returns:
        Paths of the files below ``root``.

    Raises:
        UserError: ``fetch`` failed, or a process cannot read or write a file. All processes raise
            the error.
    """
    first = processes.index() == 0
    sizes, fault = dict[str, int](), ""
    if first:
        try:
            sizes = {str(path.relative_to(root)): path.stat().st_size for path in fetch()}
        except Exception as error:  # whatever the reason, the other processes must not wait
            fault = _reason(what, error)
    sizes, fault = processes.all_gather([sizes, fault], what, _LOG_SECONDS)[0]
    if fault:
        raise UserError(fault)
    absent, location = list[str](), ""
    try:
        root.mkdir(parents=True, exist_ok=True)
        absent = _absent(root, sizes)
        status = root.stat()
        location = f"{socket.gethostname()} {status.st_dev} {status.st_ino}"
    except OSError as error:
        fault = _reason(what, error)
    rows = _agreed([absent, location, fault], f"{what}: copies")
    if not (sent := {name: sizes[name] for name in sizes if any(name in row[0] for row in rows)}):
        return [root / name for name in sizes]
    logging.info("%s: process 0 sends %d bytes", what, sum(sent.values()))
    # Of the processes that see the same folder, only the first one writes.
    if [row[1] for row in rows].index(location) != processes.index():
        absent = []
    fault = _send(root, sent, what) if first else _receive(root, sent, absent, what)
    _agreed([fault], f"{what}: end of the copies")
    try:
        for name in absent:
            os.replace(_part(root / name), root / name)
    except OSError as error:
        fault = _reason(what, error)
    _agreed([fault], f"{what}: names of the copies")
    return [root / name for name in sizes]


def _agreed(value: list[Any], what: str) -> list[list[Any]]:
    """Exchanges a list between all processes and returns the lists of all.

    The last item of a list describes a fault of its process, or is "" if there is none.

    Raises:
        UserError: a process has a fault. All processes raise the error of the first one.
    """
    rows = processes.all_gather(value, what, _LOG_SECONDS)
    for row in rows:
        if row[-1]:
            raise UserError(row[-1])
    return rows


def _reason(what: str, error: Exception) -> str:
    if isinstance(error, UserError):
        return str(error)
    text = str(error)
    if not isinstance(error, OSError):  # a fault of this project keeps its traceback
        logging.exception("%s", what)
        text = repr(error)
    return f"{what}: {text} (process {processes.index()} on {socket.gethostname()})"


def _absent(root: Path, sizes: Mapping[str, int]) -> list[str]:
    """Returns the names of the files below ``root`` that are missing or have another size."""
    return [
        name
        for name, size in sizes.items()
        if not (root / name).is_file() or (root / name).stat().st_size != size
    ]


def _part(path: Path) -> Path:
    """Returns the name of a file during the copy; a killed run may leave such a file."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.part")


def _send(root: Path, sizes: Mapping[str, int], what: str) -> str:
    """Sends files; returns the reason if a file cannot be read, otherwise "".

    The other processes wait for every block, so this function sends zeros after a fault.
    """
    fault = ""
    for name, size in sizes.items():
        with contextlib.ExitStack() as closing:
            file: IO[bytes] | None = None
            for count in _blocks(size):
                block = b""
                try:
                    file = file or closing.enter_context(open(root / name, "rb"))
                    block = file.read(count)
                    if len(block) < count:
                        raise OSError(f"{root / name} has become shorter")
                except OSError as error:
                    fault = fault or _reason(what, error)
                _broadcast(block, count)
    return fault


def _receive(root: Path, sizes: Mapping[str, int], written: Sequence[str], what: str) -> str:
    """Receives the files that process 0 sends, and writes some of them to their `_part`.

    Every process receives all blocks, because each block is a program of all processes.

    Returns:
        The reason if a file cannot be written, otherwise "".
    """
    blocks = (_broadcast(b"", count) for size in sizes.values() for count in _blocks(size))
    try:
        for name, size in sizes.items():
            mine = itertools.islice(blocks, len(_blocks(size)))
            if name in written:
                part = _part(root / name)
                part.parent.mkdir(parents=True, exist_ok=True)
                with open(part, "wb") as file:
                    file.writelines(mine)
            collections.deque(mine, maxlen=0)  # receives the blocks that were not written
    except OSError as error:
        return _reason(what, error)
    finally:
        collections.deque(blocks, maxlen=0)
    return ""


def _blocks(size: int) -> list[int]:
    """Returns the number of bytes of each block of a file with ``size`` bytes."""
    return [min(_BLOCK, size - at) for at in range(0, size, _BLOCK)]


def _broadcast(block: bytes, count: int) -> bytes:
    """Returns the block of process 0, which has ``count`` bytes, in every process."""
    from jax.experimental import multihost_utils

    # Padding to powers of two limits the number of compiled programs.
    padded = np.zeros(1 << (count - 1).bit_length(), np.uint8)
    padded[: len(block)] = np.frombuffer(block, np.uint8)
    with launch_lock(jax.sharding.Mesh(jax.devices(), "all")):
        received: Any = multihost_utils.broadcast_one_to_all(padded)
    return np.asarray(received)[:count].tobytes()
