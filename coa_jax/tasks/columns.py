"""Loads tasks from the rows of a file or a data set, with a mapping from columns to parts of tasks.

    tasks=hf:openai/gsm8k:main  task_options.columns.answer=answer  task_options.answer_after=####

Data sets of the Hugging Face hub and of TFDS are named as in `data.data_sets`. If the name
contains no SPLIT, the run decides which split is read.

The mapping gives the column of each part of a task. A dot selects a field of a nested column
(``answers.text``). For a part without an entry, the columns with the customary names are tried.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from coa_jax.config.overrides import suggest
from coa_jax.data.data_sets import open_hub, open_tfds
from coa_jax.data.rows import find_files
from coa_jax.errors import UserError
from coa_jax.protocol import Messages, get_protocol
from coa_jax.tasks.base import SPLITS, Task
from coa_jax.tasks.checks import checked
from coa_jax.tasks.prompts import read_messages
from coa_jax.tasks.question_rows import load_question_file
from coa_jax.tasks.release_rows import ANSWERS, QUESTIONS, load_release_file
from coa_jax.tasks.task_files import Row, add_tasks, draw, golds, plain, read_rows, split_source

_USUAL = {"question": QUESTIONS, "answer": ANSWERS, "id": ("id",)}
"""Customary column names of the parts of a task."""
_PARTS = ("question", "answer", "id", "protocol", "prompt")


@dataclasses.dataclass(frozen=True)
class Columns:
    """Settings for converting the rows of a file or data set to tasks.

    Attributes:
        columns: part of a task -> name of its column. The parts are ``question``, ``answer`` (a
            string, a number, or a list of accepted answers), ``id``, ``protocol`` and ``prompt``
            (chat messages). Every other key becomes a metadata field of the task.
        answer_after: separator in the answers, such as ``####``. The accepted answer is the text
            after the last separator. "" uses the whole text.
        grader: name of the reward that grades the answers, see docs/grading.md; "" for the default
            of the protocol.
        protocol: protocol of rows that name no protocol.
        where: name of the file or data set, used in error messages and as ``Task.source``.
    """

    columns: Mapping[str, str]
    answer_after: str
    grader: str
    protocol: str
    where: str

    def __post_init__(self) -> None:
        get_protocol(self.protocol)
        for part, column in self.columns.items():
            if not isinstance(column, str) or not column:
                raise UserError(f"{self.where}: columns.{part} is {column!r}; give a column")

    def resolved(self, there: Iterable[str]) -> dict[str, str]:
        """Returns the column of each part of a task, after checking that the columns exist.

        Args:
            there: names of the columns of the data set.

        Returns:
            A mapping from parts of a task to the names of their columns.

        Raises:
            UserError: the mapping names a column that does not exist. Or the mapping names no
                column for the questions or answers, and no column has a customary name such as
                ``question``.
        """
        there = list(there)
        for part, column in self.columns.items():
            if column.partition(".")[0] not in there:
                raise UserError(
                    f"{self.where}: columns.{part} is {column}; there is no such column"
                    f"{suggest(column, there)}"
                )
        found = {
            part: next((name for name in usual if name in there), "")
            for part, usual in _USUAL.items()
        }
        found |= self.columns
        for part in ("question", "answer"):
            if not found[part]:
                raise UserError(
                    f"{self.where}: there is no column {part!r}; give columns.{part} of "
                    f"{', '.join(there) or 'none'}"
                )
        return {part: column for part, column in found.items() if column}

    def tasks(self, rows: Iterable[Row], split: str = "") -> list[Task]:
        """Converts rows to tasks, in the order of the rows.

        Args:
            rows: the rows.
            split: split to read. A row whose field ``split`` names another split is left out; ""
                reads all rows.

        Raises:
            UserError: a row cannot become a task (the message says why), or no row is left.
        """
        tasks: list[Task] = []
        names: dict[str, str] = {}
        others = [name for name in SPLITS if name != split]

        def make(row: Row, number: int) -> Task | None:
            if split and row.get("split") in others:
                return None
            names.update(names or self.resolved(row))
            return checked(self._task(row, names, number))

        add_tasks(tasks, rows, make, self.where)
        if not tasks:
            of = f" of the split {split!r}" if split else ""
            raise UserError(f"{self.where}: it has no rows{of}")
        return tasks

    def _task(self, row: Row, names: Mapping[str, str], number: int) -> Task:
        value = {part: _at(row, column) for part, column in names.items()}
        question = value["question"]
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"the question ({names['question']}) must be a string")
        gold = golds(value["answer"])
        if self.answer_after:
            gold = tuple(text.rpartition(self.answer_after)[2].strip() for text in gold)
        protocol = value.get("protocol") or self.protocol
        get_protocol(protocol)
        metadata = {part: found for part, found in value.items() if part not in _PARTS}
        metadata |= {"grader": self.grader} if self.grader else {}
        asked = read_messages(value["prompt"]) if value.get("prompt") else Messages("")
        id = value.get("id")
        id = str(number if id is None else id)
        return Task(
            id, question.strip(), protocol, gold, self.where, metadata, asked.user, asked.context
        )


def _at(row: Row, column: str) -> Any:
    """Returns the value of a column. A name with dots selects a field of a nested column."""
    value: Any = row
    for name in column.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise ValueError(f"there is no {column!r}")
        value = value[name]
    return value


def load_rows(
    source: str,
    split: str,
    n: int | None = None,
    seed: int = 0,
    protocol: str = "",
    columns: Mapping[str, str] | None = None,
    answer_after: str = "",
    grader: str = "",
    revision: str = "",
    data_dir: str = "",
) -> list[Task]:
    """Reads tasks from a ``.jsonl``, ``.json`` or ``.parquet`` file, or from a data set.

    A file is read with `load_question_file` (``.jsonl``) or `load_release_file` (other suffixes)
    unless ``columns``, ``answer_after`` or ``grader`` is set.

    Data sets ``hf:NAME`` are downloaded into the cache of the ``datasets`` library. The environment
    variable ``HF_HOME`` sets the location of the cache, ``HF_HUB_OFFLINE=1`` forbids downloads, and
    ``HF_TOKEN`` gives access to gated data sets. Data sets ``tfds:NAME`` are read as ArrayRecord
    files, which does not need TensorFlow if they are already prepared.

    Args:
        source: a path, ``hf:NAME:CONFIG:SPLIT`` or ``tfds:NAME:SPLIT``.
        split: split to read if the source names none.
        n: number of tasks; None for all.
        seed: seed of the random choice and order of the tasks.
        protocol: protocol of rows for which neither the row nor the source names a protocol; ""
            for ``generalist``.
        columns, answer_after, grader: see `Columns`.
        revision: branch, tag or commit of a data set of the hub; "" for the newest commit.
        data_dir: folder of the prepared TFDS data sets; "" for the folder in the environment
            variable ``TFDS_DATA_DIR``, or else the library's default folder.

    Raises:
        UserError: the file or data set cannot be read, its library is not installed, its
            configuration, split or column does not exist, or a row cannot become a task.
    """
    kind = source.partition(":")[0]
    for name, value, its in (("revision", revision, "hf"), ("data_dir", data_dir, "tfds")):
        if value and kind != its:
            raise UserError(f"{source}: the option {name} belongs to a data set {its}:NAME")
    path, named = ("", "") if kind in ("hf", "tfds") else split_source(source)
    if path and not (columns or answer_after or grader):
        plainly = load_question_file if ".jsonl" in source else load_release_file
        return plainly(source, split, n, seed, protocol)
    mapped = Columns(columns or {}, answer_after, grader, named or protocol or "generalist", source)
    rows: Iterable[Row]
    if kind == "hf":
        found = open_hub(source, split, revision, "tasks")
        wanted = mapped.resolved(found.column_names).values()
        # Images in other columns are not decoded.
        found = found.select_columns(sorted({column.partition(".")[0] for column in wanted}))
        rows = map(plain, found)
    elif kind == "tfds":
        examples = open_tfds(source, split, data_dir, "tasks")
        rows = (plain(examples[number]) for number in range(len(examples)))
    else:
        rows = (row for file in find_files(path) for row in read_rows(file))
    return draw(mapped.tasks(rows, split if path else ""), n, seed)
