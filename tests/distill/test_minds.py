import asyncio

import pytest

from coa_jax.distill.messages import AGENTS, Kind, Message
from coa_jax.distill.minds import MOVES, Action, AgentView, TextMind, parse_action


def view_of(role, *messages, tools=()):
    question = Message(0, "user", "manager", Kind.QUESTION, "What is the capital of Peru?")
    return AgentView(role, question.content, "generalist", "e", (question, *messages), tools)


def test_every_agent_has_moves():
    assert set(MOVES) == set(AGENTS)


@pytest.mark.parametrize("role", AGENTS)
def test_a_rendered_view_holds_the_question_the_log_and_the_legal_moves(role):
    said = Message(1, "manager", role, Kind.REQUEST, "Look for Peru.", "I wonder.")
    text = view_of(role, said, tools=("wiki_search",)).render()
    assert "What is the capital of Peru?" in text
    assert f"[1] manager -> {role} (request): I wonder. // Look for Peru." in text
    for recipient, kind in MOVES[role]:
        name = "wiki_search" if recipient == "tool" else recipient
        assert f"{name} {kind}" in text


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        (
            "Thought: search it\nTo: wiki_search\nKind: call\nContent: capital of Peru",
            Action("wiki_search", Kind.CALL, "capital of Peru", "search it"),
        ),
        (
            "To: manager\nKind: Plan\nContent: 1. find it\n2. say it\n",
            Action("manager", Kind.PLAN, "1. find it\n2. say it"),
        ),
        (
            "Thought: two\nlines\n\nTo: user\nKind: answer\nContent: Lima",
            Action("user", Kind.ANSWER, "Lima", "two\nlines"),
        ),
    ],
)
def test_replies_of_a_model_are_read(reply, action):
    assert parse_action(reply) == action


@pytest.mark.parametrize(
    "reply", ["", "Lima", "To: user\nContent: Lima", "To: a\nKind: b\nContent: c"]
)
def test_replies_of_another_form_are_refused(reply):
    with pytest.raises(ValueError, match=r"."):
        parse_action(reply)


def test_a_text_mind_asks_again_after_an_unreadable_reply():
    prompts = []

    async def complete(prompt):
        prompts.append(prompt)
        return "Lima!" if len(prompts) == 1 else "To: user\nKind: answer\nContent: Lima"

    action = asyncio.run(TextMind(complete).act(view_of("manager")))
    assert action == Action("user", Kind.ANSWER, "Lima")
    assert len(prompts) == 2
    assert "could not be read" in prompts[1]


def test_a_text_mind_gives_up_with_the_reason():
    async def complete(prompt):
        return "Lima!"

    with pytest.raises(ValueError, match="manager gave no readable reply"):
        asyncio.run(TextMind(complete, attempts=3).act(view_of("manager")))
