"""Compares two result files, A and B, task by task, and tests whether one is better.

A task that has graded samples in only one of the files is left out and counted. The rate of a task
is the share of its graded samples that are right. The difference is the mean over tasks of the rate
in B minus the rate in A.

The p-value of the difference comes from the paired permutation test: under the null hypothesis, the
difference of each task could as well have the other sign. The test is exact; with one sample per
task it is McNemar's exact test. The confidence interval is a bootstrap over tasks. There is no
interval for fewer than 10 tasks, or if all tasks have the same difference.
"""

from __future__ import annotations

import dataclasses
import fractions
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coa_jax.data.intervals import rates
from coa_jax.errors import UserError
from coa_jax.evaluation.metrics import standard_error
from coa_jax.evaluation.results import FORMAT
from coa_jax.files import durable
from coa_jax.storage import local

_RESAMPLES = 10_000
_FEWEST = 10  # fewest tasks for an interval; with fewer tasks, resampling makes it too narrow
_MOST_CELLS = 20_000_000  # size of the exact distribution above which signs are sampled instead
_DRAWS = 100_000
_SETTINGS = (
    "tasks", "split", "protocol", "prompt", "opening", "attempts", "rollout", "sampling", "tools",
    "grading", "dtype", "cache_dtype", "observation_chars",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The statistics of a comparison of two evaluations, A and B.

    Attributes:
        tasks: number of tasks with graded samples in both evaluations.
        only_a, only_b: number of tasks with graded samples only in A, and only in B.
        rate_a, rate_b: pass@1 of A and of B over the common tasks.
        difference: ``rate_b - rate_a``.
        se: standard error of the difference, paired by task; None for fewer than two tasks.
        ci95: low and high end of the 95 % bootstrap interval of the difference; None if there are
            fewer than 10 common tasks or all tasks have the same difference.
        better, worse, same: number of tasks whose rate in B is higher than, lower than and equal to
            the rate in A.
        p: two-sided p-value of the permutation test, which is paired by task.
        test: name of the test, see `permutation_test`.
    """

    tasks: int
    only_a: int
    only_b: int
    rate_a: float
    rate_b: float
    difference: float
    se: float | None
    ci95: tuple[float, float] | None
    better: int
    worse: int
    same: int
    p: float
    test: str


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> Comparison:
    """Compares two evaluations of the same tasks, given the contents of their result files.

    Raises:
        UserError: no task has graded samples in both files.
    """
    first, second = rates(a), rates(b)
    common = [name for name in first if name in second]
    if not common:
        raise UserError(
            "the two result files have no graded task in common: they have "
            f"{len(first)} and {len(second)} graded tasks; compare evaluations of the same tasks"
        )
    differences = [second[name] - first[name] for name in common]
    plain = np.array([float(d) for d in differences])
    p, test = permutation_test(differences)
    return Comparison(
        tasks=len(common),
        only_a=len(first) - len(common),
        only_b=len(second) - len(common),
        rate_a=float(np.mean([float(first[name]) for name in common])),
        rate_b=float(np.mean([float(second[name]) for name in common])),
        difference=float(plain.mean()),
        se=standard_error(plain.tolist()),
        ci95=bootstrap_interval(plain),
        better=sum(d > 0 for d in differences),
        worse=sum(d < 0 for d in differences),
        same=sum(d == 0 for d in differences),
        p=p,
        test=test,
    )


def permutation_test(differences: Sequence[fractions.Fraction]) -> tuple[float, str]:
    """Returns the two-sided p-value of a permutation test of paired differences.

    The test permutes the signs of the differences. The function multiplies the differences by their
    common denominator, and then computes the distribution of their sum over all ``2^n`` choices of
    signs by convolution. If the convolution would take too much memory, it samples signs at random
    with seed 0 instead.

    Returns:
        The p-value, and the name of the test. The test is McNemar's if every difference is -1, 0 or
        1.
    """
    nonzero = [d for d in differences if d != 0]
    if not nonzero:
        return 1.0, "no task differs"
    scale = math.lcm(*(d.denominator for d in nonzero))
    steps = [abs(int(d * scale)) for d in nonzero]
    observed = abs(int(sum(nonzero) * scale))
    reach = sum(steps)
    if len(nonzero) * reach > _MOST_CELLS:
        signs = np.random.default_rng(0)
        sizes = np.array([abs(float(d)) for d in nonzero])
        # Rounding must not lose the choices of signs that give the observed sum.
        least = abs(float(sum(nonzero))) - 1e-9 * float(sizes.sum())
        hits = sum(
            abs(float(sizes @ signs.choice((-1.0, 1.0), len(sizes)))) >= least
            for _ in range(_DRAWS)
        )
        return (hits + 1) / (_DRAWS + 1), f"paired permutation test, {_DRAWS:,} draws"
    # chance[i] is the probability of the sum i - reach.
    chance = np.zeros(2 * reach + 1)
    chance[reach] = 1.0
    for step in steps:
        up, down = np.zeros_like(chance), np.zeros_like(chance)
        up[step:], down[:-step] = chance[:-step], chance[step:]
        chance = (up + down) / 2
    sums = np.abs(np.arange(-reach, reach + 1))
    exact = float(chance[sums >= observed].sum())
    name = "McNemar's exact test" if set(steps) == {scale} else "exact paired permutation test"
    return min(1.0, exact), name


def bootstrap_interval(differences: np.ndarray) -> tuple[float, float] | None:
    """Returns the 95 % bootstrap interval of the mean of paired differences.

    Args:
        differences: float64 ``[tasks]``, the difference of each task.

    Returns:
        The low and the high end. The result is None if resampling is not informative, that is, for
        fewer than 10 tasks, or if all differences are equal.
    """
    random = np.random.default_rng(0)
    n = len(differences)
    if n < _FEWEST or np.ptp(differences) == 0:
        return None
    means = [float(differences[random.integers(0, n, n)].mean()) for _ in range(_RESAMPLES)]
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def result_files(run: Path) -> dict[str, Path]:
    """Returns the result file of each stage that a run evaluated; gzip may have compressed it."""
    names = ("results.json.gz", "results.json")  # of two files of a stage, the second is returned
    return {path.parent.name: path for name in names for path in run.glob(f"evaluate/*/{name}")}


def load(path: str) -> dict[str, Any]:
    """Reads the result file ``results.json`` or ``results.json.gz`` of an evaluation.

    Raises:
        UserError: the file cannot be read or is not a valid result file.
    """
    outcome = durable.read_json_object(Path(local(path)), limit=None)
    if outcome.get("format") != FORMAT:
        raise UserError(f"{path}: not a result file of coa-jax evaluate")
    try:
        rates(outcome)
        complete = isinstance(outcome["stage"], str) and isinstance(outcome["settings"], dict)
    except (KeyError, TypeError):
        complete = False
    if not complete:
        raise UserError(f"{path}: a damaged result file; run coa-jax evaluate again")
    return outcome


def format_comparison(a: Mapping[str, Any], b: Mapping[str, Any], result: Comparison) -> str:
    """Formats a comparison for a terminal.

    Args:
        a, b: contents of the two result files.
        result: comparison of the two files.
    """
    span = f"95 % {result.ci95[0]:+.3f} to {result.ci95[1]:+.3f}" if result.ci95 else "no interval"
    lines = [
        f"A {a['stage']}: pass@1 {result.rate_a:.3f}",
        f"B {b['stage']}: pass@1 {result.rate_b:.3f}",
        f"B - A: {result.difference:+.3f} ({span}, n {result.tasks})",
        f"{result.test}: p = {result.p:.4g}",
        f"B is better at {result.better} tasks, worse at {result.worse}, the same at {result.same}",
    ]
    for name, count in (("A", result.only_a), ("B", result.only_b)):
        if count:
            lines.append(f"left out: {count} tasks with graded samples in {name} only")
    lines += [f"note: the two differ in {key} too" for key in differing_settings(a, b)]
    return "\n".join(lines)


def differing_settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Returns the names of the settings in which two result files differ, except the policy.

    If such settings differ, the comparison does not compare the policies alone.
    """
    mine, other = _measured_with(a), _measured_with(b)
    return [key for key in mine if mine[key] != other[key]]


def _measured_with(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings, other than the policy, on which pass@1 depends."""
    settings = outcome["settings"]
    measured = {key: settings.get(key) for key in _SETTINGS}
    if isinstance(grading := settings.get("grading"), Mapping):
        # The model that picks a sample has no effect on the mean over all samples.
        measured["grading"] = {name: grading[name] for name in grading if name != "pick"}
    return measured
