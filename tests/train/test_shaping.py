"""Shaping of rewards."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.data.trajectory import Reward
from coa_jax.train.shaping import overlong_penalty, shape_reward


@pytest.mark.parametrize(
    ("length", "lost"),
    [(0, 0.0), (12_288, 0.0), (14_336, -0.5), (16_384, -1.0), (16_385, -1.0), (40_000, -1.0)],
)
def test_the_penalty_of_dapo_falls_over_its_last_tokens(length, lost):
    # 16,384 tokens with a buffer of 4,096: eq 13 of the paper by hand.
    assert overlong_penalty(length, 16_384, 4_096, 1.0) == lost


@given(st.integers(0, 5000), st.integers(1, 4000), st.floats(0, 3), st.data())
def test_the_penalty_is_bounded_and_longer_is_never_better(length, budget, penalty, data):
    buffer = data.draw(st.integers(0, budget))
    here = overlong_penalty(length, budget, buffer, penalty)
    assert -penalty <= here <= 0
    assert overlong_penalty(length + 7, budget, buffer, penalty) <= here
    if length <= budget - buffer or not buffer:
        assert here == 0


def shaped(reward, length=90, format_reward=False, buffer=20):
    return shape_reward(
        reward, length, format_reward=format_reward, budget=100, buffer=buffer, penalty=1.0
    )


def test_a_reward_without_a_value_stays_without():
    assert shaped(Reward(None)) == Reward(None)


def test_the_protocol_counts_where_it_is_asked_for():
    reward = Reward(1.0, {"format": 0.0})
    assert shaped(reward, buffer=0) is not None
    assert shaped(reward, buffer=0).value == 1.0
    assert shaped(reward, buffer=0, format_reward=True).value == 0.0


@given(st.floats(-5, 5))
def test_a_broken_format_never_raises_a_reward(value):
    broken = shaped(Reward(value, {"format": 0.0}), buffer=0, format_reward=True).value
    obeyed = shaped(Reward(value, {"format": 1.0}), buffer=0, format_reward=True).value
    assert obeyed == value
    assert broken == min(value, 0.0)


def test_what_was_taken_off_is_told():
    parts = {"format": 1.0, "overlong": -0.5, "earned": 1.0}
    assert shaped(Reward(1.0, {"format": 1.0})) == Reward(0.5, parts)
    assert shaped(Reward(1.0), length=80) == Reward(1.0)
