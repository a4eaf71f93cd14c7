"""Metrics of samples, against brute force and published values."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from coa_jax.data.intervals import wilson_interval
from coa_jax.evaluation.metrics import (
    at_k,
    mean_interval,
    pass_at_k,
    rate,
    rates_by,
    standard_error,
)

GROUPS = st.lists(st.lists(st.booleans(), max_size=5), max_size=6)


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_correct_sample(n, data):
    correct = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    draws = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
    expected = sum(map(any, draws)) / len(draws)
    assert pass_at_k(n, correct, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("k", [0, 4])
def test_pass_at_k_needs_k_samples(k):
    with pytest.raises(ValueError, match=f"k={k} needs between 1 and 3 samples"):
        pass_at_k(3, 1, k)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (0, 0, 0.0, 1.0),  # without trials every share is possible
    ],
)
def test_wilson_intervals_are_the_published_ones(successes, n, low, high):
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 400), st.data())
def test_wilson_bounds_are_where_the_score_test_turns(n, data):
    successes = data.draw(st.integers(0, n))
    for bound in wilson_interval(successes, n):
        if 0 < bound < 1:
            score = (successes / n - bound) / math.sqrt(bound * (1 - bound) / n)
            assert abs(score) == pytest.approx(1.959964, rel=1e-4)


def test_wilson_bounds_are_exact_where_all_or_none_succeed():
    for n in range(1, 60):
        assert wilson_interval(0, n)[0] == 0.0
        assert wilson_interval(n, n)[1] == 1.0


def test_no_trials_say_nothing():
    assert wilson_interval(0, 0) == (0.0, 1.0)
    assert mean_interval([]) == (0.0, 1.0)
    assert rate([]) == {"pass_at_1": None, "se": None, "ci95": [0.0, 1.0], "n": 0}
    assert at_k([]) == {}


def test_the_interval_counts_tasks_and_not_samples():
    groups = [[True] * right + [False] * (8 - right) for right in (2, 6, 4, 8, 0, 3, 5)]
    rates = np.mean(groups, axis=1)
    theirs = stats.t.interval(0.95, 6, rates.mean(), stats.sem(rates))
    assert mean_interval(groups) == pytest.approx(theirs, rel=1e-9)
    assert mean_interval([[True], [False], [True], []]) == wilson_interval(2, 3)
    assert mean_interval([[True, False]]) == wilson_interval(1, 2)


@given(st.lists(st.lists(st.booleans(), max_size=4), max_size=6))
def test_the_interval_holds_the_rate_and_is_never_that_of_more_samples_than_there_are(groups):
    low, high = mean_interval(groups)
    rates = [np.mean(group) for group in groups if group]
    samples = sum(map(len, groups))
    assert 0.0 <= low <= np.mean(rates or [0.5]) <= high <= 1.0
    at_least = wilson_interval(np.mean(rates or [0.0]) * samples, samples)
    assert low <= at_least[0] and high >= at_least[1]


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=2, max_size=8))
def test_errors_are_those_of_a_regression_on_a_constant_with_clusters(groups):
    """With as many samples of each task: Liang-Zeger's sandwich, with n/(n-1) for n clusters."""
    flat = np.array(groups, float)
    scores = (flat - flat.mean()).sum(axis=1)
    sandwich = math.sqrt((scores**2).sum()) / flat.size
    n = len(groups)
    expected = sandwich * math.sqrt(n / (n - 1))
    assert rate(groups)["se"] == pytest.approx(expected, abs=1e-12)


@given(GROUPS)
def test_rates_are_means_over_tasks_of_means_over_samples(groups):
    kept = [sum(group) / len(group) for group in groups if group]
    found = rate(groups)
    assert found["n"] == len(kept)
    if not kept:
        assert found["pass_at_1"] is None
        return
    assert found["pass_at_1"] == pytest.approx(sum(kept) / len(kept))
    if len(kept) > 1:
        assert found["se"] == pytest.approx(np.std(kept, ddof=1) / len(kept) ** 0.5)
        assert found["se"] == standard_error(kept)
    low, high = found["ci95"]
    assert low <= found["pass_at_1"] + 1e-12 and found["pass_at_1"] <= high + 1e-12


@given(GROUPS)
def test_a_task_counts_for_the_k_that_it_has_samples_for(groups):
    for k, entry in at_k(groups).items():
        enough = [group for group in groups if len(group) >= int(k)]
        draws = [list(itertools.combinations(group, int(k))) for group in enough]
        expected = [sum(map(any, each)) / len(each) for each in draws]
        assert entry["n"] == len(enough)
        assert entry["value"] == pytest.approx(sum(expected) / len(expected))


def test_pass_at_k_is_given_for_powers_of_two_three_and_all():
    assert list(at_k([[True] * 5])) == ["1", "2", "3", "4", "5"]
    assert list(at_k([[True] * 16])) == ["1", "2", "3", "4", "8", "16"]
    assert list(at_k([[True] * 2, [False]])) == ["1", "2"]


def test_groups_are_told_apart_in_the_order_of_their_numbers():
    pairs = [
        ({"hops": 10}, [True]), ({"hops": 2}, [True, False]), ({"hops": 2}, []), ({}, [True]),
        ({"hops": None}, [True]),
    ]  # fmt: skip
    found = rates_by(pairs, "hops")
    assert list(found) == ["2", "10"]
    assert (found["2"]["pass_at_1"], found["2"]["n"]) == (0.5, 1)
