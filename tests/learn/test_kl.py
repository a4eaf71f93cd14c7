"""KL estimators, in expectation over a whole distribution."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coa_jax.learn.objectives import kl_estimate

RNG = np.random.default_rng(3)
THETA, OTHER = RNG.normal(0, 1.0, (2, 11)).astype(np.float32)


def divergence(theta, other):
    p, q = jax.nn.log_softmax(theta), jax.nn.log_softmax(other)
    return jnp.sum(jnp.exp(p) * (p - q))


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_mean_of_k1_and_of_k3_is_the_divergence(kind):
    p, q = jax.nn.log_softmax(THETA), jax.nn.log_softmax(OTHER)
    mean = float(jnp.sum(jnp.exp(p) * kl_estimate(kind, p, q)))
    assert mean == pytest.approx(float(divergence(THETA, OTHER)), rel=1e-4)
    assert (np.asarray(kl_estimate("k3", p, q)) >= 0).all()


def mean_slope(kind):
    """Mean gradient of the estimator, tokens being sampled from the policy."""
    probabilities = jax.nn.softmax(THETA)
    q = jax.nn.log_softmax(OTHER)
    return jax.grad(
        lambda theta: jnp.sum(probabilities * kl_estimate(kind, jax.nn.log_softmax(theta), q))
    )(THETA)


def test_the_mean_gradient_of_k2_is_that_of_the_divergence():
    np.testing.assert_allclose(mean_slope("k2"), jax.grad(divergence)(THETA, OTHER), atol=1e-5)


def test_the_mean_gradient_of_k1_is_nothing():
    np.testing.assert_allclose(mean_slope("k1"), 0.0, atol=1e-6)


def test_the_mean_gradient_of_k3_is_that_of_the_reverse_divergence():
    expected = jax.grad(lambda theta: divergence(OTHER, theta))(THETA)
    np.testing.assert_allclose(mean_slope("k3"), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_a_policy_that_is_far_above_the_reference_is_pulled_back(kind):
    at = np.float32([0.0, 19.0, 21.0, 100.0])
    slopes = jax.grad(lambda logp: jnp.sum(kl_estimate(kind, logp, np.zeros(4, np.float32))))(at)
    expected = at if kind == "k2" else 1 - np.exp(-at)
    np.testing.assert_allclose(slopes, expected, rtol=1e-5, atol=1e-6)


def test_far_policies_give_finite_estimates():
    for kind in ("k1", "k2", "k3"):
        assert np.isfinite(kl_estimate(kind, np.float32([-1e4, 0]), np.float32([0, -1e4]))).all()
