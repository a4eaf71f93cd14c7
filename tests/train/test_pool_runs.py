"""Runs with mixed sources and paused tasks replay and resume exactly."""

from __future__ import annotations

import json
import random

import pytest

from coa_jax.data.trajectory import read_trajectories
from coa_jax.tasks.mixture import load_parts, stream_of
from coa_jax.train import rl
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.train.run_records import StepLog
from coa_jax.train.task_pool import TaskPool
from tests import tiny_policy
from tests.killing import stopped_after
from tests.train.killed_runs import kill_once
from tests.train.test_rl import assert_same_run
from tests.train.tiny_runs import config_of, pooled, rl_config, rows, run_kind, run_rl


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_policy.write_rl_inputs(tmp_path_factory.mktemp("pool"))


def train(folder, name):
    optimizer = OptimizerConfig(1e-3, total_steps=4, final_ratio=1.0, weight_decay=0.0)
    changes = {**pooled(folder / "tasks.jsonl"), "optimizer": optimizer}
    config = rl_config(folder / "model", folder / "tasks.jsonl", **changes)
    run_rl(folder / name, config)
    return config


def known_after(config, run):
    """What a pool learns from the record of a run."""
    parts = load_parts(config, "train", config.num_tasks, config.seed)
    tasks = [task for part in parts.values() for task in part]
    pool = TaskPool(config.pool, stream_of(config, parts, config.seed), tasks)
    records = StepLog(run / "steps.jsonl", active=False).read()
    for record in records:
        step = record.composition
        pool.learn(step.step, dict(zip(step.examined, step.scores, strict=True)))
    return pool, records


def saved(run):
    """What the newest checkpoint has of the pool."""
    newest = max((run / "checkpoints" / "rl").iterdir(), key=lambda path: int(path.name))
    extra = json.loads((newest / "extra" / "metadata").read_text())
    return {id: tuple(known) for id, known in extra["pool"].items()}


@pytest.mark.slow
def test_a_run_with_a_pool_is_a_function_of_its_seed(folder):
    config = train(folder, "whole")
    with stopped_after(2):
        train(folder, "parts")
    train(folder, "parts")
    assert_same_run(folder / "whole", folder / "parts")
    asked = [
        [(t.metadata["step"], t.task_id) for t in read_trajectories(folder / n / "traces.jsonl")]
        for n in ("whole", "parts")
    ]
    assert asked[0] == asked[1]
    pool, records = known_after(config, folder / "whole")
    assert saved(folder / "whole") == saved(folder / "parts") == pool.known
    examined = [index for record in records for index in record.composition.examined]
    assert examined == sorted(examined)
    if examined == list(range(len(examined))):
        pytest.skip("no task rests: what is sampled depends on the last bits of this JAX and CPU")
    for row in rows(folder / "whole", "rl"):
        mine = [t for step, t in asked[0] if step == row["step"]]
        for source in ("many", "few"):
            groups = len([t for t in mine if t.startswith(source + "/")]) / 4
            assert row.get(f"source/{source}/groups", 0.0) == groups
        assert row["pool/asked"] <= 5 and 0 <= row["pool/solve_rate"] <= 1


@pytest.mark.slow
def test_a_stream_with_a_pool_that_is_killed_goes_on_with_the_same_pool(folder):
    chance, name = random.Random(3), "pool-killed"
    (folder / "pool-compiled").mkdir()
    kills = sum(kill_once("pool", folder, name, chance) for _ in range(4))
    assert kills >= 2
    config = config_of("pool", folder)
    run_kind("pool", folder, name)
    pool, records = known_after(config, folder / name)
    assert [record.composition.step for record in records] == list(range(1, 9))
    assert saved(folder / name) == pool.known
    found = rl.replay_steps(config, folder / name)
    assert found.steps == 8 and found.identical, str(found)
