"""Rewards of turns become advantages of the turns' tokens."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from coa_jax.data.trajectory import Author, Reward, SegmentSpan, StopReason, ToolCall, Trajectory
from coa_jax.tasks import GradersConfig
from coa_jax.train.algorithms import Algorithm
from coa_jax.train.turn_credit import (
    spread_over_tokens,
    turn_advantages,
    turn_rewards,
    weight_of_turns,
)
from coa_jax.train.update import group_examples

TURNS = ((0.1, -0.1, 1.0), (1.0,), (0.1, 0.1), (0.0, 0.5, 0.1))
"""Rewards of the turns of a group."""
KINDS = ("group", "mean", "leave_one_out", "batch", "batch_baseline", "gae", "none")


def trajectory(rewards, rest: float = 0.0, given: bool = True) -> Trajectory:
    """Turns of two tokens and replies of three, after a prompt of four tokens."""
    author, spans = [Author.PROMPT] * 4, []
    for _ in rewards:
        for who, count in ((Author.POLICY, 2), (Author.ENVIRONMENT, 3)):
            spans.append(SegmentSpan(None, who, "", len(author), len(author) + count))
            author += [who] * count
    calls = [
        ToolCall("turn", "x", "y", "ok", True, 0.0, 0.0, {}, reward if given else None)
        for reward in rewards
    ]
    value = sum(rewards) + rest
    parts = {"environment": float(sum(rewards))}
    size = len(author)
    return Trajectory(
        "t", 0, "q", "turns", np.arange(size), author, np.zeros(size), "", tuple(spans),
        tuple(calls),
        StopReason.ENVIRONMENT, Reward(value, parts), (), {},
    )  # fmt: skip


def group(rest=(0.0, 0.3, -0.2, 0.0), given=True):
    return [trajectory(r, x, given) for r, x in zip(TURNS, rest, strict=True)]


def algorithm(kind: str) -> Algorithm:
    name = "opd" if kind == "none" else "grpo"
    return Algorithm(name, advantage=kind, kl_coef=0.0).resolve(100)


def expected(kind: str, weight: float = 1.0) -> list[list[float]]:
    """The definition, in float64: returns from a turn on, less their mean, in the group's scale."""
    members = group()
    values = np.array([t.reward.value for t in members])
    count = len(values)
    scale = {"group": 1 / (values.std() + 1e-6), "leave_one_out": count / (count - 1), "none": 0.0}
    found = []
    for i, rewards in enumerate(TURNS):
        row = []
        for k in range(len(rewards)):
            returns = [
                values[j] - weight * sum(TURNS[j][: min(k, len(TURNS[j]))]) for j in range(count)
            ]
            baseline = 0.0 if kind in ("batch", "gae") else np.mean(returns)
            row.append(scale.get(kind, 1.0) * (returns[i] - baseline))
        found.append(row)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_a_turn_learns_from_what_came_from_it_on(kind, weight):
    examples = group_examples(algorithm(kind), group(), None, weight=weight)
    for example, wanted in zip(examples, expected(kind, weight), strict=True):
        got = example.advantage[example.mask > 0].reshape(-1, 2)
        if kind in ("batch", "batch_baseline", "gae"):  # a later sum over tokens gives it
            assert (got[:, 0] == 0).all()
            got = np.cumsum(got[::-1, 1])[::-1, None]
        assert (example.advantage[example.mask == 0] == 0).all()
        np.testing.assert_allclose(got, np.broadcast_to(np.array(wanted)[:, None], got.shape),
                                   rtol=1e-5, atol=1e-6)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_without_rewards_of_turns_nothing_changes(kind):
    plain = group_examples(algorithm(kind), group(given=False), None)
    credited = group_examples(algorithm(kind), group(given=False), None, weight=1.0)
    for one, other in zip(plain, credited, strict=True):
        np.testing.assert_array_equal(one.advantage, other.advantage)


def test_a_turn_with_several_calls_has_the_sum_of_their_rewards():
    """The first turn makes two calls; the call that ends the episode has no reply."""
    one = trajectory((0.25, 0.5, 1.0))
    first, reply, _, second, last, _ = one.segments
    second = dataclasses.replace(second, start=9, end=12)
    author = np.array(one.author)
    author = np.concatenate([author[:9], [Author.ENVIRONMENT] * 3, [Author.POLICY] * 2])
    last = dataclasses.replace(last, start=12, end=14)
    one = dataclasses.replace(
        one,
        author=author,
        tokens=np.arange(14),
        logp=np.zeros(14),
        segments=(first, reply, second, last),
    )
    assert turn_rewards(one).tolist() == [0.75, 1.0]


def test_groups_with_equal_rewards_learn_from_turns_where_the_scale_is_fixed():
    members = [trajectory((1.0, 0.0)), trajectory((0.0, 1.0))]
    for kind, scale in (("mean", 1.0), ("leave_one_out", 2.0)):
        first, second = group_examples(algorithm(kind), members, None, weight=1.0)
        wanted = np.repeat([0.0, -0.5 * scale], 2)
        np.testing.assert_allclose(first.advantage[first.mask > 0], wanted, atol=1e-6)
        np.testing.assert_allclose(second.advantage[second.mask > 0], -wanted, atol=1e-6)


def test_rewards_at_the_end_alone_leave_the_first_turn_as_it_is():
    members = [trajectory((0.0, 0.0, 1.0)), trajectory((0.0, 0.0)), trajectory((1.0,))]
    values = [t.reward.value - np.mean([1, 0, 1]) for t in members]
    found = turn_advantages(members, values, 1.0, False)
    assert [row[0] for row in found] == pytest.approx(values)
    assert len(found[1]) == 2


def test_a_group_without_a_signal_teaches_nothing():
    members = [trajectory((0.5, 0.5)), trajectory((1.0, 0.0))]
    assert all(
        (e.advantage == 0).all()
        for e in group_examples(algorithm("group"), members, None, weight=1.0)
    )


def test_what_could_not_be_graded_plays_no_part():
    masked = dataclasses.replace(trajectory((9.0, 9.0)), reward=Reward(None, {}))
    with_it = group_examples(algorithm("mean"), [*group(), masked], None, weight=1.0)
    without = group_examples(algorithm("mean"), group(), None, weight=1.0)
    assert len(with_it) == len(without)
    for one, other in zip(with_it, without, strict=True):
        np.testing.assert_array_equal(one.advantage, other.advantage)


def test_a_turn_that_no_call_ends_is_a_turn():
    mask = np.array([0, 1, 1, 0, 1], np.float32)
    np.testing.assert_array_equal(
        spread_over_tokens(mask, np.array([2.0, 3.0]), False), np.float32([0, 2, 2, 0, 3])
    )
    np.testing.assert_array_equal(
        spread_over_tokens(mask, np.array([2.0, 3.0]), True), np.float32([0, 0, -1, 0, 3])
    )


@pytest.mark.parametrize(
    ("rewards", "weight"),
    [
        ({}, 1.0),
        ({"environment": {"weight": 0.5}}, 0.5),
        ({"grader": {"weight": 0.25}}, 0.25),
        ({"format": {}}, 0.0),
    ],
)
def test_turns_count_as_their_reward_does(rewards, weight):
    assert weight_of_turns(GradersConfig(rewards=rewards)) == weight
