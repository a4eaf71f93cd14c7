"""The live view of a run: it follows growing files, and shows hostile text as text."""

from __future__ import annotations

import dataclasses
import io
import os
import pty
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from coa_jax.errors import UserError
from coa_jax.files import jsonl
from coa_jax.report import watch
from coa_jax.report.watch import newest_trajectories, picture, sparkline
from coa_jax.train.run_records import GRADING
from tests.report.run_files import PLACES, episode
from tests.trajectory_files import append_trajectories


def row(step, **metrics):
    return {"step": step, "phase": "rl", "time/step": 1.8, **metrics}


def drawn(run, width=100, count=8):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(picture(run, count))
    return console.file.getvalue()


@pytest.fixture
def run(tmp_path):
    rows = [row(i, **{"reward/mean": 0.1 * i, "stale/mean": 0.0}) for i in range(1, 6)]
    jsonl.write_lines(tmp_path / "metrics.jsonl", rows)
    jsonl.write_lines(tmp_path / "config.json", [{"optimizer": {"total_steps": 40}}])
    return tmp_path


def test_a_picture_has_the_step_the_rate_and_every_metric_with_its_curve(run):
    text = drawn(run)
    assert "RL step 5 of 40, 2,000 steps per hour" in text
    (line,) = [line for line in text.splitlines() if "reward/mean" in line]
    assert line.split() == ["reward/mean", "0.5", "0.3", "▁▃▅▆█"]


def test_a_line_that_a_run_is_still_writing_is_not_shown(run):
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 6, "phase": "rl"}\n{"step": 7')
    assert "RL step 6 of 40" in drawn(run)
    jsonl.write_lines(run / "metrics.jsonl", [row(1), row(2)])
    assert "RL step 2 of 40" in drawn(run)
    (run / "metrics.jsonl").unlink()
    assert "no step yet" in drawn(run)


def test_a_damaged_line_is_named(run):
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"[1]\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl.*not a JSON object"):
        drawn(run)


def test_the_newest_trajectories_come_first_wherever_they_stand(run):
    old = [episode(place, "rl-train", True) for place in PLACES[:3]]
    new = [episode(place, "rl-train", False) for place in PLACES[3:5]]
    append_trajectories(run / "traces.jsonl", old)
    os.utime(run / "traces.jsonl", (1, 1))
    (run / "spool").mkdir()
    append_trajectories(run / "spool" / "0-5.jsonl", new)
    found = newest_trajectories(run, 4)
    assert [t.task_id for t in found] == [t.task_id for t in [*new[::-1], *old[:0:-1]]]
    text = drawn(run, count=4)
    assert text.count("wrong") == 2 and text.count("correct") == 2


def test_a_trajectory_without_a_verdict_is_shown_and_one_that_is_still_graded_is_not(run):
    masked, waiting = (
        dataclasses.replace(episode(place, "rl-train", True), reward=None) for place in PLACES[:2]
    )
    waiting.metadata[GRADING] = True
    (run / "spool").mkdir()
    append_trajectories(run / "spool" / "0-5.jsonl", [masked, waiting])
    assert [t.task_id for t in newest_trajectories(run, 4)] == [masked.task_id]
    drawn(run)


def test_of_a_full_spool_only_the_newest_files_are_read(run, monkeypatch):
    (run / "spool").mkdir()
    for number, place in enumerate(PLACES[:4]):
        path = run / "spool" / f"{number}.jsonl"
        append_trajectories(path, [episode(place, "rl-train", True)])
        os.utime(path, (number + 1, number + 1))
    read, last_lines = [], watch._last_lines
    monkeypatch.setattr(watch, "_last_lines", lambda p, n: read.append(p.name) or last_lines(p, n))
    assert len(newest_trajectories(run, 2)) == 2
    assert read == ["3.jsonl", "2.jsonl"]


def test_text_of_a_policy_moves_no_cursor(run):
    hostile = episode("Chad", "rl-train", True, question="\x1b[2J\x07what\u202e?\nsecond line")
    append_trajectories(run / "traces.jsonl", [hostile])
    text = drawn(run, width=200)
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert "what\ufffd? second line" in text


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=200))
def test_a_curve_has_a_bar_for_each_value_or_for_equal_parts(values):
    finite = [v for v in values if v - v == 0]
    curve = sparkline(values)
    assert len(curve) == min(len(finite), 32)
    if len(finite) <= 32 and len(set(finite)) > 1:
        assert curve[finite.index(max(finite))] == "█"
        assert curve[finite.index(min(finite))] == "▁"


def test_ctrl_c_ends_the_live_view_and_leaves_the_last_picture(run):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "coa_jax.report.watch", f"--workdir={run}", "--every=0.1"]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=theirs)
    os.close(theirs)
    shown = b""
    until = time.monotonic() + 60
    while b"reward/mean" not in shown and time.monotonic() < until:
        shown += os.read(ours, 1 << 16)
    process.send_signal(signal.SIGINT)
    try:
        while piece := os.read(ours, 1 << 16):
            shown += piece
    except OSError:  # the other end is closed
        pass
    assert process.wait(30) == 0
    assert b"Traceback" not in shown
    assert "reward/mean" in shown.rpartition(b"\x1b[?1049l")[2].decode()  # behind the screen
