"""Sums and products are right, and the same bits for any number of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coa_jax.model.products import OutputMajor, computed_once, multiply, project, row_sum


def normal(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("width", [48, 128, 200, 576])
def test_a_sum_does_not_depend_on_the_number_of_rows(width):
    x = normal(120, 2, width)
    whole = np.asarray(jax.jit(row_sum)(x))
    np.testing.assert_allclose(whole, x.astype(np.float64).sum(-1), atol=1e-4)
    for rows in (2, 3, 5, 8, 16, 47, 48):
        np.testing.assert_array_equal(jax.jit(row_sum)(x[:rows]), whole[:rows])


@pytest.mark.parametrize("rows", [1, 4, 32, 64])
def test_weights_that_are_summed_and_multiplied_are_those_of_a_softmax(rows):
    """XLA of jaxlib 0.10.2 returns rubbish on CPUs where it fuses a maximum, exp and a product.

    This is how attention and sampling use them: the weights have two users, which keeps them apart.
    """
    scores, values = 3 * normal(rows, 3, 3, 128), normal(rows, 3, 128, 64)

    @jax.jit
    def attended(scores, values):
        weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
        out = project("bngs,bnsk->bngk", weights, values, jnp.float32)
        return out / row_sum(weights)[..., None]

    weights = np.exp(scores.astype(np.float64) - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bngs,bnsk->bngk", weights, values)
    np.testing.assert_allclose(attended(scores, values), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_those_of_the_product(dtype):
    x, w = normal(8, 24), normal(24, 40)
    dx, dw = jax.grad(lambda x, w: jnp.sum(project("bd,df->bf", x, w, dtype) ** 2), (0, 1))(x, w)
    out = x.astype(np.float64) @ w
    tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype == "float32" else {"rtol": 0.1, "atol": 2.0}
    np.testing.assert_allclose(dx, 2 * out @ w.T, **tolerance)
    np.testing.assert_allclose(dw, 2 * x.T @ out, **tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kept", [(1, 1), (1,), (2, 3)])
@pytest.mark.parametrize("shape", [(576, 96), (30, 8), (64, 3, 5, 2)])
def test_rows_are_multiplied_with_a_weight_whatever_its_axes(kept, shape, dtype):
    x, w = normal(*kept, shape[0]), normal(*shape)
    out = jax.jit(multiply, static_argnums=2)(x, w, dtype)
    expected = np.tensordot(x.astype(np.float64), w.astype(np.float64), 1)
    assert out.shape == expected.shape
    assert out.dtype == np.float32
    tolerance = 1e-4 if dtype == "float32" else 1.0
    np.testing.assert_allclose(out, expected, atol=tolerance)


def test_a_single_row_has_the_gradients_of_any_row():
    x, w = normal(2, 24), normal(24, 40)
    both = jax.grad(lambda x: jnp.sum(jnp.sin(multiply(x, w, "float32"))))(x)
    alone = jax.grad(lambda x: jnp.sum(jnp.sin(multiply(x, w, "float32"))))(x[:1])
    np.testing.assert_allclose(alone, both[:1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kept", [(1, 1), (1,), (19, 1), (2, 3)])
def test_a_weight_with_its_outputs_first_gives_the_same_products(kept, dtype):
    x, w = normal(*kept, 60), normal(3, 5, 4, 7, 2)
    turned = OutputMajor(jnp.moveaxis(w, (0, 1, 2), (2, 3, 4)))
    out = jax.jit(multiply, static_argnums=(2, 3))(x, turned, dtype, 3)
    expected = x.astype(np.float64) @ w.reshape(60, -1)
    assert out.dtype == np.float32
    np.testing.assert_allclose(
        out, expected.reshape(*kept, 7, 2), atol=1e-4 if dtype == "float32" else 1.0
    )


@pytest.mark.parametrize("shape", [(32, 96), (96, 32), (576, 960)])
@pytest.mark.parametrize("tokens", [1, 8])
def test_a_sequence_gets_the_same_bits_beside_any_number_of_others(shape, tokens):
    x, w = normal(70, tokens, shape[0]), OutputMajor(jnp.asarray(normal(*shape).T))
    product = jax.jit(multiply, static_argnums=2)
    whole = np.asarray(product(x, w, "float32"))
    for rows in (2, 3, 8, 16, 17, 24, 31, 32, 40, 64):
        np.testing.assert_array_equal(product(x[:rows], w, "float32"), whole[:rows])


@pytest.mark.parametrize("shape", [(1, 1, 7), (4, 32), (3, 2, 64)])
def test_what_is_computed_once_keeps_its_bits_and_gradients(shape):
    x = normal(*shape)
    np.testing.assert_array_equal(jax.jit(computed_once)(x), x)
    slope = jax.grad(lambda x: jnp.sum(jnp.sin(computed_once(x))))(x)
    np.testing.assert_allclose(slope, np.cos(x), rtol=1e-5)
