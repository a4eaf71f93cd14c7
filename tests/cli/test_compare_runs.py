"""Two runs set side by side: the command and its page."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import re
from pathlib import Path

import pytest

from coa_jax.cli.compare import run
from coa_jax.errors import UserError
from coa_jax.evaluation.compare import result_files
from tests.evaluation.made import outcome
from tests.report.run_files import HOSTILE, write_run


def write_results(run: Path, stage: str, rows: dict[str, list[float]]) -> None:
    """The result file of an evaluation, which is compressed for the stage `base`."""
    path = run / "evaluate" / stage / f"results.json{'.gz' if stage == 'base' else ''}"
    path.parent.mkdir(parents=True)
    data = json.dumps(outcome(rows, stage)).encode()
    path.write_bytes(gzip.compress(data) if stage == "base" else data)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path]:
    """Two runs with eight tasks: of those, B alone solves two and A alone solves one."""
    a, b = (write_run(tmp_path_factory.mktemp("runs") / name) for name in ("a & b", "second"))
    tasks = [f"factbook/half-area/{k}" for k in range(8)]
    for folder, solved in ((a, {0, 3, 4}), (b, {1, 2, 3, 4})):
        write_results(folder, "base", {task: [0.0] for task in tasks})
        write_results(folder, "sft", {task: [float(k in solved)] for k, task in enumerate(tasks)})
    config = json.loads((b / "config.json").read_text())
    config["optim"]["lr"] = 5e-6
    (b / "config.json").write_text(json.dumps(config))
    return a, b


@pytest.fixture(scope="module")
def told(runs, tmp_path_factory) -> tuple[str, dict, str]:
    """The output of the command, the JSON file and the page."""
    out = tmp_path_factory.mktemp("out") / "out.json"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run([*map(str, runs)], str(out))
    page = runs[1] / "report" / "compare.html"
    assert printed.getvalue().splitlines()[-1] == f"report -> {page}"
    return printed.getvalue(), json.loads(out.read_text()), page.read_text()


def test_result_files_are_compared_whether_they_are_compressed_or_not(runs, capsys):
    for stage in ("base", "sft"):  # the files of `base` are compressed
        first, second = (str(result_files(folder)[stage]) for folder in runs)
        run([first, second])
        assert f"A {stage}: pass@1" in capsys.readouterr().out
    with pytest.raises(UserError, match=re.escape(first)):
        run([first, str(runs[1])])


def test_the_stages_that_both_runs_have_are_compared_task_by_task(told):
    stdout, values, page = told
    assert "A sft: pass@1 0.375\nB sft: pass@1 0.500" in stdout
    sft = values["stages"]["sft"]
    assert (sft["better"], sft["worse"], sft["same"], sft["tasks"]) == (2, 1, 5, 8)
    assert sft["p"] == 1.0  # two of three heads or one of three
    assert values["stages"]["base"]["difference"] == 0.0
    assert "B \u2212 A: +0.125" in page
    assert "B is better at 2 tasks, worse at 1, and the same at 5." in page


def test_the_page_shows_only_the_settings_that_differ(told):
    *_, page = told
    assert "<td>optim.lr</td><td>1e-06</td><td>5e-06</td>" in page
    assert "optim.clip" not in page


def test_the_page_draws_both_runs_in_each_chart(told):
    *_, page = told
    charts = page.count("data-chart=")
    assert charts >= 9
    assert page.count('<span><i class="s0"></i>A</span>') == charts
    assert page.count('<span><i class="s1"></i>B</span>') == charts


def test_the_page_sets_the_trajectories_of_a_question_side_by_side(told):
    *_, page = told
    for kind in ("B is right, A is wrong (2)", "A is right, B is wrong (1)",
                 "Both are wrong (3)", "Both are right (2)"):  # fmt: skip
        assert f"<h3>{kind}</h3>" in page
    assert page.count('<details class="trace">') == 8
    assert HOSTILE not in page and "a &amp; b" in page


def test_runs_without_a_common_stage_are_compared_by_their_last_evaluations(tmp_path, capsys):
    for name, stage, value in (("a", "ours", 0.0), ("b", "theirs", 1.0)):
        write_results(tmp_path / name, stage, {str(k): [value] for k in range(3)})
    run([str(tmp_path / "a"), str(tmp_path / "b")], page=str(tmp_path / "page.html"))
    assert "B - A: +1.000" in capsys.readouterr().out
    page = (tmp_path / "page.html").read_text()
    assert "no phase in common" in page and "no trajectories to compare" in page


def test_runs_without_an_evaluation_have_settings_and_curves(tmp_path, capsys):
    for name, lr in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"lr": lr}))
    run([str(tmp_path / "a"), str(tmp_path / "b")])
    assert capsys.readouterr().out.startswith("no evaluation to compare\n")
    assert "No stage is evaluated in both runs" in (tmp_path / "b/report/compare.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("a",), "coa-jax compare runs/a runs/b"),
        (("a", "none"), "none: no such run directory"),
        (("a", "empty"), "empty: not a run directory: it has none of config.json"),
        (("a", "a/evaluate/sft/results.json"), "a and a/evaluate/sft/results.json"),
        (("a", "a", "", "."), "--page=.: give a file in a directory that exists"),
    ],
)
def test_a_wrong_argument_is_one_line(tmp_path, monkeypatch, arguments, why):
    monkeypatch.chdir(tmp_path)
    write_results(tmp_path / "a", "sft", {"1": [1.0]})
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=re.escape(why)):
        run(arguments[:2], *arguments[2:])
