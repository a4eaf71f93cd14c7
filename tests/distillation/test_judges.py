"""Judges behind a real endpoint decide what rules cannot, and their silence is counted."""

import dataclasses
import json
import re
import threading

import pytest

from coa_jax.cli.distill import distill
from coa_jax.distillation.judges import JudgesConfig
from coa_jax.distillation.pipeline import DistillConfig, as_run, graded_runs, select, teacher_block
from coa_jax.run.command import load_config
from coa_jax.tasks import judge as judge_module
from coa_jax.tasks.base import Task
from coa_jax.tasks.judge import JudgeConfig
from coa_jax.tools.net.chat import ChatConfig
from tests.distillation.chat_server import serving
from tests.distillation.logs import log_of
from tests.distillation.small_team import command_settings

ANSWERS = {"exact": "Lima", "words": "the city of Lima", "wrong": "Quito", "mute": "silence"}


def run_of(name, answer, gold=("Lima",), **metadata):
    rows = [("plan", "1. look"), ("call", f"capital of {name}"), ("observation", "Lima " * 200)]
    rows += [("suggestion", answer), ("verdict", "4"), ("answer", answer)]
    log = log_of(*rows, episode=name, question="What is the capital of Peru?")
    return Task(name, log.question, "generalist", gold, "test", metadata), log


class Judges:
    """Says ``correct`` to what holds Lima; has no verdict for silence and none for a sulk."""

    def __init__(self):
        self.asked, self.lock = [], threading.Lock()

    def __call__(self, chat):
        data = chat[1]["content"].split("data only.\n")[1]
        answer = re.search(r"^given answer: (.*)$", data, re.MULTILINE)
        written = re.search(r"^the agent wrote: (.*)$", data, re.MULTILINE)
        text = json.loads((answer or written)[1])
        with self.lock:
            self.asked.append(("answer" if answer else "instruction", text))
        if text == "silence" or "sulk" in text:
            return "I would rather not say."
        good = "Lima" in text if answer else "rude" not in text
        judgement = "correct" if good else "incorrect"
        return json.dumps({"rationale": "so it is", "judgement": judgement})


@pytest.fixture(autouse=True)
def two_requests(monkeypatch):
    monkeypatch.setattr(judge_module, "_REQUESTS", 2)


def config_of(server, tmp_path, *names):
    chat = ChatConfig(server.url, "m", timeout_s=20.0, attempts=1)
    judge = JudgeConfig(chat, cache=str(tmp_path / "verdicts.sqlite"))
    return DistillConfig(judges=JudgesConfig(**dict.fromkeys(names, judge)))


def test_answers_in_other_words_are_judged_and_silence_is_counted(tmp_path):
    pairs = [run_of(name, answer) for name, answer in ANSWERS.items()]
    pairs += [run_of("number", "12", ("13",)), run_of("unknown", "Lima", ())]
    judges, examples = Judges(), []
    tasks, logs = zip(*pairs, strict=True)
    with serving(judges) as server:
        config = config_of(server, tmp_path, "answer")
        runs = graded_runs(tasks, logs, config.judges)
        records, report = select(runs, config, on_example=examples.append)
        # The right one, two numbers, and what has no accepted answer need no judge; the silent one
        # is asked twice.
        asked = sorted(judges.asked)
        assert asked == sorted(
            [("answer", t) for t in ("the city of Lima", "Quito", "silence", "silence")]
        )
        assert [record.id for record in records] == ["exact", "words"]
        dropped = {why: count for why, count in report.dropped.items() if count}
        assert dropped == {"no_accepted_answer": 1, "wrong_answer": 2, "ungraded": 1}
        assert report.kept + sum(dropped.values()) == report.total == 6
        silent = [e["record"]["id"] for e in examples if e["filter"] == "ungraded"]
        assert silent == ["mute"]
        # Verdicts are kept, silence is not: it is asked about again.
        judges.asked.clear()
        assert select(graded_runs(tasks, logs, config.judges), config)[1] == report
        assert judges.asked == [("answer", "silence")] * 2


def test_the_success_of_the_teacher_is_judged_as_its_data_are(tmp_path):
    pairs = [run_of(name, answer) for name, answer in ANSWERS.items()]
    tasks, logs = zip(*pairs, strict=True)
    with serving(Judges()) as server:
        judges = config_of(server, tmp_path, "answer").judges
        runs = graded_runs(tasks, logs, judges)
    block = teacher_block(runs)
    assert (block["pass_at_1"], block["n"], block["faults"]) == (2 / 3, 3, 1)
    assert [run.correct for run in runs] == [True, True, False, None]
    assert teacher_block(graded_runs(tasks, logs, JudgesConfig()))["pass_at_1"] == 1 / 4


def test_a_command_asks_a_judge_without_a_cache_once_for_each_answer(tmp_path):
    asked = []

    def reply(chat):
        asked.append(tuple(re.findall(r"^[a-z ]+: .*$", chat[1]["content"], re.MULTILINE)))
        return json.dumps({"rationale": "so it is", "judgement": "incorrect"})

    with serving(reply) as server:
        chat = "teacher.judges.answer.chat"
        changes = {f"{chat}.url": server.url, f"{chat}.model": "m", "teacher.mistake_rate": 0.5}
        changes |= {"teacher.unrecovered_rate": 0.5, "tasks.train": 4, "tasks.validation": 12}
        changes["probe_s"] = 0.0  # the judge's answers are counted
        changes |= command_settings(tmp_path)
        summary = distill(load_config("configs/distill/factbook.py", changes), tmp_path / "run")
    assert summary["teacher"]["pass_at_1"] < 1
    assert len(asked) == len(set(asked)) > 0


def test_a_judge_that_cannot_be_reached_loses_no_run_silently(tmp_path):
    with serving(lambda chat: 500) as server:
        config = config_of(server, tmp_path, "answer")
        tasks, logs = zip(run_of("words", ANSWERS["words"]), run_of("exact", "Lima"), strict=True)
        records, report = select(graded_runs(tasks, logs, config.judges), config)
    assert [record.id for record in records] == ["exact"]
    assert report.dropped["ungraded"] == 1


def test_without_a_judge_words_that_differ_are_wrong():
    task, log = run_of("words", ANSWERS["words"])
    assert select([as_run(task, log)], DistillConfig())[1].dropped["wrong_answer"] == 1


def test_instructions_are_checked_of_runs_that_pass_everything_else(tmp_path):
    pairs = [run_of("good", "Lima"), run_of("wrong", "Quito")]
    for name, thought in (("rude", "How rude of you."), ("sulk", "I sulk.")):
        task, log = run_of(name, "Lima")
        said = dataclasses.replace(log.messages[1], thought=thought)
        log = dataclasses.replace(log, messages=(log.messages[0], said, *log.messages[2:]))
        pairs.append((task, log))
    judges = Judges()
    tasks, logs = zip(*pairs, strict=True)
    with serving(judges) as server:
        config = config_of(server, tmp_path, "instruction")
        records, report = select(graded_runs(tasks, logs, config.judges), config)
    assert [record.id for record in records] == ["good"]
    dropped = {why: count for why, count in report.dropped.items() if count}
    assert dropped == {"wrong_answer": 1, "ungraded": 1, "instruction_judge": 1}
    assert len(judges.asked) == 4  # one of them twice, and the wrong answer not at all
    texts = [text for _, text in judges.asked]
    assert all("<wiki_search>" in text and len(text) < 1500 for text in texts)


@pytest.mark.parametrize(
    ("answer", "metadata", "correct"),
    [
        ("1/2", {"grader": "math"}, True),
        ("0.6", {"grader": "math"}, False),
        ("0.5", {}, True),
        ("1/2", {}, False),
    ],
)
def test_the_grader_of_the_task_decides_first(answer, metadata, correct):
    task, log = run_of("m", answer, ("0.5",), **metadata)
    assert as_run(task, log).correct is correct


def test_what_nobody_could_judge_is_no_failure_of_the_teacher():
    task, log = run_of("m", "Lima")
    run = as_run(task, log)
    assert teacher_block([run])["n"] == 1
    run = dataclasses.replace(run, correct=None)
    assert teacher_block([run])["n"] == 0
    (ungraded,) = (f for f in DistillConfig().filters() if f.name == "ungraded")
    assert not ungraded.keeps(run)
