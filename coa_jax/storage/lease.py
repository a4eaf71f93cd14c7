"""Implements the lease of a run directory in a bucket: an object that names the run that may write.

The lease takes the place of a lock, which buckets do not have. It expires after the number of
seconds in ``$COA_JAX_LEASE_SECONDS``, by default 60. The run that holds the lease rewrites the
object four times in this time. Another run takes over the lease if the object does not change for
this time, by the clock of this other run. If the holder was a process of the same host and has
ended, the other run takes over the lease at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any

from absl import logging

from coa_jax.config.fields import seconds_of
from coa_jax.errors import UserError
from coa_jax.storage.file_systems import explain_store_errors, join, url_to_fs
from coa_jax.storage.periodic import Repeated

NAME = "lease.json"


class Lease:
    """The exclusive right of this process to write to a run directory in a bucket.

    A thread renews the lease until `close` is called. Without renewal, the lease expires.

    Attributes:
        url: URL of the run directory.
        renewal: thread that renews the lease.
    """

    def __init__(self, url: str):
        """Takes the lease of a directory.

        If another run has the lease, the constructor waits until that run renews the lease (then it
        raises UserError) or the lease expires.

        Args:
            url: URL of the run directory.

        Raises:
            UserError: another run holds the lease, or the bucket cannot be written.
        """
        self.url, self._seconds = url, seconds_of("COA_JAX_LEASE_SECONDS", 60.0)
        self._fs, self._path = url_to_fs(join(url, NAME))
        self._token = secrets.token_hex(8)
        self._lost = ""
        self._renewed = 0.0
        self._acquire()
        fault = f"{url}: cannot renew the lease"
        self.renewal = Repeated(self._renew, self._seconds / 4, fault)

    def _acquire(self) -> None:
        first, since = self._read(), time.monotonic()
        while (now := self._read()) is not None and not _is_gone(now):
            if first is None or now != first:
                user = f"in use by process {now.get('pid')} on {now.get('host')}"
                advice = "wait for it, stop it or choose another --workdir"
                raise UserError(f"workdir {self.url}: {user}; {advice}")
            waited = time.monotonic() - since
            if waited >= self._seconds:
                logging.warning(
                    "%s: the last run does not renew its lease; taking over the lease", self.url
                )
                break
            time.sleep(min(0.5, self._seconds / 20))
        with explain_store_errors(self.url):
            if now is not None:
                self._fs.rm_file(self._path)
            # If the store has no conditional writes, the last writer holds the lease.
            with contextlib.suppress(FileExistsError):
                self._write("create")
                # Another run that takes the lease at the same time may write its object now.
                time.sleep(min(0.2, self._seconds / 20))
        if self._read_token() != self._token:
            advice = "another run has just taken it; choose another --workdir"
            raise UserError(f"workdir {self.url}: {advice}")

    def _read(self) -> dict[str, Any] | None:
        with explain_store_errors(self.url):
            try:
                holder = json.loads(self._fs.cat_file(self._path))
            except FileNotFoundError:
                return None
            except ValueError:
                return {}
        return holder if isinstance(holder, dict) else {}

    def _read_token(self) -> str:
        return str((self._read() or {}).get("token"))

    def _write(self, mode: str) -> None:
        now = time.monotonic()
        holder = {
            "token": self._token,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "place": _machine_id(),
            "started": _start_time(os.getpid()),
            "renewed": time.time(),
        }
        self._fs.pipe_file(self._path, json.dumps(holder).encode(), mode=mode)
        self._renewed = now

    def _renew(self) -> None:
        if self._read_token() != self._token:
            self._lost = f"workdir {self.url}: another run has taken over the lease; this run ends"
            return
        with explain_store_errors(self.url):
            self._write("overwrite")

    def check(self) -> None:
        """Checks that this process still holds the lease; must be called before every write.

        Raises:
            UserError: another run has taken over the lease, because this process did not renew it
                in time.
        """
        if not self._lost and time.monotonic() - self._renewed > self._seconds / 2:
            self._renew()
        if self._lost:
            raise UserError(self._lost)

    def close(self) -> None:
        """Releases the lease."""
        self.renewal.stop()
        with contextlib.suppress(UserError, FileNotFoundError):
            if not self._lost and self._read_token() == self._token:
                with explain_store_errors(self.url):
                    self._fs.rm_file(self._path)


def _machine_id() -> str:
    """Returns a text that identifies the machine, its last boot and the PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _start_time(pid: int) -> str:
    """Returns the start time of a process of this machine; "" if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    state, *rest = text.rpartition(")")[2].split()
    return "" if state in "ZX" else rest[18]


def _is_gone(holder: dict[str, Any]) -> bool:
    """Returns whether the holder of a lease was a process of this machine that has ended."""
    pid = holder.get("pid")
    return (
        holder.get("place") == _machine_id()
        and isinstance(pid, int)
        and _start_time(pid) != holder.get("started")
    )
