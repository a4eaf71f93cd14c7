"""The agent loop does all work of a workload exactly once, and the report is true."""

from __future__ import annotations

import dataclasses
import re

import jax
import numpy as np
import pytest

from coa_jax.data.trajectory import Author, StopReason
from coa_jax.engine.engine import Engine
from coa_jax.errors import UserError
from coa_jax.perf.bench.measure import compile_count
from coa_jax.perf.bench.models import load_subject
from coa_jax.perf.bench.rollout import logp_gap, measure, measure_once, run_workload
from coa_jax.perf.bench.shapes import engine_shapes
from tests.perf.bench.small_workload import rollout, subject, workload


def engine(work, slots=4, chunk=4, block=8, buckets=(32,), max_length=128):
    shapes = engine_shapes(
        work,
        slots=slots,
        chunk=chunk,
        dtype="float32",
        max_length=max_length,
        extend_buckets=buckets,
        extend_block=block,
    )
    return Engine(subject().params, subject().config, shapes)


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Two groups; one rollout ends without a call, one has three."""
    return workload(
        tmp_path_factory.mktemp("several"),
        rollout(0, (5, 9, 1, 3)),
        rollout(0, (4, 2)),
        rollout(1, (17,)),
        rollout(1, (1, 1)),
        rollout(1, (8, 6)),
    )


@pytest.fixture(scope="module")
def ran(several):
    return run_workload([engine(several)], several)


def runs_of(authors: np.ndarray) -> str:
    """Authors as text, run-length encoded: 12 prompt tokens are "P12"."""
    letters = "".join("PGO"[author] for author in authors)
    return " ".join(f"{m[0][0]}{len(m[0])}" for m in re.finditer(r"(.)\1*", letters))


def test_every_rollout_has_the_lengths_and_the_tokens_of_the_workload(several, ran):
    assert [runs_of(t.author) for t in ran] == [
        "P12 G5 O6 G9 O6 G1 O6 G3",
        "P12 G4 O6 G2",
        "P12 G17",
        "P12 G1 O6 G1",
        "P12 G8 O6 G6",
    ]
    for trajectory, script in zip(ran, several.scripts, strict=True):
        prompt = several.prompts[script.prompt]
        assert tuple(trajectory.tokens[: len(prompt)]) == prompt
        given = [token for call in script.calls for token in call.observation]
        assert trajectory.tokens[trajectory.author == Author.ENVIRONMENT].tolist() == given
        assert trajectory.stop_reason is StopReason.EOS
        assert len(trajectory.tool_calls) == len(script.calls)
        assert all(call.end - call.start > 0.009 for call in trajectory.tool_calls)


def test_the_samples_of_a_group_differ(ran):
    # 512 tokens with nearly even odds: four equal ones would be no chance.
    assert ran[0].tokens[12:16].tolist() != ran[1].tokens[12:16].tolist()


@pytest.mark.parametrize(
    ("slots", "chunk"),
    [
        (1, 4),
        pytest.param(2, 16, marks=pytest.mark.slow),
        pytest.param(8, 1, marks=pytest.mark.slow),
    ],
)
def test_tokens_do_not_depend_on_slots_and_chunks(several, ran, slots, chunk):
    again = run_workload([engine(several, slots, chunk)], several)
    assert [t.tokens.tolist() for t in again] == [t.tokens.tolist() for t in ran]


def test_prompts_and_observations_are_prefilled_once(several):
    # Programs of one token have no padding.
    figures, _ = measure_once([engine(several, slots=5, block=1, buckets=(1,))], several)
    calls = 3 + 1 + 0 + 1 + 1
    # Each observation is fed with the token before it, which is not in the cache yet.
    assert figures["prefill_tokens_computed"] == 2 * 12 + calls * (6 + 1)
    assert several.prefill_tokens == 2 * 12 + calls * 6


def test_padding_of_blocks_and_buckets_counts_as_computed(tmp_path):
    work = workload(tmp_path, rollout(0, (2, 2)), rollout(0, (2,)), prompt_length=40)
    figures, _ = measure_once([engine(work, buckets=(16, 64))], work)
    # The prompt of 40 in programs of 16, and one for the observation of 6 + 1.
    assert figures["prefill_tokens_computed"] == 48 + 16


def test_occupancy_counts_what_is_sampled_and_then_forgotten(tmp_path):
    work = workload(tmp_path, rollout(0, (5, 3)))
    figures, _ = measure_once([engine(work, slots=2, chunk=4)], work)
    # Chunks of 4 steps: 4, then 1 of 4 until the call, then 3 of 4 until the end.
    assert figures["decode_steps"] == 12
    assert figures["decode_occupancy"] == 12 / 24
    assert figures["decode_useful"] == 8 / 24


def test_a_slow_tool_does_not_stop_the_others_and_the_wait_is_idle_time(tmp_path):
    slow, *quick = [rollout(0, (3, 3), 1.5), *[rollout(0, (3, 3), 0.0)] * 3]
    work = workload(tmp_path, slow, *quick)
    fresh = engine(work)
    fresh.warm_up()
    figures, trajectories = measure_once([fresh], work)
    first, *others = (t.metadata["seconds"] for t in trajectories)
    assert max(others) < 1.4 < 1.5 <= first
    assert 0.5 < figures["idle_s"] < figures["wall_s"]
    parts = (figures[name] for name in ("decode_s", "extend_s", "idle_s", "host_s"))
    assert sum(parts) == pytest.approx(figures["wall_s"])
    assert figures["host_s"] >= 0


def test_the_log_probabilities_are_those_of_training(several, ran):
    assert logp_gap(subject(), ran, "float32") < 1e-4
    shifted = jax.tree.map(lambda x: x * 1.5, subject().params)
    assert logp_gap(dataclasses.replace(subject(), params=shifted), ran, "float32") > 1e-2


def test_nothing_is_compiled_after_the_warm_up(several):
    # Shapes that no other test uses, so that there is something to compile.
    shapes = engine_shapes(
        several, slots=3, chunk=5, dtype="float32", extend_block=8, extend_buckets=(24, 8)
    )
    before = compile_count()
    result = measure(subject(), several, shapes, repeats=2)
    assert compile_count() - before >= 4
    assert result["compiles_after_warmup"] == 0
    assert result["max_length"] == 128
    assert result["generated_tokens"] == several.generated_tokens
    assert result["logp_gap_max"] < 1e-4
    assert result["peak_rss_mb"] > 50
    speed, wall = result["tokens_per_s"], result["wall_s"]
    assert speed["min"] <= speed["median"] <= speed["max"]
    assert speed["max"] == pytest.approx(several.generated_tokens / wall["min"], rel=1e-3)


@pytest.mark.slow
def test_a_bucket_beyond_the_slot_needs_no_warm_up_of_its_own(tmp_path):
    work = workload(tmp_path, rollout(0, (2,)), prompt_length=60)
    shapes = engine_shapes(
        work, slots=1, chunk=1, dtype="float32", max_length=64, extend_buckets=(48, 256, 512)
    )
    assert measure(subject(), work, shapes, repeats=1)["compiles_after_warmup"] == 0


def test_a_workload_longer_than_a_slot_is_refused(several):
    with pytest.raises(UserError, match="a rollout of 48 tokens and --max_length is 40"):
        engine(several, max_length=40)


@pytest.mark.parametrize("given", [(None, None), ("dir", "tiny")])
def test_a_model_or_an_architecture_is_needed(given):
    with pytest.raises(UserError, match="either --model=DIR or --random=NAME"):
        load_subject(*given, "float32")
