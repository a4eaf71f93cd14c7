"""The journal of teacher runs on disk: append-only, so that a killed run continues.

One JSON line per finished run after a first line that says which configuration wrote the
file.  What a kill left half-written at the end is cut off when the journal is opened again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coa_jax import jsonl
from coa_jax.distill.messages import MessageLog, from_json, to_json
from coa_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Journal:
    """Finished teacher runs of one configuration.

    Attributes:
        path: the JSONL file.
        done: the runs that it held when it was opened, by episode.
    """

    path: Path
    done: dict[str, MessageLog]

    def append(self, log: MessageLog) -> None:
        """Adds one finished run; it survives a kill of the process from here on."""
        jsonl.append_lines(self.path, [to_json(log)])


def _decode(value: Any) -> dict[str, Any] | MessageLog:
    if isinstance(value, dict) and value.keys() == {"journal"}:
        return value["journal"]
    return from_json(value)


def check_fingerprint(path: Path, there: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuses to go on with a file of runs that were made in another way.

    Raises:
        UserError: names what differs.
    """
    changed = [
        f"{key}={there.get(key)!r:.300} there, {now.get(key)!r:.300} now"
        for key in sorted({*there, *now})
        if there.get(key) != now.get(key)
    ]
    if changed:
        raise UserError(
            f"{path}: holds runs of another configuration ({'; '.join(changed)}); "
            f"use a fresh --workdir, or delete {path.name} there and its runs with it"
        )


def open_journal(path: Path, fingerprint: dict[str, Any]) -> Journal:
    """Opens or creates a journal.

    Args:
        path: the JSONL file.
        fingerprint: what the content of runs depends on (JSON values).

    Raises:
        UserError: the file was written with another configuration, or a line is malformed.
    """
    fingerprint = jsonl.loads(jsonl.dumps(fingerprint))
    jsonl.append_lines(path, [])  # creates the file, or cuts off an unfinished last line
    head, *runs = list(jsonl.read_lines(path, _decode)) or [{}]
    if not isinstance(head, dict):
        raise UserError(f"{path}:1: not the head of a journal; delete the file")
    if not runs:  # no run depends on the head: it may have been a mistake
        jsonl.write_lines(path, [{"journal": fingerprint}])
        return Journal(path, {})
    check_fingerprint(path, head, fingerprint)
    logs = [run for run in runs if isinstance(run, MessageLog)]
    return Journal(path, {log.episode: log for log in logs})
