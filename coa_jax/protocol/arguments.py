"""Converts the arguments of a tool call between a JSON object and the text that the tool takes.

A built-in tool takes one string. As a JSON object, the call has named arguments: a search has the
argument ``query``, and the tool ``code`` has the arguments ``code`` and ``stdin``. A tool with a
JSON schema, such as an MCP tool, takes the JSON object itself, written as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from coa_jax.files import untrusted
from coa_jax.protocol.bodies import format_code, parse_code, parse_inspection, without_fence
from coa_jax.protocol.built_in import BUILT_IN, TOOL_FORMS
from coa_jax.protocol.formats import Protocol

_FORMS: dict[str, dict[str, str]] = {
    "text": {"query": "What to look for."},
    "urls": {"urls": "One or more addresses, joined by |."},
    "code": {
        "code": "The program; it prints what you want to see.",
        "stdin": "Text that the program reads from its standard input.",
    },
    "inspection": {"file_path": "Path of the image.", "question": "What to find out."},
}
_OPTIONAL = ("stdin", "question")


def arguments_of(tool: str) -> dict[str, str]:
    """Returns the arguments (name -> description) of a tool that has no JSON schema."""
    form = TOOL_FORMS.get(tool)
    return _FORMS[form] if form else {"input": "What the tool is given."}


def describe(protocol: Protocol, tool: str) -> str:
    """Returns the description of a tool, as the policy reads it in the prompt.

    Args:
        protocol: protocol that contains the tool.
        tool: tag of the tool.
    """
    description = protocol.described.get(tool) or BUILT_IN[tool].does
    if tool in protocol.schemas:  # the schema describes the body
        description = description.partition(" The body is ")[0]
    return " ".join(filter(None, (description, protocol.notes.get(tool, ""))))


def schemas(protocol: Protocol) -> list[dict[str, Any]]:
    """Returns the JSON schemas of a protocol's tools, in the format of OpenAI's API."""
    tools = []
    for tool in protocol.tools:
        described = arguments_of(tool)
        plain: dict[str, object] = {
            "type": "object",
            "properties": {n: {"type": "string", "description": d} for n, d in described.items()},
            "required": [name for name in described if name not in _OPTIONAL],
        }
        parameters = protocol.schemas.get(tool, plain)
        function = {"name": tool, "description": describe(protocol, tool)}
        tools.append({"type": "function", "function": {**function, "parameters": parameters}})
    return tools


def arguments_hint(schema: Mapping[str, Any]) -> str:
    """Returns a sentence that tells the policy the form of the arguments of a call."""
    properties = schema.get("properties") or {}
    if not properties:
        return "The body is {}."
    required = set(schema.get("required") or ())
    fields = []
    for name, kind in properties.items():
        field = f'"{name}" ({_form(kind)}{"" if name in required else ", optional"})'
        fields.append(f"{field}: {kind['description']}" if kind.get("description") else field)
    return f"The body is a JSON object with {'; '.join(fields)}."


def _form(kind: Mapping[str, Any]) -> str:
    """Returns the values that the JSON schema of an argument names, or else its types."""
    if "enum" in kind:
        return " or ".join(json.dumps(value, ensure_ascii=False) for value in kind["enum"])
    types = kind.get("type", "any")
    return types if isinstance(types, str) else " or ".join(types)


def to_text(protocol: Protocol, tool: str, arguments: Mapping[str, Any]) -> str:
    """Converts the JSON arguments of a call to the text that the tool takes.

    Args:
        protocol: protocol that contains the tool.
        tool: tag of the tool.
        arguments: name of an argument -> its value.

    Raises:
        ValueError: an argument is missing, is not a string, or contains a line that would end the
            code block around it. The message is written for the policy, which gets it as an
            observation.
    """
    if tool in protocol.schemas:
        required: Any = protocol.schemas[tool].get("required") or ()
        for name in required:
            if name not in arguments:
                raise ValueError(f"The tool {tool} needs the argument {name!r}.")
        return json.dumps(dict(arguments), ensure_ascii=False)
    texts: dict[str, str] = {}
    for name in arguments_of(tool):
        value = arguments.get(name)
        if name == "urls" and isinstance(value, list) and all(isinstance(v, str) for v in value):
            value = " | ".join(value)
        if value is None and name not in _OPTIONAL:
            raise ValueError(f"The tool {tool} needs the argument {name!r}.")
        if not isinstance(value, str | None):
            raise ValueError(f"The argument {name!r} of {tool} must be a string.")
        if value is not None:
            texts[name] = value
    form = TOOL_FORMS.get(tool, "text")
    if form == "code":
        if "stdin" not in texts and parse_code(texts["code"]) is not None:
            return texts["code"]
        if any(line.rstrip() == "```" for text in texts.values() for line in text.split("\n")):
            raise ValueError(f"No line in a call of {tool} may be only ```.")
        return format_code(texts["code"], texts.get("stdin"))
    if form == "inspection":
        return f"```json\n{json.dumps(texts, ensure_ascii=False)}\n```"
    (text,) = texts.values()
    return text


def from_text(protocol: Protocol, tool: str, text: str) -> dict[str, Any]:
    """Converts the text that a tool takes to the JSON arguments of a call.

    This is the inverse of `to_text`. If the text does not have the form that the tool requires, the
    whole text becomes the value of the tool's first argument.

    Args:
        protocol: protocol that contains the tool.
        tool: tag of the tool.
        text: text that the tool takes.

    Returns:
        A mapping from the names of the arguments to their values.
    """
    text = text.strip()
    if tool in protocol.schemas:
        try:
            value = untrusted.parse_json(without_fence(text))
        except untrusted.MALFORMED:
            value = None
        if isinstance(value, dict):
            return value
        properties: Any = protocol.schemas[tool].get("properties") or ["input"]
        return {next(iter(properties)): text}
    form = TOOL_FORMS.get(tool, "text")
    if form == "code" and (program := parse_code(text)) is not None:
        values: tuple[str | None, ...] = program
    elif form == "inspection" and (inspection := parse_inspection(text)) is not None:
        values = inspection
    else:
        values = (text,)
    arguments = zip(arguments_of(tool), values, strict=False)
    return {name: value for name, value in arguments if value is not None}


def read_call(protocol: Protocol, text: str) -> tuple[str, str]:
    """Parses a tool call of the form ``{"name": ..., "arguments": {...}}``.

    Returns:
        (tag of the tool, text that the tool takes).

    Raises:
        ValueError: the text does not have this form, or the arguments are invalid. The message is
            written for the policy, which gets it as an observation.
    """
    form = '{"name": TOOL, "arguments": {...}}'
    try:
        value = untrusted.parse_json(text)
    except untrusted.MALFORMED as error:
        why = " ".join(untrusted.reason(error).split())
        raise ValueError(f"The call is not valid JSON ({why}); write {form}.") from None
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # no tool needs to handle such a string
        raise ValueError("The call holds half of a surrogate pair.") from None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError(f"The call has no name; write {form}.")
    name, arguments = value["name"], value.get("arguments", {})
    if name not in protocol.tools:
        raise ValueError(f"There is no tool {name[:100]!r}; there are {', '.join(protocol.tools)}.")
    if not isinstance(arguments, dict):
        raise ValueError(f"The arguments of {name} are not a JSON object; write {form}.")
    return name, to_text(protocol, name, arguments)
