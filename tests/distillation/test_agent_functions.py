import pytest

from coa_jax.distillation.agent_functions import ALLOWED_MESSAGES, AgentView
from coa_jax.distillation.llm import chat_of
from coa_jax.distillation.messages import AGENTS, Kind, Message


@pytest.mark.parametrize("role", AGENTS)
def test_a_model_is_shown_the_question_the_log_and_the_legal_moves(role):
    question = Message(0, "user", "manager", Kind.QUESTION, "What is the capital of Peru?")
    said = Message(1, "manager", role, Kind.REQUEST, "Look for Peru.", "I wonder.")
    view = AgentView(role, question.content, "generalist", "e", (question, said), ("wiki_search",))
    system, user = (part["content"] for part in chat_of(view))
    assert "What is the capital of Peru?" in user
    assert f"[1] manager -> {role} (request): Look for Peru." in user
    for recipient, kind in ALLOWED_MESSAGES[role]:
        name = "wiki_search" if recipient == "tool" else recipient
        assert f"({name}, {kind})" in system
