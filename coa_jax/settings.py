"""From the mutable config of a command line to the frozen dataclasses that the code works with."""

from __future__ import annotations

import ast
import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from ml_collections import ConfigDict

from coa_jax.bounds import present, shown
from coa_jax.errors import UserError

T = TypeVar("T")

_LISTS: dict[Any, tuple[Callable[[str], Any], str, str]] = {
    tuple[str, ...]: (str, "words with commas", "a,b"),
    tuple[int, ...]: (int, "whole numbers with commas", "3,5"),
    tuple[float, ...]: (float, "numbers with commas", "0.5,1"),
}
"""Types of settings that a command line may give as one text: what reads a part, and its name."""


def build(cls: type[T], values: Mapping[str, Any] | ConfigDict, where: str = "config") -> T:
    """Builds a dataclass, and those inside it, from a config of the same form.

    Args:
        cls: a dataclass; its fields name the keys.
        values: a ConfigDict or a mapping; a tuple of texts or numbers may be one text with commas.
        where: what error messages call it.

    Raises:
        UserError: a key is unknown or missing, or its value has another type or is out of bounds.
    """
    types = _types(cast(Any, cls))
    known = {field.name: field for field in dataclasses.fields(cast(Any, cls))}
    if not isinstance(values, Mapping | ConfigDict):
        inner = ", ".join(known)
        raise UserError(f"{where} is {shown(values)}; it is a group of settings: {inner}")
    for name in values:
        if name not in known:
            told = name if str(name).isidentifier() and len(name) <= 100 else shown(name)
            raise UserError(f"{where}.{told} is not a setting; known are {', '.join(known)}")
    arguments = {}
    for name, field in known.items():
        if name not in values:
            required = (
                field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING
            )
            if required:
                raise UserError(f"{where}.{name} is missing; give it in the config file")
            continue
        value = values[name]
        if dataclasses.is_dataclass(types[name]):
            value = build(types[name], value, f"{where}.{name}")
        elif types[name] in _LISTS:
            value = _parts(value, types[name], f"{where}.{name}")
        elif isinstance(value, str) and typing.get_origin(types[name]) is tuple:
            value = (_literal(value.strip()) or value) if value else ()
        else:
            value = _frozen(value.to_dict() if isinstance(value, ConfigDict) else value)
        arguments[name] = value
    try:
        return cls(**arguments)
    except UserError as error:
        raise UserError(f"{where}.{error}") from None


@functools.cache
def _types(cls: type[Any]) -> dict[str, Any]:
    """The types of a dataclass's fields by name, without bounds and without ``| None``."""
    return {name: present(kind) for name, kind in typing.get_type_hints(cls).items()}


def _frozen(value: Any) -> Any:
    """The value with tuples for lists: frozen dataclasses are static arguments and must hash."""
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _parts(value: Any, kind: Any, where: str) -> tuple[Any, ...]:
    """A tuple of texts or numbers from what a config file or a command line gives for it.

    A command line makes one text of ``a,b``, or a tuple of that one text where the config had a
    tuple, and one text of ``('a', 'b')`` where it had an empty one.
    """
    convert, number, example = _LISTS[kind]
    refused = UserError(f"{where} is {shown(value)}; give {number}, such as {example}")
    if isinstance(value, tuple | list) and len(value) == 1 and isinstance(value[0], str):
        (value,) = value
    if isinstance(value, str):
        text = value.strip()
        value = _literal(text) or list(filter(None, map(str.strip, text.split(","))))
        if text.startswith("(") and isinstance(value, list):
            raise refused  # quotes that a shell took away
    if not isinstance(value, tuple | list):
        raise refused
    try:
        parts = tuple(map(convert, value))
    except (TypeError, ValueError, OverflowError):
        raise refused from None
    # What conversion changes was of another kind: 0.5 is no whole number, and 3 is no word.
    pairs = [(old, new) for old, new in zip(value, parts, strict=True) if not isinstance(old, str)]
    if any(old != new or isinstance(old, bool) for old, new in pairs):
        raise refused
    return parts


def _literal(text: str) -> tuple[Any, ...] | None:
    """The tuple or list that a text is in Python, as a tuple; None if it is neither."""
    if not text.startswith(("(", "[")):
        return None
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None  # "[::1]" is a host
    return _frozen(value) if isinstance(value, tuple | list) else None


def complete(cls: type[Any], values: Mapping[str, Any]) -> ConfigDict:
    """A config with every setting of a dataclass, so that a command line can override each.

    Args:
        cls: a dataclass; settings that ``values`` leaves out have its defaults.
        values: as for `build`.

    Raises:
        UserError: a key is unknown or missing.
    """
    return ConfigDict(_overridable(dataclasses.asdict(build(cls, values))))


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with others put over them, group by group."""
    result = dict(one)
    for name, value in other.items():
        known = result.get(name)
        if isinstance(value, Mapping) and isinstance(known, Mapping):
            value = merged(known, value)
        result[name] = value
    return result


def _overridable(value: Any) -> Any:
    """The same settings, in which every value tells its type: an empty tuple would not."""
    if isinstance(value, dict):
        return {key: _overridable(inner) for key, inner in value.items()}
    return "" if value == () else value
