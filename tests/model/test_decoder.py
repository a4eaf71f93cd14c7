"""Golden and equivalence tests of the decoder."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coa_jax.model.api import load_model
from coa_jax.model.cache import Cache, init_layers
from coa_jax.model.compute import REFERENCE, Compute
from coa_jax.model.config import LoraConfig, ModelConfig
from coa_jax.model.decoder import Decoder
from coa_jax.model.params import bind, init_params, unstack
from tests.model.conftest import FAMILIES, in_turn

RNG = np.random.default_rng(1)


@functools.partial(jax.jit, static_argnames=("config", "compute"))
def apply(params, config, tokens, positions, compute, segment_ids=None):
    decoder = bind(config, params)
    hidden, _ = decoder(tokens, positions, compute, segment_ids=segment_ids)
    return decoder.logits(hidden, compute)


def run(model, tokens, positions, compute=REFERENCE, **options):
    tokens, positions = jnp.asarray(tokens), jnp.asarray(positions)
    return np.asarray(apply(model.params, model.config, tokens, positions, compute, **options))


@in_turn("family", "qwen3-head-dim", "llama3-rope", "gemma3")
def test_packed_segments_equal_separate_sequences(references, family, backend):
    model, compute = load_model(references[family].path), Compute(backend=backend)
    lengths = (5, 17, 1, 9)
    rows = RNG.integers(0, 384, (len(lengths), max(lengths)))
    packed = np.concatenate([row[:n] for row, n in zip(rows, lengths, strict=True)])[None]
    positions = np.concatenate([np.arange(n) for n in lengths])[None]
    segments = np.repeat(np.arange(len(lengths)), lengths)[None]
    together = run(model, packed, positions, compute, segment_ids=jnp.asarray(segments))[0]
    # What follows a row's own tokens cannot reach back, so the rows need no mask here.
    alone = run(model, rows, np.broadcast_to(np.arange(rows.shape[1]), rows.shape), compute)
    expected = np.concatenate([row[:n] for row, n in zip(alone, lengths, strict=True)])
    np.testing.assert_allclose(together, expected, rtol=0, atol=2e-5)


@functools.partial(jax.jit, static_argnames=("config", "compute"))
def step(params, config, tokens, positions, cache, compute):
    decoder, layers = params.bind(config)
    hidden, cache = decoder(tokens, positions, compute, layers=layers, cache=cache)
    return decoder.logits(hidden, compute), cache


@in_turn(
    "case",
    ("qwen2", "matrices"),
    ("qwen3-yarn", "outputs_first"),
    ("llama3-rope", "inputs_first"),
    ("gemma3", "matrices"),
    slow=[
        ("llama-untied", "outputs_first"),
        ("qwen2", "outputs_first"),
        ("qwen3-yarn", "matrices"),
        ("llama-untied", "inputs_first"),
        ("llama3-rope", "outputs_first"),
        ("gemma3", "outputs_first"),
    ],
)
def test_chunks_through_a_cache_equal_one_pass(references, case, backend):
    """Rows are ragged: each has its own length before every chunk."""
    family, kernels = case
    model = load_model(references[family].path)
    tokens = RNG.integers(0, 384, (2, 24))
    full = run(model, tokens, np.broadcast_to(np.arange(24), (2, 24)))
    params = unstack(model.params, model.config, kernels)
    compute = Compute(backend=backend, kernels=kernels)
    # More cache than is needed, full of rubbish: what is not valid must not be read.
    layers = jax.tree.map(lambda c: c + 7.0, init_layers(model.config, 8, 8))
    cache = Cache(layers, jnp.arange(8).reshape(2, 4))
    start, steps = np.array([0, 0]), np.arange(16)
    for sizes in ((9, 6), (1, 1), (1, 1), (13, 16)):
        positions = start[:, None] + steps
        valid = steps < np.array(sizes)[:, None]
        rows = np.take_along_axis(tokens, np.minimum(positions, 23), axis=1)
        # A position outside the cache is dropped, which is how short rows are padded.
        positions = jnp.asarray(np.where(valid, positions, 32))
        out, cache = step(params, model.config, jnp.asarray(rows), positions, cache, compute)
        for row, size in enumerate(sizes):
            expected = full[row, start[row] : start[row] + size]
            np.testing.assert_allclose(out[row, :size], expected, rtol=0, atol=3e-5)
        start += np.array(sizes)
    assert start.tolist() == [24, 24]


@pytest.mark.parametrize("family", ["qwen3-yarn", "gemma3"])
def test_layers_one_by_one_are_those_of_the_stack(references, family):
    model = load_model(references[family].path)
    tokens, positions = RNG.integers(0, 384, (2, 24)), np.arange(24)

    @jax.jit
    def one_by_one(params):
        decoder, layers = params.bind(model.config)
        hidden, cache = decoder(tokens, positions, REFERENCE, layers=layers)
        assert cache is None
        return decoder.logits(hidden, REFERENCE)

    expected = run(model, tokens, np.broadcast_to(positions, tokens.shape))
    found = one_by_one(unstack(model.params, model.config))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


@functools.partial(jax.jit, static_argnames=("config", "compute"))
@jax.grad
def gradient(params, config, tokens, compute=REFERENCE):
    decoder = bind(config, params)
    hidden, _ = decoder(tokens, jnp.arange(tokens.shape[1]), compute)
    logp = jax.nn.log_softmax(decoder.logits(hidden, compute)[:, :-1])
    return -jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1).mean()


def near(actual, expected, tolerance=1e-5):
    """Within a part of the largest value."""
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.usefixtures("cpu_ops")
@pytest.mark.parametrize(
    "family",
    [n if n in ("qwen2", "gemma3") else pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES],
)
def test_both_backends_have_the_same_logits_and_gradients(references, family):
    model = load_model(references[family].path)
    tokens = jnp.asarray(RNG.integers(0, 384, (2, 40)))
    found = [
        (
            run(model, tokens, np.broadcast_to(np.arange(40), (2, 40)), compute),
            gradient(model.params, model.config, tokens, compute),
        )
        for compute in (Compute(backend="cpu"), Compute(backend="reference"))
    ]
    largest = max(np.abs(x).max() for x in jax.tree.leaves(found[1][1]))
    near(found[0][0], found[1][0])
    jax.tree.map(
        # Biases of keys have no effect but through rotary positions: a tiny gradient.
        lambda a, b: np.testing.assert_allclose(
            a, b, rtol=0, atol=1e-5 * max(np.abs(b).max(), 1e-3 * largest)
        ),
        *(gradients for _, gradients in found),
    )


@in_turn("family", "qwen2-untied", "qwen3-head-dim")
def test_bfloat16_products_are_close_to_float32(references, family, backend):
    model = load_model(references[family].path)
    tokens = jnp.asarray(RNG.integers(0, 384, (2, 40)))
    positions = np.broadcast_to(np.arange(40), (2, 40))
    exact = run(model, tokens, positions)
    rounded = run(model, tokens, positions, Compute("bfloat16", backend=backend))
    assert rounded.dtype == np.float32
    assert np.linalg.norm(rounded - exact) < 0.03 * np.linalg.norm(exact)
    assert np.linalg.norm(rounded - exact) > 0  # the products did run in bfloat16


@in_turn("family", "qwen3-head-dim", slow=["qwen2-untied", "gemma3"])
def test_bfloat16_gradients_point_the_way_of_float32_ones(references, family, backend):
    model = load_model(references[family].path)
    tokens = jnp.asarray(RNG.integers(0, 384, (2, 40)))
    exact = gradient(model.params, model.config, tokens)
    rounded = gradient(model.params, model.config, tokens, Compute("bfloat16", backend=backend))

    def check(path, a, b):
        assert b.dtype == jnp.float32
        error = np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(np.asarray(a))
        assert 0 < error < 0.06, (path, error)

    jax.tree_util.tree_map_with_path(check, exact, rounded)


@in_turn("remat", "full", "none")
def test_gradients_equal_torch_with_and_without_remat(references, backend, remat):
    torch = pytest.importorskip("torch")
    reference = references["qwen2"]
    model = load_model(reference.path)
    # Without the padding token 2, whose embedding has no gradient in PyTorch.
    tokens = RNG.integers(3, 384, (2, 20))
    net = reference.torch_model
    net.zero_grad()
    logp = torch.log_softmax(net(torch.tensor(tokens)).logits[:, :-1], -1)
    (-logp.gather(-1, torch.tensor(tokens)[:, 1:, None]).mean()).backward()
    attention, mlp = net.model.layers[2].self_attn, net.model.layers
    pairs = (
        (("embed", "embedding"), net.model.embed_tokens.weight.grad),
        (("layers", "mlp", "down", "kernel", 1), mlp[1].mlp.down_proj.weight.grad.T),
        (
            ("layers", "mlp", "gate_up", "kernel", 0, np.s_[:, 1]),
            mlp[0].mlp.up_proj.weight.grad.T,
        ),
        (
            ("layers", "attn", "qkv", "kernel", 2, np.s_[:, 1, 3]),
            attention.v_proj.weight.grad[12:].T,
        ),
        (("layers", "attn", "qkv", "bias", 2, np.s_[0, 2]), attention.k_proj.bias.grad[:12]),
    )
    compute = Compute(remat=remat, backend=backend)
    ours = gradient(model.params, model.config, jnp.asarray(tokens), compute)
    for path, expected in pairs:
        actual, expected = functools.reduce(lambda x, key: x[key], path, ours), expected.numpy()
        # The bias of keys has no effect but through rotary positions: a tiny gradient.
        atol = 1e-5 * max(np.abs(expected).max(), 0.01)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)
    net.zero_grad()


@pytest.mark.slow
def test_a_tied_embedding_is_one_array_whose_gradient_is_that_of_both_uses(references, backend):
    tied, compute = load_model(references["qwen3-head-dim"].path), Compute(backend=backend)
    untied = dataclasses.replace(tied.config, tie_embeddings=False)
    table = tied.params["embed"]["embedding"]
    shapes = [x.shape for x in jax.tree.leaves(tied.params)]
    assert "head" not in tied.params and shapes.count(table.shape) == 1
    tokens = jnp.asarray(RNG.integers(0, 384, (2, 20)))
    ours = gradient(tied.params, tied.config, tokens, compute)
    apart = gradient({**tied.params, "head": {"kernel": table.T}}, untied, tokens, compute)
    uses = apart["embed"]["embedding"], apart.pop("head")["kernel"].T
    assert all(np.abs(use).max() > 0.01 * np.abs(uses[0] + uses[1]).max() for use in uses)
    near(ours["embed"]["embedding"], uses[0] + uses[1])
    jax.tree.map(near, ours["layers"], apart["layers"])


# --- modules -------------------------------------------------------------------------------


def variables(module):
    """(Path, variable) of all parameters of a module."""
    return dict(nnx.to_flat_state(nnx.state(module)))


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=3)])
def test_stacked_parameters_have_the_axis_of_layers_in_their_names(lora):
    config = ModelConfig("qwen3", 70, 24, 40, 5, 4, 2, 8, qk_norm=True, qkv_bias=True, lora=lora)
    whole = variables(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    assert {path[0] for path in whole} == {"embed", "layers", "final_norm"}
    for path, value in whole.items():
        axes = value.get_metadata("out_sharding")
        assert len(axes) == len(value.shape), path
        assert (axes[0] == "layers") == (path[0] == "layers"), path
        assert axes.count("layers") == (path[0] == "layers")
        assert value.shape[0] == 5 or path[0] != "layers", path
    kernel = whole["layers", "attn", "qkv", "kernel"]
    assert kernel.get_metadata("out_sharding") == ("layers", "embed", "kv_heads", "qkv", "head")
    # A decoder without layers has the rest of them.
    rest = variables(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), stacked=False)))
    assert {*rest} == {path for path in whole if path[0] != "layers"}


def test_layers_are_scanned_and_compile_once_for_any_depth():
    def products(layers):
        config = ModelConfig("llama", 70, 24, 40, layers, 4, 2, 8)
        params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
        tokens = jax.ShapeDtypeStruct((1, 8), "int32")
        lowered = apply.lower(params, config, tokens, tokens, REFERENCE)
        return len(re.findall("stablehlo.dot_general", lowered.as_text()))

    assert products(2) == products(9) > 4
