"""Writes the reference of the commands, their settings and the Python API as Markdown.

All text comes from the code, so the repository contains no page of the reference.  `build.py`
calls `pages` when it builds the site.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import pkgutil
import re
import sys
import types
import typing
import unittest.mock
from collections.abc import Iterator, Mapping
from typing import Any

from absl import flags

import coa_jax
from coa_jax.__main__ import COMMANDS
from coa_jax.config.fields import (
    MAX_INT,
    Bounded,
    OneOf,
    Text,
    annotation_of,
    field_annotations,
    parts,
    without_none,
)
from coa_jax.config.help import meanings
from coa_jax.config.renamed import REMOVED, RENAMED
from coa_jax.run import command

API = {
    "trajectories": ("Trajectories and records", "data.trajectory", "data.records"),
    "protocol": ("Protocols", "protocol"),
    "tasks": ("Tasks and rewards", "tasks", "tasks.base", "tasks.graders"),
    "tools": ("Tools", "tools.base", "tools.make"),
    "model": ("Model", "model.api", "model.config", "model.decoder"),
    "engine": ("Engine", "engine.config", "engine.engine"),
    "rollout": ("Rollouts", "rollout.request", "rollout.episodes", "rollout.collect"),
    "train": ("Training", "train.algorithms", "train.objectives", "train.losses", "train.step"),
    "extensions": ("Extensions and settings", "config.extensions", "run.settings", "config.fields"),
}
"""Name of each page of the Python API -> its title and its modules in ``coa_jax``."""

_KINDS = {
    "string": "text",
    "enum": "word",
    "bool": "switch",
    "int": "whole number",
    "float": "number",
    "comma separated list of strings": "words separated by commas",
}
_VALUES = re.compile(r"see `([\w.]+)`")
"""Matches, in the meaning of a table, the name of the class that describes the table's values."""
_ENDLESS = re.compile(rf" to ({MAX_INT}|{2**63 - 1})$")


def pages() -> dict[str, str]:
    """Returns the Markdown of each generated page by its path below ``docs/``."""
    found = {"commands/index.md": _commands()}
    tables: dict[type[Any], set[str]] = {}
    for name in COMMANDS:
        found[f"commands/{name}.md"] = _command(name, tables)
    found["commands/settings.md"] = _settings_of_tables(tables)
    for name, (title, *modules) in API.items():
        blocks = [f"::: coa_jax.{module}" for module in modules]
        found[f"api/{name}.md"] = "\n\n".join([f"# {title}", *blocks, ""])
    return found


# --- what the code says --------------------------------------------------------------------


@functools.cache
def config_classes() -> list[type[Any]]:
    """Returns every dataclass of settings in the package, sorted by module and name."""
    for module in pkgutil.walk_packages(coa_jax.__path__, "coa_jax."):
        importlib.import_module(module.name)

    def below(cls: type[Any]) -> Iterator[type[Any]]:
        for child in cls.__subclasses__():
            yield from (child, *below(child))

    own = {cls for cls in below(Bounded) if cls.__module__.startswith("coa_jax.")}
    return sorted(own, key=lambda cls: (cls.__module__, cls.__qualname__))


def values_of(annotation: Any, meaning: str) -> type[Any] | None:
    """Returns the dataclass that describes the values of a table of groups of settings.

    Args:
        annotation: annotation of the setting.
        meaning: meaning of the setting; for a table of groups, it names the dataclass.

    Returns:
        None for a setting that is no table, or whose values are no groups of settings.
    """
    kind, _ = parts(without_none(annotation))
    named = _VALUES.search(meaning)
    if not issubclass(kind, Mapping) or named is None:
        return None
    paths = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in config_classes()}
    return next((cls for path, cls in paths.items() if path.endswith(f".{named[1]}")), None)


def entry_point(name: str) -> types.ModuleType:
    """Returns the imported module of a command."""
    module = importlib.import_module(f"coa_jax.{COMMANDS[name]}")
    return (
        importlib.import_module(f"{module.__name__}.__main__")
        if hasattr(module, "__path__")
        else module
    )


def _argument(module: types.ModuleType, function: str, index: int) -> Any:
    """Returns an argument of a module's call of a function; None if the module has no such call."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if not isinstance(node, ast.Call) or len(node.args) <= index:
            continue
        if getattr(node.func, "id", "") == function:
            code = compile(ast.Expression(node.args[index]), module.__name__, "eval")
            return eval(code, vars(module))
    return None


def command_flags(module: types.ModuleType) -> list[flags.Flag[Any]]:
    """Returns the flags of an entry point in the order of their definition."""
    define = _argument(module, "run_main", 1)
    before = set(flags.FLAGS)
    if define is not None:
        define()
    found = [flags.FLAGS[name] for name in flags.FLAGS if name not in before]
    for flag in found:
        delattr(flags.FLAGS, flag.name)
    return found


def command_parser(module: types.ModuleType) -> argparse.ArgumentParser | None:
    """Returns the parser of an entry point that uses argparse; None for one with flags of absl."""
    if "argparse" not in vars(module):
        return None
    found = []

    def stop(parser: argparse.ArgumentParser, *_: Any) -> None:
        found.append(parser)
        raise InterruptedError

    with (
        unittest.mock.patch.object(argparse.ArgumentParser, "parse_known_args", stop),
        unittest.mock.patch.object(sys, "argv", [module.__name__]),
        contextlib.suppress(InterruptedError),
    ):
        module.main()
    return found[0]


def command_settings(module: types.ModuleType) -> type[Any] | None:
    """Returns the dataclass that the config of a command fills; None for one without."""
    command.defined_config = command.ConfigFlag()
    command_flags(module)
    return command.defined_config.settings


# --- Markdown ------------------------------------------------------------------------------


def _commands() -> str:
    lines = []
    for name in COMMANDS:
        about = (entry_point(name).__doc__ or "").partition("\n")[0]
        lines.append(f"| [`{name}`]({name}.md) | {about} |")
    rows = "\n".join(lines)
    return f"""\
# Commands

`python -m coa_jax COMMAND` runs the same code.

| command | purpose |
|---|---|
{rows}
"""


def _command(name: str, tables: dict[type[Any], set[str]]) -> str:
    module = entry_point(name)
    lines = [f"# coa-jax {name}", "", prose(inspect.cleandoc(module.__doc__ or "")), ""]
    parser = command_parser(module)
    options = parser._actions[1:] if parser else []  # the first is --help
    told = {f"--{flag.name}": _flag(flag) for flag in command_flags(module)}
    told |= {option.option_strings[-1]: _option(option) for option in options}
    lines += ["## Flags", ""] if told else []
    for flag, about in told.items():
        lines += _definition(flag, f"flag-{flag[2:]}", *about)
    settings = command_settings(module)
    if settings:
        text = "The config file sets these values; `--config.KEY=VALUE` overrides a value."
        lines += ["## Settings", "", text, "", *_group(settings, "", None, tables, 2)]
    return "\n".join(lines)


def _flag(flag: flags.Flag[Any]) -> tuple[str, str]:
    kind = _KINDS.get(flag.flag_type(), flag.flag_type())
    about = prose(" ".join((flag.help or "").split()))
    about = about[:1].upper() + about[1:]
    if known := [value for value in getattr(flag.parser, "enum_values", None) or () if value]:
        about += ". One of " + ", ".join(f"`{value}`" for value in known) + "."
    if flag.name == "config":
        return "file", about
    # A flag is required where one of its checks refuses None.
    checks = [check for check in flag.validators if hasattr(check, "flag_name")]
    required = flag.default is None and not all(check.checker(None) for check in checks)
    return f"{kind}, {'required' if required else f'default {_value(flag.default)}'}", about


def _option(option: argparse.Action) -> tuple[str, str]:
    kind = "switch" if option.nargs == 0 else "whole number" if option.type is int else "text"
    known = ", ".join(f"`{choice}`" for choice in option.choices or ())
    about = [prose(option.help or "")] + ([f"One of {known}."] if known else [])
    default = "" if option.nargs == 0 else f", default {_value(option.default)}"
    return f"{'word' if known else kind}{default}", " ".join(filter(None, about))


def _settings_of_tables(tables: Mapping[type[Any], set[str]]) -> str:
    lines = [
        "# Further groups of settings\n\n"
        "Some settings are tables whose keys you choose. The value of each key is a group of\n"
        "settings; for example, `tools.mcp.NAME.command` is a setting of the key NAME in the\n"
        "table `tools.mcp`.\n",
    ]
    for cls in sorted(tables, key=lambda cls: cls.__name__):
        keys = ", ".join(f"`{key}.NAME`" for key in sorted(tables[cls]))
        lines += [f"## {cls.__name__}", "", f"Settings of {keys}.", ""]
        lines += _group(cls, "", None, {}, 2, cls.__name__)
    lines += ["## Former keys", "", "| former key | write, or what holds now |", "| --- | --- |"]
    lines += [f"| `{old}` | `{new}` |" for old, new in RENAMED.items()]
    lines += [f"| `{old}` | {text} |" for old, text in REMOVED.items()]
    return "\n".join([*lines, ""])


def _group(
    cls: Any,
    path: str,
    default: Any,
    tables: dict[type[Any], set[str]],
    level: int,
    place: str = "",
) -> list[str]:
    """Returns the Markdown of the settings of a dataclass, and then of the groups inside it.

    Args:
        cls: the dataclass.
        path: key of the group in the config, with a dot at the end; "" for the whole config.
        default: instance with the default values; None if there are no default values.
        tables: dataclass -> keys of the tables of such groups; the tables of this group are added.
        level: level of the heading above the group.
        place: prefix of the anchors, for a page with several configs.
    """
    about = inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")[0].strip()
    lines = [prose(about), ""] if path or place else []
    told, groups = meanings(cls), []
    for field in dataclasses.fields(cls):
        annotation = field_annotations(cls)[field.name]
        kind, _ = parts(without_none(annotation))
        given = _default(field) if default is None else getattr(default, field.name)
        if dataclasses.is_dataclass(kind):
            groups.append((field.name, kind, None if given is dataclasses.MISSING else given))
            continue
        needed = "required" if given is dataclasses.MISSING else f"default {_value(given)}"
        key = path + field.name
        about = _sentences(prose(told.get(field.name, "")), annotation)
        if values := values_of(annotation, about):
            tables.setdefault(values, set()).add(key)
            page = "" if place else "settings.md"
            about = _VALUES.sub(f"see [{values.__name__}]({page}#{values.__name__.lower()})", about)
        lines += _definition(key, place + key, f"{type_name(annotation)}, {needed}", about)
    for name, kind, given in groups:
        key = f"{path}{name}"
        lines += [f"{'#' * min(level + 1, 6)} `{key}` {{ #{place}{key} }}", ""]
        meaning = prose(told.get(name, ""))
        again = (kind.__doc__ or "").lower().startswith(meaning.rstrip(".").lower())
        lines += [] if again else [f"{meaning[:1].upper()}{meaning[1:]}", ""]
        lines += _group(kind, f"{key}.", given, tables, level + 1, place)
    return lines


def _default(field: dataclasses.Field[Any]) -> Any:
    make = field.default_factory
    return field.default if make is dataclasses.MISSING else make()


def _definition(name: str, anchor: str, about: str, meaning: str) -> list[str]:
    term = f'<span id="{anchor}"></span>`{name}` <span class="kind">{about}</span>'
    return [term, f":   {meaning}", ""]


def _sentences(meaning: str, annotation: Any) -> str:
    """Returns the meaning of a setting as sentences, and its bounds unless the meaning has them."""
    _, bounds = parts(without_none(annotation))
    names = [name for bound in bounds if isinstance(bound, OneOf) for name in bound.names()]
    if names and all(name in meaning for name in names):
        return meaning
    return f"{meaning[:1].upper()}{meaning[1:]} {allowed(annotation)}".strip()


def type_name(annotation: Any) -> str:
    """Returns the name of the type of a setting: "whole number", "tuple of texts", ..."""
    optional = without_none(annotation) is not annotation
    plain = annotation_of(without_none(annotation))
    kind, _ = parts(without_none(annotation))
    names = {int: "whole number", float: "number", str: "text", bool: "True or False"}
    name = names.get(kind, "table" if issubclass(kind, Mapping) else kind.__name__)
    if kind is tuple:
        items = [item for item in typing.get_args(plain) if item is not ...]
        name = "tuple of " + " and ".join(f"{type_name(item)}s" for item in items)
    return f"{name} or None" if optional else name


def allowed(annotation: Any) -> str:
    """Returns a sentence about the bounds of a setting; "" if the type has no bounds."""
    kind, bounds = parts(without_none(annotation))
    told = [
        _ENDLESS.sub("", bound.describe(kind))
        for bound in bounds
        if not isinstance(bound, Text) or bound.what
    ]
    return f"Allowed: {', '.join(told)}." if told else ""


def _value(value: Any) -> str:
    if value is None or value in ("", ()):
        return "none"
    if isinstance(value, tuple) and all(isinstance(item, str) for item in value):
        value = ",".join(value)
    return f"<code>{str(value).replace('<', '&lt;')}</code>"


def prose(text: str) -> str:
    """Returns a docstring as Markdown, in which names of pages are links from ``commands/``."""
    return re.sub(r"(?<![\w/(])docs/([\w-]+)\.md(#[\w-]+)?", r"[\1](../\1.md\2)", text)
