"""Comparing two result files: the paired test against SciPy and against all sign flips."""

from __future__ import annotations

import itertools
import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from coa_jax.errors import UserError
from coa_jax.evaluation import compare as module
from coa_jax.evaluation.compare import bootstrap_interval, compare, permutation_test
from tests import forked
from tests.evaluation.made import outcome

DIFFERENCES = st.lists(
    st.builds(Fraction, st.integers(-4, 4), st.sampled_from([1, 2, 3, 4])), max_size=8
)


@given(DIFFERENCES)
def test_the_p_value_is_the_share_of_signs_that_go_as_far(differences):
    p, _ = permutation_test(differences)
    observed = abs(sum(differences))
    sums = [
        abs(sum(d * sign for d, sign in zip(differences, signs, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    assert p == pytest.approx(sum(each >= observed for each in sums) / len(sums), abs=1e-12)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 5))
def test_with_one_sample_a_task_it_is_mcnemars_exact_test(better, worse, same):
    differences = [Fraction(1)] * better + [Fraction(-1)] * worse + [Fraction(0)] * same
    p, name = permutation_test(differences)
    if better + worse:
        assert name == "McNemar's exact test"
        assert p == pytest.approx(stats.binomtest(better, better + worse).pvalue, abs=1e-12)
    else:
        assert (p, name) == (1.0, "no task differs")


def test_it_agrees_with_scipys_permutation_test():
    differences = [Fraction(n, 5) for n in (3, -1, 2, 2, 0, -4, 5, 1, 1, 3)]
    values = np.array([float(d) for d in differences])
    theirs = stats.permutation_test(
        (values,), np.mean, permutation_type="samples", n_resamples=np.inf
    )
    assert permutation_test(differences)[0] == pytest.approx(theirs.pvalue, abs=1e-12)


def test_drawn_sums_equal_the_observed_sum_in_spite_of_rounding():
    # Both evaluations lack grades of some of 64 samples, so the common denominator exceeds 2^53.
    differences = [
        *(Fraction(*pair) for pair in [(31, 48), (472, 931), (19, 28), (733, 1159), (2108, 2793)]),
        *(Fraction(*pair) for pair in [(988, 2623), (439, 783), (2146, 3233), (1126, 2303)]),
        *(Fraction(*pair) for pair in [(267, 650), (521, 1178), (1433, 2583), (757, 1272)]),
    ]
    p, name = permutation_test(differences)
    assert "draws" in name
    assert p == pytest.approx(2 / 2**13, rel=0.5)  # B is better at all 13 tasks


@pytest.mark.slow
def test_a_distribution_that_is_too_large_is_drawn_from(monkeypatch):
    differences = [Fraction(n, 5) for n in (3, -1, 2, 2, 0, -4, 5, 1, 1, 3)]
    exact, _ = permutation_test(differences)
    monkeypatch.setattr(module, "_MOST_CELLS", 10)
    drawn, name = permutation_test(differences)
    assert "draws" in name
    assert drawn == pytest.approx(exact, abs=0.01)


def test_the_interval_is_that_of_a_bootstrap_over_tasks():
    values = np.random.default_rng(1).normal(0.1, 0.4, 200)
    theirs = stats.bootstrap((values,), np.mean, method="percentile", random_state=5)
    ours = bootstrap_interval(values)
    assert ours == pytest.approx(tuple(theirs.confidence_interval), abs=5e-3)


@pytest.mark.parametrize("differences", [[1.0], [0.5, -0.5, 1.0] * 3, [0.0] * 200, [1.0] * 12])
def test_too_few_tasks_and_tasks_that_all_differ_alike_have_no_interval(differences):
    assert bootstrap_interval(np.array(differences)) is None


A = outcome({"a": [1.0, 0.0], "b": [0.0, 0.0], "c": [1.0, 1.0], "d": [None, None]}, "old", seed=0)
B = outcome({"a": [1.0, 1.0], "b": [1.0, None], "c": [0.0, 1.0], "e": [1.0, 1.0]}, "new", seed=0)


def test_only_tasks_that_both_have_grades_of_are_compared():
    found = compare(A, B)
    assert (found.tasks, found.only_a, found.only_b) == (3, 0, 1)
    assert (found.rate_a, found.rate_b) == (0.5, pytest.approx(2.5 / 3))
    assert found.difference == pytest.approx(1 / 3)
    assert (found.better, found.worse, found.same) == (2, 1, 0)
    assert found.se == pytest.approx(np.std([0.5, 1.0, -0.5], ddof=1) / 3**0.5)
    assert found.ci95 is None  # of three tasks
    with pytest.raises(UserError, match=" 3 and 1 graded tasks"):
        compare(A, outcome({"z": [1.0]}))


@pytest.mark.parametrize(
    ("change", "notes"),
    [
        ({"prompt": "1f"}, ["prompt"]),
        ({"opening": "<think>"}, ["opening"]),
        ({"dtype": "bfloat16", "cache_dtype": "int8"}, ["dtype", "cache_dtype"]),
        ({"observation_chars": 9}, ["observation_chars"]),
        ({"grading": {"answer": "f1", "pick": {"chat": 1}}}, ["grading"]),
        ({"grading": {"answer": "exact_match", "pick": {"chat": 2}}}, []),
        ({"policy": "new", "seed": 1}, []),
        ({"tools": "2e", "split": "validation"}, ["split", "tools"]),
    ],
)
def test_what_else_differs_and_changes_what_is_measured_is_noted(change, notes):
    settings = {
        "policy": "old", "tasks": "t", "split": "test", "seed": 0, "sampling": {}, "rollout": {},
        "prompt": "full", "opening": "", "tools": "1d",
        "grading": {"answer": "exact_match", "pick": {"chat": 1}},
    }  # fmt: skip
    a, b = ({**one, "settings": made} for one, made in ((A, settings), (B, settings | change)))
    told = module.format_comparison(a, b, compare(a, b)).splitlines()
    assert [line for line in told if line.startswith("note: ")] == [
        f"note: the two differ in {name} too" for name in notes
    ]


def write(path, value):
    path.write_text(json.dumps(value))
    return str(path)


def test_the_command_compares_two_files(tmp_path):
    for name, value in (("a", A), ("b", {**B, "settings": {"sampling": 1}}), ("c", {"format": 1})):
        (tmp_path / f"{name}.json").write_text(json.dumps(value))

    def run(*names):
        return forked.run(["-m", "coa_jax.cli.compare", *names])

    done = run(tmp_path / "a.json", tmp_path / "b.json", f"--out={tmp_path}/out.json")
    assert done.returncode == 0, done.stderr
    assert (
        "B - A: +0.333 (no interval, n 3)" in done.stdout
        and "note: the two differ in sampling too" in done.stdout
    )
    assert json.loads((tmp_path / "out.json").read_text())["tasks"] == 3
    wrong = run(tmp_path / "a.json", tmp_path / "c.json")
    assert wrong.returncode == 2 and "not a result file" in wrong.stderr
    damaged = [
        {**A, "tasks": [{**A["tasks"][0], "samples": [{}]}]},
        {**A, "tasks": ["a"]},
        {**A, "tasks": [{**A["tasks"][0], "id": []}]},
        {**A, "settings": None},
        {key: value for key, value in A.items() if key != "stage"},
    ]
    for value in damaged:
        with pytest.raises(UserError, match=r"d\.json: .*coa-jax evaluate"):
            module.load(write(tmp_path / "d.json", value))
    for out in (tmp_path, tmp_path / "none" / "out.json"):
        wrong = run(tmp_path / "a.json", tmp_path / "b.json", f"--out={out}")
        assert wrong.returncode == 2 and wrong.stdout == ""
        assert wrong.stderr == f"error: --out={out}: give a file in a directory that exists\n"
