"""Copies files from process 0 to the other processes, so that only one host downloads them.

The copy goes over the network of the devices, which is faster than a download by every host.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging

from coa_jax import files
from coa_jax.parallel import processes
from coa_jax.parallel.turns import turn
from coa_jax.storage import own_folder, stands_for, with_urls

_BLOCK = 1 << 24
"""Number of bytes that one program copies."""

_LOG_SECONDS = 60.0


def from_first(fetch: Callable[[], Path], what: str, leave_out: Sequence[str] = ()) -> Path:
    """Calls ``fetch`` in process 0 alone, and gives all processes the files that it returns.

    All processes must call this function, in their main threads and in the same order. The other
    processes get a copy in `own_folder`. The copy is kept: if process 0 has files with the same
    names and sizes in a folder of the same name in a later run, nothing is copied.

    Args:
        fetch: function that returns the path of a folder or of a file, such as a download. The name
            of the folder must change with the contents of its files, because copies are recognised
            by names and sizes.
        what: description of the files, used in messages.
        leave_out: patterns of names of files that are not copied from a folder.

    Returns:
        The path that ``fetch`` returned in process 0, or the path of a copy.

    Raises:
        OSError: a file cannot be read or written.
    """
    if processes.count() == 1:
        return fetch()
    first = processes.index() == 0
    processes.doing(f"{what}: download")
    header, source = b"", Path()
    if first:
        found = fetch()
        source, inside = found.parent, [found]
        if found.is_dir():
            left = {path for pattern in leave_out for path in found.rglob(pattern)}
            source, inside = found, sorted(set(found.rglob("*")) - left)
        present = [path for path in inside if path.is_file()]
        sizes = {str(path.relative_to(source)): path.stat().st_size for path in present}
        single = "" if found.is_dir() else found.name
        header = json.dumps([source.name, single, with_urls(source), sizes]).encode()
    processes.meet(what, _LOG_SECONDS)
    header = _broadcast(header)
    name, single, shown, sizes = json.loads(header)
    digest = hashlib.blake2b(header, digest_size=16).hexdigest()
    target = source if first else own_folder() / "spread" / digest / name
    copied = processes.exchange(target.is_dir(), f"{what}: copies", _LOG_SECONDS)
    if not all(copied):
        logging.info("%s: process 0 sends %d bytes", what, sum(sizes.values()))
        copy = functools.partial(_copy, source, sizes)
        copy(None) if first else files.make_folder(target, copy)
    if not first:
        stands_for(target, shown)
    return target / single


def _copy(source: Path, sizes: dict[str, int], target: Path | None) -> None:
    """Sends the files of ``source`` (if ``target`` is None), or writes the files to ``target``."""
    for name, size in sizes.items():
        place = (target or source) / name
        place.parent.mkdir(parents=True, exist_ok=True)
        with open(place, "wb" if target else "rb") as file:
            for at in range(0, size, _BLOCK):
                count = min(_BLOCK, size - at)
                block = _broadcast(b"" if target else file.read(count))
                if target:
                    file.write(block)


def _broadcast(block: bytes) -> bytes:
    """Returns the bytes of process 0 in every process; the other processes pass b""."""
    from jax.experimental import multihost_utils

    with turn(jax.sharding.Mesh(jax.devices(), "all")):
        size = int(multihost_utils.broadcast_one_to_all(np.asarray(len(block), np.int32)))
        # Padding to powers of two limits the number of compiled programs.
        padded = np.zeros(1 << max(size - 1, 1).bit_length(), np.uint8)
        padded[: len(block)] = np.frombuffer(block, np.uint8)
        found: Any = multihost_utils.broadcast_one_to_all(padded)
    return np.asarray(found)[:size].tobytes()
