import pytest

from coa_jax.distill.llm import chat_of, read_object
from coa_jax.distill.messages import AGENTS, Kind, Message
from coa_jax.distill.minds import MOVES, AgentView


def test_every_agent_has_moves():
    assert set(MOVES) == set(AGENTS)


@pytest.mark.parametrize("role", AGENTS)
def test_a_model_is_shown_the_question_the_log_and_the_legal_moves(role):
    question = Message(0, "user", "manager", Kind.QUESTION, "What is the capital of Peru?")
    said = Message(1, "manager", role, Kind.REQUEST, "Look for Peru.", "I wonder.")
    view = AgentView(role, question.content, "generalist", "e", (question, said), ("wiki_search",))
    system, user = (part["content"] for part in chat_of(view))
    assert "What is the capital of Peru?" in user
    assert f"[1] manager -> {role} (request): Look for Peru." in user
    for recipient, kind in MOVES[role]:
        name = "wiki_search" if recipient == "tool" else recipient
        assert f"({name}, {kind})" in system


@pytest.mark.parametrize(
    "reply",
    [
        '{"to": "planner"}',
        'Sure: {"to": "planner"} That is it.',
        '<think>I should reply {"to": "x"} or {y} as JSON.</think>\n{"to": "planner"}',
        '{"to": "x"} no, better:\n```json\n{"to": "planner"}\n```',
    ],
)
def test_the_last_object_of_a_reply_counts_and_none_of_its_thought(reply):
    assert read_object(reply) == {"to": "planner"}


@pytest.mark.parametrize("reply", ["", "no", '{"to": }', "<think>{}</think>", "[1]"])
def test_a_reply_without_an_object_says_so(reply):
    with pytest.raises(ValueError, match="the reply"):
        read_object(reply)
