"""Shares the entries of a cache in a bucket between processes that add entries at the same time.

An object in a bucket can only be written as a whole, so several processes cannot write to one file.
The URL of a cache is therefore a folder. Each process appends its new entries to a JSONL file of
its own in this folder, which a mirror uploads, see `coa_jax.storage.mirror`. On each machine, the
processes look entries up in a local file, which the first of these processes creates from all
JSONL files in the bucket.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from absl import logging

from coa_jax.config.fields import seconds_of
from coa_jax.files import durable, untrusted
from coa_jax.storage.copies import local, locked, own_folder, stands_for
from coa_jax.storage.file_systems import (
    check_reachable,
    check_writable,
    explain_store_errors,
    join,
    url_to_fs,
)
from coa_jax.storage.mirror import ENTRIES, Mirror
from coa_jax.storage.periodic import Repeated

_open: list[SharedCache] = []
"""The caches of this process that are in use."""


class SharedCache:
    """A cache in a bucket, to which several processes add entries at the same time.

    Attributes:
        url: URL of the folder of the cache.
        path: path of a local file with the entries, which all processes of this machine read.
    """

    def __init__(
        self,
        url: str,
        create: Callable[[Path, Iterator[dict[str, Any]]], None],
        *,
        writes: bool = True,
    ):
        """Opens the cache.

        Args:
            url: URL of the folder, which need not exist.
            create: function that creates the local file, at the given path, from the entries in the
                bucket. The function is called unless another process of this machine already uses
                the cache.
            writes: whether this process may add entries.

        Raises:
            UserError: the bucket cannot be read or written, or an entry is damaged.
        """
        self.url = url.rstrip("/")
        (check_writable if writes else check_reachable)(self.url)
        digest = hashlib.blake2b(self.url.encode(), digest_size=8).hexdigest()
        folder = own_folder() / "caches" / digest
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "entries"
        stands_for(self.path, self.url)
        self._opening = folder / ".opening"
        with contextlib.ExitStack() as failed, locked(self._opening):
            # The lock on this file lasts as long as a process uses the cache.
            self._used = failed.enter_context(open(folder / ".used", "a"))
            if self._is_last():
                self._remove()
                create(self.path, _entries(self.url))
            fcntl.flock(self._used, fcntl.LOCK_SH)
            failed.pop_all()
        self._mirror = Mirror(self.url) if writes else None
        self._uploads: Repeated | None = None
        if self._mirror is not None:
            host = re.sub(r"[^\w-]", "-", socket.gethostname())
            began = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
            name = f"{ENTRIES}{began}-{host}-{os.getpid()}-{secrets.token_hex(3)}.jsonl"
            self._own = self._mirror.path / name
            seconds = seconds_of("COA_JAX_SYNC_SECONDS", 15.0)
            fault = f"{self.url}: cannot upload new entries now"
            self._uploads = Repeated(self._mirror.sync, seconds, fault)
        _open.append(self)
        # Programs other than the commands of this project end without `closing_caches`. The mirror
        # registers the removal of its folder, so this function must be registered later.
        atexit.unregister(_close_all)
        atexit.register(_close_all)

    def add(self, entry: Mapping[str, Any]) -> None:
        """Adds an entry, which the next upload copies to the bucket.

        The caller must also write the entry to the file `path`, whose format only the caller knows.

        Raises:
            OSError: the entry cannot be written to this process's local file of new entries.
        """
        assert self._mirror is not None
        durable.append(self._own, (json.dumps(entry) + "\n").encode())

    def close(self) -> None:
        """Uploads the last entries; the last process of this machine removes the local file.

        Raises:
            UserError: the bucket cannot be written.
        """
        _open.remove(self)
        try:
            if self._uploads is not None and self._mirror is not None:
                self._uploads.stop()
                self._mirror.sync()
        finally:
            with locked(self._opening), self._used:
                if self._is_last():
                    self._remove()

    def _is_last(self) -> bool:
        """Returns whether no other process of this machine uses the cache."""
        try:
            fcntl.flock(self._used, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _remove(self) -> None:
        for file in self.path.parent.glob(f"{self.path.name}*"):
            file.unlink()


def _entries(url: str) -> Iterator[dict[str, Any]]:
    """Yields the entries of all processes; leaves out a last line that a kill has cut off."""
    pattern_url = join(url, f"{ENTRIES}*")
    fs, inside = url_to_fs(pattern_url)
    with explain_store_errors(url):
        if not fs.glob(inside):
            return
    pattern = Path(local(pattern_url))
    for path in sorted(pattern.parent.glob(pattern.name)):
        for number, line in untrusted.lines(path):
            if line.endswith(b"\n"):
                yield durable.parse_row(line, f"{path}:{number}")


@contextlib.contextmanager
def closing_caches() -> Iterator[None]:
    """Closes the caches of this process at the end of a ``with`` block.

    Raises:
        UserError: a cache cannot be uploaded. If the block raises an exception of its own, this
            error becomes a warning.
    """
    try:
        yield
    except BaseException:
        _close_all()
        raise
    for cache in list(_open):
        cache.close()


def _close_all() -> None:
    for cache in list(_open):
        try:
            cache.close()
        except Exception as error:
            logging.warning("%s: the last entries are not uploaded: %s", cache.url, error)


def _forget_all() -> None:
    """A forked process neither uploads the entries of its parent nor holds the locks."""
    for cache in _open:
        cache._used.close()
    _open.clear()


os.register_at_fork(after_in_child=_forget_all)
