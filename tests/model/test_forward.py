"""Golden and equivalence tests of the forward pass."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coa_jax.model.api import load_model
from coa_jax.model.cache import Cache, init_layers
from coa_jax.model.forward import forward, unembed
from coa_jax.model.weights import unstack_layers

RNG = np.random.default_rng(1)


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def apply(params, config, tokens, positions, segment_ids=None, cache=None, dtype=jnp.float32):
    hidden, cache = forward(
        params, config, tokens, positions, segment_ids=segment_ids, cache=cache, dtype=dtype
    )
    return unembed(params, config, hidden, dtype=dtype), cache


def run(model, tokens, positions, **options):
    tokens, positions = jnp.asarray(tokens), jnp.asarray(positions)
    return np.asarray(apply(model.params, model.config, tokens, positions, **options)[0])


@pytest.mark.parametrize("family", ["qwen3-head-dim", "llama3-rope"])
def test_packed_segments_equal_separate_sequences(references, family):
    model = load_model(references[family].path)
    lengths = (5, 17, 1, 9)
    rows = RNG.integers(0, 384, (len(lengths), max(lengths)))
    packed = np.concatenate([row[:n] for row, n in zip(rows, lengths, strict=True)])[None]
    positions = np.concatenate([np.arange(n) for n in lengths])[None]
    segments = np.repeat(np.arange(len(lengths)), lengths)[None]
    together = run(model, packed, positions, segment_ids=jnp.asarray(segments))[0]
    # What follows a row's own tokens cannot reach back, so the rows need no mask here.
    alone = run(model, rows, np.broadcast_to(np.arange(rows.shape[1]), rows.shape))
    expected = np.concatenate([row[:n] for row, n in zip(alone, lengths, strict=True)])
    np.testing.assert_allclose(together, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", ["qwen2", "qwen3-head-dim", "llama-untied", "llama3-rope"])
def test_chunks_through_a_cache_equal_one_pass(references, family):
    """Rows are ragged: each has its own length before every chunk."""
    model = load_model(references[family].path)
    tokens = RNG.integers(0, 384, (2, 24))
    full = run(model, tokens, np.broadcast_to(np.arange(24), (2, 24)))
    params = unstack_layers(model.params, model.config)
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
        out, cache = apply(params, model.config, jnp.asarray(rows), positions, cache=cache)
        for row, size in enumerate(sizes):
            expected = full[row, start[row] : start[row] + size]
            np.testing.assert_allclose(out[row, :size], expected, rtol=0, atol=3e-5)
        start += np.array(sizes)
    assert start.tolist() == [24, 24]


@functools.partial(jax.jit, static_argnames=("config", "dtype", "remat"))
@jax.grad
def gradient(params, config, tokens, dtype=jnp.float32, remat=False):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = forward(params, config, tokens, positions, dtype=dtype, remat=remat)
    logp = jax.nn.log_softmax(unembed(params, config, hidden, dtype=dtype)[:, :-1])
    return -jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1).mean()


@pytest.mark.parametrize("family", ["qwen2-untied", "qwen3-head-dim"])
def test_bfloat16_products_are_close_to_float32(references, family):
    model = load_model(references[family].path)
    tokens = jnp.asarray(RNG.integers(0, 384, (2, 40)))
    positions = np.broadcast_to(np.arange(40), (2, 40))
    exact = np.asarray(run(model, tokens, positions))
    rounded = np.asarray(run(model, tokens, positions, dtype=jnp.bfloat16))
    assert rounded.dtype == np.float32
    assert np.linalg.norm(rounded - exact) < 0.03 * np.linalg.norm(exact)
    assert np.linalg.norm(rounded - exact) > 0  # the products did run in bfloat16


@pytest.mark.parametrize(
    "family", [pytest.param("qwen2-untied", marks=pytest.mark.slow), "qwen3-head-dim"]
)
def test_bfloat16_gradients_point_the_way_of_float32_ones(references, family):
    model = load_model(references[family].path)
    tokens = jnp.asarray(RNG.integers(0, 384, (2, 40)))
    exact = gradient(model.params, model.config, tokens)
    rounded = gradient(model.params, model.config, tokens, dtype=jnp.bfloat16)

    def check(path, a, b):
        assert b.dtype == jnp.float32
        error = np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(np.asarray(a))
        assert 0 < error < 0.06, (path, error)

    jax.tree_util.tree_map_with_path(check, exact, rounded)


def test_gradients_equal_torch_with_and_without_remat(references):
    torch = pytest.importorskip("torch")
    reference = references["qwen2"]
    model = load_model(reference.path)
    tokens = RNG.integers(0, 384, (2, 20))
    net = reference.torch_model
    net.zero_grad()
    logp = torch.log_softmax(net(torch.tensor(tokens)).logits[:, :-1], -1)
    (-logp.gather(-1, torch.tensor(tokens)[:, 1:, None]).mean()).backward()
    attention = net.model.layers[2].self_attn
    pairs = (
        (("embed",), net.model.embed_tokens.weight.grad),
        (("layers", "down", 1), net.model.layers[1].mlp.down_proj.weight.grad.T),
        (("layers", "gate_up", 0, np.s_[:, 1]), net.model.layers[0].mlp.up_proj.weight.grad.T),
        (("layers", "qkv", 2, np.s_[:, 1, 3]), attention.v_proj.weight.grad[12:].T),
        (("layers", "qkv_bias", 2, np.s_[0, 2]), attention.k_proj.bias.grad[:12]),
    )
    for remat in (False, True):
        ours = gradient(model.params, model.config, jnp.asarray(tokens), remat=remat)
        for path, expected in pairs:
            actual, expected = functools.reduce(lambda x, key: x[key], path, ours), expected.numpy()
            # The bias of keys has no effect but through rotary positions: a tiny gradient.
            atol = 1e-5 * max(np.abs(expected).max(), 0.01)
            np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)
    net.zero_grad()
