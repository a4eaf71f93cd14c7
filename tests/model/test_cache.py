"""Attention over pages is attention, and nothing but a sequence's own tokens is in its numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coa_jax.model.cache import LayerCache, attend_to, quantize, write
from coa_jax.model.compute import REFERENCE, Compute

pytestmark = pytest.mark.usefixtures("optimized")

B, N, G, K, SIZE, PAGES = 3, 2, 3, 16, 8, 4


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def empty(dtype=jnp.float32, pages=B * PAGES, seed=9):
    """Pages full of somebody else's old vectors."""
    keys = jnp.asarray(normal(seed, pages, N, K, SIZE))
    values = jnp.asarray(normal(seed + 1, pages, N, SIZE, K))
    if dtype != jnp.int8:
        return LayerCache(keys.astype(dtype), values.astype(dtype))
    scales = jnp.ones((pages, N, SIZE))
    return LayerCache((keys * 40).astype(dtype), (values * 40).astype(dtype), scales, scales)


def fill(layer, table, k, v, lengths):
    positions = np.arange(k.shape[1])[None].repeat(len(lengths), 0)
    positions = np.where(positions < np.asarray(lengths)[:, None], positions, SIZE * PAGES)
    return write(layer, table, jnp.asarray(k), jnp.asarray(v), jnp.asarray(positions), REFERENCE)


def expected(q, k, v, positions):
    """In float64; q [T, N, G, K], k and v [S, N, K]."""
    out = np.zeros(q.shape)
    for t, position in enumerate(positions):
        scores = np.einsum("ngk,snk->ngs", q[t].astype(np.float64), k[: position + 1]) / K**0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[t] = np.einsum("ngs,snk->ngk", weights, v[: position + 1].astype(np.float64))
    return out


@pytest.mark.parametrize(
    ("dtype", "atol", "new"),
    [
        ("float32", 2e-6, 5),
        ("bfloat16", 3e-2, 1),
        ("int8", 5e-2, 5),
        pytest.param("float32", 2e-6, 1, marks=pytest.mark.slow),
        pytest.param("bfloat16", 3e-2, 5, marks=pytest.mark.slow),
        pytest.param("int8", 5e-2, 1, marks=pytest.mark.slow),
    ],
)
def test_attention_is_that_over_all_positions_up_to_ones_own(backend, dtype, atol, new):
    lengths = [SIZE * PAGES, 9, 17]
    k, v = normal(0, B, SIZE * PAGES, N, K), normal(1, B, SIZE * PAGES, N, K)
    q = normal(2, B, new, N, G, K)
    table = np.random.default_rng(3).permutation(B * PAGES).reshape(B, PAGES)
    layer = fill(empty(jnp.dtype(dtype)), table, k, v, lengths)
    positions = np.asarray([[n - new + i for i in range(new)] for n in lengths])
    compute = Compute("bfloat16" if dtype == "bfloat16" else "float32", backend=backend)
    got = attend_to(layer, jnp.asarray(q), jnp.asarray(table), jnp.asarray(positions), compute)
    for b in range(B):
        want = expected(q[b], k[b], v[b], positions[b])
        np.testing.assert_allclose(got[b], want, atol=atol)


@pytest.mark.usefixtures("cpu_ops")
def test_the_bits_depend_neither_on_the_others_nor_on_where_pages_lie():
    k, v = normal(0, 5, SIZE * PAGES, N, K), normal(1, 5, SIZE * PAGES, N, K)
    q, lengths = normal(2, 5, 1, N, G, K), [13, 32, 5, 20, 8]
    run = jax.jit(lambda *x: attend_to(*x, Compute(backend="cpu")))

    def outputs(rows, seed):
        table = np.random.default_rng(seed).permutation(6 * PAGES).reshape(6, PAGES)[: len(rows)]
        own = [lengths[row] for row in rows]
        layer = fill(empty(pages=6 * PAGES, seed=seed), table, k[rows], v[rows], own)
        positions = jnp.asarray(own)[:, None] - 1
        return np.asarray(run(layer, jnp.asarray(q[rows]), jnp.asarray(table), positions))

    whole = outputs([0, 1, 2, 3, 4], 7)
    np.testing.assert_array_equal(outputs([0, 4, 2, 3], 8), whole[[0, 4, 2, 3]])


@pytest.mark.usefixtures("cpu_ops")
@pytest.mark.parametrize("rows", [16, pytest.param(24, marks=pytest.mark.slow)])
def test_rows_in_groups_are_those_of_one_group(rows):
    lengths = np.random.default_rng(5).integers(1, SIZE * PAGES + 1, rows)
    k, v = normal(0, rows, SIZE * PAGES, N, K), normal(1, rows, SIZE * PAGES, N, K)
    q = normal(2, rows, 1, N, G, K)
    table = np.random.default_rng(3).permutation(rows * PAGES).reshape(rows, PAGES)
    layer = fill(empty(pages=rows * PAGES), table, k, v, lengths)
    run = jax.jit(lambda *x: attend_to(*x, Compute(backend="cpu")))

    def outputs(some):
        positions = jnp.asarray(lengths[some])[:, None] - 1
        return np.asarray(run(layer, jnp.asarray(q[some]), jnp.asarray(table[some]), positions))

    whole = outputs(np.arange(rows))
    np.testing.assert_allclose(
        whole, [expected(q[b], k[b], v[b], [lengths[b] - 1]) for b in range(rows)], atol=2e-6
    )
    ordered = np.argsort(lengths)
    np.testing.assert_array_equal(outputs(ordered), whole[ordered])
    np.testing.assert_array_equal(outputs(ordered[3:10]), whole[ordered[3:10]])  # no groups


def test_what_is_outside_of_the_cache_is_not_written():
    layer, table = empty(), jnp.arange(B * PAGES).reshape(B, PAGES)
    k = jnp.ones((B, 2, N, K))
    positions = jnp.asarray([[SIZE * PAGES, 3], [SIZE * PAGES] * 2, [SIZE * PAGES + 5, 31]])
    new = write(layer, table, k, k, positions, REFERENCE)
    changed = np.flatnonzero(np.any(np.asarray(new.values != layer.values), axis=(1, 2, 3)))
    assert changed.tolist() == [0, 2 * PAGES + 3]


def test_a_vector_of_bytes_is_within_half_a_step_of_what_it_stands_for():
    x = normal(4, 50, K) * np.geomspace(1e-6, 1e4, 50)[:, None]
    values, scale = quantize(jnp.asarray(x))
    assert values.dtype == jnp.int8
    error = np.abs(np.asarray(values) * np.asarray(scale)[:, None] - x)
    assert (error <= 0.501 * np.asarray(scale)[:, None]).all()
    zeros, scale = quantize(jnp.zeros((2, K)))
    assert not zeros.any()
    assert np.isfinite(np.asarray(scale)).all()
