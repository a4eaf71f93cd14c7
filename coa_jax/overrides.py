"""Handles overrides of a config on the command line: ``--config.KEY=VALUE``."""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import operator
import re
from collections.abc import Iterable, Mapping
from typing import Any

import ml_collections
from ml_collections.config_flags import config_path

from coa_jax.errors import UserError

_NEW_KEY = re.compile(
    r"--?config\.((?:\w+\.)*?(?:tools\.mcp|own|budgets|rewards|mixture|\w*options))"
    r"\.((?:\w+\.)*\w+)(?:=(.*))?",
    re.DOTALL,
)
"""Matches overrides in groups whose keys the user chooses, such as names of tools or rewards."""


def suggest(word: str, known: Iterable[str]) -> str:
    """Returns a hint for an error message about an unknown word.

    If a known word is similar, the hint is "; did you mean 'X'?" with the most similar word X. If
    no known word is similar, the hint lists all known words, or is "" if there are more than 16.
    """
    known = sorted(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; there are {', '.join(known)}" if 0 < len(known) <= 16 else ""


def switches(arguments: list[str]) -> list[str]:
    """Returns the command-line arguments that absl reads as flags: those before a lone ``--``."""
    return arguments[: arguments.index("--")] if "--" in arguments else arguments


def join_new_keys(argv: list[str], config: ml_collections.ConfigDict) -> list[str]:
    """Converts overrides of missing settings to overrides of whole groups.

    The conversion is necessary because ml_collections overrides only existing settings. For example
    ``--config.tools.mcp.tide.url=U`` becomes ``--config.tools.mcp={'tide': {'url': 'U'}}``. The new
    value of the group also contains the entries that the config already has.
    """
    before = switches(argv)
    groups: dict[str, dict[str, Any]] = {}
    rest: list[str] = []
    given = iter(before)
    for argument in given:
        key = _NEW_KEY.fullmatch(argument)
        if key is None:
            rest.append(argument)
            continue
        value = key[3] if key[3] is not None else next(given, None)
        if value is None or value.startswith("--"):
            raise UserError(f"{argument} needs a value: {argument}=VALUE")
        try:
            read = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            read = value
        _join(groups, config, key[1], key[2], read)
    joined = [f"--config.{group}={values!r}" for group, values in groups.items()]
    return [*rest[:2], *joined, *rest[2:], *argv[len(before) :]]


def join_new_values(
    overrides: Mapping[str, Any], config: ml_collections.ConfigDict
) -> dict[str, Any]:
    """Converts overrides of missing settings to overrides of whole groups.

    This is `join_new_keys` for a mapping instead of command-line arguments.

    Args:
        overrides: maps dotted names of settings to values.
        config: the config.
    """
    groups: dict[str, dict[str, Any]] = {}
    rest: dict[str, Any] = {}
    for name, value in overrides.items():
        key = _NEW_KEY.fullmatch(f"--config.{name}")
        if key is None:
            rest[name] = value
        else:
            _join(groups, config, key[1], key[2], value)
    return rest | {name: ml_collections.ConfigDict(values) for name, values in groups.items()}


def _join(
    groups: dict[str, dict[str, Any]],
    config: ml_collections.ConfigDict,
    group: str,
    name: str,
    value: Any,
) -> None:
    """Sets a dotted key of a group, which begins with the settings of the config."""
    if group not in groups:
        check_key(config, group)
        node = functools.reduce(operator.getitem, group.split("."), config)
        groups[group] = node.to_dict()
    *outer, last = name.split(".")
    inner = groups[group]
    for part in outer:
        inner = inner.setdefault(part, {})
        if not isinstance(inner, dict):
            raise UserError(f"--config.{group}.{name}: {part} is a value, without settings")
    inner[last] = value


def check_key(config: Any, key: str) -> None:
    """Checks that a config has a setting with a dotted name, such as ``a.b`` or ``a[0].b``.

    Raises:
        UserError: there is no such setting; the message suggests a similar name.
    """
    try:
        parts = config_path.split(key)
    except (ValueError, TypeError) as error:
        raise UserError(f"--config.{key}: not a key; write --config.name.name=value") from error
    node, walked = config, "config"
    for part in parts:
        if isinstance(node, ml_collections.ConfigDict):
            if part not in node:
                hint = suggest(str(part), [str(name) for name in node])
                raise UserError(f"--config.{key}: {walked} has no key {part!r}{hint}")
        elif not (isinstance(node, tuple) and isinstance(part, int) and part < len(node)):
            kind = type(node).__name__
            raise UserError(f"--config.{key}: {walked} is a value of type {kind}, without keys")
        node, walked = node[part], f"{walked}.{part}"


def wrong_value(message: str) -> str:
    """Rewrites absl's message about a value of a wrong type so that it says what to write.

    >>> wrong_value("flag --config.steps=1e3: invalid literal for int() with base 10: '1e3'")
    "--config.steps=1e3: an integer is needed; write 1000"
    """
    message = message.removeprefix("flag ")
    faults = "invalid literal for int|could not convert string|Exceeds the limit"
    found = re.match(rf"(--[^=]+=(.*?)): ({faults})", message)
    if not found:
        return message
    switch, text = found[1], found[2]
    if "convert" in found[3]:
        return f"{switch}: a number is needed"
    with contextlib.suppress(ValueError, OverflowError):
        if float(text).is_integer():
            return f"{switch}: an integer is needed; write {int(float(text))}"
    return f"{switch}: an integer is needed"
