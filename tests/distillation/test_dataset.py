import dataclasses
import json

import pytest

from coa_jax.cli.distill import distill, read
from coa_jax.data.records import read_records
from coa_jax.distillation.dataset import distill_split, statistics_of
from coa_jax.distillation.pipeline import DistillConfig
from coa_jax.errors import UserError
from coa_jax.run.command import load_config
from tests import forked
from tests.distillation.small_team import TASKS, TEAM, command_settings

CONFIG = DistillConfig(team=TEAM, mistake_rate=0.3, unrecovered_rate=0.1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tools):
    workdir = tmp_path_factory.mktemp("whole")
    return workdir, distill_split("train", TASKS[:40], tools, CONFIG, workdir)


def test_the_file_holds_the_records(whole):
    workdir, split = whole
    assert read_records(workdir / "train.jsonl") == list(split.records)
    assert len(split.records) > 30


def test_a_second_start_makes_nothing_again(whole, tools):
    workdir, split = whole
    files = {path: path.read_bytes() for path in workdir.rglob("*.jsonl")}
    assert len(files) == 3  # journal, kept, examples of dropped
    again = distill_split("train", TASKS[:40], tools, CONFIG, workdir)
    assert (again.resumed, list(again.records)) == (40, list(split.records))
    assert all(path.read_bytes() == data for path, data in files.items())


def test_more_tasks_continue_the_journal(whole, tools, tmp_path):
    part = distill_split("train", TASKS[:15], tools, CONFIG, tmp_path)
    full = distill_split("train", TASKS[:40], tools, CONFIG, tmp_path)
    assert (part.resumed, full.resumed) == (0, 15)
    assert list(full.records) == list(whole[1].records)


def test_another_seed_needs_another_place(whole, tools):
    with pytest.raises(UserError, match=r"train\.jsonl: .*seed: 0 -> 9"):
        distill_split("train", TASKS[:2], tools, DistillConfig(team=TEAM, seed=9), whole[0])


def test_other_filters_may_be_tried_on_the_same_runs(whole, tools, tmp_path):
    journal = tmp_path / "journal" / "train.jsonl"
    journal.parent.mkdir()
    journal.write_bytes((whole[0] / "journal" / "train.jsonl").read_bytes())
    strict = dataclasses.replace(CONFIG, max_chars=1000)
    split = distill_split("train", TASKS[:40], tools, strict, tmp_path)
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


def test_a_wrong_setting_is_one_line_and_exit_code_2(tmp_path):
    command = ["-m", "coa_jax.cli.distill", f"--workdir={tmp_path}"]
    done = forked.run([*command, "--config.teacher.mistake_rate=2.0"])
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("error: config.teacher.mistake_rate")


def test_a_distillation_that_keeps_nothing_names_the_filter_and_its_setting(tmp_path):
    settings = {"tasks.train": 6, "tasks.validation": 2, "teacher.selection.min_tool_calls": 50}
    settings |= command_settings(tmp_path)
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
