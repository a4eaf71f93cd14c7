"""Loads tasks from files and data sets, whose rows `data.rows` reads.

    questions.csv                                   a file of questions
    '/mnt/data/afm-web-rl/*.parquet:protocol=web'   files of the AFM release
    hf:openai/gsm8k:main                            a data set, whose columns a mapping names

`question_rows` and `release_rows` convert the rows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from absl import logging

from coa_jax.config.extensions import read_options
from coa_jax.config.preflight import declares
from coa_jax.data.data_sets import is_data_set
from coa_jax.data.rows import SUFFIXES, Fields, Row, files_need, find_files, open_rows
from coa_jax.errors import UserError
from coa_jax.files import untrusted
from coa_jax.protocol import get_protocol
from coa_jax.tasks.base import Task
from coa_jax.tasks.question_rows import Columns, question_task, unique_id
from coa_jax.tasks.release_rows import release_task

_RELEASE = (".json", ".parquet")
"""Suffixes of the files of the AFM release and of benchmarks; other files are question files."""
_ENDS = "|".join(map(re.escape, SUFFIXES))
_SOURCE = re.compile(rf"(?P<path>.*?(?P<end>{_ENDS})?)(?::(?P<options>(?(end).*|\w+=.*)))?")


@declares(files_need)
def load_files(
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
    """Reads tasks from files or from a data set. The same arguments give the same tasks.

    If ``columns``, ``answer_after`` or ``grader`` is set, and for data sets, `Columns` converts the
    rows. Otherwise, a file ``.json`` or ``.parquet`` must have the rows of the AFM release (the
    data of the Chain-of-Agents paper) or of a benchmark, see `release_rows`. Other files must have
    the rows of question files, see `question_rows`.

    Args:
        source: files or a data set as in `data.rows.find_files`, or ``PATH:protocol=NAME``.
        split: split to read. Rows of a file may name their split, except rows of the release and of
            benchmarks. A data set is read from this split if the source names none.
        n: number of tasks, chosen at random; None for all tasks in the order of the rows.
        seed: seed of the random choice and order.
        protocol: protocol of rows for which neither the row nor the source names a protocol; ""
            for ``mhqa`` (rows of the release) or ``generalist``.
        columns, answer_after, grader: see `Columns`.
        revision: branch, tag or commit of a data set of the hub; "" for the newest commit.
        data_dir: folder of the prepared TFDS data sets, see `data.data_sets.open_tfds`.

    Raises:
        UserError: a file or data set cannot be read, its library is not installed, its
            configuration, split or column does not exist, there is no task of the split, or a row
            cannot become a task. In the last case the message names the file and the row.
    """
    kind = source.partition(":")[0]
    for name, value, its in (("revision", revision, "hf"), ("data_dir", data_dir, "tfds")):
        if value and kind != its:
            raise UserError(f"{source}: the option {name} belongs to a data set {its}:NAME")
    path, text = split_path(source)
    options = read_options(text, source)
    protocol_option = options.pop("protocol", "")
    if protocol_option:
        get_protocol(protocol_option)
    if options:
        raise UserError(f"{source}: there is no option {min(options)}; use :protocol=NAME")
    default = protocol_option or protocol or "generalist"
    mapping = Columns(columns or {}, answer_after, grader, default, source)
    mapped = bool(columns or answer_after or grader)

    def question(row: Fields, number: int) -> Task | None:
        return question_task(row, split, default, source)

    def release(row: Fields, number: int) -> Task:
        return release_task(row, number, protocol_option, source, protocol or "mhqa")

    tasks: list[Task] = []
    for file in find_files(path):
        make: Make = release if file.suffix in _RELEASE else question
        if mapped or is_data_set(file):
            make = mapping.reader("" if is_data_set(file) else split)
        rows = open_rows(file, split=split, revision=revision, data_dir=data_dir, setting="tasks")
        add_tasks(tasks, rows, make, rename=make is not question)
    if not tasks:
        raise UserError(
            f"{path}: there is no task of the split {split!r}; add rows or use another split"
        )
    others = [task.protocol for task in tasks if protocol_option not in ("", task.protocol)]
    if others:
        logging.warning(
            "%s: %d of %d rows have a protocol of their own (%s), which is used for them",
            source, len(others), len(tasks), ", ".join(sorted(set(others))),
        )  # fmt: skip
    return draw(tasks, n, seed)


def split_path(source: str) -> tuple[str, str]:
    """Splits ``PATH:OPTIONS`` into the path and the options; the options are "" for ``PATH``.

    PATH may contain colons, as in the URL of a folder or ``hf:NAME:CONFIG:SPLIT``. A colon ends
    PATH only if a suffix such as ``.csv`` is before the colon, or ``KEY=`` after it.
    """
    match = _SOURCE.fullmatch(source)
    return (match["path"], match["options"] or "") if match else (source, "")


Make = Callable[[Fields, int], Task | None]
"""A function that converts a row to a task. If the function returns None, the row is left out.

The second argument is the number of the task, from 1, for rows without an id.
"""


def add_tasks(tasks: list[Task], rows: Iterable[Row], make: Make, *, rename: bool = True) -> None:
    """Converts the rows of a file to tasks, and appends them to the tasks of earlier files.

    Args:
        tasks: tasks of earlier files; the function changes this list.
        rows: the rows of one file.
        make: function that converts a row.
        rename: whether several rows may have the same id. The first task then keeps the id. The id
            of a later task becomes ``ID#ROW``, with its row number. If a task of another file
            already has this id, the id becomes ``ID#ROW.2``, and so on.

    Raises:
        UserError: a row cannot become a task, or ``rename`` is False and an id occurs twice. The
            message names the file and the row.
    """
    seen = {task.id for task in tasks}
    for number, row in enumerate(rows, 1):
        try:
            task = make(row.value, len(tasks) + 1)
            if task is not None and task.id in seen and not rename:
                raise ValueError(f"the id {task.id!r} occurs twice; give every row its own id")
        except untrusted.MALFORMED as error:
            raise UserError(f"{row.where}: {untrusted.reason(error)}") from error
        if task is None:
            continue
        unique = unique_id(task.id, number, seen)
        seen.add(unique)
        tasks.append(dataclasses.replace(task, id=unique))


def draw(tasks: Sequence[Task], n: int | None, seed: int) -> list[Task]:
    """Chooses ``n`` tasks at random, in random order. The same arguments give the same result.

    Args:
        tasks: tasks to choose from.
        n: number of tasks; all if there are fewer. None returns all in their present order.
        seed: seed of the random choice and order.
    """
    if n is None:
        return list(tasks)

    def place(task: Task) -> str:
        return hashlib.sha256(f"{seed}\n{task.id}".encode(errors="replace")).hexdigest()

    return sorted(tasks, key=place)[:n]
