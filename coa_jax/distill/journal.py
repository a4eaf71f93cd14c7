"""The append-only journal of teacher runs on disk, from which a killed run continues.

The first line identifies the configuration that wrote the file; each further line is a finished run
as JSON. A partial line at the end, left by a kill, is removed when the journal is opened again.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from coa_jax import jsonl
from coa_jax.distill.messages import MessageLog, from_json, to_json
from coa_jax.errors import UserError
from coa_jax.run_dir import differences


@dataclasses.dataclass(frozen=True)
class Journal:
    """Finished teacher runs of one configuration.

    Attributes:
        path: the JSONL file.
        done: the runs that the file contained when it was opened, by episode.
    """

    path: Path
    done: dict[str, MessageLog]

    def append(self, log: MessageLog) -> None:
        """Appends a finished run; afterwards it survives a kill of the process."""
        jsonl.append_lines(self.path, [to_json(log)])


def _decode(value: Any) -> dict[str, Any] | MessageLog:
    if isinstance(value, dict) and value.keys() == {"journal"}:
        return value["journal"]
    return from_json(value)


def check_fingerprint(path: Path, there: dict[str, Any], now: dict[str, Any]) -> None:
    """Rejects a file of runs that were made with another configuration.

    Args:
        path: the file, for the message.
        there: fingerprint in the file.
        now: fingerprint of this configuration.

    Raises:
        UserError: the fingerprints differ; the message names the difference.
    """
    if changed := differences(there, now):
        more = [f"{len(changed) - 3} more"] if len(changed) > 3 else []
        raise UserError(
            f"{path}: holds runs of another configuration ({'; '.join([*changed[:3], *more])}); "
            f"use a fresh --workdir, or delete {path.name} there and its runs with it"
        )


def open_journal(path: Path, fingerprint: dict[str, Any]) -> Journal:
    """Opens or creates a journal.

    Args:
        path: the JSONL file.
        fingerprint: settings on which the content of runs depends (JSON values).

    Raises:
        UserError: the file was written with another configuration, or a line is malformed.
    """
    fingerprint = jsonl.loads(jsonl.dumps(fingerprint))
    jsonl.append_lines(path, [])  # creates the file, or removes a partial last line
    head, *runs = list(jsonl.read_lines(path, _decode)) or [{}]
    if not isinstance(head, dict):
        raise UserError(f"{path}:1: not the head of a journal; delete the file")
    if not runs:  # without runs the configuration may still change
        jsonl.write_lines(path, [{"journal": fingerprint}])
        return Journal(path, {})
    check_fingerprint(path, head, fingerprint)
    logs = [run for run in runs if isinstance(run, MessageLog)]
    return Journal(path, {log.episode: log for log in logs})
