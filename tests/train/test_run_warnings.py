"""Warnings come once per episode, name the cause, and are found again in the rows of a run."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.train.run_warnings import QUIET, MetricHistory, warnings_of


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"len/cut_off_frac": 0.3, "stop/turns": 0.25, "stop/length": 0.05}, "max_tool_calls"),
        ({"len/cut_off_frac": 0.3, "stop/length": 0.3}, "30% .* rollout.max_tokens"),
        ({"tool/calls": 0.0}, "no trajectory called a tool"),
        ({"tool/fail_frac": 0.75}, "75% of the tool calls failed"),
        ({"group/frac_all_pass": 1.0}, "harder tasks"),
        ({"group/frac_all_fail": 0.95}, "easier tasks"),
        ({"reward/masked_frac": 0.06}, "6% of the trajectories are masked .* no verdict"),
        (
            {"reward/masked_frac": 0.4, "masked/ungraded": 0.1, "masked/deadline": 0.3},
            "40% of the trajectories are masked .* rollout.max_seconds was reached",
        ),
        ({"loss": None}, "not finite"),
    ],
)
def test_a_row_that_is_bad_is_warned_of_and_its_neighbour_is_not(row, words):
    (text,) = MetricHistory().see(row)
    assert re.search(words, text)
    good = {
        "len/cut_off_frac": 0.2,
        "tool/calls": 0.1,
        "tool/fail_frac": 0.5,
        "group/frac_all_pass": 0.9,
        "group/frac_all_fail": 0.9,
        "reward/masked_frac": 0.05,
        "loss": 1.0,
    }
    assert MetricHistory().see(good) == []


def test_steps_that_wait_for_data_are_warned_of_once_they_are_several():
    def rows(*waits):
        return [{"time/data": wait, "time/step": 2.0} for wait in waits]

    watch = MetricHistory()
    # The first step waits until reading has begun; one slow read is no sign of a slow pipeline.
    assert [watch.see(row) for row in rows(9.0, 0.0, 0.0, 0.4, 0.0, 0.0, 0.0)] == [[]] * 7
    found = [text for row in rows(*[0.2] * 5) for text in watch.see(row)]
    assert len(found) == 1
    assert "waited 6% of their time for data" in found[0]
    assert "raise data_workers" in found[0]


def steady(name: str, *values: float) -> list[dict[str, float]]:
    return [{name: value, "step": step} for step, value in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("rows", "step", "words"),
    [
        (steady("policy/entropy", *[1.0] * 5, 0.3, 0.19), 7, "entropy fell from 1 to 0.19"),
        (steady("mismatch/abs_logp_mean", *[0.01] * 5, 0.029, 0.031), 7, "0.01 at the start"),
        (steady("validation/loss", 2.0, 1.0, 1.09, 1.2), 4, "its minimum 1 at step 2"),
    ],
)
def test_what_is_bad_beside_the_beginning_is_warned_of(rows, step, words):
    ((_, found, text),) = warnings_of(rows)
    assert (found, words in text) == (step, True), text


def masking(*shares: float) -> list[dict[str, float]]:
    return [
        {"reward/masked_frac": 0.0, "masked/tool_fault": share, "masked/fault": 0.0, "step": step}
        for step, share in enumerate(shares, 1)
    ]


def test_a_share_of_masked_trajectories_that_rises_is_warned_of():
    ((_, step, text),) = warnings_of(masking(0, 0.02, 0, 0.01, 0, 0.01, *[0.03, 0.1, 0.2] * 2))
    assert step == 11
    assert "9% of the trajectories of the last 5 steps are masked because of tool_fault" in text
    assert "1% of the first 5" in text and "cause failures that prevent a bad reward" in text


@pytest.mark.parametrize(
    "shares",
    [
        [0.0] * 5 + [0.04] * 30,  # rare
        [0.3] * 30,  # from the beginning on, which another rule tells
        [0.0, 0.0, 0.5, 0.0, 0.0] + [0.4] * 30,  # it has been so before
        [0.0] * 5 + [0.3, 0.3, 0.3, 0.3, 0.0] * 6,  # a server that was down
        [0.0] * 9,
    ],
)
def test_a_share_of_masked_trajectories_that_does_not_rise_is_not_warned_of(shares):
    assert warnings_of(masking(*shares)) == []


def test_rows_without_a_metric_are_no_sign_that_all_is_well_again():
    watch = MetricHistory()
    losses = [1.0, 1.2, 1.3, 1.4]
    rows = [row for x in losses for row in [{"validation/loss": x}, *[{"loss": 0.5}] * 2 * QUIET]]
    texts = [text for row in rows for text in watch.see({**row, "step": 1})]
    assert len(texts) == 1 and "validation loss is 1.2" in texts[0]


def test_a_tiny_mismatch_may_grow():
    assert warnings_of(steady("mismatch/abs_logp_mean", *[1e-7] * 5, 9e-4)) == []


@given(st.lists(st.booleans(), max_size=40), st.integers(0, 40))
def test_an_episode_warns_once_and_a_resumed_run_does_not_warn_again(bad, cut):
    rows = [{"phase": "rl", "step": i, "tool/calls": float(not b)} for i, b in enumerate(bad)]
    expected, quiet = [], QUIET
    for step, is_bad in enumerate(bad):
        if is_bad and quiet >= QUIET:
            expected.append(step)
        quiet = 0 if is_bad else quiet + 1
    assert [step for _, step, _ in warnings_of(rows)] == expected
    resumed = MetricHistory(rows[:cut])
    assert [r["step"] for r in rows[cut:] if resumed.see(r)] == [s for s in expected if s >= cut]


def test_phases_are_watched_apart():
    rows = [{"phase": phase, "step": 1, "tool/calls": 0.0} for phase in ("a", "b")]
    assert [phase for phase, _, _ in warnings_of(rows)] == ["a", "b"]
