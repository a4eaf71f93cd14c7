"""Loads tasks from the files of public benchmarks. The source names the benchmark and the file.

    gaia:/mnt/data/gaia/metadata.jsonl
    livecodebench:/mnt/data/lcb/test*.jsonl:since=2024-08-01,until=2025-01-31
    musique:/mnt/data/musique_ans_v1.0_dev.jsonl:hops=3+4

The path names files or a data set as in `data.rows.find_files`. The options are:

* ``protocol``: the protocol of the tasks.
* ``since`` and ``until``: dates, between which (both included) the questions were published.
* ``attachments=yes``: also loads questions about an attached file.
* The name of any metadata field: keeps only questions with this value in the field. ``+`` joins
  several values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from coa_jax.config.extensions import read_options
from coa_jax.config.preflight import declares
from coa_jax.data.rows import Fields, files_need, find_files, open_rows
from coa_jax.errors import UserError
from coa_jax.protocol import get_protocol
from coa_jax.tasks.base import Task
from coa_jax.tasks.benchmark_rows import BENCHMARKS
from coa_jax.tasks.checks import checked
from coa_jax.tasks.task_files import add_tasks, draw, split_path


@declares(files_need)
def load_benchmark(source: str, n: int | None = None, seed: int = 0) -> list[Task]:
    """Reads tasks from the files of a benchmark. The same arguments give the same tasks.

    Args:
        source: ``NAME:PATH`` or ``NAME:PATH:KEY=VALUE,KEY=VALUE``, for example
            ``musique:musique_ans_v1.0_dev.jsonl:hops=3+4``.
        n: number of tasks, chosen at random; None for all tasks in the order of the files.
        seed: seed of the random choice and order.

    Raises:
        UserError: a file cannot be read, the files contain no tasks, an option is invalid, or a row
            does not belong to the benchmark. In the last case the message names the file and the
            row.
    """
    name, _, rest = source.partition(":")
    path, rest = split_path(rest)
    if not path:
        raise UserError(f"{source}: give {name}:PATH, the path of a file")
    benchmark = BENCHMARKS[name]
    options = read_options(rest, source)
    protocol = options.pop("protocol", benchmark.protocol)
    get_protocol(protocol)
    attachments = options.pop("attachments", "no")
    if attachments not in ("yes", "no"):
        raise UserError(f"{source}: attachments={attachments}; give yes or no")
    tasks: list[Task] = []
    for file in find_files(path):

        def make(row: Fields, number: int, file: Path = file) -> Task | None:
            item = benchmark.read(row)
            if item is None:
                return None
            question, attachment = item.question, item.attachment
            if Path(attachment).name != attachment:
                raise ValueError(f"the attachment {attachment!r} is in another folder")
            if attachment and attachments == "no":
                return None
            if attachment:
                question += f"\n\nAttached file: {file.parent / attachment}"
            metadata = {**item.metadata, "grader": benchmark.grader}
            task = Task(item.id or str(number), question, protocol, item.gold, source, metadata)
            # The parser has already checked the tests of programs, which may have megabytes.
            return task if task.is_program else checked(task)

        add_tasks(tasks, open_rows(file), make)
    selected = _filtered(tasks, options, source)
    if not selected:
        raise UserError(f"{source}: it contains no question that the benchmark scores")
    return draw(selected, n, seed)


def _filtered(tasks: Sequence[Task], filters: Mapping[str, str], source: str) -> list[Task]:
    fields = sorted({key for task in tasks for key in task.metadata} - {"grader"})
    for key in filters:
        field = "date" if key in ("since", "until") else key
        if field not in fields:
            raise UserError(
                f"{source}: the questions have no {field!r} to choose by; they have "
                f"{', '.join(fields) or 'nothing'}"
            )

    def keeps(task: Task) -> bool:
        date = str(task.metadata.get("date", ""))[:10]
        return all(
            date >= value if key == "since"
            else date <= value if key == "until"
            else str(task.metadata.get(key)) in value.split("+")
            for key, value in filters.items()
        )  # fmt: skip

    return [task for task in tasks if keeps(task)]
