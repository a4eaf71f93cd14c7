"""The files from which a killed run continues: finished trajectories and recorded steps."""

from __future__ import annotations

import dataclasses
import types

import pytest

from coa_jax.data.trajectory import Author, Reward, StopReason, Trajectory
from coa_jax.files import jsonl
from coa_jax.train import rl
from coa_jax.train.admission import AdmissionRules, Composition, Ledger
from coa_jax.train.run_records import (
    GRADING,
    Spool,
    StepLog,
    StepRecord,
    newest_of,
    recorded_groups,
)


def ended(index, sample=0, versions=((0, 0),), token=1):
    metadata = {"prompt_id": index, "policy_versions": [list(pair) for pair in versions]}
    return Trajectory(
        "task", sample, "", "generalist", [token], [Author.POLICY], [0.0], "", (), (),
        StopReason.EOS, Reward(1.0), (), metadata,
    )  # fmt: skip


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
@pytest.mark.parametrize("signals", [(True,), (True, False, False)])
def test_no_trajectory_is_removed_that_a_run_from_the_checkpoint_could_use(
    tmp_path, max_staleness, signals
):
    """Rollouts are faster than updates, so the ledger composes steps long before they are made."""
    ledger = Ledger(AdmissionRules(2, 6, max_staleness, False, 0, steps=12))
    spool, steps, seen = Spool(tmp_path), [], 0
    for version in range(9):
        ledger.version = version
        while asked := ledger.admit():
            for index in asked:
                spool.add(ended(index, versions=[(0, version)]))
                ledger.end(index, signals[seen % len(signals)], version)
                seen += 1
            while (composition := ledger.next_step()) is not None:
                steps.append(composition)
        if version:
            spool.prune(steps[version - 1].state, max_staleness)
        there = {index for index, _ in spool.read()}
        for later in steps[version:]:
            assert there.issuperset(later.examined), (version, later)
    assert len(list(tmp_path.iterdir())) <= max_staleness + 2


def test_without_staleness_only_trajectories_of_the_newest_policy_stay(tmp_path):
    spool = Spool(tmp_path)
    for index, version in ((3, 4), (4, 4), (4, 5), (5, 5)):
        spool.add(ended(index, versions=[(0, version)]))
    spool.prune({"step": 5, "next": 4, "open": []}, 0)
    found = Spool(tmp_path).read()
    assert {key: [newest_of(t) for t in known] for key, known in found.items()} == {
        (4, 0): [5],
        (5, 0): [5],
    }


def test_trajectories_of_policies_that_will_be_trained_anew_are_forgotten(tmp_path):
    spool = Spool(tmp_path)
    for index, versions in enumerate([[(0, 3)], [(0, 3), (7, 4)], [(0, 4)], [(0, 2), (5, 3)]]):
        spool.add(ended(index, versions=versions))
    spool.forget(3)
    assert sorted(Spool(tmp_path).read()) == [(0, 0), (3, 0)]


def test_a_step_that_lacks_a_trajectory_leaves_none_of_later_policies(tmp_path, monkeypatch):
    spool, log = Spool(tmp_path / "spool"), StepLog(tmp_path / "steps.jsonl", True)
    groups = [[ended(index, versions=[(0, index)])] for index in range(3)]
    for step, group in enumerate(groups, 1):
        used = (step - 1,)
        log.write(StepRecord.of(Composition(step, used, used, (), 0, 0, {}), [group]))
        log.learned(step, 7)
        if step != 2:
            spool.add(group[0])
    source = object.__new__(rl.GroupSource)
    source._config = types.SimpleNamespace(
        group_size=1, max_staleness=1, mesh=types.SimpleNamespace(wait_seconds=1.0)
    )
    source._spool, source.log = spool, log
    source._kept, source._records = spool.read(), log.read(after=1)
    assert source._recorded() is None
    assert list(source._kept) == [(0, 0)] == list(Spool(spool.folder).read())
    assert [record.composition.step for record in log.read()] == [1]


def test_a_repeated_step_has_the_rewards_of_the_groups_that_it_did_not_use():
    """The spool has the grades of single samples; rewards are shaped by whole groups."""
    graded = {index: [ended(index, n, token=10 * index + n) for n in range(2)] for index in (4, 5)}
    shaped = {
        index: [dataclasses.replace(t, reward=Reward(0.5, {"earned": 1.0})) for t in group]
        for index, group in graded.items()
    }
    composition = Composition(1, (5,), (4, 5), (), 0, 0, {})
    record = StepRecord.of(composition, shaped.values())
    record = StepRecord.from_json(record.to_json())
    spool = {(index, t.sample_id): [t] for index, group in graded.items() for t in group}
    spool[4, 2] = [ended(4, 2)]  # a late sample, which was left out
    found = recorded_groups(record, spool)
    assert found is not None
    assert {i: [t.reward for t in g] for i, g in found.items()} == {
        i: [t.reward for t in g] for i, g in shaped.items()
    }
    spool[4, 1] = [ended(4, 1)]  # tokens that differ from the record
    assert recorded_groups(record, spool) is None


@pytest.mark.parametrize("here", [True, False])
def test_processes_that_learn_of_a_stop_at_different_times_wait_for_nothing(monkeypatch, here):
    """Whether this process or only another one knows of the stop, both ask the same question."""
    asked = []

    def all_say(answer, what, seconds):
        asked.append((what, answer))
        return False

    monkeypatch.setattr(rl, "_all_say", all_say)
    source = object.__new__(rl.GroupSource)
    source._config = types.SimpleNamespace(mesh=types.SimpleNamespace(wait_seconds=1.0))
    source._records, source._stream, source._abandoned = [object()], None, here
    assert source.step() is None
    assert asked == [("repeating of steps", not here)]


@pytest.mark.parametrize("names", [("0-0", "1-0"), ("1-0", "0-0")])
def test_a_trajectory_that_stands_in_two_files_counts_once_and_with_its_grades(tmp_path, names):
    """One process stored a sample while it was graded, another process stored its grades."""
    graded = ended(0)
    metadata = {**graded.metadata, GRADING: True}
    waiting = dataclasses.replace(graded, metadata=metadata, reward=None)
    for name, row in zip(names, (waiting, graded), strict=True):
        jsonl.write_lines(tmp_path / f"{name}.jsonl", [row.to_json()])
    ((found,),) = Spool(tmp_path).read().values()
    assert found.reward == graded.reward and GRADING not in found.metadata
