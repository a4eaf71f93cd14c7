"""Rows that cannot be graded are refused when they are loaded, with file and row."""

from __future__ import annotations

import asyncio
import json

import pytest

from coa_jax.errors import UserError
from coa_jax.files import jsonl
from coa_jax.tasks import Graders, GradersConfig, Task, load_tasks
from coa_jax.tasks.checks import warn_of_tools
from tests.rollout.small_loop import Says
from tests.tasks.finished import finished

TESTS = {"stdin": ["1 2\n"], "expected_output": ["3\n"]}
GENERATED = {"scorer": "reasoning_gym", "generator": "gcd", "generator_metadata": {}}
GOOD = {"question": "a?", "answer": "b"}


def load(tmp_path, *rows, options=""):
    jsonl.write_lines(tmp_path / "q.jsonl", rows)
    return load_tasks(f"{tmp_path}/q.jsonl{options}", "test")


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"metadata": {"grader": "taste"}}, "the grader 'taste' is unknown; known are exact_match"),
        ({"metadata": {"grader": ["math"]}}, r"the grader \['math'\] is unknown"),
        ({"metadata": {"grader": "math"}, "answer": r"\boxed{}"}, "no expression"),
        ({"metadata": {"grader": "math"}, "answer": "1" * 3000}, "no expression"),
        ({"metadata": {"grader": "code"}}, "the tests cannot be read: not JSON"),
        ({"metadata": {"grader": "code"}, "answer": "[]"}, "expected an object, found list"),
        ({"protocol": "code", "answer": {"inputs": []}}, "tests are in no known form"),
        ({"protocol": "code", "answer": "Oslo"}, "neither tests nor a number or formula; give"),
        ({"protocol": "code", "answer": ["3", "three"]}, "neither tests nor a number or formula"),
        ({"protocol": "nowhere"}, "protocol"),
        ({"metadata": {**GENERATED, "scorer": "x"}}, "the scorer 'x' is unkn"),
        ({"metadata": {"scorer": "reasoning_gym"}}, "metadata.generator must be a string"),
        ({"question": "\ud800?"}, "surrogates"),
        ({"id": {"a": 1}}, "the field 'id' must be a string or a whole number"),
        ({"answer": None}, "there is no answer"),
    ],
)
def test_a_row_that_cannot_be_graded_is_named(tmp_path, row, why):
    with pytest.raises(UserError, match=rf"q\.jsonl:2: .*{why}") as caught:
        load(tmp_path, {**GOOD, "id": 1}, {**GOOD, **row})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("gold", "grader", "right", "wrong"),
    [
        (TESTS, "code", "```py\nprint(sum(map(int, input().split())))\n```", "```py\n3\n```"),
        (json.dumps(TESTS), "code", "```py\nprint(3)\n```", "```py\nprint(4)\n```"),
        (42, "math", r"\boxed{42.0}", r"\boxed{41}"),
        ("1,234.5", "math", "1234.5", "1234"),
        (r"\boxed{\frac{1}{2}}", "math", "0.5", "0.6"),
        ("(3, 4)", "math", r"\boxed{(3,4)}", "(4, 3)"),
        (["x^2+1", "1+x^2"], "math", "1 + x^2", "x^2"),
    ],
)
def test_answers_of_the_code_protocol_are_graded_as_what_they_are(
    tmp_path, gold, grader, right, wrong
):
    (task,) = load(tmp_path, {"question": "a?", "answer": gold}, options=":protocol=code")
    assert task.metadata["grader"] == grader
    graders = Graders(GradersConfig())
    assert graders(task, finished(right, "code")).value == 1.0
    assert graders(task, finished(wrong, "code")).value == 0.0


@pytest.mark.parametrize("protocol", ["code:paper", "code:hermes"])
def test_levels_and_formats_of_the_code_protocol_infer_the_same_grader(tmp_path, protocol):
    options = f":protocol={protocol}"
    (task,) = load(tmp_path, {"question": "a?", "answer": TESTS}, options=options)
    assert (task.protocol, task.metadata["grader"]) == (protocol, "code")


def test_a_named_grader_and_tests_kept_apart_are_left_alone(tmp_path):
    words = {"answer": "Oslo", "metadata": {"grader": "exact_match"}}
    apart = {"question": "b?", "answer": "-", "metadata": {"grader": "code", "question_id": "q"}}
    one, two = load(tmp_path, {**GOOD, **words}, apart, options=":protocol=code")
    assert (one.metadata, two.metadata) == (words["metadata"], apart["metadata"])
    assert load(tmp_path, GOOD)[0].metadata == {}  # other protocols compare words
    reward = asyncio.run(Graders(GradersConfig()).grade(two, finished("```py\n1\n```", "code")))
    assert reward.value is None and "tests cannot be read" in reward.reason


def test_release_rows_under_the_code_protocol_are_graded_as_what_they_are(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"question": "a?", "answer": "7"}]))
    (task,) = load_tasks(f"{tmp_path}/a.json:protocol=code", "test")
    assert task.metadata["grader"] == "math"
    (tmp_path / "a.json").write_text(json.dumps([{"question": "a?", "answer": "Oslo"}]))
    with pytest.raises(UserError, match=r"a\.json: row 1: the protocol 'code' answers with"):
        load_tasks(f"{tmp_path}/a.json:protocol=code", "test")


def test_a_text_instead_of_accepted_answers_is_refused():
    with pytest.raises(UserError, match=r"task 'a': gold is a tuple of accepted answers; write \("):
        Task("a", "Where?", "generalist", "Oslo", "tests")  # type: ignore[arg-type]


def test_a_tool_outside_of_the_protocols_of_the_tasks_is_told(caplog):
    tasks = [Task("a", "Where?", "generalist", ("Oslo",), "tests")]
    warn_of_tools([Says("wiki_search", ""), Says("visual_inspector", "")], tasks)
    assert not caplog.records
    warn_of_tools([Says("wiki_search", ""), Says("dice", "")], tasks)
    (record,) = caplog.records
    assert record.getMessage().startswith("the policy cannot call dice: the tasks")


def test_tests_of_a_program_are_run_under_every_protocol_and_errors_are_of_the_row(tmp_path):
    path = tmp_path / "q.jsonl"
    tests = {"inputs": ["1"], "outputs": ["2"]}
    path.write_text(json.dumps({"question": "q", "answer": tests, "protocol": "generalist"}))
    (task,) = load_tasks(str(path), "train")
    assert task.metadata["grader"] == "code"
    path.write_text(json.dumps({"question": "q", "answer": {"x": 1}, "protocol": "generalist"}))
    with pytest.raises(UserError, match=r"q.jsonl:1: the tests cannot be read: [^()]*\([^()]*\)$"):
        load_tasks(str(path), "train")  # the line is whole, so the message does not call it cut off
    rows = tmp_path / "q.json"
    rows.write_text(json.dumps([{"question": "q", "answer": "\\frac{1}{2}"}]))
    for protocol in ("code", "code:paper"):
        (task,) = load_tasks(f"{rows}:protocol={protocol}", "train")
        assert task.metadata["grader"] == "math"
