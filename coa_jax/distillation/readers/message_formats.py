"""Reads single messages of other systems as turns, the common form of all logs of conversations.

A message has one of many shapes: a chat message of OpenAI, Anthropic, Gemini, Bedrock, Vercel,
LlamaIndex or ShareGPT, a message of LangChain in one of its four serialisations, an item of
OpenAI's Responses API, a message of Pydantic AI, an event of Google's ADK or of AutoGen, or a step
with plain fields. `turns_of` recognises the shape by the fields of the
message, so a log may mix shapes. docs/data.md lists the names of plain fields.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from coa_jax.data.names import role_of
from coa_jax.distillation.readers.base import Field, Malformed, parse_json
from coa_jax.files import untrusted

Call = tuple[str, str, Any]
"""The id of a call, the name of its tool, and its arguments."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """What one participant of a conversation wrote, or one result of a call.

    Attributes:
        role: ``system``, ``user``, ``assistant``, or ``tool`` for a result.
        words: the text.
        reasoning: hidden thoughts before the text, if the log has them.
        calls: calls of tools that follow the text.
        identity: id of the call whose result the turn contains; or id of the reply of which the
            turn is a piece, because it was streamed.
        ok: whether the call succeeded.
        speaker: name of the agent that wrote the text; "" if the log names none.
        partial: whether the turn may be only a part of the model's reply, because logs of this kind
            store a reply as several messages. Adjacent parts are joined later.
        usage: token counts of the reply, as LangChain writes them.
    """

    role: str
    words: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    identity: str = ""
    ok: bool = True
    speaker: str = ""
    partial: bool = False
    usage: Mapping[str, Any] = dataclasses.field(default_factory=dict)


SPEAKER = ("agent", "name", "sender", "source", "author", "speaker", "from", "node")
_TOOL = ("tool", "tool_name", "action", "function")
_ARGUMENTS = (
    *("args", "arguments", "tool_input", "action_input", "input", "parameters", "params"),
    *("kwargs", "query"),
)
_RESULT = ("result", "observation", "tool_output", "output", "response", "returned", "results")
_THOUGHT = ("thought", "thoughts", "reasoning", "rationale", "think")
_TEXT = ("content", "text", "message", "value", "words", "output")
_GEMINI = ("functionCall", "functionResponse", "function_call", "function_response")
_IDENTITY = ("tool_call_id", "call_id", "tool_use_id")
_PIECE = "ModelClientStreamingChunkEvent"
"""Type of an event of AutoGen with a piece of a message, which follows as a whole."""

_MARK = re.compile(
    r"^[*\t ]*(Thought|Action Input|Action|Observation|Final Answer)[*\d\t ]*:", re.M | re.I
)
_STEP = re.compile(
    r"(?:```\n)?(?:Thought:)?(?P<thought>.*?)^Action:(?P<tool>[^\n]+)\n\s*Action Input:"
    r"(?P<arguments>.*?)(?:^Observation:(?P<result>.*))?\Z",
    re.MULTILINE | re.DOTALL,
)
_CALL = ["action", "action input"]
"""What begins the lines of a call that is text, as ReAct has it."""


def first_present(fields: Field, names: Iterable[str]) -> Field:
    """Returns the first of the named fields of an object whose value is not null.

    If there is none, the value of the result is None.
    """
    return next(filter(None, map(fields.get, names)), Field(None))


def turns_of(item: Field) -> list[Turn]:
    """Converts a message of another system to turns, such as a call and its result.

    Raises:
        Malformed: the message has no known shape, lacks something that its shape needs, or has a
            call in its text that cannot be separated from its result.
    """
    return [part for turn in _turns(item) for part in _react(item, turn)]


def _turns(item: Field) -> list[Turn]:
    if isinstance(item.value, list) and len(item.value) == 2:  # LangChain: (action, observation)
        action, result = item.items(f"{item}, part")
        return [*_step(action), Turn("tool", _text(result))]
    if _is_pydantic(item.value):
        return _pydantic(item)
    if "author" in item.mapping() and item.get("actions") and not item.get("content"):
        return []  # an event of ADK that only changes the state
    if "author" in item.mapping() and item.get("partial").value is True:
        return []  # a piece of a message of ADK, which follows as a whole
    item = _unwrapped(item)
    kind, role = item.get("type").value, item.get("role").value
    if isinstance(kind, str) and kind in _ITEMS:
        return _ITEMS[kind](item)
    called = _tool(item) and first_present(item, _ARGUMENTS) and not first_present(item, _IDENTITY)
    if called and first_present(item, _RESULT) and "tool" in (kind, role):  # a call and its result
        return _step(item)
    if role_of(role) == "call":
        return _written_call(item, item["content"])
    if known := role_of(role):
        return _message(item, known, partial=kind == "message")
    has_content = any(key in item.mapping() for key in ("content", "parts", "blocks", "tool_calls"))
    if role is None and has_content and (known := _role_of_type(kind)):
        return _message(item, known)
    if "from" in item.mapping() and "value" in item.mapping():
        return _sharegpt(item)
    if isinstance(kind, str) and (kind.startswith("ToolCall") or kind == _PIECE):
        return _autogen(item, kind)
    return _step(item)


def is_message(value: Any) -> bool:
    """Returns whether a JSON value looks like a message; its fields may still be invalid."""
    if isinstance(value, list):
        return len(value) == 2 and isinstance(value[0], dict) and "tool" in value[0]
    if not isinstance(value, dict) or isinstance(value.get("message"), dict):
        return False
    kind, role = value.get("type"), value.get("role")
    typed = isinstance(kind, str) and (kind in _ITEMS or bool(_role_of_type(kind)))
    spoken = any(name in value for name in SPEAKER) and any(name in value for name in _TEXT)
    called = any(isinstance(value.get(name), str) for name in _TOOL)
    named = typed or isinstance(role, str) or "lc" in value
    return named or spoken or called or _is_pydantic(value)


def _role_of_type(kind: Any) -> str | None:
    """Returns the role of a message, given its type; None for an unknown type, and for a call."""
    role = role_of(kind)
    return None if role == "call" else role


def _unwrapped(item: Field) -> Field:
    """Returns the message inside the wrapper that LangChain or ADK writes around it."""
    value = item.mapping()
    inner = value.get("content")
    if isinstance(inner, dict) and isinstance(inner.get("parts"), list):  # ADK
        agent = value.get("author") if inner.get("role") == "model" else None
        return Field({"name": agent, **inner}, item.name)
    if "lc" in value and "kwargs" in value:
        inner = dict(item["kwargs"].mapping())
        name = value.get("id")
        inner.setdefault("type", name[-1] if isinstance(name, list) and name else None)
        return Field(inner, item.name)
    if isinstance(value.get("data"), dict) and _role_of_type(value.get("type")):
        return Field({"type": value["type"], **value["data"]}, item.name)
    return item


# --- chat messages -------------------------------------------------------------------------


def _message(item: Field, role: str, partial: bool = False) -> list[Turn]:
    """Reads a message of OpenAI, Anthropic, Gemini or LangChain."""
    words, thoughts, calls, results = _parts(item)
    calls = _calls(item) or calls
    speaker = item.get("name").value
    speaker = speaker if isinstance(speaker, str) and role != "tool" else ""
    if role == "tool" and not results:
        failed = item.get("status").value == "error" or item.get("is_error").value
        more = item.get("additional_kwargs")  # LlamaIndex
        identity = first_present(item, _IDENTITY) or first_present(
            more if more else Field({}), _IDENTITY
        )
        return [Turn("tool", words, identity=identity.optional_scalar(), ok=not failed)]
    turns = [Turn("tool", text, identity=i, ok=ok) for i, text, ok in results]
    usage = item.get("usage_metadata").value
    if words or calls or thoughts or not turns:
        reasoning = "\n".join(filter(None, (_reasoning(item), *thoughts)))
        counts = usage if isinstance(usage, dict) else {}
        streamed = item.get("type").value == "AIMessageChunk"
        piece = item.get("id").optional_scalar() if streamed else ""
        own = Turn(role, words, reasoning, calls, piece, True, speaker, partial, counts)
        turns.append(own)
    return turns


def _parts(
    item: Field,
) -> tuple[str, list[str], tuple[Call, ...], list[tuple[str, str, bool]]]:
    """Returns the text, the thoughts, the calls and the results in the content of a message."""
    content = item.get("content")
    content = content or first_present(item, ("parts", "blocks"))  # Gemini, LlamaIndex
    if not isinstance(content.value, list):
        return content.optional_text(), [], (), []
    words, thoughts = list[str](), list[str]()
    calls, results = list[Call](), list[tuple[str, str, bool]]()
    for part in content.items(f"{item}, part"):
        if isinstance(part.value, str):
            words.append(part.value)
            continue
        part = _common_part(part)
        kind = part.get("type").value
        kind = kind or next(filter(part.get, _GEMINI), None)
        if kind is None and part.get("text") and part.get("thought").value is True:  # Gemini
            thoughts.append(part["text"].text())
        elif kind in ("text", "input_text", "output_text") or (kind is None and part.get("text")):
            words.append(part["text"].text())
        elif kind in ("thinking", "reasoning", "redacted_thinking"):
            thought = first_present(part, ("thinking", "reasoning", "text")).optional_text()
            thoughts.append(thought or _summary(part))
        elif kind == "tool_use":
            calls.append((part["id"].scalar(), part["name"].text(), part["input"].value))
        elif kind in ("tool_call", "function_call") and part.get("name"):  # LangChain
            identity = first_present(part, ("call_id", "id")).scalar()
            arguments = _arguments(first_present(part, ("args", "arguments")))
            calls.append((identity, part["name"].text(), arguments))
        elif kind == "tool_result":
            text = _text(part.get("content"))
            results.append((part["tool_use_id"].scalar(), text, not part.get("is_error").value))
        elif kind in ("functionCall", "function_call"):
            call = part[kind]
            calls.append((_gemini_identity(call), call["name"].text(), call.get("args").value))
        elif kind in ("functionResponse", "function_response"):
            results.append((_gemini_identity(part[kind]), *_response(part[kind]["response"])))
        elif kind in ("server_tool_use", "web_search_tool_result"):
            raise Malformed(f"{part} ran at the provider: the log lacks the text of its result")
        else:
            keys = ", ".join(list(part.mapping())[:8])
            typed = f" of the type {kind!r}" if kind else ""
            raise Malformed(f"{part} holds something besides text{typed} (keys {keys})")
    return "\n".join(words), [t for t in thoughts if t.strip()], tuple(calls), results


def _common_part(part: Field) -> Field:
    """Returns a part of Bedrock, Vercel or LlamaIndex in the form of Anthropic; others as is."""
    value, kind = part.mapping(), part.get("type").value
    block = value.get("block_type")
    use, given = value.get("toolUse"), value.get("toolResult")
    if kind == "tool-call":
        arguments = value.get("input", value.get("args"))
        made = {"id": value.get("toolCallId"), "name": value.get("toolName"), "input": arguments}
    elif block == "tool_call":
        made = {"id": value.get("tool_call_id"), "name": value.get("tool_name")}
        made["input"] = _arguments(part["tool_kwargs"])
    elif block == "thinking":
        return Field({"type": "thinking", "thinking": value.get("content")}, part.name)
    elif isinstance(block, str):
        return Field({"type": block, **value}, part.name)
    elif isinstance(use, dict):
        made = {"id": use.get("toolUseId"), "name": use.get("name"), "input": use.get("input")}
    elif kind == "tool-result":
        output, typed = value.get("output", value.get("result")), ""
        if isinstance(output, dict) and {"type", "value"} <= output.keys():
            typed, output = str(output["type"]), output["value"]
        failed = value.get("isError") or typed.startswith("error")
        made = {"tool_use_id": value.get("toolCallId"), "content": output, "is_error": failed}
    elif isinstance(given, dict):
        made = {"tool_use_id": given.get("toolUseId"), "is_error": given.get("status") == "error"}
        content = given.get("content")
        made["content"] = list(map(_typed, content)) if isinstance(content, list) else content
    else:
        return part
    return Field({"type": "tool_use" if "input" in made else "tool_result", **made}, part.name)


def _gemini_identity(call: Field) -> str:
    """Returns the id by which Gemini pairs a call and its result: without one, the function."""
    return first_present(call, ("id", "name")).optional_scalar()


def _response(response: Field) -> tuple[str, bool]:
    """Returns the text of a result of Gemini, and whether the call succeeded."""
    value = response.value if isinstance(response.value, dict) else {}
    for key in ("result", "output", "error"):
        if value.keys() == {key} and isinstance(value[key], str):
            return value[key], key != "error"
    return _text(response), True


def _typed(part: Any) -> Any:
    """Returns a part of a result of Bedrock, text or JSON, as a text with a type; others as is."""
    for key in ("text", "json"):
        if isinstance(part, dict) and key in part:
            return {"type": "text", "text": _text(Field(part[key], key))}
    return part


def _reasoning(message: Field) -> str:
    more = message.get("additional_kwargs").value
    more = more if isinstance(more, dict) else {}
    words = message.get("reasoning_content").value or message.get("reasoning").value
    words = words or more.get("reasoning_content")
    return words.strip() if isinstance(words, str) else ""


def _calls(message: Field) -> tuple[Call, ...]:
    """Returns the calls of a message of OpenAI, in the present or the old form, or of LangChain."""
    if message.get("invalid_tool_calls").value:
        raise Malformed(f"{message} has a call whose arguments are not JSON")
    old, new = message.get("function_call"), message.get("tool_calls")
    if old.value:
        return (_call(old, ""),)
    calls = new.items(f"{message}, call") if new.value else []
    return tuple(
        (call.get("id").optional_scalar(), call["name"].text(), call["args"].value)
        if "args" in call.mapping()
        else _call(call["function"], call["id"].scalar())
        for call in calls
    )


def _call(function: Field, identity: str) -> Call:
    return identity, function["name"].text(), _arguments(function["arguments"])


def _arguments(arguments: Field) -> Any:
    if not isinstance(arguments.value, str):
        return arguments.value
    try:  # some servers write "" for no arguments
        return parse_json(arguments.value or "{}")
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the text of {arguments}: {untrusted.reason(error)}") from error


def _sharegpt(item: Field) -> list[Turn]:
    speaker, value = item["from"].text(), item["value"]
    role = role_of(speaker)
    if role == "call":
        return _written_call(item, value)
    words = value.text()
    if role == "tool":
        return [Turn("tool", words)]
    return [Turn(role or "assistant", words, speaker="" if role else speaker)]


def _written_call(item: Field, text: Field) -> list[Turn]:
    """Reads a message that is nothing but a call, as the JSON text of its name and arguments."""
    made = Field(_arguments(text), str(item))
    return [Turn("assistant", calls=(_call(made, ""),), partial=True)]


def _autogen(item: Field, kind: str) -> list[Turn]:
    """Reads an event of AutoGen that holds calls or results."""
    if kind in ("ToolCallSummaryMessage", _PIECE):  # repeats the results; or is repeated
        return []
    parts = item["content"].items(f"{item}, part")
    if kind == "ToolCallRequestEvent":
        return [Turn("assistant", calls=tuple(_call(part, part["id"].scalar()) for part in parts))]
    return [
        Turn("tool", _text(part["content"]), identity=part["call_id"].scalar(),
             ok=not part.get("is_error").value)
        for part in parts
    ]  # fmt: skip


# --- messages of Pydantic AI ---------------------------------------------------------------


def _is_pydantic(value: Any) -> bool:
    """Returns whether a JSON value is a message of `ModelMessagesTypeAdapter` of Pydantic AI."""
    if not isinstance(value, dict) or value.get("kind") not in ("request", "response"):
        return False
    parts = value.get("parts")
    return isinstance(parts, list) and all(isinstance(p, dict) and "part_kind" in p for p in parts)


def _pydantic(item: Field) -> list[Turn]:
    """Reads a request (of the user and the tools) or a response (of the model)."""
    parts = [_pydantic_part(part) for part in item["parts"].items(f"{item}, part")]
    content = [part for found in parts for part in found]
    if not content:
        return []
    role = "assistant" if item["kind"].value == "response" else "user"
    return _message(
        Field({"content": content, "usage_metadata": item.get("usage").value}, item.name), role
    )


def _pydantic_part(part: Field) -> list[Any]:
    """Returns a part in the form of Anthropic; nothing for a part of the framework.

    A structured output is a call of ``final_result``, whose only field, or else the JSON text of
    whose fields, is the answer.
    """
    kind, content = part["part_kind"].text(), part.get("content")
    name = part.get("tool_name").optional_text()
    identity = part.get("tool_call_id").value
    if kind == "user-prompt":
        return content.value if isinstance(content.value, list) else [content.text()]
    if kind == "text":
        return [content.text()]
    if kind == "thinking":
        return [{"type": "thinking", "thinking": content.optional_text()}]
    if kind == "tool-call":
        arguments = _arguments(part["args"])
        if name == "final_result" or name.startswith("final_result_"):
            name, arguments = "final_answer", {"answer": _output(arguments)}
        return [{"type": "tool_use", "id": identity, "name": name, "input": arguments}]
    if kind == "tool-return" or (kind == "retry-prompt" and name):
        failed = kind == "retry-prompt" or part.get("outcome").value not in (None, "success")
        text = json.dumps(content.value) if isinstance(content.value, list) else _text(content)
        made = {"type": "tool_result", "tool_use_id": identity, "content": text}
        return [{**made, "is_error": failed}]
    if kind in ("system-prompt", "retry-prompt", "retry-feedback"):
        return []
    return [{"type": kind, **part.mapping()}]  # `_parts` refuses it


def _output(arguments: Any) -> Any:
    """Returns the answer in the arguments of a structured output."""
    values = list(arguments.values()) if isinstance(arguments, dict) else [arguments]
    only = values[0] if len(values) == 1 else arguments
    return json.dumps(only, ensure_ascii=False) if isinstance(only, dict | list) else only


# --- ReAct ---------------------------------------------------------------------------------


def _react(item: Field, turn: Turn) -> list[Turn]:
    """Splits a step of ReAct in the text of an agent into thought with call, and result.

    The result may contain marks of steps. A text with further marks is therefore refused, because
    it does not show which of its words are the agent's.
    """
    marks = [mark.lower() for mark in _MARK.findall(turn.words)]
    if turn.role != "assistant" or not marks:
        return [turn]
    called = not turn.calls and {"action", "action input"} <= set(marks)
    if not called and "observation" not in marks:
        own = turn.words.removeprefix("Thought:").strip() if "final answer" in marks else turn.words
        return [dataclasses.replace(turn, words=own)]
    step = None if turn.calls else _STEP.fullmatch(turn.words.strip())
    marks = list(itertools.dropwhile("thought".__eq__, marks))
    single = marks in (_CALL, [*_CALL, "observation"])
    if step is None or not single or "Observation:" in step["arguments"]:
        raise Malformed(
            f"{item} writes a call or its result as text, but is not a single step of ReAct with "
            "'Action:', 'Action Input:' and then 'Observation:'"
        )
    arguments, result = step["arguments"].strip(), (step["result"] or "").strip()
    given = Field(arguments, f"'Action Input' of {item}")
    call = "", step["tool"].strip(), _arguments(given) if arguments[:1] in ("{", "[") else arguments
    made = dataclasses.replace(turn, words=step["thought"].strip(), calls=(call,))
    return [made, Turn("tool", result)] if result else [made]


# --- items of the Responses API ------------------------------------------------------------


def _summary(item: Field) -> str:
    parts = [*(item.get("summary").value or ()), *(item.get("content").value or ())]
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "\n".join(text for text in texts if isinstance(text, str))


def _reasoning_item(item: Field) -> list[Turn]:
    return [Turn("assistant", reasoning=_summary(item), partial=True)]


def _function_call(item: Field) -> list[Turn]:
    call = _call(item, item["call_id"].scalar())
    return [Turn("assistant", calls=(call,), partial=True)]


def _custom_call(item: Field) -> list[Turn]:
    call = item["call_id"].scalar(), item["name"].text(), item["input"].value
    return [Turn("assistant", calls=(call,), partial=True)]


def _shell_call(item: Field) -> list[Turn]:
    call = item["call_id"].scalar(), "shell", item["action"].value
    return [Turn("assistant", calls=(call,), partial=True)]


def _call_output(item: Field) -> list[Turn]:
    return [Turn("tool", _text(item["output"]), identity=first_present(item, _IDENTITY).scalar())]


def _hosted(item: Field) -> list[Turn]:
    """Reads a call that the provider made, which is complete only if the item has its result."""
    kind = item["type"].text()
    result = first_present(item, ("output", "outputs", "results"))
    if not result:
        raise Malformed(f"{item}, a {kind}, ran at the provider: the log lacks its result")
    if kind == "code_interpreter_call":
        name, arguments = "code_interpreter", {"code": item["code"].value}
    elif kind == "file_search_call":
        name, arguments = "file_search", {"queries": item["queries"].value}
    else:
        name, arguments = item["name"].text(), _arguments(item["arguments"])
    call, identity = (item.get("id").optional_scalar(), name, arguments), item.get("id")
    return [
        Turn("assistant", calls=(call,), partial=True),
        Turn("tool", _text(result), identity=identity.optional_scalar()),
    ]


_ITEMS: Mapping[str, Callable[[Field], list[Turn]]] = {
    "reasoning": _reasoning_item,
    "ghost_snapshot": lambda item: [],  # what Codex notes to undo its changes
    "function_call": _function_call,
    "custom_tool_call": _custom_call,
    **dict.fromkeys(("local_shell_call", "shell_call"), _shell_call),
    **dict.fromkeys(
        ("function_call_output", "custom_tool_call_output", "local_shell_call_output"),
        _call_output,
    ),
    **dict.fromkeys(
        ("web_search_call", "file_search_call", "computer_call", "code_interpreter_call"), _hosted
    ),
    **dict.fromkeys(("mcp_call", "image_generation_call"), _hosted),
}


# --- steps with plain fields ---------------------------------------------------------------


def _step(item: Field) -> list[Turn]:
    """Reads a step of a system that writes its own names for speaker, tool, text and result."""
    speaker = next((s.value for s in map(item.get, SPEAKER) if isinstance(s.value, str)), "")
    role = item.get("role").value
    speaker = role if isinstance(role, str) else speaker
    tool = _tool(item)
    identity = first_present(item, _IDENTITY).optional_scalar()
    thought = first_present(item, _THOUGHT).optional_text() or _log(item)
    result = first_present(item, _RESULT)
    kind = item.get("type").value or item.get("event").value or item.get("kind").value
    returns = isinstance(kind, str) and ("result" in kind or "observation" in kind)
    if tool and not returns:
        content = item.get("content").value or item.get("text").value
        words = content if isinstance(content, str) and content != result.value else ""
        arguments = first_present(item, _ARGUMENTS)
        call = identity, tool, {} if arguments.value is None else arguments.value
        turns = [Turn("assistant", words, thought, (call,), "", True, speaker)]
        if result:
            ok = not (item.get("error").value or item.get("is_error").value)
            turns.append(Turn("tool", _text(result), identity=identity, ok=ok))
        return turns
    known = _role_of_type(speaker)
    if returns or "tool" in (known, _role_of_type(kind)):
        return [Turn("tool", _text(first_present(item, (*_RESULT, *_TEXT))), identity=identity)]
    text = next((t.value for t in map(item.get, _TEXT) if isinstance(t.value, str)), "")
    if not (text or thought):
        raise Malformed(f"{item} lacks 'role'" if not speaker else f"{item} lacks 'content'")
    if not speaker and not kind and not thought:
        raise Malformed(f"{item} lacks 'role'")
    return [Turn(known or "assistant", text, thought, speaker="" if known else speaker)]


def _tool(item: Field) -> str:
    """Returns the name of the tool that a step calls; "" if it names none."""
    return next((t.value for t in map(item.get, _TOOL) if isinstance(t.value, str)), "")


def _log(item: Field) -> str:
    """Returns the thought in the text that an agent of LangChain wrote before a call."""
    log = item.get("log").value
    if not isinstance(log, str) or log.lstrip().startswith("Invoking:"):
        return ""
    return log.partition("Action:")[0].strip().removeprefix("Thought:").strip()


def _text(field: Field) -> str:
    """Returns a result as text: text, parts of text, or another JSON value."""
    value = field.value
    if value is None or isinstance(value, str):
        return value or ""
    parts = value if isinstance(value, list) else []
    if parts and all(isinstance(part, dict) and "type" in part for part in parts):
        texts = [part.get("text", part.get("logs")) for part in parts]
        if not all(isinstance(text, str) for text in texts):
            raise Malformed(f"{field} holds something besides text")
        return "\n".join(texts)
    return json.dumps(value, ensure_ascii=False)
