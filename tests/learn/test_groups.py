"""Which groups a step learns from."""

from __future__ import annotations

import numpy as np
import pytest

from coa_jax.learn.admission import Composition
from coa_jax.learn.algorithms import Algorithm
from coa_jax.learn.groups import assemble, describe, is_learned
from coa_jax.learn.metrics import rollout_metrics
from coa_jax.learn.shaping import shape_reward
from coa_jax.trajectory import Author, Reward, StopReason, Trajectory
from tests.learn.tiny_runs import rl_config


def group(name, values, lengths):
    """A group whose rewards a penalty for length has shaped, of 100 tokens from 60 on."""
    return [
        Trajectory(
            task_id=name,
            sample_id=index,
            question="",
            protocol="generalist",
            tokens=np.zeros(length, np.int32),
            author=np.full(length, Author.POLICY),
            logp=np.zeros(length, np.float32),
            text="",
            segments=(),
            tool_calls=(),
            stop_reason=StopReason.ANSWER,
            reward=shape_reward(
                Reward(value), length, format_reward=False, budget=100, buffer=40, penalty=1.0
            ),
            gold=(),
            metadata={"policy_versions": [[0, 0]]},
        )
        for index, (value, length) in enumerate(zip(values, lengths, strict=True))
    ]


WRONG = group("wrong", [0.0, 0.0], [70, 90])
RIGHT = group("right", [1.0, 1.0], [50, 73])
MIXED = group("mixed", [0.0, 1.0], [61, 99])


def step_of(groups, used):
    composition = Composition(1, used, tuple(range(len(groups))), (), 0, 0, {})
    return assemble(composition, dict(enumerate(groups)), [], wait_seconds=1.0)


@pytest.mark.parametrize(("name", "learned"), [("dapo", [MIXED]), ("grpo", [WRONG, RIGHT, MIXED])])
def test_lengths_alone_are_no_signal(tmp_path, name, learned):
    config = rl_config(tmp_path, tmp_path, algorithm=Algorithm(name), groups=2)
    groups = [WRONG, RIGHT, MIXED]
    assert [members for members in groups if is_learned(config, members)] == learned
    sampled = step_of(groups, (2,))
    assert sampled.used == [MIXED] and sampled.everything == groups
    assert describe(sampled)["group/frac_zero_std"] == pytest.approx(2 / 3)


def test_a_penalty_for_length_makes_no_group_pass_or_fail():
    long = group("long", [1.0, 1.0], [100, 100])  # right, and the penalty takes all of it
    sampled = step_of([WRONG, RIGHT, MIXED, long], (0, 1, 2, 3))
    figures = rollout_metrics(sampled)
    assert figures["group/frac_all_pass"] == 2 / 4
    assert figures["group/frac_all_fail"] == 1 / 4
    assert describe(sampled)["group/frac_zero_std"] == 3 / 4
