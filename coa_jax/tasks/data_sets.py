"""Tasks from data sets of the Hugging Face hub and of TFDS.

    hf:NAME:CONFIG:SPLIT       hf:openai/gsm8k:main:train, hf:/data/my_set
    tfds:NAME:SPLIT            tfds:gsm8k:train, tfds:/data/tfds/my_set/1.0.0:test

What is left out is the data set's only configuration, and the split that is asked for.  A path is a
local folder with data files, or a prepared TFDS folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coa_jax.errors import UserError
from coa_jax.installed import missing
from coa_jax.storage import local
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
    """Reads a data set with the ``datasets`` library, which keeps what it downloads.

    ``HF_HUB_OFFLINE=1`` reads what is kept; ``HF_HOME`` says where, and ``HF_TOKEN`` opens gated
    data sets.

    Args:
        source, split, n, seed, protocol: see `load_tasks`.
        columns, answer_after, grader: see `Columns`.
        revision: branch, tag or commit of the data set; "" for the newest.

    Raises:
        UserError: the library is not installed, the hub cannot be reached, or there is no such
            data set, configuration, split or column; a row is no task.
    """
    name, config, part = _parts(source, 3, "hf:NAME:CONFIG:SPLIT")
    mapped = Columns(columns or {}, answer_after, grader, protocol or "generalist", source)
    try:
        import datasets
    except ImportError:
        raise missing(f"tasks={source}", "datasets", "hub") from None
    try:
        found = datasets.load_dataset(
            name, config or None, split=part or split, revision=revision or None
        )
    except Exception as error:  # of the library, its file systems and the readers of its formats
        raise _refused(source, error) from error
    wanted = {column.partition(".")[0] for column in mapped.resolved(found.column_names).values()}
    rows = found.select_columns(sorted(wanted))  # without it, images of others would be decoded
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
        data_dir: where prepared data sets are; "" for ``TFDS_DATA_DIR``, or the library's own.

    Raises:
        UserError: the library is not installed, or there is no such data set, split or column;
            a row is no task.
    """
    name, part = _parts(source, 2, "tfds:NAME:SPLIT")
    mapped = Columns(columns or {}, answer_after, grader, protocol or "generalist", source)
    try:
        import tensorflow_datasets as tfds
    except ImportError:
        raise missing(f"tasks={source}", "tensorflow-datasets", "tfds") from None
    part = part or split
    try:
        name = local(name)
        if Path(name).is_dir():
            builder = tfds.builder_from_directory(name)
        else:
            where = {"data_dir": data_dir} if data_dir else {}
            builder = tfds.builder(name, file_format="array_record", **where)
            builder.download_and_prepare()
        known = list(builder.info.splits)
        rows = builder.as_data_source(split=part) if part.partition("[")[0] in known else None
    except Exception as error:  # TFDS, ArrayRecord and protobuf each have errors of their own
        raise _refused(source, error) from error
    if rows is None:
        raise UserError(f"tasks={source}: there is no split {part!r}; there are {', '.join(known)}")
    return draw(mapped.tasks(_rows(rows)), n, seed, source)


def _parts(source: str, count: int, form: str) -> list[str]:
    """What stands between the colons after the first one; "" for what is left out."""
    found = source.split(":", count)[1:]
    if not found or not found[0]:
        raise UserError(f"tasks={source}: give {form}")
    return [*found, *[""] * (count - len(found))]


def _refused(source: str, error: Exception) -> UserError:
    text = " ".join(str(error).split())
    return UserError(f"tasks={source}: {type(error).__name__}: {text[:200]}")


def _rows(source: Sequence[Any]) -> Iterator[Row]:
    for number in range(len(source)):
        yield _python(source[number])


def _python(value: Any) -> Any:
    """A value of NumPy's, as JSON would have it."""
    if isinstance(value, dict):
        return {key: _python(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return [_python(item) for item in value.tolist()]
    return plain(value.item() if isinstance(value, np.generic) else value)
