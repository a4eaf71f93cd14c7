"""Advantages of the samples of one group from their rewards (paper eq 10)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def group_advantages(
    rewards: Sequence[float | None], kind: str = "group", eps: float = 1e-6
) -> np.ndarray:
    """Advantages within one group of samples.

    A sample that could not be graded (None) neither counts for the others nor learns.

    - ``group``: ``(R - mean) / (std + eps)`` (GRPO, arXiv 2402.03300 §4.1.2);
    - ``mean``: ``R - mean`` (Dr.GRPO, arXiv 2503.20783 §3.2);
    - ``leave_one_out``: R less the mean of the others, which is ``(R - mean) n / (n - 1)`` (RLOO,
      arXiv 2402.14740 eq 5);
    - ``batch`` and ``gae``: R itself, from which `learn.gae` makes advantages of tokens;
    - ``batch_baseline``: ``R - mean``, likewise (REINFORCE++ with baseline, arXiv 2501.03262).

    Args:
        rewards: of the group's samples.
        kind: see above.
        eps: keeps a standard score finite.

    Returns:
        float32, one per reward; all zero where the graded rewards of a group do not differ, except
        for ``batch`` and ``gae``, which give them as they are.
    """
    graded = np.array([reward is not None for reward in rewards], bool)
    values = np.array([0.0 if reward is None else reward for reward in rewards], np.float64)
    if kind in ("batch", "gae"):
        return np.where(graded, values, 0.0).astype(np.float32)
    if not has_signal(rewards):
        return np.zeros(len(rewards), np.float32)
    centred = values - values[graded].mean()
    if kind == "group":
        centred = centred / (values[graded].std() + eps)
    elif kind == "leave_one_out":
        centred = centred * (graded.sum() / (graded.sum() - 1))
    elif kind not in ("mean", "batch_baseline"):
        raise ValueError(f"no advantage {kind!r}")
    return np.where(graded, centred, 0.0).astype(np.float32)


def has_signal(rewards: Sequence[float | None]) -> bool:
    """Whether a group's graded rewards differ, so that its gradient is not zero."""
    graded = {reward for reward in rewards if reward is not None}
    return len(graded) > 1
