"""Sampling follows the exact distribution, and every option has its documented effect."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.engine.sampling import filter_logits, sample, sample_keys
from coa_jax.model.compute import Compute

jitted_filter = jax.jit(filter_logits)


@pytest.fixture(scope="session")
def jitted_sample(backend):
    return jax.jit(functools.partial(sample, compute=Compute(backend=backend)))


def keys_of(n, seed=0):
    return sample_keys(np.stack([np.full(n, seed), np.zeros(n), np.arange(n)], -1).astype(np.int32))


@pytest.fixture(scope="session")
def draw(jitted_sample):
    def draws(logits, n, temperature=1.0, top_p=1.0, top_k=0):
        return jitted_sample(
            jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (n, len(logits))),
            keys_of(n),
            jnp.zeros(n, jnp.int32),
            jnp.full(n, temperature),
            jnp.full(n, top_p),
            jnp.full(n, top_k, jnp.int32),
        )

    return draws


def test_frequencies_follow_the_softmax(draw):
    logits = np.array([0.0, 1.0, 2.0, -1.0, 0.5] + [-30.0] * 300)
    n = 20_000
    tokens, logps = draw(logits, n)
    probs = np.exp(logits) / np.exp(logits).sum()
    counts = np.bincount(np.asarray(tokens), minlength=len(logits))
    seen = probs > 1e-6
    chi2 = (((counts - n * probs) ** 2) / (n * probs))[seen].sum()
    assert counts[~seen].sum() == 0
    assert chi2 < 18.5  # 99.9 % quantile of chi-square with 4 degrees of freedom
    np.testing.assert_allclose(logps, np.log(probs)[np.asarray(tokens)], atol=1e-5)


def test_temperature_zero_takes_the_largest_and_reports_its_plain_log_probability(draw):
    tokens, logps = draw([1.0, 3.0, 2.0], 4, temperature=0.0)
    assert tokens.tolist() == [1] * 4
    expected = 3 - np.log(np.exp([1.0, 3.0, 2.0]).sum())
    np.testing.assert_allclose(logps, expected, atol=2e-6)


@pytest.mark.parametrize(
    ("vocab", "top_p", "top_k"), [(300, 1.0, 0), (300, 0.9, 3), (9000, 1.0, 0)]
)
def test_the_lowest_temperatures_take_the_largest(jitted_sample, vocab, top_p, top_k):
    temperature = np.float32([1e-4, 1e-8, 1e-10, 1e-20, 1e-36, 1e-38, 1e-45])
    rows = np.arange(7)
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=4, size=(7, vocab)).astype(np.float32)
    best = rng.integers(vocab // 2, size=7)
    logits[rows, best] = logits.max(axis=-1) + 1
    allowed = rng.random((7, vocab)) < 0.5
    allowed[rows, best] = True
    logits[:, -1], allowed[:, -1] = 100, False
    cut = np.full(7, top_p, np.float32), np.full(7, top_k, np.int32)
    tokens, logps = jitted_sample(logits, keys_of(7), rows, temperature, *cut, allowed)
    np.testing.assert_array_equal(tokens, best)
    # Less than a normal number is greedy, whose log-probability is that of temperature 1.
    plain = jax.nn.log_softmax(jnp.where(allowed, logits, -jnp.inf))[rows, best]
    expected = np.where(temperature < np.finfo(np.float32).tiny, plain, 0.0)
    np.testing.assert_allclose(logps, expected, atol=2e-5)


@given(logits=st.lists(st.integers(-3, 3), min_size=1, max_size=300))
def test_greedy_takes_the_first_of_equal_logits(jitted_sample, logits):
    padded = np.full((1, 300), -5, np.float32)
    padded[0, : len(logits)] = logits
    none = np.zeros(1, np.int32)
    zero, one = np.zeros(1, np.float32), np.ones(1, np.float32)
    tokens, _ = jitted_sample(padded, keys_of(1), none, zero, one, none)
    assert tokens[0] == np.argmax(logits)


def test_log_probability_is_of_the_distribution_before_truncation(draw):
    logits = np.array([2.0, 1.0, 0.0])
    tokens, logps = draw(logits, 50, temperature=0.5, top_k=1)
    assert set(tokens.tolist()) == {0}
    expected = logits[0] / 0.5 - np.log(np.exp(logits / 0.5).sum())
    np.testing.assert_allclose(logps, expected, atol=2e-6)


def warped(logits, top_p, top_k):
    """What transformers keeps, in float64: top-k first, top-p among the rest."""
    torch = pytest.importorskip("torch")
    warpers = pytest.importorskip("transformers.generation.logits_process")
    scores = torch.tensor(np.asarray(logits, np.float64)[None])
    if top_k:
        scores = warpers.TopKLogitsWarper(top_k)(None, scores)
    return torch.isfinite(warpers.TopPLogitsWarper(top_p)(None, scores))[0].numpy()


@given(
    st.lists(st.integers(-8, 8), min_size=2, max_size=40),
    st.floats(0.05, 1.0),
    st.integers(0, 50),
)
def test_truncation_keeps_what_transformers_keeps(logits, top_p, top_k):
    logits = np.asarray(logits) / 4 + np.arange(len(logits)) * 1e-3
    logits[:2] = logits[0]  # two equal logits; all others differ
    expected = warped(logits, top_p, top_k)
    if (warped(logits, min(top_p + 1e-5, 1), top_k) != warped(logits, top_p - 1e-5, top_k)).any():
        return  # the border is within float32 rounding
    padded = np.full((1, 40), -np.inf, np.float32)
    padded[0, : len(logits)] = logits
    cut = np.asarray([top_p], np.float32), np.asarray([top_k], np.int32)
    kept = np.isfinite(np.asarray(jitted_filter(padded, *cut)[0]))[: len(logits)]
    expected[:2] = expected[:2].any()  # transformers may keep one of two equal tokens
    assert kept.tolist() == expected.tolist()


def test_the_nucleus_is_one_among_the_top_k(draw):
    # Probabilities 0.4, 0.3, 0.2, 0.1. Of the first three, 0.4 and 0.3 are 7/9 = 0.78, so that
    # top_p 0.75 keeps two. Without renormalisation, 0.7 would not reach 0.75.
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    tokens, logps = draw(logits, 400, top_p=0.75, top_k=3)
    assert set(tokens.tolist()) == {0, 1}
    np.testing.assert_allclose(logps, logits[np.asarray(tokens)], atol=2e-6)  # before truncation


def test_a_draw_depends_on_sample_and_position_and_not_on_the_row(backend):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 50)), jnp.float32)
    compute = Compute(backend=backend)

    @jax.jit
    def draw(logits, numbers, *rest):
        return sample(logits, sample_keys(numbers), *rest, compute=compute)

    def one(rows, row, position):
        stacked = jnp.broadcast_to(logits, (rows, 50))
        numbers = jnp.zeros((rows, 3), jnp.int32).at[row].set(jnp.array([1, 2, 3]))
        ones = jnp.ones(rows)
        zeros = jnp.zeros(rows, jnp.int32)
        tokens, _ = draw(stacked, numbers, jnp.full(rows, position), ones, ones, zeros)
        return int(tokens[row])

    assert one(1, 0, 7) == one(5, 3, 7) == one(16, 11, 7)
    assert len({one(1, 0, p) for p in range(30)}) > 5


@pytest.mark.parametrize(
    ("numbers", "key"),
    [
        ((0, 0, 0), (4165894930, 804218099)),
        ((1, 2, 3), (2563710487, 186860909)),
        ((-1, 2**31 - 1, -(2**31)), (217364937, 1166058945)),
    ],
)
def test_keys_never_change_and_are_those_of_jax_random(numbers, key):
    """A run goes on, and is replayed, with the keys that it began with."""
    seed, *others = numbers
    expected = jax.random.key(seed, impl="threefry2x32")
    for number in others:
        expected = jax.random.fold_in(expected, jnp.int32(number))
    assert jax.random.key_data(expected).tolist() == list(key)
    with jax.default_prng_impl("rbg"):
        rows = jax.jit(sample_keys)(np.int32([[5, 5, 5], numbers]))
        assert jax.random.key_data(rows)[1].tolist() == list(key)


@pytest.mark.parametrize("top_p", [1e-45, 1e-39, 1e-46])
def test_the_most_likely_token_stays_however_small_the_nucleus(draw, top_p):
    kept = jitted_filter(
        np.float32([[0.0, 2.0, 1.0]]), np.asarray([top_p], np.float32), np.zeros(1, np.int32)
    )
    assert np.isfinite(kept[0]).tolist() == [False, True, False]
    tokens, _ = draw([0.0, 2.0, 1.0], 20, top_p=top_p)
    assert set(tokens.tolist()) == {1}


def test_a_row_that_keeps_all_loses_nothing_where_another_is_cut():
    logits = jax.random.normal(jax.random.key(0), (2, 49_152)) * 3
    kept = jitted_filter(logits, np.float32([1.0, 0.9]), np.zeros(2, np.int32))
    np.testing.assert_array_equal(kept[0], logits[0])
    assert np.isinf(kept[1]).any()


def test_keys_differ_by_seed_prompt_and_sample():
    numbers = np.stack(np.meshgrid(*[np.arange(-4, 4, dtype=np.int32)] * 3), -1).reshape(-1, 3)
    assert len(np.unique(jax.random.key_data(sample_keys(numbers)), axis=0)) == len(numbers)


def test_many_rows_of_a_large_vocabulary_draw_valid_tokens(jitted_sample):
    logits = jax.random.normal(jax.random.key(0), (32, 49_152)) * 3
    ones = jnp.ones(32)
    tokens, logps = jitted_sample(
        logits, keys_of(32), jnp.arange(32), ones, ones, jnp.zeros(32, jnp.int32)
    )
    reference = jax.nn.log_softmax(logits)[jnp.arange(32), tokens]
    np.testing.assert_allclose(logps, reference, atol=2e-5)


@given(
    logits=st.lists(st.integers(-30, 30), min_size=2, max_size=300),
    seed=st.integers(0, 2**32 - 1),
    temperature=st.sampled_from([0.0, 0.3, 1.0]),
    top_p=st.sampled_from([0.2, 1.0]),
    top_k=st.sampled_from([0, 3]),
)
def test_only_allowed_tokens_are_drawn_with_their_probability_among_those(
    jitted_sample, logits, seed, temperature, top_p, top_k
):
    rng = np.random.default_rng(seed)
    padded = np.full(300, 40.0)  # what is not allowed is the most likely
    padded[: len(logits)] = logits
    allowed = rng.random((8, 300)) < rng.choice([0.01, 0.5], (8, 1))
    allowed[:, len(logits) :] = False
    allowed[np.arange(8), rng.integers(len(logits), size=8)] = True
    tokens, logps = jitted_sample(
        np.broadcast_to(padded, (8, 300)).astype(np.float32),
        keys_of(8, seed % 1000),
        np.arange(8),
        np.full(8, temperature, np.float32),
        np.full(8, top_p, np.float32),
        np.full(8, top_k, np.int32),
        allowed,
    )
    for row, token in enumerate(tokens):
        assert allowed[row, token]
        scaled = padded[allowed[row]] / (temperature or 1.0)
        expected = padded[token] / (temperature or 1.0) - np.logaddexp.reduce(scaled)
        assert logps[row] == pytest.approx(expected, abs=2e-4)
        if temperature == 0 or top_k == 1:
            assert padded[token] == scaled.max()
