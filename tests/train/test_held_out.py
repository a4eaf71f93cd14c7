"""Evaluation during training does not change the training, and is not repeated on resume."""

from __future__ import annotations

import json
import os
import signal

import numpy as np
import pytest
from safetensors.numpy import load_file

from coa_jax.data.trajectory import read_trajectories, write_records
from coa_jax.errors import UserError
from coa_jax.evaluation import held_out
from coa_jax.evaluation.config import HeldOutConfig
from coa_jax.evaluation.held_out import held_out_tasks
from coa_jax.model.api import Model, save_model
from coa_jax.rollout.environments.base import EnvironmentConfig
from coa_jax.rollout.request import RolloutConfig
from coa_jax.train.optimizer import OptimizerConfig
from tests import tiny_policy
from tests.train.test_rl import assert_same_run
from tests.train.tiny_runs import STREAM, rl_config, rows, run_rl, run_sft, sft_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("held_out")
    model = tiny_policy.policy()
    save_model(Model(model.config, model.params, model.tokenizer), path / "model")
    for split in ("train", "validation"):
        lines = [
            json.dumps({"id": t.id, "question": t.question, "answer": t.gold[0], "split": split})
            for t in tiny_policy.TASKS
        ]
        with open(path / "tasks.jsonl", "a") as file:
            file.write("".join(line + "\n" for line in lines).replace('"id": "', f'"id": "{split}'))
    return path


def train(folder, name, **changes):
    run_rl(folder / name, rl_config(folder / "model", folder / "tasks.jsonl", **changes))
    return folder / name


def parameters(run):
    return load_file(run / "model" / "model.safetensors")


def assert_same(one, other):
    left, right = parameters(one), parameters(other)
    for name in left:
        np.testing.assert_array_equal(left[name], right[name])


EVALUATED = {
    "evaluate_every": 2,
    "held_out": HeldOutConfig(samples=2, temperature=0.7),
}


@pytest.fixture(scope="module")
def evaluated(folder):
    return train(folder, "evaluated", **EVALUATED)


def test_a_run_has_the_same_parameters_and_trajectories_with_and_without_evaluation(
    folder, evaluated
):
    plain = train(folder, "plain")
    assert_same_run(plain, evaluated)
    measured = [row for row in rows(evaluated, "rl") if "eval/pass_at_1" in row]
    assert [row["step"] for row in measured] == [2, 3]  # the last step has one too
    for row in measured:
        (path,) = (evaluated / "evaluations").glob(f"rl-{row['step']:08d}-*")
        kept = read_trajectories(path)
        assert len(kept) == 2 * row["eval/tasks"] == 2 * len(tiny_policy.TASKS)
        right = [t.reward.value == 1.0 for t in kept]
        assert row["eval/pass_at_1"] == pytest.approx(np.mean(right))
        assert row["eval/len_mean"] == pytest.approx(np.mean([t.num_policy_tokens for t in kept]))
        assert {t.metadata["sampling"]["temperature"] for t in kept} == {0.7}
        assert {t.metadata["rollout"]["max_tool_calls"] for t in kept} == {3}
        assert {t.task_id[:10] for t in kept} == {"validation"}
    assert all("time/evaluation" not in row for row in rows(plain, "rl"))


@pytest.mark.slow
def test_a_resumed_run_measures_only_what_is_missing(folder, evaluated, monkeypatch):
    class Killed(Exception):
        pass

    original, samples = held_out.run_and_grade, []

    async def half(sampler, missing, tasks, graders, store):
        before = len(store.samples)
        await original(sampler, missing, tasks, graders, store)
        samples.append(len(store.samples) - before)
        if len(samples) == 1:  # as if half of it had been written
            (path,) = (folder / "parts" / "evaluations").iterdir()
            lines = path.read_text().splitlines(keepends=True)
            path.write_text("".join(lines[:3]))
            raise Killed

    monkeypatch.setattr(held_out, "run_and_grade", half)
    with pytest.raises(Killed):
        train(folder, "parts", **EVALUATED)
    again = train(folder, "parts", **EVALUATED)
    count = 2 * len(tiny_policy.TASKS)
    assert samples == [count, count - 3, count]
    assert_same(evaluated, again)
    for one, other in zip(rows(evaluated, "rl"), rows(again, "rl"), strict=True):
        names = [name for name in one if name.startswith("eval/")]
        assert [one[name] for name in names] == [other[name] for name in names]
    # Repeated from an earlier checkpoint, the steps have their evaluations already.
    for step in ("2", "3"):
        (again / "checkpoints" / "rl" / step).rename(again / f"moved-{step}")
    samples.append(None)
    train(folder, "parts", **EVALUATED)
    assert samples[4:] == []


def stop_at(monkeypatch, step):
    """Makes the next evaluation after ``step`` receive SIGTERM before its first sample."""
    original, sent = held_out.run_and_grade, []

    async def stopped(sampler, missing, tasks, graders, store):
        if store.about["step"] == step and not sent:
            sent.append(step)
            os.kill(os.getpid(), signal.SIGTERM)
        await original(sampler, missing, tasks, graders, store)

    monkeypatch.setattr(held_out, "run_and_grade", stopped)


def evaluations(run, phase):
    return [
        {name: value for name, value in row.items() if name.startswith(("step", "eval/"))}
        for row in rows(run, phase)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 3])  # 3 is the last
def test_a_resumed_run_completes_an_evaluation_that_sigterm_ended(
    folder, evaluated, monkeypatch, step
):
    stop_at(monkeypatch, step)
    name = f"stopped-{step}"
    with pytest.raises(SystemExit):
        train(folder, name, **EVALUATED)
    assert evaluations(folder / name, "rl")[-1] == {"step": step}
    assert not (folder / name / "model").exists()
    train(folder, name, **EVALUATED)
    assert_same(evaluated, folder / name)
    assert evaluations(folder / name, "rl") == evaluations(evaluated, "rl")


@pytest.mark.slow
def test_an_evaluation_beside_a_stream_leaves_its_record_exact(folder):
    from coa_jax.train.rl import replay_steps

    changes = {
        **STREAM,
        "evaluate_every": 2,
        "held_out": HeldOutConfig(),
        "keep_best": "eval/pass_at_1",
        "checkpoint_every": 4,
    }
    run = train(folder, "stream", **changes)
    history = rows(run, "rl")
    assert [row["step"] for row in history if "eval/pass_at_1" in row] == [2, 4, 6, 8]
    config = rl_config(folder / "model", folder / "tasks.jsonl", **changes)
    assert replay_steps(config, run).identical


@pytest.mark.slow
def test_sft_is_measured_too_and_keeps_the_best_checkpoint(folder, monkeypatch):
    write_records(folder / "data.jsonl", tiny_policy.records())
    values = {
        "optimizer": OptimizerConfig(learning_rate=1e-2, total_steps=4, warmup_steps=2),
        "validation": "",
    }
    measured = {
        "evaluate_every": 2,
        "keep_best": "eval/reward",
        "held_out": HeldOutConfig(
            mixture={
                "one": {"tasks": str(folder / "tasks.jsonl"), "num_tasks": 1},
                "all": {"tasks": str(folder / "tasks.jsonl"), "split": "train"},
            }
        ),
        "engine": rl_config(folder / "model", folder / "tasks.jsonl").engine,
        "rollout": RolloutConfig(192, 3, 48),
    }
    for name, changes in (("sft-plain", {}), ("sft", measured)):
        config = sft_config(folder / "model", folder / "data.jsonl", **values, **changes)
        run_sft(folder / name, config)
    assert_same(folder / "sft-plain", folder / "sft")
    history = rows(folder / "sft", "sft")
    assert [row["step"] for row in history if "eval/reward" in row] == [2, 4]
    row = history[-1]
    assert row["eval/one/tasks"] == 1 and row["eval/all/tasks"] == len(tiny_policy.TASKS)
    whole = row["eval/one/pass_at_1"] + row["eval/all/pass_at_1"] * row["eval/all/tasks"]
    assert row["eval/pass_at_1"] == pytest.approx(whole / row["eval/tasks"])
    stop_at(monkeypatch, 4)
    with pytest.raises(SystemExit):
        run_sft(folder / "sft-stopped", config)
    assert not (folder / "sft-stopped" / "model").exists()
    run_sft(folder / "sft-stopped", config)
    assert evaluations(folder / "sft-stopped", "sft") == evaluations(folder / "sft", "sft")


def test_tasks_that_are_trained_on_are_counted(folder, caplog):
    config = HeldOutConfig(tasks=str(folder / "tasks.jsonl"))
    trained = tiny_policy.TASKS[:2]
    held_out_tasks(config, RolloutConfig(), EnvironmentConfig(), trained=trained)
    assert f"2 of {len(tiny_policy.TASKS)} tasks of the evaluation are trained on" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep_best": "eval/reward"}, "^keep_best is eval/reward, .* evaluate_every"),
        ({"keep_best": "eval/reward", "evaluate_every": 2}, "^keep_best .* checkpoint_every "),
    ],
)
def test_a_best_checkpoint_needs_an_evaluation(folder, changes, message):
    with pytest.raises(UserError, match=message):
        rl_config(folder / "model", folder / "tasks.jsonl", **changes)
    with pytest.raises(UserError, match=r"held_out\.tasks is empty; name a source"):
        sft_config(folder / "model", folder / "data.jsonl", evaluate_every=1)
