"""Reads logs of OpenAI chat completions with tool calls, one conversation per line.

docs/data.md shows the fields; ``id`` and ``usage`` may also be part of the response. The result of
a call is the ``tool`` message of the same turn with the id of the call. Parallel calls are written
one after another. If the last call is ``final_answer``, its argument is the answer. Otherwise the
answer is searched in the last message, see `coa_jax.distillation.readers.answers`.

The format lacks:

- plans, reflections and verifications, which are prose of the assistant and become thoughts;
- thoughts of a reasoning model, unless the server included them (``reasoning_content``);
- whether a tool failed, so every result counts as ``ok``;
- text after a marked answer;
- calls whose arguments are not valid JSON, for example because they are truncated (the record is
  rejected);
- token counts of a run with several calls of the model, because ``usage`` of a response covers only
  one call. The counts are known if the record has a ``usage`` of its own;
- images and sound in messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coa_jax.distillation.readers.answers import marked_answer
from coa_jax.distillation.readers.base import (
    Conversation,
    Field,
    Malformed,
    Trace,
    parse_json,
    total_usage,
)
from coa_jax.distillation.readers.calls import body_of, tag_of
from coa_jax.files import untrusted

_FINAL = "final_answer"
"""Name of the tool that gives the answer of a run, as in smolagents."""

_Call = tuple[str, str, Any]
"""The id of a call, the name of its tool, and its arguments."""


def read_chat(record: Any) -> Trace:
    """Converts a conversation of chat completions (the JSON object of one line) to a trace.

    Raises:
        Malformed: the record cannot be converted; the message says why.
    """
    fields = Field(record)
    response = fields["response"] if "response" in fields.mapping() else Field({})
    messages = _messages(fields, response)
    roles = [message["role"].text() for message in messages]
    if "user" not in roles:
        raise Malformed("no message of the role 'user', so no question")
    question_index = roles.index("user")
    talk = Conversation(_content(messages[question_index]))
    _paired([], _results(messages[question_index + 1 :]))
    final = None
    for number, message in enumerate(messages[question_index + 1 :], start=question_index + 1):
        words, reasoning = _content(message), _reasoning(message)
        if roles[number] == "user":
            raise Malformed("a second message of the role 'user': no run of a single question")
        if roles[number] != "assistant":
            continue
        if final is not None:
            raise Malformed(f"the conversation goes on after {_FINAL}")
        calls = _calls(message)
        thought = "\n".join(filter(None, (reasoning, words)))
        returned = _paired(calls, _results(messages[number + 1 :]))
        for (_, tool, arguments), seen in zip(calls, returned, strict=True):
            if seen is None:
                final = _final(arguments)
                continue
            tag = tag_of(tool)
            talk.call(tag, body_of(tag, arguments), seen, True, thought)
            thought = ""
        if final is not None:
            _close(talk, fields, thought, final)
        elif not calls and number == len(messages) - 1:
            before, answer = marked_answer(words) or ("", words.strip())
            if fields.get("answer"):
                before = words
            _close(talk, fields, "\n".join(filter(None, (reasoning, before))), answer)
        elif not calls:
            talk.say(thought)
    episode = (fields.get("id") or response.get("id")).optional_scalar()
    counts = fields.get("usage")
    if not counts and "assistant" not in roles[question_index:-1]:
        counts = response.get("usage")  # counts the last call of the model only
    usage = total_usage([counts.value], "prompt_tokens", "completion_tokens")
    return Trace(talk.finish(episode), fields.get("gold").answers(), usage=usage)


def _messages(record: Field, response: Field) -> list[Field]:
    request = record["request"] if "request" in record.mapping() else record
    messages = request["messages"].items("message")
    if "response" in record.mapping():
        choices = response["choices"].items("choice")
        if not choices:
            raise Malformed("the response has no choice")
        messages.append(Field(choices[0]["message"].value, f"message {len(messages)}"))
    return messages


def _content(message: Field) -> str:
    content = message.get("content")
    if not isinstance(content.value, list):
        return content.optional_text()
    parts = content.items(f"{message}, part")
    if any(part.get("type").value not in ("text", "input_text", "output_text") for part in parts):
        raise Malformed(f"{message} holds something besides text")
    return "\n".join(part["text"].text() for part in parts)


def _reasoning(message: Field) -> str:
    words = message.get("reasoning_content").value or message.get("reasoning").value
    return words.strip() if isinstance(words, str) else ""


def _calls(message: Field) -> list[_Call]:
    old, new = message.get("function_call"), message.get("tool_calls")
    if old.value:
        return [_call(old, "function")]
    calls = new.items(f"{message}, call") if new.value else []
    return [_call(call["function"], call["id"].scalar()) for call in calls]


def _call(function: Field, identity: str) -> _Call:
    name, arguments = function["name"].text(), function["arguments"]
    if not isinstance(arguments.value, str):
        return identity, name, arguments.value
    try:  # some servers write "" for no arguments
        return identity, name, parse_json(arguments.value or "{}")
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the text of {arguments}: {untrusted.reason(error)}") from error


def _results(following: Sequence[Field]) -> list[tuple[str, str]]:
    """Returns (id of the call, result) for each result before the next turn."""
    results = []
    for message in following:
        match message["role"].text():
            case "assistant" | "user":
                break
            case "tool":
                results.append((message["tool_call_id"].scalar(), _content(message)))
            case "function":
                results.append(("function", _content(message)))
    return results


def _paired(calls: Sequence[_Call], results: Sequence[tuple[str, str]]) -> list[str | None]:
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
        is_final = tool.lower().replace("_", "") == "finalanswer"
        if not waiting[identity] and not is_final:
            raise Malformed(f"no result of the call {identity!r}")
        seen = waiting[identity].pop(0) if waiting[identity] else ""
        returned.append(None if is_final else seen)
    return returned


def _final(arguments: Any) -> str:
    if isinstance(arguments, dict):
        only = next(iter(arguments.values())) if len(arguments) == 1 else None
        arguments = arguments.get("answer", only)
    return Field(arguments, f"the answer of {_FINAL}").scalar().strip()


def _close(talk: Conversation, record: Field, thought: str, answer: str) -> None:
    """Ends a run; an answer that the record stores separately replaces that of the last message."""
    if record.get("answer"):
        answer = record["answer"].scalar().strip()
    talk.say(thought)
    talk.answer(answer)
