"""The chunked head: values and gradients against float64; positions without a loss are skipped."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from coa_jax.engine.constraint import FREE
from coa_jax.model.compute import Compute, local_compute
from coa_jax.model.config import ModelConfig
from coa_jax.parallel.mesh import AXES
from coa_jax.train import logps
from coa_jax.train.batch import Example, pack
from coa_jax.train.logps import _arrange, _counted, _hidden, _sort, chunked, logp_sum, token_logps
from coa_jax.train.output_head import Head, score_chunks, weighted_sum
from tests.random_params import random_params

# Large enough for the fusions that XLA makes of real heads.
CHUNKS, ROWS, COLUMNS, WIDTH, VOCAB = 3, 2, 40, 64, 640
RNG = np.random.default_rng(0)
HIDDEN = RNG.normal(size=(CHUNKS, ROWS, COLUMNS, WIDTH)).astype(np.float32)
WEIGHT = (RNG.normal(size=(VOCAB, WIDTH)) / 4).astype(np.float32)
TARGETS = RNG.integers(0, VOCAB, (CHUNKS, ROWS, COLUMNS)).astype(np.int32)
OF_LOGP, OF_ENTROPY = RNG.normal(size=(2, CHUNKS, ROWS, COLUMNS)).astype(np.float32)


def expected(hidden, weight, live, temperature=1.0, may=None):
    """Log-probabilities and entropies in float64."""
    z = hidden.astype(np.float64) @ weight.T.astype(np.float64) / temperature
    if may is not None:
        z = np.where(may, z, -np.inf)
    z -= z.max(-1, keepdims=True)
    logp = z - np.log(np.exp(z).sum(-1, keepdims=True))
    entropy = -np.sum(np.exp(logp) * np.where(np.isfinite(logp), logp, 0.0), -1)
    picked = np.take_along_axis(logp, TARGETS[..., None], -1)[..., 0]
    picked[live:], entropy[live:] = 0.0, 0.0
    return picked, entropy


def slope(function, x, direction, step=1e-5):
    return (function(x + step * direction) - function(x - step * direction)) / (2 * step)


def constraint_table():
    """Two states with about half of the vocabulary each, and one that is free."""
    allowed = RNG.integers(0, 2**32, (3, VOCAB // 32), dtype=np.uint64).astype(np.uint32)
    allowed[FREE] = 2**32 - 1
    rules = RNG.integers(0, 3, TARGETS.shape).astype(np.int32)
    bits = (allowed[..., None] >> np.arange(32, dtype=np.uint32)) & 1
    may = bits.reshape(3, VOCAB)[rules].astype(bool)
    # What was sampled was allowed.
    legal = np.take_along_axis(may, TARGETS[..., None], -1)[..., 0]
    rules = np.where(legal, rules, FREE).astype(np.int32)
    return jnp.asarray(allowed), rules, bits.reshape(3, VOCAB)[rules].astype(bool)


@pytest.mark.parametrize(
    ("live", "constrained", "tied"),
    [
        (3, False, True),
        (1, True, True),
        (3, True, False),
        (1, False, False),
        pytest.param(3, True, True, marks=pytest.mark.slow),
        pytest.param(1, False, True, marks=pytest.mark.slow),
        pytest.param(3, False, False, marks=pytest.mark.slow),
        pytest.param(1, True, False, marks=pytest.mark.slow),
    ],
)
def test_values_and_gradients_are_those_of_float64(tied, constrained, live):
    head = Head(local_compute(), tied, temperature=0.7, entropy=True)
    allowed, rules, may = constraint_table() if constrained else (None, None, None)

    @functools.partial(jax.jit, static_argnames="frozen")
    def value_and_grad(hidden, weight, frozen=False):
        def f(hidden, weight):
            logp, entropy = score_chunks(
                head, hidden, weight, TARGETS, rules, allowed, np.int32(live)
            )
            return jnp.sum(OF_LOGP * logp + OF_ENTROPY * entropy), (logp, entropy)

        return jax.value_and_grad(f, 0 if frozen else (0, 1), has_aux=True)(hidden, weight)

    def reference(hidden, weight):
        logp, entropy = expected(hidden, weight, live, 0.7, may)
        return np.sum(OF_LOGP * logp + OF_ENTROPY * entropy)

    weight = WEIGHT if tied else WEIGHT.T
    (_, values), (d_hidden, d_weight) = value_and_grad(HIDDEN, weight)
    for ours, theirs in zip(values, expected(HIDDEN, WEIGHT, live, 0.7, may), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-5)
    assert not np.any(d_hidden[live:])
    # A direction for every row: a wrong row cannot hide behind a right one.
    for row in range(ROWS):
        at = RNG.normal(size=HIDDEN.shape)
        at[:, 1 - row] = 0
        found = np.vdot(np.asarray(d_hidden, np.float64), at)
        assert found == pytest.approx(slope(lambda x: reference(x, WEIGHT), HIDDEN, at), rel=1e-3)
    at = RNG.normal(size=WEIGHT.shape)
    found = np.vdot(np.asarray(d_weight if tied else d_weight.T, np.float64), at)
    assert found == pytest.approx(slope(lambda w: reference(HIDDEN, w), WEIGHT, at), rel=1e-3)
    _, alone = value_and_grad(HIDDEN, weight, frozen=True)
    np.testing.assert_allclose(alone, d_hidden, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("temperature", [1e-2, 1e-10, 1e-30])
def test_log_probabilities_are_exact_at_the_lowest_temperatures(temperature):
    allowed, rules, may = constraint_table()
    head = Head(local_compute(), True, temperature, entropy=True)
    logits = np.where(may, np.einsum("krcd,vd->krcv", HIDDEN, WEIGHT), -np.inf)
    likely = np.argmax(logits, -1).astype(np.int32)
    logp, entropy = jax.jit(lambda *a: score_chunks(head, *a, likely, rules, allowed, 3))(
        HIDDEN, WEIGHT
    )
    z = (logits - logits.max(-1, keepdims=True)) / np.float64(temperature)
    expected = -np.log(np.exp(z).sum(-1))
    # The products of float32 differ in the sixth digit, which the temperature makes larger.
    clear = np.sort(z, -1)[..., -2] < -30 if temperature < 1e-2 else np.full(z.shape[:3], True)
    assert clear.mean() > 0.9
    np.testing.assert_allclose(logp[clear], expected[clear], atol=2e-3)
    assert np.isfinite(entropy).all()


def test_gradients_are_finite_where_a_forbidden_token_is_far_the_likeliest():
    allowed, rules, may = constraint_table()
    head = Head(local_compute("float32"), True, 1e-3, entropy=True)
    likely = np.argmax(np.where(may, HIDDEN @ WEIGHT.T, -np.inf), axis=-1).astype(np.int32)

    def loss(hidden, weight):
        logp, entropy = score_chunks(head, hidden, weight, likely, rules, allowed, np.int32(3))
        return jnp.sum(logp) + jnp.sum(entropy)

    for gradient in jax.jit(jax.grad(loss, argnums=(0, 1)))(HIDDEN, 10 * WEIGHT):
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_sum_with_constant_weights_has_the_gradients_of_its_parts(frozen):
    head, wrt = Head(local_compute(), True), 0 if frozen else (0, 1)

    @jax.jit
    def both(hidden, weight):
        def parts(hidden, weight):
            return jnp.sum(OF_LOGP * score_chunks(head, hidden, weight, TARGETS, None, None, 2)[0])

        def at_once(hidden, weight):
            return weighted_sum(head, hidden, weight, TARGETS, OF_LOGP, 2)

        return tuple(jax.value_and_grad(f, wrt)(hidden, weight) for f in (parts, at_once))

    left, right = both(HIDDEN, WEIGHT)
    logp, _ = expected(HIDDEN, WEIGHT, 2)
    assert float(right[0]) == pytest.approx(np.sum(OF_LOGP * logp), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), left, right)


def test_bfloat16_gradients_are_near_those_of_float32():
    def gradients(dtype):
        f = lambda h, w: weighted_sum(Head(local_compute(dtype), True), h, w, TARGETS, OF_LOGP, 3)  # noqa: E731
        return jax.jit(jax.grad(f, (0, 1)))(HIDDEN, WEIGHT)

    for exact, rounded in zip(gradients("float32"), gradients("bfloat16"), strict=True):
        assert rounded.dtype == jnp.float32
        assert 0 < np.linalg.norm(exact - rounded) < 0.02 * np.linalg.norm(exact)


def test_chunks_without_a_loss_are_not_computed():
    poisoned = HIDDEN.copy()
    poisoned[1:] = np.nan

    @jax.jit
    def both(hidden):
        f = lambda h, w: weighted_sum(Head(local_compute(), True), h, w, TARGETS, OF_LOGP, 1)  # noqa: E731
        g = lambda h, w: jnp.sum(  # noqa: E731
            OF_LOGP * score_chunks(Head(local_compute(), True), h, w, TARGETS, None, None, 1)[0]
        )
        return [jax.value_and_grad(k, (0, 1))(hidden, WEIGHT) for k in (f, g)]

    assert all(np.isfinite(x).all() for x in jax.tree.leaves(both(poisoned)))
    jax.tree.map(np.testing.assert_array_equal, both(poisoned), both(HIDDEN))


@pytest.mark.parametrize("chunk", [1, 3, 8, 50])
def test_wanted_positions_come_first_and_fill_as_few_chunks_as_they_can(chunk):
    wanted = np.random.default_rng(chunk).random((3, 20)) < 0.3
    order = _sort(jnp.asarray(wanted), min(chunk, 20))
    places = np.asarray(order.places).reshape(3, -1)
    most = wanted.sum(axis=1).max()
    assert int(order.live) == -(-most // min(chunk, 20))
    for row in range(3):
        count = wanted[row].sum()
        np.testing.assert_array_equal(places[row, :count], np.flatnonzero(wanted[row]))
        np.testing.assert_array_equal(places[row][order.back[row]], np.arange(20))
    assert int(_sort(jnp.zeros((3, 20), bool), min(chunk, 20)).live) == 0


@pytest.mark.parametrize("chunk", [1, 3, 8, 20])
def test_what_fills_the_last_chunk_of_each_row_does_not_count(chunk):
    values = np.arange(1.0, 61.0).reshape(3, 20)
    order = _sort(jnp.ones((3, 20), bool), chunk)
    counted = jnp.where(_counted(order), _arrange(order, jnp.asarray(values)), 0.0)
    np.testing.assert_array_equal(jnp.sum(counted, axis=(0, 2)), values.sum(axis=1))


def test_on_one_device_all_rows_fill_chunks_together_and_on_several_each_its_own():
    on = lambda *sizes: Compute(mesh=AbstractMesh(sizes, AXES))  # noqa: E731

    def shape(rows, length, compute, chunk):
        with mock.patch.multiple(logps, CHUNK=chunk, SHARED_CHUNK=chunk):
            return chunked(rows, length, compute)

    assert shape(8, 257, Compute(), 512) == (1, 8 * 256, 512)
    assert shape(8, 257, on(1, 1, 1), 512) == (1, 8 * 256, 512)
    assert shape(2, 9, Compute(), 512) == (1, 16, 16)
    # Four groups of devices with two rows each; those of `tensor` have the same rows.
    assert shape(8, 257, on(2, 2, 1), 512) == (8, 256, 256)
    assert shape(8, 257, on(2, 2, 2), 512) == (8, 256, 256)
    assert shape(8, 257, on(1, 1, 2), 512) == (8, 256, 64)
    assert shape(6, 257, on(4, 1, 1), 512) == (6, 256, 256)
    assert shape(64, 257, on(2, 1, 1), 4) == (64, 256, 1)


MODEL = ModelConfig("qwen2", 97, 32, 48, 1, 4, 2, 8, qkv_bias=True)


def test_a_mask_leaves_the_wanted_values_and_their_gradients_as_they_are():
    params = random_params(MODEL, 1)
    rng = np.random.default_rng(3)
    members = []
    for size in (12, 7, 19, 3):
        mask = (rng.random(size) < 0.4).astype(np.float32)
        ids = rng.integers(0, 97, size).astype(np.int32)
        members.append(Example(ids, mask, 0 * mask, 0 * mask))
    batch = pack(members, 24)

    @functools.partial(jax.jit, static_argnames=("masked", "chunk"))
    def run(masked, chunk):
        def f(params):
            mask = batch.mask if masked else None
            with mock.patch.object(logps, "CHUNK", chunk):
                logp, entropy = token_logps(params, MODEL, batch, local_compute(), mask=mask)
            return jnp.sum(logp * batch.mask), (logp * batch.mask, entropy * batch.mask)

        return jax.value_and_grad(f, has_aux=True)(params)

    @jax.jit
    @jax.value_and_grad
    def at_once(params):
        with mock.patch.object(logps, "CHUNK", 6):
            return logp_sum(params, MODEL, batch, local_compute())

    (total, values), gradient = run(False, 512)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    (_, ours), ours_gradient = run(True, 6)
    jax.tree.map(close, ours, values)
    jax.tree.map(close, ours_gradient, gradient)
    value, ours_gradient = at_once(params)
    close(value, total)
    jax.tree.map(close, ours_gradient, gradient)


@pytest.mark.parametrize(
    "chunk", [6, pytest.param(23, marks=pytest.mark.slow), pytest.param(45, marks=pytest.mark.slow)]
)
def test_where_every_position_is_wanted_each_counts_once(monkeypatch, chunk):
    """Chunks that do not divide the positions are filled, with what must not count."""
    params = random_params(MODEL, 1)
    ids = np.random.default_rng(3).integers(0, 97, 24).astype(np.int32)
    ones = np.ones(24, np.float32)
    batch = pack([Example(ids, ones, 0 * ones, 0 * ones)] * 2, 24)
    monkeypatch.setattr(logps, "CHUNK", chunk)

    def by_values(params):
        return jnp.sum(token_logps(params, MODEL, batch, local_compute())[0] * batch.mask)

    def at_once(params):
        return logp_sum(params, MODEL, batch, local_compute())

    assert batch.mask[:, 1:].all()
    of_values, of_sum = (jax.jit(jax.value_and_grad(f))(params) for f in (by_values, at_once))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, of_sum, of_values)


def test_one_long_row_among_empty_ones_costs_its_own_chunks_only(monkeypatch):
    params = random_params(MODEL, 1)
    rows = [Example(np.arange(24, dtype=np.int32), *np.ones((3, 24), np.float32))] * 4
    batch = pack(rows, 24)
    mask = np.zeros((4, 24), np.float32)
    mask[2, 1:] = 1.0
    monkeypatch.setattr(logps, "CHUNK", 10)
    hidden, _, order = _hidden(params, MODEL, batch, local_compute(), mask)
    assert hidden.shape[:3] == (10, 1, 10)  # 4 x 23 positions
    assert int(order.live) == 3
