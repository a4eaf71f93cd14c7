"""Measures the implementations of attention that can run on this device, beside each other.

    coa-jax bench-attention --kind=causal --rows=4 --length=4096 --segments=4
    coa-jax bench-attention --kind=paged --rows=32 --length=4096 --new=1

With ``--kind=causal``, each row consists of ``--segments`` packed sequences of equal length, and
the gradients with respect to queries, keys and values are measured too. With ``--kind=paged``, the
last ``--new`` tokens of each of ``--rows`` sequences attend to a cache of ``--length`` positions.
The pages of the cache are in random order. ``--new=1`` measures decoding, and larger numbers
measure prefill.

The command prints one JSON object. ``implementations`` has, by name:

    forward_us           time of one layer in microseconds
    gradients_us         time of the forward and the backward pass (causal only)
    forward_tflop_s      FLOP/s of the two matmuls, counting only pairs of positions in which the
                         key is not after the query; pairs of different segments are counted
    gradients_tflop_s    the same for the forward and the backward pass. These have seven matmuls,
                         one of which computes the scores again
    read_gb_s            bytes of the keys and values, read once, per second (paged only)
    skipped, failed      the reason, for an implementation that cannot run, or that stopped
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from coa_jax.errors import UserError
from coa_jax.model.attention.causal import causal_attention
from coa_jax.model.attention.choice import Case, implementations, platform_of, unmet
from coa_jax.model.cache import attend_to, init_layers
from coa_jax.model.compute import Compute, backend_for
from coa_jax.model.config import ModelConfig
from coa_jax.perf.bench.measure import best_seconds, given, output_path, report
from coa_jax.run.command import run_main

_LAYERS = 16
"""Number of layers of the measured program for paged attention.

The start of a program takes longer than one layer.
"""


@dataclasses.dataclass(frozen=True)
class Work:
    """The attention to measure.

    Attributes:
        kind: ``causal`` or ``paged``.
        rows: number of rows or sequences.
        length: number of tokens of a row, or of positions of a sequence.
        segments: number of packed sequences of a row, for causal attention.
        new: number of new tokens of a sequence, for paged attention.
        kv_heads: number of key/value heads.
        groups: number of query heads per key/value head.
        head_dim: width of a head.
        page_size: number of positions of a page, for paged attention.
        dtype: dtype of the matmul operands.
    """

    kind: str
    rows: int
    length: int
    segments: int
    new: int
    kv_heads: int
    groups: int
    head_dim: int
    page_size: int
    dtype: str


def _normal(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(sum(shape)), shape)


def _causal(work: Work, compute: Compute) -> dict[str, float]:
    keys = (work.rows, work.length, work.kv_heads, work.head_dim)
    q = _normal(*keys[:3], work.groups, work.head_dim)
    k, v, cotangent = _normal(*keys), _normal(*keys) + 1, q + 1
    ids = None  # a row of one sequence
    if work.segments > 1:
        ids = jnp.arange(work.length) // (work.length // work.segments) + 1
        ids = jnp.broadcast_to(ids, keys[:2]).astype(jnp.int32)

    @jax.jit
    def forward(q: jax.Array, k: jax.Array, v: jax.Array, ids: Any) -> jax.Array:
        return causal_attention(compute, keys[:2], ids)(q, k, v)[0]

    @jax.jit
    def gradients(q: jax.Array, k: jax.Array, v: jax.Array, ids: Any, cotangent: jax.Array) -> Any:
        out, pullback = jax.vjp(lambda *x: forward(*x, ids), q, k, v)
        return out, pullback(cotangent)  # XLA would remove a forward pass that returns nothing

    once = best_seconds(lambda: forward(q, k, v, ids))
    both = best_seconds(lambda: gradients(q, k, v, ids, cotangent))
    pairs = work.rows * work.length * (work.length + 1) / 2
    flops = 4 * pairs * work.kv_heads * work.groups * work.head_dim
    return {
        "forward_us": once * 1e6,
        "gradients_us": both * 1e6,
        "forward_tflop_s": flops / once / 1e12,
        "gradients_tflop_s": 3.5 * flops / both / 1e12,
    }


def _paged(work: Work, compute: Compute) -> dict[str, float]:
    each = work.length // work.page_size
    table = np.random.default_rng(0).permutation(work.rows * each).reshape(work.rows, each)
    heads = work.kv_heads * work.groups
    model = ModelConfig("llama", 8, 8, 8, _LAYERS, heads, work.kv_heads, work.head_dim)
    layers = init_layers(model, work.rows * each, work.page_size, work.dtype, compute)
    layers = jax.tree.map(lambda x: _normal(*x.shape).astype(x.dtype), layers)
    q = _normal(work.rows, work.new, work.kv_heads, work.groups, work.head_dim)
    ends = jnp.arange(work.length - work.new, work.length)
    positions = jnp.broadcast_to(ends, (work.rows, work.new)).astype(jnp.int32)

    @jax.jit
    def attend(layers: Any, q: jax.Array, table: jax.Array, positions: jax.Array) -> jax.Array:
        for pages in layers:  # each layer needs the result of the layer before
            q = q + 1e-3 * attend_to(pages, q, table, positions, compute)
        return q

    places = jnp.asarray(table, jnp.int32)
    seconds = best_seconds(lambda: attend(layers, q, places, positions)) / _LAYERS
    pairs = work.rows * work.new * (work.length - (work.new - 1) / 2)
    used = 2 * work.rows * work.length * work.kv_heads * work.head_dim
    return {
        "forward_us": seconds * 1e6,
        "forward_tflop_s": 4 * pairs * heads * work.head_dim / seconds / 1e12,
        "read_gb_s": used * jnp.dtype(work.dtype).itemsize / seconds / 1e9,
    }


def measure(work: Work) -> dict[str, Any]:
    """Measures each implementation of one kind of attention, and returns the result.

    Args:
        work: kind and sizes of the attention.

    Raises:
        UserError: ``length`` is no multiple of ``segments`` (causal) or ``page_size`` (paged), or
            is less than ``new`` (paged).
    """
    if work.kind == "causal" and work.length % work.segments:
        raise UserError(f"--length={work.length} is no multiple of --segments={work.segments}")
    if work.kind == "paged" and (work.length % work.page_size or work.new > work.length):
        raise UserError(
            f"--length={work.length}: give a multiple of --page_size={work.page_size} that is not "
            f"less than --new={work.new}"
        )
    run = _causal if work.kind == "causal" else _paged
    platform, capability = platform_of(jax.devices()[0])
    shape = (work.kv_heads, work.groups, work.head_dim, work.page_size)
    case = Case(platform, work.dtype, *shape, capability)
    results: dict[str, dict[str, Any]] = {}
    for name in implementations(work.kind):  # type: ignore[arg-type]
        if why := unmet(work.kind, name, case):  # type: ignore[arg-type]
            results[name] = {"skipped": why}
            continue
        compute = Compute(work.dtype, attention=name, backend=backend_for(platform))
        try:
            results[name] = {key: float(f"{x:.4g}") for key, x in run(work, compute).items()}
        except jax.errors.JaxRuntimeError as error:  # such as too little memory
            results[name] = {"failed": str(error).splitlines()[0]}
    return {"bench": "attention", **dataclasses.asdict(work), "implementations": results}


def define_flags() -> None:
    """Defines the command-line flags of ``coa-jax bench-attention``."""
    flags.DEFINE_enum("kind", "causal", ["causal", "paged"], "whole sequences, or a paged cache")
    for name, default, about in (
        ("rows", 4, "rows of a batch, or sequences"),
        ("length", 1024, "tokens of a row, or positions of a sequence"),
        ("segments", 1, "packed sequences of a row (causal)"),
        ("new", 1, "new tokens of a sequence (paged)"),
        ("kv_heads", 2, "key/value heads"),
        ("groups", 6, "query heads per key/value head"),
        ("head_dim", 128, "width of a head"),
        ("page_size", 128, "positions of a page (paged)"),
    ):
        flags.DEFINE_integer(name, default, about, lower_bound=1)
    flags.DEFINE_enum("dtype", "bfloat16", ["float32", "bfloat16"], "dtype of the matmul operands")
    flags.DEFINE_string("out", None, "JSON file for the result, which is printed as well")


def main(_: list[str]) -> None:
    """Runs ``coa-jax bench-attention``: measures attention and prints JSON."""
    out = output_path(flags.FLAGS.out)
    report(measure(Work(**given(field.name for field in dataclasses.fields(Work)))), out)


if __name__ == "__main__":
    run_main(main, define_flags)
