"""Reinforcement learning with live tools."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from coa_jax.data.trajectory import Reward, read_trajectories
from coa_jax.errors import UserError
from coa_jax.model.compute import local_compute
from coa_jax.rollout.request import RolloutConfig
from coa_jax.train.algorithms import Algorithm, presets
from coa_jax.train.checkpoint import Checkpoints
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.train.step import init_state
from coa_jax.train.update import update
from tests import tiny_policy
from tests.killing import stopped_after
from tests.train.tiny_runs import rl_config, rows, run_rl


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_policy.write_rl_inputs(tmp_path_factory.mktemp("rl"))


def train(folder, name, **changes):
    run_rl(folder / name, rl_config(folder / "model", folder / "tasks.jsonl", **changes))
    return folder / name


@pytest.fixture(scope="module")
def finished(folder):
    return train(folder, "whole")


def test_a_step_samples_with_tools_and_learns_on_policy(finished, folder):
    history = rows(finished, "rl")
    assert [row["step"] for row in history] == [1, 2, 3]
    for row in history:
        assert row["mismatch/abs_logp_max"] < 1e-4
        assert row["mismatch/abs_logp_mean"] <= row["mismatch/abs_logp_max"]
        # Before the first update every ratio is 1.
        assert row["policy/clip_low"] == row["policy/clip_high"] == 0
        assert row["policy/entropy"] > 0
        assert row["optim/grad_norm"] > 0
        assert row["tool/calls"] > 0
        assert 0 < row["reward/mean"] < 1
        assert 1 <= row["group/used"] <= 2
        assert sum(v for k, v in row.items() if k.startswith("stop/")) == pytest.approx(1)
    left, right = (
        load_file(p / "model.safetensors") for p in (folder / "model", finished / "model")
    )
    assert any((left[name] != right[name]).any() for name in left)


@pytest.mark.slow
def test_a_constrained_run_learns_what_it_sampled(folder):
    # Hot enough that a free policy would break many rules.
    run = train(
        folder,
        "constrained",
        temperature=1.6,
        optimizer=OptimizerConfig(learning_rate=1e-3, total_steps=1),
        rollout=RolloutConfig(192, 3, 48, constrain=True, strict=True),
    )
    (row,) = rows(run, "rl")
    assert row["mismatch/abs_logp_max"] < 1e-4
    assert row["policy/clip_low"] == row["policy/clip_high"] == 0
    assert "stop/violation" not in row and "stop/eos" not in row
    kept = read_trajectories(run / "traces.jsonl")
    assert kept and all(t.metadata["rollout"]["constrain"] for t in kept)
    assert len({len(t.tokens) for t in kept}) > 1


def test_every_trajectory_is_kept_with_its_grade(finished):
    kept = read_trajectories(finished / "traces.jsonl")
    history = rows(finished, "rl")
    assert len(kept) == 4 * sum(row["group/sampled"] for row in history)
    for row in history:
        values = [t.reward.value for t in kept if t.metadata["step"] == row["step"]]
        assert np.mean(values) == pytest.approx(row["reward/mean"])
    samples = {(t.metadata["prompt_id"], t.sample_id) for t in kept}
    assert len(samples) == len(kept)  # nothing was sampled twice


def interrupt(folder, name, after, **changes):
    """A run that is stopped in the middle of a step and started again."""

    with stopped_after(after):
        train(folder, name, **changes)
    return train(folder, name, **changes)


def assert_same_run(one, other):
    left, right = (load_file(p / "model" / "model.safetensors") for p in (one, other))
    for name in left:
        np.testing.assert_array_equal(left[name], right[name])
    tokens = [
        [(t.task_id, t.sample_id, t.tokens.tolist()) for t in read_trajectories(p / "traces.jsonl")]
        for p in (one, other)
    ]
    assert tokens[0] == tokens[1]


@pytest.mark.slow
def test_trajectories_stay_on_disk_until_the_last_checkpoint_is_complete(folder, monkeypatch):
    events = []

    def note(owner, name):
        original = getattr(owner, name)

        def noted(*arguments, **options):
            result = original(*arguments, **options)
            events.append((name, len(list((folder / "ends" / "spool").iterdir()))))
            return result

        monkeypatch.setattr(owner, name, noted)

    for name in ("save", "wait"):
        note(Checkpoints, name)
    train(folder, "ends", optimizer=OptimizerConfig(1e-3, total_steps=1))
    last = max(at for at, (name, _) in enumerate(events) if name == "save")
    assert events[last : last + 2] == [("save", 1), ("wait", 1)]
    assert not list((folder / "ends" / "spool").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in presets(192) if name != "opd"])
def test_each_algorithm_runs_with_live_tools_and_resumes_to_the_bit(folder, name):
    changes = {"algorithm": Algorithm(name), "mini_batch": 2, "groups": 3}
    changes["optimizer"] = OptimizerConfig(2e-4, total_steps=4, final_ratio=1.0, weight_decay=0.0)
    whole = train(folder, f"{name}", **changes)
    for row in rows(whole, "rl"):
        assert row["group/used"] == 0 or np.isfinite(row["optim/grad_norm"])
        assert row.get("mismatch/abs_logp_max", 0) < 1e-4
    assert_same_run(whole, interrupt(folder, f"{name}-parts", 2, **changes))


def test_samples_without_a_grade_do_not_learn(finished, folder):
    kept = read_trajectories(finished / "traces.jsonl")[:4]
    values = [1.0, 0.0, None, 0.0]
    group = [
        dataclasses.replace(t, reward=Reward(value)) for t, value in zip(kept, values, strict=True)
    ]
    model = tiny_policy.policy()
    config = rl_config(folder / "model", folder / "tasks.jsonl")

    def learnt(members):
        state = init_state(jax.tree.map(jnp.copy, model.params), config.optimizer)
        return update(config, state, model.config, [members], local_compute())

    (state, _, stats), (other, _, other_stats) = learnt(group), learnt([*group[:2], group[3]])
    assert stats["tokens"] == sum(t.num_policy_tokens for t in group if t.reward.value is not None)
    assert {**stats, "time/score": 0.0} == {**other_stats, "time/score": 0.0}
    jax.tree.map(np.testing.assert_array_equal, state.params, other.params)


def test_a_step_without_a_signal_changes_no_parameter(finished, folder):
    model = tiny_policy.policy()
    config = rl_config(folder / "model", folder / "tasks.jsonl")
    state = init_state(model.params, config.optimizer)
    after, _, stats = update(config, state, model.config, [], local_compute())
    assert stats == {}
    assert after is state


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row_length": 100}, "row_length is 100, and trajectories have up to 192 tokens"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"group_size": 0}, "group_size is 0; give a whole number from 1"),
        ({"rows": -1}, "rows is -1; give a whole number from 0"),
        ({"epochs": 9}, "total_steps is 3, and a step makes 9 updates"),
        (
            {"max_staleness": 1, "algorithm": Algorithm("grpo", old_logp="trainer")},
            "nothing corrects for the policy that sampled; give algorithm.tis_cap=2",
        ),
        ({"mini_batch": 3}, "mini_batch is 3, and a step has 2 groups"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(folder, changes, message):
    with pytest.raises(UserError, match=message):
        rl_config(folder / "model", folder / "tasks.jsonl", **changes)
