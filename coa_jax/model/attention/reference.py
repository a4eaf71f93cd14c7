"""Attention written with plain products: what every kernel must agree with."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from coa_jax.model.products import project


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, dtype: Any) -> jax.Array:
    """q ``[B,T,N,G,K]``, k ``[B,N,K,S]``, v ``[B,N,S,K]``, mask ``[B,T,S]`` -> like q."""
    b, t, n, g, width = q.shape
    # The queries of a group are rows of one product with their head's keys.
    q = q.transpose(0, 2, 3, 1, 4).reshape(b, n, g * t, width) * width**-0.5
    scores = project("bnqk,bnks->bnqs", q, k, dtype).reshape(b, n, g, t, -1)
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -1e30), axis=-1)
    attended = project("bnqs,bnsk->bnqk", weights.reshape(b, n, g * t, -1), v, dtype)
    return attended.reshape(b, n, g, t, width).transpose(0, 3, 1, 2, 4)
