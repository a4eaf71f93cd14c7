"""Selecting the groups that a step trains on."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from coa_jax.data.trajectory import Author, Reward, StopReason
from coa_jax.errors import UserError
from coa_jax.tasks import Graders, GradersConfig, Task
from coa_jax.train.admission import Composition
from coa_jax.train.algorithms import Algorithm
from coa_jax.train.group_stream import LocalShare
from coa_jax.train.groups import assemble, completed, graded, is_learned
from coa_jax.train.metrics import masked_by, rollout_metrics
from coa_jax.train.shaping import StopRewards, shape_reward
from tests.tasks.finished import finished
from tests.train.bare import bare
from tests.train.tiny_runs import rl_config


def group(name, values, lengths):
    """A group whose rewards a penalty for length has shaped, of 100 tokens from 60 on."""
    return [
        bare(
            np.zeros(length),
            np.full(length, Author.POLICY),
            task_id=name,
            sample_id=index,
            stop_reason=StopReason.ANSWER,
            reward=shape_reward(
                Reward(value), length, format_reward=False, budget=100, buffer=40, penalty=1.0
            ),
            metadata={"policy_versions": [[0, 0]]},
        )
        for index, (value, length) in enumerate(zip(values, lengths, strict=True))
    ]


WRONG = group("wrong", [0.0, 0.0], [70, 90])
RIGHT = group("right", [1.0, 1.0], [50, 73])
MIXED = group("mixed", [0.0, 1.0], [61, 99])


def step_of(groups, used):
    composition = Composition(1, used, tuple(range(len(groups))), (), 0, 0, {})
    return assemble(LocalShare(composition, dict(enumerate(groups)), [], {}), wait_seconds=1.0)


@pytest.mark.parametrize(("name", "learned"), [("dapo", [MIXED]), ("grpo", [WRONG, RIGHT, MIXED])])
def test_lengths_alone_are_no_signal(tmp_path, name, learned):
    config = rl_config(tmp_path, tmp_path, algorithm=Algorithm(name), groups=2)
    groups = [WRONG, RIGHT, MIXED]
    assert [members for members in groups if is_learned(config, members)] == learned
    sampled = step_of(groups, (2,))
    assert sampled.used == [MIXED] and sampled.everything == groups
    assert rollout_metrics(sampled)["group/frac_zero_std"] == pytest.approx(2 / 3)


def test_a_penalty_for_length_makes_no_group_pass_or_fail():
    long = group("long", [1.0, 1.0], [100, 100])  # right, and the penalty takes all of it
    sampled = step_of([WRONG, RIGHT, MIXED, long], (0, 1, 2, 3))
    figures = rollout_metrics(sampled)
    assert figures["group/frac_all_pass"] == 2 / 4
    assert figures["group/frac_all_fail"] == 1 / 4
    assert figures["group/frac_zero_std"] == 3 / 4


def test_a_component_of_the_reward_replaces_no_metric_of_the_whole():
    named = Reward(0.5, {"mean": 9.0, "brief": 1.0})
    figures = rollout_metrics(
        step_of([[dataclasses.replace(t, reward=named) for t in MIXED]], (0,))
    )
    assert (figures["reward/mean"], figures["reward/brief"]) == (0.5, 1.0)


# --- what stopped a trajectory --------------------------------------------------------------

TASK = Task("t", "What?", "web", ("x",), "")
BY_LOAD = (StopReason.DEADLINE, StopReason.TOOL_TIME)
CUT = (*BY_LOAD, *map(StopReason, ("length", "turn_length", "turns", "eos", "violation")))


def learned(tmp_path, group, graders=None, **changes):
    """A group with the rewards that a run learns from."""
    config = rl_config(tmp_path, tmp_path, **changes)
    judge = Graders(graders or GradersConfig())

    async def rewarded():
        alone = [await graded(config, judge, TASK, trajectory) for trajectory in group]
        return await completed(config, judge, TASK, alone)

    return asyncio.run(rewarded())


def test_only_what_the_load_of_the_machine_decides_is_masked(tmp_path):
    group = [finished(None, stop=stop) for stop in CUT] + [finished("x"), finished("y")]
    found = learned(tmp_path, group)
    for trajectory in found[:2]:
        assert trajectory.reward.value is None and trajectory.reward.parts["exact_match"] == 0
    judge = Graders(GradersConfig())
    for trajectory in found[2:]:
        assert trajectory.reward == judge(TASK, trajectory)
    assert [t.reward.value for t in found[2:]] == [0.0] * 5 + [1.0, 0.0]


@pytest.mark.parametrize("stop", CUT)
def test_a_setting_says_what_each_way_to_stop_means(tmp_path, stop):
    group = [finished(None, stop=stop), finished("x")]
    values = {}
    for verdict in ("score", "mask", "-0.5"):
        stops = StopRewards(**{str(stop): verdict})
        cut, right = learned(tmp_path, group, stops=stops)
        assert right.reward.value == 1.0
        values[verdict] = cut.reward.value
        assert cut.reward.parts.get("stop") == (-0.5 if verdict == "-0.5" else None)
    assert values == {"score": 0.0, "mask": None, "-0.5": -0.5}


def test_what_is_added_for_a_stop_counts_where_the_protocol_was_not_obeyed(tmp_path):
    group = [finished("x", "nothing"), finished(None, stop=StopReason.LENGTH)]
    group[0] = dataclasses.replace(group[0], protocol="web", text="no tags")
    stops = StopRewards(length="-0.25")
    found = learned(tmp_path, group, stops=stops, format_reward=True)
    assert [t.reward.value for t in found] == [0.0, -0.25]


def test_a_reward_of_the_group_does_not_see_what_is_masked(tmp_path, monkeypatch):
    code = "def counted(trajectories): return [float(len(trajectories))] * len(trajectories)"
    (tmp_path / "my_counted.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    graders = GradersConfig(rewards={"grader": {}, "count": {"path": "my_counted:counted"}})
    cut, right = learned(
        tmp_path, [finished(None, stop=StopReason.DEADLINE), finished("x")], graders
    )
    assert cut.reward.value is None
    assert right.reward.parts["count"] == 1.0 and right.reward.value == 2.0


@pytest.mark.parametrize("verdict", ["none", "1e3x", "nan", "inf", ""])
def test_another_word_for_what_a_stop_means_is_refused(verdict):
    with pytest.raises(UserError, match=r'give score, mask, or what is added, such as "-0\.5"'):
        StopRewards(length=verdict)


def test_parts_and_causes_are_figures_of_a_step():
    def one(stop=StopReason.ANSWER, value=1.0, outcome=None, reason="", **parts):
        trajectory = finished("x", stop=stop, outcome=outcome)
        metadata = {"policy_versions": [[0, 0]]}
        reward = Reward(value, parts, reason)
        return dataclasses.replace(trajectory, reward=reward, metadata=metadata)

    group = [
        one(rouge=0.5, brief=1.0),
        one(rouge=1.0, brief=0.0, stop=StopReason.LENGTH, overlong=-0.5, earned=1.0),
        one(value=None, rouge=9.0, stop=StopReason.DEADLINE),
        one(value=None, rouge=9.0, outcome="fault"),
        one(value=None, stop=StopReason.FAULT, outcome="fault"),
        one(value=None, reason="no verdict of judge", stop=StopReason.DEADLINE),
        one(value=None, stop=StopReason.TURNS),
        one(rouge=0.0, brief=0.5),
    ]
    causes = ["", "", "deadline", "tool_fault", "fault", "ungraded", "turns", ""]
    assert [masked_by(trajectory) for trajectory in group] == causes
    figures = rollout_metrics(step_of([group], (0,)))
    parts = {name: figures[f"reward/{name}"] for name in ("rouge", "brief", "overlong")}
    assert parts == pytest.approx({"rouge": 0.5, "brief": 0.5, "overlong": -0.5 / 3})
    assert "reward/earned" not in figures
    shares = {k: v for k, v in figures.items() if k.startswith("masked/")}
    assert shares == {
        "masked/deadline": 1 / 8, "masked/fault": 1 / 8, "masked/tool_fault": 1 / 8,
        "masked/tool_time": 0.0, "masked/turns": 1 / 8, "masked/ungraded": 1 / 8,
    }  # fmt: skip
    assert figures["reward/masked_frac"] == 5 / 8


def test_a_reward_may_not_have_the_name_of_another_metric():
    with pytest.raises(UserError, match=r"rewards.mean is the name of another metric; choose"):
        GradersConfig(rewards={"mean": {"path": "my_rewards:mean"}})


def test_dropped_groups_count_even_if_none_of_their_samples_had_ended():
    composition = Composition(1, (0,), (0,), (7, 9), 0, 0, {})
    step = assemble(LocalShare(composition, {0: MIXED}, [], {}), wait_seconds=1.0)
    assert rollout_metrics(step)["drop/groups"] == 2
