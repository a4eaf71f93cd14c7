"""Converts the mutable config of a command line to frozen dataclasses, and back."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import json
import math
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from ml_collections import ConfigDict

from coa_jax.config.fields import (
    check,
    field_annotations,
    format_value,
    freeze,
    has_default,
    is_sparse,
    without_none,
)
from coa_jax.config.overrides import read_tuple, suggest
from coa_jax.config.renamed import hint
from coa_jax.errors import UserError, UserErrors
from coa_jax.storage import with_urls

T = TypeVar("T")

_LISTS: dict[Any, tuple[Callable[[str], Any], str, str]] = {
    tuple[str, ...]: (str, "words with commas", "a,b"),
    tuple[int, ...]: (int, "whole numbers with commas", "3,5"),
    tuple[float, ...]: (float, "numbers with commas", "0.5,1"),
}
"""Maps types that a command line may give as one string to (parser, description, example)."""


def build_config(
    cls: type[T],
    values: Mapping[str, Any] | ConfigDict,
    where: str = "config",
    default: T | None = None,
) -> T:
    """Builds a dataclass, and the dataclasses of its fields, from a config with the same keys.

    Args:
        cls: a dataclass whose fields define the keys.
        values: a ConfigDict or a mapping. The value of a field that is a tuple of strings or
            numbers may also be one string, with commas between the items.
        where: name of the config, used in error messages.
        default: object with the values of the settings that are left out; None for the defaults of
            the class.

    Raises:
        UserErrors: keys are unknown or missing, or values have a wrong type or are out of bounds.
    """
    arguments, errors = _arguments(cls, values, where, default)
    if not errors:
        try:
            return cls(**arguments)
        except UserError as error:
            raise UserErrors([error]).within(where) from None
    raise UserErrors([*errors, *_out_of_bounds(cls, arguments, where)])


def errors_of(cls: type[Any], values: Mapping[str, Any] | ConfigDict) -> list[UserError]:
    """Returns the errors of settings, without those of settings that contradict each other."""
    arguments, errors = _arguments(cls, values, "config", None)
    return [*errors, *_out_of_bounds(cls, arguments, "config")]


def _arguments(
    cls: type[Any], values: Mapping[str, Any] | ConfigDict, where: str, default: Any
) -> tuple[dict[str, Any], list[UserError]]:
    """Returns the arguments of a dataclass, and the errors of those that are left out."""
    types = _types(cast(Any, cls))
    fields = {field.name: field for field in dataclasses.fields(cast(Any, cls))}
    if not isinstance(values, Mapping | ConfigDict):
        inner = ", ".join(fields)
        raise UserError(f"{where} is {format_value(values)}; it is a group of settings: {inner}")
    arguments, errors = dict[str, Any](), list[UserError]()
    for name in values:
        if name not in fields:
            plain = isinstance(name, str) and name.isidentifier() and len(name) <= 100
            key = f"{where}.{name if plain else format_value(name)}"
            advice = hint(key) or suggest(str(name), fields)
            errors.append(UserError(f"{key} is not a setting{advice}"))
    for name, field in fields.items():
        before = _default(field) if default is None else getattr(default, name)
        try:
            if name in values:
                arguments[name] = _value(types[name], values[name], f"{where}.{name}", before)
            elif default is not None:
                arguments[name] = before
            elif not has_default(field):
                raise UserError(f"{where}.{name} is missing; give it in the config file")
        except UserError as error:
            errors.append(error)
    return arguments, errors


def _out_of_bounds(cls: type[Any], arguments: Mapping[str, Any], where: str) -> list[UserError]:
    errors = []
    for name, value in arguments.items():
        try:
            check(value, field_annotations(cast(Any, cls))[name], f"{where}.{name}")
        except UserError as error:
            errors.append(error)
    return errors


def _default(field: dataclasses.Field[Any]) -> Any:
    """Returns the default of a field; None if the field has no default."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _value(kind: Any, value: Any, where: str, default: Any) -> Any:
    """Converts the value of a setting to the type of its field."""
    if dataclasses.is_dataclass(kind):
        return build_config(cast(Any, kind), value, where, default)
    if kind in _LISTS:
        return _parts(value, kind, where)
    if kind is str and type(value) in (int, float):
        return str(value)  # a command line does not know that, say, "-0.5" shall be a text
    if isinstance(value, str) and typing.get_origin(kind) is tuple:
        with contextlib.suppress(ValueError):  # the dataclass refuses the string
            value = freeze(read_tuple(value))
        return value
    try:
        return freeze(value.to_dict() if isinstance(value, ConfigDict) else value)
    except RecursionError:
        raise UserError(f"{where} is nested too deeply; give a flat value") from None


@functools.cache
def _types(cls: type[Any]) -> dict[str, Any]:
    """Returns the types of a dataclass's fields, without bounds and without ``| None``, by name."""
    return {name: without_none(kind) for name, kind in typing.get_type_hints(cls).items()}


def _parts(value: Any, kind: Any, where: str) -> tuple[Any, ...]:
    """Parses a tuple of strings or numbers; a config file may give it as one string."""
    convert, number, example = _LISTS[kind]
    refused = UserError(f"{where} is {format_value(value)}; give {number}, such as {example}")
    try:
        value = read_tuple(value) if isinstance(value, str) else value
        if not isinstance(value, tuple | list):
            raise refused
        parts = tuple(map(convert, value))
    except (TypeError, ValueError, OverflowError):
        raise refused from None
    # If the conversion changes a value, the type of the value was wrong: 0.5 is not an integer, and
    # 3 is not a word.
    pairs = [(old, new) for old, new in zip(value, parts, strict=True) if not isinstance(old, str)]
    if any(old != new or isinstance(old, bool) for old, new in pairs):
        raise refused
    return parts


def complete_config(cls: type[Any], values: Mapping[str, Any]) -> ConfigDict:
    """Returns a config that contains every field of a dataclass, including unset fields.

    All fields are necessary because a command line can override only settings that the config
    contains. Only optional groups that are None are left out.

    Args:
        cls: a dataclass.
        values: settings as in `build_config`; a setting that is left out has its default value.

    Raises:
        UserError: a key is unknown, or a field without a default value is missing.
    """
    return ConfigDict(_overridable(_listed(build_config(cls, values))))


def partial_config(cls: type[Any], values: Mapping[str, Any]) -> ConfigDict:
    """Returns a config with a dataclass's defaults; a field without a default may be missing.

    Args:
        cls: a dataclass; its fields without a default are left out unless ``values`` has them.
        values: settings that override the defaults. This function does not check the values;
            `build_config` does.
    """
    return ConfigDict(merged(default_values(cls), values))


def _listed(config: Any) -> dict[str, Any]:
    """Returns the settings of a dataclass; of groups that are `Sparse`, those with own values."""
    cls: Any = type(config)
    values = {}
    for field in dataclasses.fields(cls):
        value = getattr(config, field.name)
        if value is None and dataclasses.is_dataclass(_types(cls)[field.name]):
            continue
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            values[field.name] = value
        elif is_sparse(field_annotations(cls)[field.name]):
            values[field.name] = _differing(value, _default(field))
        else:
            values[field.name] = _listed(value)
    return values


def _differing(config: Any, default: Any) -> dict[str, Any]:
    values, defaults = dataclasses.asdict(config), dataclasses.asdict(default)
    return {name: value for name, value in values.items() if value != defaults[name]}


def default_values(cls: type[Any]) -> dict[str, Any]:
    """Returns the defaults of a dataclass as in a config; fields without a default are left out.

    No instance of the dataclass is created, because this would run the checks of the whole config,
    which may import JAX and are then slow.
    """
    values = {}
    for field in filter(has_default, dataclasses.fields(cls)):
        value = _default(field)
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            values[field.name] = value
        else:
            values[field.name] = (
                {} if is_sparse(field_annotations(cast(Any, cls))[field.name]) else _listed(value)
            )
    return cast(dict[str, Any], _overridable(values))


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of ``one``, overridden by ``other``; nested groups are merged."""
    result = dict(one)
    for name, value in other.items():
        inner = result.get(name)
        if isinstance(value, Mapping) and isinstance(inner, Mapping):
            value = merged(inner, value)
        result[name] = value
    return result


def _overridable(value: Any) -> Any:
    """Replaces empty tuples by "": ml_collections cannot infer the type of their items."""
    if isinstance(value, dict):
        return {key: _overridable(inner) for key, inner in value.items()}
    return "" if value == () else value


# --- comparison ---------------------------------------------------------------------------


Change = tuple[str, Any, Any]
"""A setting, its old value and its new value, as JSON values."""


def plain(value: Any) -> Any:
    """Converts configs, dataclasses, tuples, paths and array scalars to JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    elif hasattr(value, "to_dict"):
        value = value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, int | float | None):
        return value
    return with_urls(str(value))  # the local path of a mirror differs from process to process


def changes_of(old: Any, new: Any, key: str = "") -> list[Change]:
    """Returns the settings in which two nested JSON objects differ.

    Args:
        old: the earlier settings.
        new: the present settings.
        key: prefix of all names in the result.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            change
            for name in sorted({*old, *new})
            for change in changes_of(old.get(name), new.get(name), f"{key}.{name}".lstrip("."))
        ]
    return [] if old == new else [(key, old, new)]


def line_of(change: Change) -> str:
    """Returns the line ``key: old -> new`` for a change; long values are shortened."""
    name, *values = change
    return f"{name}: " + " -> ".join(_shortened(json.dumps(value)) for value in values)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Returns whether a setting, or a group that contains it, matches a pattern of `fnmatch`."""
    every = [part for pattern in patterns for part in (pattern, f"{pattern}.*")]
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in every)


def config_at(
    config: Mapping[str, Any], changes: Sequence[Mapping[str, Any]], step: int
) -> dict[str, Any]:
    """Returns the settings with which a step of a run was made.

    Args:
        config: the newest settings of the run.
        changes: result of `run_dir.read_config_changes`.
        step: number of the step.
    """
    result: dict[str, Any] = json.loads(json.dumps(config))
    for change in reversed(changes):
        if change["step"] > step:
            *groups, name = change["setting"].split(".")
            inner = result
            for group in groups:
                inner = inner.setdefault(group, {})
            inner[name] = change["old"]
    return result


def _shortened(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:200]}... ({len(text)} characters)"
