"""Handles overrides of a config on the command line: ``--config.KEY=VALUE``."""

from __future__ import annotations

import ast
import collections
import contextlib
import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import ml_collections
from ml_collections.config_flags import config_path

from coa_jax.config.renamed import hint
from coa_jax.errors import UserError, UserErrors

_OPEN = re.compile(
    r"(?:.*\.)?(?:tools\.mcp|adapters|own|budgets|rewards|mixture|\w*options|agent|algorithm|chat"
    r"|encoder|endpoint|environment|request|stops|summarizer|teacher)"
)
"""Matches the names of groups that hold only what is set.

These are groups whose keys the user chooses, such as names of tools or rewards, and groups that are
`fields.Sparse`.
"""
_OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]*)(?:=(.*))?", re.DOTALL)
_WORD = re.compile(r"""\s*('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^,]*?)\s*(?:,|$)""", re.DOTALL)
"""Matches one item of a list with commas, and the comma; commas in quotes separate no items."""


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


def read_tuple(text: str) -> tuple[Any, ...]:
    """Parses the value of a setting that contains several values.

    >>> read_tuple("a, b:c, my file.txt")
    ('a', 'b:c', 'my file.txt')

    Args:
        text: words with commas, or a Python tuple or list, such as ``("a, b", "c")``. A word with a
            comma, or with a blank at its beginning or end, needs quotes.

    Raises:
        ValueError: the text begins with a parenthesis, but is not a tuple.
    """
    text = text.strip()
    if text.startswith(("(", "[")):
        value = _literal(text)
        if isinstance(value, tuple | list):
            return tuple(value)
        if text.startswith("("):
            raise ValueError("not a tuple; the shell removes quotes inside a word without quotes")
    words = (match[1] for match in _WORD.finditer(text) if match[1])
    return tuple(_literal(word) if word[0] in "'\"" else word for word in words)


def _literal(text: str) -> Any:
    """Parses a Python literal; returns the text itself if it is none."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        # For example "[::1]", the address of a host, or nesting too deep for the parser.
        return text


def readable_overrides(
    argv: list[str], config: ml_collections.ConfigDict, errors: list[UserError] | None = None
) -> list[str]:
    """Rewrites the overrides that ml_collections cannot read, so that it can read them.

    - ml_collections overrides only existing settings. An override of a missing setting becomes an
      override of its whole group, which also contains the entries that the config already has:
      ``--config.tools.mcp.tide.url=U`` becomes ``--config.tools.mcp={'tide': {'url': 'U'}}``.
    - The value of a tuple becomes a Python tuple: ``--config.names=a,b:c`` becomes
      ``--config.names=('a', 'b:c')``. Repeated overrides of a tuple are concatenated.

    Args:
        argv: the command line.
        config: the config that will be overridden.
        errors: list to which errors are added, of overrides that are then left out; None to raise
            them.

    Raises:
        UserErrors: settings do not exist.
        UserError: a setting has no value.
    """
    before = switches(argv)
    values: dict[str, Any] = {}
    rest: list[str] = []
    unknown: list[UserError] = [] if errors is None else errors
    arguments = collections.deque(before)
    while arguments:
        argument = arguments.popleft()
        override = _OVERRIDE.fullmatch(argument)
        group = _open_group(config, override[1]) if override else ""
        try:
            present = check_key(config, override[1]) if override and not group else ()
        except UserError as error:
            unknown.append(error)
            if override and override[2] is None and arguments and arguments[0][:1] != "-":
                arguments.popleft()  # the value
            continue
        if override is None or not isinstance(present, tuple):
            rest.append(argument)
            continue
        key, value = override.groups()
        if value is None:
            value = arguments.popleft() if arguments else "--"
            if value.startswith("--"):
                raise UserError(f"{argument} needs a value: {argument}=VALUE")
        if group:
            _join(values, config, group, key.removeprefix(f"{group}."), _literal(value))
        else:
            values[key] = values.get(key, ()) + _tuple_like(present, value, key)
    if unknown and errors is None:
        raise UserErrors(unknown)
    joined = [f"--config.{name}={value!r}" for name, value in values.items()]
    # A group must come before its settings, and after the config file.
    first = 2 if rest[1:] and re.match("--?config=", rest[1]) else 1
    return [*rest[:first], *joined, *rest[first:], *argv[len(before) :]]


def _open_group(config: ml_collections.ConfigDict, key: str) -> str:
    """Returns the innermost group of a setting that holds only what is set, and lacks the setting.

    The result is "" if there is no such group, or if the config has the setting.
    """
    parts = key.split(".")
    if _value_of(config, key) is not None or not all(parts):
        return ""
    for count in range(len(parts) - 1, 0, -1):
        group = ".".join(parts[:count])
        is_group = isinstance(_value_of(config, group), ml_collections.ConfigDict)
        if is_group and _OPEN.fullmatch(group):
            return group
    return ""


def _value_of(config: ml_collections.ConfigDict, key: str) -> Any:
    """Returns the value of a setting; None if the config lacks it."""
    with contextlib.suppress(UserError):
        return check_key(config, key)
    return None


def _tuple_like(present: tuple[Any, ...], text: str, name: str) -> tuple[Any, ...]:
    """Parses the new value of a tuple; words become numbers unless the present items are words."""
    try:
        value = read_tuple(text)
    except ValueError as error:
        raise UserError(f"--config.{name}={text}: {error}; write a,b or \"('a','b')\"") from error
    if all(isinstance(item, str) for item in present):
        return value
    return tuple(_literal(item) if isinstance(item, str) else item for item in value)


def join_new_values(
    overrides: Mapping[str, Any], config: ml_collections.ConfigDict
) -> dict[str, Any]:
    """Converts overrides of missing settings to overrides of whole groups.

    `readable_overrides` does the same for command-line arguments.

    Args:
        overrides: maps dotted names of settings to values.
        config: the config that will be overridden.
    """
    groups: dict[str, dict[str, Any]] = {}
    rest: dict[str, Any] = {}
    for name, value in overrides.items():
        if group := _open_group(config, name):
            _join(groups, config, group, name.removeprefix(f"{group}."), value)
        else:
            present = check_key(config, name)
            is_text = isinstance(present, tuple) and isinstance(value, str)
            rest[name] = _tuple_like(present, value, name) if is_text else value
    return {name: ml_collections.ConfigDict(values) for name, values in groups.items()} | rest


def lock(config: ml_collections.ConfigDict) -> None:
    """Locks a config, so that overrides add no keys, except in groups that may gain keys.

    These list only changed settings (`fields.Sparse`), such as ``algorithm``, or have keys that the
    user chooses, such as ``rewards``.
    """
    config.unlock()  # `lock` of a locked config would skip groups that were assigned since
    config.lock()
    _unlock_open_groups(config, "")


def _unlock_open_groups(config: ml_collections.ConfigDict, prefix: str) -> None:
    for name, value in config.items():
        if isinstance(value, ml_collections.ConfigDict):
            if _OPEN.fullmatch(f"{prefix}{name}"):
                value.unlock()
            _unlock_open_groups(value, f"{prefix}{name}.")


def _join(
    groups: dict[str, dict[str, Any]],
    config: ml_collections.ConfigDict,
    group: str,
    name: str,
    value: Any,
) -> None:
    """Sets a dotted key of a group, which begins with the settings of the config."""
    if group not in groups:
        groups[group] = check_key(config, group).to_dict()
    *outer, last = name.split(".")
    inner = groups[group]
    for part in outer:
        inner = inner.setdefault(part, {})
        if not isinstance(inner, dict):
            raise UserError(f"--config.{group}.{name}: {part} is a value, without settings")
    inner[last] = value


def check_key(config: Any, key: str) -> Any:
    """Returns the value of a setting with a dotted name, such as ``a.b`` or ``a[0].b``.

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
                advice = hint(f"{walked}.{part}") or suggest(str(part), map(str, node))
                raise UserError(f"--config.{key}: {walked} has no key {part!r}{advice}")
        elif not (isinstance(node, tuple) and isinstance(part, int) and part < len(node)):
            kind = type(node).__name__
            raise UserError(f"--config.{key}: {walked} is a value of type {kind}, without keys")
        node, walked = node[part], f"{walked}.{part}"
    return node


def wrong_value(message: str) -> str:
    """Rewrites absl's message about a value of a wrong type so that it says what to write.

    >>> wrong_value("flag --config.steps=1e3: invalid literal for int() with base 10: '1e3'")
    "--config.steps=1e3: an integer is needed; write 1000"
    """
    message = message.removeprefix("flag ")
    faults = "invalid literal for int|could not convert string|Exceeds the limit|Failed to parse"
    match = re.match(rf"((--[^=]+)=(.*?)): ({faults}|\('Non-boolean)", message)
    if not match:
        return message
    switch, name, text, fault = match.groups()
    if "parse" in fault:
        return f"{switch}: it is a group of settings; write {name}.KEY=VALUE"
    if "boolean" in fault:
        return f"{switch}: write True or False"
    if "convert" in fault:
        return f"{switch}: a number is needed"
    with contextlib.suppress(ValueError, OverflowError):
        if float(text).is_integer():
            return f"{switch}: an integer is needed; write {int(float(text))}"
    return f"{switch}: an integer is needed"
