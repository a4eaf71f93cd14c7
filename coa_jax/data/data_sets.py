"""Opens data sets of the Hugging Face Hub and of TFDS, with random access to their rows.

    hf:NAME:CONFIG:SPLIT       hf:openai/gsm8k:main:train, hf:/data/my_set
    tfds:NAME:SPLIT            tfds:gsm8k:train, tfds:/data/tfds/my_set/1.0.0:test

CONFIG may be omitted if the data set has a single configuration. SPLIT may be omitted if the caller
has a default split. NAME may be the path of a local folder with data files, or of a folder that
TFDS has prepared.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from coa_jax.config.installed import missing
from coa_jax.errors import UserError
from coa_jax.files import durable, untrusted
from coa_jax.parallel import processes
from coa_jax.storage import is_url, local


def is_data_set(path: Path) -> bool:
    """Returns whether a path names a data set, and not a file.

    Such a path begins with ``hf:`` or ``tfds:``, or is ``FOLDER/SPLIT``, where TFDS has prepared
    the folder.
    """
    return str(path).startswith(("hf:", "tfds:")) or (is_tfds(path.parent) and not path.exists())


def is_tfds(folder: Path) -> bool:
    """Returns whether a folder contains a data set that TFDS has prepared."""
    return (folder / "features.json").is_file() and (folder / "dataset_info.json").is_file()


def open_hub(source: str, split: str, revision: str = "", setting: str = "") -> Any:
    """Opens a data set of the Hugging Face Hub with the ``datasets`` library.

    The library stores downloads in the folder that the environment variable ``HF_HOME`` names.
    ``HF_HUB_OFFLINE=1`` forbids downloads, and ``HF_TOKEN`` gives access to gated data sets.

    In a run of several processes, process 0 downloads the data set. The other processes get a copy
    of the split, in the cache of the library, unless they see the files of process 0. All processes
    must therefore call this function in the same order, see `parallel.transfer`. A local folder
    that all processes have is read by each process itself.

    Args:
        source: ``hf:NAME:CONFIG:SPLIT``, where NAME is a data set of the Hub or a local folder.
        split: split to read if the source names none.
        revision: branch, tag or commit of the data set; "" for the newest commit.
        setting: name of the setting that contains the source, used in error messages; "" if there
            is none.

    Returns:
        A ``datasets.Dataset``, which reads a row from files when the row is accessed.

    Raises:
        UserError: the library is not installed, the hub cannot be reached, or the data set, its
            configuration or its split does not exist.
    """
    where = f"{setting}={source}" if setting else source
    name, config, part = [*source.split(":", 3)[1:], "", "", ""][:3]
    if not name:
        raise UserError(f"{where}: give hf:NAME:CONFIG:SPLIT")
    try:
        import datasets
    except ImportError:
        datasets = None
    # All processes must find the same faults: if one process failed, the others would wait for it.
    state = [datasets is not None, os.path.exists(name)]
    installed, present = zip(*processes.all_gather(state, where, 60.0), strict=True)
    if datasets is None or not all(installed):
        raise missing(where, "datasets", "hub")

    def load() -> Any:
        with _telling(where):
            options = {"split": part or split, "revision": revision or None}
            return datasets.load_dataset(name, config or None, **options)

    if processes.count() == 1 or all(present):
        return load()
    root = Path(datasets.config.HF_DATASETS_CACHE) / "coa_jax"

    def fetch() -> list[Path]:
        data_set = load()
        folder = root / data_set._fingerprint
        with _telling(where):
            try:
                datasets.load_from_disk(folder)
            except Exception:  # there is no folder, or a killed process left a part of one
                shutil.rmtree(folder, ignore_errors=True)
                durable.make_folder(folder, data_set.save_to_disk)
        return sorted(folder.glob("[!.]*"))

    from coa_jax.parallel.transfer import from_first  # here, because it loads JAX

    folder = from_first(root, fetch, where)[0].parent
    with _telling(where):
        return datasets.load_from_disk(folder)


def open_tfds(source: str, split: str, data_dir: str = "", setting: str = "") -> Sequence[Any]:
    """Opens a data set of TFDS, which is stored as ArrayRecord files.

    If the data set is not prepared yet, TFDS downloads and prepares it. Reading a prepared data set
    does not need TensorFlow.

    Args:
        source: ``tfds:NAME:SPLIT``.
        split: split to read if the source names none.
        data_dir: folder of the prepared data sets; "" for the folder in the environment variable
            ``TFDS_DATA_DIR``, or else the library's default folder.
        setting: name of the setting that contains the source, used in error messages; "" if there
            is none.

    Returns:
        A sequence that reads a row from files when the row is accessed.

    Raises:
        UserError: the library is not installed, or the data set or its split does not exist.
    """
    where = f"{setting}={source}" if setting else source
    name, part = _name_and_split(source)
    if not name:
        raise UserError(f"{where}: give tfds:NAME:SPLIT")
    try:
        import tensorflow_datasets as tfds
    except ImportError:
        raise missing(where, "tensorflow-datasets", "tfds") from None
    part = part or split
    with _telling(where):
        name = local(name)
        if Path(name).is_dir():
            builder = tfds.builder_from_directory(name)
        else:
            builder = tfds.builder(name, file_format="array_record", data_dir=data_dir or None)
            builder.download_and_prepare()
        splits = list(builder.info.splits)
        rows = builder.as_data_source(split=part) if part.partition("[")[0] in splits else None
    if rows is None:
        raise UserError(f"{where}: there is no split {part!r}; there are {', '.join(splits)}")
    return rows


def local_tfds(source: str) -> str:
    """Returns ``tfds:NAME:SPLIT`` with the path of a local copy if NAME is the URL of a folder.

    Raises:
        UserError: the folder cannot be read.
    """
    name, part = _name_and_split(source)
    return f"tfds:{local(name)}" + (f":{part}" if part else "") if is_url(name) else source


def _name_and_split(source: str) -> tuple[str, str]:
    name = source.partition(":")[2]
    # URLs and slices contain colons too, which do not begin a split.
    match = re.fullmatch(r"(.+):([^:/\[\]]*(?:\[.*\])?)", name)
    return (match[1], match[2]) if match else (name, "")


@contextlib.contextmanager
def _telling(where: str) -> Iterator[None]:
    """Converts the errors of a library, which are of many types, to `UserError`."""
    try:
        yield
    except Exception as error:
        raise UserError(f"{where}: {type(error).__name__}: {untrusted.reason(error)}") from error
