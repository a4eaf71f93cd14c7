"""The public functions for whole models: load a model, save it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from coa_jax.errors import UserError
from coa_jax.files.untrusted import made_by
from coa_jax.model.adapters import CONFIG_FILE, AdaptedTensors, read_adapter, warn_of_weights
from coa_jax.model.card import read_card
from coa_jax.model.config import DTYPES, LoraConfig, ModelConfig
from coa_jax.model.export import save_model as save_model
from coa_jax.model.gguf_io import GgufFile, gguf_file
from coa_jax.model.hf_config import read_config
from coa_jax.model.hf_weights import TensorSource, TextTensors, load_params
from coa_jax.model.params import Params, join, shardings, split_trained
from coa_jax.model.policy import Model as Model
from coa_jax.model.safetensors_io import SINGLE_FILE, Checkpoint, local_checkpoint, read_index
from coa_jax.model.tokenizer import MissingTokenizer, find_tokenizer, gguf_tokenizer
from coa_jax.parallel import processes
from coa_jax.parallel.transfer import from_first
from coa_jax.storage import (
    cached_files,
    exists,
    hub_cache,
    hub_files,
    is_url,
    local,
    model_folder,
    snapshot_of,
    weights_apart,
    weights_on_hub,
)
from coa_jax.storage import join as join_path

_IMAGE = "<image_soft_token>"
"""Token of Gemma's tokenizers for which Gemma 3 1B has no embedding. No text contains the token."""


def download_once(path: str | Path, *, is_base: bool = False) -> None:
    """Lets process 0 download the files of a model of the Hub that every process needs.

    These files are the config, the tokenizer, the card ``agent.json``, GGUF files and LoRA
    adapters. Process 0 sends them to the hosts that lack them, into the cache of huggingface_hub.
    Safetensors of whole models are not sent, because loading lets each process request a different
    part of them from the Hub. Every process still asks the Hub for the commit and for the list of
    the files. In a run of several processes, all processes must call this function before they load
    the model. The function does nothing for models outside the Hub, and in offline mode.

    Args:
        path: the model, see :func:`load_model`.
        is_base: whether the model is the base model of an adapter.

    Raises:
        UserError: the Hub refuses a request of a process, a file cannot be written, or the
            processes have different commits of the model. All processes raise the error.
    """
    cache, what = hub_cache(path), f"model {path}"
    if processes.count() == 1 or not all(processes.all_gather(cache is not None, what, 60.0)):
        return
    assert cache is not None
    from_first(cache, functools.partial(cached_files, path, weights=False), what)
    folder, commit, fault = Path(), "", ""
    try:
        folder = model_folder(path, weights=False)
        commit = snapshot_of(path, folder).name
    except UserError as error:
        fault = str(error)
    states = processes.all_gather([commit, fault], f"commit of {path}", 60.0)
    for _, other in states:
        if other:
            raise UserError(other)
    _check_commits(path, [each for each, _ in states])
    if not is_base and (adapter := read_adapter(folder)) is not None:
        from_first(cache, functools.partial(cached_files, path, weights=True), what)
        download_once(adapter.base, is_base=True)


def _check_commits(path: str | Path, commits: Sequence[str]) -> None:
    """Raises `UserError` if processes have different commits of a model of the Hub.

    A push between the requests of two processes would mix the files of two commits.
    """
    if len(set(commits)) > 1:
        raise UserError(
            f"{path}: the processes have different commits of the model; name one of them, as in "
            f"{hub_files(path, max(commits), ()).root}"
        )


def load(
    path: str | Path,
    dtype: str = "float32",
    *,
    lora: LoraConfig | None = None,
    seed: int = 0,
    mesh: jax.sharding.Mesh | None = None,
) -> Model:
    """Loads a policy as a Flax NNX module.

    Args:
        path: local path or URL of a Hugging Face model directory, of a GGUF file, of a LoRA
            adapter, or of the work directory of a finished training run; or an id of the Hugging
            Face Hub, such as ``Qwen/Qwen3-0.6B``.
        dtype: dtype of the parameters, ``float32`` or ``bfloat16``.
        lora: new LoRA adapters, which leave the model's function unchanged until they are trained;
            None for no adapters.
        seed: seed of the initial values of the adapters.
        mesh: mesh on which the parameters are placed, see :func:`load_model`.

    Raises:
        UserError: there is no model at the path, or the model is not supported.
    """
    model = load_model(trained_in(path), dtype, mesh)
    if lora is None:
        return model
    config = dataclasses.replace(model.config, lora=lora)
    params = join(*split_trained(model.params, config, seed, mesh))
    return model.replace(config=config, params=params)


def trained_in(path: str | Path) -> str | Path:
    """Returns the path of a work directory's trained model; returns other paths unchanged."""
    trained = join_path(str(path), "model")
    config = join_path(trained, "config.json")
    there = exists(config) if is_url(path) else Path(config).is_file()
    return trained if there else path


def load_model(
    path: str | Path, dtype: str = "float32", mesh: jax.sharding.Mesh | None = None
) -> Model:
    """Loads a Hugging Face directory (safetensors), a GGUF file, or a LoRA adapter.

    Args:
        path: a local path, a URL of a bucket, or an id of the Hugging Face Hub (``Org/Name`` or
            ``Org/Name@revision``), which names one of the following:

            - a directory with ``config.json``, safetensors and, if the tokenizer is used, the
              tokenizer files;
            - a ``.gguf`` file, or a directory that contains a single such file;
            - a directory with a PEFT LoRA adapter, which is merged into its base model.
        dtype: dtype of the parameters, ``"float32"`` or ``"bfloat16"``. float32 represents
            bfloat16, float16 and dequantised weights without loss.
        mesh: mesh on which the parameters are placed, by the rules for training in
            :mod:`coa_jax.parallel.mesh`; None for the default device.

    Raises:
        UserError: the files cannot be used. The message names the file, the key or the tensor.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is not supported: use " + " or ".join(DTYPES))
    model, source = _open(path, weights=True, mesh=mesh)
    return model.replace(params=_load(source, model.config, dtype, mesh))


def describe_model(path: str | Path, lora: LoraConfig | None = None) -> Model:
    """Loads the architecture, the tokenizer and the card ``agent.json`` of a model, but no weights.

    Use this function if the weights are not needed, for example to encode text.

    Args:
        path: the model, see :func:`load_model`.
        lora: adapters that a training run adds to the architecture; None for no adapters.

    Returns:
        A `Model` whose ``params`` are empty.

    Raises:
        UserError: the files cannot be used, see :func:`load_model`.
    """
    model = _open(path, weights=False)[0]
    config = dataclasses.replace(model.config, lora=lora or LoraConfig())
    return model.replace(config=config)


def load_weights(
    path: str | Path, mesh: jax.sharding.Mesh | None = None, dtype: str = "float32"
) -> Params:
    """Loads the parameters of a model, without its tokenizer.

    The parameters are a nested dict of arrays, see `model.params`. The arguments and errors are
    those of :func:`load_model`, but no tokenizer is read.
    """
    model, source = _open(path, weights=True, tokenizer=False, mesh=mesh)
    return _load(source, model.config, dtype, mesh)


def _load(
    source: TensorSource | None, config: ModelConfig, dtype: str, mesh: jax.sharding.Mesh | None
) -> Params:
    assert source is not None
    return load_params(source, config, jnp.dtype(dtype), shardings(config, mesh))


def _open(
    path: str | Path,
    *,
    weights: bool,
    tokenizer: bool = True,
    mesh: jax.sharding.Mesh | None = None,
    is_base: bool = False,
) -> tuple[Model, TensorSource | None]:
    """Returns a model without parameters and, if ``weights`` is set, the source of its tensors.

    If ``tokenizer`` is False, the model has a `MissingTokenizer`. If ``is_base`` is True, the model
    is the base model of an adapter, and must not be an adapter. If ``mesh`` spans several
    processes, the weights of a model on the Hub are not downloaded: `_read_parts` of
    `model.hf_weights` then requests only a part of them in each process.
    """
    together = mesh is not None and len({d.process_index for d in mesh.devices.flat}) > 1
    on_hub = weights and together and weights_on_hub(path)
    folder = model_folder(path, weights=weights and not on_hub)
    source: TensorSource | None = None

    def read(find: Callable[[Any], Any], file: Path | GgufFile) -> Any:
        return find(file) if tokenizer else MissingTokenizer(f"{folder}: no tokenizer was read")

    if (adapter := read_adapter(folder)) is not None:
        if is_base:
            raise UserError("that is an adapter too: merge the two with PEFT first")
        if weights:
            warn_of_weights(path, adapter)
        try:
            base, source = _open(
                adapter.base, weights=weights, tokenizer=tokenizer, mesh=mesh, is_base=True
            )
        except UserError as error:
            trained = f"; its weights in the training: {adapter.weights}" if adapter.weights else ""
            raise UserError(
                f"{adapter.folder / CONFIG_FILE}: the base model {adapter.base} cannot be loaded: "
                f"{error}{trained}"
            ) from error
        own = read(find_tokenizer, folder)
        own = base.tokenizer if isinstance(own, MissingTokenizer) else own
        model = Model(base.config, {}, own, read_card(folder) or base.card)
        if source is not None:
            # If a model is in a bucket or on the Hub, ranges of its safetensors are read, but an
            # adapter is small: copy the whole adapter.
            whole = Path(local(str(path))) if is_url(path) else model_folder(path)
            source = AdaptedTensors(source, dataclasses.replace(adapter, folder=whole))
    elif (gguf := gguf_file(folder)) is not None:
        source = file = GgufFile(gguf)
        model = Model(file.config, {}, read(gguf_tokenizer, file), read_card(folder))
    else:
        if not folder.is_dir():
            missing = f"{folder} does not exist{made_by(folder)}"
            raise UserError(f"{missing}: give a model directory or a .gguf file")
        model = Model(read_config(folder), {}, read(find_tokenizer, folder), read_card(folder))
        if weights:
            source = _checkpoint(path, folder, on_hub)
            if any("language_model." in name for name in source.shapes):
                source = TextTensors(source)
    _check_ids(model, folder)
    return model, source


def _check_ids(model: Model, folder: Path) -> None:
    """Raises `UserError` if the tokenizer of a model has ids without embeddings."""
    if isinstance(model.tokenizer, MissingTokenizer):
        return
    vocabulary = model.tokenizer.get_vocab()
    largest = max((i for token, i in vocabulary.items() if token != _IMAGE), default=0)
    if largest >= model.config.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has ids up to {largest}, the model only "
            f"{model.config.vocab_size} embeddings: use the tokenizer that belongs to the model"
        )


def _checkpoint(path: str | Path, folder: Path, on_hub: bool) -> Checkpoint:
    """Opens the weights of a model.

    Args:
        path: path, URL or id of the model.
        folder: local folder with the index of the weights, if the model has an index.
        on_hub: whether weights that are not in ``folder`` are read from the Hub. If True, all
            processes must call this function.

    Raises:
        UserError: the weights cannot be read, or the processes have different commits of the model.
    """
    shards = tuple(sorted(set(read_index(folder).values())))
    if (apart := weights_apart(path)) is not None:
        # The bucket may also contain shards of an earlier save.
        return Checkpoint(str(path), dataclasses.replace(apart, names=shards or apart.names))
    if on_hub:
        commit, names = folder.name, shards or (SINGLE_FILE,)  # folders of the cache: commits
        what = f"commit of {path}"
        _check_commits(path, processes.all_gather(commit, what, 60.0, "commit of a model"))
        if not all((folder / name).exists() for name in names):
            return Checkpoint(str(path), hub_files(path, commit, names))
    return local_checkpoint(folder)
