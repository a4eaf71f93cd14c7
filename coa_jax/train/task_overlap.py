"""Finds the tasks of an RL run whose question or fact is in the policy's training records.

In the Chain-of-Agents paper, no task of the web agent's RL is a question of its SFT.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from coa_jax.data.records import ReadRecord, iterate_records
from coa_jax.data.trajectory import DistilledRecord
from coa_jax.errors import UserError
from coa_jax.files import durable
from coa_jax.parallel import processes
from coa_jax.run.run_dir import RunDir
from coa_jax.storage import is_url, local
from coa_jax.tasks import Task
from coa_jax.tasks.grading import normalize_answer
from coa_jax.tools.words import words
from coa_jax.train.config import DistilledConfig
from coa_jax.train.fingerprints import digest

FILE = "distilled.json"
_LONGEST_ANSWER = 1000  # characters; longer ones are the tests of programs


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Counts the RL tasks whose question or fact is also in a training record of the policy.

    Such tasks are called distilled, see `DistilledConfig`. `str` gives the counts in one sentence.

    Attributes:
        tasks: number of tasks of the run, from all its sources.
        records: number of training records that the tasks were compared with; 0 if none were found.
        same_question: number of tasks with the same question as a record.
        same_fact: number of further tasks that ask for the same fact as a record, in other words.
        left_out: ids of the tasks that are left out.
    """

    tasks: int
    records: int = 0
    same_question: int = 0
    same_fact: int = 0
    left_out: Sequence[str] = ()

    def __str__(self) -> str:
        if not self.records:
            return (
                f"note: unknown how many of the {self.tasks} RL tasks are distilled: the records "
                "of the model's training were not found; name them by config.distilled.records"
            )
        return (
            f"of {self.tasks} RL tasks, {self.same_question} are distilled questions and "
            f"{self.same_fact} more ask for a distilled fact; {len(self.left_out)} are left out"
        )

    def keep(self, run: RunDir) -> None:
        """Writes this result to a file, for resumed runs and replays, and to the run's summary."""
        run.keep_json(FILE, dataclasses.asdict(self))
        run.summary({"RL tasks": str(self)})


def find_distilled(
    config: DistilledConfig, model_path: str, parts: Mapping[str, Sequence[Task]], run: Path | None
) -> Overlap:
    """Finds the tasks whose question or fact is in a training record, and prints their number.

    A run that has begun leaves out the same tasks as at its start, whatever the records are now.

    Args:
        config: settings of the search, which name the policy's training records and define which
            tasks are distilled.
        model_path: the policy before RL: path or name of a model.
        parts: name of a source -> its tasks.
        run: directory of the run; None to search anew.

    Raises:
        UserError: the records that ``config`` names cannot be read, a task is distilled and
            ``config.tasks`` is ``refuse``, or the processes of the run find different tasks.
    """
    if run is not None and (run / FILE).exists():
        overlap = Overlap(**durable.read_json_object(run / FILE, None))
    elif run is not None and (run / "steps.jsonl").exists():  # a version without this file began it
        overlap = Overlap(sum(map(len, parts.values())))
    else:
        overlap = _search(config, model_path, [task for tasks in parts.values() for task in tasks])
    if processes.index() == 0:
        print(overlap, flush=True)
    if len(set(processes.all_gather(digest(overlap.left_out), "the distilled tasks", 600.0))) > 1:
        raise UserError(
            "the processes find different training records of the model; name them by "
            "config.distilled.records, a place that all hosts can read"
        )
    return overlap


def _search(config: DistilledConfig, model_path: str, tasks: Sequence[Task]) -> Overlap:
    """Compares tasks with the records, see `DistilledConfig`."""
    questions = defaultdict[tuple[str, ...], list[frozenset[str]]](list)
    facts = set()
    for record in _records(config, model_path):
        questions[tuple(words(record.question))].append(_answers(record))
        facts.add(_fact(record))
    same_question, same_fact = [], []
    for task in tasks:
        own = _answers(task)
        others = questions.get(tuple(words(task.question)), ())
        if any(not answers or not own or answers & own for answers in others):
            same_question.append(task.id)
        elif (fact := _fact(task)) and fact in facts:
            same_fact.append(task.id)
    left_out = same_question + same_fact if config.tasks == "leave_out" else []
    number = sum(map(len, questions.values()))
    overlap = Overlap(len(tasks), number, len(same_question), len(same_fact), left_out)
    if config.tasks == "refuse" and (same_question or same_fact):
        raise UserError(
            f"distilled.tasks is refuse: {overlap}; give tasks of another seed or source"
        )
    return overlap


def _answers(asked: Task | DistilledRecord) -> frozenset[str]:
    short = (text for text in asked.gold if len(text) <= _LONGEST_ANSWER)
    return frozenset(map(normalize_answer, short))


def _fact(asked: Task | DistilledRecord) -> tuple[Any, ...] | None:
    """Returns the fact that a generated question asks for; None for other questions."""
    about = asked.metadata
    entities = about.get("entities")
    if not entities or not isinstance(entities, list):
        return None
    names = frozenset(map(str, entities))
    return str(about.get("kind")), str(about.get("relation")), names, _answers(asked)


def _records(config: DistilledConfig, model_path: str) -> Iterator[DistilledRecord]:
    """Yields the records that ``config`` names, or else those that `trained_on` finds."""
    for source, protocol in [(config.records, "")] if config.records else trained_on(model_path):
        try:
            rows = iterate_records(source, protocol)
            yield from (each.record for each in rows if isinstance(each, ReadRecord))
        except UserError as error:
            if config.records:
                raise
            logging.warning("records that the model was trained on: %s", error)


def trained_on(model_path: str) -> Iterator[tuple[str, str]]:
    """Yields the places of the records that a model was trained on, newest training run first.

    The run that trained a model is found by the model's path: ``WORKDIR/model`` for a training run,
    or ``WORKDIR/models/NAME`` for a pipeline, whose records are in ``WORKDIR/data``. The search
    then continues with the model from which that run began.

    Args:
        model_path: path of the model.

    Yields:
        (place of the records as in `SFTConfig.data`, protocol of records that name no protocol).
    """
    visited = set()
    while model_path not in visited:
        visited.add(model_path)
        workdir, config = _run_of(model_path)
        if "distill" in config and not model_path.rstrip("/").endswith("/base"):
            yield f"{workdir}/data/train.*", ""
        elif config.get("data") and "optimizer" in config:
            yield str(config["data"]), str(config.get("protocol", ""))
        model_path = str(config.get("model", ""))


def _run_of(model_path: str) -> tuple[str, dict[str, Any]]:
    """Returns the work directory in which a model lies, and its settings; ("", {}) if unknown."""
    folder = model_path.rstrip("/") if is_url(model_path) else os.path.abspath(model_path)
    for _ in range(2 if is_url(model_path) or os.path.isdir(model_path) else 0):
        folder = folder.rpartition("/")[0]
        with contextlib.suppress(UserError):
            return folder, durable.read_json_object(Path(local(f"{folder}/config.json")))
    return "", {}
