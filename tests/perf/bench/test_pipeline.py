"""Runs follow their long-tailed workload file, and the lower bounds are computed correctly."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from coa_jax.data.trajectory import read_trajectories
from coa_jax.errors import UserError
from coa_jax.perf.bench import pipeline
from coa_jax.perf.bench.pipeline_workload import PipelineWorkload, WorkloadSample, draw
from coa_jax.perf.bench.workload import Call, Script

SHA256 = {
    5: "d24ffbf56487aba839e76e377b2bb2c6593b395be5100e4a2c00f7a84cb1d4cf",
    20: "93001147d6ed2382a376c0dd6b5deba36e09be328b4adb8e5399fc06e27121a9",
    60: "fad7087c8e1c8a0f77af858c48bee6c28871d4a8d4ff01701960c8e8a7ae2620",
}


def small(groups: int = 12) -> PipelineWorkload:
    """Groups of two samples with one call each; every second group has a signal."""

    def sample(group: int, right: bool) -> WorkloadSample:
        call = Call(0.01, tuple(range(64, 64 + 3 + group % 2)))
        return WorkloadSample(Script(group, (2 + group % 3, 3), (call,)), right)

    return PipelineWorkload(
        "small", tuple((sample(i, True), sample(i, i % 2 == 0)) for i in range(groups))
    )


@pytest.mark.parametrize("p99", SHA256)
def test_a_workload_is_always_the_same(p99):
    rows = [
        [
            sample.script.lengths,
            [call.seconds for call in sample.script.calls],
            [len(call.observation) for call in sample.script.calls],
            sample.right,
        ]
        for group in draw(p99).groups
        for sample in group
    ]
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest() == SHA256[p99]


@pytest.mark.parametrize("p99", SHA256)
def test_a_workload_has_the_tails_that_it_promises(p99):
    workload = draw(p99)
    scripts = [s.script for group in workload.groups for s in group]
    seconds = np.array([call.seconds for script in scripts for call in script.calls])
    assert np.median(seconds) == pytest.approx(0.5, rel=0.01)
    assert np.quantile(seconds, 0.99) == pytest.approx(p99, rel=0.03)
    tokens = np.array([sum(script.lengths) for script in scripts])
    assert np.quantile(tokens, 0.99) / np.median(tokens) == pytest.approx(8, rel=0.05)
    assert workload.signal == 0.5
    assert all(len(group) == 4 for group in workload.groups)
    assert workload.tokens_per_group == pytest.approx(4 * tokens.mean())
    assert workload.seconds_per_group == pytest.approx(8 * seconds.mean())


def test_the_floor_is_work_by_what_the_machine_can_do():
    workload = PipelineWorkload(
        "floor",
        (
            (
                WorkloadSample(Script(0, (60, 40), (Call(3.0, (64,)),)), True),
                WorkloadSample(Script(0, (100,), ()), False),
            ),
            (
                WorkloadSample(Script(1, (50, 50), (Call(1.0, (64,)),)), True),
                WorkloadSample(Script(1, (100,), ()), True),
            ),
        ),
    )
    # Of two groups one has a signal: a step of 3 samples 6, with 200 tokens and 2 s of tools each.
    least = pipeline.floor(workload, 3, 4, rate=300.0, update_s=2.5)
    assert least["decode_s"] == pytest.approx(4.0)
    assert least["tools_s"] == pytest.approx(3.0)
    assert least["step_s"] == pytest.approx(7.0)
    assert least["apart_s"] == pytest.approx(7.0)
    assert least["serial_s"] == pytest.approx(9.5)
    slow = pipeline.floor(workload, 3, 4, rate=300.0, update_s=8.0)
    assert (slow["step_s"], slow["apart_s"]) == pytest.approx((12.0, 8.0))


def test_seconds_within_a_window_are_those_of_each_span_in_it():
    spans = [(0.0, 2.0), (1.5, float("inf")), (5.0, 6.0), (2.5, 2.75)]
    assert pipeline.within(spans, 1.0, 3.0) == pytest.approx(1.0 + 1.5 + 0.25)


@pytest.mark.slow
def test_a_run_samples_waits_and_earns_what_the_workload_says(tmp_path):
    workload = small()
    result = pipeline.measure(workload, tmp_path, steps=4, groups=2, slots=4, edge=1)
    assert result["steps"] == 4 and len(result["step_s"]) == 2
    assert 0 < result["waiting"] < result["occupied"] <= 1
    assert all(value > 0 for value in result["floor"].values()) and result["of_floor"] > 0
    trajectories = read_trajectories(tmp_path / "run")
    assert len(trajectories) >= 4 * 2 * 2
    assert sum(result["staleness"].values()) == len(trajectories)
    for trajectory in trajectories:
        sample = workload.groups[int(trajectory.task_id)][trajectory.sample_id]
        assert trajectory.reward.value == float(sample.right)
        assert trajectory.num_policy_tokens == sum(sample.script.lengths)
        (call,) = trajectory.tool_calls
        assert call.end - call.start == pytest.approx(0.01, abs=0.5)
        observed = trajectory.tokens[trajectory.author == 2].tolist()
        assert observed == list(sample.script.calls[0].observation)


def test_settings_of_the_command_line_are_numbers_or_text():
    given = ["max_staleness=2", "admission=task_order", "x=0.5"]
    assert pipeline.given_changes(given) == {
        "max_staleness": 2,
        "admission": "task_order",
        "x": 0.5,
    }
    with pytest.raises(UserError, match=r"^--set=max_staleness: "):
        pipeline.given_changes(["max_staleness"])


def test_a_setting_that_is_none_is_refused(tmp_path):
    with pytest.raises(UserError, match="no setting 'stalness'"):
        pipeline.rl_config(small(), tmp_path, steps=4, groups=2, slots=4, changes={"stalness": 1})
