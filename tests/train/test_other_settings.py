"""A work directory refuses other settings, and records permitted changes."""

from __future__ import annotations

import dataclasses

import pytest

import coa_jax
from coa_jax.errors import UserError
from coa_jax.files import durable
from coa_jax.run.run_dir import RunDir, read_config_changes
from coa_jax.train import rl
from coa_jax.train.command import run_at
from coa_jax.train.config import DPOConfig, RFTConfig
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.train.replay import ReplayResult
from tests import tiny_policy
from tests.train.tiny_runs import rl_config, rows, sft_config

TWO_STEPS = OptimizerConfig(learning_rate=1e-2, total_steps=2, warmup_steps=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs")
    tiny_policy.write_sft_inputs(path)
    tiny_policy.write_rl_inputs(path)
    return path


def sft_of(folder, **changes):
    given = {"rename_share": 0.0, "optimizer": TWO_STEPS, **changes}
    return sft_config(folder / "base", folder / "data.jsonl", **given)


def config_of(kind, folder):
    shared = ("model", "seed", "rows", "row_length", "dtype", "remat", "optimizer", "batch_size")
    sft = sft_of(folder)
    given = {name: getattr(sft, name) for name in (*shared, "checkpoint_every")}
    given |= {"traces": "traces.jsonl", "phase": "rl", "per_task": 2}
    return {
        "sft": lambda: sft,
        "rl": lambda: rl_config(folder / "model", folder / "tasks.jsonl"),
        "dpo": lambda: DPOConfig(**given, beta=0.5, min_gap=0.5),
        "rft": lambda: RFTConfig(**given, min_reward=1.0),
    }[kind]()


@pytest.mark.parametrize(
    ("kind", "setting", "value"),
    [
        ("sft", "data", "b.jsonl"),
        ("rl", "tasks", "b.jsonl"),
        ("dpo", "beta", 0.1),
        ("rft", "seed", 9),
    ],
)
def test_training_refuses_a_work_directory_with_other_settings(
    folder, tmp_path, kind, setting, value
):
    config = config_of(kind, folder)
    with run_at(tmp_path, config) as (run, _, _):
        run.begin(kind, 1, 2)
    before = (tmp_path / "config.json").read_bytes()
    other = dataclasses.replace(config, **{setting: value})
    with (
        pytest.raises(UserError, match=rf"other settings \({setting}: .* -> .*\): .*--workdir"),
        run_at(tmp_path, other),
    ):
        pytest.fail("the run began")
    assert (tmp_path / "config.json").read_bytes() == before
    with run_at(tmp_path, config) as (run, _, _):  # the same settings are accepted
        run.begin(kind, 1, 2)


def test_a_finished_run_is_kept_and_a_permitted_change_is_recorded_with_its_step(folder, tmp_path):
    for _ in range(2):
        done = coa_jax.train_sft(sft_of(folder), tmp_path)
        assert len(done.metrics) == 2 and done.model.is_dir()
    trained = (tmp_path / "config.json").read_bytes()
    for refused in ({"seed": 8}, {"optimizer": dataclasses.replace(TWO_STEPS, learning_rate=1.0)}):
        with pytest.raises(UserError, match=rf"^{tmp_path} .*\({next(iter(refused))}.*: .* -> "):
            coa_jax.train_sft(sft_of(folder, **refused), tmp_path)
    assert (tmp_path / "config.json").read_bytes() == trained
    more = {"optimizer": dataclasses.replace(TWO_STEPS, total_steps=3), "checkpoint_every": 3}
    more["dtype"] = "bfloat16"  # as on a processor that has it
    assert len(coa_jax.train_sft(sft_of(folder, **more), tmp_path).metrics) == 3
    assert read_config_changes(tmp_path) == [
        {"step": 3, "setting": "checkpoint_every", "old": 2, "new": 3},
        {"step": 3, "setting": "dtype", "old": "float32", "new": "bfloat16"},
        {"step": 3, "setting": "optimizer.total_steps", "old": 2, "new": 3},
    ]
    assert durable.read_json_object(tmp_path / "config.json")["checkpoint_every"] == 3
    more["optimizer"] = dataclasses.replace(TWO_STEPS, total_steps=1)
    with pytest.raises(UserError, match=r"has finished 3 steps, .* ask for 1"):
        coa_jax.train_sft(sft_of(folder, **more), tmp_path)


def test_records_in_memory_must_be_those_of_the_run(folder, tmp_path):
    records = tiny_policy.records()
    coa_jax.train_sft(sft_of(folder), tmp_path, data=records)
    with pytest.raises(UserError, match=r"records\.jsonl .* records "):
        coa_jax.train_sft(sft_of(folder), tmp_path, data=records[:1])


@pytest.mark.parametrize("train", [coa_jax.train_sft, coa_jax.train_rl])
def test_a_command_that_fails_at_its_settings_has_written_nothing(folder, tmp_path, train):
    config = config_of("sft" if train is coa_jax.train_sft else "rl", folder)
    given = {"tools": list(tiny_policy.tools().values())} if train is coa_jax.train_rl else {}
    mesh = {**dataclasses.asdict(config.mesh), "fsdp": 4096}
    with pytest.raises(UserError, match="4096"):
        train(config, tmp_path / "new", mesh=mesh, **given)
    assert not (tmp_path / "new").exists()


def test_a_failed_command_leaves_the_config_of_an_earlier_run(folder, tmp_path):
    with run_at(tmp_path, sft_of(folder)) as (run, _, _):
        run.begin("sft", 1, 2)
    before = (tmp_path / "config.json").read_bytes()
    mesh = {**dataclasses.asdict(sft_of(folder).mesh), "fsdp": 4096}
    with pytest.raises(UserError, match="4096"):
        coa_jax.train_sft(sft_of(folder), tmp_path, mesh=mesh)
    assert (tmp_path / "config.json").read_bytes() == before
    assert not read_config_changes(tmp_path)


def test_a_repeated_step_takes_the_change_that_came_after_it(tmp_path):
    for value, step in ((1, 0), (2, 5), (2, 3)):
        with RunDir(tmp_path) as run:
            run.keep_config({"checkpoint_every": value}, ("checkpoint_every",))
            run.begin("sft", step, 9)
    assert [row["step"] for row in read_config_changes(tmp_path)] == [4]


@pytest.mark.slow
def test_a_run_that_was_made_longer_is_replayed_with_the_settings_of_each_step(folder, tmp_path):
    def config(steps):
        optimizer = OptimizerConfig(1e-3, total_steps=steps)  # the rate falls towards the end
        return rl_config(folder / "model", folder / "tasks.jsonl", optimizer=optimizer)

    for steps in (2, 4):
        with run_at(tmp_path, config(steps)) as (run, output, _):
            rl.train(config(steps), run, output, list(tiny_policy.tools().values()))
    assert len(rows(tmp_path, "rl")) == 4
    found = rl.replay_steps(config(4), tmp_path)
    assert found.trajectories and found.identical, str(found)
    assert "optimizer.total_steps: 2 -> 4 from step 3 on" in str(found)


def test_a_replay_that_compared_no_trajectory_is_no_success():
    found = ReplayResult(2, 0, [], None)
    assert not found.identical and "no trajectory was compared" in str(found)
    assert ReplayResult(2, 4, [], None).identical
