"""The advantage of maximum-likelihood RL (MaxRL, Tajwar et al., arXiv 2602.02710)."""

import numpy as np


def maxrl(rewards: np.ndarray) -> np.ndarray:
    """Returns ``(R - mean) / mean`` of non-negative rewards, or 0 if all rewards are 0.

    If rewards are 0 or 1, the policy gradient estimates the gradient of the logarithm of the pass
    rate. Tasks that are rarely solved therefore have more weight.
    """
    mean = rewards.mean()
    return (rewards - mean) / mean if mean > 0 else np.zeros_like(rewards)
