"""Computes statistics of samples: rates with their errors, and pass@k.

Tasks are independent of each other, but the samples of one task are not. Therefore a rate is the
mean over tasks of the rate within each task. Its standard error is the standard deviation of these
rates divided by the square root of the number of tasks, that is, errors are clustered by task
(Miller 2024, arXiv 2411.00640, section 2.2). Samples without a grade do not count in any rate.
Tasks without a graded sample are left out. If no task is left, the rate is None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coa_jax.data.intervals import wilson_interval


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Returns pass@k: the probability that at least one of k samples is correct.

    The function computes the unbiased estimate ``1 - C(n-c, k) / C(n, k)`` (Chen et al. 2021, arXiv
    2107.03374). It is the probability that k samples, drawn without replacement from the n samples,
    include a correct one.

    Args:
        samples: number n of samples of the task.
        correct: number c of correct samples.
        k: number of samples that are drawn.

    Raises:
        ValueError: ``k`` is below 1 or above ``samples``.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k={k} needs between 1 and {samples} samples")
    if samples - correct < k:
        return 1.0
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def student_t(n: int) -> float:
    """Returns half the width of the 95 % confidence interval of a mean, in standard errors.

    For n values, this is the two-sided 95 % quantile of Student's t with ``n - 1`` degrees of
    freedom.
    """
    from scipy import special  # here, because loading it takes half a second

    return float(special.stdtrit(n - 1, 0.975))


def mean_interval(groups: Sequence[Sequence[bool]]) -> tuple[float, float]:
    """Returns the 95 % confidence interval of pass@1, the mean over tasks of the rate of each task.

    The interval is Student's t interval over the rates of the tasks, because tasks are independent,
    but samples of the same task are not. The rates of a few tasks may be equal by chance, which
    would make this interval too narrow. Therefore it is widened until it contains Wilson's interval
    for independent samples. If there is only one task, or if all samples of each task agree (as
    with one sample per task), the result is Wilson's interval alone.

    Args:
        groups: for each task, a list that says whether each graded sample is right. Tasks without
            samples are left out.
    """
    groups = [group for group in groups if group]
    rates = [sum(group) / len(group) for group in groups]
    n, value = len(rates), mean(rates) or 0.0
    # If all samples of each task agree, additional samples per task add no information.
    all_alike = all(rate in (0.0, 1.0) for rate in rates)
    samples = n if all_alike else sum(map(len, groups))
    low, high = wilson_interval(value * samples, samples)
    if n < 2 or all_alike:
        return low, high
    half = student_t(n) * (standard_error(rates) or 0.0)
    return max(0.0, min(low, value - half)), min(1.0, max(high, value + half))


def standard_error(rates: Sequence[float]) -> float | None:
    """Returns the standard error of the mean of the tasks' rates; None for fewer than two tasks."""
    if len(rates) < 2:
        return None
    return float(np.std(rates, ddof=1)) / math.sqrt(len(rates))


def mean(values: Sequence[float]) -> float | None:
    """Returns the mean of some numbers; None if there are none."""
    return float(np.mean(values)) if len(values) else None


def rate(groups: Sequence[Sequence[bool]]) -> dict[str, Any]:
    """Returns pass@1 with its standard error, its interval and the number of tasks.

    Args:
        groups: for each task, a list that says whether each graded sample is right.

    Returns:
        ``pass_at_1``, the mean over tasks of the share of right samples; ``se``, its standard
        error; ``ci95``, the 95 % interval; ``n``, the number of tasks with graded samples. If no
        sample is graded, ``pass_at_1`` is None and the interval is [0, 1].
    """
    rates = [sum(group) / len(group) for group in groups if group]
    return {
        "pass_at_1": mean(rates),
        "se": standard_error(rates),
        "ci95": list(mean_interval(groups)),
        "n": len(rates),
    }


def at_k(groups: Sequence[Sequence[bool]]) -> dict[str, dict[str, Any]]:
    """Returns pass@k for several k: the powers of two, the maximum number of samples, and 3.

    The Chain-of-Agents paper reports pass@3 (Tab 13).

    Args:
        groups: for each task, a list that says whether each graded sample is right.

    Returns:
        A mapping from each k, as text, to its figures: ``value``, the mean of pass@k over the tasks
        with at least k graded samples; ``se``, its standard error; ``n``, the number of these
        tasks. A k without such a task is left out.
    """
    most = max(map(len, groups), default=0)
    result = {}
    for k in sorted({*(2**i for i in range(most.bit_length())), 3, most} - {0}):
        values = [pass_at_k(len(group), sum(group), k) for group in groups if len(group) >= k]
        if values:
            result[str(k)] = {"value": mean(values), "se": standard_error(values), "n": len(values)}
    return result


def rates_by(
    pairs: Sequence[tuple[Mapping[str, Any], Sequence[bool]]], key: str
) -> dict[str, dict[str, Any]]:
    """Groups tasks by the value of a metadata field, and returns the `rate` of each group.

    Args:
        pairs: for each task its metadata, and a list that says whether each graded sample is right.
        key: name of the field. Tasks without this field are left out.
    """
    groups: dict[str, list[Sequence[bool]]] = {}
    for metadata, solved in pairs:
        if metadata.get(key) is not None:
            groups.setdefault(str(metadata[key]), []).append(solved)

    def order(name: str) -> tuple[int, str]:
        return (len(name) if name.isdigit() else 0), name

    return {name: rate(groups[name]) for name in sorted(groups, key=order)}
