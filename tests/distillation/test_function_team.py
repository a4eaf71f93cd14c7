"""A multi-agent system that is a Python function becomes training data."""

from __future__ import annotations

import json
import re

import pytest

import coa_jax
from coa_jax import UserError
from coa_jax.data.records import read_records
from coa_jax.protocol import Prompt, messages_of
from coa_jax.tasks import Task
from coa_jax.tasks.prompts import load_prompt, make_card
from coa_jax.tools.make import OWN_TOOLS, ToolsConfig, make_tools, named_tools

TASKS = [{"prompt": f"What is {a} * 7?", "answer": str(7 * a)} for a in range(2, 8)]


def multiply(a: int, b: int) -> int:
    """Multiplies two integers."""
    return a * b


def messages(question: str, shift: int = 0) -> list[dict]:
    a, b = map(int, re.findall(r"\d+", question))
    called = {"name": "multiply", "arguments": json.dumps({"a": a, "b": b})}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [{"function": called}]},
        {"role": "tool", "content": str(multiply(a, b))},
        {"role": "assistant", "content": f"I multiplied.\nFinal answer: {a * b + shift}"},
    ]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_right_runs_become_records_and_a_killed_distillation_continues(tmp_path, kind):
    asked = []

    def team(question: str) -> list[dict]:
        asked.append(question)
        if "5" in question and len(asked) < 7:
            raise ConnectionError("the endpoint is gone")
        return messages(question, shift="3" in question)

    async def team_in_an_event_loop(question: str) -> list[dict]:
        return team(question)

    chosen = team if kind == "sync" else team_in_an_event_loop
    given = {"tasks": TASKS, "tools": [multiply]}
    made = coa_jax.distill(chosen, tmp_path / "run", **given)
    assert len(asked) == len(TASKS)
    assert dict(made.dropped) == {
        "wrong answer": 1,
        "the team failed: ConnectionError: the endpoint is gone": 1,
    }
    assert [record.answer for record in made.records] == ["14", "28", "42", "49"]
    assert read_records(tmp_path / "run" / "train.jsonl") == made.records
    (schema,) = made.records[0].metadata["tools"]
    assert schema["function"]["name"] == "multiply"
    assert schema["function"]["parameters"]["required"] == ["a", "b"]
    again = coa_jax.distill(chosen, tmp_path / "run", **given)
    assert asked[6:] == ["What is 5 * 7?"]  # only what had failed
    assert [record.answer for record in again.records] == ["14", "28", "35", "42", "49"]


def test_rl_puts_questions_as_the_distilled_records_do(tmp_path):
    made = coa_jax.distill(messages, tmp_path, tasks=TASKS, tools=[multiply])
    card = make_card(Prompt("brief"), made.records)
    config = ToolsConfig(**named_tools([multiply]), protocol=OWN_TOOLS)
    make_tools(config)  # registers the protocol
    for record in made.records:
        task = Task("t", record.question, f"{OWN_TOOLS}:hermes", ("14",), "rows")
        asked = messages_of(task, load_prompt("model", card))
        assert asked == messages_of(record, Prompt("brief"))
        assert asked.user == record.question and json.loads(asked.tools)


def test_rows_may_have_columns_of_other_names(tmp_path):
    rows = [{"ask": f"What is {n} * 7?", "is": str(7 * n)} for n in range(2, 5)]
    options = {"columns": {"question": "ask", "answer": "is"}}
    made = coa_jax.distill(messages, tmp_path, tasks=rows, task_options=options)
    assert [record.answer for record in made.records] == ["14", "21", "28"]


@pytest.mark.parametrize(
    ("team", "message"),
    [
        (lambda question: [{"role": "user", "content": question}], "6 of 6: the assistant says"),
        (lambda question: "14", "returned str for 'What is 2 \\* 7"),
        (lambda question: messages(question, 1), "no run of the team was right; 6 of 6: wrong"),
        ("runs.jsonl", "team is str; give a function"),
    ],
)
def test_a_team_that_cannot_be_distilled_is_one_line(tmp_path, team, message):
    with pytest.raises(UserError, match=message):
        coa_jax.distill(team, tmp_path / "run", tasks=TASKS)
