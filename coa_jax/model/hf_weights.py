"""Hugging Face tensors to and from the arrays of the weight table.

Hugging Face stores a projection as ``[out, in]``, one tensor per projection and layer; the table
stores ``[in, ...]``, fused and stacked.  ``_join`` and ``_split`` are inverses of each other and
move values only, so a round trip is exact to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from coa_jax import reading
from coa_jax.errors import UserError
from coa_jax.model.config import ModelConfig
from coa_jax.model.weights import Params, WeightSpec, from_paths, num_params, weight_table

_TOP = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}
_LAYER = {
    "attn_norm": ("input_layernorm.weight",),
    "qkv": tuple(f"self_attn.{p}_proj.weight" for p in "qkv"),
    "qkv_bias": tuple(f"self_attn.{p}_proj.bias" for p in "qkv"),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "out": ("self_attn.o_proj.weight",),
    "mlp_norm": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down": ("mlp.down_proj.weight",),
}


class TensorSource(Protocol):
    """Tensors under Hugging Face names, read one at a time."""

    where: str
    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str) -> np.ndarray: ...


def _join(config: ModelConfig, key: str, parts: list[np.ndarray]) -> np.ndarray:
    """One array of the table, without its layer axis, from Hugging Face tensors."""
    n, g, k = config.num_kv_heads, config.num_groups, config.head_dim
    if key in ("qkv", "qkv_bias"):
        grouped = [
            part.reshape(n, heads, k, *part.shape[1:])
            for part, heads in zip(parts, (g, 1, 1), strict=True)
        ]
        fused = np.concatenate(grouped, axis=1)
        return np.moveaxis(fused, -1, 0) if key == "qkv" else fused
    if key == "gate_up":
        return np.moveaxis(np.stack(parts), -1, 0)
    (part,) = parts
    if key == "out":
        return part.T.reshape(n, g, k, part.shape[0])
    return part.T if key in ("down", "head") else part


def _split(config: ModelConfig, key: str, array: np.ndarray) -> list[np.ndarray]:
    """Inverse of :func:`_join`."""
    g, k, d = config.num_groups, config.head_dim, config.hidden_size
    if key in ("qkv", "qkv_bias"):
        fused = np.moveaxis(array, 0, -1) if key == "qkv" else array
        tail = fused.shape[3:]
        return [part.reshape(-1, *tail) for part in np.split(fused, (g, g + 1), axis=1)]
    if key == "gate_up":
        return list(np.moveaxis(array, 0, -1))
    if key == "out":
        return [array.reshape(config.num_heads * k, d).T]
    return [array.T if key in ("down", "head") else array]


def hf_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a Hugging Face checkpoint, in writing order."""
    d, f, k = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * k, config.num_kv_heads * k
    of_layer: dict[str, list[tuple[int, ...]]] = {
        "attn_norm": [(d,)],
        "qkv": [(q, d), (kv, d), (kv, d)],
        "qkv_bias": [(q,), (kv,), (kv,)],
        "q_norm": [(k,)],
        "k_norm": [(k,)],
        "out": [(d, q)],
        "mlp_norm": [(d,)],
        "gate_up": [(f, d), (f, d)],
        "down": [(d, f)],
    }
    keys = {spec.path[-1] for spec in weight_table(config)}
    shapes: dict[str, tuple[int, ...]] = {_TOP["embed"]: (config.vocab_size, d)}
    for i in range(config.num_layers):
        for key in (key for key in _LAYER if key in keys):
            shapes |= zip(_layer_names(key, i), of_layer[key], strict=True)
    shapes[_TOP["final_norm"]] = (d,)
    if "head" in keys:
        shapes[_TOP["head"]] = (config.vocab_size, d)
    return shapes


def _layer_names(key: str, layer: int) -> list[str]:
    return [f"model.layers.{layer}.{name}" for name in _LAYER[key]]


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
    expected = hf_shapes(config)
    # Buffers that old transformers versions saved, and the copy of a tied head.
    extra = [
        name
        for name in found
        if name not in expected
        and not name.endswith("rotary_emb.inv_freq")
        and not (config.tie_embeddings and name == _TOP["head"])
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
    if config.tie_embeddings and _TOP["head"] in found:
        head, embed = source.read(_TOP["head"]), source.read(_TOP["embed"])
        if head.shape != embed.shape or not np.array_equal(head, embed):
            raise UserError(
                f"{source.where}: {_TOP['head']} differs from the embedding, but config.json "
                "ties them: set tie_word_embeddings to false"
            )


def load_params(
    source: TensorSource,
    config: ModelConfig,
    dtype: Any,
    sharding: Callable[[WeightSpec], jax.sharding.Sharding],
) -> Params:
    """Reads a checkpoint into the params pytree.

    Each device gets its own slice of each array, read when it is due: the host holds the
    addressable slices of one array of the table at a time, never the whole model.

    Args:
        source: tensors, e.g. a :class:`~coa_jax.model.safetensors_io.Checkpoint`.
        config: the architecture.
        dtype: of the params; stored values are rounded to it.
        sharding: where each array goes.

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
    for spec in weight_table(config):
        read = _slice_reader(source, config, spec, dtype)
        array = jax.make_array_from_callback(spec.shape, sharding(spec), read)
        arrays[spec.path] = jax.block_until_ready(array)
    return from_paths(arrays)


def _slice_reader(
    source: TensorSource, config: ModelConfig, spec: WeightSpec, dtype: np.dtype
) -> Callable[[Any], np.ndarray]:
    slices: dict[str, np.ndarray] = {}

    def read(index: tuple[slice, ...]) -> np.ndarray:
        # Replicas ask for the same slice again.
        key = str(index)
        if key not in slices:
            slices[key] = _read_slice(source, config, spec, index, dtype)
        return slices[key]

    return read


def _read_slice(
    source: TensorSource,
    config: ModelConfig,
    spec: WeightSpec,
    index: tuple[slice, ...],
    dtype: np.dtype,
) -> np.ndarray:
    shape = [len(range(*s.indices(size))) for s, size in zip(index, spec.shape, strict=True)]
    # A fresh buffer: on CPU an array may alias what it was made from, and that must not be a
    # mapped file which the user is free to delete.
    out = np.empty(shape, dtype)
    key = spec.path[-1]
    if spec.path[0] != "layers":
        out[...] = _join(config, key, [source.read(_TOP[key])])[index]
        _check_finite(source, [_TOP[key]], out)
        return out
    for row, layer in enumerate(range(*index[0].indices(spec.shape[0]))):
        names = _layer_names(key, layer)
        out[row] = _join(config, key, [source.read(name) for name in names])[index[1:]]
        _check_finite(source, names, out[row])
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
    """Yields (name, values) in the order of :func:`hf_shapes`, a layer at a time.

    Args:
        params: stacked params (see :func:`~coa_jax.model.weights.weight_table`).
        config: the architecture.
        host: brings an array to this host.
    """
    yield _TOP["embed"], host(params["embed"])
    for i in range(config.num_layers):
        for key in (key for key in _LAYER if key in params["layers"]):
            array = host(params["layers"][key][i])
            yield from zip(_layer_names(key, i), _split(config, key, array), strict=True)
    yield _TOP["final_norm"], host(params["final_norm"])
    if not config.tie_embeddings:
        (head,) = _split(config, "head", host(params["head"]))
        yield _TOP["head"], head
