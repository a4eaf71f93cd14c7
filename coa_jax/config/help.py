"""Describes settings for ``--help`` and for the reference: key, default and meaning.

The meanings stand in the ``Attributes:`` sections of the dataclasses.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from coa_jax.config.fields import field_annotations, is_sparse, parts, without_none
from coa_jax.config.overrides import suggest
from coa_jax.errors import UserError

_ENTRY = re.compile(r"(?P<names>[a-z_]\w*(, [a-z_]\w*)*):\s*(?P<text>.*)")
_END = re.compile(r"[;.:](?=\s|$)| \(|, (?:as|at most|if|including|or|see|such as|which) ")
"""Matches where a meaning can be cut so that it fits into a line."""
_KEY_WIDTH, _VALUE_WIDTH, _LONGEST = 26, 12, 32
_FEW, _MOST = 10, 30
"""With fewer keys than the first number, `outermost` adds keys, up to the second number."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A setting as users see it.

    Attributes:
        key: dotted name, such as ``optimizer.learning_rate``.
        value: present value as text; "required" if it is not set and has no default.
        meaning: text about the setting in the docstring of its class.
        inside: whether the setting belongs to a group that is `Sparse`.
    """

    key: str
    value: str
    meaning: str
    inside: bool = False


def meanings(cls: type[Any]) -> dict[str, str]:
    """Returns the meaning of each field, as the docstrings of a class and its bases state it."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        texts |= _attributes(base.__dict__.get("__doc__") or "")
    return texts


def _attributes(docstring: str) -> dict[str, str]:
    _, _, section = inspect.cleandoc(docstring).partition("\nAttributes:\n")
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        if line and not line.startswith(" "):
            break
        entry = _ENTRY.fullmatch(line[4:]) if line[4:5].strip() else None
        if entry:
            names = entry["names"].split(", ")
            texts |= dict.fromkeys(names, entry["text"])
        else:
            texts |= {name: f"{texts[name]} {line.strip()}".strip() for name in names}
    return texts


def settings_of(
    cls: Any, config: Mapping[str, Any], prefix: str = "", default: Any = None, inside: bool = False
) -> Iterator[Setting]:
    """Yields the settings of a dataclass, and of the dataclasses inside it.

    A group that is `Sparse` is a setting, too.

    Args:
        cls: the dataclass.
        config: present values; fields that are missing have their defaults.
        prefix: key of the dataclass in the whole config, with a dot at the end.
        default: object with the default values; None for the defaults of the class.
        inside: whether the dataclass belongs to a group that is `Sparse`.
    """
    texts = meanings(cls)
    for field in dataclasses.fields(cls):
        annotation = field_annotations(cls)[field.name]
        kind, _ = parts(without_none(annotation))
        make: Any = field.default_factory
        usual = field.default if make is dataclasses.MISSING else make()
        usual = usual if default is None else getattr(default, field.name)
        value = config.get(field.name, usual)
        key, meaning = prefix + field.name, texts.get(field.name, "").replace("`", "")
        if not dataclasses.is_dataclass(kind):
            text = "required" if value is dataclasses.MISSING else repr(value)
            yield Setting(key, text, meaning, inside)
            continue
        group = value if isinstance(value, Mapping) else {}
        if is_sparse(annotation) and not inside:
            names = ", ".join(field.name for field in dataclasses.fields(kind))
            yield Setting(key, repr(dict(group)), f"{meaning} Settings: {names}.")
        base = None if usual is dataclasses.MISSING else usual
        within = inside or is_sparse(annotation)
        yield from settings_of(kind, group, f"{key}.", base, within)


def page(settings: Iterable[Setting], keys: Sequence[str], width: int) -> str:
    """Returns a line of at most ``width`` characters for each key: key, value and short meaning."""
    by_key = {setting.key: setting for setting in settings}
    lines = []
    for setting in map(by_key.__getitem__, keys):
        value = _written(setting.value)
        value = value if len(value) <= _LONGEST else f"{value[: _LONGEST - 3]}..."
        start = f"  {setting.key:{_KEY_WIDTH}} {value:{_VALUE_WIDTH}} "
        lines.append(start + _cut(setting.meaning, width - len(start)))
    return "\n".join(lines)


def _written(value: str) -> str:
    """Returns a value as a flag takes it: text without quotes, and items with commas."""
    if value.startswith(("'", '"', "(")):
        plain = ast.literal_eval(value)
        items = plain if isinstance(plain, tuple) else (plain,)
        return ",".join(map(str, items)) or ('""' if plain == "" else value)
    return value


def _cut(text: str, width: int) -> str:
    """Returns the longest beginning of a text that fits and ends where a clause ends."""
    text = text.removesuffix(".")
    if len(text) <= width:
        return text
    ends = [match.start() for match in _END.finditer(text)]
    fitting = [end for end in ends if 10 < end <= width]
    return text[: fitting[-1]] if fitting else f"{text[: width - 3].rpartition(' ')[0]} ..."


def outermost(settings: Sequence[Setting]) -> list[str]:
    """Returns the keys outside groups and, if these are fewer than 10, the keys one group deep.

    In the second case there are at most 30 keys. Keys inside `Sparse` groups are left out.
    """
    keys = [setting.key for setting in settings if not setting.inside]
    outer = [key for key in keys if "." not in key]
    inner = [key for key in keys if key.count(".") == 1]
    return outer if len(outer) >= _FEW else [*outer, *inner][:_MOST]


def search(settings: Iterable[Setting], word: str, width: int) -> str:
    """Returns the settings whose key or meaning contains a word, with their whole meanings.

    Args:
        settings: the settings to search.
        word: the word, in any case; "all" for all settings outside `Sparse` groups.
        width: width of the text in characters.

    Raises:
        UserError: no setting contains the word.
    """
    settings, word = list(settings), word.lower()
    blocks = [
        f"  --config.{setting.key}={setting.value}\n{_indented(setting.meaning, width)}"
        for setting in settings
        if (
            not setting.inside
            if word == "all"
            else word in f"{setting.key} {setting.meaning}".lower()
        )
    ]
    if not blocks:
        hint = suggest(word, [part for setting in settings for part in setting.key.split(".")])
        raise UserError(f"--help {word}: no setting has this word{hint}; --help all shows each")
    return "\n".join(blocks)


def _indented(text: str, width: int) -> str:
    return textwrap.fill(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
