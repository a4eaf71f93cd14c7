"""Tasks with verifiable answers: the sources of tasks, and the grading of answers."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from absl import logging

from coa_jax.errors import UserError
from coa_jax.extensions import (
    PATH,
    Kind,
    bind,
    find,
    parameters_of,
    read_options,
    refuse_result,
)
from coa_jax.overrides import suggest
from coa_jax.protocol import get_protocol
from coa_jax.tasks.base import SPLITS, Split, Task, check_split
from coa_jax.tasks.benchmark_rows import BENCHMARKS
from coa_jax.tasks.graders import Graders, GradersConfig, grade
from coa_jax.tasks.grading import grade_answer, normalize_answer
from coa_jax.tasks.rows import SUFFIXES

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

SOURCES = Kind(
    "task source",
    "coa_jax.tasks",
    {
        "factbook": "coa_jax.tasks.factbook:load_source",
        "arithmetic": "coa_jax.tasks.arithmetic:load_source",
        "factbook_people": "coa_jax.tasks.factbook_people:load_source",
        "textarena": "coa_jax.environments.textarena:load",
        "openenv": "coa_jax.environments.openenv:load",
        **dict.fromkeys(BENCHMARKS, "coa_jax.tasks.benchmark_files:load_benchmark"),
        **dict.fromkeys(("hf", "tfds", *SUFFIXES), "coa_jax.tasks.columns:load_rows"),
    },
    offers=("split", "n", "seed", "protocol", "source"),
)
"""The setting for a task source: a function that returns tasks (`Task`), deterministic in its
arguments. A file suffix selects the source of all paths with that suffix. A function with a
parameter ``source`` gets the whole text of the setting and parses the part after the colon itself.
All other functions get that part as options.
"""

_WANTED = "a list of coa_jax.tasks.Task"
_OWN = re.compile(rf"(?P<name>{PATH})(?::(?P<rest>.*))?", re.DOTALL)


def load_tasks(
    source: str,
    split: str,
    n: int | None = None,
    seed: int = 0,
    protocol: str = "",
    options: Mapping[str, Any] | None = None,
) -> list[Task]:
    """Loads tasks of a source; the same arguments give the same tasks.

    Args:
        source: ``factbook``, ``arithmetic``, a path to a ``.jsonl`` file of questions, or
            ``package.module:name``, a custom source (docs/extending.md). Options follow after a
            colon: ``factbook:hops=1-2,protocol=web``, ``arithmetic:gcd,lcm``,
            ``questions.jsonl:protocol=mhqa``, ``my_tasks:load:level=3``. ``.json`` and ``.parquet``
            are files of the AFM release. ``gaia:PATH`` and similar are files of benchmark authors,
            see ``coa_jax.tasks.benchmark_files``. ``hf:NAME:CONFIG:SPLIT`` and ``tfds:NAME:SPLIT``
            are data sets, see ``coa_jax.tasks.columns``.
        split: ``train``, ``validation`` or ``test``.
        n: number of tasks; None for all (a thousand for generators without end).
        seed: seed of the sample.
        protocol: protocol of questions in files for which neither the row, nor its fields, nor the
            source names one; "" for the default of the file's format.
        options: options of the source by name, in addition to those in ``source``. Custom sources
            define their own; files and data sets take the mapping of their columns, see
            `tasks.columns.Columns`.

    Raises:
        UserError: the source, split, option or protocol is unknown, or a file cannot be read.
    """
    check_split(split)
    if protocol:
        get_protocol(protocol)
    name, rest = _name_of(source)
    where = f"tasks={source}"
    given: dict[str, Any] = dict(options or {})
    if "source" not in parameters_of(find(SOURCES, name, where), name, where):
        given = {**read_options(rest, where), **given}
    load = bind(SOURCES, name, given, where, text=True)
    found = load(split=split, n=n, seed=seed, protocol=protocol, source=source)
    if name in SOURCES.built_in:
        return list(found)
    return _checked(found, source, name, n)


def _name_of(source: str) -> tuple[str, str]:
    """Returns the name in `SOURCES` of a source, and the part after its colon."""
    name, _, rest = source.partition(":")
    if SOURCES.knows(name):
        return name, rest
    for suffix in SUFFIXES:
        if suffix in source:
            return suffix, rest
    if own := _OWN.fullmatch(source):
        return own["name"], own["rest"] or ""
    known = [
        name
        for name in SOURCES.names()
        if name not in (*BENCHMARKS, "hf", "tfds") and name[0] != "."
    ]
    near = suggest(name, (*known, *BENCHMARKS))
    raise UserError(
        f"unknown task source {source!r}{near if 'did you mean' in near else ''}; known are "
        f"{', '.join(known)}, paths of .jsonl, .json and .parquet files, hf:NAME:CONFIG:SPLIT, "
        f"tfds:NAME:SPLIT, NAME:PATH with a name of {', '.join(BENCHMARKS)}, and "
        "package.module:name"
    )


def _checked(found: Any, source: str, name: str, n: int | None) -> list[Task]:
    """Checks and completes the tasks of a custom source, to make them like built-in ones."""
    where = f"tasks={source}"
    if not isinstance(found, Iterable):
        raise refuse_result(SOURCES, name, found, _WANTED, where)
    tasks = list(itertools.islice(found, n))
    for task in tasks:
        if not isinstance(task, Task):
            raise refuse_result(SOURCES, name, task, _WANTED, where)
        get_protocol(task.protocol)
    if not tasks:
        raise UserError(f"{where}: {name} returned no tasks")
    counts = collections.Counter(task.id for task in tasks)
    repeated = [id for id, count in counts.items() if count > 1]
    if repeated:
        raise UserError(f"{where}: {name} returned {len(repeated)} ids twice, e.g. {repeated[0]!r}")
    return [dataclasses.replace(task, source=task.source or source) for task in tasks]


def load_splits(
    source: str, sizes: Mapping[str, int | None], seed: int = 0
) -> dict[str, list[Task]]:
    """Loads tasks of several splits; each task is in only one of them.

    Questions of a file without splits belong to every split. Questions that were chosen for another
    split are then removed from ``train``.

    Args:
        source, seed: see `load_tasks`.
        sizes: number of tasks of each split, None for all; a split with size 0 need not exist.

    Raises:
        UserError: see `load_tasks`; or no training task is left.
    """
    splits = {
        name: [] if size == 0 else load_tasks(source, name, size, seed)
        for name, size in sizes.items()
    }
    held_out = {task.id for name, tasks in splits.items() if name != "train" for task in tasks}
    train = splits.get("train", [])
    splits = {**splits, "train": [task for task in train if task.id not in held_out]}
    if train and not splits["train"]:
        raise UserError(f"{source}: every training task is a validation task too; use fewer")
    if len(splits["train"]) < len(train):
        logging.warning(
            "%s: %d tasks of the training split are used for validation; %d are left to train on",
            source,
            len(train) - len(splits["train"]),
            len(splits["train"]),
        )
    return splits
