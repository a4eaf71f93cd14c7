"""Each task is graded by its own graders; failures of the system give no score."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys

import pytest

from coa_jax.data.trajectory import StopReason
from coa_jax.errors import UserError
from coa_jax.run.settings import build_config, complete_config
from coa_jax.sandbox.run import SandboxError
from coa_jax.tasks import Graders, GradersConfig, Task, graders, load_tasks, rewards
from coa_jax.tasks.judge import JudgeConfig
from coa_jax.tasks.maths import MathsUnsureError
from coa_jax.tools.net.chat import ChatConfig
from tests.tasks.finished import finished
from tests.tools import fault_server

SUM = json.dumps({"stdin": ["1 2\n"], "expected_output": ["3\n"]})
TASKS = {
    "exact_match": Task("e", "Which?", "web", ("Oslo", "Christiania"), "s"),
    "judge": Task("j", "Which?", "web", ("Oslo",), "s", {"grader": "judge"}),
    "math": Task("m", "?", "code", (r"\frac12",), "s", {"grader": "math"}),
    "code": Task("c", "?", "code", (SUM,), "s", {"grader": "code", "question_id": "q1"}),
}
ADD = "```py\nprint(sum(map(int, input().split())))\n```"


@pytest.fixture(scope="module")
def server():
    with fault_server.running() as server:

        def judge(handler):
            right = "the capital" in json.loads(handler.body)["messages"][1]["content"]
            verdict = {"rationale": "r", "judgement": "correct" if right else "incorrect"}
            handler.json({"choices": [{"message": {"content": json.dumps(verdict)}}]})

        server.pages["/v1/chat/completions"] = judge
        server.pages["/500/chat/completions"] = server.pages["/500"]
        yield server


def judged(server, path="/v1", **options):
    chat = ChatConfig(server.url(path), "judge", attempts=1)
    return Graders(GradersConfig(judge=JudgeConfig(chat), **options))


@pytest.mark.parametrize(
    ("name", "answer", "value"),
    [
        ("exact_match", "christiania", 1.0),
        ("exact_match", "Bergen", 0.0),
        ("math", r"\boxed{0.5}", 1.0),
        ("math", r"\boxed{0.6}", 0.0),
        ("code", ADD, 1.0),
        ("code", "```py\nprint(4)\n```", 0.0),
        ("code", "three", 0.0),
        ("judge", "Oslo", 1.0),
        ("judge", "the capital", 0.0),
    ],
)
def test_each_task_has_its_grader(name, answer, value):
    task = TASKS[name]
    reward = Graders(GradersConfig())(task, finished(answer, task.protocol))
    assert reward.value == value
    measured = "exact_match" if name == "judge" else name  # without a judge answers are compared
    assert reward.parts[measured] == value
    assert set(reward.parts) == {measured, "exact_match", "format"}


def test_a_judge_judges_where_it_is_asked_for_or_everywhere(server):
    some, every = judged(server), judged(server, judge_all=True)
    answer = finished("the capital")
    assert some(TASKS["judge"], answer).parts["judge"] == 1.0
    assert some(TASKS["exact_match"], answer).value == 0.0
    assert every(TASKS["exact_match"], answer).value == 1.0
    assert every(TASKS["math"], finished(r"\boxed{0.5}", "code")).parts["math"] == 1.0
    assert some(TASKS["judge"], finished(None)).value == 0.0


def test_what_fails_on_our_side_is_no_score(server, monkeypatch):
    deaf = judged(server, "/500")
    reward = deaf(TASKS["judge"], finished("Bergen"))
    assert reward.value is None and "judge" not in reward.parts
    assert deaf.judge.no_verdict.total() == 1

    async def broken(*arguments):
        raise SandboxError("gone")

    def unsure(*arguments):
        raise MathsUnsureError("gone")

    monkeypatch.setattr(rewards, "run_tests", broken)
    monkeypatch.setattr(rewards, "same_expression", unsure)
    plain = Graders(GradersConfig())
    assert plain(TASKS["code"], finished(ADD, "code")).value is None
    assert plain(TASKS["math"], finished("1", "code")).value is None
    for broken_run in (finished("Oslo", stop=StopReason.FAULT), finished("Oslo", outcome="fault")):
        assert plain(TASKS["exact_match"], broken_run).value is None


@pytest.mark.parametrize(
    ("name", "answer", "value"),
    [
        ("f1", "Oslo city", 2 / 3),
        ("mhqa_train", "Oslo|Bergen", 0.0),
        ("mhqa_eval", "Oslo|Bergen", 1.0),
        ("qa_em", "Oslo|Bergen", 0.0),
        ("qa_subem", "in Oslo", 1.0),
    ],
)
def test_rewards_of_the_release_can_be_chosen(name, answer, value):
    reward = Graders(GradersConfig(answer=name))(TASKS["exact_match"], finished(answer))
    assert reward.value == pytest.approx(value) == reward.parts[name]


def test_private_tests_come_before_those_of_the_file(tmp_path):
    harder = {"stdin": ["1 2\n", "-1 -2\n"], "expected_output": ["3\n", "-3\n"]}
    (tmp_path / "q1.json").write_text(json.dumps(harder))
    cheat = finished("```py\nprint(3)\n```", "code")
    assert Graders(GradersConfig())(TASKS["code"], cheat).value == 1.0
    private = Graders(GradersConfig(private_tests=str(tmp_path)))
    assert private(TASKS["code"], cheat).value == 0.0
    assert private(TASKS["code"], finished(ADD, "code")).value == 1.0


async def grade_all(every, pairs):
    return await asyncio.gather(*(every.grade(*pair) for pair in pairs))


def test_many_are_graded_at_a_time_and_inside_of_a_loop():
    every = Graders(GradersConfig())
    pairs = [(TASKS["code"], finished(ADD, "code")), (TASKS["math"], finished("0.5", "code"))] * 3

    async def both():
        return await grade_all(every, pairs), [every(*pair) for pair in pairs]

    many, single = asyncio.run(both())
    assert many == single and {reward.value for reward in many} == {1.0}


def test_a_reward_that_waits_for_nothing_needs_no_event_loop(monkeypatch):
    every, answer = Graders(GradersConfig()), finished("Oslo")
    expected = asyncio.run(every.grade(TASKS["exact_match"], answer))
    monkeypatch.setattr(asyncio, "new_event_loop", None)
    assert every(TASKS["exact_match"], answer) == expected and expected.value == 1.0
    assert every(TASKS["exact_match"], finished("Bergen")).value == 0.0


def test_settings_come_from_a_config_and_mistakes_are_named():
    config = complete_config(
        GradersConfig, {"answer": "f1", "judge": {"chat": {"temperature": 0.5}}}
    )
    assert build_config(GradersConfig, config).judge.chat.temperature == 0.5
    with pytest.raises(UserError, match="mhqa_train"):
        GradersConfig(answer="bleu")
    with pytest.raises(UserError, match=r"judge\.chat\.url is empty, and judge_all is True"):
        Graders(GradersConfig(judge_all=True))


@pytest.mark.parametrize(
    ("task", "config", "reason"),
    [
        (Task("t", "q", "web", ("x",), "s", {"grader": "taste"}), {}, "no reward 'taste'"),
        (Task("t", "q", "code", ("{",), "s", {"grader": "code"}), {}, "tests cannot be read"),
        (Task("t", "q", "code", (), "s", {"grader": "code"}), {}, "tests cannot be read"),
        (TASKS["code"], {"private_tests": "/nowhere"}, "folder of private tests does not exist"),
        (Task("t", "q", "web", ("1",), "s", {"scorer": "reasoning_gym"}), {}, "'generator'"),
        (Task("t", "q", "nowhere", ("x",), "s"), {}, "protocol"),
        (Task("t", "q", "web", (7,), "s"), {}, "TypeError"),  # a fault of ours
    ],
)
def test_a_grader_that_fails_masks_the_sample_with_its_reason(task, config, reason, caplog):
    every = Graders(GradersConfig(**config))
    answered = finished(ADD if task.protocol == "code" else "x", task.protocol)
    pairs = [(task, answered), (TASKS["exact_match"], finished("Oslo")), (task, answered)]
    bad, good, again = asyncio.run(grade_all(every, pairs))
    assert bad == again and bad.value is None and bad.parts == {} and reason in bad.reason
    assert good.value == 1.0 and good.reason == ""
    assert sum("cannot be graded" in record.message for record in caplog.records) == 1


def test_what_grading_needs_is_looked_for_before_a_run(monkeypatch, tmp_path):
    plain, wanting = (Graders(GradersConfig(private_tests=p)) for p in ("", str(tmp_path / "no")))
    plain.check(TASKS.values())
    with pytest.raises(UserError, match=f"^{tmp_path}/no: "):
        wanting.check([TASKS["code"]])
    wanting.check([TASKS["math"], TASKS["exact_match"]])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    plain.check([TASKS["exact_match"]])
    for task, package in (
        (TASKS["math"], "math-verify"),
        (Task("g", "q", "code", ("1",), "s", {"scorer": "reasoning_gym"}), "reasoning-gym"),
    ):
        with pytest.raises(UserError, match=f"needs {package}"):
            plain.check([task])


class Watched(dict):
    """Metadata that remembers what was asked of it."""

    def __init__(self, *given):
        super().__init__(*given)
        self.read = set()

    def get(self, key, default=None):
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key):
        self.read.add(key)
        return super().__getitem__(key)


def test_graders_read_what_they_say_of_a_tasks_metadata(server, tmp_path):
    made = next(t for t in load_tasks("arithmetic", "test", 50) if "scorer" in t.metadata)
    read = set()
    for task in (*TASKS.values(), made):
        metadata = Watched(task.metadata)
        watched = dataclasses.replace(task, metadata=metadata)
        judged(server, judge_all=True, private_tests=str(tmp_path))(watched, finished("Oslo"))
        read |= metadata.read
    assert read == set(graders.GRADED_BY)
