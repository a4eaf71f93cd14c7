"""Estimates of the divergence between two policies from one sample (Schulman 2020).

http://joschu.net/blog/kl-approx.html; which of them has which gradient: arXiv 2512.21852.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

_LEAST = -20.0  # d of k3, whose exponential would overflow below


def kl_estimate(kind: str, logp: ArrayLike, other: ArrayLike) -> jax.Array:
    """KL(p || q) at tokens that were sampled from p, with d = log p - log q.

    k1 = d, unbiased, noisy and of either sign; k2 = d^2 / 2, biased, but its gradient by the
    parameters of p is an unbiased one of the divergence; k3 = exp(-d) - 1 + d, unbiased, never
    negative, with little variance.

    Args:
        kind: ``k1``, ``k2`` or ``k3``.
        logp: log p of the tokens.
        other: log q of the tokens.

    Returns:
        One estimate a token.
    """
    d = jnp.asarray(logp) - other
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d * d
    if kind == "k3":
        d = jnp.maximum(d, _LEAST)
        return jnp.expm1(-d) + d
    raise ValueError(f"no estimator {kind!r}")
