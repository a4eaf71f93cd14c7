"""The one table between our parameters and the tensors of a Hugging Face checkpoint.

Hugging Face stores a projection as ``[out, in]``, one tensor for each projection and layer.  A
kernel here is ``[in, out]``, with q, k and v in one array, and gate and up in one.  The functions
of a row move values only, so a round trip is exact to the bit.  They use methods that NumPy and JAX
arrays share, so shapes follow from them as well.

Shape letters: see `model.decoder`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from coa_jax.model.config import ModelConfig
from coa_jax.model.params import Path, specs

Join = Callable[[ModelConfig, Sequence[np.ndarray]], np.ndarray]
Split = Callable[[ModelConfig, Any], Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class Row:
    """One of our arrays and the tensors that hold its values.

    Attributes:
        tensors: names of the tensors; ``{}`` stands for the number of the layer.
        join: (architecture, tensors) -> our array, of one layer.
        split: the inverse of ``join``.
    """

    tensors: tuple[str, ...]
    join: Join
    split: Split


def _join_heads(c: ModelConfig, parts: Sequence[np.ndarray]) -> np.ndarray:
    """q ``[N G K, ...]``, k and v ``[N K, ...]`` -> ``[N, G + 2, K, ...]``."""
    heads = [x.reshape(c.num_kv_heads, -1, c.head_dim, *x.shape[1:]) for x in parts]
    return np.concatenate(heads, axis=1)


def _split_heads(c: ModelConfig, x: Any) -> Sequence[Any]:
    g = c.num_groups
    parts = (x[:, :g], x[:, g : g + 1], x[:, g + 1 :])
    return [part.reshape(-1, *part.shape[3:]) for part in parts]


_SAME = (lambda c, parts: parts[0], lambda c, x: [x])
_TRANSPOSED = (lambda c, parts: parts[0].T, lambda c, x: [x.T])
_BIASES = (_join_heads, _split_heads)
_QKV = (
    lambda c, parts: np.moveaxis(_join_heads(c, parts), -1, 0),
    lambda c, x: _split_heads(c, x.transpose(1, 2, 3, 0)),
)
_OUT = (
    lambda c, parts: parts[0].T.reshape(c.num_kv_heads, c.num_groups, c.head_dim, -1),
    lambda c, x: [x.reshape(-1, x.shape[-1]).T],
)
_GATE_UP = (
    lambda c, parts: np.stack(parts).transpose(2, 0, 1),
    lambda c, x: list(x.transpose(1, 2, 0)),
)

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LAYER = "model.layers.{}."

TABLE: Mapping[Path, Row] = {
    ("embed", "embedding"): Row((EMBED,), *_SAME),
    ("layers", "attn_norm", "scale"): Row((f"{_LAYER}input_layernorm.weight",), *_SAME),
    ("layers", "attn", "qkv", "kernel"): Row(
        tuple(f"{_LAYER}self_attn.{name}_proj.weight" for name in "qkv"), *_QKV
    ),
    ("layers", "attn", "qkv", "bias"): Row(
        tuple(f"{_LAYER}self_attn.{name}_proj.bias" for name in "qkv"), *_BIASES
    ),
    ("layers", "attn", "q_norm", "scale"): Row((f"{_LAYER}self_attn.q_norm.weight",), *_SAME),
    ("layers", "attn", "k_norm", "scale"): Row((f"{_LAYER}self_attn.k_norm.weight",), *_SAME),
    ("layers", "attn", "out", "kernel"): Row((f"{_LAYER}self_attn.o_proj.weight",), *_OUT),
    ("layers", "mlp_norm", "scale"): Row((f"{_LAYER}post_attention_layernorm.weight",), *_SAME),
    ("layers", "mlp", "gate_up", "kernel"): Row(
        (f"{_LAYER}mlp.gate_proj.weight", f"{_LAYER}mlp.up_proj.weight"), *_GATE_UP
    ),
    ("layers", "mlp", "down", "kernel"): Row((f"{_LAYER}mlp.down_proj.weight",), *_TRANSPOSED),
    ("final_norm", "scale"): Row(("model.norm.weight",), *_SAME),
    ("head", "kernel"): Row((HEAD,), *_TRANSPOSED),
}
"""Path of each of our arrays -> its row, in the order in which checkpoints are written."""


def tensors_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a checkpoint, in the order of writing."""
    ours = specs(config)

    def shapes(path: Path, row: Row) -> list[tuple[int, ...]]:
        shape = ours[path].shape[path[0] == "layers" :]
        abstract = jax.ShapeDtypeStruct(shape, np.float32)
        return [x.shape for x in jax.eval_shape(lambda x: row.split(config, x), abstract)]

    of = {path: shapes(path, row) for path, row in TABLE.items() if path in ours}
    found: dict[str, tuple[int, ...]] = {}
    for path, row, layer in writing_order(config):
        found |= zip(names(row, layer), of[path], strict=True)
    return found


def writing_order(config: ModelConfig) -> Iterator[tuple[Path, Row, int]]:
    """(Path, row, layer) of all tensors: embeddings, layer after layer, final norm and head."""
    rows = [(path, row) for path, row in TABLE.items() if path in specs(config)]
    for top, group in itertools.groupby(rows, key=lambda pair: pair[0][0] == "layers"):
        pairs = list(group)
        for layer in range(config.num_layers if top else 1):
            yield from ((path, row, layer) for path, row in pairs)


def names(row: Row, layer: int) -> list[str]:
    """Names of a row's tensors in a layer."""
    return [name.format(layer) for name in row.tensors]
