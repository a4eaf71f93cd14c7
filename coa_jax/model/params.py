"""A model, and its parameters as nested dicts of arrays.

All code outside of jit sees the parameters in this form.

Optimisers, checkpoints, weight publishing and files see keys such as ``layers/attn/qkv/kernel``,
but no modules. `specs` derives the shapes, the logical axes and the set of adapters from the
modules of `model.decoder`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from coa_jax.model.compute import KernelLayout
from coa_jax.model.config import LoraConfig, ModelConfig
from coa_jax.model.decoder import Decoder, Layer, PickedLayers
from coa_jax.model.linear import Lora
from coa_jax.parallel.launch_order import launch_alone, mesh_of
from coa_jax.parallel.mesh import DECODE_RULES, sharding_for

Params = dict[str, Any]
"""A nested dict of arrays. The parameters of all layers are stacked along their first axis."""

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Spec:
    """The shape and the logical axes of one array of the parameters.

    Attributes:
        shape: shape of the array.
        axes: logical names of the array's axes, for sharding rules.
        adapter: whether the array belongs to a LoRA adapter.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    adapter: bool


Specs = Mapping[Path, Spec]


@functools.cache
def specs(config: ModelConfig) -> Specs:
    """Returns the shape and the logical axes of each parameter of a model, by path.

    The order is that of `jax.tree.leaves`. The parameters include the adapters of ``config.lora``.
    """
    return specs_of(_abstract(config))


def specs_of(module: nnx.Module) -> Specs:
    """Returns the shape and the logical axes of each parameter of a module, by path.

    The order is that of `jax.tree.leaves`.
    """
    return {
        tuple(map(str, path)): Spec(
            tuple(value.shape), value.get_metadata("out_sharding"), isinstance(value, nnx.LoRAParam)
        )
        for path, value in nnx.to_flat_state(nnx.state(module))
    }


@functools.cache
def _abstract(config: ModelConfig) -> Decoder:
    return nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))


def num_params(config: ModelConfig) -> int:
    """Returns the number of scalars in the parameters, including adapters."""
    return sum(math.prod(spec.shape) for spec in specs(config).values())


def join(first: Params, second: Params) -> Params:
    """Merges two nested dicts of parameters; the second has priority where both have a path."""
    return unflatten_dict({**flatten_dict(first), **flatten_dict(second)})


def whole(adapters: Params, base: Params | DecodeParams) -> Params | Adapted:
    """Returns all parameters of a model, given its adapters ({} for none) and its base.

    The base is in the layout for training, or shared with engines, see `Adapted`.
    """
    return Adapted(adapters, base) if isinstance(base, DecodeParams) else join(adapters, base)


def param_dtype(params: Params) -> jnp.dtype:
    """Returns the dtype of the parameters, taken from the embeddings."""
    return jnp.dtype(params["embed"]["embedding"].dtype)


# --- modules -------------------------------------------------------------------------------


@functools.cache
def _graphs(config: ModelConfig) -> tuple[Any, Any, Any]:
    """Returns Flax's graph definitions of a decoder with and without layers, and of a layer."""
    shared = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), stacked=False))
    layer = nnx.eval_shape(lambda: Layer(config, rngs=nnx.Rngs(0)))
    return nnx.graphdef(_abstract(config)), nnx.graphdef(shared), nnx.graphdef(layer)


def bind(config: ModelConfig, params: Params) -> Decoder:
    """Returns a decoder module with the given parameters.

    To compute with the module, call this function inside a function that `jax.jit` compiles.
    Otherwise JAX runs the operations of the module one by one, which is slow.

    Raises:
        ValueError: the parameters or adapters do not match the architecture.
    """
    # Flax assigns leaves by their order, so it would accept wrong names without an error.
    if (paths := flatten_dict(params).keys()) != specs(config).keys():
        wrong = sorted("/".join(path) for path in paths ^ specs(config).keys())
        raise ValueError(f"parameters and architecture differ in {', '.join(wrong)}")
    return nnx.merge(_graphs(config)[0], params)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("shared", "layers"),
    meta_fields=("kernels",),
)
@dataclasses.dataclass(frozen=True)
class DecodeParams:
    """The parameters in the layout that the engine's decoding programs use.

    Each layer has arrays of its own, because the loop over decoding steps would copy slices of
    arrays that are stacked over layers.

    Attributes:
        shared: all parameters outside the layers.
        layers: parameters of each layer.
        kernels: order of the axes of weight matrices, see `compute.KernelLayout`; static.
    """

    shared: Params
    layers: tuple[Params, ...]
    kernels: KernelLayout = "inputs_first"

    def bind(self, config: ModelConfig) -> tuple[Decoder, tuple[Layer, ...]]:
        """Returns the decoder and its layers with these parameters.

        To compute with the modules, call this method inside a function that `jax.jit` compiles.
        Otherwise JAX runs the operations of the modules one by one, which is slow.
        """
        _, shared, layer = _graphs(config)
        layers = tuple(nnx.merge(layer, params) for params in self.layers)
        return nnx.merge(shared, self.shared), layers

    def adapters(self) -> DecodeParams:
        """Returns the LoRA adapters among these parameters; the arrays are not copied."""
        layers = tuple(
            unflatten_dict({path: x for path, x in flatten_dict(layer).items() if is_adapter(path)})
            for layer in self.layers
        )
        return DecodeParams({}, layers, self.kernels)

    def with_adapters(self, adapters: DecodeParams) -> DecodeParams:
        """Returns these parameters with the given adapters, which replace adapters that they have.

        No array is copied.

        Args:
            adapters: result of `DecodeParams.adapters`, for parameters of the same base model.
        """
        layers = tuple(map(join, self.layers, adapters.layers))
        return DecodeParams(self.shared, layers, self.kernels)


class Adapted(NamedTuple):
    """Parameters for training whose base is shared with the engines that decode.

    The base has the layout for decoding, so training and decoding need no copies of their own. A
    loop over layers picks the arrays of one layer at a time, which copies this layer. The copies
    have the layout for training, so the results do not depend on the layout of the base.

    Attributes:
        adapters: the adapters, in the layout for training; {} for the base alone.
        base: all other parameters, in the layout for decoding.
    """

    adapters: Params
    base: DecodeParams

    def bind(self, config: ModelConfig) -> tuple[Decoder, PickedLayers]:
        """Returns the decoder and its layers with these parameters, inside a compiled function."""
        _, shared, layer = _graphs(config)
        base, count = self.base, config.num_layers

        def pick(scanned: tuple[jax.Array, Params]) -> Layer:
            index, adapters = scanned
            own = jax.lax.switch(index, [functools.partial(_same, x) for x in base.layers])
            return nnx.merge(layer, join(_for_training(own, config, base.kernels), adapters))

        scanned = (jnp.arange(count), self.adapters.get("layers", {}))
        decoder = nnx.merge(shared, _for_training(base.shared, config, base.kernels))
        return decoder, PickedLayers(scanned, pick)

    def stacked(self, config: ModelConfig) -> Params:
        """Returns these parameters in the layout for training, and deletes the base.

        One array after the other is stacked over layers, so that there are never two copies.
        """
        base = self.base
        shared = jax.jit(lambda x: _for_training(x, config, base.kernels))(base.shared)
        made = flatten_dict(shared)
        for path in flatten_dict(base.layers[0]):
            own = [unflatten_dict({path: flatten_dict(layer)[path]}) for layer in base.layers]
            made["layers", *path] = launch_alone(
                mesh_of(jax.tree.leaves(own)[0]), _stack, own, config=config, kernels=base.kernels
            )
            for array in jax.tree.leaves(own):
                array.delete()
        return join(unflatten_dict(made), self.adapters)


def _same(params: Params) -> Params:
    return params


@functools.partial(jax.jit, static_argnames=("config", "kernels"))
def _stack(layers: list[Params], config: ModelConfig, kernels: KernelLayout) -> jax.Array:
    turned = [jax.tree.leaves(_for_training(layer, config, kernels))[0] for layer in layers]
    return jnp.stack(turned)


def _for_training(params: Params, config: ModelConfig, kernels: KernelLayout) -> Params:
    """Changes the order of the axes of a layer's parameters from a layout to that of training."""
    inputs, turned = inputs_of(config), {}
    for path, x in flatten_dict(params).items():
        order = _order(inputs.get(path, 0), x.ndim, kernels)
        turned[path] = jnp.transpose(x, sorted(range(x.ndim), key=order.__getitem__))
    return unflatten_dict(turned)


def is_adapter(path: Path) -> bool:
    """Returns whether the parameter at a path of `specs` belongs to an adapter.

    The path of a parameter of the layers may omit the key ``layers``.
    """
    return len(path) > 1 and path[-2].endswith("_lora")


def unstack(
    params: Params, config: ModelConfig, kernels: KernelLayout = "inputs_first"
) -> DecodeParams:
    """Converts training parameters to the layout for decoding.

    Args:
        params: parameters in the training layout, stacked over layers; or a part of them.
        config: the architecture.
        kernels: order of the axes of weight matrices in the result, see `compute.KernelLayout`.
    """
    shared = {key: value for key, value in params.items() if key != "layers"}
    stacked = params.get("layers", {})
    layers = tuple(jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(config.num_layers))
    inputs = inputs_of(config)

    def turned(params: Params) -> Params:
        return unflatten_dict(
            {
                path: jnp.transpose(x, _order(inputs.get(path, 0), x.ndim, kernels))
                for path, x in flatten_dict(params).items()
            }
        )

    return DecodeParams(turned(shared), tuple(map(turned, layers)), kernels)


def _order(inputs: int, axes: int, kernels: KernelLayout) -> tuple[int, ...]:
    """Returns the order in which a layout has the axes of an array ``[*in, *out]``.

    Args:
        inputs: number of axes of ``in``; 0 for an array that is no weight matrix, whose order does
            not change.
        axes: number of axes of the array.
        kernels: name of the layout.
    """
    places = tuple(range(axes))
    if inputs == 0 or kernels == "inputs_first":
        return places
    last = axes if kernels == "outputs_first" else axes - 1
    return places[inputs:last] + places[:inputs] + places[last:]


def inputs_of(config: ModelConfig) -> Mapping[Path, int]:
    """Returns a mapping from the path of each weight matrix to its number of input axes.

    The two matrices of an adapter are included. Paths inside the layers omit the key ``layers``.
    """
    module = _abstract(config)
    sizes = {}
    for path, value in nnx.iter_graph(module):
        keys = tuple(map(str, path))
        keys = keys[keys[:1] == ("layers",) :]
        if hasattr(value, "kernel"):
            sizes[(*keys, "kernel")] = value.inputs
        elif isinstance(value, Lora):
            sizes |= {(*keys, "a"): value.inputs, (*keys, "b"): 1}
    return sizes


# --- initial values ------------------------------------------------------------------------


def init_params(config: ModelConfig, key: jax.Array, dtype: str = "float32") -> Params:
    """Returns random parameters, including those of adapters.

    For a given architecture and dtype, the values depend only on the random key.

    Args:
        config: the architecture.
        key: random key.
        dtype: dtype of the parameters.
    """
    state = nnx.state(Decoder(config, rngs=nnx.Rngs(key)))
    return jax.tree.map(lambda x: x.astype(dtype), nnx.to_pure_dict(state))


def select(config: ModelConfig, params: Params, *, adapter: bool) -> Params:
    """Returns either the adapters among the parameters, or all other parameters.

    Args:
        config: the architecture.
        params: parameters with adapters.
        adapter: True to return the adapters, False to return all other parameters.
    """
    kinds, flat = specs(config), flatten_dict(params)
    return unflatten_dict({path: x for path, x in flat.items() if kinds[path].adapter == adapter})


def without_adapters(config: ModelConfig) -> ModelConfig:
    """Returns the architecture of a model without its adapters.

    The result describes parameters without adapters, also those into which adapters were merged.
    """
    return dataclasses.replace(config, lora=LoraConfig())


def split_trained(
    params: Params, config: ModelConfig, seed: int, mesh: Mesh | None = None
) -> tuple[Params, Params]:
    """Splits the parameters of a run into trained and frozen parameters.

    If the architecture has no adapters, all parameters are trained. Otherwise new adapters are
    trained, and all other parameters are frozen.

    Args:
        params: parameters of a model without adapters.
        config: the architecture, including the adapters that the run trains.
        seed: seed of the adapters' initial values.
        mesh: mesh of the run; None for the first device.

    Returns:
        The trained parameters, and the frozen parameters ({} without adapters; otherwise
        ``params`` itself). New adapters are float32.
    """
    if not config.lora.rank:
        return params, {}

    def adapters() -> Params:
        return select(config, init_params(config, jax.random.key(seed)), adapter=True)

    places = select(config, shardings(config, mesh), adapter=True)
    return jax.jit(adapters, out_shardings=places)(), params


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def merge_layer(config: ModelConfig, layer: Params, dtype: str) -> Params:
    """Adds the adapters of one layer to its weight matrices; the sums are computed in float32.

    Args:
        config: the architecture, with an adapter rank above 0.
        layer: parameters of one layer, with adapters.
        dtype: dtype of the result.

    Returns:
        The parameters of the layer without adapters.
    """
    module = nnx.merge(_graphs(config)[2], layer)
    merged = {path: x for path, x in flatten_dict(layer).items() if not is_adapter(path)}

    def add(kernel: Path, lora: Any, part: slice, axis: int) -> None:
        if lora is not None:
            a, b = lora.a[...], lora.b[...] * lora.scale
            delta = jnp.tensordot(a, b, axes=1, precision="highest")
            at = (slice(None),) * axis + (part,)
            w = merged[*kernel, "kernel"].astype(jnp.float32)
            merged[*kernel, "kernel"] = w.at[at].add(delta)

    g, attn, mlp = config.num_groups, module.attn, module.mlp
    add(("attn", "qkv"), attn.q_lora, slice(0, g), 2)
    add(("attn", "qkv"), attn.k_lora, slice(g, g + 1), 2)
    add(("attn", "qkv"), attn.v_lora, slice(g + 1, g + 2), 2)
    add(("attn", "out"), attn.o_lora, slice(None), 0)
    add(("mlp", "gate_up"), mlp.gate_lora, slice(0, 1), 1)
    add(("mlp", "gate_up"), mlp.up_lora, slice(1, 2), 1)
    add(("mlp", "down"), mlp.down_lora, slice(None), 0)
    return unflatten_dict({path: x.astype(dtype) for path, x in merged.items()})


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def _merge_program(config: ModelConfig, params: Params, dtype: str) -> Params:
    shared = {key: value for key, value in params.items() if key != "layers"}
    layers = jax.lax.map(lambda layer: merge_layer(config, layer, dtype), params["layers"])
    return {**jax.tree.map(lambda x: x.astype(dtype), shared), "layers": layers}


def merge_adapters(config: ModelConfig, params: Params, dtype: str | None = None) -> Params:
    """Adds the LoRA adapters of a model to its weight matrices.

    Args:
        config: the architecture.
        params: parameters with or without adapters.
        dtype: dtype of all returned parameters; None for the dtype of ``params``. The sums are
            computed in float32.

    Returns:
        Parameters without adapters; ``params`` itself, in its dtype, if the model has no adapters.
    """
    if not config.lora.rank:
        return params
    mesh = mesh_of(jax.tree.leaves(params)[0])
    return launch_alone(mesh, _merge_program, config, params, dtype or str(param_dtype(params)))


# --- placement -----------------------------------------------------------------------------


def shardings(config: ModelConfig, mesh: Mesh | AbstractMesh | None) -> Any:
    """Returns the sharding of each parameter as a nested dict.

    Args:
        config: the architecture.
        mesh: mesh of the run; None places all parameters on the first device.
    """
    if mesh is None:
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return unflatten_dict(dict.fromkeys(specs(config), device))
    return unflatten_dict(
        {p: sharding_for(mesh, s.axes, shape=s.shape) for p, s in specs(config).items()}
    )


def decode_shardings(
    config: ModelConfig, mesh: Mesh | AbstractMesh, kernels: KernelLayout = "inputs_first"
) -> DecodeParams:
    """Returns the sharding of each parameter in the layout for decoding, by `DECODE_RULES`.

    Args:
        config: the architecture.
        mesh: mesh of the devices that decode.
        kernels: order of the axes of weight matrices, see `compute.KernelLayout`.
    """
    inputs = inputs_of(config)

    def place(path: Path, spec: Spec) -> NamedSharding:
        first = int(path[0] == "layers")
        axes, shape = spec.axes[first:], spec.shape[first:]
        order = _order(inputs.get(path[first:], 0), len(axes), kernels)
        return sharding_for(mesh, [axes[i] for i in order], DECODE_RULES, [shape[i] for i in order])

    places = unflatten_dict({path: place(path, spec) for path, spec in specs(config).items()})
    layer = places.pop("layers")
    return DecodeParams(places, (layer,) * config.num_layers, kernels)


def abstract_params(config: ModelConfig, mesh: Mesh | None) -> Params:
    """Returns the shapes and shardings of float32 training parameters, without their values."""
    shapes = unflatten_dict({path: spec.shape for path, spec in specs(config).items()})
    return jax.tree.map(
        lambda sharding, shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding),
        shardings(config, mesh),
        shapes,
    )
