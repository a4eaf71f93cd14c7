"""Converts the policy's text to actions of OpenEnv servers, and observations to text."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_LONG = 200
"""Number of characters above which an observation does not repeat a text (`read_observation`)."""
_FENCED = re.compile(r"```\w*\n(.*?)\n?```", re.DOTALL)
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


class UnreadableError(Exception):
    """Raised if a turn of the policy is not a valid action.

    The policy reads the message of the exception as the observation.
    """


@dataclasses.dataclass(frozen=True)
class Actions:
    """Converts the text of the policy's turns to actions of an OpenEnv environment.

    Attributes:
        field: name of the field that receives the text of a turn; "" if a turn must be a JSON
            object.
        kinds: maps the name of each field of an action to the field's JSON schema.
        tools: tools that an action can call, each with ``name``, ``description`` and
            ``input_schema``; () if actions do not call tools.
    """

    field: str
    kinds: Mapping[str, Mapping[str, Any]]
    tools: tuple[Mapping[str, Any], ...] = ()

    @staticmethod
    def are_calls(schema: Mapping[str, Any]) -> bool:
        """Returns whether actions with this schema are calls of the server's MCP tools."""
        kind = schema.get("properties", {}).get("type", {})
        generic = schema.get("title") == "Action" and schema["properties"].keys() <= {"metadata"}
        return kind.get("const") in ("call_tool", "list_tools") or generic

    @classmethod
    def of(
        cls, schema: Mapping[str, Any], field: str, tools: Sequence[Mapping[str, Any]]
    ) -> Actions:
        """Creates the converter for actions with a given schema.

        Args:
            schema: JSON schema of an action.
            field: name of the field that receives the text of a turn. "" selects the only required
                field, or else the only field. If there is neither, because several fields exist, a
                turn must be a JSON object with the fields.
            tools: tools of the server if actions call tools; otherwise ().

        Raises:
            KeyError: an action has no field of this name.
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

    def instructions(self) -> str:
        """Returns instructions for the policy on how to write an action.

        The result is "" if every text is a valid action.
        """
        if self.tools:
            about = 'Each turn calls one tool by a JSON object {"name": ..., "arguments": {...}}.'
            described = (
                {"name": t["name"], "description": t.get("description", ""),
                 "parameters": t.get("input_schema", {})}
                for t in self.tools
            )  # fmt: skip
            listed = "\n".join(json.dumps(each, ensure_ascii=False) for each in described)
            return f"{about} The tools are:\n{listed}"
        if not self.field:
            listed = "\n".join(f"- {name}: {_shown(kind)}" for name, kind in self.kinds.items())
            return f"Each turn is an action: a JSON object with the fields\n{listed}"
        kind = self.kinds[self.field]
        if _is_text(kind):
            about = kind.get("description", "").rstrip(".")
            return f"Your whole turn is the {self.field}{about and f' ({about})'}."
        return f"Name the {self.field} in each turn: {_shown(kind)}."

    def read(self, turn: str) -> dict[str, Any]:
        """Converts a turn of the policy to an action in the form that the server expects.

        Everything up to the last ``</think>`` is ignored, as are the fences of a code block.

        Raises:
            UnreadableError: the turn contains no valid action.
        """
        text = turn.rpartition("</think>")[2].strip()
        if fenced := _FENCED.fullmatch(text):
            text = fenced[1]
        if self.tools:
            call = _object(text)
            name, arguments = call.get("name", call.get("tool_name")), call.get("arguments", {})
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise UnreadableError('call a tool by {"name": ..., "arguments": {...}}')
            return {"type": "call_tool", "tool_name": name, "arguments": arguments}
        if not self.field:
            return _object(text)
        kind = self.kinds[self.field]
        return {self.field: text if _is_text(kind) else _value(text, kind, self.field)}


def _resolved(kind: Mapping[str, Any], defined: Mapping[str, Any]) -> Mapping[str, Any]:
    """Resolves a reference in the schema of a field, and drops the alternative null."""
    if "$ref" in kind:
        return {**defined.get(kind["$ref"].rpartition("/")[2], {}), **kind}
    real = [each for each in kind.get("anyOf", ()) if each.get("type") != "null"]
    return {**_resolved(real[0], defined), **kind} if len(real) == 1 else kind


def _is_text(kind: Mapping[str, Any]) -> bool:
    return kind.get("type") == "string" and "enum" not in kind


def _shown(kind: Mapping[str, Any]) -> str:
    """Describes the allowed values of a field for the policy."""
    allowed = ", ".join(map(str, kind.get("enum", ()))) or kind.get("type", "any JSON value")
    bounds = (f"{word} {kind[key]}" for key, word in
              (("minimum", "at least"), ("maximum", "at most")) if key in kind)  # fmt: skip
    return "; ".join(filter(None, (allowed, *bounds, kind.get("description", "").rstrip("."))))


def _object(text: str) -> dict[str, Any]:
    """Returns the last JSON object that a text contains."""
    decoder, at, value = json.JSONDecoder(), text.find("{"), None
    while at >= 0:
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            at += 1
        at = text.find("{", at)
    if value is None:
        raise UnreadableError("the turn has no JSON object")
    return dict(value)


def _value(text: str, kind: Mapping[str, Any], field: str) -> Any:
    """Returns the last value of a field that a text contains."""
    if "enum" in kind:
        names = sorted(map(str, kind["enum"]), key=len, reverse=True)
        matches = re.findall(rf"(?<!\w)(?:{'|'.join(map(re.escape, names))})(?!\w)", text)
        if not matches:
            return text
        return next(value for value in kind["enum"] if str(value) == matches[-1])
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
    values: Mapping[str, Any], fields: Sequence[str], before: Mapping[str, Any]
) -> str:
    """Converts an observation of an OpenEnv server to the text that the policy reads.

    If there is only one field to show, the text is its value; if there are several, each value
    follows the name of its field.

    Some games repeat their rules, or the whole game so far, in each observation. Two rules
    therefore shorten long texts: if the text of a field begins with the text that the same field
    had in the previous observation, this beginning is left out; and if another field contains the
    text of a field, the contained text is left out.

    Args:
        values: maps the name of each field of the observation to its value.
        fields: names of the fields to show; () for all fields that are not empty.
        before: the previous observation of the episode.

    Raises:
        KeyError: the observation has no field of this name.
    """
    for name in fields:
        if name not in values:
            raise KeyError(f"the observation has no {name!r}; there are {', '.join(values)}")
    if not fields and "tool_name" in values and (values.get("error") or "result" in values):
        result = values.get("error") or values["result"]
        inner = result if isinstance(result, Mapping) else {}
        return _text(next((inner[k] for k in ("data", "message") if inner.get(k)), result))
    texts = {
        name: _text(values[name])
        for name in fields or values
        if fields or values[name] not in (None, "", [], {})
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
    """Converts a value to text; of messages, only the content is kept."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(
        isinstance(each, Mapping) and isinstance(each.get("content"), str) for each in value
    ):  # fmt: skip
        return "\n".join(each["content"] for each in value)
    return json.dumps(value, ensure_ascii=False)
