"""Tasks that the policy has learned from records before: left out, counted or refused."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest

import coa_jax
from coa_jax.data.trajectory import DistilledRecord, read_trajectories, write_records
from coa_jax.errors import UserError
from coa_jax.report import build_report
from coa_jax.run.settings import build_config
from coa_jax.tasks import Task
from coa_jax.tasks.mixture import stream_of
from coa_jax.train import rl
from coa_jax.train.config import DistilledConfig
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.train.task_overlap import find_distilled, trained_on
from coa_jax.train.training_tasks import load_training_tasks
from tests import forked, tiny_policy
from tests.killing import stopped_after
from tests.train.test_rl import assert_same_run
from tests.train.tiny_runs import pooled, rl_config, run_rl, sft_config

ONE_OF_THREE = "of 3 RL tasks, 1 are distilled questions and 0 more ask for a distilled fact"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A policy that SFT has trained on the record of the first task, and the three tasks."""
    folder = tiny_policy.write_rl_inputs(tmp_path_factory.mktemp("distilled"))
    write_records(folder / "data.jsonl", tiny_policy.records())
    config = sft_config(
        folder / "model",
        folder / "data.jsonl",
        optimizer=OptimizerConfig(1e-5, total_steps=1),
        validation="",
    )
    coa_jax.train_sft(config, folder / "sft", data=tiny_policy.records()[:1])
    return folder


def config_of(folder, **changes):
    return rl_config(folder / "sft" / "model", folder / "tasks.jsonl", **changes)


def remaining(config, run=None):
    parts, _, _, overlap = load_training_tasks(config, run)
    return {task.question for tasks in parts.values() for task in tasks}, overlap


def test_rl_leaves_out_the_questions_of_sft_and_says_so(folder, capsys):
    tools = list(tiny_policy.tools().values())
    coa_jax.train_rl(config_of(folder), folder / "rl", tools=tools)
    assert f"{ONE_OF_THREE}; 1 are left out" in capsys.readouterr().out
    sampled = {t.question for t in read_trajectories(folder / "rl" / "traces.jsonl")}
    assert sampled == {task.question for task in tiny_policy.TASKS[1:]}
    summary = json.loads((folder / "rl" / "summary.json").read_text())
    assert summary["RL tasks"] == f"{ONE_OF_THREE}; 1 are left out"
    assert ONE_OF_THREE in build_report(folder / "rl").read_text()
    # The next run of RL starts from this policy.
    further = dataclasses.replace(config_of(folder), model=str(folder / "rl" / "model"))
    assert remaining(further)[1].left_out == ["task-0"]


@pytest.mark.slow
def test_a_run_goes_on_and_is_replayed_without_the_records(folder):
    config = config_of(folder)
    run_rl(folder / "whole", config)
    with stopped_after(2):
        run_rl(folder / "parts", config)
    shutil.move(folder / "sft" / "records.jsonl", folder / "moved.jsonl")
    try:
        run_rl(folder / "parts", config)
        assert_same_run(folder / "whole", folder / "parts")
        found = rl.replay_steps(config, folder / "whole")
        assert found.steps == 3 and found.identical, str(found)
        _, overlap = remaining(config)
        assert str(overlap).startswith("note: unknown how many of the 3 RL tasks are distilled")
    finally:
        shutil.move(folder / "moved.jsonl", folder / "sft" / "records.jsonl")
    # A run of an earlier version has begun with all tasks.
    (folder / "whole" / "distilled.json").unlink()
    assert len(remaining(config, folder / "whole")[0]) == 3


def test_the_tasks_may_be_counted_only(folder):
    found, overlap = remaining(config_of(folder, distilled=DistilledConfig("count")))
    assert len(found) == 3
    assert str(overlap) == f"{ONE_OF_THREE}; 0 are left out"


def test_a_run_that_refuses_distilled_tasks_ends_before_it_writes_anything(folder, tmp_path):
    words = [
        *("-m", "coa_jax.cli.rl", f"--workdir={tmp_path / 'run'}"),
        *("--config=configs/rl/tiny.py", "--config.distilled.tasks=refuse"),
        f"--config.model={folder / 'sft' / 'model'}",
        f"--config.tasks={folder / 'tasks.jsonl'}",
    ]
    done = forked.run(words)
    assert done.returncode == 2, done.stderr
    assert f"error: distilled.tasks is refuse: {ONE_OF_THREE}" in done.stderr
    assert not (tmp_path / "run").exists()


def test_the_records_can_be_named(folder, tmp_path):
    write_records(tmp_path / "records.jsonl", tiny_policy.records()[1:])
    named = DistilledConfig(records=str(tmp_path / "records.jsonl"))
    assert remaining(config_of(folder, distilled=named))[0] == {tiny_policy.TASKS[0].question}
    write_records(tmp_path / "records.jsonl", tiny_policy.records())
    with pytest.raises(UserError, match=r"all 3 tasks of .*tasks.jsonl are distilled: raise"):
        remaining(config_of(folder, distilled=named))
    with pytest.raises(UserError, match=r"absent.jsonl"):
        remaining(config_of(folder, distilled=DistilledConfig(records="absent.jsonl")))


def test_each_source_of_a_mixture_leaves_out_its_own(folder):
    mixed = pooled(folder / "tasks.jsonl")
    mixed["mixture"]["few"].pop("num_tasks")
    config = config_of(folder, **mixed)
    parts, _, _, overlap = load_training_tasks(config)
    assert sorted(overlap.left_out) == ["few/task-0", "many/task-0"]
    stream = stream_of(config, parts, config.seed)
    assert {stream[i].question for i in range(40)} == {t.question for t in tiny_policy.TASKS[1:]}


def overlap_of(tmp_path, records, tasks):
    write_records(tmp_path / "records.jsonl", records)
    config = DistilledConfig(records=str(tmp_path / "records.jsonl"))
    return find_distilled(config, "", {"": tasks}, None)


def record_of(task):
    return DistilledRecord(
        "r", task.question, task.protocol, task.gold, (("policy", "x"),), "", task.metadata
    )


def asked(question, *gold, **metadata):
    return Task(question, question, "generalist", gold, "tests", metadata)


def test_a_question_is_known_by_its_words_and_an_answer(tmp_path):
    known = [
        asked("What is 3 + 4?", "7"),
        asked("Who wrote Faust?", "Goethe", "J. W. Goethe"),
        asked("Any answer?"),
    ]
    same = [
        asked("what is 3+4", "7"),
        asked("Who wrote “Faust”?", "goethe", "Johann Goethe"),
        asked("any answer", "yes"),
    ]
    other = [asked("What is 3 - 4?", "-1"), asked("Who wrote Faust II?", "Goethe")]
    found = overlap_of(tmp_path, map(record_of, known), same + other)
    assert found.left_out == [task.id for task in same]
    assert (found.tasks, found.records, found.same_question, found.same_fact) == (5, 3, 3, 0)


def test_a_fact_is_known_by_its_kind_entities_and_answers(tmp_path):
    about = {"kind": "lookup>lookup>larger", "relation": "area", "entities": ["Peru", "Mali"]}
    known = asked("Is Peru or Mali larger?", "Peru", **about)
    turned = {**about, "entities": ["Mali", "Peru"]}
    same = asked("Which has more land, Mali or Peru?", "Peru", **turned)
    other = [
        asked("a?", "Mali", **about),
        asked("b?", "Peru", **{**about, "relation": "population"}),
        asked("c?", "Peru", **{**about, "entities": ["Peru", "Chad"]}),
        asked("d?", "Peru", **{**about, "kind": "lookup"}),
        asked("e?", "Peru", kind="lookup>lookup>larger", relation="area", entities=[]),
    ]
    found = overlap_of(tmp_path, [record_of(known)], [known, same, *other])
    assert found.left_out == [known.id, same.id]
    assert (found.same_question, found.same_fact) == (1, 1)


def test_the_records_of_a_model_are_those_of_its_whole_history(tmp_path):
    def run(name, output, **config):
        (tmp_path / name / output).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        return str(tmp_path / name / output)

    base = run("scratch", "model", data="text.jsonl", policy={})  # data of the tokenizer only
    first = run("sft", "model", data="a.jsonl", protocol="mhqa", optimizer={}, model=base)
    after = run("rl", "model", tasks="t", optimizer={}, model=first)
    last = run("pipeline", "models/sft", distill={}, sft={}, model=after)
    pipeline = f"{tmp_path}/pipeline/data/train.*", ""
    assert list(trained_on(last)) == [pipeline, ("a.jsonl", "mhqa")]
    assert list(trained_on(after)) == [("a.jsonl", "mhqa")]
    (tmp_path / "pipeline" / "models" / "base").mkdir()
    assert list(trained_on(str(tmp_path / "pipeline/models/base"))) == [("a.jsonl", "mhqa")]
    assert list(trained_on(base)) == list(trained_on("Org/Name")) == list(trained_on("")) == []


def test_the_settings_are_checked():
    with pytest.raises(UserError, match="leave_out"):
        build_config(DistilledConfig, {"tasks": "drop"})
