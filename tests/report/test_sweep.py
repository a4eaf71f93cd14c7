"""Runs beside each other: table, curves and page."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.errors import UserError
from coa_jax.report.sweep import SweepRun, build_sweep, curves, read_runs, summarize, table


def write_run(path, rewards, pass_at_1=None, below="", **block):
    path.mkdir(parents=True)
    rows = [
        {"step": i + 1, "phase": "rl", "reward/mean": r, "mismatch/abs_logp_max": 1e-5 * (i + 1)}
        for i, r in enumerate(rewards)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if pass_at_1 is not None:
        (path / below).mkdir(exist_ok=True)
        result = {"pass_at_1": pass_at_1, "ci95": [0, 1], "n": 400, **block}
        (path / below / "summary.json").write_text(json.dumps({"rl": result}))


def test_seeds_of_a_setting_become_one_row_and_the_best_comes_first(tmp_path):
    write_run(tmp_path / "grpo-0", [0.1, 0.2, 0.3, 0.5], 0.3, "evaluate", tokens_per_task=100)
    write_run(tmp_path / "grpo-1", [0.1, 0.2, 0.3, 0.7], 0.5, "evaluate", tokens_per_task=200)
    write_run(tmp_path / "dr_grpo-0", [0.2] * 4, 0.45)
    write_run(tmp_path / "late-0", [0.2] * 3)
    (tmp_path / "report").mkdir()  # no run
    rows = {row.name: row for row in summarize(read_runs(tmp_path))}
    assert list(rows) == ["dr_grpo", "grpo", "late"]
    grpo = rows["grpo"]
    assert (grpo.runs, grpo.measured, grpo.steps, grpo.tasks) == (2, 2, 4, 400)
    assert (grpo.pass_at_1, grpo.low, grpo.high) == pytest.approx((0.4, 0.3, 0.5))
    assert grpo.deviation == pytest.approx(0.1414213562)  # sqrt(((0.1)^2 + (0.1)^2) / 1)
    assert grpo.reward == pytest.approx(0.6)  # the last of four steps, over two runs
    assert grpo.tokens_per_task == 150
    assert grpo.gap == pytest.approx(4e-5)
    assert (rows["late"].measured, rows["late"].pass_at_1) == (0, None)


def test_a_curve_is_the_mean_of_the_runs_that_have_the_step(tmp_path):
    write_run(tmp_path / "a-0", [1.0, 3.0, 5.0])
    write_run(tmp_path / "a-1", [3.0, 5.0])
    write_run(tmp_path / "b-0", [0.0])
    one, other = curves(read_runs(tmp_path), "reward/mean")
    assert (one.name, one.x, one.y) == ("a", (1, 2, 3), (2.0, 4.0, 5.0))
    assert (other.name, other.y) == ("b", (0.0,))


def write_phases(path, *phases):
    """A run of ``(phase, values of reward/mean and loss)``; without values it is not there yet."""
    path.mkdir(parents=True)
    rows = [
        {"step": step, "phase": phase, "reward/mean": value, "loss": value}
        for phase, values in phases
        for step, value in enumerate(values)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_of_several_phases_the_last_one_is_compared_and_named(tmp_path):
    write_phases(tmp_path / "a-0", ("sft", [9.0] * 20), ("rl", [1.0, 2.0, 3.0]))
    write_phases(tmp_path / "a-1", ("sft", [7.0] * 20), ("rl", [3.0, 4.0]))
    write_phases(tmp_path / "b-0", ("sft", [5.0, 4.0]))
    runs = read_runs(tmp_path)
    one, other = curves(runs, "loss")
    assert (one.x, one.y) == ((0, 1, 2), (2.0, 3.0, 3.0))
    assert (other.x, other.y) == ((0, 1), (5.0, 4.0))
    a, b = summarize(runs)
    assert (a.phase, a.steps, a.reward) == ("rl", 1, pytest.approx(3.5))
    assert (b.phase, b.steps) == ("sft", 1)
    page = build_sweep(tmp_path)[0].read_text()
    assert "belong to the phase in the row" in page
    # Losses of two phases are no lines of one chart.
    assert page.index("<h3>RL</h3>") < page.index("<h3>SFT</h3>") and page.count(">Loss<") == 2


def test_a_run_that_has_not_begun_the_last_phase_is_in_no_curve_of_it(tmp_path):
    write_phases(tmp_path / "a-0", ("sft", [9.0] * 20), ("rl", [1.0, 2.0]))
    write_phases(tmp_path / "a-1", ("sft", [7.0] * 20))
    (line,) = curves(read_runs(tmp_path), "loss")
    assert line.y == (1.0, 2.0)
    (row,) = summarize(read_runs(tmp_path))
    assert (row.runs, row.phase) == (2, "rl")


def test_the_page_names_every_setting_in_table_and_curves(tmp_path):
    write_run(tmp_path / "grpo-0", [0.1, 0.2], 0.3)
    write_run(tmp_path / "<b>-0", [0.1, 0.4], 0.2)
    path, rows = build_sweep(tmp_path)
    page = path.read_text()
    assert "&lt;b&gt;" in page and "<b>-0" not in page
    assert page.count("<svg") >= 3  # a bar for each setting, and the chart of the reward
    assert "0.300" in table(rows)
    saved = json.loads((tmp_path / "sweep.json").read_text())
    assert [entry["name"] for entry in saved] == ["grpo", "<b>"]


def test_metrics_that_are_no_numbers_are_left_out(tmp_path):
    write_run(tmp_path / "a-0", [0.1, None, 0.3])
    (row,) = summarize(read_runs(tmp_path))
    assert row.reward == pytest.approx(0.3)
    assert curves(read_runs(tmp_path), "reward/mean")[0].x == (1, 3)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_lowest_mean_and_highest_are_in_order(rates):
    runs = [SweepRun("a", str(i), (), {"pass_at_1": rate}) for i, rate in enumerate(rates)]
    (row,) = summarize(runs)
    assert row.low <= row.pass_at_1 + 1e-12 and row.pass_at_1 <= row.high + 1e-12


@pytest.mark.parametrize("missing", [True, False])
def test_a_directory_without_runs_is_one_line(tmp_path, missing):
    folder = tmp_path / "nothing" if missing else tmp_path
    with pytest.raises(UserError, match=f"^{folder}: no "):
        read_runs(folder)
