"""Prompts state the rules of their protocol, and contain the question in the right position."""

from __future__ import annotations

import pytest

from coa_jax.errors import UserError
from coa_jax.protocol import (
    CRITERIA,
    Messages,
    Prompt,
    get_protocol,
    messages_of,
    protocol_names,
    protocol_with_tools,
    render_prompt,
)
from coa_jax.tasks import Task

SYSTEM = ("system", "You are terse.")


@pytest.mark.parametrize("name", protocol_names())
def test_brief_prompts_name_the_protocol_and_end_with_the_question(name):
    prompt = render_prompt(get_protocol(name), "Why?", "brief")
    assert prompt == f"Follow the {name} protocol.\n\nQuestion: Why?"


def test_brief_prompts_describe_the_tools_if_some_are_not_built_in():
    protocol = protocol_with_tools("mine", ("dice", "code"), {"dice": "Throws dice. Write SIDES."})
    prompt = render_prompt(protocol, "Why?", "brief")
    assert prompt.startswith("Follow the mine protocol with these tools:\n- <dice>: Throws dice.")
    assert "\n- <code>: Run a program." in prompt and prompt.endswith("\n\nQuestion: Why?")
    only_built_in = render_prompt(protocol_with_tools("other", ("code",)), "Why?", "brief")
    assert only_built_in == "Follow the other protocol.\n\nQuestion: Why?"


@pytest.mark.parametrize("name", protocol_names())
def test_full_prompts_name_every_tag_and_end_with_the_question(name):
    protocol = get_protocol(name)
    prompt = render_prompt(protocol, "Why <b>?\n", "full")
    assert prompt.endswith("\n\nQuestion: Why <b>?\n")
    assert all(f"<{role}>" in prompt for role in protocol.roles)
    foreign = {"web_search", "wiki_search", "code", "double_check"} - set(protocol.roles)
    assert not any(f"<{role}>" in prompt for role in foreign)


def test_full_prompts_state_the_rules_that_the_automaton_holds():
    prompt = render_prompt(get_protocol("generalist"), "?")
    for criterion in CRITERIA:
        assert criterion in prompt
    assert "```py" in prompt and "```sh" in prompt
    assert "score of 3 or more" in prompt
    assert "boxed" in render_prompt(get_protocol("code"), "?")
    assert "double_check" not in render_prompt(get_protocol("mhqa"), "?")
    with pytest.raises(UserError, match="prompt style 'long' is unknown; use full, brief, data"):
        render_prompt(get_protocol("web"), "?", "long")


def test_prompts_of_the_level_paper_state_its_rules_and_leave_the_others_as_they_are():
    lenient, paper = (render_prompt(get_protocol(n), "?") for n in ("web", "web:paper"))
    assert "After <double_check> comes <plan> or <answer>." in paper
    assert "After a score of 3 or more, <answer> must come next" in paper
    assert "After <double_check> comes <plan>, <web_search>, <crawl_page> or <answer>." in lenient
    assert "After <plan> comes <code>." in render_prompt(get_protocol("code:paper"), "?")
    assert "After <plan> comes <code> or <answer>." in render_prompt(get_protocol("code"), "?")
    brief = [render_prompt(get_protocol(name), "?", "brief") for name in ("code", "code:paper")]
    assert brief[0] == brief[1]


def test_a_template_puts_the_question_into_its_last_place_whatever_it_says():
    template = "Fill {question} in.\n\nQuestion: {question}!"
    for question in ("Why?", "{question}", "{0} %s \\1"):
        text = render_prompt(get_protocol("web"), question, template)
        assert text == f"Fill {{question}} in.\n\nQuestion: {question}!"


def test_the_style_data_takes_the_messages_of_the_row_and_full_where_there_are_none():
    with_prompt = Task("1", "Why?", "web", (), "t", prompt="Do it.\nWhy?", context=(SYSTEM,))
    bare = Task("1", "Why?", "web", (), "t")
    assert messages_of(with_prompt, Prompt("data")) == Messages("Do it.\nWhy?", (SYSTEM,))
    assert messages_of(bare, Prompt("data")) == messages_of(bare, Prompt("full"))


def test_earlier_turns_stay_and_a_prompts_own_system_message_takes_the_others_place():
    turns = (SYSTEM, ("user", "Hello"), ("assistant", "Hi"))
    asked = Task("1", "Why?", "web", (), "t", prompt="Why?", context=turns)
    user = "Follow the web protocol.\n\nQuestion: Why?"
    assert messages_of(asked, Prompt("brief")).turns == [*turns, ("user", user)]
    own = messages_of(asked, Prompt("brief", system="Be exact."))
    assert own.context == (("system", "Be exact."), *turns[1:])
