"""The weight table: for each array its shape, logical axes and initial values.

One table serves initialisation, sharding, import and export.  Layers are stacked on a leading
``layers`` axis, which is what a scanned forward pass wants.  Query, key and value projections
are one array grouped by key/value head, ``[D, N, G + 2, K]`` (the G queries of a head, its key,
its value): one product instead of three, and tensor parallelism splits it over N without ever
separating a query from the cache that it reads.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from coa_jax.model.config import ModelConfig
from coa_jax.model.products import OutputMajor

Params = dict[str, Any]
"""Nested dict of arrays, keyed as the paths of the table are."""


_STD = 0.02


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """One array of the policy.

    Attributes:
        path: keys into the params, outermost first.
        shape: shape, with the leading layer axis where there is one.
        axes: logical axis names, one per dimension, for sharding rules.
        stddev: standard deviation of the initial normal values; 0 for zeros, None for ones.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    stddev: float | None


def weight_table(config: ModelConfig) -> tuple[WeightSpec, ...]:
    """All arrays of a model, in a fixed order.

    Initial values are as small as the embeddings, and those that write to the residual stream
    smaller by sqrt(2 L): at first the stream is what the tokens are, not what random layers add.
    """
    c = config
    layers, d, f = c.num_layers, c.hidden_size, c.intermediate_size
    n, g, k = c.num_kv_heads, c.num_groups, c.head_dim
    residual = (2 * layers) ** -0.5

    def layer(
        name: str, shape: tuple[int, ...], axes: tuple[str, ...], stddev: float | None
    ) -> WeightSpec:
        return WeightSpec(("layers", name), (layers, *shape), ("layers", *axes), stddev)

    table = [
        WeightSpec(("embed",), (c.vocab_size, d), ("vocab", "embed"), _STD),
        layer("attn_norm", (d,), ("embed",), None),
        layer("qkv", (d, n, g + 2, k), ("embed", "kv_heads", "qkv", "head"), _STD),
        layer(
            "out",
            (n, g, k, d),
            ("kv_heads", "groups", "head", "embed"),
            _STD * residual,
        ),
        layer("mlp_norm", (d,), ("embed",), None),
        layer("gate_up", (d, 2, f), ("embed", "gate", "mlp"), _STD),
        layer("down", (f, d), ("mlp", "embed"), _STD * residual),
        WeightSpec(("final_norm",), (d,), ("embed",), None),
    ]
    if c.qkv_bias:
        table.append(layer("qkv_bias", (n, g + 2, k), ("kv_heads", "qkv", "head"), 0.0))
    if c.qk_norm:
        table.append(layer("q_norm", (k,), ("head",), None))
        table.append(layer("k_norm", (k,), ("head",), None))
    if not c.tie_embeddings:
        table.append(WeightSpec(("head",), (d, c.vocab_size), ("embed", "vocab"), _STD))
    return tuple(table)


def from_paths(arrays: dict[tuple[str, ...], Any]) -> Params:
    """Builds the nested dict from arrays keyed by path."""
    params: Params = {}
    for path, array in arrays.items():
        node = params
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = array
    return params


def init_params(config: ModelConfig, key: jax.Array, dtype: str = "float32") -> Params:
    """Random parameters; the same key gives the same values whatever the table's order."""
    arrays = {}
    for spec in weight_table(config):
        if spec.stddev is None:
            value = jnp.ones(spec.shape, dtype)
        elif spec.stddev == 0.0:
            value = jnp.zeros(spec.shape, dtype)
        else:
            # A stable hash of the path: str.__hash__ changes between processes.
            salt = sum(ord(c) * 31**i for i, c in enumerate("/".join(spec.path))) % 2**31
            draw = jax.random.normal(jax.random.fold_in(key, salt), spec.shape, jnp.float32)
            value = (draw * spec.stddev).astype(dtype)
        arrays[spec.path] = value
    return from_paths(arrays)


def num_params(config: ModelConfig) -> int:
    """Number of scalars in the parameters."""
    total = 0
    for spec in weight_table(config):
        size = 1
        for dim in spec.shape:
            size *= dim
        total += size
    return total


def unstack_layers(params: Params, config: ModelConfig) -> Params:
    """The decoding layout: a tuple of per-layer dicts.

    A decode step reads every weight once; slices of a stacked array inside its loop would be
    copies.
    """
    layers = tuple(
        {name: value[i] for name, value in params["layers"].items()}
        for i in range(config.num_layers)
    )
    return {**params, "layers": layers}


def output_major(params: Params) -> Params:
    """The decoding layout with the outputs of its products first, see `products.OutputMajor`."""

    def turned(w: jax.Array, inputs: int) -> OutputMajor:
        return OutputMajor(jnp.moveaxis(w, range(inputs), range(-inputs, 0)))

    inputs = {"qkv": 1, "out": 3, "gate_up": 1, "down": 1}
    layers = tuple(
        {name: turned(w, inputs[name]) if name in inputs else w for name, w in layer.items()}
        for layer in params["layers"]
    )
    head = {"head": turned(params["head"], 1)} if "head" in params else {}
    return {**params, "layers": layers, **head}
