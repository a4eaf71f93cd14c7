"""Stores observations on disk, in an SQLite file that several processes can read and write.

If the store is in a bucket, `coa_jax.storage` shares the observations between machines, and each
machine has an SQLite file with them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coa_jax import storage
from coa_jax.errors import UserError
from coa_jax.tools.base import Observation

_SCHEMA = """
CREATE TABLE IF NOT EXISTS observations (
    key TEXT PRIMARY KEY, tool TEXT NOT NULL, arguments TEXT NOT NULL, observation TEXT NOT NULL,
    stored REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS age ON observations (stored);
"""
_COLUMNS = ("key", "tool", "arguments", "observation", "stored")
_PUT = """
INSERT INTO observations VALUES (?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET
    tool = excluded.tool, arguments = excluded.arguments, observation = excluded.observation,
    stored = excluded.stored WHERE excluded.stored >= stored
"""
_PRUNE_EVERY = 64
_WAIT_S = 10.0  # for other processes that write


def key_of(*parts: object) -> str:
    """Returns the key under which an observation is stored: a hash of JSON values."""
    return hashlib.sha256(json.dumps(parts, ensure_ascii=True).encode()).hexdigest()


class Store:
    """A mapping from keys to observations in an SQLite file, which several processes may share.

    Each operation opens and closes the file. Therefore threads share no connection, and SQLite
    repairs the file at the next operation if a process was killed.
    """

    def __init__(self, path: str | Path, max_entries: int = 0, *, writes: bool = True):
        """Creates the file and its folder if they are missing.

        Args:
            path: path of the file, or URL of a folder in a bucket.
            max_entries: maximum number of observations, beyond which the oldest are deleted; 0 for
                no limit. Nothing is deleted from a bucket.
            writes: whether `put` may be called. A bucket must then be writable.

        Raises:
            UserError: the file cannot be created, or is not a store of observations; or the bucket
                cannot be used.
        """
        self.place = str(path)
        self._max_entries = max_entries
        self._shared: storage.SharedCache | None = None
        if storage.is_url(self.place):
            self._shared = storage.SharedCache(self.place, self._fill, writes=writes)
            self.path = self._shared.path
        else:
            self.path = Path(path).expanduser()
            self._create()

    def _create(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._open() as connection:
                connection.execute("PRAGMA journal_mode=WAL")
                connection.executescript(_SCHEMA)
                connection.execute("SELECT key, observation FROM observations LIMIT 1").fetchall()
        except (OSError, sqlite3.Error) as error:
            wrong = f"{self.path} cannot hold observations of tools ({error})"
            raise UserError(f"{wrong}; remove it or give another path") from error

    def _fill(self, path: Path, entries: Iterator[dict[str, Any]]) -> None:
        """Creates the file of this machine from the observations in the bucket."""
        self.path = path
        self._create()
        with self._open() as connection:
            connection.execute("BEGIN")
            for number, entry in enumerate(entries, 1):
                try:
                    row = [entry[name] for name in _COLUMNS]
                    Observation(**json.loads(row[-2]))
                    connection.execute(_PUT, row)
                except (KeyError, TypeError, ValueError, sqlite3.Error) as error:
                    raise UserError(
                        f"{self.place}: entry {number} is not an observation of a tool ({error}); "
                        "give the folder of a store, or a new folder"
                    ) from error
            if self._max_entries:
                self._prune(connection)
            connection.execute("COMMIT")

    def _open(self) -> contextlib.closing[sqlite3.Connection]:
        connection = sqlite3.connect(self.path, timeout=_WAIT_S, isolation_level=None)
        try:
            connection.execute("PRAGMA synchronous=NORMAL")
        except sqlite3.Error:  # for example, the file is no database
            connection.close()
            raise
        return contextlib.closing(connection)

    def __len__(self) -> int:
        with self._open() as connection:
            return int(connection.execute("SELECT count(*) FROM observations").fetchone()[0])

    def get(self, key: str, max_age_s: float | None = None) -> Observation | None:
        """Returns the observation with a key; None if there is none, or only one that is too old.

        Args:
            key: key of the observation, see `key_of`.
            max_age_s: maximum age in seconds; None for no limit.

        Raises:
            sqlite3.Error: the file cannot be read.
        """
        with self._open() as connection:
            row = connection.execute(
                "SELECT observation, stored FROM observations WHERE key = ?", (key,)
            ).fetchone()
        if row is None or (max_age_s is not None and time.time() - row[1] > max_age_s):
            return None
        return Observation(**json.loads(row[0]))

    def put(self, key: str, tool: str, arguments: str, observation: Observation) -> None:
        """Stores an observation. An earlier observation with the same key is replaced.

        Args:
            key: key of the observation, see `key_of`.
            tool: name of the tool.
            arguments: text that the policy wrote to call the tool.
            observation: result of the call.

        Raises:
            sqlite3.Error, OSError: the observation cannot be written.
        """
        text = json.dumps(dataclasses.asdict(observation))
        # The arguments may contain a surrogate half, which cannot be encoded as UTF-8.
        arguments = arguments.encode("utf-8", "replace").decode()
        row = (key, tool, arguments, text, time.time())
        with self._open() as connection:
            connection.execute(_PUT, row)
            if self._max_entries and int(key[:8], 16) % _PRUNE_EVERY == 0:
                self._prune(connection)
        if self._shared is not None:
            self._shared.add(dict(zip(_COLUMNS, row, strict=True)))

    def _prune(self, connection: sqlite3.Connection) -> None:
        connection.execute(
            "DELETE FROM observations WHERE key IN (SELECT key FROM observations"
            " ORDER BY stored DESC LIMIT -1 OFFSET ?)",
            (self._max_entries,),
        )
