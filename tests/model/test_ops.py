"""Operations of both backends beside NumPy in float64: results and gradients.

The last tests are for the CPU backend only: its results are bit-identical for any number of rows.
"""

from __future__ import annotations

import importlib
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.model.compute import BACKENDS, Compute

pytestmark = pytest.mark.usefixtures("optimized")

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
DTYPES = ["float32", "bfloat16"]


@pytest.fixture(scope="session")
def ops(backend):
    return Compute(backend=backend).ops


def normal(*shape, seed=0):
    return np.random.default_rng((seed, len(shape))).standard_normal(shape).astype(np.float32)


def close(actual, expected, tolerance=1e-5):
    """Within a part of the largest value."""
    expected = np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def gradients_agree(function, reference, *arguments, tolerance=1e-4):
    """Pulls a cotangent back through both, through the reference by differences in float64."""
    out, pullback = jax.vjp(jax.jit(function), *arguments)
    cotangent = normal(*out.shape, seed=1)
    exact = [np.asarray(x, np.float64) for x in arguments]
    close(out, reference(*exact))
    for i, actual in enumerate(pullback(jnp.asarray(cotangent))):
        expected = np.zeros_like(exact[i])
        for at in np.ndindex(expected.shape):
            step = np.zeros_like(expected)
            step[at] = 1e-5
            around = [
                np.sum(reference(*exact[:i], exact[i] + sign * step, *exact[i + 1 :]) * cotangent)
                for sign in (1, -1)
            ]
            expected[at] = (around[0] - around[1]) / 2e-5
        close(actual, expected, tolerance)


@pytest.mark.parametrize("backend", ["cpu", "tpu"])
def test_every_backend_has_the_operations_of_the_reference(cpu_ops, backend):
    reference, other = (importlib.import_module(BACKENDS[name]) for name in ("reference", backend))
    for name, function in vars(reference).items():
        if not name.startswith("_") and getattr(function, "__module__", "") == reference.__name__:
            parameters = inspect.signature(getattr(other, name)).parameters
            assert [*parameters] == [*inspect.signature(function).parameters], name


# --- matmuls -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", [(1, 1), (1,), (19, 1), (2, 3)])
@pytest.mark.parametrize("shape", [(576, 96), (30, 8), (64, 3, 5, 2)])
def test_rows_are_multiplied_with_a_kernel_whatever_its_axes(backend, kept, shape, dtype):
    x, w = normal(*kept, shape[0]), normal(*shape, seed=2)
    compute = Compute(dtype, backend=backend)
    out = jax.jit(compute.ops.linear, static_argnums=(2, 3))(x, w, 1, compute)
    assert out.dtype == np.float32
    close(out, np.tensordot(x.astype(np.float64), w, 1), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kernels", "order"),
    [("inputs_first", "abcuv"), ("outputs_first", "uvabc"), ("matrices", "uabcv")],
)
@pytest.mark.parametrize("kept", [(1, 1), (1,), (19, 1), (2, 3), (70, 2)])
def test_kernels_may_have_several_inputs_in_any_layout(backend, kept, kernels, order, dtype):
    x, w = normal(*kept, 3, 5, 4), normal(3, 5, 4, 7, 2)
    compute = Compute(dtype, backend=backend, kernels=kernels)
    kernel = jnp.einsum(f"abcuv->{order}", w)
    out = jax.jit(compute.ops.linear, static_argnums=(2, 3))(x, kernel, 3, compute)
    assert out.dtype == np.float32
    close(out, np.tensordot(x.astype(np.float64), w, 3), TOLERANCE[dtype])


@pytest.mark.parametrize("kernels", ["inputs_first", "outputs_first"])
@pytest.mark.parametrize("kept", [(1,), (2, 3)])
def test_a_tied_head_multiplies_with_the_embeddings(backend, kept, kernels):
    x, table = normal(*kept, 24), normal(50, 24)
    compute = Compute(backend=backend, kernels=kernels)
    out = jax.jit(compute.ops.attend, static_argnums=2)(x, table, compute)
    close(out, x.astype(np.float64) @ table.T)


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("inputs", [1, 2])
def test_gradients_of_a_kernel_are_those_of_the_product(backend, rows, inputs):
    x, w = normal(rows, *(2, 4)[-inputs:]), normal(*(2, 4)[-inputs:], 3, 2)
    compute = Compute(backend=backend)
    gradients_agree(
        lambda x, w: compute.ops.linear(x, w, inputs, compute),
        lambda x, w: np.tensordot(x, w, inputs),
        x,
        w,
    )


def test_gradients_of_a_tied_head_are_those_of_the_product(backend):
    compute = Compute(backend=backend)
    gradients_agree(
        lambda x, table: compute.ops.attend(x, table, compute),
        lambda x, table: x @ table.T,
        normal(3, 4),
        normal(7, 4),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_products_have_the_operands_dtype(ops, dtype):
    x, w = normal(8, 24), normal(24, 40)

    def loss(x, w):
        return jnp.sum(ops.einsum("bd,df->bf", x, w, dtype) ** 2)

    dx, dw = jax.grad(loss, (0, 1))(x, w)
    out = x.astype(np.float64) @ w
    close(dx, 2 * out @ w.T, TOLERANCE[dtype])
    close(dw, 2 * x.T @ out, TOLERANCE[dtype])
    program = jax.jit(jax.grad(loss, (0, 1))).lower(x, w).as_text()
    products = [line for line in program.splitlines() if "stablehlo.dot_general" in line]
    short = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    assert len(products) == 3
    for line in products:
        assert re.findall(r"tensor<[\dx]+x(\w+)>", line) == [short, short, "f32"], line


@pytest.mark.parametrize("rows", [1, 4, 32, 64])
def test_weights_that_are_summed_and_multiplied_are_those_of_a_softmax(ops, rows):
    """XLA of jaxlib 0.10.2 returns rubbish on CPUs where it fuses a maximum, exp and a product.

    This is how attention and sampling use them: the weights have two users, which keeps them apart.
    """
    scores, values = 3 * normal(rows, 3, 3, 128), normal(rows, 3, 128, 64)

    @jax.jit
    def attended(scores, values):
        weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
        out = ops.einsum("bngs,bnsk->bngk", weights, values, jnp.float32)
        return out / ops.row_sum(weights)[..., None]

    weights = np.exp(scores.astype(np.float64) - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bngs,bnsk->bngk", weights, values)
    np.testing.assert_allclose(attended(scores, values), expected, atol=1e-5)


# --- the rest of a layer -------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 8), (2, 3, 12)])
def test_root_mean_square_normalisation_equals_numpy(ops, shape):
    def reference(x, scale):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-2) * scale

    x, scale = normal(*shape), normal(shape[-1])
    gradients_agree(lambda x, scale: ops.rms_norm(x, scale, 1e-2), reference, x, scale)


def test_normalisation_of_16_bits_is_computed_in_32(ops):
    x, scale = jnp.asarray(300 * normal(4, 64), jnp.bfloat16), normal(64)
    out = ops.rms_norm(x, scale, 1e-6)
    assert out.dtype == jnp.float32
    exact = np.asarray(x, np.float64)
    close(out, exact / np.sqrt(np.mean(exact**2, -1, keepdims=True) + 1e-6) * scale)


@pytest.mark.parametrize("shape", [(1, 2, 5), (3, 2, 2, 4)])
def test_swiglu_equals_numpy(ops, shape):
    def reference(gate_up):
        gate, up = gate_up[..., 0, :], gate_up[..., 1, :]
        return gate / (1 + np.exp(-gate)) * up

    gradients_agree(ops.swiglu, reference, 2 * normal(*shape))


# --- reductions ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4,), (1, 5), (2, 3, 4)])
def test_sums_of_rows_equal_numpy(ops, shape):
    gradients_agree(ops.row_sum, lambda x: x.sum(-1), normal(*shape))


@pytest.mark.parametrize("shape", [(1, 1, 7), (4, 32), (3, 2, 64)])
def test_what_is_computed_once_keeps_its_bits_and_gradients(ops, shape):
    x = normal(*shape)
    np.testing.assert_array_equal(jax.jit(ops.materialize)(x), x)
    slope = jax.grad(lambda x: jnp.sum(jnp.sin(ops.materialize(x))))(x)
    np.testing.assert_allclose(slope, np.cos(x), rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 8, 16, 20, 24])
def test_each_row_has_the_result_of_its_own(ops, rows):
    x, y = normal(rows, 2, 5), normal(rows, 5)

    def function(x, y):
        return jnp.sin(x) * y[:, None]

    out = jax.jit(lambda x, y: ops.over_rows(function, x, y))(x, y)
    np.testing.assert_allclose(out, np.sin(x) * y[:, None], rtol=1e-5, atol=1e-6)


@given(
    weights=st.lists(st.integers(0, 1000), min_size=1, max_size=700).filter(any),
    uniform=st.floats(0, 0.999),
)
def test_inverse_cdf_finds_the_index_at_which_the_cumulative_sum_passes(ops, weights, uniform):
    # Integer weights keep every partial sum exact in float32.
    padded = jnp.zeros((1, 700)).at[0, : len(weights)].set(jnp.asarray(weights, jnp.float32))
    index = int(jax.jit(ops.inverse_cdf)(padded, jnp.asarray([uniform], jnp.float32))[0])
    total = np.float32(np.float32(uniform) * np.float32(sum(weights)))
    expected = int(np.searchsorted(np.cumsum(weights), total, side="right"))
    assert index == expected
    assert weights[index] > 0


@pytest.mark.parametrize("vocab", [3, 128, 130])
def test_weights_that_are_no_numbers_give_an_index_of_the_row(ops, vocab):
    weights = jnp.full((1, vocab), jnp.nan)
    assert int(jax.jit(ops.inverse_cdf)(weights, jnp.asarray([0.5], jnp.float32))[0]) < vocab


@given(seed=st.integers(0, 2**32 - 1))
def test_nothing_without_weight_is_found_however_sums_are_rounded(ops, seed):
    rng = np.random.default_rng(seed)
    rows = np.arange(64)
    weights = rng.random((64, 700)) ** 3 * (rng.random((64, 700)) < 0.02)
    weights[:, rng.integers(700)] = 1e-6
    # Right where one token ends and the next one begins.
    sums = np.cumsum(weights, axis=1)
    uniform = np.minimum(sums[rows, rng.integers(700, size=64)] / sums[:, -1], 1 - 2**-23)
    index = jax.jit(ops.inverse_cdf)(weights.astype(np.float32), uniform.astype(np.float32))
    assert (weights[rows, index] > 0).all()


# --- bits on CPUs --------------------------------------------------------------------------

CPU = Compute(backend="cpu", kernels="outputs_first")


@pytest.mark.usefixtures("cpu_ops")
@pytest.mark.parametrize("width", [48, 128, 200, 576])
def test_a_sum_does_not_depend_on_the_number_of_rows(width):
    x, row_sum = normal(120, 2, width), jax.jit(CPU.ops.row_sum)
    whole = np.asarray(row_sum(x))
    np.testing.assert_allclose(whole, x.astype(np.float64).sum(-1), atol=1e-4)
    for rows in (2, 3, 5, 8, 16, 47, 48):
        np.testing.assert_array_equal(row_sum(x[:rows]), whole[:rows])


@pytest.mark.usefixtures("cpu_ops")
@pytest.mark.parametrize("shape", [(32, 96), (96, 32), (576, 960)])
@pytest.mark.parametrize("tokens", [1, 8])
def test_a_sequence_gets_the_same_bits_beside_any_number_of_others(shape, tokens):
    x, w = normal(70, tokens, shape[0]), jnp.asarray(normal(*shape).T)
    linear = jax.jit(CPU.ops.linear, static_argnums=(2, 3))
    whole = np.asarray(linear(x, w, 1, CPU))
    for rows in (2, 3, 8, 16, 17, 24, 31, 32, 40, 64):
        np.testing.assert_array_equal(linear(x[:rows], w, 1, CPU), whole[:rows])


@pytest.mark.usefixtures("cpu_ops")
def test_a_draw_has_the_same_index_beside_any_number_of_others():
    weights = np.exp(3 * normal(64, 9000))
    uniform = np.random.default_rng(0).random(64).astype(np.float32)
    inverse_cdf = jax.jit(CPU.ops.inverse_cdf)
    whole = np.asarray(inverse_cdf(weights, uniform))
    for rows in (2, 3, 8, 17, 40):
        np.testing.assert_array_equal(inverse_cdf(weights[:rows], uniform[:rows]), whole[:rows])
