"""The settings of a run of RL say how its answers are graded."""

from __future__ import annotations

import asyncio
import json

import pytest

from coa_jax.data.trajectory import read_trajectories
from coa_jax.errors import UserError
from coa_jax.model.api import save_model
from coa_jax.run.command import load_config
from coa_jax.run.settings import build_config
from coa_jax.tasks import Graders, GradersConfig, Task
from coa_jax.tasks.judge import JudgeConfig
from coa_jax.tools.net.chat import ChatConfig
from coa_jax.train.groups import graded
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.train.rl_config import RLConfig
from tests import tiny_policy
from tests.tasks.finished import finished
from tests.tools import fault_server
from tests.train.tiny_runs import rl_config, rows, run_rl

TASK = Task("t", "Which?", "mhqa", ("Oslo", "Kristiania"), "tests")


def built(name: str, **graders: object) -> RLConfig:
    """The settings of a config file, with others given on the command line."""
    config = load_config(f"configs/rl/{name}")
    config.graders.update(graders)
    values = config.to_dict()
    del values["tools"]
    return build_config(RLConfig, values)


def test_the_agents_of_the_paper_are_graded_as_it_says():
    assert built("mhqa.py").graders == built("code.py").graders == GradersConfig()
    web = built("web.py").graders
    assert web.judge_all and not web.judge and "Qwen2.5-72B" in web.judge.chat.model
    assert not built("web.py:debug").graders.judge_all
    with pytest.raises(UserError, match=r"config\.graders\.answer is 'em'; give one of"):
        built("mhqa.py", answer="em")


def test_a_run_grades_as_its_settings_say():
    config = built("mhqa.py", answer="f1")
    written = finished("Oslo city", "mhqa")
    trajectory = asyncio.run(graded(config, Graders(config.graders), TASK, written))
    assert trajectory.reward.parts["f1"] == pytest.approx(2 / 3)
    assert trajectory.tokens is written.tokens


@pytest.mark.slow
def test_a_run_learns_from_the_verdicts_of_its_judge_and_masks_what_got_none(tmp_path):
    pytest.importorskip("openai", reason="the client of a judge is an extra")
    save_model(tiny_policy.policy(), tmp_path / "model")
    tasks = [{"question": task.question, "answer": "no such"} for task in tiny_policy.TASKS]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))

    def judge(handler):
        shown = json.loads(handler.body)["messages"][1]["content"]
        if 'given answer: "84"' in shown:
            handler.owner.pages["/500"](handler)
            return
        right = 'given answer: "Ume"' in shown or 'given answer: "Ivo"' in shown
        verdict = {"rationale": "r", "judgement": "correct" if right else "incorrect"}
        handler.json({"choices": [{"message": {"content": json.dumps(verdict)}}]})

    with fault_server.running() as server:
        server.pages["/v1/chat/completions"] = judge
        chat = ChatConfig(server.url("/v1"), "judge", attempts=1)
        graders = GradersConfig(judge_all=True, judge=JudgeConfig(chat))
        once = OptimizerConfig(learning_rate=1e-3, total_steps=1)
        paths = tmp_path / "model", tmp_path / "tasks.jsonl"
        run_rl(tmp_path / "run", rl_config(*paths, groups=3, optimizer=once, graders=graders))
    kept = read_trajectories(tmp_path / "run" / "traces.jsonl")
    expected = {"Ume": 1.0, "Ivo": 1.0, "84": None}
    seen = {t.answer: t.reward.value for t in kept if t.answer in expected}
    assert seen == expected
    for trajectory in kept:
        assert trajectory.reward.parts["exact_match"] == 0.0
        assert trajectory.reward.value == expected.get(trajectory.answer, 0.0)
    (row,) = rows(tmp_path / "run", "rl")
    masked = sum(trajectory.reward.value is None for trajectory in kept)
    assert row["reward/masked_frac"] == pytest.approx(masked / len(kept))
    assert masked > 0


@pytest.mark.slow
def test_a_run_goes_on_where_a_grader_fails_and_says_why(tmp_path, caplog):
    save_model(tiny_policy.policy(), tmp_path / "model")
    tasks = [{"question": task.question, "answer": "no such"} for task in tiny_policy.TASKS]
    tasks[0]["answer"] = "Ume"
    # The tests of this one are said to be kept apart, and are not there.
    tasks[1]["metadata"] = {"grader": "code", "question_id": "gone"}
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    once = OptimizerConfig(learning_rate=1e-3, total_steps=2)
    paths = tmp_path / "model", tmp_path / "tasks.jsonl"
    run_rl(tmp_path / "run", rl_config(*paths, groups=3, optimizer=once))
    first, second = rows(tmp_path / "run", "rl")
    kept = read_trajectories(tmp_path / "run" / "traces.jsonl")
    masked = [t for t in kept if t.reward.reason]
    assert first["reward/ungraded"] > 0 and second["step"] == 2
    assert first["reward/ungraded"] + second["reward/ungraded"] == len(masked)
    assert all(t.reward.value is None and "tests cannot be read" in t.reward.reason for t in masked)
    assert any(t.reward.value == 1.0 for t in kept)
    assert sum("cannot be graded" in record.message for record in caplog.records) == 1
