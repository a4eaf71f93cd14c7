"""The ablation end to end with a minimal policy, and its statistics against SciPy."""

import dataclasses
import json
import math
import re
import types

import numpy as np
import pytest
import scipy.stats

from coa_jax.data.records import read_records
from coa_jax.errors import UserError
from coa_jax.paper.ablation import (
    UNFILTERED,
    Ablation,
    mean_over_seeds,
    paired_difference,
    report,
    results,
    run_ablation,
)
from coa_jax.run.command import load_config
from coa_jax.run.run_dir import RunDir
from coa_jax.tasks import grade_answer

TINY = {
    "seeds": (3, 4),
    "distill.train": 60,
    "policy.vocab_size": 400,
    "policy.hidden_size": 32,
    "policy.intermediate_size": 32,
    "policy.num_layers": 2,
    "policy.num_heads": 2,
    "policy.num_kv_heads": 1,
    "policy.head_dim": 16,
    "policy.induction": False,
    "sft.optimizer.total_steps": 2,
    "sft.optimizer.warmup_steps": 1,
    "sft.batch_size": 2,
    "evaluate.num_tasks": 4,
    "evaluate.engine.slots": 4,
    "evaluate.engine.max_length": 192,
    "evaluate.rollout.max_tokens": 192,
    "evaluate.rollout.max_turn_tokens": 24,
}


def config(**changes):
    return load_config("configs/ablation/factbook.py", {**TINY, **changes})


# --- the sets -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("sets")
    work = Ablation(config(**{"distill.train": 80}), workdir)
    told = work.data(3)
    records = {name: read_records(workdir / f"seed3/{name}/train.jsonl") for name in told}
    return told, records


def test_the_unfiltered_set_holds_real_defects(sets):
    told, records = sets
    assert len(records[UNFILTERED]) == 80
    dropped = told["filtered"]["dropped"]
    assert dropped["wrong_answer"] > 5
    assert dropped["lucky_mistake"] + dropped.get("repeated_call", 0) > 0
    wrong = {
        name: sum(grade_answer(r.answer, r.gold) != 1.0 for r in records[name])
        for name in (UNFILTERED, "filtered")
    }
    assert wrong == {UNFILTERED: dropped["wrong_answer"], "filtered": 0}


def test_each_stage_has_an_arm_of_its_own(sets):
    told, records = sets
    full, fewer, more = (
        [r.id for r in records[name]] for name in ("filtered", "reflection", "correction")
    )
    assert "plain_share" not in told["filtered"]["dropped"]
    assert told["reflection"]["dropped"]["plain_share"] == len(full) - len(fewer) > 0
    assert set(fewer) < set(full)
    assert told["reflection"]["with_reflection"] > told["filtered"]["with_reflection"]
    twice = {name.removesuffix("#2") for name in more if name.endswith("#2")}
    assert {name for name in more if not name.endswith("#2")} == set(full)
    assert told["filtered"]["with_correction"] == pytest.approx(len(twice) / len(full))
    assert twice


def test_an_arm_without_roles_lacks_their_text_and_nothing_else(tmp_path):
    changed = config(**{"distill.train": 40})
    with changed.unlocked():
        changed.arms = {"full": {}, "bare": {}}
        changed.references = ()
        changed.without_roles = {"bare": ("double_check", "reflection")}
    told = Ablation(changed, tmp_path).data(3)
    assert told["full"]["with_reflection"] > 0 == told["bare"]["with_reflection"]
    full, bare = (read_records(tmp_path / f"seed3/{name}/train.jsonl") for name in ("full", "bare"))
    assert [record.id for record in full] == [record.id for record in bare]
    assert sum("<reflection>" in record.text for record in full) > 0
    for one, other in zip(full, bare, strict=True):
        kept = [found for found in roles_of(one) if found[0] not in ("double_check", "reflection")]
        assert roles_of(other) == kept != roles_of(one)
        for author in ("policy", "environment"):
            assert len(texts(one, author)) == len(texts(other, author))
        assert texts(one, "environment") == texts(other, "environment")


def texts(record, author):
    return [text for who, text in record.parts if who == author]


def roles_of(record):
    """(tag, text) of everything that the policy wrote."""
    return re.findall(r"<(\w+)>(.*?)</\1>", "".join(texts(record, "policy")), re.DOTALL)


@pytest.mark.slow
def test_every_arm_starts_from_the_pretrained_policy(tmp_path):
    scratch = Ablation(config(), tmp_path / "scratch")
    scratch.data(3)
    model = scratch.base(3)
    changed = config()
    with changed.unlocked():
        changed.model = str(model)
    found = Ablation(changed, tmp_path / "run").base(4)
    assert (found / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


# --- the statistics --------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 10])
def test_the_interval_over_seeds_is_students(n):
    values = np.random.default_rng(n).uniform(0.2, 0.5, n)
    told = mean_over_seeds(list(values))
    low, high = scipy.stats.t.interval(0.95, n - 1, values.mean(), scipy.stats.sem(values))
    assert told["ci95"] == pytest.approx([low, high], rel=1e-3)
    assert mean_over_seeds([0.5])["ci95"] is None


def test_the_difference_is_paired_by_seed_and_by_task():
    rng = np.random.default_rng(0)
    other = rng.integers(0, 2, (3, 400)).astype(float)
    one = np.clip(other + (rng.uniform(size=other.shape) < 0.1), 0, 1)
    one[1, 7] = other[2, 9] = math.nan
    told = paired_difference(one, other)
    difference = one - other
    by_seed = [np.nanmean(row) for row in difference]
    assert told["mean"] == pytest.approx(np.mean(by_seed))
    by_task = np.nanmean(difference, axis=0)
    low, high = scipy.stats.norm.interval(0.95, by_task.mean(), scipy.stats.sem(by_task))
    assert told["ci95_tasks"] == pytest.approx([low, high], rel=1e-5)
    assert told["ci95_tasks"][0] > 0  # it really is better
    assert told["tasks"] == 400


def test_arms_that_do_the_same_do_not_differ():
    grades = np.random.default_rng(1).integers(0, 2, (3, 50)).astype(float)
    told = results({"unfiltered": grades, "same": grades}, ("unfiltered",))
    assert told["same"]["minus"]["unfiltered"]["ci95"] == [0.0, 0.0]
    assert told["unfiltered"]["minus"] == {}
    figures = {"records": 5, "with_reflection": 0.5, "with_correction": 0.1, "dropped": {}}
    text = report(told, dict.fromkeys(told, [figures] * 3), 800)
    assert "| same | 5, 5, 5 |" in text
    zero = "+0.000 (+0.000 to +0.000)"
    assert f"| same - unfiltered | {zero} | {zero} |" in text


# --- the command ------------------------------------------------------------------------------


def test_an_arm_is_finished_with_its_timings_or_not_at_all(tmp_path, monkeypatch):
    written = []
    outcome = {"tasks": [{"id": "a", "samples": [{"value": 1.0}]}]}
    work = Ablation(config(), tmp_path)
    monkeypatch.setattr(work, "base", lambda seed: None)
    settings = types.SimpleNamespace(rename_share=0.0)
    monkeypatch.setattr(type(work.command), "sft_config", lambda *args: settings)
    monkeypatch.setattr("coa_jax.paper.ablation.sft.train", lambda *args: None)
    monkeypatch.setattr("coa_jax.paper.ablation.evaluate_model", lambda *args: outcome)
    keep = RunDir.summary
    monkeypatch.setattr(
        RunDir, "summary", lambda run, blocks: (written.append(set(blocks)), keep(run, blocks))
    )
    done = work.arm(3, "filtered")
    assert done["grades"] == [1.0]
    assert [names for names in written if "grades" in names] == [{"grades", "timings_s"}]


@pytest.mark.slow
def test_finished_arms_are_reported_without_making_them_again(tmp_path, monkeypatch):
    figures = {"records": 5, "with_reflection": 0.5, "with_correction": 0.1, "dropped": {}}
    names = (UNFILTERED, *Ablation(config(), tmp_path).arms)
    monkeypatch.setattr(Ablation, "data", lambda work, seed: dict.fromkeys(names, figures))
    for seed in TINY["seeds"]:
        for name in names:
            folder = tmp_path / f"seed{seed}" / name
            folder.mkdir(parents=True)
            grades, took = [1.0, 0.0, 1.0, 0.0], {"sft": 2.0, "evaluate": 1.0}
            done = {"grades": grades, "policy": {"pass_at_1": 0.5}, "timings_s": took}
            (folder / "summary.json").write_text(json.dumps(done))
    summary = run_ablation(config(), tmp_path)
    assert summary["timings_s"] == {f"seed{s}/{n}": 3.0 for s in TINY["seeds"] for n in names}


@pytest.mark.slow
def test_the_whole_runs_is_reported_and_goes_on(tmp_path, capsys):
    summary = run_ablation(config(), tmp_path)
    assert list(summary["arms"]) == [UNFILTERED, "correction", "filtered", "reflection"]
    text = (tmp_path / "report.md").read_text()
    assert all(f"| {name} |" in text for name in summary["arms"])
    traces = (tmp_path / "seed4/filtered/traces.jsonl").read_text().splitlines()
    assert len(traces) == 4
    # An arm that is gone is made again, and nothing else is.
    gone = tmp_path / "seed4" / "filtered" / "summary.json"
    kept = json.loads(gone.read_text())
    others = {p: p.stat().st_mtime_ns for p in tmp_path.glob("seed*/*/model/*") if p.is_file()}
    gone.unlink()
    again = run_ablation(config(), tmp_path)
    assert again["arms"] == summary["arms"]
    assert json.loads(gone.read_text())["grades"] == kept["grades"]
    same = [p for p, t in others.items() if p.stat().st_mtime_ns == t]
    assert {p.parent.parent for p in others} - {p.parent.parent for p in same} <= {gone.parent}
    with pytest.raises(UserError, match=r"sft\.batch_size: .* -> 1\)"):
        run_ablation(config(**{"sft.batch_size": 1}), tmp_path)


def test_all_held_out_tasks_are_asked_for_with_0(tmp_path):
    rows = [{"question": f"What is {n} plus 1?", "answer": str(n + 1)} for n in range(5)]
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    every = config(**{"evaluate.num_tasks": 0, "evaluate.tasks": str(path)})
    assert len(Ablation(every, tmp_path / "run").held_out) == 5


def test_mistakes_of_the_user_are_explained(tmp_path):
    changed = config()
    with changed.unlocked():
        changed.arms = {"unfiltered": {}}
    with pytest.raises(UserError, match=r"^config\.arms\.unfiltered "):
        Ablation(changed, tmp_path)
    with pytest.raises(UserError, match=r"references\[0\] is 'filterd'; give one of unfiltered"):
        Ablation(config(references=("filterd",)), tmp_path)
    with pytest.raises(UserError, match=r"seeds is \(\); give 1 to"):
        Ablation(config(seeds=()), tmp_path)
    with pytest.raises(UserError, match=r"config\.seeds contains 3 twice"):
        Ablation(config(seeds=(3, 4, 3)), tmp_path)
    with changed.unlocked():
        changed.arms = {"bare": {}}
        changed.references = ()
        changed.without_roles = {"bear": ("reflection",)}
    with pytest.raises(UserError, match="without_roles is 'bear'; give one of bare"):
        Ablation(changed, tmp_path)
    with changed.unlocked():
        changed.without_roles = {"bare": ("reflexion",)}
    with pytest.raises(UserError, match=r"without_roles\.bare\[0\] is 'reflexion'; give one of"):
        Ablation(changed, tmp_path)


@pytest.mark.parametrize(
    ("arm", "said"),
    [
        ({"plain_fracton": 0.5}, r"config\.arms\.odd\.plain_fracton is not a setting"),
        ({"selection": {"calls": 2}}, r"config\.arms\.odd\.selection\.calls is not a setting"),
        ({"mistake_rate": 0.9}, r"config\.arms\.odd\.mistake_rate: all arms select from the same"),
        (3, r"config\.arms\.odd is 3; it is a group"),
    ],
)
def test_what_an_arm_cannot_set_is_explained(tmp_path, arm, said):
    changed = config()
    with changed.unlocked():
        changed.arms = {"odd": arm}
        changed.references = ()
    with pytest.raises(UserError, match=said):
        Ablation(changed, tmp_path)


def test_an_arm_may_set_a_group_of_settings(tmp_path):
    changed = config()
    with changed.unlocked():
        changed.arms = {"busy": {"selection": {"min_tool_calls": 2}}}
        changed.references = ()
    work = Ablation(changed, tmp_path)
    selection = dataclasses.replace(work.teacher.selection, min_tool_calls=2)
    assert work.arms == {"busy": dataclasses.replace(work.teacher, selection=selection)}
