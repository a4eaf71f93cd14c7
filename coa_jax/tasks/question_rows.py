"""Loads tasks from a JSON lines file with a question and its answer on each line (docs/data.md).

A line may name its split. A line that names no split belongs to every split.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from absl import logging

from coa_jax.errors import UserError
from coa_jax.files import jsonl
from coa_jax.protocol import Messages, get_protocol
from coa_jax.storage import local
from coa_jax.tasks.base import SPLITS, Task
from coa_jax.tasks.checks import checked
from coa_jax.tasks.prompts import read_messages
from coa_jax.tasks.task_files import draw, golds, split_source

_ANSWER_KEYS = ("answer", "answers", "golden_answers", "gold")


def _gold(
    row: dict[str, Any], protocol: str, metadata: dict[str, Any]
) -> tuple[tuple[str, ...], str]:
    """Returns the accepted answers, and the grader that their type requires ("" for none)."""
    key = next((key for key in _ANSWER_KEYS if key in row), None)
    if key is None or row[key] in ("", []):
        # The reward of such a task may come from its environment alone.
        if metadata.get("grader", "environment" if protocol == "turns" else "") == "environment":
            return (), ""
        raise ValueError(
            ("there is no field 'answer'" if key is None else "the answer is empty")
            + "; only a task of an environment needs none: the protocol 'turns', or "
            '"metadata": {"grader": "environment"}'
        )
    if isinstance(row[key], dict):  # the tests of a program
        return (json.dumps(row[key], ensure_ascii=False),), "code"
    return golds(row[key]), ""


def _task(row: Any, protocol: str, source: str) -> tuple[str | None, Task]:
    """Parses a line; returns (split or None, task).

    Raises:
        ValueError: the line is invalid, for the reason in the message.
    """
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, found {type(row).__name__}")
    question = row.get("question")
    if not isinstance(question, str) or not question.strip():
        raise ValueError("the field 'question' must be a string")
    split, metadata = row.get("split"), row.get("metadata", {})
    if split is not None and split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; the splits are {', '.join(SPLITS)}")
    if not isinstance(metadata, dict):
        raise ValueError("the field 'metadata' must be an object")
    digest = hashlib.sha256(question.strip().encode(errors="replace")).hexdigest()[:16]
    name = row.get("protocol", protocol)
    if not isinstance(name, str):
        raise ValueError("the field 'protocol' must be a string")
    try:
        get_protocol(name)
    except UserError as error:
        raise ValueError(str(error)) from None
    identity = row.get("id", digest)
    if not isinstance(identity, str | int):
        raise ValueError("the field 'id' must be a string or a whole number")
    asked = read_messages(row["prompt"]) if row.get("prompt") else Messages("")
    gold, grader = _gold(row, name, metadata)
    if grader and "scorer" not in metadata:
        metadata = {"grader": grader, **metadata}
    task = Task(str(identity), question.strip(), name, gold, source, metadata, *asked[:2])
    return split, checked(task)


def load_question_file(
    source: str, split: str, n: int | None = None, seed: int = 0, protocol: str = ""
) -> list[Task]:
    """Reads tasks from a JSON lines file. The same arguments give the same tasks.

    Args:
        source: ``PATH`` or ``PATH:protocol=NAME``. NAME is the protocol of all lines that name no
            protocol.
        split: split to read. Lines that name no split belong to every split.
        n: number of tasks, chosen at random; None for all tasks in the order of the file.
        seed: seed of the random choice and order.
        protocol: protocol of a line if neither the line nor the source names a protocol; "" for
            ``generalist``.

    Raises:
        UserError: the file cannot be read, contains no task of the split, contains an id twice, or
            contains a malformed line. In the last case the message begins with ``path:line:``.
    """
    path, named = split_source(source)
    protocol = named or protocol or "generalist"
    rows = jsonl.read_lines(local(path), lambda row: _task(row, protocol, source))
    tasks = [task for found, task in rows if found in (None, split)]
    if not tasks:
        raise UserError(
            f"{path}: the file has no task of the split {split!r}; add lines or use another split"
        )
    others = [task.protocol for task in tasks if task.protocol != protocol]
    if named and others:
        logging.warning(
            "%s: %d of %d lines have a protocol of their own (%s), which is used for them",
            source, len(others), len(tasks), ", ".join(sorted(set(others))),
        )  # fmt: skip
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise UserError(f"{path}: the id {task.id!r} occurs twice; give every line its own id")
        seen.add(task.id)
    return draw(tasks, n, seed)
