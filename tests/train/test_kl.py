"""KL estimators, in expectation over a whole distribution."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coa_jax.train.objectives import kl_estimate

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


@pytest.mark.parametrize(
    ("kind", "of"),
    [
        ("k1", lambda theta: 0.0 * theta.sum()),
        ("k2", lambda theta: divergence(theta, OTHER)),
        ("k3", lambda theta: divergence(OTHER, theta)),
    ],
)
def test_the_mean_gradient_is_that_of_nothing_of_the_divergence_and_of_its_reverse(kind, of):
    """Tokens are sampled from the policy."""
    probabilities, q = jax.nn.softmax(THETA), jax.nn.log_softmax(OTHER)
    mean_slope = jax.grad(
        lambda theta: jnp.sum(probabilities * kl_estimate(kind, jax.nn.log_softmax(theta), q))
    )(THETA)
    np.testing.assert_allclose(mean_slope, jax.grad(of)(THETA), atol=1e-6 if kind == "k1" else 1e-5)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_a_policy_that_is_far_above_the_reference_is_pulled_back(kind):
    at = np.float32([0.0, 19.0, 21.0, 100.0])
    slopes = jax.grad(lambda logp: jnp.sum(kl_estimate(kind, logp, np.zeros(4, np.float32))))(at)
    expected = at if kind == "k2" else 1 - np.exp(-at)
    np.testing.assert_allclose(slopes, expected, rtol=1e-5, atol=1e-6)


def test_far_policies_give_finite_estimates():
    for kind in ("k1", "k2", "k3"):
        assert np.isfinite(kl_estimate(kind, np.float32([-1e4, 0]), np.float32([0, -1e4]))).all()
