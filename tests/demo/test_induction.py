"""The circuit copies before any training, and refuses architectures that cannot hold it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coa_jax.demo.induction import add_induction
from coa_jax.errors import UserError
from coa_jax.model.compute import local_compute
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import bind, init_params

CONFIG = ModelConfig("llama", 600, 256, 128, 3, 4, 2, 64, rope_theta=1e6)


def accuracy_on_repeats(params):
    """Share of tokens that are predicted in the second copy of random sequences, by argmax."""
    sequence = np.random.default_rng(0).integers(0, 600, size=(4, 100))
    tokens = jnp.asarray(np.concatenate([sequence, sequence], axis=1))
    positions = jnp.broadcast_to(jnp.arange(200), tokens.shape)
    decoder, compute = bind(CONFIG, params), local_compute()
    hidden, _ = decoder(tokens, positions, compute)
    predicted = jnp.argmax(decoder.logits(hidden, compute), axis=-1)[:, :-1]
    return float((predicted == tokens[:, 1:])[:, 101:].mean())


@pytest.mark.slow
def test_it_copies_what_random_parameters_do_not():
    params = init_params(CONFIG, jax.random.key(0))
    assert accuracy_on_repeats(params) < 0.05
    assert accuracy_on_repeats(add_induction(params, CONFIG, seed=0)) > 0.99


def test_shapes_and_untouched_parameters_stay():
    params = init_params(CONFIG, jax.random.key(0))
    changed = add_induction(params, CONFIG, seed=0)
    assert jax.tree.map(jnp.shape, changed) == jax.tree.map(jnp.shape, params)
    for name in ("mlp", "attn_norm", "mlp_norm"):
        jax.tree.map(np.testing.assert_array_equal, changed["layers"][name], params["layers"][name])
    third = lambda tree: jax.tree.map(lambda x: x[2], tree["layers"]["attn"])  # noqa: E731
    jax.tree.map(np.testing.assert_array_equal, third(changed), third(params))


@pytest.mark.parametrize(
    "changes",
    [{"num_kv_heads": 4}, {"num_layers": 1}, {"head_dim": 16}, {"rope_theta": 100.0}],
)
def test_an_architecture_without_room_is_refused(changes):
    config = dataclasses.replace(CONFIG, **changes)
    with pytest.raises(UserError, match="induction"):
        add_induction(init_params(config, jax.random.key(0)), config, seed=0)
