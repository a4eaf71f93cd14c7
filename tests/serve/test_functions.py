"""Functions of clients: what the policy reads is that of transformers, and calls come back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.model.tokenizer import encode_plain, end_of_turn_id
from coa_jax.serve.functions import (
    FunctionCall,
    chat_prompt_ids,
    further_ids,
    join,
    message_of,
    same_turn,
    split,
)
from tests.model.test_tool_chat import TOOLS, qwen, theirs  # noqa: F401

CALL = '<tool_call>\n{"name": "code", "arguments": {"code": "1"}}\n</tool_call>'
RIVER = {"name": "wiki_search", "arguments": {"query": "river"}}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)


@given(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<")),
    st.lists(st.tuples(st.text("ab", min_size=1), st.dictionaries(st.text(), JSON)), min_size=1),
)
def test_a_turn_that_is_written_comes_back(content, made):
    calls = tuple(
        FunctionCall(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in made
    )
    text = join(content.strip(), calls)
    assert split(text) == (content.strip(), calls)
    assert same_turn(text, text.replace("\n<tool_call>", "\n\n<tool_call> "))


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        "<tool_call>{'name': 1}</tool_call>",
        '<tool_call>{"name": "code", "arguments": []}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        f"{CALL}<tool_call>[]</tool_call>",
        '<tool_call>{"name": "code"',
    ],
)
def test_a_malformed_call_leaves_the_text_as_the_content(text):
    assert split(text) == (text, ())
    assert message_of(text, "1") == {"role": "assistant", "content": text, "refusal": None}


def test_calls_come_in_the_fields_of_openai():
    message = message_of(f"First this.\n{CALL}\n{CALL}", "a_0")
    function = {"name": "code", "arguments": '{"code": "1"}'}
    assert message["content"] == "First this."
    assert message["tool_calls"] == [
        {"id": f"call_a_0_{i}", "type": "function", "function": function} for i in range(2)
    ]
    assert message_of(CALL, "a_0")["content"] is None
    assert message_of("", "a_0")["content"] == ""  # which a request may contain, unlike null


def test_a_lone_surrogate_in_a_call_can_be_sent():
    text = CALL.replace('"1"', '"\\ud83d"')
    assert text != CALL
    json.dumps(message_of(text, "a_0"), ensure_ascii=False).encode()


def test_a_conversation_with_calls_is_that_of_transformers(qwen):  # noqa: F811
    call = {"type": "function", "function": RIVER}
    turns = [
        {"role": "user", "content": "Which river?"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "seen"},
        {"role": "tool", "content": "again"},
        {"role": "user", "content": "And?"},
    ]
    called = join("", [FunctionCall(RIVER["name"], json.dumps(RIVER["arguments"]))] * 2)
    begin = [("tools", json.dumps(TOOLS)), ("user", "Which river?")]
    results = [("tool", "seen"), ("tool", "again")]
    # The policy's own turn, in which the marks are tokens of the vocabulary.
    said = theirs(qwen, turns[:2], generate=False)[len(chat_prompt_ids(qwen, begin)) :]
    end = said.index(end_of_turn_id(qwen)) + 1
    ids = chat_prompt_ids(qwen, begin) + said[:end]
    for new in (results, [*results, ("user", "And?")]):
        expected = theirs(qwen, turns[: 2 + len(new)])
        assert ids + further_ids(qwen, ids[-1], new) == expected
        assert ids[:-1] + further_ids(qwen, ids[-2], new) == expected
    # A history that the policy did not write is plain text: its marks are no tokens.
    plain = chat_prompt_ids(qwen, [*begin, ("assistant", called), *results])
    assert plain != ids + further_ids(qwen, ids[-1], results)
    assert qwen.decode(plain) == qwen.decode(theirs(qwen, turns[:4]))


def test_results_without_tools_are_a_turn_of_the_user(qwen):  # noqa: F811
    ids = chat_prompt_ids(qwen, [("system", ""), ("user", "?"), ("tool", "a"), ("tool", "b")], None)
    assert qwen.decode(ids).endswith(
        "<|im_start|>user\n<tool_response>\na\n</tool_response>\n"
        "<tool_response>\nb\n</tool_response><|im_end|>\n"
    )
    more = further_ids(qwen, end_of_turn_id(qwen), [("user", "x")])
    assert more[: len(encode_plain(qwen, "\n"))] == encode_plain(qwen, "\n")
