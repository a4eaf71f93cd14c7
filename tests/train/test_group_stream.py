"""Runs whose rollouts overlap with updates: bounded staleness, exact replay, kills."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import threading
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from coa_jax.data.trajectory import Author, Reward, StopReason, Trajectory, read_trajectories
from coa_jax.engine.config import EngineConfig
from coa_jax.errors import UserError
from coa_jax.rollout.request import Request
from coa_jax.run.run_dir import RunDir
from coa_jax.tasks import Task
from coa_jax.train import rl
from coa_jax.train.admission import AdmissionRules, Ledger
from coa_jax.train.group_stream import GroupStream
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.train.run_records import GRADING, Spool, checksum, versions_of
from tests import forked, tiny_policy
from tests.train.killed_runs import kill_once
from tests.train.slow_tools import slow_tools
from tests.train.tiny_runs import LEAVE_OUT, STREAM, config_of, rl_config, rows, run_kind


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_policy.write_rl_inputs(tmp_path_factory.mktemp("stream"))


def train(folder, name, seed=0, **changes):
    config = rl_config(folder / "model", folder / "tasks.jsonl", **{**STREAM, **changes})
    with RunDir(folder / name) as run:
        hang_share = 0.1 if config.late_samples == "leave_out" and config.max_staleness else 0.0
        rl.train(config, run, folder / name / "model", slow_tools(seed, hang_share=hang_share))
    return config


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("keep", {}),
        pytest.param(
            "recompute",
            {"in_flight_weights": "recompute", "admission": "task_order"},
            marks=pytest.mark.slow,
        ),
        pytest.param("left-out", LEAVE_OUT, marks=pytest.mark.slow),
    ],
)
def test_a_streaming_run_is_repeated_to_the_bit(folder, name, changes):
    config = train(folder, name, **changes)
    history = rows(folder / name, "rl")
    assert [row["step"] for row in history] == list(range(1, 9))
    assert all(row["stale/max"] <= config.max_staleness for row in history)
    assert any(row["drop/left_out"] > 0 for row in history) == (name == "left-out")
    assert any(row["stale/max"] > 0 for row in history)
    kept = read_trajectories(folder / name / "traces.jsonl")
    if name != "left-out":  # weights have changed in flight
        assert any(len(versions_of(t)) > 1 for t in kept)
    for t in kept:
        positions, versions = zip(*versions_of(t), strict=True)
        assert positions[0] == 0 and list(versions) == sorted(set(versions))
        assert all(t.author[at - 1] != Author.PROMPT or at > 0 for at in positions[1:])
        assert t.metadata["step"] - 1 >= versions[-1]
    if name == "keep":  # fewer slots than a run of several processes has
        config = dataclasses.replace(
            config, engine=EngineConfig(1, 192, 8, (64,), page_size=config.engine.page_size)
        )
    found = rl.replay_steps(config, folder / name)
    assert found.steps == 8 and found.trajectories > 8 and found.identical, str(found)


@pytest.mark.slow
def test_a_repetition_with_other_parameters_says_where_it_differs(folder):
    config = train(folder, "other", optimizer=OptimizerConfig(1e-3, total_steps=2))
    log = folder / "other" / "steps.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    first = next(line for line in lines if "used" in line)
    first["samples"][0][0]["reward"]["value"] = 0.75
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = rl.replay_steps(config, folder / "other")
    assert not found.identical and found.diverged == 1
    assert "parameters differ from step 1 on" in str(found)


def test_a_run_without_a_record_cannot_be_repeated(folder, tmp_path):
    config = rl_config(folder / "model", folder / "tasks.jsonl")
    with pytest.raises(UserError, match="has no record of step 1"):
        rl.replay_steps(config, tmp_path)


@pytest.mark.slow
def test_without_staleness_late_tools_and_other_slots_change_no_bit(folder):
    changes = {"max_staleness": 0, "optimizer": OptimizerConfig(1e-3, total_steps=2)}
    train(folder, "sync1", 1, **changes)
    changes |= {"engine": EngineConfig(6, 192, 16, (64,)), "late_samples": "leave_out"}
    train(folder, "sync2", 2, **changes)
    one, two = (load_file(folder / name / "model/model.safetensors") for name in ("sync1", "sync2"))
    for key in one:
        np.testing.assert_array_equal(one[key], two[key])
    first, second = (
        [
            (t.task_id, t.sample_id, checksum(t))
            for t in read_trajectories(folder / n / "traces.jsonl")
        ]
        for n in ("sync1", "sync2")
    )
    assert first == second


def killed_until_done(kind, folder, name, kills, chance):
    """A streaming run that is killed at random moments; what had ended before each kill."""
    (folder / f"{kind}-compiled").mkdir(exist_ok=True)
    ended = []
    while kills and kill_once(kind, folder, name, chance):
        kills -= 1
        ended.append(Spool(folder / name / "spool").read())
    run_kind(kind, folder, name)
    return ended


def check_nothing_is_lost(folder, name, ended, bound):
    kept = {}
    for t in read_trajectories(folder / name / "traces.jsonl"):
        key = t.metadata["prompt_id"], t.sample_id
        assert key not in kept  # no trajectory is learned from twice
        kept[key] = t
    learned = {checksum(t) for t in kept.values()}
    for spool in ended:
        for key, found in spool.items():
            if key in kept and checksum(found[-1]) not in learned:
                # Another sample of the task took its place only if this one was too old.
                step = kept[key].metadata["step"]
                assert step - 1 - versions_of(found[-1])[0][1] > bound or len(found) > 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stream", "leave_out"])
def test_streams_killed_twenty_times_are_repeated_to_the_bit(folder, kind):
    chance, kills = random.Random(23), 0
    for part in range(20):
        name, config = f"{kind}-often-{part}", config_of(kind, folder)
        ended = killed_until_done(kind, folder, name, 3, chance)
        kills += len(ended)
        check_nothing_is_lost(folder, name, ended, config.max_staleness)
        found = rl.replay_steps(config, folder / name)
        assert found.steps == 8 and found.identical, str(found)
        if kills >= 20:
            break
    assert kills >= 20


def test_the_command_repeats_a_run_without_a_work_directory(tmp_path):
    missing = forked.run(["-m", "coa_jax.cli.rl", f"--replay={tmp_path}"])
    assert missing.returncode == 2 and "config.json: cannot be read" in missing.stderr
    neither = forked.run(["-m", "coa_jax.cli.rl"])
    assert neither.returncode == 2 and "--config.tasks and --workdir are missing" in neither.stderr


class Bursts:
    """A sampler whose samples end one or a few turns of the event loop after each other."""

    def __init__(self, chance: random.Random):
        self.ended, self.chance, self.version = asyncio.Queue(), chance, 0

    def submit(self, request):
        for sample in request.samples:
            metadata = {
                **request.metadata,
                "prompt_id": request.prompt_id,
                "policy_versions": [[0, self.version]],
            }
            one = Trajectory(
                "task", sample, "", "generalist", [1], [Author.POLICY], [0.0], "", (), (),
                StopReason.EOS, None, (), metadata,
            )  # fmt: skip
            self.ended.put_nowait(one)

    def cancel(self, request):
        pass

    def publish(self, weights, version):
        self.version = version

    async def finished(self):
        while True:
            for _ in range(self.chance.randrange(4)):
                await asyncio.sleep(0)
            yield await self.ended.get()

    def oldest(self, request):
        return None

    def figures(self):
        return {"slots": 1.0}


async def rewarded(request, trajectory):
    return dataclasses.replace(trajectory, reward=Reward(1.0))


async def complete(request, group):
    return group


def stream_of(folder, rules, sampler, samples, grade=rewarded, **more):
    """Returns a stream of groups of ``samples`` samples, in which every group has a signal."""
    task = Task("task", "?", "generalist", (), "tests")
    return GroupStream(
        Ledger(rules),
        sampler,
        Spool(folder),
        ask=lambda index: Request(task, (1,), 0, index, tuple(range(samples))),
        grade=grade,
        complete=complete,
        has_signal=lambda group: True,
        wait_seconds=9.0,
        **more,
    )


@pytest.mark.timeout(10)
@pytest.mark.parametrize("leave_out", [False, True])
@pytest.mark.parametrize("pauses", [(0,), (0, 0, 1), (0, 2, 5)])
def test_a_group_is_whole_however_its_endings_and_gradings_follow_each_other(
    tmp_path, leave_out, pauses
):
    chance = random.Random(str(pauses))

    async def grade(request, trajectory):
        for _ in range(chance.choice(pauses)):
            await asyncio.sleep(0)
        return await rewarded(request, trajectory)

    rules = AdmissionRules(2, 4, 3, False, 4, steps=20)
    stream = stream_of(tmp_path, rules, Bursts(chance), 4, grade, leave_out=leave_out)
    stream.start()
    try:
        for step in range(1, 21):
            share = stream.step()
            assert share is not None and share.composition.step == step
            sizes = {len(group) for group in share.groups.values()}
            assert sizes <= {2, 3, 4} if leave_out else sizes == {4}
            stream.publish(None, step)
    finally:
        stream.close()


@pytest.mark.timeout(20)
def test_a_trajectory_whose_grading_is_slow_is_on_disk_and_is_not_sampled_again(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("coa_jax.train.group_stream._UNGRADED_S", 0.01)
    asked, answered = [], threading.Event()

    class Counting(Bursts):
        def submit(self, request):
            asked.extend(request.samples)
            super().submit(request)

    async def grade(task, trajectory):
        while trajectory.sample_id and not answered.is_set():  # the judge does not answer
            await asyncio.sleep(0.01)
        return await rewarded(task, trajectory)

    def stream(kept):
        rules = AdmissionRules(1, 1, 1, False, 1, steps=1)
        return stream_of(tmp_path, rules, Counting(random.Random(0)), 3, grade, kept=kept)

    killed = stream({})
    killed.start()
    while len(Spool(tmp_path).read()) < 3:
        time.sleep(0.01)
    killed.close()
    kept = Spool(tmp_path).read()
    assert [kept[0, sample][-1].reward for sample in range(3)] == [Reward(1.0), None, None]
    assert [GRADING in kept[0, sample][-1].metadata for sample in range(3)] == [False, True, True]
    assert asked == [0, 1, 2]
    resumed = stream(kept)
    resumed.start()
    time.sleep(0.1)  # long enough that the trajectories are written once more without grades
    answered.set()
    share = resumed.step()
    resumed.close()
    assert share is not None and asked == [0, 1, 2]
    assert [t.reward for t in share.groups[0]] == [Reward(1.0)] * 3
    found = Spool(tmp_path).read()
    assert {key: [t.reward for t in known] for key, known in found.items()} == {
        (0, sample): [Reward(1.0)] for sample in range(3)
    }

    # What was graded without a verdict is not graded again.
    masked = {key: [dataclasses.replace(found[key][-1], reward=None)] for key in found}
    without = stream(masked)
    without.start()
    share = without.step()
    without.close()
    assert share is not None and asked == [0, 1, 2]
    assert [t.reward for t in share.groups[0]] == [None] * 3


@pytest.mark.timeout(20)
def test_a_task_is_not_asked_again_of_a_policy_that_is_too_old_already(tmp_path):
    """Steps are composed faster than they are made, and task 2 is too old for the next step."""
    asked = []

    class Endless(Bursts):
        """The samples of the first two tasks end at once, all others only when cancelled."""

        def submit(self, request):
            asked.append((request.prompt_id, self.version))
            self.running = {**getattr(self, "running", {}), id(request): self.version}
            if request.prompt_id < 2:
                super().submit(request)

        def cancel(self, request):
            if self.running.pop(id(request), None) is not None:
                super().submit(request)
                ended = self.ended._queue  # all samples that wait to be reported
                for number, one in enumerate(ended):
                    if one.metadata["prompt_id"] == request.prompt_id:
                        ended[number] = dataclasses.replace(one, stop_reason=StopReason.CANCELLED)

        def oldest(self, request):
            return self.running.get(id(request))

    rules = AdmissionRules(1, 1, 1, False, 3, steps=9)
    stream = stream_of(tmp_path, rules, Endless(random.Random(0)), 2)
    stream.start()
    try:
        assert [stream.step().composition.used for _ in range(2)] == [(0,), (1,)]
        for _ in range(4):
            stream.publish(None, 0)
            time.sleep(0.05)
        while (2, 1) not in asked:
            stream.publish(None, 1)
            time.sleep(0.01)
        assert [version for index, version in asked if index == 2] == [0, 1]
    finally:
        stream.close()
