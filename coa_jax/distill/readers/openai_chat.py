"""Reads logs of OpenAI chat completions with tool calls, one conversation per line.

docs/data.md shows the fields; ``id`` and ``usage`` may also be part of the response. The result of
a call is the ``tool`` message of the same turn with the id of the call. Parallel calls are written
one after another. If the last call is ``final_answer``, its argument is the answer. Otherwise the
answer is searched in the last message, see `coa_jax.distill.readers.answers`.

The format lacks:

- plans, reflections and verifications, which are prose of the assistant and become thoughts;
- thoughts of a reasoning model, unless the server included them (``reasoning_content``);
- whether a tool failed, so every result counts as ``ok``;
- text after a marked answer;
- calls whose arguments are not valid JSON, for example because they are truncated (the record is
  rejected);
- token counts of a run with several calls of the model, unless ``usage`` of the record counts all
  of them, because ``usage`` of a response covers only one call;
- images and sound in messages.
"""

from __future__ import annotations

from typing import Any

from coa_jax.distill.messages import Kind
from coa_jax.distill.readers.answers import marked_answer
from coa_jax.distill.readers.base import (
    Conversation,
    Malformed,
    Reader,
    Trace,
    accepted,
    each_line,
    items,
    json_text,
    mapping,
    need,
    scalar,
    text,
    total_usage,
)
from coa_jax.distill.readers.calls import body_of, tag_of

_FINAL = "final_answer"
"""Name of the tool that gives the answer of a run, as in smolagents."""


def read_chat(value: Any) -> Trace:
    """Converts the JSON object of one line to a trace."""
    record = mapping(value, "the record")
    response = mapping(record["response"], "'response'") if "response" in record else None
    messages = _messages(record, response)
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        raise Malformed("no message of the role 'user', so no question")
    asked = roles.index("user")
    talk = Conversation(_content(messages[asked], asked))
    _paired([], _results(messages, asked))
    last, final = len(messages) - 1, None
    for number, message in enumerate(messages[asked + 1 :], start=asked + 1):
        words = _content(message, number)
        if message["role"] == "user":
            raise Malformed("a second message of the role 'user': no run of a single question")
        if message["role"] != "assistant":
            continue
        if final is not None:
            raise Malformed(f"the conversation goes on after {_FINAL}")
        calls = _calls(message, number)
        thought = "\n".join(t for t in (_reasoning(message), words) if t)
        returned = _paired(calls, _results(messages, number))
        for (_, tool, arguments), seen in zip(calls, returned, strict=True):
            if seen is None:
                final = _final(arguments)
                continue
            tag = tag_of(tool)
            talk.call(tag, body_of(tag, arguments), seen, True, thought)
            thought = ""
        if calls and final is None:
            continue
        if final is not None:
            _close(talk, record, thought, final)
        elif number == last:
            _answer(talk, record, _reasoning(message), words)
        else:
            talk.say(thought)
    name = next((r["id"] for r in (record, response or {}) if r.get("id") is not None), None)
    episode = "" if name is None else scalar(name, "'id'")
    counts = record.get("usage")
    if counts is None and response and "assistant" not in roles[asked:-1]:
        counts = response.get("usage")  # counts the last call of the model only
    usage = total_usage([counts], "prompt_tokens", "completion_tokens")
    return Trace(talk.finish(episode), accepted(record.get("gold"), "'gold'"), usage=usage)


def _messages(record: dict[str, Any], response: dict[str, Any] | None) -> list[dict[str, Any]]:
    asked = record
    if "request" in record:
        asked = mapping(record["request"], "'request'")
    messages = list(items(need(asked, "messages"), "'messages'"))
    if response is not None:
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
        arguments = need(function, "arguments", where)
        if isinstance(arguments, str):  # some servers write "" for no arguments
            arguments = json_text(arguments or "{}", f"the text of the arguments of {where}")
        found.append((identity, name, arguments))
    return found


def _results(messages: list[dict[str, Any]], turn: int) -> list[tuple[str, str]]:
    """Returns (id of the call, result) for each result between a message and the next turn."""
    found = []
    for number, message in enumerate(messages[turn + 1 :], start=turn + 1):
        if message["role"] in ("assistant", "user"):
            break
        if message["role"] == "tool":
            identity = scalar(need(message, "tool_call_id", f"message {number}"), "'tool_call_id'")
            found.append((identity, _content(message, number)))
        elif message["role"] == "function":
            found.append(("function", _content(message, number)))
    return found


def _paired(calls: list[tuple[str, str, Any]], results: list[tuple[str, str]]) -> list[str | None]:
    """Returns the result of each call of a turn; None for ``final_answer``, which has no result.

    Several turns may use the same ids. Calls of one turn with the same id are paired with results
    in their order.
    """
    waiting: dict[str, list[str]] = {identity: [] for identity, _, _ in calls}
    for identity, seen in results:
        if identity not in waiting:
            raise Malformed(f"a result of the call {identity!r}, which is not there")
        waiting[identity].append(seen)
        if len(waiting[identity]) > sum(identity == called for called, _, _ in calls):
            raise Malformed(f"two results of the call {identity!r}")
    returned: list[str | None] = []
    for identity, tool, _ in calls:
        if not waiting[identity] and not _is_final(tool):
            raise Malformed(f"no result of the call {identity!r}")
        seen = waiting[identity].pop(0) if waiting[identity] else ""
        returned.append(None if _is_final(tool) else seen)
    return returned


def _is_final(tool: str) -> bool:
    return tool.lower().replace("_", "") == "finalanswer"


def _final(arguments: Any) -> str:
    if isinstance(arguments, dict):
        only = next(iter(arguments.values())) if len(arguments) == 1 else None
        arguments = arguments.get("answer", only)
    return scalar(arguments, f"the answer of {_FINAL}").strip()


def _close(talk: Conversation, record: dict[str, Any], thought: str, answer: str) -> None:
    """Ends a run; an answer that the record stores separately replaces that of the last message."""
    if record.get("answer") is not None:
        answer = scalar(record["answer"], "'answer'").strip()
    talk.say(thought)
    if answer:
        talk.add(Kind.ANSWER, "manager", "user", answer)


def _answer(talk: Conversation, record: dict[str, Any], reasoning: str, words: str) -> None:
    """Adds the last message: the marked answer, if any, and the text before it as thought."""
    thought, answer = marked_answer(words) or ("", words.strip())
    if record.get("answer") is not None:
        thought = words
    _close(talk, record, "\n".join(t for t in (reasoning, thought) if t), answer)


read: Reader = each_line(read_chat)
