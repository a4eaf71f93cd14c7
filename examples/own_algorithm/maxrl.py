"""The advantage of maximum-likelihood RL (MaxRL, Tajwar et al., arXiv 2602.02710)."""

import numpy as np


def maxrl(rewards: np.ndarray) -> np.ndarray:
    """``(R - mean) / mean`` of rewards from 0 on; 0 for a group without a reward.

    Of right or wrong answers, the gradient is that of the logarithm of the pass rate, as far as a
    group of this size can estimate it: tasks that are seldom solved count for more.
    """
    mean = rewards.mean()
    return (rewards - mean) / mean if mean > 0 else np.zeros_like(rewards)
