"""The interval of a share that was observed in some trials."""

from __future__ import annotations

import math

_Z = 1.959963984540054  # two-sided 95 % quantile of the normal distribution


def wilson_interval(successes: float, n: int) -> tuple[float, float]:
    """Returns the 95 % score interval of a proportion (Wilson 1927); (0, 1) without trials."""
    if n == 0:
        return 0.0, 1.0
    p, z2 = successes / n, _Z**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # The ends are exact if nothing or everything succeeded; rounding would leave 1e-17.
    low = centre - half if successes > 0 else 0.0
    high = centre + half if successes < n else 1.0
    return low, high
