"""Converts conversations with function calls, in the form of OpenAI's API, to records.

    {"tools": [{"type": "function", "function": {"name": "multiply", "parameters": {...}}}],
     "messages": [{"role": "user", "content": "What is 12 * 34?"},
                  {"role": "assistant", "tool_calls": [{"function": {"name": "multiply", ...}}]},
                  {"role": "tool", "content": "408"},
                  {"role": "assistant", "content": "It is 408."}]}

The functions may have any name, a turn may have several calls, and the user may speak again. The
records have no tags of agents: the policy learns the conversation in the chat template of its
model.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from coa_jax.data.text_parts import ENVIRONMENT, POLICY, Parts, Unusable
from coa_jax.protocol import get_protocol, hermes

PROTOCOL = "turns:hermes"
"""Protocol of these records: no rules, and calls as JSON in ``<tool_call>``."""


class Turn(NamedTuple):
    """A turn of a conversation.

    Attributes:
        role: ``system``, ``user``, ``assistant``, ``tool``, or ``call`` for a turn that is nothing
            but a call, as in ShareGPT data.
        text: text of the turn; usually JSON if the role is ``call``.
        calls: function calls of an ``assistant`` turn, in the form of OpenAI; None if there are
            none.
        unlearned: whether the data file marks the turn as excluded from training.
        identity: id of the call whose result the turn is; "" if the file has no ids.
    """

    role: str
    text: str
    calls: Any = None
    unlearned: bool = False
    identity: str = ""


def names_of(turns: Sequence[Turn]) -> set[str]:
    """Returns the names of the functions that a conversation calls.

    Malformed calls are left out. The tag ``<tool_call>`` in the text of a turn gives the name
    ``tool_call``, because the text is not parsed.
    """
    texts = (turn.text for turn in turns if turn.role == "assistant")
    names = {"tool_call"} if any("<tool_call>" in text for text in texts) else set[str]()
    for turn in turns:
        listed = turn.calls if turn.role == "assistant" else None
        if turn.role == "call":
            with contextlib.suppress(Unusable):
                listed = json_of(turn.text, "")
        for each in listed if isinstance(listed, list) else [listed]:
            function = each.get("function", each) if isinstance(each, dict) else {}
            if isinstance(function, dict) and isinstance(function.get("name"), str):
                names.add(function["name"])
    return names


def tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the JSON schemas in the column ``tools``; [] without this column.

    The column is a list, or such a list as JSON text. An item is a function, or an object with the
    function under ``function``, as in OpenAI's API. Fields that are null are left out of a list,
    see `without_nulls`.

    Raises:
        Unusable: the column has no such list.
    """
    listed = without_nulls(row.get("tools")) or []
    if isinstance(listed, str):
        listed = json_of(listed, "the column tools is no JSON")
    if not isinstance(listed, list):
        raise Unusable("the column tools is no list of functions")
    functions = [tool.get("function", tool) if isinstance(tool, dict) else {} for tool in listed]
    if not all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in functions):
        raise Unusable("the column tools has a function without a name")
    return [{"type": "function", "function": function} for function in functions]


def without_nulls(value: Any) -> Any:
    """Returns a JSON value without fields that are null.

    Arrow, the form of parquet files and of ``datasets``, gives all objects of a column the fields
    of each of them, so that a call has the arguments of all tools, which are null.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def parts_of_calls(turns: Sequence[Turn]) -> Parts:
    """Converts the turns after the first user message to the parts of a record.

    The chat template shows results without the ids of their calls, so they get the order of the
    calls, as in rollouts.

    Raises:
        Unusable: a turn is excluded from training, the turns have an order that the chat template
            cannot show, or a call among several has no result.
    """
    if any(turn.unlearned for turn in turns):
        raise Unusable("a turn of the assistant is marked as excluded from training")
    protocol, parts = get_protocol(PROTOCOL), list[tuple[str, str]]()
    assert protocol.format is not None
    head, tail = protocol.format.head, protocol.format.tail
    kinds = [(_KINDS.get(turn.role, turn.role), turn) for turn in turns]
    before, made = "user", list[str]()
    for kind, group in itertools.groupby(kinds, key=lambda pair: pair[0]):
        run = [turn for _, turn in group]
        if kind == "system":
            raise Unusable("a system message is in the middle of the conversation")
        if (before, kind) not in _ORDER:
            raise Unusable(f"a turn of the role {kind} follows one of the role {before}")
        if kind == POLICY:
            texts = (text for turn in run for text in (*_content(turn), *_call_texts(turn)))
            parts.append((POLICY, "\n".join(texts)))
            made = [identity for turn in run for identity in _identities(turn)]
        elif kind == "tool":
            ordered = _in_order(run, made)
            quoted = (protocol.format.quote(text) for t in ordered for text in _results(t.text))
            parts += [(ENVIRONMENT, f"{head}{text}{tail}") for text in quoted]
        else:
            parts.append((ENVIRONMENT, "\n".join(turn.text for turn in run)))
        before = kind
    while parts and parts[-1][0] == ENVIRONMENT:
        parts.pop()  # nothing follows that the policy could learn
    return tuple(parts)


def _identities(turn: Turn) -> list[str]:
    calls = turn.calls if isinstance(turn.calls, list) else []
    return [str(call.get("id")) for call in calls if isinstance(call, dict)]


def _in_order(results: Sequence[Turn], made: Sequence[str]) -> Sequence[Turn]:
    """Returns results in the order of their calls; results without ids keep their order.

    Args:
        results: the results of a turn.
        made: ids of the calls of the turn.
    """
    named = {turn.identity for turn in results}
    if not named <= {*made}:
        return results
    if named < {*made}:
        raise Unusable("a call has no result")
    return sorted(results, key=lambda turn: made.index(turn.identity))


_RESULT = re.compile(r"<tool_response>(.*?)</tool_response>", re.DOTALL)
_RESULTS = re.compile(rf"\s*(?:{_RESULT.pattern}\s*)+", re.DOTALL)
_KINDS = {"assistant": POLICY, "call": POLICY}
_ORDER = {("user", POLICY), ("tool", POLICY), (POLICY, "tool"), (POLICY, "user")}
"""Pairs of kinds of turns that may follow each other."""


def _results(text: str) -> list[str]:
    """Returns the results in the text of a tool's turn, without tags around them."""
    if not _RESULTS.fullmatch(text):
        return [text]
    return [match[1].strip() for match in _RESULT.finditer(text)]


def _content(turn: Turn) -> list[str]:
    return [turn.text] if turn.role == "assistant" and turn.text else []


def _call_texts(turn: Turn) -> list[str]:
    return [hermes.call_text(name, arguments) for name, arguments in _calls(turn)]


def _calls(turn: Turn) -> list[tuple[str, dict[str, Any]]]:
    """Returns (name, arguments) of each call of a turn."""
    if turn.role == "call":
        listed = json_of(turn.text, "a function call is not JSON")
        return [_call(each) for each in (listed if isinstance(listed, list) else [listed])]
    if turn.role != "assistant" or not turn.calls:
        return []
    if not isinstance(turn.calls, list) or not all(isinstance(each, dict) for each in turn.calls):
        raise Unusable("tool_calls is no list of calls")
    return [_call(without_nulls(each.get("function", each))) for each in turn.calls]


def _call(call: Any) -> tuple[str, dict[str, Any]]:
    name = call.get("name") if isinstance(call, dict) else None
    arguments = call.get("arguments", {}) if isinstance(call, dict) else None
    if isinstance(arguments, str):
        arguments = json_of(arguments or "{}", "the arguments of a call are not JSON")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise Unusable("a call has no name, or its arguments are no JSON object")
    return name, arguments


def json_of(text: str, problem: str) -> Any:
    """Parses a text of a row; raises `Unusable` with the problem if the text is not JSON."""
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        raise Unusable(problem) from None
