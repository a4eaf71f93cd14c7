"""Computes confidence intervals of a proportion that was observed in a number of trials."""

from __future__ import annotations

import math

_Z = 1.959963984540054  # two-sided 95 % quantile of the normal distribution


def wilson_interval(successes: float, n: int) -> tuple[float, float]:
    """Returns the 95 % confidence interval of a proportion (score interval, Wilson 1927).

    Args:
        successes: number of successes; may be fractional.
        n: number of trials.

    Returns:
        The low and high end of the interval; (0, 1) if ``n`` is 0.
    """
    if n == 0:
        return 0.0, 1.0
    p, z2 = successes / n, _Z**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # If no trial or every trial succeeded, one end is exactly 0 or 1; rounding would change it.
    low = centre - half if successes > 0 else 0.0
    high = centre + half if successes < n else 1.0
    return low, high
