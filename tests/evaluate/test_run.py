"""An evaluation with a real policy and real tools."""

from __future__ import annotations

import json

from coa_jax.engine.config import EngineConfig
from coa_jax.evaluate.run import EvaluateConfig, blocks, evaluate, table
from coa_jax.rollout.request import RolloutConfig
from tests import tiny_policy
from tests.tiny_policy import TASKS

CONFIG = EvaluateConfig(
    tasks="tests",
    split="test",
    num_tasks=3,
    samples=2,
    seed=0,
    temperature=0.0,
    top_p=1.0,
    top_k=0,
    engine=EngineConfig(4, 192, 8, (32, 64)),
    rollout=RolloutConfig(192, 3, 48),
)


def test_every_task_is_sampled_graded_and_reported():
    tools = list(tiny_policy.tools().values())
    groups = evaluate(tiny_policy.policy(), TASKS, CONFIG, tools, "sft")
    assert [[t.task_id for t in group] for group in groups] == [[t.id] * 2 for t in TASKS]
    assert [[t.sample_id for t in group] for group in groups] == [[0, 1]] * 3
    assert all(t.reward.value == 1.0 for group in groups for t in group)
    result = json.loads(json.dumps(blocks(groups, "sft")))
    assert result["sft"]["pass_at_1"] == 1.0
    assert result["sft"]["n"] == 3
    assert result["sft"]["tool_calls_per_task"] == 1.0
    assert result["sft"]["format_valid"] == 1.0
    assert result["sft_details"]["pass_at_k"] == {"1": 1.0, "2": 1.0}
    lines = table(result, "sft").splitlines()
    assert lines[0] == "sft: pass@1 1.000 (95 % 0.439-1.000, n 3)"
    assert "  code: 2 calls (ok 2)" in lines
    assert "  wiki_search: 4 calls (ok 4)" in lines
    assert "could not be graded" not in lines[-1]
