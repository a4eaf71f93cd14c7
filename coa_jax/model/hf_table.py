"""Tables that map the parameters of a module to tensors of a Hugging Face checkpoint.

Hugging Face stores a projection as ``[out, in]``, with one tensor per projection and layer. In this
package a kernel is ``[in, out]``; q, k and v share one array, and gate and up share one array. The
functions of a row only move values, so writing and reading again is bit-exact. They accept NumPy
arrays and JAX arrays, also inside a compiled function.

Shape letters: see `model.decoder`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from coa_jax.model.config import Architecture
from coa_jax.model.params import Path, Specs

Shape = tuple[int, ...]
Join = Callable[[Shape, Sequence[Any]], Any]
Split = Callable[[Any], Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table, which maps tensors of a checkpoint to one array of the parameters.

    Attributes:
        tensors: names of the tensors; ``{}`` stands for the index of the layer.
        join: function that takes the shape of one layer's array and the tensors, and returns the
            array.
        split: inverse of ``join``: function that takes one layer's array and returns the tensors.
    """

    tensors: tuple[str, ...]
    join: Join
    split: Split


Table = Mapping[Path, Row]
"""Maps the path of each array to its row, in the order in which checkpoints are written."""


def _join_heads(shape: Shape, parts: Sequence[Any]) -> Any:
    """Joins q ``[N G K, ...]``, k and v ``[N K, ...]`` to ``[N, G + 2, K, ...]``."""
    n, _, k = shape[-3:]
    split = [x.reshape(n, -1, k, *x.shape[1:]) for x in parts]
    return _numpy_of(parts).concat(split, axis=1)


def _numpy_of(parts: Sequence[Any]) -> Any:
    """Returns the array library of the tensors: NumPy or JAX."""
    return parts[0].__array_namespace__()


def _split_heads(x: Any) -> Sequence[Any]:
    parts = (x[:, :-2], x[:, -2:-1], x[:, -1:])
    return [part.reshape(-1, *part.shape[3:]) for part in parts]


SAME = (lambda shape, parts: parts[0], lambda x: [x])
TRANSPOSED = (
    lambda shape, parts: parts[0].T.reshape(shape),
    lambda x: [x.reshape(-1, x.shape[-1]).T],
)
STACKED = (  # projections of one input that share a kernel
    lambda shape, parts: _numpy_of(parts).stack(parts).transpose(2, 0, 1).reshape(shape),
    lambda x: list(x.reshape(*x.shape[:2], -1).transpose(1, 2, 0)),
)
STACKED_BIASES = (
    lambda shape, parts: _numpy_of(parts).stack(parts).reshape(shape),
    lambda x: list(x.reshape(len(x), -1)),
)
_QKV = (
    lambda shape, parts: _numpy_of(parts).moveaxis(_join_heads(shape, parts), -1, 0),
    lambda x: _split_heads(x.transpose(1, 2, 3, 0)),
)
_QKV_BIASES = (_join_heads, _split_heads)

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LAYER = "model.layers.{}."

TABLE: Table = {
    ("embed", "embedding"): Row((EMBED,), *SAME),
    ("layers", "attn_norm", "scale"): Row((f"{_LAYER}input_layernorm.weight",), *SAME),
    ("layers", "attn", "qkv", "kernel"): Row(
        tuple(f"{_LAYER}self_attn.{name}_proj.weight" for name in "qkv"), *_QKV
    ),
    ("layers", "attn", "qkv", "bias"): Row(
        tuple(f"{_LAYER}self_attn.{name}_proj.bias" for name in "qkv"), *_QKV_BIASES
    ),
    ("layers", "attn", "q_norm", "scale"): Row((f"{_LAYER}self_attn.q_norm.weight",), *SAME),
    ("layers", "attn", "k_norm", "scale"): Row((f"{_LAYER}self_attn.k_norm.weight",), *SAME),
    ("layers", "attn", "out", "kernel"): Row((f"{_LAYER}self_attn.o_proj.weight",), *TRANSPOSED),
    ("layers", "mlp_norm", "scale"): Row((f"{_LAYER}post_attention_layernorm.weight",), *SAME),
    ("layers", "mlp", "gate_up", "kernel"): Row(
        (f"{_LAYER}mlp.gate_proj.weight", f"{_LAYER}mlp.up_proj.weight"), *STACKED
    ),
    ("layers", "mlp", "down", "kernel"): Row((f"{_LAYER}mlp.down_proj.weight",), *TRANSPOSED),
    ("final_norm", "scale"): Row(("model.norm.weight",), *SAME),
    ("head", "kernel"): Row((HEAD,), *TRANSPOSED),
}
"""The table for the decoder, `model.decoder`, in most families."""

TABLES: Mapping[Architecture, Table] = {
    "llama": TABLE,
    "qwen2": TABLE,
    "qwen3": TABLE,
    # Here, as the names of transformers say, the second norm follows attention.
    "gemma3": {
        **TABLE,
        **{
            ("layers", norm, "scale"): Row((f"{_LAYER}{name}_layernorm.weight",), *SAME)
            for norm, name in (
                ("attn_post_norm", "post_attention"),
                ("mlp_norm", "pre_feedforward"),
                ("mlp_post_norm", "post_feedforward"),
            )
        },
    },
}
"""The table of each family."""


def tensors_of(table: Table, specs: Specs) -> dict[str, Shape]:
    """Returns the shapes of a checkpoint's tensors by Hugging Face name, in the order of writing.

    Args:
        table: the tensors that form each array of the parameters.
        specs: shapes of these arrays.
    """

    def shapes(path: Path, row: Row) -> list[Shape]:
        array = jax.ShapeDtypeStruct(specs[path].shape[path[0] == "layers" :], np.float32)
        return [x.shape for x in jax.eval_shape(row.split, array)]

    of = {path: shapes(path, row) for path, row in table.items() if path in specs}
    shape_of: dict[str, Shape] = {}
    for path, row, layer in writing_order(table, specs):
        shape_of |= zip(names(row, layer), of[path], strict=True)
    return shape_of


def writing_order(table: Table, specs: Specs) -> Iterator[tuple[Path, Row, int]]:
    """Yields a triple (path, row, layer) for every entry of a checkpoint, in the order of writing.

    The embeddings come first, then the layers one after the other, then the remaining arrays.

    Args:
        table: maps the path of each array of the parameters to its row.
        specs: shapes of the arrays by path.
    """
    rows = [(path, row) for path, row in table.items() if path in specs]
    for stacked, group in itertools.groupby(rows, key=lambda pair: pair[0][0] == "layers"):
        pairs = list(group)
        for layer in range(specs[pairs[0][0]].shape[0] if stacked else 1):
            yield from ((path, row, layer) for path, row in pairs)


def names(row: Row, layer: int) -> list[str]:
    """Returns the Hugging Face names of a row's tensors in the layer with index ``layer``."""
    return [name.format(layer) for name in row.tensors]
