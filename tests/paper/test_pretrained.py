"""The pipeline of configs/pretrained/factbook.py in small: stages, controls, measures, estimate."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import Counter

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from coa_jax.data.records import read_records
from coa_jax.data.trajectory import Reward, read_trajectories
from coa_jax.demo.bpe import train_bpe
from coa_jax.distillation.tasks import Tasks
from coa_jax.errors import UserError
from coa_jax.model.api import load_model
from coa_jax.paper.quickstart import Pipeline, left_minutes, run_pipeline, stages_of
from coa_jax.paper.release import release as write_release
from coa_jax.report import build_report
from coa_jax.run.command import load_config
from coa_jax.run.run_dir import RunDir
from coa_jax.tasks.mixture import load_shares
from examples.unseen_tools.questions import load
from examples.unseen_tools.tools import Calendar, Units
from tests.tasks.finished import finished
from tests.trajectory_files import write_trajectories

CONFIG = "configs/pretrained/factbook.py:debug"
MEASURES = ("natural_sft", "natural_rl", "scaling", "unseen")


def small_config():
    """Without the controls, whose updates are compiled anew."""
    config = load_config(CONFIG)
    config.sft_more = False
    config.rft = ConfigDict()
    return config


@pytest.mark.slow
def test_the_pipeline_runs_every_stage_and_goes_on_where_it_was(tmp_path, capsys):
    summary = run_pipeline(small_config(), tmp_path)
    assert set(summary["timings_s"]) >= {"base", "sft", "rl", "economy"}
    for stage in ("base", "sft", "rl", *MEASURES):
        result = json.loads((tmp_path / "evaluate" / stage / "results.json").read_text())
        assert result["figures"]["n"] == summary[stage]["n"] > 0
    tasks = json.loads((tmp_path / "evaluate" / "unseen" / "results.json").read_text())["tasks"]
    assert {task["topic"] for task in tasks} == {"units", "calendar"}
    by = json.loads((tmp_path / "evaluate" / "rl" / "results.json").read_text())["figures"]["by"]
    assert set(by["source"]) == {"people", "maths"} and "wording" in by
    out = capsys.readouterr().out
    assert "1/14 distill" in out and "minutes left" in out
    assert run_pipeline(small_config(), tmp_path) == summary
    assert capsys.readouterr().out.count("done before") == 14
    check_release(tmp_path, tmp_path / "release")


def check_release(run, release):
    """The released adapter is the policy of RL, and the directory is a run for other commands."""
    released, policy = load_model(release / "adapter"), load_model(run / "models" / "rl")
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-3 * np.abs(b).max()),
        released.params,
        policy.params,
    )
    assert released.card == policy.card
    kept = read_records(release / "data" / "train.parquet")
    made = read_records(run / "data" / "train.jsonl")
    assert kept == made and kept
    sampled = Counter(t.metadata["phase"] for t in read_trajectories(release))
    assert sampled == {"evaluate-sft": 6, "evaluate-rl": 6}
    assert build_report(release).is_file()
    with pytest.raises(UserError, match=f"^--output={release} "):
        write_release(run, release)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_controls_start_from_the_policy_of_sft(tmp_path):
    config = load_config(CONFIG)
    config.measures = ConfigDict()
    with config.unlocked():
        config.sft_more_updates = 3
    summary = run_pipeline(config, tmp_path)
    for stage in ("sft_more", "rft"):
        assert (tmp_path / "models" / stage / "config.json").is_file()
        assert summary[stage]["n"] == 6
        rows = (tmp_path / "controls" / stage / "metrics.jsonl").read_text().splitlines()
        assert rows
        assert stage == "rft" or json.loads(rows[-1])["step"] == 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_pretrained_model_is_taken_as_the_base(tmp_path):
    first = tmp_path / "first"
    run_pipeline(small_config(), first)
    config = small_config()
    config.model = str(first / "models" / "sft")
    config.measures = ConfigDict()
    run_pipeline(config, tmp_path / "second")
    base, given = (load_model(p) for p in (tmp_path / "second/models/base", config.model))
    assert base.config == given.config and len(base.tokenizer) == len(given.tokenizer)


def test_the_team_writes_chains_of_agents_whatever_the_format_of_the_policy(tmp_path):
    config = load_config("configs/pretrained/factbook.py:hermes,debug")
    with RunDir(tmp_path) as run:
        pipeline = Pipeline(config, run)
        tasks = pipeline.held_out
        assert {task.protocol.partition(":")[2] for task in tasks} == {"hermes"}
        tokenizer = train_bpe([task.question for task in tasks], 300)
        tokenizer.save_pretrained(pipeline.models / "rl")
        wrong = dataclasses.replace(
            finished("x"), reward=Reward(0.0), metadata={"phase": "evaluate-rl"}
        )
        write_trajectories(
            tmp_path / "traces.jsonl", (dataclasses.replace(wrong, task_id=t.id) for t in tasks)
        )
        pipeline.economy()
        told = run.blocks()["economy"]
    assert told["samples"] == len(tasks) and told["policy"]["success"] == 0
    assert told["team"]["success"] > 0.5


def test_the_policy_for_people_trains_on_all_wordings_and_is_evaluated_like_the_others(tmp_path):
    config = load_config("configs/pretrained/factbook.py:ask,debug")
    with RunDir(tmp_path) as run:
        pipeline = Pipeline(config, run)
        stages = [name for name, _ in stages_of(pipeline)]
        assert "evaluate_natural_rl" in stages and "release" in stages and "sft_more" not in stages
        trained = pipeline.config.distill.load()["train"]
    assert {"field", "single"} < {task.metadata.get("topic") for task in trained}
    assert not {"field"} & {task.metadata.get("topic") for task in pipeline.held_out}


def test_the_policy_of_unseen_tools_is_evaluated_after_sft_because_there_is_no_rl(tmp_path):
    config = load_config("configs/pretrained/factbook.py:tools,debug")
    with RunDir(tmp_path) as run:
        stages = [name for name, _ in stages_of(Pipeline(config, run))]
        assert stages[-3:] == ["sft", "evaluate_sft", "evaluate_unseen"] and "rl" not in stages
        config.economy = config.sft_more = True
        with pytest.raises(UserError, match=r"config\.rl is empty.*economy, sft_more"):
            stages_of(Pipeline(config, run))


def test_a_measure_of_an_unknown_policy_is_refused(tmp_path):
    config = small_config()
    config.measures.scaling.policy = "ppo"
    with pytest.raises(UserError, match="policy 'ppo' is none of base, sft, rl"):
        run_pipeline(config, tmp_path)


def test_a_missing_model_is_refused_before_the_data_are_made(tmp_path):
    config = small_config()
    config.model = str(tmp_path / "nowhere")
    with pytest.raises(UserError, match=f"^{config.model} "):
        run_pipeline(config, tmp_path / "run")
    assert not (tmp_path / "run" / "data").exists()


def test_parts_of_a_mixture_have_their_shares():
    parts = {
        "people": {"tasks": "factbook_people", "weight": 3.0},
        "sums": {"tasks": "arithmetic:chain_sum", "weight": 1.0},
    }
    tasks = load_shares(Tasks("", 40, 0, mixture=parts), "train", 40, 0)
    assert [task.source for task in tasks].count("people") == 30
    assert len(tasks) == 40 and len({task.id for task in tasks}) == 40


def test_the_unseen_tools_answer_their_questions_and_refuse_other_calls():
    tools = {"units": Units(), "calendar": Calendar()}
    for task in load(20, seed=3):
        words = task.question.rstrip("?").split()
        call = f"{words[3]} {words[4]} {words[6]}"
        if task.metadata["topic"] == "calendar":
            call = f"{words[-1]} {words[4]}"
        found = asyncio.run(tools[task.metadata["topic"]](call, None))
        assert found.ok and task.gold[0] in found.text
    for tool, call in (("units", "3 mile"), ("units", "3 mile inch"), ("calendar", "May 3")):
        found = asyncio.run(tools[tool](call, None))
        assert not found.ok and found.outcome == "bad_call"


def test_the_estimate_follows_the_speed_of_this_machine():
    stages = ("a", "b", "c", "d")
    expected = {"a": 2, "b": 4, "c": 6}
    assert left_minutes(expected, {}, stages) == 12
    assert left_minutes(expected, {"a": 240.0}, stages) == 20  # twice as slow as expected
    assert left_minutes(expected, {"a": 240.0, "b": 480.0, "c": 720.0}, stages) is None
    assert left_minutes({}, {}, stages) is None
