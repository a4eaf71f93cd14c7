"""Whole runs on 8 devices give the same results for any number of processes."""

from __future__ import annotations

import json
import signal
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from coa_jax.data.trajectory import read_trajectories, write_records
from coa_jax.train.run_records import StepLog, versions_of
from tests import tiny_policy
from tests.parallel.launched import launch
from tests.train.tiny_runs import rows

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("training")
    tiny_policy.write_sft_inputs(path)
    return tiny_policy.write_rl_inputs(path)


def train(folder, name, case, processes, *more, devices=8, **env):
    command = ("-m", "tests.parallel.tiny_training", str(folder), name, case, *more)
    return launch(processes, devices // processes, *command, timeout=550, **env)


def trained(folder, name, case, processes, *more, **options):
    """A run that came to its end; one of that name that is there already is not repeated."""
    if not (folder / name / "model").exists():
        done = train(folder, name, case, processes, *more, **options)
        assert done.returncode == 0, done.stderr[-4000:]
    assert (folder / name / "model").exists()
    return folder / name


def stopped(folder, name, case, processes, sizes, step, **options):
    """A run that was asked to stop in a step, and did."""
    done = train(folder, name, case, processes, sizes, str(step), **options)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr[-4000:]
    assert f"stopped by SIGTERM after step {step} of" in done.stderr
    assert not (folder / name / "model").exists()


def close_weights(left, right, start):
    """Whether two runs changed the weights of ``start`` in the same way."""
    a, b, base = (load_file(p / "model.safetensors") for p in (left, right, start))
    for name in base:
        change = np.abs(b[name] - base[name]).max()
        np.testing.assert_allclose(a[name], b[name], rtol=0, atol=1e-3 * change + 1e-7)
    assert any((a[name] != base[name]).any() for name in base)


def close_metrics(left, right, phase, names):
    assert len(rows(left, phase)) == len(rows(right, phase)) > 0
    for a, b in zip(rows(left, phase), rows(right, phase), strict=True):
        for name in names:
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-6), name


def test_sft_is_the_same_with_one_process_and_with_two(folder):
    one, two = (trained(folder, f"sft{n}", "sft", n) for n in (1, 2))
    close_metrics(one, two, "sft", ["loss", "optim/grad_norm", "tokens", "epoch"])
    assert rows(two, "sft")[-1]["validation/loss"] == pytest.approx(
        rows(one, "sft")[-1]["validation/loss"], rel=1e-4
    )
    close_weights(two / "model", one / "model", folder / "base")


def sampled(run):
    return {
        (t.metadata["step"], t.metadata["prompt_id"], t.sample_id): t
        for t in read_trajectories(run / "traces.jsonl")
    }


def same_samples(one, two):
    left, right = sampled(one), sampled(two)
    assert list(left) == list(right)
    for key, trajectory in left.items():
        np.testing.assert_array_equal(trajectory.tokens, right[key].tokens)
        np.testing.assert_allclose(trajectory.logp, right[key].logp, atol=1e-4)
        assert trajectory.reward == right[key].reward
    return {key[0] for key in left}


def test_rl_is_the_same_with_one_process_and_with_two(folder):
    one, two = (trained(folder, f"rl{n}", "rl", n) for n in (1, 2))
    assert same_samples(one, two) == {1, 2}
    close_metrics(one, two, "rl", ["loss", "optim/grad_norm", "tokens", "reward/mean"])
    assert all(row["mismatch/abs_logp_max"] < 1e-4 for row in rows(two, "rl"))
    close_weights(two / "model", one / "model", folder / "model")


def test_two_processes_ask_the_same_tasks_of_a_pool_and_measure_the_same(folder):
    one, two = (trained(folder, f"measured{n}", "measured", n, "2,1,1", devices=2) for n in (1, 2))
    assert same_samples(one, two) == {1, 2, 3}
    names = [name for name in rows(one, "rl")[0] if name.split("/")[0] in ("eval", "pool")]
    assert len(names) > 10
    close_metrics(one, two, "rl", names)
    # Each has sampled its share.
    files = sorted(path.name for path in (two / "evaluations").iterdir())
    assert files == [f"rl-{step:08d}-{process}.jsonl" for step in (1, 2, 3) for process in (0, 1)]
    asked = [
        [
            (record.composition.examined, record.composition.scores)
            for record in StepLog(run / "steps.jsonl", False).read()
        ]
        for run in (one, two)
    ]
    assert asked[0] == asked[1]


def test_processes_that_would_leave_out_different_tasks_end(folder):
    for process, records in enumerate((tiny_policy.records()[:1], tiny_policy.records()[1:])):
        write_records(folder / f"records{process}.jsonl", records)
    done = train(folder, "records", "records", 2, "2,1,1", devices=2)
    assert done.returncode == 2, done.stderr[-4000:]
    assert "error: the processes find different training records of the model" in done.stderr


def test_sft_goes_on_on_other_meshes_with_other_processes_and_fewer_devices(folder):
    whole = trained(folder, "sft1", "sft", 1)
    stopped(folder, "sft-parts", "sft", 1, "1,8,1", 1)
    stopped(folder, "sft-parts", "sft", 2, "2,4,1", 2)
    parts = trained(folder, "sft-parts", "sft", 1, "1,2,2", devices=4)
    close_metrics(whole, parts, "sft", ["loss", "optim/grad_norm", "tokens", "epoch"])
    close_weights(parts / "model", whole / "model", folder / "base")


def test_rl_goes_on_on_another_mesh_with_another_number_of_processes(folder):
    whole = trained(folder, "rl1", "rl", 1)
    stopped(folder, "rl-parts", "rl", 2, "1,8,1", 1)
    parts = trained(folder, "rl-parts", "rl", 1, "2,2,1", devices=4)
    assert same_samples(whole, parts) == {1, 2}
    close_metrics(whole, parts, "rl", ["loss", "optim/grad_norm", "tokens", "reward/mean"])
    close_weights(parts / "model", whole / "model", folder / "model")


def test_two_processes_stream_the_same_steps_and_go_on_in_one(folder):
    two = trained(folder, "ahead2", "ahead", 2, "1,4,2,1")  # four engines of one device in each
    history = rows(two, "rl")
    assert [row["step"] for row in history] == [1, 2, 3]
    assert max(row["stale/max"] for row in history) <= 2
    kept = read_trajectories(two / "traces.jsonl")
    for t in kept:
        assert versions_of(t)[-1][1] < t.metadata["step"]
    # Samples of both processes give way to others, and a replay in one process repeats this.
    restarts = {
        (t.metadata["prompt_id"], t.sample_id): t.metadata.get("restarts", []) for t in kept
    }
    assert {prompt % 2 for (prompt, _), pairs in restarts.items() if pairs} == {0, 1}
    again = train(folder, "ahead2", "again", 1, "1,4,2,1")
    assert again.returncode == 0, again.stderr[-4000:]
    repeated = json.loads(again.stdout.splitlines()[-1].removeprefix("[0] "))
    assert repeated["same"], repeated["outcome"]
    assert len(repeated["restarts"]) == 3 * 8
    assert any(pairs for *_, pairs in repeated["restarts"])
    for prompt, sample, pairs in repeated["restarts"]:
        assert pairs == restarts[prompt, sample]
    stopped(folder, "ahead-parts", "ahead", 2, "1,4,2,1", 2)
    parts = trained(folder, "ahead-parts", "ahead", 1, "2,2,1", devices=4)
    assert [row["step"] for row in rows(parts, "rl")] == [1, 2, 3]
    kept = [
        (t.metadata["prompt_id"], t.sample_id) for t in read_trajectories(parts / "traces.jsonl")
    ]
    assert len(set(kept)) == len(kept)


def test_rollouts_on_devices_of_their_own_change_no_bit(folder):
    same = trained(folder, "same", "rl", 1, "1,2,1,1", devices=2)
    apart = trained(folder, "apart", "rl", 1, "1,2,1,1,2", devices=4)
    assert same_samples(same, apart) == {1, 2}
    left, right = (load_file(run / "model" / "model.safetensors") for run in (same, apart))
    for name in left:
        np.testing.assert_array_equal(left[name], right[name])
    # Each of two processes trains with one of its devices and makes its rollouts with the other.
    two = trained(folder, "apart2", "rl", 2, "1,2,1,1,1", devices=4)
    assert same_samples(same, two) == {1, 2}
    close_weights(two / "model", same / "model", folder / "model")
    stopped(folder, "apart-parts", "rl", 2, "1,2,1,1,1", 1, devices=4)
    parts = trained(folder, "apart-parts", "rl", 1, "1,2,1,2,2", devices=4)
    assert same_samples(same, parts) == {1, 2}
    close_weights(parts / "model", same / "model", folder / "model")


def test_a_constrained_run_with_rollouts_on_devices_of_their_own_changes_no_bit(folder):
    same = trained(folder, "rules", "constrained", 1, "1,2,1,1", devices=2)
    apart = trained(folder, "rules-apart", "constrained", 1, "1,2,1,1,2", devices=4)
    assert same_samples(same, apart) == {1, 2}
    left, right = (load_file(run / "model" / "model.safetensors") for run in (same, apart))
    for name in left:
        np.testing.assert_array_equal(left[name], right[name])


@pytest.mark.parametrize("whom", ["0", "01"])
def test_a_stop_waits_for_no_tool_of_any_process(folder, whom):
    whole = trained(folder, "rl1", "rl", 1)
    name = f"rl-stop{whom}"
    done = train(folder, name, f"stop{whom}", 2)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr[-4000:]
    assert time.time() - (folder / name / "asked").stat().st_mtime < 60  # it saved and compiled
    assert "stopped by SIGTERM after step 1 of 2" in done.stderr
    assert not (folder / name / "model").exists()
    parts = trained(folder, name, "rl", 2)
    assert same_samples(whole, parts) == {1, 2}
    close_weights(parts / "model", whole / "model", folder / "model")


def test_a_constrained_run_on_a_mesh_learns_what_it_sampled(folder):
    run = trained(folder, "constrained", "constrained", 1)
    learned = [row for row in rows(run, "rl") if "loss" in row]
    assert learned
    for row in learned:
        assert row["mismatch/abs_logp_max"] < 1e-4
        assert row["policy/clip_low"] == row["policy/clip_high"] == 0
        assert "stop/violation" not in row


def test_a_tool_that_hangs_on_one_process_only_ends_by_its_deadline(folder):
    run = trained(folder, "hang", "hang1", 2)
    assert [row["step"] for row in rows(run, "rl")] == [1, 2]
    outcomes = {key: [c.outcome for c in t.tool_calls] for key, t in sampled(run).items()}
    # Groups are dealt out in turns: those of process 1 have the tool that hangs.
    first = min(prompt for _, prompt, _ in outcomes)
    ours = [c for (step, prompt, _), calls in outcomes.items() if step == 1 for c in calls
            if (prompt - first) % 2 == 0]  # fmt: skip
    theirs = [c for (step, prompt, _), calls in outcomes.items() if step == 1 for c in calls
              if (prompt - first) % 2 == 1]  # fmt: skip
    assert theirs and set(theirs) == {"timeout"}
    assert ours and "timeout" not in ours


def test_a_process_that_is_killed_during_a_rollout_is_named(folder):
    done = train(folder, "kill1", "kill1", 2, COA_JAX_LOST_SECONDS="5")
    assert done.returncode == 128 + 9
    assert "error: process 0 ended with exit code 3" in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "has sent no heartbeat" in line]
    assert line.startswith("[0] error: process 1 (")
    assert "its last activity: rollouts of step 1" in line


def test_so_is_the_one_that_coordinates(folder):
    done = train(folder, "kill0", "kill0", 2, COA_JAX_LOST_SECONDS="5")
    assert done.returncode == 128 + 9
    assert "error: process 1 ended with exit code 3" in done.stderr
    line = [line for line in done.stderr.splitlines() if line.startswith("[1]")][-1]
    assert line.startswith("[1] error: process 0, the coordinator at 127.0.0.1:")
