"""Reads and writes parameters as Hugging Face tensors, by the table of `model.hf_table`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from coa_jax import reading
from coa_jax.errors import UserError
from coa_jax.model.config import ModelConfig
from coa_jax.model.hf_table import EMBED, HEAD, TABLE, names, tensors_of, writing_order
from coa_jax.model.params import Params, Path, flatten, nest, num_params, specs


class TensorSource(Protocol):
    """Tensors under Hugging Face names, read one at a time."""

    where: str
    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str) -> np.ndarray: ...


def check_tensors(source: TensorSource, config: ModelConfig) -> None:
    """Compares a checkpoint with what the architecture needs.

    Raises:
        UserError: a missing tensor, a wrong shape, or a tensor that the architecture has no use
            for; the message names the first and says how many more there are.
    """
    found = dict(source.shapes)
    if config.num_layers > len(found):  # before a table of as many layers is made
        raise UserError(
            f"{source.where}: config.json asks for {config.num_layers:,} layers, the weights have "
            f"{len(found):,} tensors: fetch the model again"
        )
    expected = tensors_of(config)
    # Buffers that old transformers versions saved, and the copy of a tied head.
    extra = [
        name
        for name in found
        if name not in expected
        and not name.endswith("rotary_emb.inv_freq")
        and not (config.tie_embeddings and name == HEAD)
    ]
    problems = [f"tensor {name} is missing" for name in expected if name not in found]
    problems += [
        f"tensor {name} has shape {list(found[name])}, config.json asks for {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != shape
    ]
    problems += [f"tensor {name} is unexpected for {config.architecture}" for name in extra]
    if problems:
        more = f" (and {len(problems) - 1} more such problems)" if len(problems) > 1 else ""
        raise UserError(f"{source.where}: {problems[0]}{more}: fetch the model again")
    if config.tie_embeddings and HEAD in found:
        head, embed = source.read(HEAD), source.read(EMBED)
        if head.shape != embed.shape or not np.array_equal(head, embed):
            raise UserError(
                f"{source.where}: {HEAD} differs from the embedding, but config.json "
                "ties them: set tie_word_embeddings to false"
            )


def load_params(
    source: TensorSource,
    config: ModelConfig,
    dtype: Any,
    places: Params,
) -> Params:
    """Reads the parameters of a checkpoint.

    Each device gets its own slice of each array.  The host holds the addressable slices of one
    array at a time, never the whole model.

    Args:
        source: tensors, e.g. a :class:`~coa_jax.model.safetensors_io.Checkpoint`.
        config: the architecture, without adapters.
        dtype: dtype of the parameters; stored values are rounded to it.
        places: sharding of each array, see `params.shardings`.

    Raises:
        UserError: as :func:`check_tensors`; a weight is NaN or infinite; or, on CPUs, the
            parameters need more than the machine's memory.
    """
    check_tensors(source, config)
    dtype = np.dtype(dtype)
    needed = num_params(config) * dtype.itemsize
    if jax.default_backend() == "cpu" and needed > reading.memory():
        raise UserError(
            f"{source.where}: the parameters need {needed / 1e9:,.1f} GB in {dtype}, this machine "
            f"has {reading.memory() / 1e9:,.1f} GB: take a smaller model or another machine"
        )
    arrays = {}
    for path, place in flatten(places):
        shape = specs(config)[path].shape
        read = _slice_reader(source, config, path, shape, dtype)
        array = jax.make_array_from_callback(shape, place, read)
        arrays[path] = jax.block_until_ready(array)
    return nest(arrays)


def _slice_reader(
    source: TensorSource,
    config: ModelConfig,
    path: Path,
    shape: tuple[int, ...],
    dtype: np.dtype,
) -> Callable[[Any], np.ndarray]:
    slices: dict[str, np.ndarray] = {}

    def read(index: tuple[slice, ...]) -> np.ndarray:
        # Replicas ask for the same slice again.
        key = str(index)
        if key not in slices:
            slices[key] = _read_slice(source, config, path, shape, index, dtype)
        return slices[key]

    return read


def _read_slice(
    source: TensorSource,
    config: ModelConfig,
    path: Path,
    shape: tuple[int, ...],
    index: tuple[slice, ...],
    dtype: np.dtype,
) -> np.ndarray:
    # A fresh buffer: on CPU an array may alias what it was made from, and that must not be a
    # mapped file which the user is free to delete.
    out = np.empty([len(range(*s.indices(n))) for s, n in zip(index, shape, strict=True)], dtype)
    row = TABLE[path]
    stacked = path[0] == "layers"
    layers = range(*index[0].indices(shape[0])) if stacked else range(1)
    for i, layer in enumerate(layers):
        tensors = names(row, layer)
        whole = row.join(config, [source.read(name) for name in tensors])
        part = out[i] if stacked else out
        part[...] = whole[index[1:] if stacked else index]
        _check_finite(source, tensors, part)
    return out


def _check_finite(source: TensorSource, names: Sequence[str], values: np.ndarray) -> None:
    """Checks that no weight is NaN or infinite: a model with one computes nothing but NaN.

    Args:
        source: the checkpoint.
        names: the tensors from which the values come.
        values: a part of the parameters, on the host.

    Raises:
        UserError: some are not; the message names the tensor and counts them.
    """
    if _all_finite(values):
        return
    for name in names:
        tensor = source.read(name)
        if count := tensor.size - np.count_nonzero(np.isfinite(tensor)):
            raise UserError(
                f"{source.where}: tensor {name} holds {count:,} of {tensor.size:,} values that are "
                "NaN or infinite: take an earlier checkpoint, or fetch the model again"
            )
    raise UserError(
        f"{source.where}: tensor {' or '.join(names)} holds values beyond {values.dtype}: "
        "load the model with dtype float32"
    )


def _all_finite(values: np.ndarray) -> bool:
    """Whether no value is NaN or infinite, at the speed of the memory for bfloat16 too."""
    bits = {2: np.uint16, 4: np.uint32}[values.dtype.itemsize]
    infinity = values.dtype.type(np.inf).view(bits)
    block = 1 << 20  # values: what is computed on the way stays in the cache
    flat = values.reshape(-1).view(bits)
    return all(
        (flat[start : start + block] & infinity).max(initial=0) < infinity
        for start in range(0, flat.size, block)
    )


def export_tensors(
    params: Params, config: ModelConfig, host: Callable[[jax.Array], np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, values) of all tensors in the order of `tensors_of`, a layer at a time.

    Args:
        params: parameters without adapters.
        config: the architecture.
        host: brings an array to this host.
    """
    arrays = dict(flatten(params))
    for path, row, layer in writing_order(config):
        array = arrays[path][layer] if path[0] == "layers" else arrays[path]
        yield from zip(names(row, layer), row.split(config, host(array)), strict=True)
