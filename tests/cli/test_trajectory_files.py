"""Trajectories that belong to no run are shown and compared, whichever agent wrote them."""

from __future__ import annotations

import json

import pytest

from coa_jax.data.atif import to_atif
from tests import forked
from tests.report.run_files import HOSTILE, PLACES, episode


@pytest.fixture
def jobs(tmp_path):
    """Two folders with a document for each question; the second agent is right more often."""
    for name, right in (("a", 3), ("b", 6)):
        for number, place in enumerate(PLACES):
            folder = tmp_path / name / f"trial{number}" / "agent"
            folder.mkdir(parents=True)
            one = to_atif(episode(place, "rl", number < right))
            (folder / "trajectory.json").write_text(json.dumps(one, indent=1))
    return tmp_path / "a", tmp_path / "b"


def command(*words):
    return forked.run(["-m", "coa_jax", *words])


def test_a_job_folder_of_another_program_is_a_page_with_the_reasons_of_failure(jobs):
    done = command("report", jobs[0])
    page = (jobs[0] / "report.html").read_text()
    assert done.stdout == f"{jobs[0]}/report.html\n"
    assert "8 (3 correct, 5 wrong)" in page
    assert "<li>read the answer, wrote another: 5</li>" in page
    assert page.count('<details class="trace"') == 8
    assert HOSTILE not in page


def test_two_agents_are_compared_at_the_same_questions(jobs, tmp_path):
    done = command("compare", *jobs, f"--page={tmp_path}/ab.html", f"--out={tmp_path}/ab.json")
    assert "A a: 8 trajectories; failed: 5 read the answer, wrote another" in done.stdout
    assert "B is better at 3 tasks, worse at 0, the same at 5" in done.stdout
    assert json.loads((tmp_path / "ab.json").read_text())["difference"] == 3 / 8
    page = (tmp_path / "ab.html").read_text()
    assert "B is right, A is wrong (3)" in page and page.count('<details class="trace"') == 8


def test_questions_without_a_grade_stand_side_by_side_too(jobs, tmp_path):
    for path in jobs[0].rglob("trajectory.json"):
        value = json.loads(path.read_text())
        del value["final_metrics"]["extra"]
        path.write_text(json.dumps(value))
    done = command("compare", *jobs, f"--page={tmp_path}/ab.html")
    assert done.returncode == 0 and "no graded task in common" in done.stdout
    assert "At least one is not graded (8)" in (tmp_path / "ab.html").read_text()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("report",), "give --workdir, the directory of a run, or files of trajectories"),
        (("report", "nothing.json"), "nothing.json: cannot be read: No such file"),
        (("report", "gs://bucket/x.json"), "name a file for the page with --page"),
        (("compare", "{a}", "nothing"), "not one of them and another place"),
        (("export-data", "--data={a}", "--out={a}/x", "--forms=atif,tfds"), "export it alone"),
    ],
)
def test_a_mistake_gives_one_line(jobs, words, why):
    done = command(*(word.replace("{a}", str(jobs[0])) for word in words))
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and why in line
