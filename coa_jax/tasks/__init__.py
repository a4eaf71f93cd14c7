"""Tasks with answers that can be checked: where they come from and how answers are graded."""

from __future__ import annotations

from collections.abc import Mapping

from absl import logging

from coa_jax.errors import UserError
from coa_jax.protocol import get_protocol
from coa_jax.tasks.base import SPLITS, Split, Task, check_split
from coa_jax.tasks.benchmark_files import is_benchmark, load_benchmark
from coa_jax.tasks.benchmark_rows import BENCHMARKS
from coa_jax.tasks.graders import Graders, GradersConfig, grade
from coa_jax.tasks.grading import grade_answer, normalize_answer

__all__ = [
    "SOURCES",
    "SPLITS",
    "Graders",
    "GradersConfig",
    "Split",
    "Task",
    "grade",
    "grade_answer",
    "load_splits",
    "load_tasks",
    "normalize_answer",
]

SOURCES = ("factbook", "arithmetic")
"""Named sources; besides them any path that ends in ``.jsonl``, ``.json`` or ``.parquet``."""


def load_tasks(
    source: str, split: str, n: int | None = None, seed: int = 0, protocol: str = ""
) -> list[Task]:
    """Loads tasks of a source; the same arguments give the same tasks.

    Args:
        source: ``factbook``, ``arithmetic``, or a path to a ``.jsonl`` file of questions.  Options
            follow after a colon: ``factbook:hops=1-2,protocol=web``, ``arithmetic:gcd,lcm``,
            ``questions.jsonl:protocol=mhqa``.  ``.json`` and ``.parquet`` are files of the AFM
            release.  ``gaia:PATH`` and the like are files of a benchmark's authors, see
            ``coa_jax.tasks.benchmark_files``.
        split: ``train``, ``validation`` or ``test``.
        n: how many; None for all there are (generators without end: a thousand).
        seed: which sample.
        protocol: of questions in files that say nothing of theirs: neither the row, nor its
            fields, nor the source. "" for the default of the file's format.

    Raises:
        UserError: an unknown source, split, option or protocol; a file that cannot be read.
    """
    check_split(split)
    if protocol:
        get_protocol(protocol)
    name, _, options = source.partition(":")
    if name == "factbook":
        from coa_jax.tasks.factbook import load_factbook, parse_options

        return load_factbook(split, n, seed, parse_options(options), source)
    if name == "arithmetic":
        from coa_jax.tasks.arithmetic import load_arithmetic

        return load_arithmetic(split, n, seed, options, source)
    if is_benchmark(source):
        return load_benchmark(source, n, seed)
    if ".jsonl" in source:
        from coa_jax.tasks.question_file import load_question_file

        return load_question_file(source, split, n, seed, protocol or "generalist")
    if ".json" in source or ".parquet" in source:
        from coa_jax.tasks.release_files import load_release_file

        return load_release_file(source, split, n, seed, protocol)
    raise UserError(
        f"unknown task source {source!r}; known are {', '.join(SOURCES)}, paths of .jsonl, .json"
        f" and .parquet files, and NAME:PATH with a name of {', '.join(BENCHMARKS)}"
    )


def load_splits(
    source: str, sizes: Mapping[str, int | None], seed: int = 0
) -> dict[str, list[Task]]:
    """Tasks of several splits, each of them in one only.

    Questions of a file that names no splits belong to all of them: those that validate are then
    taken out of ``train``, which has fewer.

    Args:
        source, seed: as for `load_tasks`.
        sizes: how many tasks of each split, None for all; one with 0 need not exist.

    Raises:
        UserError: as for `load_tasks`, or nothing is left to train on.
    """
    splits = {
        name: [] if size == 0 else load_tasks(source, name, size, seed)
        for name, size in sizes.items()
    }
    held_out = {task.id for name, tasks in splits.items() if name != "train" for task in tasks}
    train = splits.get("train", [])
    splits = {**splits, "train": [task for task in train if task.id not in held_out]}
    if train and not splits["train"]:
        raise UserError(f"{source}: all of its training tasks validate too; ask for fewer of those")
    if len(splits["train"]) < len(train):
        logging.warning(
            "%s: %d tasks of the training split validate; %d are left to train on",
            source,
            len(train) - len(splits["train"]),
            len(splits["train"]),
        )
    return splits
