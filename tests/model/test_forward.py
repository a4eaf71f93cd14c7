"""Golden and equivalence tests of the forward pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.model.conftest import FAMILIES

from coa_jax.model.api import load_model
from coa_jax.model.forward import forward, init_cache, unembed
from coa_jax.model.weights import unstack_layers

RNG = np.random.default_rng(1)


def run(model, tokens, positions, **options):
    hidden, _ = forward(
        model.params, model.config, jnp.asarray(tokens), jnp.asarray(positions), **options
    )
    return unembed(model.params, model.config, hidden, dtype=options.get("dtype", jnp.float32))


@pytest.mark.parametrize("family", ["qwen2", "qwen3-head-dim", "llama3-rope"])
def test_packed_segments_equal_separate_sequences(references, family):
    model = load_model(references[family].path)
    lengths = (5, 17, 1, 9)
    parts = [RNG.integers(0, 384, (1, n)) for n in lengths]
    packed = np.concatenate(parts, axis=1)
    positions = np.concatenate([np.arange(n) for n in lengths])[None]
    segments = np.repeat(np.arange(len(lengths)), lengths)[None]
    together = run(model, packed, positions, segment_ids=jnp.asarray(segments))
    alone = [run(model, part, np.arange(part.shape[1])[None]) for part in parts]
    np.testing.assert_allclose(together, np.concatenate(alone, axis=1), rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_through_a_cache_equal_one_pass(references, family):
    """Rows are ragged: each has its own length before every chunk."""
    model = load_model(references[family].path)
    tokens = RNG.integers(0, 384, (2, 24))
    full = run(model, tokens, np.broadcast_to(np.arange(24), (2, 24)))
    params = unstack_layers(model.params, model.config)
    # More cache than is needed: positions after the valid ones must not be read.
    cache = jax.tree.map(lambda c: c + 7.0, init_cache(model.config, 2, 32))
    start = np.array([0, 0])
    for sizes in ((9, 6), (1, 1), (1, 1), (13, 16)):
        width = max(sizes)
        steps = np.arange(width)
        positions = start[:, None] + steps
        valid = steps < np.array(sizes)[:, None]
        rows = np.take_along_axis(tokens, np.minimum(positions, 23), axis=1)
        # A position outside the cache is dropped, which is how short rows are padded.
        hidden, cache = forward(
            params,
            model.config,
            jnp.asarray(rows),
            jnp.asarray(np.where(valid, positions, 32)),
            cache=cache,
        )
        out = unembed(params, model.config, hidden)
        for row, size in enumerate(sizes):
            expected = full[row, start[row] : start[row] + size]
            np.testing.assert_allclose(out[row, :size], expected, rtol=0, atol=3e-5)
        start += np.array(sizes)
    assert start.tolist() == [24, 24]


def loss(params, config, tokens, dtype, remat=False):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = forward(params, config, tokens, positions, dtype=dtype, remat=remat)
    logp = jax.nn.log_softmax(unembed(params, config, hidden, dtype=dtype)[:, :-1])
    return -jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1).mean()


@pytest.mark.parametrize("family", ["qwen2-untied", "qwen3-head-dim", "llama-tied"])
def test_bfloat16_products_are_close_to_float32(references, family):
    model = load_model(references[family].path)
    tokens = jnp.asarray(RNG.integers(0, 384, (2, 40)))
    positions = np.broadcast_to(np.arange(40), (2, 40))
    exact = np.asarray(run(model, tokens, positions))
    rounded = np.asarray(run(model, tokens, positions, dtype=jnp.bfloat16))
    assert rounded.dtype == np.float32
    assert np.linalg.norm(rounded - exact) < 0.03 * np.linalg.norm(exact)
    assert np.linalg.norm(rounded - exact) > 0  # the products did run in bfloat16


@pytest.mark.parametrize("family", ["qwen2-untied", "qwen3-head-dim", "llama-tied"])
def test_bfloat16_gradients_point_the_way_of_float32_ones(references, family):
    model = load_model(references[family].path)
    tokens = jnp.asarray(RNG.integers(0, 384, (2, 40)))
    gradient = jax.jit(jax.grad(loss), static_argnums=(1, 3, 4))
    exact = gradient(model.params, model.config, tokens, jnp.float32)
    rounded = gradient(model.params, model.config, tokens, jnp.bfloat16)

    def check(path, a, b):
        assert b.dtype == jnp.float32
        error = np.linalg.norm(np.asarray(a - b)) / np.linalg.norm(np.asarray(a))
        assert error < 0.06, (path, error)

    jax.tree_util.tree_map_with_path(check, exact, rounded)


def test_gradients_equal_torch(references):
    import torch

    reference = references["qwen2"]
    model = load_model(reference.path)
    tokens = RNG.integers(0, 384, (2, 20))
    net = reference.torch_model
    net.zero_grad()
    logp = torch.log_softmax(net(torch.tensor(tokens)).logits[:, :-1], -1)
    (-logp.gather(-1, torch.tensor(tokens)[:, 1:, None]).mean()).backward()
    ours = jax.grad(loss)(model.params, model.config, jnp.asarray(tokens), jnp.float32)
    for actual, expected in (
        (ours["embed"], net.model.embed_tokens.weight.grad),
        (ours["layers"]["down"][1].T, net.model.layers[1].mlp.down_proj.weight.grad),
        (ours["layers"]["gate_up"][0, :, 1].T, net.model.layers[0].mlp.up_proj.weight.grad),
        (ours["layers"]["qkv"][2, :, 1, 3], net.model.layers[2].self_attn.v_proj.weight.grad[12:].T),
    ):
        expected = expected.numpy()
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    net.zero_grad()


def test_remat_changes_nothing(references):
    model = load_model(references["qwen3-head-dim"].path)
    tokens = jnp.asarray(RNG.integers(0, 384, (1, 12)))
    gradient = jax.jit(jax.grad(loss), static_argnums=(1, 3, 4))
    plain = gradient(model.params, model.config, tokens, jnp.float32)
    again = gradient(model.params, model.config, tokens, jnp.float32, True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), plain, again)
