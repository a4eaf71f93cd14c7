"""Advantages of tokens: tokens of the environment are not actions."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa_jax.train.advantages import gae, whiten
from coa_jax.train.batch import Batch
from tests.train.packed import batches, by_member, members


def reference_gae(rewards, values, mask, gamma, lam):
    """One sequence, action by action from its end, in plain Python."""
    advantages, later, next_value = np.zeros(len(mask)), 0.0, 0.0
    for t in reversed(range(1, len(mask))):
        if mask[t]:
            delta = rewards[t] + gamma * next_value - values[t]
            later = delta + gamma * lam * later
            advantages[t], next_value = later, values[t]
    return advantages


@functools.partial(jax.jit, static_argnames=("gamma", "lam"))
def estimate(rewards, values, batch, gamma, lam):
    return gae(rewards, values, batch, gamma=gamma, lam=lam)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9), (0.9, 0.0)])
@pytest.mark.parametrize("length", [19, 40])
def test_each_sequence_of_a_packed_row_is_estimated_by_its_actions_alone(gamma, lam, length):
    sequences = members()
    (batch,), (arrays,), places = batches(sequences, length=length)
    advantages, returns = estimate(arrays["returns"], arrays["value"], batch, gamma, lam)
    found = by_member(sequences, places, [advantages])
    targets = by_member(sequences, places, [returns])
    for s, advantage, target in zip(sequences, found, targets, strict=True):
        values, on = s.arrays["value"], s.mask * (np.arange(len(s.mask)) > 0)
        wanted = reference_gae(s.arrays["returns"], values, s.mask, gamma, lam)
        np.testing.assert_allclose(advantage, wanted, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(target, (wanted + values) * on, rtol=1e-5, atol=1e-6)


def test_values_and_rewards_of_observations_are_never_read():
    (batch,), (arrays,), _ = batches(members())
    off = batch.mask == 0
    plain = estimate(arrays["returns"], arrays["value"], batch, 0.97, 0.9)
    junk = [np.where(off, np.nan, arrays[k]).astype(np.float32) for k in ("returns", "value")]
    other = estimate(*junk, batch, 0.97, 0.9)
    for left, right in zip(plain, other, strict=True):
        np.testing.assert_array_equal(left, right)
        assert not np.asarray(left)[off].any()


def test_a_reward_at_the_end_without_values_is_the_advantage_of_every_action():
    (batch,), _, _ = batches(members((9, 14)), length=30)
    last = np.zeros(batch.mask.shape, np.float32)
    for segment, reward in ((1, 0.25), (2, -2.0)):
        own = (batch.segment_ids == segment) & (batch.mask > 0)
        last[0, np.flatnonzero(own[0])[-1]] = reward
    advantages, _ = estimate(last, np.zeros_like(last), batch, 1.0, 1.0)
    wanted = np.select([batch.segment_ids == 1, batch.segment_ids == 2], [0.25, -2.0])
    np.testing.assert_allclose(advantages, wanted * batch.mask)


@pytest.mark.parametrize("value", [0.1, 0.7, -0.3, 1.0, 100.0])
def test_advantages_that_do_not_differ_become_nothing(value):
    (batch,), _, _ = batches(members((9, 14)), length=30)
    made = [batch._replace(advantage=np.full(batch.mask.shape, value, np.float32))] * 3
    assert all(not np.any(b.advantage) for b in whiten(made))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 3))
def test_whitening_is_over_the_actions_of_all_batches(seed, parts):
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(parts):
        advantage = rng.normal(3, 2, (2, 8)).astype(np.float32)
        mask = (rng.random((2, 8)) < 0.6).astype(np.float32)
        mask[0, 0] = 1
        ids = np.ones((2, 8), np.int32)
        made.append(Batch(ids, ids, ids, mask, mask, np.where(mask > 0, advantage, np.nan)))
    every = np.concatenate([b.advantage[b.mask > 0].astype(np.float64) for b in made])
    for before, after in zip(made, whiten(made), strict=True):
        wanted = (before.advantage - every.mean()) / np.sqrt(every.var() + 1e-8)
        on = before.mask > 0
        np.testing.assert_allclose(
            np.asarray(after.advantage)[on], wanted[on], rtol=2e-4, atol=1e-4
        )
        assert not np.asarray(after.advantage)[~on].any()
