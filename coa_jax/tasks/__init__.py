"""Loads tasks with verifiable answers from their sources, and grades answers.

`base` defines a task, `mixture` joins sources, `graders` and `rewards` grade trajectories. The room
imports `tools`, with which some answers are graded, and knows no rollouts.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from absl import logging

from coa_jax.config.extensions import (
    PATH,
    ExtensionKind,
    Reference,
    bind,
    find,
    parameters_of,
    read_options,
    refuse_result,
)
from coa_jax.config.overrides import suggest
from coa_jax.config.preflight import Needs, code_needs
from coa_jax.data.rows import SUFFIXES
from coa_jax.errors import UserError
from coa_jax.protocol import get_protocol
from coa_jax.tasks.base import SPLITS, Split, Task, check_split
from coa_jax.tasks.benchmark_rows import BENCHMARKS
from coa_jax.tasks.graders import Graders, GradersConfig, grade
from coa_jax.tasks.grading import grade_answer, normalize_answer
from coa_jax.tasks.task_files import split_path

__all__ = [
    "SOURCES",
    "SPLITS",
    "Graders",
    "GradersConfig",
    "Split",
    "Task",
    "disjoint",
    "grade",
    "grade_answer",
    "load_splits",
    "load_tasks",
    "normalize_answer",
    "source_needs",
]

SOURCES = ExtensionKind(
    "task source",
    "coa_jax.tasks",
    {
        "textarena": "coa_jax.rollout.environments.textarena:load",
        "openenv": "coa_jax.rollout.environments.openenv:load",
        **dict.fromkeys(BENCHMARKS, "coa_jax.tasks.benchmark_files:load_benchmark"),
        **dict.fromkeys(("hf", "tfds", "path"), "coa_jax.tasks.task_files:load_files"),
    },
    offers=("split", "n", "seed", "protocol", "source"),
)
"""The setting for a task source, which is a function that returns a list of `Task`.

The same arguments must give the same tasks. ``path`` is the short name of the function that reads
files. A function with a parameter ``source`` gets the whole text of the setting and parses the part
after the colon itself. All other functions get the part after the colon as options. A function may
declare the licence of its texts, see `base.Licence`.
"""

_WANTED = "a list of coa_jax.tasks.Task"
_MATHS = re.compile(r"protocol=code|math|aime|amc\d|olympiad", re.IGNORECASE)
_OWN = re.compile(rf"(?P<name>{PATH})(?::(?P<rest>.*))?", re.DOTALL)


def load_tasks(
    source: str,
    split: str,
    n: int | None = None,
    seed: int = 0,
    protocol: str = "",
    options: Mapping[str, Any] | None = None,
) -> list[Task]:
    """Loads the tasks of a source. The same arguments give the same tasks.

    A source is one of the following. Options may follow its name or path after a colon.

    * A generator of questions: ``factbook``, ``factbook:hops=1-2,protocol=web``,
      ``arithmetic:gcd,lcm``.
    * A file of questions: ``questions.jsonl``, ``questions.csv:protocol=mhqa``.
    * A file of the AFM release, the data that the authors of the Chain-of-Agents paper published:
      ``.json`` or ``.parquet``.
    * A folder of such files, a pattern such as ``'part-*.parquet'``, or several paths, joined by
      commas.
    * The file of a benchmark, as its authors publish the file: ``gaia:PATH``. The module
      ``coa_jax.tasks.benchmark_files`` lists the benchmarks and their options.
    * A data set: ``hf:NAME:CONFIG:SPLIT`` or ``tfds:NAME:SPLIT``, see ``coa_jax.data.data_sets``.
    * A custom function, ``package.module:name`` (docs/extending.md): ``my_tasks:load:level=3``.

    Args:
        source: one of the sources above.
        split: ``train``, ``validation`` or ``test``.
        n: number of tasks. None loads all tasks, or a thousand tasks of a generator that could
            generate questions without end.
        seed: seed of the random choice and order of the tasks.
        protocol: default protocol of questions in a file, for which neither the row nor ``source``
            names a protocol; "" for the default of the file format.
        options: option name -> value, in addition to the options in ``source``. A custom source
            takes the options that its function defines. Files and data sets take the mapping of
            their columns, see `question_rows.Columns`, and ``protocol``, which takes the place of
            the argument ``protocol``.

    Raises:
        UserError: the source, split, option or protocol is unknown, ``n`` is negative, or a file
            cannot be read.
    """
    check_split(split)
    if n is not None and n < 0:
        raise UserError(f"tasks={source}: n is {n}; give 0 or more, or None for all")
    name, rest = source_name(source)
    where = f"tasks={source}"
    settings: dict[str, Any] = dict(options or {})
    if "source" not in parameters_of(find(SOURCES, name, where), name, where):
        settings = {**read_options(rest, where), **settings}
    else:
        protocol = settings.pop("protocol", "") or protocol
    if protocol:
        get_protocol(protocol)
    load = bind(SOURCES, name, settings, where, text=True)
    tasks = load(split=split, n=n, seed=seed, protocol=protocol, source=source)
    if name in SOURCES.built_in:
        return list(tasks)
    return _checked(tasks, source, name, n)


def source_needs(source: str, options: Mapping[str, Any] | None = None) -> Needs:
    """Returns the packages that are needed to load the tasks of a source and to grade answers.

    Only the rows of a file say which rewards grade them. Before the file is read, the packages for
    grading mathematics count as needed if the source has the protocol ``code``, which also serves
    mathematical questions, or the name of a mathematical benchmark.

    Args:
        source, options: as in `load_tasks`.
    """
    try:
        name, _ = source_name(source)
    except UserError:  # `load_tasks` reports it
        return Needs()
    text = f"{source}:protocol={(options or {}).get('protocol', '')}"
    maths = _MATHS.search(text) and Needs(("maths",))
    return code_needs(SOURCES, name, options or {}, source=source) + (maths or Needs())


def source_name(source: str) -> tuple[str, str]:
    """Splits a source into its name in `SOURCES` and the text after the colon of this name.

    Raises:
        UserError: the source is unknown.
    """
    if isinstance(source, Reference):
        return source, ""
    name, _, rest = source.partition(":")
    if SOURCES.knows(name):
        return name, rest
    if any(suffix in source for suffix in SUFFIXES):
        return "path", rest
    if qualified := _OWN.fullmatch(source):
        return qualified["name"], qualified["rest"] or ""
    if "/" in source or os.path.isdir(split_path(source)[0]):
        return "path", rest
    sources = [name for name in SOURCES.names() if name not in (*BENCHMARKS, "hf", "tfds", "path")]
    near = suggest(name, (*sources, *BENCHMARKS))
    raise UserError(
        f"unknown task source {source!r}{near if 'did you mean' in near else ''}; known are "
        f"{', '.join(sources)}, paths of {', '.join(SUFFIXES)} files and folders, "
        "hf:NAME:CONFIG:SPLIT, tfds:NAME:SPLIT, NAME:PATH with a name of "
        f"{', '.join(BENCHMARKS)}, and package.module:name"
    )


def _checked(result: Any, source: str, name: str, n: int | None) -> list[Task]:
    """Checks the result of a custom source, and sets the field ``source`` where it is empty."""
    where = f"tasks={source}"
    if not isinstance(result, Iterable):
        raise refuse_result(SOURCES, name, result, _WANTED, where)
    tasks = list(itertools.islice(result, n))
    for task in tasks:
        if not isinstance(task, Task):
            raise refuse_result(SOURCES, name, task, _WANTED, where)
        get_protocol(task.protocol)
    if not tasks:
        raise UserError(f"{where}: {name} returned no tasks")
    counts = collections.Counter(task.id for task in tasks)
    repeated = [id for id, count in counts.items() if count > 1]
    if repeated:
        raise UserError(
            f"{where}: {name} returned {len(repeated)} ids more than once, e.g. {repeated[0]!r}"
        )
    return [dataclasses.replace(task, source=task.source or source) for task in tasks]


def load_splits(
    source: str, sizes: Mapping[str, int | None], seed: int = 0
) -> dict[str, list[Task]]:
    """Loads tasks of several splits, so that no training task is also in another split.

    If a file has no splits, all splits are drawn from the same questions and can overlap. The
    function therefore removes from ``train`` the questions drawn for ``validation`` or ``test``.

    Args:
        source: the source, see `load_tasks`.
        sizes: split -> number of tasks. None loads all tasks of the split. With 0 the source is not
            read for this split, so the split need not exist.
        seed: seed of the random choice and order of the tasks.

    Returns:
        Split -> its tasks.

    Raises:
        UserError: for the reasons that `load_tasks` lists, or because no training task is left.
    """
    splits = {
        name: [] if size == 0 else load_tasks(source, name, size, seed)
        for name, size in sizes.items()
    }
    return disjoint(splits, source)


def disjoint(splits: Mapping[str, list[Task]], source: str) -> dict[str, list[Task]]:
    """Removes the tasks of all other splits from the split ``train``.

    Args:
        splits: split -> its tasks.
        source: name of the source, used in messages.

    Raises:
        UserError: no training task is left.
    """
    held_out = {task.id for name, tasks in splits.items() if name != "train" for task in tasks}
    train = splits.get("train", [])
    kept_train = [task for task in train if task.id not in held_out]
    if train and not kept_train:
        raise UserError(
            f"{source}: every training task is also a validation task; use fewer validation tasks"
        )
    if len(kept_train) < len(train):
        logging.warning(
            "%s: %d tasks of the training split are used for validation; %d are left to train on",
            source, len(train) - len(kept_train), len(kept_train),
        )  # fmt: skip
    return {**splits, "train": kept_train}
