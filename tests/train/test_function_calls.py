"""Conversations with function calls are learned as the model's own chat template writes them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from coa_jax.data.row_formats import convert_row
from coa_jax.data.text_parts import Unusable
from coa_jax.protocol import Prompt
from coa_jax.train.examples import record_example
from tests.model.test_tool_chat import qwen  # noqa: F401  (a fixture)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get-Weather",
            "description": "The weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    },
]


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Weather in Ume and Lule?"},
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [call("get-Weather", city="Umeå"), call("get-Weather", city="<tool_call>")],
    },
    {"role": "tool", "content": "rain <|im_end|>"},
    {"role": "tool", "content": "sun"},
    {"role": "assistant", "content": "Rain and sun."},
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": "", "tool_calls": [call("add", a=1, b=2)]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "3"},
]


def row(chat=CHAT, tools=TOOLS):
    """A row as files have it: arguments are JSON texts."""
    chat = json.loads(json.dumps(chat))
    for turn in chat:
        for each in turn.get("tool_calls", ()):
            each["function"]["arguments"] = json.dumps(each["function"]["arguments"])
    return {"messages": chat, "tools": tools}


def example(tokenizer, value):
    record = convert_row(value, "x").record
    return record_example(tokenizer, record, Prompt("brief"))


def learned_of(tokenizer, tokens, mask):
    """The texts of the spans with a loss."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return [tokenizer.decode(tokens[a:b]) for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps([tool["function"] for tool in TOOLS])])
def test_the_tokens_are_those_of_the_chat_template(qwen, tools):  # noqa: F811
    chat = json.loads(json.dumps(CHAT).replace("<|im_end|>", "end").replace("<tool_call>", "Lule"))
    made = example(qwen, row(chat, tools))
    theirs = qwen.apply_chat_template(chat, tools=TOOLS, return_dict=False)
    newline = qwen.encode("\n", add_special_tokens=False)
    assert [*made.tokens.tolist(), *newline] == theirs


def test_only_what_the_assistant_wrote_is_learned(qwen):  # noqa: F811
    made = example(qwen, row())
    assert learned_of(qwen, made.tokens, made.mask) == [
        'I look.\n<tool_call>\n{"name": "get-Weather", "arguments": {"city": "Umeå"}}\n</tool_call>'
        '\n<tool_call>\n{"name": "get-Weather", "arguments": {"city": "\\u003ctool_call>"}}\n'
        "</tool_call><|im_end|>",
        "Rain and sun.<|im_end|>",
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>',
        "3<|im_end|>",
    ]
    # What a tool returned cannot end a turn.
    end = qwen.convert_tokens_to_ids("<|im_end|>")
    assert np.sum(made.tokens == end) == 9


def test_calls_without_schemas_and_in_turns_of_their_own_are_learned(qwen):  # noqa: F811
    chat = [
        {"from": "human", "value": "1 + 2?"},
        {"from": "gpt", "value": "I add."},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1, "b": 2}}'},
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": "3"},
    ]
    made = example(qwen, {"conversations": chat})
    called = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    learned = [f"I add.\n{called}<|im_end|>", "3<|im_end|>"]
    assert learned_of(qwen, made.tokens, made.mask) == learned
    # Calls and results that the file has as texts give the same tokens.
    chat[1:3] = [{"from": "gpt", "value": f"I add.\n{called}"}]
    chat[2]["value"] = "<tool_response>\n3\n</tool_response>"
    assert example(qwen, {"conversations": chat}).tokens.tolist() == made.tokens.tolist()


def test_a_chain_of_agents_stays_one_beside_any_column_of_tools():
    turns = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "<think>a</think><crawl_page>x.org</crawl_page>"},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "<think>b</think><answer>3</answer>"},
    ]
    for tools in (TOOLS, ["crawl_page"], "none"):
        record = convert_row({"messages": turns, "tools": tools}, "x").record
        assert (record.protocol, record.answer, record.metadata) == ("web", "3", {})


def test_text_beside_an_observation_in_tags_keeps_its_tokens(qwen):  # noqa: F811
    seen = "\n<observation>\n1\n</observation>\n\n"
    parts = [["policy", "<code>1</code>"], ["environment", seen], ["environment", "later"]]
    row = {"id": "x", "question": "?", "protocol": "code", "gold": [], "answer": "", "parts": parts}
    tokens = example(qwen, row).tokens
    assert qwen.decode(tokens).endswith(f"<code>1</code>{seen}later<|im_end|>")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda chat: chat[5].update(weight=0), "excluded from training"),
        (lambda chat: chat.insert(5, {"role": "user", "content": "?"}), "role user follows"),
        (lambda chat: chat.pop(2), "role tool follows"),
        (lambda chat: chat.insert(6, {"role": "system", "content": "s"}), "system message"),
        (lambda chat: chat[7]["tool_calls"][0]["function"].update(arguments="[1]"), "JSON object"),
        (lambda chat: chat[7].update(tool_calls="add"), "no list of calls"),
        (lambda chat: chat.insert(0, {"role": "tool", "content": "3"}), "before the user"),
        (lambda chat: chat.__delitem__(slice(2, None)), "says nothing"),
    ],
)
def test_a_conversation_that_the_template_cannot_show_is_left_out(change, reason):
    value = row()
    change(value["messages"])
    with pytest.raises(Unusable, match=reason):
        convert_row(value, "x")
