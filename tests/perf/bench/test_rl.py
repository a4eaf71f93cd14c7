"""The benchmark of a whole RL step measures the requested work."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from coa_jax.data.trajectory import Author
from coa_jax.engine.engine import Engine
from coa_jax.errors import UserError
from coa_jax.perf.bench import rl
from coa_jax.perf.bench.rollout import run_workload
from coa_jax.perf.bench.shapes import engine_shapes
from tests.perf.bench.small_workload import rollout, subject, workload


def own():
    """A subject whose parameters the step may use up."""
    return dataclasses.replace(subject(), params=jax.tree.map(jax.numpy.copy, subject().params))


@pytest.mark.slow
def test_a_step_is_measured_in_parts_and_without_its_compilation(tmp_path):
    work = workload(tmp_path, *(rollout(prompt) for prompt in (0, 1, 0, 1)))
    shapes = engine_shapes(work, slots=4, chunk=4, dtype="float32")
    result = rl.measure(own(), work, rl.rl_config(work, shapes, steps=2))
    assert result["compiles_after_warmup"] == 0
    assert (result["group_size"], result["rollouts"], result["generated_tokens"]) == (2, 4, 32)
    parts = sum(result[name]["min"] for name in ("publish_s", "rollout_s", "update_s"))
    assert parts <= result["step_s"]["min"] * 1.001  # each is told to five digits
    assert result["decode_s"]["max"] < result["rollout_s"]["max"]
    assert result["tokens_per_s"]["max"] == pytest.approx(32 / result["step_s"]["min"], rel=1e-3)
    assert 0 < result["logp_gap_max"]["max"] < 1e-4


def test_groups_are_those_of_the_prompts_and_rewards_count_even_ids(tmp_path):
    work = workload(tmp_path, *(rollout(prompt) for prompt in (0, 0, 1, 1)))
    shapes = engine_shapes(work, slots=4, chunk=4, dtype="float32")
    engine = Engine(subject().params, subject().config, shapes)
    groups = rl.graded(run_workload([engine], work), 2)
    assert [{t.task_id for t in group} for group in groups] == [{"prompt-0"}, {"prompt-1"}]
    for trajectory in (t for group in groups for t in group):
        ids = [
            int(token)
            for token, author in zip(trajectory.tokens, trajectory.author, strict=True)
            if author == Author.POLICY
        ]
        assert trajectory.reward.value == pytest.approx(np.mean([i % 2 == 0 for i in ids]))


@pytest.mark.slow
def test_rows_hold_a_group_with_its_prompt_once_unless_prompts_are_not_shared(tmp_path):
    # 12 tokens of the prompt, 5 sampled, 6 observed and 3 sampled ones.
    work = workload(tmp_path, *(rollout(prompt) for prompt in (0, 1, 0, 1)))
    assert {work.length(script) for script in work.scripts} == {26}
    # A group has 26 tokens and 14 more behind a copy of the prompt's last one; 52 unfolded.
    assert rl.row_lengths(work, 0, True) == (64, 64)
    assert rl.row_lengths(work, 130, True) == (130, 3 * 64)
    assert rl.row_lengths(work, 0, False) == (512, 0)
    assert rl.row_lengths(work, 30, False) == (30, 0)
    shapes = engine_shapes(work, slots=4, chunk=4, dtype="float32")
    shared = rl.measure(own(), work, rl.rl_config(work, shapes, steps=1))
    config = rl.rl_config(work, shapes, steps=1, share_prompts=False)
    apart = rl.measure(own(), work, config)
    assert (shared["row_length"], shared["attention_length"]) == (64, 64)
    assert (apart["row_length"], apart["attention_length"]) == (512, 0)
    assert 0 < shared["logp_gap_max"]["max"] < 1e-4


@pytest.mark.parametrize("prompts", [(0, 0, 1), (0, 1)])
def test_groups_of_one_or_of_several_sizes_are_refused(tmp_path, prompts):
    work = workload(tmp_path, *(rollout(prompt) for prompt in prompts))
    shapes = engine_shapes(work, slots=2, chunk=4, dtype="float32")
    with pytest.raises(UserError, match=r"^workload small: .* \[[12, ]+\] rollouts"):
        rl.rl_config(work, shapes)
