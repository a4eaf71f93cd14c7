"""Commands that read finished runs in a bucket: replay, report and compare."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coa_jax import api, storage
from coa_jax.cli import compare
from coa_jax.data.trajectory import read_trajectories
from tests import forked, tiny_policy
from tests.evaluation.tiny_evaluation import CONFIG
from tests.storage.bucket_runs import prepare, run_kind, tools_of


def told(*words: str) -> str:
    """What a command prints."""
    done = forked.run(["-m", "coa_jax", *words])
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def text_at(url: str) -> str:
    return Path(storage.local(url)).read_text()


def evaluate(root: str, run: str, policy: str) -> None:
    places = {"policy": f"{root}/{policy}", "tools": tools_of(root)}
    api.evaluate(CONFIG, f"{root}/{run}", **places, tasks=tiny_policy.TASKS, stage="rl")


@pytest.mark.slow
def test_finished_runs_are_replayed_reported_and_compared_by_url(bucket):
    prepare("rl", bucket)
    run_kind("rl", bucket, "run")
    sampled = len(read_trajectories(f"{bucket}/run/traces.jsonl"))
    replayed = told("rl", f"--replay={bucket}/run")
    assert "3 steps, 24 trajectories: 24 identical" in replayed
    assert "parameters identical after every step" in replayed

    evaluate(bucket, "run", "run/model")
    evaluate(bucket, "before", "model")
    samples = len(tiny_policy.TASKS) * CONFIG.samples
    assert len(read_trajectories(f"{bucket}/run/traces.jsonl")) == sampled + samples

    page = f"{bucket}/run/report/index.html"
    assert told("report", f"--workdir={bucket}/run").strip() == page
    assert all(task.question in text_at(page) for task in tiny_policy.TASKS)

    both = told("compare", f"{bucket}/before", f"{bucket}/run", f"--out={bucket}/runs.json")
    page = f"{bucket}/run/report/compare.html"
    assert f"report -> {page}" in both
    assert tiny_policy.TASKS[0].question in text_at(page)
    results = [f"{bucket}/{run}/evaluate/rl/results.json" for run in ("before", "run")]
    compare.run(results, out=f"{bucket}/results.json")
    found = json.loads(text_at(f"{bucket}/results.json"))
    assert found["tasks"] == len(tiny_policy.TASKS)
    stage = json.loads(text_at(f"{bucket}/runs.json"))["stages"]["rl"]
    assert stage == {key: found[key] for key in stage}
