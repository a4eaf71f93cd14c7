"""The command over the Factbook, killed on the way."""

import json
import sys
import time
from pathlib import Path

import pytest

from coa_jax.run.command import load_config
from coa_jax.tasks import load_tasks
from tests import forked
from tests.killing import kill_when

TASKS = load_config("configs/distill/factbook.py").tasks.tasks
ROOT = Path(__file__).resolve().parents[2]


def command(workdir, *more):
    return [
        sys.executable,
        "-m",
        "coa_jax.cli.distill",
        "--config=configs/distill/factbook.py",
        f"--workdir={workdir}",
        "--config.tasks.train=30",
        "--config.tasks.validation=10",
        "--config.teacher.concurrency=2",
        *more,
    ]


def run(workdir, *more):
    return forked.run(command(workdir, *more)[1:])


@pytest.mark.slow
def test_a_killed_command_continues_to_the_same_files(tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert run(straight).returncode == 0
    journal = killed / "journal" / "train.jsonl"
    done = kill_when(command(killed), ROOT, journal, 5) - 1
    assert not (killed / "train.jsonl").exists()
    finished = run(killed)
    assert finished.returncode == 0, finished.stderr
    assert f"{done} of them from before" in finished.stderr
    for name in ("train.jsonl", "validation.jsonl"):
        assert (killed / name).read_bytes() == (straight / name).read_bytes()
    summaries = [json.loads((d / "summary.json").read_text()) for d in (straight, killed)]
    assert all(set(s) == {"data", "teacher", "timings_s"} for s in summaries)
    assert summaries[0]["teacher"] == summaries[1]["teacher"]
    assert summaries[0]["data"] == summaries[1]["data"]
    assert summaries[0]["teacher"]["n"] == 10
    assert "teacher pass@1" in finished.stdout


@pytest.mark.slow
def test_two_thousand_runs_killed_on_the_way_hold_every_task_once(tmp_path):
    """The bar: under ten minutes on two cores, and the kills change no byte."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    size = ("--config.tasks.train=2000", "--config.teacher.concurrency=16")
    start = time.monotonic()
    assert run(straight, *size).returncode == 0
    seconds = time.monotonic() - start
    print(f"2,000 runs and 10 of validation, start of the process included: {seconds:.1f} s")
    assert seconds < 600
    journal = killed / "journal" / "train.jsonl"
    for enough in (600, 1300):
        kill_when(command(killed, *size), ROOT, journal, enough)
    finished = run(killed, *size)
    assert finished.returncode == 0, finished.stderr
    assert (killed / "train.jsonl").read_bytes() == (straight / "train.jsonl").read_bytes()
    episodes = [json.loads(line)["episode"] for line in journal.read_text().splitlines()[1:]]
    assert len(episodes) == len(set(episodes)) == 2000
    assert set(episodes) == {task.id for task in load_tasks(TASKS, "train", 2000, 0)}
