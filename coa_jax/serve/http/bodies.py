"""Parses JSON bodies in bounded time, and validates them with readable errors."""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from coa_jax.files import untrusted
from coa_jax.serve.http.errors import Refused

M = TypeVar("M", bound=BaseModel)

_NOT_JSON = "the body is not valid JSON"
# Matches a string, closed or not, or a character that is counted. The quantifiers are possessive,
# so that no text takes quadratic time.
_STRUCTURE = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{,]', re.DOTALL)

_WHOLE = "must be a whole number"
_NUMBER = "must be a number"
_BOOL = "must be true or false"
_OBJECT = "must be an object"
_WORDS = {
    "missing": "is missing",
    "extra_forbidden": "this server does not know the field",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "too_short": "must have {min_length} or more entries",
    "too_long": "must have at most {max_length} entries",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "literal_error": "must be {expected}; this server supports no other value",
    "none_required": "must be null; this server supports no other value",
    "finite_number": "must be a finite number",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "int_type": _WHOLE, "int_parsing": _WHOLE, "int_from_float": _WHOLE, "int_parsing_size": _WHOLE,
    "float_type": _NUMBER, "float_parsing": _NUMBER,
    "bool_type": _BOOL, "bool_parsing": _BOOL,
    "dict_type": _OBJECT, "model_type": _OBJECT, "model_attributes_type": _OBJECT,
}  # fmt: skip
"""Messages for clients, by pydantic's type of the error."""


def parse_json(body: bytes | bytearray, values: int, containers: int) -> Any:
    """Parses a JSON text that may contain only a limited number of values.

    The function checks the number of values before it parses the text, because parsing megabytes of
    tiny values would hold Python's GIL for seconds. Long strings are not limited, because parsing
    megabytes of strings takes only milliseconds.

    Args:
        body: the JSON text in UTF-8.
        values: approximate maximum number of values; commas and opening brackets outside strings
            are counted.
        containers: maximum number of lists and objects.

    Raises:
        Refused: the text is not JSON, or contains too many values (status 400).
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        raise Refused(400, f"{_NOT_JSON}: it is not UTF-8") from None
    opened = text.count("[") + text.count("{")
    if opened > containers or opened + text.count(",") > values:
        _count(text, values, containers)
    try:
        return untrusted.parse_json(text)
    except json.JSONDecodeError as error:
        why = f" (line {error.lineno}, column {error.colno})"
    except (ValueError, RecursionError) as error:
        why = f" that this server reads: {untrusted.reason(error)}"
    raise Refused(400, f"{_NOT_JSON}{why}")


def _count(text: str, values: int, containers: int) -> None:
    counted = opened = 0
    for match in _STRUCTURE.finditer(text):
        first = text[match.start()]
        if first == '"':
            continue
        counted += 1
        opened += first != ","
        if counted > values or opened > containers:
            limit = f"{values:,} values, {containers:,} of them lists or objects"
            raise Refused(400, f"the body holds too many values; the limit is {limit}")


def validated(model: type[M], value: Any) -> M:
    """Validates a JSON value against the schema of a request, and returns the validated object.

    Args:
        model: schema of the request, a pydantic model.
        value: JSON value of the request's body.

    Raises:
        Refused: the value does not match the schema (status 400). The message names the first wrong
            field and the requirement of the schema.
    """
    if not isinstance(value, dict):
        raise Refused(400, "the body must be a JSON object")
    num_fields = len(model.model_fields)
    if len(value) > 2 * num_fields:
        raise Refused(400, f"the body has {len(value)} fields; this server knows {num_fields}")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
    kind, context = errors[0]["type"], errors[0].get("ctx", {})
    name = ".".join(map(str, errors[0]["loc"]))[:200]
    if kind == "value_error":
        words = str(context["error"])
        raise Refused(400, f"{name}: {words}" if name else words, name or None)
    words = _WORDS.get(kind, "has a value that this server does not take").format(**context)
    message = f"{name}: {words}"
    # The name of an unknown field comes from the client, so it is not logged.
    raise Refused(400, message, name, words if kind == "extra_forbidden" else message)
