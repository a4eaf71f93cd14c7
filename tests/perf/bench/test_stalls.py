"""The cost of a slow tool for other rollouts is measured, and an existing cost is found."""

from __future__ import annotations

import time

import pytest

from coa_jax.errors import UserError
from coa_jax.perf.bench import stalls
from coa_jax.perf.bench.forced_episodes import Sleep
from coa_jax.perf.bench.shapes import engine_shapes
from tests.perf.bench.small_workload import rollout, subject, workload


def shapes(work, slots=4):
    return engine_shapes(work, slots=slots, chunk=4, dtype="float32", extend_buckets=(32,))


@pytest.fixture
def work(tmp_path):
    slow = rollout(0, (3, 3, 3), 0.01)
    slow["turns"][0]["tool_latency_s"] = 3.0
    return workload(tmp_path, rollout(0, (3, 3, 3), 0.02), slow, *[rollout(0, (9, 9), 0.01)] * 2)


def test_only_the_longest_call_is_made_quick(work):
    quick, slow = stalls.shorten_slowest_call(work)
    assert slow == 1
    assert [[call.seconds for call in script.calls] for script in quick.scripts] == [
        [0.02, 0.02],
        [0.01, 0.01],
        [0.01],
        [0.01],
    ]
    assert [script.lengths for script in quick.scripts] == [s.lengths for s in work.scripts]


@pytest.mark.slow
def test_others_do_not_wait_for_the_slow_tool(work):
    result = stalls.measure(subject(), work, shapes(work), repeats=1)
    assert result["slow_tool_s"] == 3.0
    assert result["compiles_after_warmup"] == 0
    assert result["wall_s"]["min"] > 3.0 > result["wall_s_quick"]["max"]
    # 9 + 18 + 18 tokens, none of which had to wait for three seconds.
    assert result["others_tokens_per_s"]["min"] > 45 / 2.5
    assert result["lost"] == pytest.approx(
        1 - result["others_tokens_per_s"]["min"] / result["others_tokens_per_s_quick"]["min"],
        abs=1e-3,
    )


@pytest.mark.slow
def test_a_loop_that_waits_is_found(work, monkeypatch):
    async def blocking(self, arguments, context):
        time.sleep(float(arguments))
        return await call(self, "0", context)

    call = Sleep.__call__
    monkeypatch.setattr(Sleep, "__call__", blocking)
    result = stalls.measure(subject(), work, shapes(work), repeats=1)
    assert result["lost"] > 0.5
    assert result["others_tokens_per_s"]["max"] < 45 / 3


def test_a_workload_without_a_slow_tool_or_with_too_few_slots_is_refused(tmp_path, work):
    even = workload(tmp_path, rollout(), rollout())
    with pytest.raises(UserError, match=r"^workload small: .*--slow_tool=20"):
        stalls.shorten_slowest_call(even)
    with pytest.raises(UserError, match="--slots=3: give one slot for each of the 4 rollouts"):
        stalls.measure(subject(), work, shapes(work, slots=3), repeats=1)
