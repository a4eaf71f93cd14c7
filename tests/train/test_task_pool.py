"""The pool pauses tasks that are always or never solved, resumes them, and puts easy ones first."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa_jax.errors import UserError
from coa_jax.tasks import Task
from coa_jax.train.admission import AdmissionRules, Ledger
from coa_jax.train.task_pool import PoolConfig, TaskPool, with_pass_rates

COUNT = 12


def made(count=COUNT, **metadata):
    """Tasks t0, t1, ..., with metadata by a function of the number."""
    values = [{name: of(i) for name, of in metadata.items()} for i in range(count)]
    return [Task(f"t{i}", f"{i}?", "mhqa", ("a",), "s", values[i]) for i in range(count)]


def pool_of(tasks=None, known=None, **changes):
    tasks = tasks or made()
    stream = [tasks[i % len(tasks)] for i in range(4000)]
    return TaskPool(PoolConfig(**changes), stream, tasks, known)


def run(rules, pool, chance, solves):
    """The steps of a ledger whose groups end in a random order, and (step, index) of all asked.

    An index that is asked again because its group was too old is not among these.
    """
    ledger, steps, flying, asked = Ledger(rules, pool), [], {}, []
    for _ in range(100_000):
        if ledger.complete:
            return steps, asked
        for index in ledger.admit():
            flying[index] = ledger.version
            if not rules.max_staleness or index not in [i for _, i in asked]:
                asked.append((ledger.step, index))
        if flying and chance.random() < 0.7:
            index = chance.choice(list(flying))
            solved = solves(index)
            ledger.end(index, 0 < solved < 4, flying.pop(index), (solved, 4))
        elif ledger.version < ledger.step:
            ledger.version += 1
        while (step := ledger.next_step()) is not None:
            steps.append(step)
            if rules.max_staleness == 0:
                flying = {}
    raise AssertionError("the steps do not come to an end")


def solver(seed):
    return lambda index: random.Random(f"{seed}/{index}").choice([0, 0, 1, 2, 4, 4])


others = {
    "curriculum": st.just("hops"),
    "curriculum_steps": st.integers(1, 6),
}
configs = st.builds(PoolConfig, **others) | st.builds(
    PoolConfig,
    rest_steps=st.integers(1, 4),
    rest_below=st.sampled_from([0.0, 0.2]),
    rest_above=st.sampled_from([0.8, 1.0]),
    **others,
)


@given(configs, st.integers(1, 4), st.integers(), st.integers(), st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_without_staleness_the_order_in_which_groups_end_decides_nothing(
    config, groups, one, two, in_flight
):
    tasks = made(hops=lambda i: i % 3)
    stream = [tasks[i % COUNT] for i in range(4000)]
    rules = AdmissionRules(groups, 4 * groups, 0, False, in_flight, steps=6)
    runs = []
    for seed in (one, two):
        pool = TaskPool(config, stream, tasks)
        steps, _ = run(rules, pool, random.Random(seed), solver(0))
        runs.append(([(s.used, s.examined, s.scores) for s in steps], pool.known))
    assert runs[0] == runs[1]


@given(configs, st.integers(0, 2), st.integers(), st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_the_composed_steps_alone_decide_what_a_pool_knows(config, staleness, seed, cut):
    tasks = made(hops=lambda i: i % 3)
    stream = [tasks[i % COUNT] for i in range(4000)]
    rules = AdmissionRules(2, 8, staleness, False, 0, steps=6)
    pool = TaskPool(config, stream, tasks)
    steps, _ = run(rules, pool, random.Random(seed), solver(1))
    # Another process folds the steps; a killed one goes on from a checkpoint of JSON.
    other = TaskPool(config, stream, tasks)
    for step in steps:
        if step.step == cut + 1:
            other = TaskPool(config, stream, tasks, json.loads(json.dumps(other.known)))
        other.learn(step.step, dict(zip(step.examined, step.scores, strict=True)))
    assert other.known == pool.known
    assert [other.next(i, 6) for i in range(50)] == [pool.next(i, 6) for i in range(50)]


@given(st.integers(1, 5), st.integers(0, 2), st.integers())
@settings(max_examples=100, deadline=None)
def test_a_task_that_rests_is_not_asked_before_its_time(rest, staleness, seed):
    tasks = made(40)
    stream = [tasks[i % 40] for i in range(4000)]
    pool = TaskPool(PoolConfig(rest_steps=rest), stream, tasks)
    steps, asked = run(
        AdmissionRules(2, 6, staleness, False, 0, steps=8), pool, random.Random(seed), solver(2)
    )
    until = {}
    by_step = {step.step: step for step in steps}
    for step in range(9):
        if step:
            done = by_step[step]
            for index, (solved, graded) in zip(done.examined, done.scores, strict=True):
                # An index that was asked before its task began to rest ends all the same.
                until[index % 40] = step + rest if solved in (0, graded) else 0
        for when, index in asked:
            assert when != step or until.get(index % 40, 0) <= step


def test_a_rest_ends_and_begins_again():
    pool = pool_of(rest_steps=2)
    assert pool.next(0, 0) == 0
    pool.learn(1, {0: (4, 4)})
    assert [pool.next(0, step) for step in (1, 2, 3)] == [1, 1, 0]
    pool.learn(4, {0: (0, 4)})  # beyond the other bound
    assert [pool.known["t0"].until, pool.next(0, 5), pool.next(0, 6)] == [6, 1, 0]
    pool.learn(7, {0: (1, 4)})
    assert pool.known["t0"].until == 0
    pool.learn(17, {1: (0, 0)})  # without a grade nothing is known
    assert "t1" not in pool.known


def test_where_all_tasks_rest_they_are_asked_in_turn():
    pool = pool_of(rest_steps=10)
    pool.learn(1, {i: (0, 4) for i in range(COUNT)})
    assert [pool.next(i, 1) for i in range(3)] == [0, 1, 2]
    assert pool.figures(1) == {
        "pool/asked": 12,
        "pool/resting": 12,
        "pool/awake": 0,
        "pool/solve_rate": 0,
    }


def test_a_curriculum_by_hops_asks_the_easy_tasks_first():
    tasks = made(hops=lambda i: 1 + i % 3)
    pool = pool_of(tasks, curriculum="hops", curriculum_steps=10)
    asked = [pool.next(i, 0) for i in range(9)]
    assert {index % 3 for index in asked} == {0}
    assert {pool.next(i, 5) % 3 for i in range(9)} == {0, 1}
    assert [pool.next(i, 10) for i in range(9)] == list(range(9))
    with pytest.raises(UserError, match=r"^pool\.curriculum is levels; "):
        pool_of(tasks, curriculum="levels", curriculum_steps=10)


def test_a_curriculum_by_solve_rate_goes_from_pass_rates_to_what_was_seen():
    tasks = made(4, pass_rate=lambda i: 1 - i / 4)
    pool = pool_of(tasks, curriculum="solve_rate", curriculum_steps=4)
    assert [pool.next(i, 1) for i in (0, 1, 2)] == [0, 1, 4]
    pool.learn(1, {0: (0, 4), 3: (4, 4)})
    assert [pool.next(i, 1) for i in (0, 2, 3, 4)] == [1, 3, 3, 5]
    assert [pool.next(i, 4) for i in range(4)] == [0, 1, 2, 3]


def test_the_pass_rates_of_an_evaluation_choose_the_tasks(tmp_path, capsys):
    samples = [[1.0] * i + [0.0] * (4 - i) + [None] for i in range(4)]
    rows = [{"id": f"t{i}", "samples": [{"value": v} for v in samples[i]]} for i in range(4)]
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"tasks": rows}))
    config = PoolConfig(pass_rates=str(path), max_pass_rate=0.3)
    kept = with_pass_rates(config, made(6), "facts")
    assert [(task.id, task.metadata["pass_rate"]) for task in kept] == [("t0", 0.0), ("t1", 0.25)]
    assert "facts: 2 of 6 tasks have a pass rate from 0.0 to 0.3" in capsys.readouterr().out
    # Without bounds all are asked, and those that have a rate say so.
    everything = with_pass_rates(PoolConfig(pass_rates=str(path)), made(6), "facts")
    assert [task.metadata.get("pass_rate") for task in everything][3:] == [0.75, None, None]
    with pytest.raises(UserError, match=r"none of 6 tasks of facts .* 0 have one"):
        with_pass_rates(PoolConfig(max_pass_rate=0.3), made(6), "facts")
    path.write_text("{}")
    with pytest.raises(UserError, match=r"results\.json: not the results\.json of an evaluation"):
        with_pass_rates(config, made(6), "facts")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rest_below": 0.5, "rest_above": 0.5}, r"^rest_below is 0\.5 and rest_above 0\.5: "),
        ({"rest_below": 0.1}, "have no effect while rest_steps is 0"),
        ({"curriculum": "hops"}, "^curriculum is 'hops' and curriculum_steps is 0; "),
        ({"curriculum_steps": 5}, "^curriculum is '' and curriculum_steps is 5; "),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(changes, message):
    with pytest.raises(UserError, match=message):
        PoolConfig(**changes)
