"""Stores finished runs of the teacher in a journal, from which a killed command continues.

The journal is an append-only JSONL file. Its first line holds the settings with which the runs were
made. Each further line is a finished run. If a kill left an incomplete last line, the line is
removed when the journal is opened again.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from coa_jax.distillation.messages import MessageLog, from_json, to_json
from coa_jax.errors import UserError
from coa_jax.files import jsonl
from coa_jax.run.settings import changes_of, line_of


@dataclasses.dataclass(frozen=True)
class TeacherJournal:
    """A journal of the teacher's finished runs. All runs of a journal have the same settings.

    Attributes:
        path: the JSONL file.
        done: maps the id of a task to its run, for all runs in the file.
    """

    path: Path
    done: dict[str, MessageLog]

    def append(self, log: MessageLog) -> None:
        """Appends a finished run to the file, so that it survives a kill of the process."""
        jsonl.append_lines(self.path, [to_json(log)])
        self.done[log.episode] = log


def _decode(value: Any) -> dict[str, Any] | MessageLog:
    if isinstance(value, dict) and value.keys() == {"journal"}:
        return value["journal"]
    return from_json(value)


def check_fingerprint(path: Path, there: dict[str, Any], now: dict[str, Any]) -> None:
    """Checks that the runs in a file were made with the present settings.

    Args:
        path: the file, used in the error message.
        there: settings that are stored in the file.
        now: present settings.

    Raises:
        UserError: the settings differ; the message names the differences.
    """
    if changed := [line_of(change) for change in changes_of(there, now)]:
        more = [f"{len(changed) - 3} more"] if len(changed) > 3 else []
        raise UserError(
            f"{path}: holds runs of another configuration ({'; '.join([*changed[:3], *more])}); "
            f"use a fresh --workdir, or delete {path.name} there and its runs with it"
        )


def open_journal(path: Path, fingerprint: dict[str, Any]) -> TeacherJournal:
    """Opens a journal, or creates it.

    Args:
        path: the JSONL file.
        fingerprint: settings on which the content of runs depends, as JSON values.

    Raises:
        UserError: the file was written with other settings, or a line is malformed.
    """
    fingerprint = jsonl.loads(jsonl.dumps(fingerprint))
    jsonl.append_lines(path, [])  # creates the file, or removes an incomplete last line
    head, *runs = list(jsonl.read_lines(path, _decode)) or [{}]
    if not isinstance(head, dict):
        raise UserError(f"{path}:1: not the head of a journal; delete the file")
    if not runs:  # settings may change while there are no runs
        jsonl.write_lines(path, [{"journal": fingerprint}])
        return TeacherJournal(path, {})
    check_fingerprint(path, head, fingerprint)
    logs = [run for run in runs if isinstance(run, MessageLog)]
    return TeacherJournal(path, {log.episode: log for log in logs})
