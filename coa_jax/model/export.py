"""Writes a model as a Hugging Face directory, which appears only when it is complete."""

from __future__ import annotations

import glob
import itertools
import json
import math
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from coa_jax.errors import UserError
from coa_jax.files import durable
from coa_jax.model.card import CARD
from coa_jax.model.config import DTYPES
from coa_jax.model.hf_config import config_to_hf
from coa_jax.model.hf_table import TABLES, tensors_of
from coa_jax.model.hf_weights import export_tensors
from coa_jax.model.params import param_dtype, specs
from coa_jax.model.policy import Model
from coa_jax.model.safetensors_io import INDEX_FILE, SINGLE_FILE, write_safetensors
from coa_jax.model.tokenizer import MissingTokenizer, eos_ids


def save_model(
    model: Model,
    path: str | Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
) -> None:
    """Writes a directory that transformers, vLLM and `api.load_model` can read.

    The directory holds ``config.json``, ``generation_config.json`` and safetensors. LoRA adapters
    are merged into the weights. If a single file of tensors would exceed ``max_shard_bytes``, the
    tensors are split over several files with an index. If the model has a card or a tokenizer, the
    directory holds their files too; the tokenizer defines the ids that end a generation. The
    directory appears under its name only when it is complete. If there are several processes, all
    of them must call this function; the first process writes.

    Args:
        model: the model to save. The parameters are rounded only if ``dtype`` is narrower than
            their own dtype.
        path: directory to create.
        dtype: dtype of the saved tensors; None for the dtype of the parameters.
        max_shard_bytes: maximum number of bytes of the tensors in one file; a larger tensor gets a
            file of its own.
        overwrite: whether to replace a model that exists at ``path``. If False, ``path`` must be
            empty or absent.

    Raises:
        UserError: the directory is not empty, or cannot be written (no permission, full disk).
    """
    dtype = dtype or str(param_dtype(model.params))
    if dtype not in (*DTYPES, "float16"):
        raise UserError(f"dtype {dtype!r} is not supported: use " + " or ".join(DTYPES))
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file: choose another directory")
    occupied = path.is_dir() and any(path.iterdir())
    if occupied and not (overwrite and (path / "config.json").exists()):
        how = "contains no model" if overwrite else "pass overwrite=True to replace a model"
        raise UserError(f"{path} is not empty and {how}: choose another directory")
    writes = jax.process_index() == 0
    temporary = None
    try:
        if writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = _new_folder(path)
            _write_configs(temporary, model, dtype)
            if model.card:
                durable.write_json(temporary / CARD, dict(model.card))
        _write_weights(temporary, model, dtype, max_shard_bytes)
        if temporary is not None:
            durable.replace_folder(temporary, path)
    except Exception as error:
        # The Rust library of the tokenizer reports a full disk as an exception of the type
        # Exception.
        if isinstance(error, OSError) or re.search(r"os error \d+", str(error)):
            full = "No space left on device" in str(error)
            advice = "free some space" if full else "make it writable"
            raise UserError(
                f"{path} cannot be written ({error}): the model is not saved; {advice} and run the "
                "same command again"
            ) from error
        raise
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _new_folder(path: Path) -> Path:
    """Creates a folder beside ``path``; removes such folders of processes that were killed."""
    prefix = f".{path.name}.partial-"
    for folder in path.parent.glob(f"{glob.escape(prefix)}*"):
        if not Path("/proc", folder.name.removeprefix(prefix).partition("-")[0]).exists():
            shutil.rmtree(folder, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=path.parent))
    folder.chmod(0o755)
    return folder


def _write_configs(directory: Path, model: Model, dtype: str) -> None:
    tokenizer = model.tokenizer
    missing = isinstance(tokenizer, MissingTokenizer)
    eos, pad = ([], None) if missing else (eos_ids(tokenizer), tokenizer.pad_token_id)
    hf = config_to_hf(model.config, dtype, eos, pad)
    generation = {"bos_token_id": None, "eos_token_id": eos or None, "pad_token_id": pad}
    for name, content in (("config.json", hf), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if not missing:
        _write_tokenizer(directory, tokenizer)


def _write_tokenizer(directory: Path, tokenizer: Any) -> None:
    """Writes the tokenizer with the names of transformers 4, which transformers 5 accepts too."""
    tokenizer.save_pretrained(str(directory))
    file = directory / "tokenizer_config.json"
    written = json.loads(file.read_text(encoding="utf-8"))
    if written.get("tokenizer_class") == "TokenizersBackend":
        written["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(written.get("extra_special_tokens"), list):
        # transformers 4 expects a dict under that name.
        written["additional_special_tokens"] = written.pop("extra_special_tokens")
    for option in ("is_local", "local_files_only"):  # they describe how this tokenizer was loaded
        written.pop(option, None)
    text = json.dumps(written, indent=2, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")


def _write_weights(directory: Path | None, model: Model, dtype: str, max_shard_bytes: int) -> None:
    """Writes the weights; processes whose ``directory`` is None only help to gather them."""
    merged = "float32" if dtype == "float16" else dtype
    tensors = export_tensors(model.params, model.config, merged)
    if directory is None:
        for _ in tensors:
            pass
        return
    itemsize = jnp.dtype(dtype).itemsize
    table = TABLES[model.config.architecture]
    shards = _plan_shards(tensors_of(table, specs(model.config)), itemsize, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for i, shapes in enumerate(shards, 1):
        several = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        name = several if len(shards) > 1 else SINGLE_FILE
        weight_map |= dict.fromkeys(shapes, name)
        part = itertools.islice(tensors, len(shapes))
        write_safetensors(directory / name, shapes, dtype, part)
    if len(shards) == 1:
        return
    total = sum(math.prod(shape) * itemsize for shapes in shards for shape in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _plan_shards(
    shapes: dict[str, tuple[int, ...]], itemsize: int, max_bytes: int
) -> list[dict[str, tuple[int, ...]]]:
    """Groups the tensors, in order, into files of at most ``max_bytes`` or of a single tensor."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    free = max_bytes
    for name, shape in shapes.items():
        size = math.prod(shape) * itemsize
        if shards[-1] and size > free:
            shards.append({})
            free = max_bytes
        shards[-1][name] = shape
        free -= size
    return shards
