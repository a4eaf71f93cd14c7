"""Loads tasks from data sets of the Hugging Face hub and of TFDS.

    hf:NAME:CONFIG:SPLIT       hf:openai/gsm8k:main:train, hf:/data/my_set
    tfds:NAME:SPLIT            tfds:gsm8k:train, tfds:/data/tfds/my_set/1.0.0:test

An omitted CONFIG means the data set's only configuration, an omitted SPLIT the split that the run
requests. A path is a local folder with data files, or a prepared TFDS folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from coa_jax.records.data_sets import open_hub, open_tfds
from coa_jax.tasks.base import Task
from coa_jax.tasks.columns import Columns
from coa_jax.tasks.rows import Row, draw, plain


def load_hub(
    source: str,
    split: str,
    n: int | None = None,
    seed: int = 0,
    protocol: str = "",
    columns: Mapping[str, str] | None = None,
    answer_after: str = "",
    grader: str = "",
    revision: str = "",
) -> list[Task]:
    """Reads a data set with the ``datasets`` library, which caches its downloads.

    ``HF_HUB_OFFLINE=1`` reads only the cache, ``HF_HOME`` sets its location, and ``HF_TOKEN`` gives
    access to gated data sets.

    Args:
        source, split, n, seed, protocol: see `load_tasks`.
        columns, answer_after, grader: see `Columns`.
        revision: branch, tag or commit of the data set; "" for the newest.

    Raises:
        UserError: the library is not installed, the hub cannot be reached, the data set,
            configuration, split or column does not exist, or a row is not a task.
    """
    mapped = Columns(columns or {}, answer_after, grader, protocol or "generalist", source)
    found = open_hub(source, split, revision, "tasks")
    wanted = {column.partition(".")[0] for column in mapped.resolved(found.column_names).values()}
    rows = found.select_columns(sorted(wanted))  # images in other columns are not decoded
    return draw(mapped.tasks(map(plain, rows)), n, seed, source)


def load_tfds(
    source: str,
    split: str,
    n: int | None = None,
    seed: int = 0,
    protocol: str = "",
    columns: Mapping[str, str] | None = None,
    answer_after: str = "",
    grader: str = "",
    data_dir: str = "",
) -> list[Task]:
    """Reads a data set of TFDS, prepared as ArrayRecord, without TensorFlow.

    Args:
        source, split, n, seed, protocol: see `load_tasks`.
        columns, answer_after, grader: see `Columns`.
        data_dir: folder of prepared data sets; "" for ``TFDS_DATA_DIR``, or the library's default.

    Raises:
        UserError: the library is not installed, the data set, split or column does not exist, or a
            row is not a task.
    """
    mapped = Columns(columns or {}, answer_after, grader, protocol or "generalist", source)
    rows = open_tfds(source, split, data_dir, "tasks")
    return draw(mapped.tasks(_rows(rows)), n, seed, source)


def _rows(source: Sequence[Any]) -> Iterator[Row]:
    for number in range(len(source)):
        yield _python(source[number])


def _python(value: Any) -> Any:
    """Converts a NumPy value to the corresponding JSON value."""
    if isinstance(value, dict):
        return {key: _python(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return [_python(item) for item in value.tolist()]
    return plain(value.item() if isinstance(value, np.generic) else value)
