"""Computes the rates of right answers of an evaluation, and confidence intervals of proportions."""

from __future__ import annotations

import fractions
import math
from collections.abc import Mapping
from typing import Any

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


def rates(outcome: Mapping[str, Any]) -> dict[str, fractions.Fraction]:
    """Returns the share of right answers of each task in a result file, by task id.

    The share is an exact fraction of the task's graded samples. Tasks without graded samples are
    left out.
    """
    rate_of = {}
    for task in outcome["tasks"]:
        values = [s["value"] for s in task["samples"] if s["value"] is not None]
        if values:
            solved = sum(value == 1.0 for value in values)
            rate_of[task["id"]] = fractions.Fraction(solved, len(values))
    return rate_of
