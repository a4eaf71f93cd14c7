"""Every implementation of attention agrees with NumPy in float64: results and gradients.

On the platform of a kernel, the test runs the kernel itself, in bfloat16.  On other machines its
Pallas code is interpreted.  `cudnn`, `ragged_paged` and `tokamax` cannot be interpreted: a
reference implementation of JAX or tokamax replaces them, so only layouts, masks and scales are
checked.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.model import cache
from coa_jax.model.attention.causal import causal_attention
from coa_jax.model.attention.choice import (
    _WINDOWED,
    Case,
    implementations,
    missing,
    platform_of,
    unmet,
)
from coa_jax.model.compute import REFERENCE, Compute
from coa_jax.model.config import ModelConfig

TOLERANCE = {"float32": 1e-5, "bfloat16": 0.03}
TRITON = Compute("bfloat16", attention="pallas_gpu")


def values(attend):
    """Attention without the pages that it does not have."""
    return lambda q, k, v: attend(q, k, v)[0]


def configured(kind, name, dtype, **shape):
    """The implementation as it can run here."""
    platform, capability = platform_of(jax.devices()[0])
    if name != "xla" and (reason := missing(kind, name)):
        pytest.skip(reason)
    case = Case(platform, "bfloat16", capability=capability, **shape)
    native = not unmet(kind, name, case)
    if native and dtype == "float32" and name != "xla":
        pytest.skip(f"{name} multiplies in bfloat16 on {platform}")
    return Compute(dtype, attention=name, interpret=not native)


def numpy_attention(q, k, v, mask, cotangent=None):
    """float64: q [B,T,N,G,K], k and v [B,S,N,K], mask [B,T,S] -> result, and its gradients."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5
    scores = np.einsum("btngk,bsnk->bngts", q, k) * scale
    scores = np.where(mask[:, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("bngts,bsnk->btngk", weights, v)
    if cotangent is None:
        return out
    by_weight = np.einsum("btngk,bsnk->bngts", cotangent, v)
    by_score = weights * (by_weight - (weights * by_weight).sum(-1, keepdims=True)) * scale
    return out, (
        np.einsum("bngts,bsnk->btngk", by_score, k),
        np.einsum("bngts,btngk->bsnk", by_score, q),
        np.einsum("bngts,btngk->bsnk", weights, cotangent),
    )


# --- whole sequences -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("packed", "dtype"),
    [
        (True, "float32"),
        (False, "bfloat16"),
        pytest.param(True, "bfloat16", marks=pytest.mark.slow),
        pytest.param(False, "float32", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", implementations("causal"))
def test_causal_attention_and_its_gradients_equal_numpy(name, packed, dtype):
    rng = np.random.default_rng(0)
    batch, length, heads, groups, width = 2, 201, 2, 3, 64  # not a multiple of any block
    compute = configured(
        "causal", name, dtype, num_kv_heads=heads, num_groups=groups, head_dim=width
    )
    q, cotangent = rng.normal(size=(2, batch, length, heads, groups, width)).astype(np.float32)
    k, v = rng.normal(size=(2, batch, length, heads, width)).astype(np.float32)
    mask = np.tril(np.ones((batch, length, length), bool))
    segments = None
    if packed:
        # Segments of any lengths, the last one padding, as in a packed batch.
        segments = np.sort(rng.integers(1, 5, (batch, length)), axis=1).astype(np.int32) % 4
        mask &= segments[:, :, None] == segments[:, None, :]
        segments = jnp.asarray(segments)

    @jax.jit
    def run(q, k, v):
        attend = values(causal_attention(compute, (batch, length), segments))
        out, pullback = jax.vjp(attend, q, k, v)
        return out, pullback(jnp.asarray(cotangent))

    out, gradients = run(q, k, v)
    expected, expected_gradients = numpy_attention(q, k, v, mask, cotangent)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, expected, rtol=0, atol=TOLERANCE[dtype])
    for actual, wanted in zip(gradients, expected_gradients, strict=True):
        error = np.linalg.norm(actual - wanted) / np.linalg.norm(wanted)
        assert error < TOLERANCE[dtype] / 2, error


@pytest.mark.parametrize("length", [1, 127, 128, 129, 256, 300])
def test_plain_attention_goes_through_any_number_of_blocks(length):
    rng = np.random.default_rng(length)
    q, cotangent = rng.normal(size=(2, 1, length, 2, 2, 8)).astype(np.float32)
    k, v = rng.normal(size=(2, 1, length, 2, 8)).astype(np.float32)
    attend = values(causal_attention(REFERENCE, (1, length), None))
    out, pullback = jax.vjp(jax.jit(attend), q, k, v)
    mask = np.tril(np.ones((1, length, length), bool))
    expected, expected_gradients = numpy_attention(q, k, v, mask, cotangent)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)
    for actual, wanted in zip(pullback(jnp.asarray(cotangent)), expected_gradients, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max() + 1e-6)


def test_a_query_that_sees_one_key_learns_nothing_of_where_to_look_in_16_bits():
    # Its weight is 1 whatever its score is: both terms of the slope are the same sum.
    rng = np.random.default_rng(3)
    q, cotangent = rng.normal(size=(2, 1, 40, 2, 2, 64)).astype(np.float32)
    k, v = rng.normal(size=(2, 1, 40, 2, 64)).astype(np.float32)
    segments = jnp.arange(1, 41)[None]
    attend = values(causal_attention(Compute("bfloat16"), (1, 40), segments))
    _, pullback = jax.vjp(jax.jit(attend), q, k, v)
    d_q, d_k, d_v = pullback(jnp.asarray(cotangent))
    assert np.abs(d_q).max() < 1e-4 and np.abs(d_k).max() < 1e-4
    np.testing.assert_allclose(d_v, cotangent.sum(axis=3), rtol=0.02, atol=0.02)


# --- a cache in pages ----------------------------------------------------------------------

KERNELS = [name for name in implementations("paged") if name != "xla"]
SHAPE = {"num_kv_heads": 2, "num_groups": 3, "head_dim": 128, "page_size": 16}


def pool(name, count, size, heads, width, dtype):
    """The empty pages of one layer."""
    config = ModelConfig("llama", 8, 8, 8, 1, heads, heads, width)
    return cache.init_layers(config, count, size, dtype, Compute(attention=name))[0]


def filled(name, dtype, rng, batch, pages_each):
    """A pool in which ``batch`` sequences own pages in no order, among rubbish."""
    heads, width, size = SHAPE["num_kv_heads"], SHAPE["head_dim"], SHAPE["page_size"]
    length = pages_each * size
    k, v = rng.normal(size=(2, batch, length, heads, width)).astype(np.float32)
    count = batch * pages_each + 3
    table = rng.permutation(count)[: batch * pages_each].reshape(batch, -1).astype(np.int32)
    pages = jax.tree.map(lambda x: x + 7, pool(name, count, size, heads, width, dtype))
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    pages = cache.write(pages, jnp.asarray(table), k, v, positions, Compute(attention=name))
    return pages, table, k, v


@pytest.mark.parametrize(
    ("new", "dtype"),  # decode, extend, and extend in two blocks
    [
        (1, "float32"),
        (5, "bfloat16"),
        (50, "float32"),
        pytest.param(1, "bfloat16", marks=pytest.mark.slow),
        pytest.param(5, "float32", marks=pytest.mark.slow),
        pytest.param(50, "bfloat16", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("name", "window"),
    [*((name, None) for name in KERNELS), *((name, 21) for name in KERNELS if name in _WINDOWED)],
)
def test_paged_attention_equals_numpy(name, window, new, dtype):
    rng = np.random.default_rng(1)
    compute = configured("paged", name, dtype, **SHAPE)
    batch, pages_each = 4, 11
    pages, table, k, v = filled(name, dtype, rng, batch, pages_each)
    size, end = SHAPE["page_size"], k.shape[1]
    # One that just begins, one that ends with a page, one that fills all of them, one idle.
    start = np.array([0, 4 * size - new, end - new, end])
    positions = (start[:, None] + np.arange(new)).astype(np.int32)
    q = rng.normal(size=(batch, new, 2, 3, SHAPE["head_dim"])).astype(np.float32)
    run = functools.partial(cache.attend_to, compute=compute, window=window)
    if name != "ragged_paged" or not compute.interpret:  # its stand-in is a Python loop
        run = jax.jit(run)
    out = np.asarray(run(pages, q, jnp.asarray(table), jnp.asarray(positions)))
    mask = np.arange(end) <= positions[..., None]
    if window is not None:
        mask &= np.arange(end) > positions[..., None] - window
    expected = numpy_attention(q, k, v, mask)
    np.testing.assert_allclose(out[:3], expected[:3], rtol=0, atol=TOLERANCE[dtype])
    assert np.isfinite(out[3]).all()


def gathered(name, pages, table):
    """Keys and values ``[B, C * S, N, K]`` of the sequences of a table ``[B, C]``."""
    b = len(table)
    if name == "ragged_paged":
        rows = np.asarray(pages[0])[table]  # [B, C, S, 2N, K]
        pairs = rows.reshape(b, -1, rows.shape[3] // 2, 2, rows.shape[4])
        return pairs[..., 0, :], pairs[..., 1, :]
    parts = (np.moveaxis(np.asarray(pool)[:, table], 0, 3) for pool in pages)
    return [part.reshape(b, -1, *part.shape[3:]) for part in parts]


@given(data=st.data())
def test_what_is_written_to_pages_is_gathered_from_them(data):
    name = data.draw(st.sampled_from(KERNELS))
    batch, pages_each, size = 2, 3, 4
    length = pages_each * size
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    table = rng.permutation(9)[:6].reshape(batch, pages_each).astype(np.int32)
    pages, compute = pool(name, 9, size, 2, 8, "float32"), Compute(attention=name)
    kept = np.zeros((2, batch, length, 2, 8), np.float32)
    for _ in range(data.draw(st.integers(1, 3))):
        # Consecutive positions that may run over the end, where they are dropped.
        start = rng.integers(0, length + 2, batch)
        positions = (start[:, None] + np.arange(5)).astype(np.int32)
        new = rng.normal(size=(2, batch, 5, 2, 8)).astype(np.float32)
        pages = cache.write(pages, jnp.asarray(table), *new, jnp.asarray(positions), compute)
        for row, at in np.argwhere(positions < length):
            kept[:, row, positions[row, at]] = new[:, row, at]
    np.testing.assert_array_equal(np.stack(gathered(name, pages, table)), kept)


# --- kernels for other machines ------------------------------------------------------------


@pytest.fixture
def for_an_h100():
    """Lets Pallas know what it compiles for; JAX 0.12 wants a name where no GPU is."""
    device = jax.sharding.AbstractDevice("NVIDIA H100", 132, "gpu")
    axes = ((1,), ("device",), (jax.sharding.AxisType.Explicit,))
    mesh = jax.sharding.AbstractMesh(*axes, abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "one-segment"])
@pytest.mark.usefixtures("for_an_h100")
def test_the_training_kernel_for_triton_is_lowered_for_cuda(packed):
    """As far as a machine without a GPU can go: Pallas accepts it and emits Triton."""

    def loss(q, k, v, segments):
        segments = segments if packed else None
        return values(causal_attention(TRITON, (2, 256), segments))(q, k, v).sum()

    shapes = [(2, 256, 2, 3, 64), (2, 256, 2, 64), (2, 256, 2, 64)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    segments = jax.ShapeDtypeStruct((2, 256), jnp.int32)
    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*arguments, segments)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mha_forward" in text
    assert "mha_backward" in text


@pytest.mark.parametrize(("new", "kernel"), [(1, "paged_attention"), (50, "paged_prefill")])
@pytest.mark.usefixtures("for_an_h100")
def test_the_paged_kernels_for_triton_are_lowered_for_cuda_and_copy_no_page(new, kernel):
    pool = jax.ShapeDtypeStruct((2, 32, 16, 128), jnp.bfloat16)
    traced = jax.jit(
        lambda q, keys, values, table, positions: cache.attend_to(
            (keys, values), q, table, positions, TRITON
        )
    ).trace(
        jax.ShapeDtypeStruct((4, new, 2, 3, 128), jnp.float32),
        pool,
        pool,
        jax.ShapeDtypeStruct((4, 11), jnp.int32),
        jax.ShapeDtypeStruct((4, new), jnp.int32),
    )
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert kernel in text
    assert "stablehlo.gather" not in text
    assert "stablehlo.while" not in text
