"""Logs of OpenAI chat completions with tool calls, one conversation a line.

Read are ``{"messages": [...]}`` and ``{"request": {"messages": [...]}, "response": {"choices":
[{"message": ...}]}}``, with optional ``id``, ``gold`` and ``usage``.  A call is joined with the
``tool`` message that names its id, so parallel calls become one after the other.  The old
``function_call`` with messages of the role ``function`` is read as well.

Not to be had from this format:

- plans, reflections and verifications: they are prose of the assistant and become thoughts;
- what a reasoning model thought, unless the server wrote it out (``reasoning_content``);
- whether a tool failed: every result counts as ``ok``;
- images and sound in messages.
"""

from __future__ import annotations

import re
from typing import Any

from coa_jax.distill.messages import Kind
from coa_jax.distill.readers.base import (
    Conversation,
    Malformed,
    Reader,
    Trace,
    accepted,
    each_line,
    items,
    mapping,
    need,
    scalar,
    text,
    total_usage,
)
from coa_jax.distill.readers.calls import body_of, tag_of

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.IGNORECASE | re.DOTALL)
_MARKED = re.compile(
    r"^[^\w\n]*final answer[^\w\n]*?:[^\w\n-]*(\S.*)$", re.IGNORECASE | re.MULTILINE
)


def read_chat(value: Any) -> Trace:
    """One line of the file."""
    record = mapping(value, "the record")
    messages = _messages(record)
    asked = [n for n, message in enumerate(messages) if message["role"] == "user"]
    if not asked:
        raise Malformed("no message of the role 'user', so no question")
    talk = Conversation(_content(messages[asked[0]], asked[0]))
    returns = _returns(messages)
    last = len(messages) - 1
    for number, message in enumerate(messages[asked[0] + 1 :], start=asked[0] + 1):
        words = _content(message, number)
        match message["role"]:
            case "assistant":
                calls = _calls(message, number)
                thought = "\n".join(t for t in (_reasoning(message), words) if t)
                if calls:
                    for position, (identity, tool, arguments) in enumerate(calls):
                        if identity not in returns:
                            raise Malformed(f"no result of the call {identity!r}")
                        tag = tag_of(tool)
                        before = "" if position else thought
                        talk.call(tag, body_of(tag, arguments), returns[identity], True, before)
                elif number == last:
                    _answer(talk, record, _reasoning(message), words)
                else:
                    talk.say(thought)
            case "user":
                raise Malformed("a second message of the role 'user': no run of a single question")
            case _:
                pass
    name = record.get("id")
    episode = "" if name is None else scalar(name, "'id'")
    usage = total_usage([record.get("usage")], "prompt_tokens", "completion_tokens")
    return Trace(talk.finish(episode), accepted(record.get("gold"), "'gold'"), usage=usage)


def _messages(record: dict[str, Any]) -> list[dict[str, Any]]:
    asked = record
    if "request" in record:
        asked = mapping(record["request"], "'request'")
    messages = list(items(need(asked, "messages"), "'messages'"))
    if "response" in record:
        response = mapping(record["response"], "'response'")
        choices = items(need(response, "choices", "'response'"), "'choices'")
        if not choices:
            raise Malformed("the response has no choice")
        messages.append(need(mapping(choices[0], "a choice"), "message", "a choice"))
    for number, message in enumerate(messages):
        role = need(mapping(message, f"message {number}"), "role", f"message {number}")
        text(role, f"the role of message {number}")
    return messages


def _content(message: dict[str, Any], number: int) -> str:
    content = message.get("content")
    if isinstance(content, list):
        parts = [mapping(part, f"a part of message {number}") for part in content]
        if any(part.get("type") not in ("text", "input_text", "output_text") for part in parts):
            raise Malformed(f"message {number} holds something besides text")
        return "\n".join(text(part.get("text"), f"message {number}") for part in parts)
    return "" if content is None else text(content, f"the content of message {number}")


def _reasoning(message: dict[str, Any]) -> str:
    words = message.get("reasoning_content") or message.get("reasoning")
    return words.strip() if isinstance(words, str) else ""


def _calls(message: dict[str, Any], number: int) -> list[tuple[str, str, Any]]:
    where = f"a call of message {number}"
    if message.get("function_call"):
        calls = [{"id": "function", "function": message["function_call"]}]
    else:
        calls = items(message.get("tool_calls") or [], f"'tool_calls' of message {number}")
    found = []
    for call in (mapping(call, where) for call in calls):
        function = mapping(need(call, "function", where), where)
        name = text(need(function, "name", where), f"the name of {where}")
        identity = scalar(need(call, "id", where), f"the id of {where}")
        if identity == "function":
            identity = f"function {number}"
        found.append((identity, name, need(function, "arguments", where)))
    return found


def _returns(messages: list[dict[str, Any]]) -> dict[str, str]:
    """Id of a call -> what it returned; old-style results belong to the call before them."""
    returns: dict[str, str] = {}
    for number, message in enumerate(messages):
        if message["role"] == "tool":
            identity = scalar(need(message, "tool_call_id", f"message {number}"), "'tool_call_id'")
        elif message["role"] == "function":
            identity = f"function {number - 1}"
        else:
            continue
        if identity in returns:
            raise Malformed(f"two results of the call {identity!r}")
        returns[identity] = _content(message, number)
    return returns


def _answer(talk: Conversation, record: dict[str, Any], reasoning: str, words: str) -> None:
    """The last words: the marked answer if one is marked, with what stands before as thought."""
    if record.get("answer") is not None:
        talk.say("\n".join(t for t in (reasoning, words) if t))
        talk.add(Kind.ANSWER, "manager", "user", scalar(record["answer"], "'answer'").strip())
        return
    found = list(_TAGGED.finditer(words)) or list(_MARKED.finditer(words))
    answer = words.strip()
    if found:
        answer = found[-1][1].strip().strip("*").strip()
        reasoning = "\n".join(t for t in (reasoning, words[: found[-1].start()].strip()) if t)
    talk.say(reasoning)
    if answer:
        talk.add(Kind.ANSWER, "manager", "user", answer)


read: Reader = each_line(read_chat)
