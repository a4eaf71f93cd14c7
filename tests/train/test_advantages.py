"""Group-relative advantages."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.data.trajectory import Author, Reward, StopReason
from coa_jax.train.advantages import advantages_of, has_signal
from coa_jax.train.algorithms import Algorithm
from tests.train.bare import bare

rewards = st.lists(st.none() | st.sampled_from([0.0, 1.0, 0.1, 0.25, 0.7]), min_size=1, max_size=9)


def group(values, lengths=None):
    """A group with these rewards; each trajectory has a token of its prompt before the policy's."""
    return [
        bare(
            np.arange(1 + length),
            [Author.PROMPT] + [Author.POLICY] * length,
            sample_id=at,
            stop_reason=StopReason.ANSWER,
            reward=None if at % 5 == 4 and value is None else Reward(value),
        )
        for at, (value, length) in enumerate(zip(values, lengths or [2] * len(values), strict=True))
    ]


def chosen(advantage="group", **knobs):
    return Algorithm("dapo", advantage, **knobs).resolve(100)


def group_advantages(values, kind="group"):
    """One for each reward; 0 for the samples that have none."""
    found = np.zeros(len(values), np.float32)
    for trajectory, advantage in advantages_of(chosen(kind), group(values)):
        assert advantage.dtype == np.float32 and advantage.shape == ()
        found[trajectory.sample_id] = advantage
    return found


@given(rewards)
def test_advantages_are_standard_scores_of_the_graded_samples(values):
    graded = [value for value in values if value is not None]
    expected = np.zeros(len(values))
    if len(set(graded)) > 1:
        mean = sum(graded) / len(graded)
        std = (sum((v - mean) ** 2 for v in graded) / len(graded)) ** 0.5
        for i, value in enumerate(values):
            if value is not None:
                expected[i] = (value - mean) / (std + 1e-6)
    np.testing.assert_allclose(group_advantages(values), expected, rtol=1e-6, atol=1e-7)


@given(rewards)
def test_ungraded_samples_change_nobody_else(values):
    graded = [value for value in values if value is not None]
    kept = [i for i, value in enumerate(values) if value is not None]
    assert group_advantages(values)[kept].tolist() == group_advantages(graded).tolist()


@given(rewards)
def test_a_group_has_a_signal_exactly_when_an_advantage_is_not_zero(values):
    assert has_signal(values) == bool(group_advantages(values).any())


def test_equal_rewards_teach_exactly_nothing():
    # The mean of three times 0.1 is not 0.1 in floating point.
    assert group_advantages([0.1, 0.1, 0.1]).tolist() == [0.0, 0.0, 0.0]
    assert group_advantages([None, None]).tolist() == [0.0, 0.0]
    assert group_advantages([None, 1.0]).tolist() == [0.0, 0.0]


@given(rewards, st.sampled_from(["mean", "leave_one_out", "batch_baseline"]))
def test_other_baselines_of_a_group(values, kind):
    graded = [value for value in values if value is not None]
    found = group_advantages(values, kind)
    for i, value in enumerate(values):
        others = graded.copy()
        expected = 0.0
        if value is not None and len(graded) > 1:
            others.remove(value)
            baseline = others if kind == "leave_one_out" else graded
            expected = value - sum(baseline) / len(baseline)
        assert abs(found[i] - expected) < 1e-6


@given(rewards, st.sampled_from(["batch", "gae"]))
def test_without_a_group_the_reward_itself_goes_on(values, kind):
    expected = [0.0 if value is None else value for value in values]
    np.testing.assert_array_equal(group_advantages(values, kind), np.float32(expected))
