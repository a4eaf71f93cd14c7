"""The advantage of maximum-likelihood RL (MaxRL, Tajwar et al., arXiv 2602.02710)."""

import numpy as np


def maxrl(rewards: np.ndarray) -> np.ndarray:
    """``(R - mean) / mean`` of non-negative rewards; 0 for a group whose rewards are all 0.

    For rewards 0 and 1, the policy gradient estimates the gradient of the logarithm of the pass
    rate, so tasks that are rarely solved have more weight.
    """
    mean = rewards.mean()
    return (rewards - mean) / mean if mean > 0 else np.zeros_like(rewards)
