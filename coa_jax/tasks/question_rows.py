"""Converts rows to tasks: those of question files, and those of any data set with named columns.

docs/data.md lists the fields of question files. A row may name its split. A row that names no split
belongs to every split. Columns that are no part of the task become metadata, which reward functions
read. So does the column of the answer if it has a name of its own, such as ``ground_truth``.

For a data set with other columns, a mapping gives the column of each part of a task. A dot selects
a field of a nested column (``answers.text``). For a part without an entry, the columns with the
customary names are tried:

    tasks=hf:openai/gsm8k:main  task_options.columns.answer=answer  task_options.answer_after=####
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from coa_jax.config.overrides import suggest
from coa_jax.data.rows import Fields
from coa_jax.errors import UserError
from coa_jax.files import jsonl
from coa_jax.protocol import Messages, get_protocol
from coa_jax.tasks.base import SPLITS, Task
from coa_jax.tasks.checks import checked
from coa_jax.tasks.prompts import read_messages

QUESTIONS = ("question", "problem", "Question", "Problem")
ANSWERS = (
    *("answer", "answers", "golden_answers", "gold", "Final answer", "Answer"),
    *("ground_truth", "solution", "target", "expected_answer", "reference_answer", "expected"),
)
_USUAL = {"question": QUESTIONS, "answer": ANSWERS, "id": ("id",)}
"""Customary column names of the parts of a task."""
_PARTS = ("question", "answer", "id", "protocol", "prompt")
_NO_EXTRA = (
    *(*_PARTS, "split", "metadata"),
    *("grader", "scorer", "generator", "generator_metadata", "task_tools", "game", "reset"),
)
"""Columns of a file that do not become metadata.

The second line has keys that select graders, tools and environments. A file gives them under
``metadata``, so that a data set does not select them by chance.
"""


# --- question files ------------------------------------------------------------------------


def question_task(row: Fields, split: str, protocol: str, source: str) -> Task | None:
    """Converts a row to a task; returns None if the row belongs to another split.

    Args:
        row: the row. A null value counts as a missing field: a row of a table has every column.
        split: split to read.
        protocol: protocol of the task if the row names none.
        source: source of the task.

    Raises:
        ValueError: the row is invalid, for the reason in the message.
    """
    row = _with_question({key: value for key, value in row.items() if value is not None})
    question = row.get("question")
    if not isinstance(question, str) or not question.strip():
        raise ValueError("the field 'question' (or 'prompt') must be a string")
    of_split, metadata = row.get("split"), row.get("metadata", {})
    if of_split is not None and of_split not in SPLITS:
        raise ValueError(f"unknown split {of_split!r}; the splits are {', '.join(SPLITS)}")
    if not isinstance(metadata, dict):
        raise ValueError("the field 'metadata' must be an object")
    metadata = {**_extra(row), **metadata}
    digest = hashlib.sha256(question.strip().encode(errors="replace")).hexdigest()[:16]
    name = row.get("protocol") or protocol
    if not isinstance(name, str):
        raise ValueError("the field 'protocol' must be a string")
    try:
        get_protocol(name)
    except UserError as error:
        raise ValueError(str(error)) from None
    identity = row.get("id", digest)
    if not isinstance(identity, str | int):
        raise ValueError("the field 'id' must be a string or a whole number")
    messages = read_messages(row["prompt"]) if row.get("prompt") else Messages("")
    gold, grader = _gold(row, name, metadata)
    if grader and "scorer" not in metadata:
        metadata = {"grader": grader, **metadata}
    task = Task(str(identity), question.strip(), name, gold, source, metadata, *messages[:2])
    return checked(task) if of_split in (None, split) else None


def _extra(row: Fields) -> dict[str, Any]:
    """Returns the columns of a row that become metadata; values that JSON lacks are left out."""
    extra = {}
    for name, value in row.items():
        if value is None or name in _NO_EXTRA or _is_tests(name, value):
            continue
        with contextlib.suppress(TypeError, ValueError):
            jsonl.dumps(value)
            extra[name] = value
    return extra


def _is_tests(column: str, value: Any) -> bool:
    """Returns whether a column has the tests of a program, which are large and stored as gold."""
    return column in ANSWERS and isinstance(value, dict)


def _gold(row: Fields, protocol: str, metadata: dict[str, Any]) -> tuple[tuple[str, ...], str]:
    """Returns the accepted answers, and the grader that their type requires ("" for none)."""
    key = next((key for key in ANSWERS if key in row), None)
    if key is None or row[key] in ("", []):
        # The reward of such a task may come from its environment alone.
        if metadata.get("grader", "environment" if protocol == "turns" else "") == "environment":
            return (), ""
        if key is None:
            raise ValueError(
                f"there is no answer: no field is called {', '.join(ANSWERS)}; rename the field, "
                "or name it by task_options.columns.answer (a task that only its environment "
                "grades needs none: the protocol 'turns', or metadata with grader=environment)"
            )
        raise ValueError(f"the answer, field {key!r}, is empty")
    if isinstance(row[key], dict):  # the tests of a program
        return (json.dumps(row[key], ensure_ascii=False),), "code"
    return golds(row[key]), ""


def golds(value: Any) -> tuple[str, ...]:
    """Converts the value of a row's answer field to a tuple of accepted answers.

    Args:
        value: a string, a number, or a list of strings and numbers.

    Raises:
        ValueError: the value has another type, or an answer is empty.
    """
    values = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(v, str | int | float) and not isinstance(v, bool) for v in values):
        raise ValueError("an answer must be a string, a number or a list of them")
    gold = tuple("" if v != v else str(v).strip() for v in values)  # NaN: a table has no answer
    if not gold or not all(gold):
        raise ValueError("an answer is empty")
    return gold


def without_answers(task: Task) -> dict[str, Any]:
    """Returns the metadata of a task without columns that give an accepted answer away.

    These are columns that equal accepted answers, and columns with a customary name of answers
    (`ANSWERS`) that contain one.
    """

    def tells(key: str, value: Any) -> bool:
        values = value if isinstance(value, list | tuple) else [value]
        equal = any(str(item).strip() in task.gold for item in values)
        return equal or (key in ANSWERS and any(gold in str(value) for gold in task.gold))

    return {key: value for key, value in task.metadata.items() if not tells(key, value)}


def tasks_of_rows(rows: Iterable[Fields], mapping: Columns, *, graded: bool) -> list[Task]:
    """Converts rows from Python, such as a list of dicts or a ``datasets.Dataset``, to tasks.

    The question is the column ``question``, ``problem`` or ``prompt``, which may also be a list of
    chat messages that ends with the user's. The answer is the column ``answer``, or another of
    `ANSWERS`.

    Args:
        rows: one row per question, as a dict from columns to values.
        mapping: other names of the columns, the grader, and the protocol of rows that name none.
        graded: whether a row needs an answer; False if rewards do not need one.

    Raises:
        UserError: a row is invalid; the message names its index.
    """
    tasks: dict[str, Task] = {}
    for index, row in enumerate(rows):
        try:
            task = _task_of_row(row, index, mapping, graded)
        except ValueError as error:
            raise UserError(f"tasks[{index}]: {error}") from None
        name = unique_id(task.id, index, tasks)
        tasks[name] = dataclasses.replace(task, id=name)
    return list(tasks.values())


def unique_id(name: str, number: int, taken: Collection[str]) -> str:
    """Returns the id of a task, or ``ID#NUMBER`` (then ``ID#NUMBER.2``, ...) if the id is taken."""
    unique, copies = name, 1
    while unique in taken:
        unique = f"{name}#{number}" if copies == 1 else f"{name}#{number}.{copies}"
        copies += 1
    return unique


def _task_of_row(row: Fields, index: int, mapping: Columns, graded: bool) -> Task:
    if not isinstance(row, Mapping):
        raise ValueError(f"it is {type(row).__name__}; give a dict with a question and an answer")
    row = _of_python(row)
    row |= {part: _column_value(row, column) for part, column in mapping.columns.items()}
    if mapping.hides_answer:
        row.pop(mapping.columns["answer"], None)
    row = _with_question(row)
    name = next((name for name in QUESTIONS if name in row), "")
    if not name:
        columns = ", ".join(map(str, row)) or "none"
        raise ValueError(f"there is no column 'question' or 'prompt'; the columns are {columns}")
    fields: dict[str, Any] = {"id": str(row.pop("id", index)), "question": row.pop(name)}
    answer = next((key for key in ANSWERS if key in row), "answer")
    fields |= {key: row.pop(key) for key in ("prompt", "protocol", "answer") if key in row}
    if answer in row:
        tests = _is_tests(answer, row[answer])
        fields[answer] = row.pop(answer) if tests else row[answer]
    if mapping.answer_after and answer in fields:
        fields[answer] = mapping.shortened(fields[answer])
    own = row.pop("metadata", {})
    if not isinstance(own, Mapping):
        raise ValueError("the column 'metadata' must hold a dict")
    split = {"split": row["split"]} if "split" in row else {}
    metadata = {**_extra(row), **split, **own}
    if mapping.grader:
        metadata["grader"] = mapping.grader
    if not graded and answer not in fields:
        metadata.setdefault("grader", "environment")
    task = question_task({**fields, "metadata": metadata}, "", mapping.protocol, "rows")
    assert task is not None  # the row names no split
    return task


def _with_question(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row whose prompt became the question, as in data sets for TRL, if it has none."""
    if "prompt" not in row or any(name in row for name in QUESTIONS):
        return row
    row = {**row, "question": read_messages(row["prompt"]).user}
    if row["question"] == row["prompt"]:
        del row["prompt"]
    return row


def _of_python(row: Fields) -> dict[str, Any]:
    """Returns the columns that have a value: pandas writes NaN for none, and lists as arrays."""
    plain = {key: getattr(value, "tolist", lambda v=value: v)() for key, value in row.items()}
    return {
        key: value
        for key, value in plain.items()
        if value is not None and not (isinstance(value, float) and math.isnan(value))
    }


# --- rows of any data set ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Columns:
    """Settings for converting the rows of a file or data set to tasks.

    Attributes:
        columns: part of a task -> name of its column. The parts are ``question``, ``answer`` (a
            string, a number, or a list of accepted answers), ``id``, ``protocol`` and ``prompt``
            (chat messages). Every other key renames a column that becomes metadata of the task.
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
        columns = {
            part: next((name for name in usual if name in there), "")
            for part, usual in _USUAL.items()
        }
        columns |= self.columns
        for part in ("question", "answer"):
            if not columns[part]:
                raise UserError(
                    f"{self.where}: there is no column {part!r}; give columns.{part} of "
                    f"{', '.join(there) or 'none'}"
                )
        return {part: column for part, column in columns.items() if column}

    def reader(self, split: str) -> Callable[[Fields, int], Task | None]:
        """Returns a function that converts a row of a file and its number to a task.

        Args:
            split: split to read. For a row whose field ``split`` names another split, the function
                returns None; "" reads all rows.
        """
        names: dict[str, str] = {}
        others = [name for name in SPLITS if name != split]

        def make(row: Fields, number: int) -> Task | None:
            if split and row.get("split") in others:
                return None
            names.update(names or self.resolved(row))
            used = {column.partition(".")[0] for column in names.values()}
            if not self.hides_answer:
                used -= {names["answer"]}
            value = {part: _column_value(row, column) for part, column in names.items()}
            fields = {part: value.pop(part) for part in _PARTS if part in value}
            if self.answer_after:
                fields["answer"] = self.shortened(fields["answer"])
            fields["id"] = str(number if fields.get("id") is None else fields["id"])
            own, grader = row.get("metadata"), {"grader": self.grader} if self.grader else {}
            extra = _extra({key: item for key, item in row.items() if key not in used})
            named = own if isinstance(own, dict) else {}
            fields["metadata"] = {**extra, **named, **value, **grader}
            return question_task(fields, split, self.protocol, self.where)

        return make

    @property
    def hides_answer(self) -> bool:
        """Whether the column of the answer is left out of the metadata of a task.

        `without_answers` would not find an answer inside a longer text of a column of any name.
        """
        return bool(self.answer_after) and self.columns.get("answer", ANSWERS[0]) not in ANSWERS

    def shortened(self, answer: Any) -> list[Any]:
        """Returns the accepted answers without the text before the separator `answer_after`."""
        return [
            text.rpartition(self.answer_after)[2] if isinstance(text, str) else text
            for text in (answer if isinstance(answer, list) else [answer])
        ]


def _column_value(row: Fields, column: str) -> Any:
    """Returns the value of a column. A name with dots selects a field of a nested column."""
    value: Any = row
    for name in column.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise ValueError(f"there is no {column!r}")
        value = value[name]
    return value
