"""Converts rows of all supported formats to `DistilledRecord`; docs/data.md shows the formats.

The keys of a row determine its format. A value with a wrong type raises `TypeError` or
`ValueError`, because the file is then damaged. `Unusable` means that the file is intact, but that
this row cannot be used for training.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from coa_jax.data.atif import chat_of, from_atif, is_atif, is_own
from coa_jax.data.function_calls import (
    PROTOCOL,
    Turn,
    json_of,
    names_of,
    parts_of_calls,
    tools_of,
    without_nulls,
)
from coa_jax.data.names import GOLD, role_of
from coa_jax.data.text_parts import (
    ENVIRONMENT,
    POLICY,
    Parts,
    Untagged,
    Unusable,
    any_protocol,
    infer_protocol,
    parts_of_turns,
)
from coa_jax.data.trajectory import Author, DistilledRecord, Trajectory
from coa_jax.data.verdicts import failure_of
from coa_jax.files import jsonl
from coa_jax.protocol import Protocol, format_code, get_protocol, parse_code
from coa_jax.protocol.spec import made_protocols

_CONVERSATIONS = ("conversations", "messages", "conversation")
_USER = ("instruction", "prompt", "query")
_REPLY = ("output", "response", "completion")
_POLICY = ("assistant", "call")
_CLOSING = re.compile(r"</([a-z_]+)>\s*\Z")
_QUESTION = re.compile(r"(?:\A|\n)[ \t]*(?:Question|Task)[ \t]*:[ \t]*\n?")


class ConvertedRow(NamedTuple):
    """A record that was converted from a row.

    Attributes:
        record: the row as a record of this project.
        tags: tags from which the protocol was inferred; () if the row itself or the
            caller names the protocol.
    """

    record: DistilledRecord
    tags: tuple[str, ...] = ()


def convert_row(value: Any, name: str, protocol: str = "") -> ConvertedRow:
    """Converts a row of any supported format to a record.

    Args:
        value: the JSON value of the row.
        name: id of the record if the row has no id.
        protocol: protocol of the record if the row names no protocol; "" infers the protocol from
            the tags of the row.

    Raises:
        KeyError, TypeError, ValueError: the row has an unknown format, or is damaged.
        Unusable: the row is intact, but cannot be used for training, see `Unusable`.
        UserError: the protocol is unknown.
    """
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, found {type(value).__name__}")
    if is_atif(value):
        return _of_atif(value, name, protocol)
    if {"authors", "texts"} <= value.keys():
        return ConvertedRow(_checked_record(from_tfds(value)))
    conversation = _first_key(value, _CONVERSATIONS)
    user_key, replied = _first_key(value, _USER), _first_key(value, _REPLY)
    pair = None not in (user_key and value[user_key], replied and value[replied])
    if conversation is not None and (value[conversation] is not None or not pair):
        return _of_messages(value, value[conversation], name, protocol)
    if isinstance(value.get("prompt"), list) and replied is not None:
        reply = value[replied]
        last = reply if isinstance(reply, list) else [{"role": "assistant", "content": reply}]
        return _of_messages(value, value["prompt"] + last, name, protocol)
    if user_key is not None and replied is not None:
        return _of_alpaca(value, user_key, replied, name, protocol)
    if "parts" in value:
        optional = ("metadata", "prompt", "context")  # tables have null for a missing value
        row = {k: v for k, v in value.items() if v is not None or k not in optional}
        return ConvertedRow(_checked_record(DistilledRecord.from_json(row)))
    if {"tokens", "author", "task_id"} <= value.keys():
        raise ValueError("a sampled trajectory, not a record; learn from it with coa-jax rft")
    if "question" in value:
        raise ValueError("a question without 'parts', which is a task and not a record")
    keys = ", ".join(repr(key)[:40] for key in list(value)[:6]) or "none"
    raise ValueError(
        f"no record of a known form (its keys: {keys}); known are question with parts, messages, "
        "conversations, and instruction with output"
    )


def _first_key(value: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    """Returns the first of some keys whose value is not null, or else the first key that exists.

    The result is None if the row has none of the keys.
    """
    there = [key for key in keys if key in value]
    return next((key for key in there if value[key] is not None), next(iter(there), None))


def _checked_record(record: DistilledRecord) -> DistilledRecord:
    get_protocol(record.protocol)
    jsonl.dumps(record.metadata)  # metadata must be valid JSON
    return record


def from_tfds(example: Mapping[str, Any]) -> DistilledRecord:
    """Converts an element of a TFDS data set to a record.

    ``coa-jax export-data`` writes such data sets.
    """

    def text(value: Any) -> str:
        return value.decode() if isinstance(value, bytes) else str(value)

    authors, texts = map(text, example["authors"]), map(text, example["texts"])
    return DistilledRecord(
        **{name: text(example[name]) for name in ("id", "question", "protocol", "answer")},
        gold=tuple(map(text, example["gold"])),
        parts=tuple(zip(authors, texts, strict=True)),
        metadata=jsonl.loads(text(example["metadata"])),
        prompt=text(example.get("prompt", "")),
        context=_pairs(jsonl.loads(text(example.get("context", "[]"))), "context"),
    )


# --- forms ---------------------------------------------------------------------------------


def _of_alpaca(
    value: dict[str, Any], user_key: str, replied: str, name: str, protocol: str
) -> ConvertedRow:
    """Converts an alpaca row, whose ``instruction`` and ``input`` form the user message."""
    more = _text(value, "input") if user_key == "instruction" else ""
    prompt = "\n".join(filter(None, (_text(value, user_key), more)))
    output, system = _text(value, replied), _text(value, "system")
    context = [("system", system)] if system else []
    for user, assistant in _pairs(value.get("history") or [], "history"):
        context += [("user", user), ("assistant", assistant)]
    exact = None if value.get("policy") is None else _spans(value["policy"], output)
    turns = ((POLICY, output),)
    try:
        return _assemble(value, tuple(context), prompt, turns, exact, name, protocol, more)
    except Untagged:
        if exact or value.get("parts") is not None:
            raise
        chat = [*context, ("user", prompt), ("assistant", output)]
        return ConvertedRow(_of_function_calls(value, [Turn(*turn) for turn in chat], name))


def _of_atif(document: dict[str, Any], name: str, protocol: str) -> ConvertedRow:
    """Converts an ATIF document; subagents are left out.

    The metadata of the record say how the trajectory ended and, if it is wrong, why.
    """
    trajectory = from_atif(document)
    facts: dict[str, Any] = {"stop_reason": trajectory.stop_reason.value}
    if trajectory.reward is not None:
        facts["reward"] = trajectory.reward.value
    if failure := failure_of(trajectory):
        facts["failure"] = failure
    if not is_own(document):
        row = chat_of(document)
        made = _of_messages(row, row["messages"], name, protocol)
        facts["agent"] = trajectory.metadata["agent"]
        metadata = {**facts, **made.record.metadata}
        return ConvertedRow(dataclasses.replace(made.record, metadata=metadata), made.tags)
    record = DistilledRecord(
        id=f"{trajectory.task_id}/{trajectory.sample_id}",
        question=trajectory.question,
        protocol=trajectory.protocol,
        gold=trajectory.gold,
        parts=_parts_of_spans(trajectory),
        answer=trajectory.answer or "",
        metadata={**trajectory.metadata, **facts},
    )
    return ConvertedRow(_checked_record(record))


def _parts_of_spans(trajectory: Trajectory) -> Parts:
    """Joins the spans of each author in turn; the chat template of a model may frame results."""
    form, parts = get_protocol(trajectory.protocol).format, list[tuple[str, str]]()
    groups = itertools.groupby(trajectory.segments, lambda span: span.author == Author.POLICY)
    for by_policy, spans in groups:
        if by_policy:
            parts.append((POLICY, "".join(span.text for span in spans)))
        elif form is None:
            parts += [(ENVIRONMENT, span.text) for span in spans]
        else:
            parts += [(ENVIRONMENT, f"{form.head}{span.body}{form.tail}") for span in spans]
    return tuple(parts)


def _of_messages(value: dict[str, Any], listed: Any, name: str, protocol: str) -> ConvertedRow:
    """Converts a row with messages, which have the keys of ShareGPT or of OpenAI."""
    if not isinstance(listed, list):
        raise TypeError(f"the conversation cannot be {type(listed).__name__}")
    turns = _turns(listed)
    if value.get("system") and (not turns or turns[0].role != "system"):
        turns.insert(0, Turn("system", _text(value, "system")))
    protocol_name = _text(value, "protocol") or protocol
    if protocol_name == PROTOCOL or (not protocol_name and _has_functions(value, turns)):
        return ConvertedRow(_of_function_calls(value, turns, name))
    # The trajectory begins after the last user message that is not a tagged observation.
    users = [turn.role == "user" and not _is_observation(turn.text) for turn in turns]
    if True not in users:
        raise Unusable("there is no user message")
    end = len(users) - users[::-1].index(True)
    start = end
    while start and users[start - 1]:  # consecutive user messages form one message
        start -= 1
    before, question_turns, after = turns[:start], turns[start:end], turns[end:]
    if any(turn.role in ("tool", "call") for turn in before):
        raise Unusable("the user speaks again after a tool: not the run of a single question")
    if any(turn.unlearned for turn in after if turn.role in _POLICY):
        raise Unusable(
            "a turn of the assistant after the question is marked as excluded from training"
        )
    if any(turn.role == "system" for turn in after):
        raise Unusable("a system message is in the middle of the trajectory")
    rules = get_protocol(protocol_name) if protocol_name else any_protocol()
    context = tuple((turn.role, turn.text) for turn in before if turn.text or turn.role != "system")
    prompt = "\n".join(turn.text for turn in question_turns)
    reply = tuple(
        (POLICY if turn.role in _POLICY else ENVIRONMENT, _turn_text(rules, turn)) for turn in after
    )
    try:
        return _assemble(value, context, prompt, reply, None, name, protocol)
    except Untagged:
        if value.get("parts") is not None or {turn.role for turn in turns} & {"tool", "call"}:
            raise
        return ConvertedRow(_of_function_calls(value, turns, name))


def _turns(listed: list[Any]) -> list[Turn]:
    """Reads the messages of a conversation."""
    if any(isinstance(turn, dict) and {"sender", "kind"} <= turn.keys() for turn in listed):
        raise ValueError(
            "a message log of agents, not a record; make records of it with coa-jax distill and "
            "configs/distill/traces.py"
        )
    turns: list[Turn] = []
    for number, turn in enumerate(listed, start=1):
        if not isinstance(turn, dict):
            raise TypeError(f"turn {number} cannot be {type(turn).__name__}")
        source_role = turn.get("role", turn.get("from"))
        role = role_of(source_role)
        if role is None:
            raise Unusable(f"turn {number} has the unknown role {str(source_role)[:40]!r}")
        text = _content(turn["content"] if "content" in turn else turn.get("value"), number)
        if role == "assistant":
            text = _with_thought(turn, text)
        elif role == "user" and turns and _ends_with_call(turns[-1]):
            role = "tool"  # the reply to a call is what the tool returned, whoever hands it over
        # A mark excludes a turn from training: OpenAI's weight, or the loss of other trainers.
        marked = any(turn.get(key) == 0 for key in ("weight", "loss", "loss_scale", "train"))
        identity = str(turn.get("tool_call_id") or "")
        turns.append(Turn(role, text, turn.get("tool_calls"), marked, identity))
    return turns


def _has_functions(value: Mapping[str, Any], turns: Sequence[Turn]) -> bool:
    """Returns whether a conversation has functions that are no tools of a protocol.

    In a conversation with the tags of a protocol, the column ``tools`` is ignored. A function with
    a JSON schema stays a function if a run makes a protocol of it, so that all commands read a
    conversation in the same way.
    """
    protocol, called = any_protocol(), names_of(turns)
    tags = [f"</{role}>" for role in (*protocol.tools, protocol.answer)]
    if not any(tag in turn.text for turn in turns if turn.role in _POLICY for tag in tags):
        called |= {tool["function"]["name"] for tool in tools_of(value)}
    functions = {name for made in made_protocols() for name in made.schemas}
    return not called <= set(protocol.tools) - functions


def _of_function_calls(
    value: Mapping[str, Any], turns: Sequence[Turn], name: str
) -> DistilledRecord:
    """Converts a conversation with or without function calls.

    The first user message is the question.
    """
    roles = [turn.role for turn in turns]
    if "user" not in roles:
        raise Unusable("there is no user message")
    start = end = roles.index("user")
    while roles[end : end + 1] == ["user"]:  # consecutive user messages form one message
        end += 1
    before, question = turns[:start], "\n".join(turn.text for turn in turns[start:end])
    if {turn.role for turn in before} & {"tool", "call"}:
        raise Unusable("a tool speaks before the user")
    parts = parts_of_calls(turns[end:])
    if not parts:
        raise Unusable("the assistant says nothing")
    answer = "" if "<tool_call>" in parts[-1][1] else parts[-1][1]
    return DistilledRecord(
        id=_identity(value, name),
        question=question,
        protocol=PROTOCOL,
        gold=_gold(value),
        parts=parts,
        answer=answer,
        # A system message with the tools has them in place of the chat template.
        metadata={"tools": [] if any("<tools>" in t.text for t in before) else tools_of(value)},
        prompt=question,
        context=tuple((turn.role, turn.text) for turn in before if turn.text),
    )


def _with_thought(turn: Mapping[str, Any], text: str) -> str:
    """Returns an assistant's text after the reasoning that some servers give in its own field."""
    for key in ("reasoning_content", "reasoning"):
        thought = turn.get(key)
        has_thought = isinstance(thought, str) and thought.strip()
        if has_thought and not text.lstrip().startswith("<think>"):
            return f"<think>{thought}</think>\n{text}".rstrip()
    return text


def _ends_with_call(turn: Turn) -> bool:
    """Returns whether a turn ends with the tag of a call, whose reply is an observation."""
    tag = _CLOSING.search(turn.text) if turn.role in _POLICY else None
    return tag is not None and tag[1] in any_protocol().tools


def _is_observation(text: str) -> bool:
    """Returns whether a user message is a tagged observation."""
    return text.lstrip().startswith("<observation>") and text.rstrip().endswith("</observation>")


def _turn_text(rules: Protocol, turn: Turn) -> str:
    """Returns the text of a turn of the trajectory. Tool calls are written as tags."""
    text, calls = turn.text, turn.calls
    if turn.role == "call" and text.lstrip().startswith("{"):
        return _call_tag(rules, json_of(text, "a function call is not JSON"))
    if turn.role != "assistant" or not calls:
        return text
    if not isinstance(calls, list) or len(calls) != 1 or not isinstance(calls[0], dict):
        raise Unusable("a turn calls several tools at once, which no protocol can express")
    call = without_nulls(calls[0].get("function"))
    return "\n".join(filter(None, (text, _call_tag(rules, call))))


def _call_tag(rules: Protocol, call: Any) -> str:
    """Writes a call ``{"name": ..., "arguments": ...}`` as the tag of the tool with a body."""
    name = call.get("name") if isinstance(call, dict) else None
    arguments = call.get("arguments") if isinstance(call, dict) else None
    if isinstance(arguments, str) and arguments.lstrip().startswith("{"):
        arguments = json_of(arguments, "the arguments of a call are not JSON")
    if isinstance(arguments, dict) and len(arguments) == 1:
        (arguments,) = arguments.values()
    if isinstance(arguments, list) and all(isinstance(item, str) for item in arguments):
        arguments = " | ".join(arguments)
    if name not in rules.tools or not isinstance(arguments, str):
        raise Unusable(
            f"a call of {str(name)[:40]!r} has no tag with one body; coa-jax distill with "
            "configs/distill/traces.py converts logs of function calls"
        )
    bare = rules.form_of(name) == "code" and parse_code(arguments) is None
    body = format_code(arguments) if bare else arguments
    return f"<{name}>{body}</{name}>"


# --- shared parts of all forms ------------------------------------------------------------------


def _assemble(
    value: Mapping[str, Any],
    context: Parts,
    prompt: str,
    turns: Parts,
    exact: Parts | None,
    name: str,
    protocol: str,
    question: str = "",
) -> ConvertedRow:
    """Builds the record of a conversation.

    Args:
        value: the row.
        context: (role, text) of each message before the user message.
        prompt: the user message.
        turns: (author, text) of each message after the user message.
        exact: (author, text) of each part of the trajectory, if the row contains the authors; else
            None.
        name: id of the record if the row has no id.
        protocol: protocol of the record if the row names no protocol.
        question: the question, used if the user message does not mark its question with
            ``Question:`` or ``Task:``.
    """
    mark = _QUESTION.search(prompt)
    if mark is not None and prompt[mark.end() :].strip():
        begin, question = mark.start(), prompt[mark.end() :].strip()
    else:
        question = question.strip() or prompt.strip()
        begin = len(prompt) - len(question) if question != prompt.strip() else 0
    if isinstance(value.get("question"), str):
        question = value["question"]
    if value.get("parts") is not None:
        exact = _parts(value["parts"])
    text = "".join(text for _, text in exact or turns)
    if not text.strip():
        raise Unusable("the assistant says nothing")
    protocol_name, tags = _text(value, "protocol") or protocol, tuple[str, ...]()
    if not protocol_name:
        instructions = "\n".join([*(text for _, text in context), prompt[:begin]])
        policy_text = "\n".join(text for author, text in exact or turns if author == POLICY)
        protocol_name, tags = infer_protocol(policy_text, instructions)
    rules = get_protocol(protocol_name)
    parts = parts_of_turns(rules, turns) if exact is None else exact
    record = DistilledRecord(
        id=_identity(value, name),
        question=question,
        protocol=protocol_name,
        gold=_gold(value),
        parts=parts,
        answer=_answer(rules, parts),
        prompt=prompt,
        context=context,
    )
    return ConvertedRow(record, tags)


def _identity(value: Mapping[str, Any], name: str) -> str:
    identity = value.get("id", value.get("task_id"))
    return str(identity) if isinstance(identity, str | int) else name


def _answer(rules: Protocol, parts: Parts) -> str:
    policy_text = "".join(text for author, text in parts if author == POLICY)
    _, opened, body = policy_text.rpartition(f"<{rules.answer}>")
    body, closed, _ = body.partition(f"</{rules.answer}>")
    return body.strip() if opened and closed else ""


def _gold(value: Mapping[str, Any]) -> tuple[str, ...]:
    gold: Any = next((value[key] for key in GOLD if value.get(key) is not None), [])
    answers = gold if isinstance(gold, list) else [gold]
    if not all(isinstance(a, str | int | float) and not isinstance(a, bool) for a in answers):
        raise TypeError("an accepted answer is neither a string nor a number")
    return tuple(map(str, answers))


def _text(value: Mapping[str, Any], key: str) -> str:
    return _string(value.get(key), f"the field {key!r}")


def _string(value: Any, name: str) -> str:
    """Returns a string; "" for null."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name} cannot be {type(value).__name__}")
    return value or ""


def _content(content: Any, number: int) -> str:
    """Returns the text of a message. The content may be a string or OpenAI's list of parts."""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise Unusable(f"turn {number} holds something other than text")
        return "\n".join(map(str, parts))
    return _string(content, f"the text of turn {number}")


def _pairs(value: Any, key: str) -> Parts:
    pairs = value if isinstance(value, list) else None
    if pairs is None or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
        for pair in pairs
    ):
        raise TypeError(f"the field {key!r} must be a list of pairs of texts")
    return tuple((first, second) for first, second in pairs)


def _parts(value: Any) -> Parts:
    """Reads the parts of a record from a list of ``{"author", "text"}`` or ``[author, text]``."""
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        value = [[part.get("author"), part.get("text")] for part in value]
    parts = _pairs(value, "parts")
    if not {author for author, _ in parts} <= {POLICY, ENVIRONMENT}:
        raise ValueError("the author of a part is 'policy' or 'environment'")
    return parts


def _spans(value: Any, output: str) -> Parts:
    """Splits a text into parts, given the character ranges [start, end) that the policy wrote."""
    spans: list[Any] = value if isinstance(value, list) else [None]
    valid = all(isinstance(s, list) and [type(n) for n in s] == [int, int] for s in spans)
    numbers = [number for span in spans for number in span] if valid else [-1]
    if numbers != sorted(numbers) or any(not 0 <= n <= len(output) for n in numbers):
        raise ValueError("the field 'policy' must be a list of ascending [start, end] in 'output'")
    parts: list[tuple[str, str]] = []
    at = 0
    for start, end in [*spans, [len(output), len(output)]]:
        if at < start:
            parts.append((ENVIRONMENT, output[at:start]))
        if start < end:
            parts.append((POLICY, output[start:end]))
        at = end
    return tuple(parts)
