"""The loss of soft adaptive policy optimisation (SAPO, Gao et al., arXiv 2511.20347)."""

import jax
import jax.numpy as jnp


def sapo(ratio: jax.Array, advantages: jax.Array, tau_pos: float = 1.0, tau_neg: float = 1.05):
    """Returns the loss ``-(4 / tau) sigmoid(tau (r - 1)) A`` and the slope of its gate.

    The sigmoid is a smooth gate that takes the place of the clip. The slope of the gate is 1 at
    ratio r = 1 and falls on both sides, faster for negative advantages.
    """
    tau = jnp.where(advantages > 0, tau_pos, tau_neg)
    gate = jax.nn.sigmoid(tau * (ratio - 1))
    return -(4 / tau) * gate * advantages, {"gate_slope": 4 * gate * (1 - gate)}
