"""Actions and observations of openenv servers as text: JSON by schema, and back."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_LONG = 200
"""Texts of more characters are not repeated, see `read_observation`."""
_FENCED = re.compile(r"```\w*\n(.*?)\n?```", re.DOTALL)
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


class UnreadableError(Exception):
    """A turn of the policy is not an action; the message is for the policy."""


@dataclasses.dataclass(frozen=True)
class Actions:
    """How turns of the policy become actions.

    Attributes:
        field: the field that a turn fills in; "" if a turn is a JSON object.
        kinds: schema of each field.
        tools: tools that an action calls, with ``name``, ``description`` and ``input_schema``.
    """

    field: str
    kinds: Mapping[str, Mapping[str, Any]]
    tools: tuple[Mapping[str, Any], ...] = ()

    @staticmethod
    def are_calls(schema: Mapping[str, Any]) -> bool:
        """Whether a schema of actions describes calls of tools (of the server's MCP server)."""
        kind = schema.get("properties", {}).get("type", {})
        generic = schema.get("title") == "Action" and schema["properties"].keys() <= {"metadata"}
        return kind.get("const") in ("call_tool", "list_tools") or generic

    @classmethod
    def of(
        cls, schema: Mapping[str, Any], field: str, tools: Sequence[Mapping[str, Any]]
    ) -> Actions:
        """Reads a schema.

        Args:
            schema: JSON schema of an action.
            field: the field that a turn fills in; "" for the only one, or the only required one.
            tools: tools of the server, if actions call tools.

        Raises:
            KeyError: there is no such field.
        """
        if tools:
            return cls("", {}, tuple(tools))
        defined = schema.get("$defs", {})
        kinds = {
            name: _resolved(kind, defined)
            for name, kind in schema.get("properties", {}).items()
            if name != "metadata"
        }
        if field and field not in kinds:
            raise KeyError(f"an action has no field {field!r}; there are {', '.join(kinds)}")
        required = [name for name in schema.get("required", ()) if name in kinds]
        for alone in (required, list(kinds)):
            field = field or (alone[0] if len(alone) == 1 else "")
        return cls(field, kinds)

    def told(self) -> str:
        """Tells the policy how to act."""
        if self.tools:
            described = (
                {"name": t["name"], "description": t.get("description", ""),
                 "parameters": t.get("input_schema", {})}
                for t in self.tools
            )  # fmt: skip
            listed = "\n".join(json.dumps(each, ensure_ascii=False) for each in described)
            return (
                'Each turn calls one tool by a JSON object {"name": ..., "arguments": {...}}. '
                f"The tools are:\n{listed}"
            )
        if not self.field:
            listed = "\n".join(f"- {name}: {_shown(kind)}" for name, kind in self.kinds.items())
            return f"Each turn is an action: a JSON object with the fields\n{listed}"
        kind = self.kinds[self.field]
        if _is_text(kind):
            about = kind.get("description", "").rstrip(".")
            return f"Your whole turn is the {self.field}{about and f' ({about})'}."
        return f"Name the {self.field} in each turn: {_shown(kind)}."

    def read(self, turn: str) -> dict[str, Any]:
        """Turns a turn of the policy into an action.

        Thinking up to ``</think>`` is no part of the action, nor is the fence of a code block.

        Raises:
            UnreadableError: the turn has no action.
        """
        text = turn.rpartition("</think>")[2].strip()
        if fenced := _FENCED.fullmatch(text):
            text = fenced[1]
        if self.tools:
            found = _object(text)
            name, arguments = found.get("name", found.get("tool_name")), found.get("arguments", {})
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise UnreadableError('call a tool by {"name": ..., "arguments": {...}}')
            return {"type": "call_tool", "tool_name": name, "arguments": arguments}
        if not self.field:
            return _object(text)
        kind = self.kinds[self.field]
        return {self.field: text if _is_text(kind) else _value(text, kind, self.field)}


def _resolved(kind: Mapping[str, Any], defined: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follows a reference, and drops the alternative null."""
    if "$ref" in kind:
        return {**defined.get(kind["$ref"].rpartition("/")[2], {}), **kind}
    real = [each for each in kind.get("anyOf", ()) if each.get("type") != "null"]
    return {**_resolved(real[0], defined), **kind} if len(real) == 1 else kind


def _is_text(kind: Mapping[str, Any]) -> bool:
    return kind.get("type") == "string" and "enum" not in kind


def _shown(kind: Mapping[str, Any]) -> str:
    """Describes a field for the policy."""
    allowed = ", ".join(map(str, kind.get("enum", ()))) or kind.get("type", "any JSON value")
    bounds = (f"{word} {kind[key]}" for key, word in
              (("minimum", "at least"), ("maximum", "at most")) if key in kind)  # fmt: skip
    return "; ".join(filter(None, (allowed, *bounds, kind.get("description", "").rstrip("."))))


def _object(text: str) -> dict[str, Any]:
    """Returns the last JSON object in a text."""
    decoder, at, found = json.JSONDecoder(), text.find("{"), None
    while at >= 0:
        try:
            found, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            at += 1
        at = text.find("{", at)
    if found is None:
        raise UnreadableError("the turn has no JSON object")
    return dict(found)


def _value(text: str, kind: Mapping[str, Any], field: str) -> Any:
    """Returns the value that a text names last."""
    if "enum" in kind:
        names = sorted(map(str, kind["enum"]), key=len, reverse=True)
        named = re.findall(rf"(?<!\w)(?:{'|'.join(map(re.escape, names))})(?!\w)", text)
        return next(value for value in kind["enum"] if str(value) == named[-1]) if named else text
    if kind.get("type") in ("integer", "number"):
        numbers = _NUMBER.findall(text)
        if not numbers:
            raise UnreadableError(f"the turn names no {field}, a number")
        number = float(numbers[-1])
        return int(number) if kind["type"] == "integer" else number
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise UnreadableError(f"the turn is not JSON for {field}: {_shown(kind)}") from None


def read_observation(
    found: Mapping[str, Any], fields: Sequence[str], before: Mapping[str, Any]
) -> str:
    """Turns an observation into text.

    One field is shown as it is, several with their names.  Games send their rules, or the whole
    game so far, with each observation: of a long text, only what follows the same field of the
    observation before is shown, and it is left out if it is a part of another field.

    Args:
        found: fields of the observation.
        fields: names of the fields to show; () for all that are not empty.
        before: the observation before this one.

    Raises:
        KeyError: there is no such field.
    """
    for name in fields:
        if name not in found:
            raise KeyError(f"the observation has no {name!r}; there are {', '.join(found)}")
    if not fields and "tool_name" in found and (found.get("error") or "result" in found):
        result = found.get("error") or found["result"]
        inner = result if isinstance(result, Mapping) else {}
        return _text(next((inner[k] for k in ("data", "message") if inner.get(k)), result))
    texts = {
        name: _text(found[name])
        for name in fields or found
        if fields or found[name] not in (None, "", [], {})
    }
    kept = {
        name: text
        for name, text in texts.items()
        if len(text) <= _LONG or not any(text in other != text for other in texts.values())
    }
    for name in [name for name in kept if len(_text(before.get(name))) > _LONG]:
        kept[name] = kept[name].removeprefix(_text(before[name])).strip()
        if not kept[name]:
            del kept[name]
    if len(kept) == 1:
        return next(iter(kept.values()))
    return "\n".join(f"{name}: {text}" for name, text in kept.items())


def _text(value: Any) -> str:
    """A value as text; of messages, their content."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(
        isinstance(each, Mapping) and isinstance(each.get("content"), str) for each in value
    ):  # fmt: skip
        return "\n".join(each["content"] for each in value)
    return json.dumps(value, ensure_ascii=False)
