"""Parameters are nested dicts whose shapes, axes and kinds follow from the modules."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from coa_jax.model.compute import REFERENCE
from coa_jax.model.config import PROJECTIONS, LoraConfig, ModelConfig
from coa_jax.model.params import (
    DecodeParams,
    abstract_params,
    bind,
    decode_shardings,
    init_params,
    inputs_of,
    join,
    num_params,
    select,
    shardings,
    specs,
    split_trained,
    unstack,
    without_adapters,
)
from coa_jax.parallel.mesh import AXES, make_mesh
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.train.step import init_state

MODEL = ModelConfig(
    *("qwen3", 70, 24, 40, 3, 4, 2, 6), qkv_bias=True, qk_norm=True, tie_embeddings=False
)
ADAPTED = dataclasses.replace(MODEL, lora=LoraConfig(rank=3))
TIED = dataclasses.replace(MODEL, tie_embeddings=True)
MESH = AbstractMesh((1, 2, 2), AXES, axis_types=(AxisType.Auto,) * 3)
each_model = pytest.mark.parametrize("config", [MODEL, ADAPTED, TIED], ids=["", "lora", "tied"])


@functools.cache
def params(config=MODEL):
    return jax.jit(init_params, static_argnums=0)(config, jax.random.key(0))


def paths(tree):
    return set(flatten_dict(tree))


def test_names_shapes_and_axes_are_those_of_the_architecture():
    n, g, k = 2, 2, 6
    expected = {
        ("embed", "embedding"): ((70, 24), ("vocab", "embed")),
        ("head", "kernel"): ((24, 70), ("embed", "vocab")),
        ("final_norm", "scale"): ((24,), ("embed",)),
        ("layers", "attn_norm", "scale"): ((3, 24), ("layers", "embed")),
        ("layers", "mlp_norm", "scale"): ((3, 24), ("layers", "embed")),
        ("layers", "attn", "q_norm", "scale"): ((3, k), ("layers", "head")),
        ("layers", "attn", "k_norm", "scale"): ((3, k), ("layers", "head")),
        ("layers", "attn", "qkv", "kernel"): (
            (3, 24, n, g + 2, k),
            ("layers", "embed", "kv_heads", "qkv", "head"),
        ),
        ("layers", "attn", "qkv", "bias"): (
            (3, n, g + 2, k),
            ("layers", "kv_heads", "qkv", "head"),
        ),
        ("layers", "attn", "out", "kernel"): (
            (3, n, g, k, 24),
            ("layers", "kv_heads", "groups", "head", "embed"),
        ),
        ("layers", "mlp", "gate_up", "kernel"): (
            (3, 24, 2, 40),
            ("layers", "embed", "gate", "mlp"),
        ),
        ("layers", "mlp", "down", "kernel"): ((3, 40, 24), ("layers", "mlp", "embed")),
    }
    assert {path: (s.shape, s.axes) for path, s in specs(MODEL).items()} == expected
    plain = ModelConfig("llama", 70, 24, 40, 3, 4, 2, 6)
    missing = {("head", "kernel"), ("layers", "attn", "qkv", "bias")}
    missing |= {("layers", "attn", f"{name}_norm", "scale") for name in "qk"}
    assert {*specs(plain)} == {*expected} - missing


@each_model
def test_parameters_are_plain_nested_dicts_of_what_the_specs_say(config):
    tree = params(config)
    assert [(path, x.shape) for path, x in flatten_dict(tree).items()] == [
        (path, spec.shape) for path, spec in specs(config).items()
    ]
    leaves = jax.tree.leaves(tree)
    assert [x.shape for x in leaves] == [spec.shape for spec in specs(config).values()]
    assert num_params(config) == sum(x.size for x in leaves)
    assert {type(x).__name__ for x in leaves} == {"ArrayImpl"}


@each_model
def test_tree_definitions_name_no_class_of_a_model(config):
    modules = {
        name
        for module in ("decoder", "linear")
        for name, value in vars(__import__(f"coa_jax.model.{module}", fromlist="_")).items()
        if isinstance(value, type) and issubclass(value, nnx.Module)
    }
    assert {"Decoder", "Layer", "Linear", "Lora"} < modules
    kept = params(without_adapters(config))
    trained, frozen = split_trained(kept, config, seed=0)
    optimizer = OptimizerConfig(learning_rate=1e-3, total_steps=4)
    state = init_state(trained, optimizer, frozen)
    for tree in (params(config), state, unstack(kept, without_adapters(config))):
        text = str(jax.tree.structure(tree))
        assert not [name for name in (*modules, "Param", "State", "nnx") if f"{name}(" in text]
        assert "<class" not in text and "flax" not in text

    def plain(node):
        assert type(node) is dict
        for value in node.values():
            assert isinstance(value, jax.Array) or plain(value) is None

    plain(state.params)
    plain(state.frozen)
    moments = [x for x in jax.tree.leaves(state.opt_state, is_leaf=lambda x: type(x) is dict)
               if type(x) is dict]  # fmt: skip
    assert len(moments) == 2
    for moment in moments:
        assert jax.tree.structure(moment) == jax.tree.structure(state.params)


@pytest.mark.slow
def test_initial_values_have_the_deviations_that_are_said_and_follow_from_the_key():
    config = ModelConfig("llama", 512, 96, 256, 8, 8, 4, 16, qkv_bias=True, tie_embeddings=False)
    first, again, other = (
        flatten_dict(jax.jit(init_params, static_argnums=0)(config, jax.random.key(seed)))
        for seed in (0, 0, 1)
    )
    residual = {("layers", "attn", "out", "kernel"), ("layers", "mlp", "down", "kernel")}
    for path, x in first.items():
        np.testing.assert_array_equal(x, again[path])
        if path[-1] == "scale":
            assert (x == 1).all()
        elif path[-1] == "bias":
            assert not x.any()
        else:
            expected = 0.02 / 4 if path in residual else 0.02
            assert np.std(x) == pytest.approx(expected, rel=0.03), path
            assert np.abs(x - other[path]).max() > expected
    # Layers differ too.
    kernel = first["layers", "mlp", "down", "kernel"]
    assert np.corrcoef(kernel[0].reshape(-1), kernel[1].reshape(-1))[0, 1] < 0.05


def test_the_dtype_of_initial_values_is_the_one_asked_for():
    made = jax.eval_shape(lambda: init_params(MODEL, jax.random.key(0), "bfloat16"))
    assert {x.dtype.name for x in jax.tree.leaves(made)} == {"bfloat16"}


# --- kinds ---------------------------------------------------------------------------------


def test_adapters_are_told_from_other_parameters():
    found = specs(ADAPTED)
    homes = {name: "attn" if name in "qkvo" else "mlp" for name in PROJECTIONS}
    expected = {
        ("layers", home, f"{name}_lora", part) for name, home in homes.items() for part in "ab"
    }
    assert {path for path, spec in found.items() if spec.adapter} == expected
    assert {path for path, spec in found.items() if not spec.adapter} == {*specs(MODEL)}
    assert not any(spec.adapter for spec in specs(MODEL).values())
    some = dataclasses.replace(MODEL, lora=LoraConfig(rank=2, projections=("v", "up")))
    assert {path[2] for path, spec in specs(some).items() if spec.adapter} == {"v_lora", "up_lora"}
    shapes = {path[2:]: found[path].shape for path in expected}
    assert shapes["q_lora", "a"] == (3, 24, 3) and shapes["q_lora", "b"] == (3, 3, 2, 2, 6)
    assert shapes["k_lora", "b"] == (3, 3, 2, 1, 6)
    assert shapes["o_lora", "a"] == (3, 2, 2, 6, 3) and shapes["down_lora", "b"] == (3, 3, 24)


def test_parts_that_are_selected_join_to_the_whole():
    whole = params(ADAPTED)
    adapters, rest = (select(ADAPTED, whole, adapter=kind) for kind in (True, False))
    assert paths(rest) == {*specs(MODEL)}
    jax.tree.map(np.testing.assert_array_equal, join(adapters, rest), whole)
    assert unflatten_dict(flatten_dict(rest)).keys() == {"embed", "layers", "final_norm", "head"}


def test_a_run_trains_adapters_or_the_whole_model():
    whole = params()
    assert split_trained(whole, MODEL, seed=0) == (whole, {})
    adapters, frozen = split_trained(whole, ADAPTED, seed=0)
    assert frozen is whole and paths(adapters) == paths(
        select(ADAPTED, params(ADAPTED), adapter=True)
    )
    again, other = (split_trained(whole, ADAPTED, seed=seed)[0] for seed in (0, 1))
    jax.tree.map(np.testing.assert_array_equal, adapters, again)
    a, b = (tree["layers"]["attn"]["q_lora"]["a"] for tree in (adapters, other))
    assert np.abs(a - b).max() > 0.1


# --- modules -------------------------------------------------------------------------------


def test_a_module_has_the_parameters_it_is_bound_to():
    decoder = bind(ADAPTED, params(ADAPTED))
    state = nnx.to_pure_dict(nnx.state(decoder))
    jax.tree.map(np.testing.assert_array_equal, state, params(ADAPTED))
    # Without adapters the same architecture is that of the model itself.
    assert bind(MODEL, params(MODEL)).layers.attn.q_lora is None
    assert bind(ADAPTED, params(ADAPTED)).layers.attn.q_lora is not None


def test_parameters_of_another_architecture_are_refused():
    for config in (TIED, dataclasses.replace(MODEL, qk_norm=False)):
        with pytest.raises(ValueError):
            bind(config, params())
        with pytest.raises(ValueError):
            bind(MODEL, params(config))


def test_plain_transformations_take_modules_that_are_bound_within():
    tokens = jnp.arange(8)[None]

    @jax.jit
    @jax.value_and_grad
    def loss(tree):
        decoder = bind(MODEL, tree)
        hidden, _ = decoder(tokens, jnp.arange(8), REFERENCE)
        return jnp.mean(decoder.logits(hidden, REFERENCE) ** 2)

    value, gradients = loss(params())
    assert value > 0
    assert jax.tree.structure(gradients) == jax.tree.structure(params())
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(gradients))


# --- the layout of decoding ----------------------------------------------------------------


@pytest.mark.parametrize("config", [MODEL, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("kernels", ["inputs_first", "outputs_first", "matrices"])
def test_each_layer_has_arrays_of_its_own_for_decoding(config, kernels):
    tree = unstack(params(config), config, kernels)
    assert tree.kernels == kernels
    assert len(tree.layers) == 3
    stacked = {
        path[1:]: x for path, x in flatten_dict(params(config)).items() if path[0] == "layers"
    }
    for i, layer in enumerate(tree.layers):
        for path, x in flatten_dict(layer).items():
            inputs = {"qkv": 1, "out": 3, "gate_up": 1, "down": 1}.get(path[-2], 0)
            if path[-1] == "kernel" and kernels == "outputs_first":
                x = jnp.moveaxis(x, range(-inputs, 0), range(inputs))
            if path[-2:] in (("qkv", "kernel"), ("gate_up", "kernel")) and kernels == "matrices":
                x = jnp.moveaxis(x, -2, 0)
            np.testing.assert_array_equal(x, stacked[path][i])
    head = tree.shared.get("head", {}).get("kernel")
    assert (head is None) == config.tie_embeddings
    if head is not None:
        assert head.shape == ((70, 24) if kernels == "outputs_first" else (24, 70))
    assert tree.shared["embed"]["embedding"].shape == (70, 24)
    decoder, layers = tree.bind(config)
    assert len(layers) == 3 and not hasattr(decoder, "layers")


def test_kernels_know_how_many_of_their_axes_are_inputs():
    assert inputs_of(MODEL) == {
        ("attn", "qkv", "kernel"): 1,
        ("attn", "out", "kernel"): 3,
        ("mlp", "gate_up", "kernel"): 1,
        ("mlp", "down", "kernel"): 1,
        ("head", "kernel"): 1,
    }


# --- places --------------------------------------------------------------------------------


@each_model
def test_places_have_the_form_of_the_parameters(config):
    form = jax.tree.structure(params(config))
    for mesh in (None, make_mesh(), MESH):
        assert jax.tree.structure(shardings(config, mesh)) == form
    placed = shardings(config, MESH)
    assert placed["layers"]["mlp"]["down"]["kernel"].spec == P(None, "tensor", "fsdp")
    assert placed["layers"]["attn"]["out"]["kernel"].spec == P(None, "tensor", None, None, "fsdp")
    abstract = abstract_params(config, make_mesh())
    assert jax.tree.structure(abstract) == form
    for x, wanted in zip(jax.tree.leaves(abstract), jax.tree.leaves(params(config)), strict=True):
        assert (x.shape, x.dtype) == (wanted.shape, jnp.float32)
        assert x.sharding.mesh.shape == make_mesh().shape


@each_model
def test_places_of_decoding_have_the_form_of_its_layout(config):
    tree = jax.eval_shape(lambda: unstack(params(config), config))
    places = decode_shardings(config, MESH)
    assert isinstance(places, DecodeParams)
    shards = jax.tree.map(lambda x, place: place.shard_shape(x.shape), tree, places)
    # fsdp splits nothing.
    assert shards.layers[1]["attn"]["qkv"]["kernel"] == (24, 1, 4, 6)
    assert shards.layers[2]["mlp"]["down"]["kernel"] == (20, 24)
    if not config.tie_embeddings:
        assert shards.shared["head"]["kernel"] == (24, 35)
