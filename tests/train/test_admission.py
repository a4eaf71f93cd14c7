"""Selecting tasks and the groups of a step, in any order in which groups finish."""

from __future__ import annotations

import json
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from coa_jax.train.admission import ATTEMPTS, AdmissionRules, Ledger


def signal_of(index: int, share: float) -> bool:
    return random.Random(index).random() < share


def run(rules, chance, share, lag=0, told=None) -> tuple[list, Ledger]:
    """All steps of a ledger whose groups end in a random order, and the ledger afterwards.

    A version is published at most ``lag`` steps after its step was composed.  ``told`` gets the
    version of each group when it ended last.
    """
    ledger, steps, flying = Ledger(rules), [], {}
    for _ in range(100_000):
        if ledger.complete:
            return steps, ledger
        for index in ledger.admit():
            flying[index] = ledger.version
        if flying and chance.random() < 0.7:
            index = chance.choice(list(flying))
            version = flying.pop(index)
            ledger.end(index, signal_of(index, share), version)
            if told is not None:
                told[index] = version
        elif ledger.version < ledger.step and (
            chance.random() < 0.3 or ledger.step - ledger.version > lag
        ):
            ledger.version += 1
        while (step := ledger.next_step()) is not None:
            steps.append(step)
            if rules.max_staleness == 0:
                flying = {}
    raise AssertionError("the steps do not come to an end")


sizes = st.integers(1, 5)
shares = st.sampled_from([0.1, 0.5, 1.0])


@given(sizes, shares, st.integers(0, 9), st.integers(), st.integers())
@settings(max_examples=150, deadline=None)
def test_without_staleness_the_order_in_which_groups_end_decides_nothing(
    groups, share, in_flight, one, two
):
    rules = AdmissionRules(groups, 4 * groups, 0, False, in_flight, steps=5)
    (first, _), (second, _) = (run(rules, random.Random(seed), share) for seed in (one, two))
    assert [(s.used, s.examined) for s in first] == [(s.used, s.examined) for s in second]
    # Tasks are taken in their order, and none is left out.
    assert [index for step in first for index in step.examined] == list(
        range(sum(len(step.examined) for step in first))
    )
    for step in first:
        assert len(step.used) == groups or len(step.examined) == 4 * groups
        assert set(step.used) == {i for i in step.examined if signal_of(i, share)}


@given(sizes, shares, st.integers(1, 3), st.booleans(), st.integers(0, 30), st.integers())
@settings(max_examples=200, deadline=None)
def test_no_step_learns_from_a_group_older_than_the_bound_or_twice_from_one(
    groups, share, staleness, in_order, in_flight, seed
):
    rules = AdmissionRules(groups, 6 * groups, staleness, in_order, in_flight, steps=8)
    told: dict[int, int] = {}
    steps, _ = run(rules, random.Random(seed), share, lag=staleness, told=told)
    for step in steps:
        assert all(0 <= step.step - 1 - told[index] <= staleness for index in step.examined)
    learned = [index for step in steps for index in step.examined]
    assert len(learned) == len(set(learned))
    assert [step.step for step in steps] == list(range(1, 9))


@given(sizes, st.integers(0, 3), st.booleans(), st.integers(), st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_a_ledger_goes_on_from_the_state_of_any_step(groups, staleness, in_order, seed, cut):
    rules = AdmissionRules(groups, 5 * groups, staleness, in_order, 0, steps=7)
    steps, _ = run(rules, random.Random(seed), 0.5)
    state = json.loads(json.dumps(steps[cut - 1].state))
    ledger = Ledger.restore(rules, state)
    assert (ledger.step, ledger.version) == (cut, cut)
    before = {index for step in steps[:cut] for index in step.examined}
    again = ledger.admit()
    still_open = {index for index, _ in state["open"]}
    # Everything that was in flight is asked again, and nothing that was learned.
    assert still_open <= set(again) and before.isdisjoint(again)
    assert max(again) - min([*again, state["next"]]) < len(again) + len(before)


def test_a_group_that_ends_too_old_is_asked_again_until_it_is_given_up():
    ledger = Ledger(AdmissionRules(1, 10, 1, False, 1, steps=10))
    (slow,) = ledger.admit()
    for attempt in range(1, ATTEMPTS + 1):
        ledger.late(slow)
        assert ledger.is_open(slow) == (attempt < ATTEMPTS)
        assert (slow in ledger.admit()) == (attempt < ATTEMPTS)
    (other,) = set(ledger._open)
    ledger.end(other, True, 0)
    step = ledger.next_step()
    assert (step.used, step.dropped, step.given_up) == ((other,), (slow,) * ATTEMPTS, 1)


def test_as_many_groups_are_in_flight_as_the_share_with_a_signal_makes_necessary():
    ledger = Ledger(AdmissionRules(8, 80, 0, False, 0, steps=3))
    assert len(ledger.admit()) == 8  # nothing is known yet
    for index in range(8):
        ledger.end(index, index % 2 == 0, 0)
    assert ledger.next_step() is None
    assert len(ledger.admit()) == 8  # 4 are missing at a share of 5 / 9
    release = Ledger(AdmissionRules(64, 640, 0, False, 128, steps=3))
    assert len(release.admit()) == 128  # a generation batch of 128 for 64


def test_groups_in_flight_serve_no_more_steps_than_the_bound_allows():
    ledger = Ledger(AdmissionRules(4, 40, 2, False, 0, steps=100))
    assert len(ledger.admit()) == 12  # steps 1 to 3, of which the last is 2 behind
    for index in range(4):
        ledger.end(index, True, 0)
    assert ledger.next_step().used == (0, 1, 2, 3)
    assert ledger.admit() == []  # version 1 is not published
    ledger.version = 1
    assert len(ledger.admit()) == 4


def test_a_slow_oldest_group_does_not_let_tasks_without_a_signal_be_sampled_without_end():
    rules = AdmissionRules(2, 6, 1, True, 0, steps=9)
    ledger, asked = Ledger(rules), []
    for _ in range(50):
        new = ledger.admit()
        asked += new
        for index in new:
            if index > 0:  # the group of the first task does not end
                ledger.end(index, False, 0)
        assert ledger.next_step() is None
    assert len(asked) == 12  # as many as two steps may examine
    ledger.end(0, True, 0)
    step = ledger.next_step()
    assert step is not None and (step.used, step.examined) == ((0,), tuple(range(6)))
