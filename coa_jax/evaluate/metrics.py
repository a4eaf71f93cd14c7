"""Figures of graded trajectories."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from coa_jax.trajectory import Trajectory, format_valid

Z95 = 1.959963984540054
"""Two-sided 95 % quantile of the standard normal distribution."""


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Chance that at least one of k of the samples is correct: ``1 - C(n-c, k) / C(n, k)``.

    Unbiased for draws without replacement (Chen et al. 2021, arXiv 2107.03374).
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k={k} needs between 1 and {samples} samples")
    if samples - correct < k:
        return 1.0
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def wilson_interval(successes: float, n: int) -> tuple[float, float]:
    """95 % score interval of a proportion; (0, 1) without trials."""
    if n == 0:
        return 0.0, 1.0
    p, z2 = successes / n, Z95**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # The ends are exact where nothing or everything succeeded; rounding would leave 1e-17.
    low = centre - half if successes > 0 else 0.0
    high = centre + half if successes < n else 1.0
    return low, high


def mean_interval(rates: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean of per-task rates; tasks, not samples, are independent.

    With one sample a task the rates are 0 or 1 and the interval is Wilson's.
    """
    n = len(rates)
    if n < 2 or all(rate in (0.0, 1.0) for rate in rates):
        return wilson_interval(sum(rates), n)
    mean = float(np.mean(rates))
    half = Z95 * float(np.std(rates, ddof=1)) / math.sqrt(n)
    return max(0.0, mean - half), min(1.0, mean + half)


def summarize(groups: Sequence[Sequence[Trajectory]]) -> dict[str, Any]:
    """The block of a stage in ``summary.json``.

    Args:
        groups: for each task its graded samples; samples without a grade are left out, and tasks
            without a graded sample too.
    """
    kept = _graded(groups)
    flat = [trajectory for group in kept for trajectory in group]
    rates = [_rate(group) for group in kept]
    low, high = mean_interval(rates)
    return {
        "pass_at_1": _mean(rates),
        "ci95": [low, high],
        "n": len(kept),
        "tokens_per_task": _mean([t.num_policy_tokens for t in flat]),
        "tool_calls_per_task": _mean([len(t.tool_calls) for t in flat]),
        "format_valid": _mean([format_valid(t) for t in flat]),
    }


def details(groups: Sequence[Sequence[Trajectory]]) -> dict[str, Any]:
    """Everything else about a stage: pass@k, by hops and kind, tools, ends, tokens per solved."""
    kept = _graded(groups)
    flat = [trajectory for group in kept for trajectory in group]
    samples = min((len(group) for group in kept), default=0)
    solved = sum(_solved(t) for t in flat)
    calls = [call for t in flat for call in t.tool_calls]
    tokens = sum(t.num_policy_tokens for t in flat)
    return {
        "samples_per_task": samples,
        "ungraded": sum(len(group) for group in groups) - len(flat),
        "pass_at_k": {
            str(k): _mean([pass_at_k(len(g), sum(map(_solved, g)), k) for g in kept])
            for k in _powers(samples)
        },
        "by_hops": _by(kept, "hops"),
        "by_kind": _by(kept, "kind"),
        "tools": {
            name: {
                "calls": sum(call.tool == name for call in calls),
                "outcomes": dict(Counter(call.outcome for call in calls if call.tool == name)),
            }
            for name in sorted({call.tool for call in calls})
        },
        "stops": dict(sorted(Counter(str(t.stop_reason) for t in flat).items())),
        "tokens_per_solved": tokens / solved if solved else None,
    }


def _graded(groups: Sequence[Sequence[Trajectory]]) -> list[list[Trajectory]]:
    kept = [[t for t in g if t.reward is not None and t.reward.value is not None] for g in groups]
    return [group for group in kept if group]


def _solved(trajectory: Trajectory) -> bool:
    return trajectory.reward is not None and trajectory.reward.value == 1.0


def _rate(group: Sequence[Trajectory]) -> float:
    return sum(map(_solved, group)) / len(group)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _powers(limit: int) -> list[int]:
    return [2**i for i in range(limit.bit_length()) if 2**i <= limit]


def _by(groups: Sequence[Sequence[Trajectory]], key: str) -> dict[str, Any]:
    rates = defaultdict(list)
    for group in groups:
        rates[str(group[0].metadata.get(key, "?"))].append(_rate(group))
    return {
        name: {"pass_at_1": _mean(values), "n": len(values)}
        for name, values in sorted(rates.items())
    }
