"""Drawn tools: solvable by their descriptions alone, and nothing of the tools of the evaluation."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from coa_jax.demo.drawn_tools import UNKNOWN, kind_of, tools_of, understand, write_call
from coa_jax.distillation.pipeline import DistillConfig, as_run, run_teacher
from coa_jax.distillation.tasks import Tasks
from coa_jax.protocol import Prompt, get_protocol, messages_of
from coa_jax.run.settings import build_config
from coa_jax.tasks import load_tasks
from examples.unseen_tools.tools import UNITS, Calendar, Units


@pytest.fixture
def runs():
    tasks = load_tasks("drawn_tools", "train", 300)
    logs = asyncio.run(run_teacher(tasks, {}, DistillConfig()))
    return [as_run(task, log) for task, log in zip(tasks, logs, strict=True)]


def test_the_teacher_answers_by_one_call_of_the_tool_whose_description_fits(runs):
    assert all(run.correct and run.reward.parts["format"] == 1.0 for run in runs)
    for run in runs:
        described, kind = get_protocol(run.task.protocol).described, run.task.metadata["kind"]
        fitting = [tag for tag, text in described.items() if kind_of(text) == kind]
        assert [tag for tag, _ in run.log.calls] == fitting
        assert (run.task.gold == (UNKNOWN,)) == (fitting == [])
        asked = messages_of(run.record, Prompt("brief")).user
        assert all(f"- <{tag}>: {text}" in asked for tag, text in described.items())
    without = sum(run.log.calls == () for run in runs) / len(runs)
    assert 0.03 < without < 0.15
    assert min(len(get_protocol(run.task.protocol).tools) for run in runs if run.log.calls) == 2


def test_the_teacher_has_the_drawn_tools_in_a_mixture_too(tmp_path):
    known = tmp_path / "known.jsonl"
    rows = [json.dumps({"question": f"{n} + 1?", "answer": n + 1}) for n in range(50)]
    known.write_text("\n".join(rows))
    mixture = {"new": {"tasks": "drawn_tools"}, "known": {"tasks": str(known)}}
    sources = build_config(Tasks, {"tasks": "", "mixture": mixture, "train": 40, "validation": 2})
    tasks = [task for task in sources.load()["train"] if task.source == "new"]
    logs = asyncio.run(run_teacher(tasks, {}, DistillConfig()))
    assert len(tasks) == 20
    assert all(as_run(task, log).correct for task, log in zip(tasks, logs, strict=True))


def test_a_kind_of_tool_has_many_names_and_forms_of_calls():
    tasks, seen = load_tasks("drawn_tools", "train", 600), {}
    for task in tasks:
        for tag, description in get_protocol(task.protocol).described.items():
            seen.setdefault(kind_of(description), set()).add((tag, description))
    assert all(len(drawn) > 10 for drawn in seen.values())
    calls = {write_call(text, ("250", "ducat", "thaler")) for _, text in seen["exchange"]}
    assert {"250 ducat thaler", "ducat thaler 250"} < calls and len(calls) > 8


def test_a_tool_refuses_calls_of_another_form():
    refused = 0
    for task in load_tasks("drawn_tools", "validation", 40):
        for tool in tools_of(task.protocol).values():
            for call in ("", "what is it?", "a; b; c; d; e"):
                found = asyncio.run(tool(call, None))
                refused += found.outcome == "bad_call"
    assert refused > 80


def test_training_has_no_kind_of_tool_of_the_other_splits():
    kinds = {
        split: {
            kind_of(description)
            for task in load_tasks("drawn_tools", split, 200)
            for description in get_protocol(task.protocol).described.values()
        }
        for split in ("train", "validation", "test")
    }
    assert kinds["train"] and kinds["validation"] == kinds["test"]
    assert not kinds["train"] & kinds["test"]


@pytest.mark.slow
def test_no_question_of_another_source_is_taken_for_one_about_a_drawn_tool():
    for source in ("factbook", "factbook_people", "arithmetic"):
        assert not any(understand(task.question) for task in load_tasks(source, "train", 200))


def test_no_training_text_names_or_describes_the_unseen_tools_of_the_evaluation(runs):
    texts = [messages_of(run.record, Prompt("brief")).user + run.record.text for run in runs]
    drawn = load_tasks("drawn_tools", "train", 600)
    texts += [text for t in drawn for text in get_protocol(t.protocol).described.values()]
    words = set(re.findall(r"\b[a-z]+\b", " ".join(texts).lower()))
    forbidden = {"units", "unit", "calendar", "weekday", "date", "measure", "converts", "monday"}
    assert not words & (forbidden | set(UNITS) - {"m"})
    for tool in (Units, Calendar):
        sentences = re.split(r"(?<=\.) (?=[A-Z])", tool.__doc__)
        assert not any(sentence in text for sentence in sentences for text in texts)
