"""Estimates of the divergence between two policies from one sample (Schulman 2020).

http://joschu.net/blog/kl-approx.html; which of them has which gradient: arXiv 2512.21852.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

_BOUND = 20.0  # of a difference of log-probabilities; beyond it exp would overflow


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
    d = jnp.clip(jnp.asarray(logp) - other, -_BOUND, _BOUND)
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d * d
    if kind == "k3":
        return jnp.expm1(-d) + d
    raise ValueError(f"no estimator {kind!r}")
