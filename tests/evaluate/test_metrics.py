"""Figures of graded trajectories."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.evaluate.metrics import (
    details,
    mean_interval,
    pass_at_k,
    summarize,
    wilson_interval,
)
from coa_jax.trajectory import (
    Author,
    Reward,
    SegmentSpan,
    StopReason,
    ToolCall,
    Trajectory,
)


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


def test_the_interval_of_rates_counts_tasks_and_not_samples():
    rates = [0.25, 0.75, 0.5, 1.0, 0.0]
    spread = 1.959964 * np.std(rates, ddof=1) / 5**0.5
    assert mean_interval(rates) == pytest.approx((0.5 - spread, 0.5 + spread), rel=1e-5)
    assert mean_interval([1.0, 0.0, 1.0]) == wilson_interval(2, 3)
    assert mean_interval([0.5]) == wilson_interval(0.5, 1)


GOOD = (
    "<think>a</think>\n<plan>b</plan>\n<think>c</think>\n<suggested_answer>4</suggested_answer>\n"
    "<think>d</think>\n<double_check>The score is 4.</double_check>\n<answer>4</answer>"
)
BAD = "<answer>5</answer>"


def trajectory(value, *, text=GOOD, tokens=10, calls=(), stop=StopReason.ANSWER, **metadata):
    authors = [Author.PROMPT] * 3 + [Author.POLICY] * tokens + [Author.ENVIRONMENT] * 2
    return Trajectory(
        task_id="t",
        sample_id=0,
        question="2 + 2?",
        protocol="generalist",
        tokens=np.arange(len(authors)),
        author=np.asarray(authors),
        logp=np.zeros(len(authors)),
        text=text,
        segments=(SegmentSpan(None, Author.POLICY, text, 3, 3 + tokens),),
        tool_calls=tuple(
            ToolCall(tool, "x", "y", outcome, outcome == "ok", 0.0, 1.0) for tool, outcome in calls
        ),
        stop_reason=stop,
        reward=Reward(value) if value != "ungraded" else None,
        gold=("4",),
        metadata=metadata,
    )


GROUPS = [
    [
        trajectory(1.0, hops=1, kind="sum", calls=[("code", "ok")]),
        trajectory(0.0, hops=1, kind="sum", text=BAD, tokens=30, calls=[("code", "error")] * 2),
    ],
    [
        trajectory(0.0, hops=2, kind="name", stop=StopReason.LENGTH, text="<think>"),
        trajectory(None, hops=2, kind="name", calls=[("wiki_search", "fault")], tokens=5000),
    ],
    [trajectory(None, hops=2, kind="name"), trajectory("ungraded", hops=2, kind="name")],
    [trajectory(1.0, hops=2, kind="name"), trajectory(1.0, hops=2, kind="name")],
]


def test_the_summary_leaves_out_what_could_not_be_graded():
    block = summarize(GROUPS)
    assert block["n"] == 3
    assert block["pass_at_1"] == pytest.approx((0.5 + 0.0 + 1.0) / 3)
    assert block["ci95"] == list(mean_interval([0.5, 0.0, 1.0]))
    assert block["tokens_per_task"] == pytest.approx((10 + 30 + 10 + 10 + 10) / 5)
    assert block["tool_calls_per_task"] == pytest.approx(3 / 5)
    assert block["format_valid"] == pytest.approx(3 / 5)


def test_details_tell_hops_kinds_tools_and_ends_apart():
    more = details(GROUPS)
    assert more["samples_per_task"] == 1  # the smallest group that is left
    assert more["ungraded"] == 3
    assert more["pass_at_k"] == {"1": pytest.approx(0.5)}
    assert more["by_hops"] == {
        "1": {"pass_at_1": 0.5, "n": 1},
        "2": {"pass_at_1": 0.5, "n": 2},
    }
    assert more["by_kind"]["name"]["n"] == 2
    assert more["tools"] == {"code": {"calls": 3, "outcomes": {"ok": 1, "error": 2}}}
    assert more["stops"] == {"answer": 4, "length": 1}
    assert more["tokens_per_solved"] == pytest.approx(70 / 3)


def test_pass_at_k_is_given_for_powers_of_two():
    solved = [[trajectory(float(i == s)) for i in range(5)] for s in range(3)]
    at = details(solved)["pass_at_k"]
    assert list(at) == ["1", "2", "4"]
    assert at["4"] == pytest.approx(0.8)


def test_nothing_graded_gives_figures_without_a_claim():
    block = summarize(GROUPS[2:3])
    assert (block["pass_at_1"], block["ci95"], block["n"]) == (0.0, [0.0, 1.0], 0)
    assert details(GROUPS[2:3])["tokens_per_solved"] is None
    assert details(GROUPS[2:3])["pass_at_k"] == {}
