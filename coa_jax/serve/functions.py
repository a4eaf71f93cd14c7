"""Supports functions of the client, which a chat request describes and the client itself runs.

The policy calls a function as Hermes and Qwen models do, by ``<tool_call>{"name": ..., "arguments":
{...}}</tool_call>``. Clients receive calls and send results in the fields of OpenAI's API
(https://platform.openai.com/docs/guides/function-calling).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from coa_jax.files import untrusted
from coa_jax.model.tokenizer import (
    chat_tokens,
    conversation_ids,
    encode_plain,
    end_of_turn_id,
    turn_ids,
)
from coa_jax.model.tool_chat import (
    RESULT,
    frame_ids,
    result_frames,
    results_as_user,
    tool_conversation_ids,
)

TOOLS = "tools"
"""Role of a message that contains the functions of a request, as a JSON list."""

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)

Message = tuple[str, str]
"""A message of a conversation: (role, text)."""


class FunctionCall(NamedTuple):
    """A call that the policy makes to a function of the client.

    Attributes:
        name: the function to call, one of those that the client offers.
        arguments: arguments, as the text of a JSON object.
    """

    name: str
    arguments: str


def split(text: str) -> tuple[str, tuple[FunctionCall, ...]]:
    """Splits a turn of the policy into its text and its calls of the client's functions.

    If any call is malformed, the whole text is the content and there are no calls. Other servers do
    the same.
    """
    calls = []
    for match in _CALL.finditer(text):
        try:
            value = untrusted.parse_json(match[1])
        except untrusted.MALFORMED:
            return text, ()
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return text, ()
        arguments = value.get("arguments", {})
        if not isinstance(arguments, dict):
            return text, ()
        written = (value["name"], json.dumps(arguments, ensure_ascii=False))
        # JSON may escape a lone surrogate, which a response in UTF-8 cannot contain.
        calls.append(FunctionCall(*(part.encode("utf-8", "replace").decode() for part in written)))
    return (_CALL.sub("", text).strip(), tuple(calls)) if calls else (text, ())


def join(content: str, calls: Iterable[FunctionCall]) -> str:
    """Writes a turn with function calls as the policy would write it; the inverse of ``split``.

    Raises:
        ValueError: the arguments of a call are not a JSON object.
    """
    parts = [content] if content else []
    for call in calls:
        arguments = untrusted.parse_json(call.arguments or "{}")
        if not isinstance(arguments, dict):
            raise ValueError(f"the arguments of {call.name} are no JSON object")
        text = json.dumps({"name": call.name, "arguments": arguments}, ensure_ascii=False)
        # A closing tag inside a JSON string is escaped, so that it does not end the call.
        text = text.replace("</tool_call>", "\\u003c/tool_call>")
        parts.append(f"<tool_call>\n{text}\n</tool_call>")
    return "\n".join(parts)


def same_turn(left: str, right: str) -> bool:
    """Returns whether two turns have the same content and calls; the format of JSON is ignored."""

    def parsed(text: str) -> tuple[str, list[tuple[str, Any]]]:
        content, calls = split(text)
        return content.strip(), [(call.name, json.loads(call.arguments)) for call in calls]

    return parsed(left) == parsed(right)


def chat_prompt_ids(
    tokenizer: Any, messages: Sequence[Message], prefix: str | None = ""
) -> list[int]:
    """Returns the token ids of a conversation, up to the beginning of the policy's turn.

    Args:
        tokenizer: tokenizer of the policy.
        messages: the conversation, whose first message may have the role `TOOLS`.
        prefix: text with which the policy's turn begins. The ids then include the tokens that open
            the turn, and the text. With None they end before these tokens (with a message of the
            role `TOOLS`, None has the effect of "").

    Raises:
        UserError: the chat template of the model cannot be used.
    """
    if messages and messages[0][0] == TOOLS:
        ids = tool_conversation_ids(tokenizer, messages[1:], messages[0][1])
        return ids + encode_plain(tokenizer, prefix or "")
    return conversation_ids(tokenizer, results_as_user(messages), prefix=prefix)


def further_ids(tokenizer: Any, last: int, messages: Sequence[Message]) -> list[int]:
    """Returns the token ids of messages that follow a turn of the policy.

    The ids go up to the beginning of the policy's next turn.

    Args:
        tokenizer: tokenizer of the policy.
        last: id of the last token of the policy's turn. If the turn was cut off before its end
            token, the returned ids begin with the end token.
        messages: messages that follow this turn.

    Raises:
        UserError: the chat template of the model does not render results of tools.
    """
    end = end_of_turn_id(tokenizer)
    ids = [] if last == end else [end]
    count = next((i for i, (role, _) in enumerate(messages) if role != RESULT), len(messages))
    if not count:
        ids += encode_plain(tokenizer, "\n")
        return ids + turn_ids(tokenizer, results_as_user(messages))
    frames = result_frames(tokenizer)
    ids += frame_ids(tokenizer, frames.head)
    for index, (_, text) in enumerate(messages[:count]):
        ids += frame_ids(tokenizer, frames.between) if index else []
        ids += encode_plain(tokenizer, text)
    if count == len(messages):
        return ids + frame_ids(tokenizer, frames.tail)
    closing = frames.tail.partition(chat_tokens(tokenizer).start)[0]
    rest = results_as_user(messages[count:])
    return ids + frame_ids(tokenizer, closing) + turn_ids(tokenizer, rest)


def message_of(text: str, name: str) -> dict[str, Any]:
    """Returns the assistant message of a completion, with its function calls.

    Args:
        text: text of the completion.
        name: name of the completion, which becomes part of the ids of its calls.
    """
    content, calls = split(text)
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if calls:
        message["content"] = content or None
        message["tool_calls"] = [
            {"id": f"call_{name}_{index}", "type": "function", "function": call._asdict()}
            for index, call in enumerate(calls)
        ]
    return message
