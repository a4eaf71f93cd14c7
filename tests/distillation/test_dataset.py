import json
import sys
import time
from pathlib import Path

import pytest

from coa_jax.cli.distill import distill, read
from coa_jax.data.records import read_records
from coa_jax.distillation.dataset import distill_split, statistics_of
from coa_jax.distillation.pipeline import DistillConfig
from coa_jax.errors import UserError
from coa_jax.run.command import load_config
from coa_jax.tasks import load_tasks
from tests import forked
from tests.killing import kill_when

TASKS = load_config("configs/distill/factbook.py").tasks.tasks
ROOT = Path(__file__).resolve().parents[2]
CONFIG = DistillConfig(mistake_rate=0.3, unrecovered_rate=0.1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tools, factbook_tasks):
    workdir = tmp_path_factory.mktemp("whole")
    return workdir, distill_split("train", factbook_tasks[:40], tools, CONFIG, workdir)


def test_the_file_holds_the_records(whole):
    workdir, split = whole
    assert read_records(workdir / "train.jsonl") == list(split.records)
    assert len(split.records) > 30


def test_a_second_start_makes_nothing_again(whole, tools, factbook_tasks):
    workdir, split = whole
    files = {path: path.read_bytes() for path in workdir.rglob("*.jsonl")}
    assert len(files) == 3  # journal, kept, examples of dropped
    again = distill_split("train", factbook_tasks[:40], tools, CONFIG, workdir)
    assert (again.resumed, list(again.records)) == (40, list(split.records))
    assert all(path.read_bytes() == data for path, data in files.items())


def test_more_tasks_continue_the_journal(whole, tools, factbook_tasks, tmp_path):
    part = distill_split("train", factbook_tasks[:15], tools, CONFIG, tmp_path)
    full = distill_split("train", factbook_tasks[:40], tools, CONFIG, tmp_path)
    assert (part.resumed, full.resumed) == (0, 15)
    assert list(full.records) == list(whole[1].records)


def test_another_seed_needs_another_place(whole, tools, factbook_tasks):
    with pytest.raises(UserError, match="another configuration"):
        distill_split("train", factbook_tasks[:2], tools, DistillConfig(seed=9), whole[0])


def test_other_filters_may_be_tried_on_the_same_runs(whole, tools, factbook_tasks, tmp_path):
    journal = tmp_path / "journal" / "train.jsonl"
    journal.parent.mkdir()
    journal.write_bytes((whole[0] / "journal" / "train.jsonl").read_bytes())
    strict = DistillConfig(mistake_rate=0.3, unrecovered_rate=0.1, max_chars=1000)
    split = distill_split("train", factbook_tasks[:40], tools, strict, tmp_path)
    assert split.resumed == 40
    assert split.report.dropped["too_long"] > 0
    assert all(len(record.text) <= 1000 for record in split.records)


def test_statistics_describe_the_records(whole):
    records = whole[1].records
    figures = statistics_of(records)
    assert figures["records"] == len(records)
    assert sum(group["records"] for group in figures["by_hops"].values()) == len(records)
    assert 0 < figures["with_correction"] < 1
    assert sum(figures["mistakes"].values()) == sum(len(r.metadata["mistakes"]) for r in records)
    one = [r for r in records if r.metadata["hops"] == 1]
    assert figures["by_hops"]["1"]["text_chars_max"] == max(len(r.text) for r in one)
    assert statistics_of([])["records"] == 0


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


def test_a_wrong_setting_is_one_line_and_exit_code_2(tmp_path):
    done = run(tmp_path, "--config.teacher.mistake_rate=2.0")
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("error: config.teacher.mistake_rate")


def test_a_distillation_that_keeps_nothing_names_the_filter_and_its_setting(tmp_path):
    settings = {"tasks.train": 6, "tasks.validation": 2, "teacher.selection.min_tool_calls": 50}
    config = load_config("configs/distill/factbook.py", settings)
    wanted = (
        r"few_calls dropped the most, \d of 6; change --config\.teacher\.selection\.min_tool_calls"
    )
    with pytest.raises(UserError, match=wanted):
        distill(config, tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["data"]["train"]["filters"]["dropped"]["few_calls"] > 0
    assert (tmp_path / "train.jsonl").read_text() == ""
    assert (tmp_path / "dropped" / "train.jsonl").read_text()
    assert len((tmp_path / "journal" / "train.jsonl").read_text().splitlines()) >= 6
    with pytest.raises(UserError, match=wanted):  # the same command again
        distill(config, tmp_path)


def test_logs_of_which_nothing_is_kept_name_the_reason(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"question": "?", "messages": []}) + "\n")
    settings = {"traces.format": "messages", "traces.files": str(log)}
    config = load_config("configs/distill/traces.py", settings)
    with pytest.raises(UserError, match=r"^train: no record became a traj.*log\.jsonl:1: "):
        read(config, tmp_path / "out")
    assert (tmp_path / "out" / "summary.json").exists()
