"""Rejection sampling and preference pairs from graded trajectories."""

from __future__ import annotations

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from coa_jax.data.trajectory import Reward
from coa_jax.errors import UserError
from coa_jax.model.config import LoraConfig
from coa_jax.parallel.config import MeshConfig
from coa_jax.run.run_dir import RunDir
from coa_jax.train import preference, rejection
from coa_jax.train.config import DPOConfig, RFTConfig
from coa_jax.train.experience import score
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.train.preference import dpo_objective, make_pairs, pair_batches
from coa_jax.train.rejection import read_graded, select
from tests import forked, tiny_policy
from tests.train.test_update import groups
from tests.train.tiny_runs import baseline_settings, rows, write_graded
from tests.trajectory_files import write_trajectories


def graded(rewards, task="t0"):
    """Trajectories of one task with these rewards, each with other tokens."""
    source = groups()[0][0]
    return [
        dataclasses.replace(
            source,
            task_id=task,
            sample_id=i,
            tokens=(source.tokens + i) % 61,
            reward=Reward(value),
            metadata={"phase": "rl"},
        )
        for i, value in enumerate(rewards)
    ]


def test_right_trajectories_are_learnt_at_most_so_many_of_a_task_and_none_twice():
    members = graded([1.0, 0.0, 1.0, 1.0, 0.4]) + graded([0.0, 1.0], "t1")
    chosen = select([*members[:1], *members], 1.0, 2, 100)
    assert [(t.task_id, t.sample_id) for t in chosen] == [("t0", 0), ("t0", 2), ("t1", 1)]
    assert len(select(members, 0.3, 9, 100)) == 5
    assert select(members, 0.3, 9, len(members[0].tokens) - 1) == []


def test_branches_of_a_sample_count_in_fine_tuning_and_are_left_out_of_pairs():
    one, other = graded([1.0, 1.0])
    branched = dataclasses.replace(one, branches=(other,))
    assert len(select([one, branched], 1.0, 2, 100)) == 2  # different samples
    none = np.zeros(101, np.int32)
    branch = dataclasses.replace(other, tokens=none, author=none, logp=none, segments=())
    long = dataclasses.replace(one, branches=(branch,))
    assert select([long], 1.0, 2, 100) == []
    worse = graded([1.0, 0.0])[1]
    assert len(make_pairs([one, worse], 0.5, 9, 100)) == 1
    assert make_pairs([branched, worse], 0.5, 9, 100) == []


def test_the_best_are_preferred_to_the_worst():
    pairs = make_pairs(graded([0.2, 1.0, 0.0, 0.6, 1.0]), 0.5, 9, 100)
    assert [(a.sample_id, b.sample_id) for a, b in pairs] == [(1, 2), (4, 0)]
    assert len(make_pairs(graded([0.2, 1.0, 0.0, 0.6, 1.0]), 0.5, 1, 100)) == 1
    assert make_pairs(graded([1.0, 1.0, 1.0]), 0.5, 9, 100) == []
    both = graded([1.0, 0.0])
    assert make_pairs(both, 0.5, 9, 2 * len(both[0].tokens) - 1) == []


def test_a_pair_that_is_too_long_takes_the_place_of_no_other():
    best, *others = graded([1.0, 0.9, 0.1, 0.0])
    none = np.zeros(900, np.int32)
    long = dataclasses.replace(best, tokens=none, author=none, logp=none, segments=())
    ((chosen, rejected),) = make_pairs([long, *others], 0.5, 1, 800)
    assert (chosen.sample_id, rejected.sample_id) == (1, 2)


def test_the_loss_of_pairs_is_that_of_the_paper():
    torch = pytest.importorskip("torch")
    pairs = [(a, b) for a, b in zip(*[iter([t for g in groups() for t in g])] * 2, strict=True)][:3]
    rng, beta, size = np.random.default_rng(0), 0.7, 40
    batches = pair_batches(pairs, size, 2)
    assert len(batches) == 2
    count = sum(batch.mask.sum() for batch in batches)
    loss, accuracy, seen = 0.0, 0.0, 0
    expected = []
    for batch in batches:
        logp, ref = (-rng.uniform(0, 5, batch.mask.shape).astype(np.float32) for _ in range(2))
        off = batch.mask == 0
        batch = batch._replace(ref_logp=np.where(off, np.nan, ref))

        def objective(x, batch=batch):
            return dpo_objective(x, batch, beta)

        (value, stats), slope = jax.value_and_grad(objective, has_aux=True)(logp)
        loss, accuracy = (
            loss + float(value) / count,
            accuracy + float(stats["dpo/accuracy"]) / count,
        )
        now = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
        total = torch.zeros((), dtype=torch.float64)
        for row in range(2):
            if not batch.mask[row].any():
                continue
            margins = []
            for sign in (1, -1):
                at = (batch.advantage[row] == sign) & (batch.mask[row] > 0)
                margins.append(
                    (now[row][at] - torch.tensor(ref[row][at], dtype=torch.float64)).sum()
                )
            total = total - torch.log(torch.sigmoid(beta * (margins[0] - margins[1])))
            seen += float(margins[0] > margins[1]) / 3
        (total / 3).backward()
        expected.append(total.item() / 3)
        np.testing.assert_allclose(slope / count, now.grad.numpy(), rtol=2e-5, atol=1e-9)
        assert not np.asarray(slope)[off].any()
    assert loss == pytest.approx(sum(expected), rel=1e-5)
    assert accuracy == pytest.approx(seen, rel=1e-5)


def test_a_file_without_graded_trajectories_of_the_phase_is_refused(tmp_path):
    path = tmp_path / "traces.jsonl"
    write_trajectories(path, graded([None, 1.0]))
    assert len(read_graded(str(path), "rl")) == len(read_graded(str(path), "")) == 1
    with pytest.raises(
        UserError, match=r"phase 'rll'; .* these phases: \{'rl': 2\}; set config.phase"
    ):
        read_graded(str(path), "rll")


# --- runs ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tiny policy, and a right and a wrong trajectory of each of two tasks."""
    path = tiny_policy.write_rl_inputs(tmp_path_factory.mktemp("baselines"))
    write_graded(path / "traces.jsonl")
    return path


def test_rejection_sampling_makes_right_trajectories_likelier(folder):
    with RunDir(folder / "rft") as run:
        rejection.train(
            RFTConfig(**baseline_settings(folder), min_reward=1.0), run, folder / "rft" / "model"
        )
    losses = [row["loss"] for row in rows(folder / "rft", "rft")]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.1
    assert load_file(folder / "rft" / "model" / "model.safetensors")


@pytest.mark.slow
def test_records_are_learned_beside_trajectories_or_alone(folder, tmp_path, capsys):
    path = tmp_path / "records.json"
    prompt = "Follow the mhqa protocol.\n\nQuestion: Why?"
    answered = {"output": "<think>x</think><answer>y</answer>"}
    path.write_text(json.dumps([{"instruction": prompt, **answered}] * 3))
    optimizer = OptimizerConfig(learning_rate=3e-3, total_steps=1)
    values = baseline_settings(folder, data=str(path), prompt_style="data", row_length=192)
    values |= {"optimizer": optimizer, "min_reward": 1.0}
    with RunDir(tmp_path / "both") as run:
        rejection.train(RFTConfig(**values), run, tmp_path / "both" / "model")
    said = capsys.readouterr().out
    assert "graded trajectories, of 2 tasks\n3 records of " in said
    with pytest.raises(UserError, match=rf"^{path}: .* sft and rft .*config\.data"):
        read_graded(str(path), "rl")
    with pytest.raises(UserError, match="traces, data "):
        RFTConfig(**{**values, "traces": "", "data": ""})


@pytest.mark.parametrize("rank", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_preferences_are_learnt(folder, rank):
    """With adapters, the reference is the same frozen model without them."""
    workdir, optimizer = folder / f"dpo-{rank}", OptimizerConfig(learning_rate=3e-3, total_steps=8)
    changes = {"optimizer": optimizer, "lora": LoraConfig(rank)} if rank else {}
    with RunDir(workdir) as run:
        config = DPOConfig(**baseline_settings(folder, **changes), beta=0.5, min_gap=0.5)
        preference.train(config, run, workdir / "model")
    assert (workdir / "model-adapters").exists() == (rank > 0)
    history = rows(workdir, "dpo")
    assert history[0]["loss"] == pytest.approx(np.log(2), rel=1e-5)  # the reference itself
    assert history[-1]["loss"] < history[0]["loss"] - 0.05
    assert history[-1]["dpo/accuracy"] == 1
    assert history[0]["dpo/margin"] == pytest.approx(0, abs=1e-4)


def test_the_length_of_rows_is_blamed_only_if_it_is_set(folder):
    for length, blamed in ((0, ": "), (48, r" and at most 48 tokens.*: raise row_length, ")):
        settings = baseline_settings(folder, row_length=length)
        with RunDir(folder / "none") as run, pytest.raises(UserError) as error:
            rejection.train(RFTConfig(**settings, min_reward=2.0), run, folder / "none" / "model")
        assert re.search(f"a reward of at least 2.0{blamed}lower min_reward", str(error.value))
        with RunDir(folder / "none") as run, pytest.raises(UserError) as error:
            config = DPOConfig(**settings, beta=0.5, min_gap=2.0)
            preference.train(config, run, folder / "none" / "model")
        assert re.search(f"rewards that differ by 2.0{blamed}lower min_gap", str(error.value))


def test_processes_meet_before_the_scores_of_the_reference(folder, monkeypatch):
    order = []

    def meet(what, seconds):
        order.append((what, seconds))

    def scored(*arguments, **options):
        order.append("score")
        return score(*arguments, **options)

    monkeypatch.setattr("coa_jax.parallel.processes.barrier", meet)
    monkeypatch.setattr(preference, "score", scored)
    optimizer = OptimizerConfig(learning_rate=3e-3, total_steps=1)
    mesh = MeshConfig(wait_seconds=7.0)
    with RunDir(folder / "meet") as run:
        config = DPOConfig(
            **baseline_settings(folder, optimizer=optimizer, mesh=mesh), beta=0.5, min_gap=0.5
        )
        preference.train(config, run, folder / "meet" / "model")
    assert order[:3] == [("scores of the reference", 7.0), "score", ("update 1", 7.0)]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["rft", "dpo"])
def test_the_commands_train_from_a_file_of_traces(folder, command):
    overrides = {
        k: v for k, v in baseline_settings(folder).items() if not isinstance(v, OptimizerConfig)
    }
    workdir = folder / f"command-{command}"
    words = [
        *("-m", "coa_jax", command, f"--config=configs/{command}/factbook.py"),
        *(f"--config.{key}={value}" for key, value in overrides.items()),
        *("--config.optimizer.total_steps=2", f"--workdir={workdir}"),
    ]
    done = forked.run(words)
    assert done.returncode == 0, done.stderr
    assert (workdir / "model" / "model.safetensors").exists()
    assert len([json.loads(x) for x in (workdir / "metrics.jsonl").read_text().splitlines()]) == 2
