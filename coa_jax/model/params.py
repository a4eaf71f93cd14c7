"""Parameters as nested dicts of arrays, which is what everything but a compiled function holds.

Optimisers, checkpoints, publishing and files see keys such as ``layers/attn/qkv/kernel`` and no
module.  `specs` derives all that they need to know (shapes, logical axes, which are adapters) from
the modules of `model.decoder`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from coa_jax.model.config import LoraConfig, ModelConfig
from coa_jax.model.decoder import Decoder, Layer
from coa_jax.parallel.mesh import DECODE_RULES, RULES, Rules, sharding_for
from coa_jax.parallel.turns import in_turn, mesh_of

Params = dict[str, Any]
"""Nested dict of arrays.  Those of layers are stacked along a first axis."""

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Spec:
    """One array of the parameters.

    Attributes:
        shape: its shape.
        axes: logical names of its axes, for sharding rules.
        adapter: whether it belongs to a LoRA adapter.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    adapter: bool


Specs = Mapping[Path, Spec]


@functools.cache
def specs(config: ModelConfig) -> Specs:
    """All arrays of a model, in the order of `jax.tree.leaves`."""
    return specs_of(_abstract(config))


def specs_of(module: nnx.Module) -> Specs:
    """All arrays of a module, in the order of `jax.tree.leaves`."""
    return {
        tuple(map(str, path)): Spec(
            tuple(value.shape), value.get_metadata("axes"), isinstance(value, nnx.LoRAParam)
        )
        for path, value in nnx.to_flat_state(nnx.state(module))
    }


@functools.cache
def _abstract(config: ModelConfig) -> Decoder:
    return nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))


def num_params(config: ModelConfig) -> int:
    """Number of scalars in the parameters, adapters included."""
    return sum(math.prod(spec.shape) for spec in specs(config).values())


# --- nested dicts --------------------------------------------------------------------------


def nest(flat: Mapping[Path, Any]) -> Params:
    """The nested dict of values by path."""
    params: Params = {}
    for path, value in flat.items():
        node = params
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return params


def flatten(params: Params, prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """(Path, value) of all leaves."""
    for key, value in params.items():
        if isinstance(value, dict):
            yield from flatten(value, (*prefix, key))
        else:
            yield (*prefix, key), value


def join(first: Params, second: Params) -> Params:
    """The leaves of both; no path is in both."""
    return nest({**dict(flatten(first)), **dict(flatten(second))})


def param_dtype(params: Params) -> jnp.dtype:
    """The dtype of the parameters, which is that of the embeddings."""
    return jnp.dtype(params["embed"]["embedding"].dtype)


# --- modules -------------------------------------------------------------------------------


@functools.cache
def _graphs(config: ModelConfig) -> tuple[Any, Any, Any]:
    """Flax's static descriptions of a whole decoder, of one without layers, and of one layer."""
    shared = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), stacked=False))
    layer = nnx.eval_shape(lambda: Layer(config, rngs=nnx.Rngs(0)))
    return nnx.graphdef(_abstract(config)), nnx.graphdef(shared), nnx.graphdef(layer)


def bind(config: ModelConfig, params: Params) -> Decoder:
    """The module with these parameters, inside a compiled function.

    Raises:
        ValueError: the parameters are not those of the architecture, adapters among them.
    """
    # Flax fills leaves in by their order, so it would take other names without a word.
    if (found := {path for path, _ in flatten(params)}) != specs(config).keys():
        wrong = sorted("/".join(path) for path in found ^ specs(config).keys())
        raise ValueError(f"parameters and architecture differ in {', '.join(wrong)}")
    return nnx.merge(_graphs(config)[0], params)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("shared", "layers"),
    meta_fields=("outputs_first",),
)
@dataclasses.dataclass(frozen=True)
class DecodeParams:
    """Parameters in the layout of decoding, without adapters.

    A decode step reads every parameter once.  Slices of a stack would be copies inside its loop, so
    each layer has arrays of its own.

    Attributes:
        shared: all that is not a layer's.
        layers: parameters of each layer.
        outputs_first: whether the output axes of kernels come before the input axes, which XLA's
            CPU backend multiplies faster (`ops_cpu`); static.
    """

    shared: Params
    layers: tuple[Params, ...]
    outputs_first: bool = False

    def bind(self, config: ModelConfig) -> tuple[Decoder, tuple[Layer, ...]]:
        """The modules with these parameters, inside a compiled function."""
        _, shared, layer = _graphs(config)
        layers = tuple(nnx.merge(layer, params) for params in self.layers)
        return nnx.merge(shared, self.shared), layers


def unstack(params: Params, config: ModelConfig, outputs_first: bool = False) -> DecodeParams:
    """Parameters of training, without adapters, in the layout of decoding."""
    shared = {key: value for key, value in params.items() if key != "layers"}
    layers = tuple(
        jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(config.num_layers)
    )
    if outputs_first:
        shared, *turned = (_turn(tree, inputs_of(config)) for tree in (shared, *layers))
        layers = tuple(turned)
    return DecodeParams(shared, layers, outputs_first)


def inputs_of(config: ModelConfig) -> Mapping[Path, int]:
    """Number of input axes of each kernel; of a layer's kernels without ``layers`` in the path."""
    module = _abstract(config)
    found = {}
    for path, value in nnx.iter_graph(module):
        if hasattr(value, "kernel"):
            keys = tuple(map(str, path))
            found[(*keys[keys[:1] == ("layers",) :], "kernel")] = value.inputs
    return found


def _turn(params: Params, inputs: Mapping[Path, int]) -> Params:
    """Kernels with their output axes first."""

    def turned(path: Path, w: jax.Array) -> jax.Array:
        count = inputs.get(path, 0)
        return jnp.moveaxis(w, range(count), range(-count, 0)) if count else w

    return nest({path: turned(path, w) for path, w in flatten(params)})


# --- initial values ------------------------------------------------------------------------


def init_params(config: ModelConfig, key: jax.Array, dtype: str = "float32") -> Params:
    """Random parameters, adapters included; the key alone decides about them."""
    state = nnx.state(Decoder(config, rngs=nnx.Rngs(key)))
    return jax.tree.map(lambda x: x.astype(dtype), nnx.to_pure_dict(state))


def init_adapters(config: ModelConfig, seed: int, mesh: Mesh | None = None) -> Params:
    """Adapters before training, float32, on the first device or split over a mesh."""

    def draw() -> Params:
        return select(config, init_params(config, jax.random.key(seed)), adapter=True)

    return jax.jit(draw, out_shardings=select(config, shardings(config, mesh), adapter=True))()


def select(config: ModelConfig, params: Params, *, adapter: bool) -> Params:
    """The adapters among the parameters, or all others."""
    kinds = specs(config)
    return nest({path: x for path, x in flatten(params) if kinds[path].adapter == adapter})


def without_adapters(config: ModelConfig) -> ModelConfig:
    """The architecture of a model whose adapters are left out or merged."""
    return dataclasses.replace(config, lora=LoraConfig())


def split_trained(
    params: Params, config: ModelConfig, seed: int, mesh: Mesh | None = None
) -> tuple[Params, Params]:
    """(Trained, frozen) parameters of a run: all of them and none, or new adapters and the rest.

    Args:
        params: of a model without adapters.
        config: the architecture, with the adapters that the run trains.
        seed: of their initial values.
        mesh: see `init_adapters`.
    """
    return (init_adapters(config, seed, mesh), params) if config.lora.rank else (params, {})


@functools.partial(jax.jit, static_argnames="config")
def merge_program(config: ModelConfig, params: Params) -> Params:
    """The program of `merge_adapters` for a model that has adapters."""
    layers = bind(config, params).layers

    def delta(lora: Any) -> jax.Array:
        """``scale * A B`` of each layer, ``[L, *inputs, *outputs]``."""
        a, b = lora.a[...], lora.b[...] * lora.scale
        product = jnp.einsum(
            "lir,lro->lio",
            a.reshape(a.shape[0], -1, a.shape[-1]),
            b.reshape(*b.shape[:2], -1),
            precision="highest",
        )
        return product.reshape(*a.shape[:-1], *b.shape[2:])

    merged = dict(flatten(select(config, params, adapter=False)))

    def add(kernel: Path, lora: Any, part: slice, axis: int) -> None:
        if lora is not None:
            at = (slice(None),) * axis + (part,)
            w = merged["layers", *kernel, "kernel"]
            merged["layers", *kernel, "kernel"] = w.at[at].add(delta(lora).astype(w.dtype))

    g, attn, mlp = config.num_groups, layers.attn, layers.mlp
    add(("attn", "qkv"), attn.q_lora, slice(0, g), 3)
    add(("attn", "qkv"), attn.k_lora, slice(g, g + 1), 3)
    add(("attn", "qkv"), attn.v_lora, slice(g + 1, g + 2), 3)
    add(("attn", "out"), attn.o_lora, slice(None), 0)
    add(("mlp", "gate_up"), mlp.gate_lora, slice(0, 1), 2)
    add(("mlp", "gate_up"), mlp.up_lora, slice(1, 2), 2)
    add(("mlp", "down"), mlp.down_lora, slice(None), 0)
    return nest(merged)


def merge_adapters(config: ModelConfig, params: Params) -> Params:
    """A model's parameters, with adapters added to the kernels that they belong to."""
    if not config.lora.rank:
        return params
    return in_turn(mesh_of(jax.tree.leaves(params)[0]), merge_program, config, params)


# --- places --------------------------------------------------------------------------------


def shardings(config: ModelConfig, mesh: Mesh | AbstractMesh | None, rules: Rules = RULES) -> Any:
    """Where the parameters lie, as a nested dict; without a mesh the first device for all."""
    if mesh is None:
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return nest(dict.fromkeys(specs(config), device))
    return nest({p: sharding_for(mesh, s.axes, rules, s.shape) for p, s in specs(config).items()})


def decode_shardings(config: ModelConfig, mesh: Mesh | AbstractMesh) -> DecodeParams:
    """Where parameters in the layout of decoding lie, by the rules of decoding."""

    def place(spec: Spec, first: int) -> NamedSharding:
        return sharding_for(mesh, spec.axes[first:], DECODE_RULES, spec.shape[first:])

    found = specs(without_adapters(config))
    shared = nest({path: place(s, 0) for path, s in found.items() if path[0] != "layers"})
    layer = nest({path[1:]: place(s, 1) for path, s in found.items() if path[0] == "layers"})
    return DecodeParams(shared, (layer,) * config.num_layers)


def abstract_params(config: ModelConfig, mesh: Mesh | None) -> Params:
    """Float32 parameters of training as shapes and places."""
    places = dict(flatten(shardings(config, mesh)))
    return nest(
        {
            path: jax.ShapeDtypeStruct(spec.shape, jnp.float32, sharding=places[path])
            for path, spec in specs(config).items()
        }
    )
