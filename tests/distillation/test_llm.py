"""Parsing the reply of a language model."""

import json

import pytest

from coa_jax.distillation.agent_functions import AgentView
from coa_jax.distillation.llm import read_action
from coa_jax.distillation.messages import Kind, Message


def view_of(role, tools=()):
    question = Message(0, "user", "manager", Kind.QUESTION, "Capital of Peru?")
    return AgentView(role, "Capital of Peru?", "generalist", "e", (question,), tools)


@pytest.mark.parametrize(
    ("role", "reply", "why"),
    [
        ("manager", "Sure!", "no JSON object"),
        ("manager", "{'to': 'user'}", "not valid JSON"),
        ("manager", '{"to": "user", "kind": 3, "content": "x"}', "'kind' is missing or not text"),
        ("manager", '{"to": "user", "kind": "plan", "content": "x"}', r"^\(user, plan\) "),
        ("manager", '{"to": "user", "kind": "answer", "content": " "}', "'content' is empty"),
        (
            "verification",
            '{"to": "manager", "kind": "verdict", "content": "7"}',
            "'content' .* 1 to 4",
        ),
        (
            "reflection",
            '{"to": "manager", "kind": "reflection", "content": "ok"}',
            "'content' .* grades",
        ),
        ("search", '{"to": "code", "kind": "call", "content": "x"}', r"^\(code, call\) "),
        ("manager", "", "no JSON object"),
    ],
)
def test_nonsense_is_told_apart_from_a_move(role, reply, why):
    with pytest.raises(ValueError, match=why):
        read_action(reply, view_of(role, ("wiki_search",)))


PROGRAM = "print(6 * 7)"


@pytest.mark.parametrize(
    "content",
    [
        PROGRAM,
        f"```py\n{PROGRAM}\n```",
        f"```\n{PROGRAM}\n```",
        f"```python3\n{PROGRAM}\n```",
        f"I multiply:\n```py\n{PROGRAM}\n```\nIt prints 42.",
    ],
)
def test_a_program_is_taken_out_of_its_fence_and_the_words_around_it(content):
    reply = json.dumps({"to": "code", "kind": "call", "content": content})
    assert read_action(reply, view_of("code", ("code",))).content == f"```py\n{PROGRAM}\n```"


@pytest.mark.parametrize(
    "content",
    [
        f"```py\n{PROGRAM}",
        f"First:\n```py\n{PROGRAM}\n```\nor\n```py\n{PROGRAM}\n```",
        "This is it:\n```json\n{}\n```",
    ],
)
def test_what_may_be_several_programs_or_none_is_asked_for_again(content):
    reply = json.dumps({"to": "code", "kind": "call", "content": content})
    with pytest.raises(ValueError, match=r"^'content' .* Python "):
        read_action(reply, view_of("code", ("code",)))


MOVE = json.dumps({"to": "code", "kind": "call", "content": PROGRAM})


@pytest.mark.parametrize(
    "reply",
    [
        '<think>I should reply {"to": ...} as JSON.</think>\n' + MOVE,
        "<think>Perhaps " + MOVE.replace("code", "user") + "?</think>" + MOVE,
        MOVE.replace("code", "user") + "\nNo, this:\n" + MOVE,
        MOVE + "\n(I am {sure}.)",
        "Here:\n```json\n" + MOVE + "\n```",
    ],
)
def test_a_thought_or_an_earlier_object_is_not_the_move(reply):
    action = read_action(reply, view_of("code", ("code",)))
    assert (action.recipient, action.content) == ("code", f"```py\n{PROGRAM}\n```")


@pytest.mark.parametrize("reply", [f"<think>{MOVE}</think> Done.", f"<think>So: {MOVE}"])
def test_a_move_that_is_only_thought_of_is_none(reply):
    with pytest.raises(ValueError, match="no JSON object"):
        read_action(reply, view_of("code", ("code",)))
