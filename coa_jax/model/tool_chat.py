"""Conversations with tools in chat templates: the tools' descriptions, and turns with results.

A chat template is rendered once per set of tools, with marks in place of the contents. Then each
text between two control tokens is encoded as plain text, with the contents in place of the marks.
The ids equal those that transformers computes with the template, but no content can produce a
control token.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from coa_jax.errors import UserError
from coa_jax.model.chat_template import TEMPLATE, ChatTemplateError, chat_template, render
from coa_jax.model.tokenizer import (
    ChatTokens,
    chat_tokens,
    check_joins,
    conversation_ids,
    encode_plain,
    stock_prompt,
)

# Characters for private use, which no vocabulary contains.
_OPEN, _CLOSE, _SPLIT = "\ue0f0", "\ue0f1", "\ue0f2"
_MARK = re.compile(f"{_OPEN}(\\d+){_CLOSE}")

INSTRUCTIONS = (
    "You can call tools. Each line here describes one in JSON:\n<tools>\n{tools}\n</tools>\n\n"
    "To call a tool, write its name and its arguments as a JSON object between tags, and end your "
    'turn:\n<tool_call>\n{{"name": TOOL, "arguments": {{...}}}}\n</tool_call>\n'
    "The result comes between tags <tool_response>. A turn without a call ends the task."
)
"""System message that describes tools to models whose chat template does not support tools."""


RESULT = "tool"
"""Role of a message that holds the result of a tool call."""


class Frames(NamedTuple):
    """The texts that a chat template writes around tool results.

    Attributes:
        head: text before the first of several consecutive results.
        between: text between two consecutive results.
        tail: text after the last result.
    """

    head: str
    between: str
    tail: str


def plain_frames(chat: ChatTokens) -> Frames:
    """Returns the text around tool results, for a chat template that does not support tools."""
    return Frames(
        f"\n{chat.start}user\n<tool_response>\n",
        "\n</tool_response>\n<tool_response>\n",
        f"\n</tool_response>{chat.end}\n{chat.start}{chat.assistant}\n",
    )


_CALL: dict[str, Any] = {"type": "function", "function": {"name": "a_probe", "arguments": {}}}
_TOOLS = [
    {
        "type": "function",
        "function": {"name": "a_probe", "description": "", "parameters": {"type": "object"}},
    }
]
"""A tool and a call of this tool, with which templates are tried."""


def _marked(number: int) -> str:
    return f"{_OPEN}{number}{_CLOSE}"


@functools.lru_cache(maxsize=64)
def _knows_tools(template: str | None, tokenizer: Any) -> bool:
    """Returns whether a chat template describes tools, and writes calls in ``<tool_call>`` tags.

    The templates of Llama 3.1 and 3.2, for example, write calls as JSON without these tags, which
    the format `protocol.hermes` cannot read.
    """
    if not template or template == TEMPLATE:
        return False
    turns = [{"role": "user", "content": "?"}]
    call = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    try:
        asked = _render(tokenizer, template, turns, _TOOLS)
        called = _render(tokenizer, template, [*turns, call], _TOOLS)
    except ChatTemplateError:
        return False
    tag = "<tool_call>"
    return _CALL["function"]["name"] in asked and called.count(tag) > asked.count(tag)


def _render(tokenizer: Any, template: str, messages: Any, tools: Any) -> str:
    names = {**tokenizer.special_tokens_map, "tools": tools, "documents": None}
    return render(template, messages, add_generation_prompt=True, **names)


@functools.lru_cache(maxsize=256)
def _frame(template: str, tokenizer: Any, roles: tuple[str, ...], tools: str) -> str:
    """Renders a conversation with marks in place of its contents."""
    turns = [{"role": role, "content": _marked(i)} for i, role in enumerate(roles)]
    guarded = _guard(json.loads(tools), _added(tokenizer))
    try:
        text = _render(tokenizer, template, turns, guarded)
    except ChatTemplateError as error:
        raise UserError(f"the chat template cannot be used with tools: {error}") from error
    if [int(number) for number in _MARK.findall(text)] != list(range(len(roles))):
        raise UserError("the chat template omits or moves a message: it cannot be used")
    return text


def _guard(value: Any, added: re.Pattern[str]) -> Any:
    """Escapes the texts of a JSON value, so that no text contains an added token."""
    if isinstance(value, str):
        return added.sub(lambda match: f"{match[0][0]}{_SPLIT}{match[0][1:]}", value)
    if isinstance(value, list):
        return [_guard(item, added) for item in value]
    if isinstance(value, dict):
        return {_guard(key, added): _guard(item, added) for key, item in value.items()}
    return value


@functools.lru_cache(maxsize=64)
def _added(tokenizer: Any) -> re.Pattern[str]:
    """Returns a pattern that matches the tokenizer's added tokens, the longest first."""
    words = sorted(tokenizer.get_added_vocab(), key=lambda word: (-len(word), word))
    return re.compile("|".join(map(re.escape, words)) or r"(?!)")


def tool_conversation_ids(
    tokenizer: Any, turns: Sequence[tuple[str, str]], tools: str
) -> list[int]:
    """Returns the prompt ids of a conversation with tools, up to the assistant's open turn.

    Args:
        tokenizer: a tokenizer from `load_tokenizer`.
        turns: (role, content) pairs. If the first turn is not a system turn, the default system
            message of the chat template is added.
        tools: JSON list of the tools, in the format of OpenAI.

    Raises:
        UserError: the tokenizer is unsuitable, see `conversation_ids`; or the chat template cannot
            be used.
    """
    template = chat_template(tokenizer)
    if not template or not _knows_tools(template, tokenizer):
        system = stock_prompt(template, tokenizer)[1]
        rest = list(turns)
        if rest and rest[0][0] == "system":
            system = rest.pop(0)[1]
        described = "\n".join(json.dumps(t, ensure_ascii=False) for t in json.loads(tools))
        text = f"{system}\n\n{INSTRUCTIONS.format(tools=described)}".lstrip()
        return conversation_ids(tokenizer, [("system", text), *results_as_user(rest)])
    chat_tokens(tokenizer)
    check_joins(tokenizer)
    frame = _frame(template, tokenizer, tuple(role for role, _ in turns), tools)
    contents = [content for _, content in turns]
    return _ids(tokenizer, frame, contents)


def results_as_user(turns: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Converts tool results to user turns, for models whose chat template describes no tools.

    Consecutive results become a single user turn, with each result in ``<tool_response>`` tags.

    Args:
        turns: (role, content) pairs; tool results have the role ``tool``.
    """
    messages: list[tuple[str, str]] = []
    results = False
    for role, text in turns:
        if role == RESULT:
            text = f"<tool_response>\n{text}\n</tool_response>"
            messages.append(("user", f"{messages.pop()[1]}\n{text}" if results else text))
        else:
            messages.append((role, text))
        results = role == RESULT
    return messages


def frame_ids(tokenizer: Any, text: str) -> list[int]:
    """Returns the ids of a text that a chat template wrote.

    Control tokens in the text are encoded as control tokens, not as plain text.
    """
    return _ids(tokenizer, text, ())


def _ids(tokenizer: Any, frame: str, contents: Sequence[str]) -> list[int]:
    vocabulary, ids, at = tokenizer.get_added_vocab(), list[int](), 0

    def plain(text: str) -> list[int]:
        text = text.replace(_SPLIT, "")
        return encode_plain(tokenizer, _MARK.sub(lambda m: contents[int(m[1])], text))

    for match in _added(tokenizer).finditer(frame):
        ids += [*plain(frame[at : match.start()]), vocabulary[match[0]]]
        at = match.end()
    return ids + plain(frame[at:])


def result_frames(tokenizer: Any) -> Frames:
    """Returns the text that a chat template writes around tool results.

    Raises:
        UserError: the template describes tools, but the text around results cannot be determined.
    """
    template = chat_template(tokenizer)
    if not template or not _knows_tools(template, tokenizer):
        return plain_frames(chat_tokens(tokenizer))
    return _result_frames(template, tokenizer)


@functools.lru_cache(maxsize=64)
def _result_frames(template: str, tokenizer: Any) -> Frames:
    end = chat_tokens(tokenizer).end

    def around(results: int, calls: int) -> list[str]:
        """Renders a conversation with some results; returns the texts around the results."""
        turns: list[dict[str, Any]] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _marked(0), "tool_calls": [_CALL] * calls},
            *({"role": "tool", "content": _marked(i)} for i in range(1, results + 1)),
        ]
        text = _render(tokenizer, template, turns, _TOOLS)
        behind = text.partition(_marked(0))[2].partition(end)[2]
        return _MARK.split(behind)[::2]

    try:
        head, tail = around(1, 1)
        try:
            first, between, last = around(2, 2)
        except ChatTemplateError:  # the template refuses several calls in one turn
            first, between, last = around(2, 1)
    except (ChatTemplateError, ValueError) as error:
        raise UserError(f"the chat template does not show results of tools: {error}") from error
    if (head, tail) != (first, last) or not head:
        raise UserError("the chat template writes one tool result differently from two")
    return Frames(head, between, tail)
