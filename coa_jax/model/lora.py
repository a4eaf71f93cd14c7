"""Low-rank adapters: only they are trained, beside weights that stay as they are.

A projection ``x W`` becomes ``x W + (alpha / rank) (x A) B`` with A ``[in, rank]`` and B
``[rank, out]`` (Hu et al. 2021, arXiv 2106.09685, eq 3).  A is random and B zero at first, so that
training begins at the model itself.  Adapters belong to the projections of a checkpoint, of which
some lie in one array here (see `weights`); `peft_io` writes them.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from coa_jax.bounds import Bounded, Items, Natural, OneOf, Positive
from coa_jax.model.config import ModelConfig
from coa_jax.model.products import project
from coa_jax.model.weights import Params, WeightSpec, from_paths
from coa_jax.parallel.mesh import sharding_for

PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class LoraConfig(Bounded):
    """Adapters of a run.

    Attributes:
        rank: of every adapter; 0 trains the whole model instead.
        alpha: the adapters' products are multiplied by ``alpha / rank``.
        projections: which have adapters, of `PROJECTIONS`.
    """

    rank: Natural = 0
    alpha: Positive = 32.0
    projections: Annotated[
        tuple[Annotated[str, OneOf(*PROJECTIONS)], ...], Items(1, len(PROJECTIONS))
    ] = PROJECTIONS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoraBase:
    """What adapters are trained beside.

    Attributes:
        params: stacked parameters, frozen.
        lora: the adapters' settings, static.
    """

    params: Params
    lora: LoraConfig = dataclasses.field(metadata={"static": True})


def lora_table(config: ModelConfig, lora: LoraConfig) -> tuple[WeightSpec, ...]:
    """All arrays of the adapters, as `weights.weight_table` lists those of the model.

    The variance of A is that of PEFT, 1 / (3 in).
    """
    c, layers, r = config, config.num_layers, lora.rank
    n, g, k = c.num_kv_heads, c.num_groups, c.head_dim
    hidden = ((c.hidden_size,), ("embed",))
    mlp = ((c.intermediate_size,), ("mlp",))
    queries = ((n, g, k), ("kv_heads", "groups", "head"))
    keys = ((n, k), ("kv_heads", "head"))
    ends = {
        "q": (hidden, queries),
        "k": (hidden, keys),
        "v": (hidden, keys),
        "o": (queries, hidden),
        "gate": (hidden, mlp),
        "up": (hidden, mlp),
        "down": (mlp, hidden),
    }
    table = []
    for name in (name for name in PROJECTIONS if name in lora.projections):
        (into, into_axes), (out, out_axes) = ends[name]
        std = (3 * int(np.prod(into))) ** -0.5
        a, b = (layers, *into, r), (layers, r, *out)
        table.append(WeightSpec((name, "a"), a, ("layers", *into_axes, "rank"), std))
        table.append(WeightSpec((name, "b"), b, ("layers", "rank", *out_axes), 0.0))
    return tuple(table)


def init_adapters(
    config: ModelConfig, lora: LoraConfig, seed: int, mesh: Mesh | None = None
) -> Params:
    """Adapters before training, float32, on the mesh by the rules of the parameters."""
    table = lora_table(config, lora)

    def draw(key: jax.Array) -> Params:
        arrays: dict[tuple[str, ...], jax.Array] = {}
        for spec, k in zip(table, jax.random.split(key, len(table)), strict=True):
            arrays[spec.path] = (spec.stddev or 0.0) * jax.random.normal(k, spec.shape, jnp.float32)
        return from_paths(arrays)

    if mesh is None:
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return jax.device_put(jax.jit(draw)(jax.random.key(seed)), device)
    places = from_paths({s.path: sharding_for(mesh, s.axes, shape=s.shape) for s in table})
    return jax.jit(draw, out_shardings=places)(jax.random.key(seed))


def split(
    params: Params, config: ModelConfig, lora: LoraConfig, seed: int, mesh: Mesh | None = None
) -> tuple[Params, LoraBase | None]:
    """What a run trains, and what it keeps as it is: all and None, or adapters and the model."""
    if not lora.rank:
        return params, None
    return init_adapters(config, lora, seed, mesh), LoraBase(params, lora)


def attach(base: LoraBase | None, params: Params) -> Params:
    """Parameters for the forward pass, differentiable by ``params`` (see `split`)."""
    if base is None:
        return params
    scale = base.lora.alpha / base.lora.rank
    adapters = {name: {"a": x["a"], "b": x["b"] * scale} for name, x in params.items()}
    return {**base.params, "layers": {**base.params["layers"], "lora": adapters}}


# --- in the forward pass -------------------------------------------------------------------


def _delta(name: str, spec: str, x: jax.Array, layer: Params, dtype: Any) -> jax.Array | None:
    """The product of one projection's adapter; ``spec`` is that of the projection."""
    adapter = layer["lora"].get(name)
    if adapter is None:
        return None
    inputs, out = spec.split("->")
    left, weight = inputs.split(",")
    contracted = "".join(c for c in weight if c not in out)
    kept = "".join(c for c in weight if c in out)
    batch = "".join(c for c in left if c in out)
    low = project(f"{left},{contracted}r->{batch}r", x, adapter["a"], dtype)
    return project(f"{batch}r,r{kept}->{out}", low, adapter["b"], dtype)


def add_qkv(out: jax.Array, x: jax.Array, layer: Params, dtype: Any) -> jax.Array:
    """Adds the adapters of q, k and v to their fused product ``[B,T,N,G+2,K]``."""
    groups = out.shape[3] - 2
    q = _delta("q", "btd,dngk->btngk", x, layer, dtype)
    k, v = (_delta(name, "btd,dnk->btnk", x, layer, dtype) for name in "kv")
    return _add_parts(out, 3, (groups, groups + 1), (q, _lift(k, 3), _lift(v, 3)))


def add_gate_up(out: jax.Array, x: jax.Array, layer: Params, dtype: Any) -> jax.Array:
    """Adds the adapters of gate and up to their fused product ``[B,T,2,F]``."""
    parts = (_delta(name, "btd,df->btf", x, layer, dtype) for name in ("gate", "up"))
    return _add_parts(out, 2, (1,), tuple(_lift(part, 2) for part in parts))


def add_one(
    name: str, spec: str, out: jax.Array, x: jax.Array, layer: Params, dtype: Any
) -> jax.Array:
    """Adds the adapter of a projection with an array of its own."""
    delta = _delta(name, spec, x, layer, dtype)
    return out if delta is None else out + delta


def _lift(x: jax.Array | None, axis: int) -> jax.Array | None:
    return None if x is None else jnp.expand_dims(x, axis)


def _add_parts(
    out: jax.Array, axis: int, cuts: tuple[int, ...], deltas: tuple[jax.Array | None, ...]
) -> jax.Array:
    parts = jnp.split(out, cuts, axis)
    if all(delta is None for delta in deltas):
        return out
    summed = (p if d is None else p + d for p, d in zip(parts, deltas, strict=True))
    return jnp.concatenate(list(summed), axis)


# --- merging -------------------------------------------------------------------------------


def merge(base: LoraBase | None, params: Params) -> Params:
    """A model's parameters, in which adapters are added to the weights they belong to.

    Of a model that is trained as a whole they are ``params``.
    """
    return params if base is None else merge_program(base, params)


@jax.jit
def merge_program(base: LoraBase, params: Params) -> Params:
    """The program of `merge` with adapters."""
    scale = base.lora.alpha / base.lora.rank
    layers = dict(base.params["layers"])

    def product(name: str, spec: str) -> jax.Array | float:
        if name not in params:
            return 0.0
        a, b = params[name]["a"], params[name]["b"] * scale
        return project(spec, a, b, jnp.float32)

    def added(key: str, *deltas: tuple[tuple[Any, ...], jax.Array | float]) -> None:
        array = layers[key]
        for at, delta in deltas:
            array = array.at[at].add(jnp.asarray(delta, array.dtype))
        layers[key] = array

    every, groups = np.s_[:], base.params["layers"]["qkv"].shape[3] - 2
    added(
        "qkv",
        ((every, every, every, np.s_[:groups]), product("q", "ldr,lrngk->ldngk")),
        ((every, every, every, groups), product("k", "ldr,lrnk->ldnk")),
        ((every, every, every, groups + 1), product("v", "ldr,lrnk->ldnk")),
    )
    added("out", ((every,), product("o", "lngkr,lrd->lngkd")))
    added(
        "gate_up",
        ((every, every, 0), product("gate", "ldr,lrf->ldf")),
        ((every, every, 1), product("up", "ldr,lrf->ldf")),
    )
    added("down", ((every,), product("down", "lfr,lrd->lfd")))
    return {**base.params, "layers": layers}
