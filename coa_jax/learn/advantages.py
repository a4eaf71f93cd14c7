"""Group-relative advantages (paper eq 10)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def group_advantages(rewards: Sequence[float | None], eps: float = 1e-6) -> np.ndarray:
    """``(R - mean) / (std + eps)`` within one group.

    A sample that could not be graded (None) neither counts for the mean nor learns.

    Returns:
        float32, one per reward; all zero where the graded rewards do not differ.
    """
    if not has_signal(rewards):
        return np.zeros(len(rewards), np.float32)
    graded = np.array([reward is not None for reward in rewards])
    values = np.array([0.0 if reward is None else reward for reward in rewards], np.float64)
    mean = values[graded].mean()
    std = values[graded].std()
    return np.where(graded, (values - mean) / (std + eps), 0.0).astype(np.float32)


def has_signal(rewards: Sequence[float | None]) -> bool:
    """Whether a group's graded rewards differ, so that its gradient is not zero."""
    graded = {reward for reward in rewards if reward is not None}
    return len(graded) > 1
