"""Declares the bounds of settings in the type annotations of config dataclasses.

    @dataclasses.dataclass(frozen=True)
    class Sampling(Bounded):
        temperature: Annotated[float, Between(0, 100)] = 1.0
        samples: Count = 1
        order: Annotated[str, OneOf("random", "sorted")] = "random"
        sizes: tuple[Count, ...] = ()

Neither `settings.build_config`, which reads a config file, nor a caller in Python can create an
instance with a value of a wrong type or out of bounds:

    >>> Sampling(temperature=1e20)
    UserError: temperature is 1e+20; give a number from 0 to 100
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
import os
import re
import types
import typing
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, TypeVar

from coa_jax.errors import UserError, UserErrors

T = TypeVar("T")

MAX_INT = 2**31 - 1
"""Largest integer that a setting may have: XLA uses int32 for positions, rows and row bytes."""


@dataclasses.dataclass(frozen=True)
class Between:
    """Allows numbers from ``low`` to ``high``, but never NaN.

    Infinity is allowed only if a bound is infinite.

    Attributes:
        low, high: lower and upper bound.
        above: whether ``low`` itself is excluded.
        below: whether ``high`` itself is excluded.
        also: further allowed values, which lie outside the bounds; for example a 0 that means "no
            limit".
    """

    low: float
    high: float
    above: bool = False
    below: bool = False
    also: tuple[float, ...] = ()

    def allows(self, value: Any) -> bool:
        """Returns whether a value, which already has the annotated type, is within the bounds."""
        inside = self.low <= value <= self.high
        edge = (self.above and value == self.low) or (self.below and value == self.high)
        return (inside and not edge) or value in self.also

    def describe(self, kind: type[Any]) -> str:
        """Describes the allowed numbers for an error such as "give a number from 0 to 1".

        Args:
            kind: type of the value, int or float.
        """
        noun = "a whole number" if kind is int else "a number"
        low = f"above {_number(self.low)}" if self.above else f"from {_number(self.low)}"
        high = f"to {_number(self.high)}"
        if self.above:
            high = f"and at most {_number(self.high)}"
        if self.below:
            high = f"and below {_number(self.high)}"
        return ", or ".join([f"{noun} {low} {high}", *map(_number, self.also)])


@dataclasses.dataclass(frozen=True, init=False)
class OneOf:
    """Allows only the names in a given set.

    Attributes:
        known: the allowed names, or functions that are called at each check and return them.
    """

    known: tuple[str, ...] | Callable[[], Iterable[str]]

    def __init__(self, *names: str | Callable[[], Iterable[str]]):
        """Takes the allowed names, or a single function that returns them."""
        table = names[0] if names and callable(names[0]) else names
        object.__setattr__(self, "known", table)

    def names(self) -> tuple[str, ...]:
        """Returns the names that are allowed at the time of the call."""
        return tuple(self.known() if callable(self.known) else self.known)

    def allows(self, value: Any) -> bool:
        """Returns whether a value of the right type is one of the allowed names."""
        return value in self.names()

    def describe(self, kind: type[Any]) -> str:
        """Describes the allowed names for an error such as "give one of a, b"; ignores ``kind``."""
        return "one of " + ", ".join(name or '""' for name in self.names())


@dataclasses.dataclass(frozen=True)
class Text:
    """Allows strings without NUL that can be encoded as UTF-8, as paths and HTTP requests require.

    Attributes:
        longest: maximum length in characters.
        pattern: regular expression that must match the whole string.
        what: description of the allowed strings; error messages put "give " before this text.
        hidden: whether error messages omit the value because it may be a secret.
    """

    longest: int = 100_000
    pattern: str = ".*"
    what: str = ""
    hidden: bool = False

    def allows(self, value: Any) -> bool:
        """Returns whether a string is UTF-8 without NUL, and fits ``longest`` and ``pattern``."""
        if len(value) > self.longest or re.search("[\0\ud800-\udfff]", value):
            return False
        return re.fullmatch(self.pattern, value, re.DOTALL) is not None

    def describe(self, kind: type[Any]) -> str:
        """Describes the allowed strings for an error such as "give a name"; ignores ``kind``."""
        return self.what or f"at most {self.longest} characters of UTF-8 without NUL"


@dataclasses.dataclass(frozen=True)
class Items:
    """Allows tuples and mappings whose number of items is within bounds.

    Attributes:
        low, high: minimum and maximum number of items.
    """

    low: int
    high: int

    def allows(self, value: Any) -> bool:
        """Returns whether a tuple or mapping has an allowed number of items."""
        return self.low <= len(value) <= self.high

    def describe(self, kind: type[Any]) -> str:
        """Describes the allowed number for an error such as "give 2 items"; ignores ``kind``."""
        number = self.low if self.low == self.high else f"{self.low} to {self.high}"
        return f"{number} items"


Bound = Between | OneOf | Text | Items


@dataclasses.dataclass(frozen=True)
class Sparse:
    """Marks a group of settings that a config lists only if they differ from their defaults.

    Such a group configures a feature that is off by default, such as a judge, or changes some
    settings of a preset, such as an RL algorithm.
    """


def is_sparse(annotation: Any) -> bool:
    """Returns whether an annotation marks a group as `Sparse`."""
    return any(isinstance(mark, Sparse) for mark in getattr(annotation, "__metadata__", ()))


Share = Annotated[float, Between(0, 1)]
Seed = Annotated[int, Between(0, MAX_INT)]
Count = Annotated[int, Between(1, MAX_INT)]
Natural = Annotated[int, Between(0, MAX_INT)]
Amount = Annotated[int, Between(0, 2**63 - 1)]
"""Number of bytes, or of tokens of a whole run; such a number may exceed int32."""
Temperature = Annotated[float, Between(0, 100)]
TopP = Annotated[float, Between(0, 1, above=True)]
Positive = Annotated[float, Between(0, 1e9, above=True)]
NotNegative = Annotated[float, Between(0, 1e9)]
Seconds = Annotated[float, Between(0, 30 * 86400, above=True)]
"""Time limit in seconds; a limit above 30 days is treated as a mistake."""
SecondsOrNone = Annotated[float, Between(0, 30 * 86400)]
Size = Annotated[int, Between(1, 2**24)]
"""Length of an array axis, such as the number of rows, of tokens in a row or of slots."""
Times = Annotated[int, Between(1, 1000)]
"""Number of attempts, or of concurrent operations."""
MiB = Annotated[int, Between(1, 2**24)]
Port = Annotated[int, Between(0, 65535)]
Prose = Annotated[str, Text()]
Place = Annotated[str, Text(4096, r"[^\x00-\x1f\x7f]*")]
"""Name of a file, a directory, a model or a task source; "" for none, if the field allows it."""
Address = Annotated[
    str, Text(4096, r"(https?://\S+)?", 'an address such as http://localhost:8000/v1, or ""')
]
"""URL of a service; "" for none."""
Variable = Annotated[
    str, Text(200, r"([A-Za-z_]\w*)?", 'the name of an environment variable, or ""', hidden=True)
]
"""The name of an environment variable; "" for none."""
Name = Annotated[str, Text(100, r"(?!\.)[\w.+-]+", "a name of letters, digits and . _ + -")]
"""A name that the user chooses, such as the name of a stage, and that becomes part of a path."""
Split = Literal["train", "validation", "test"]
"""Name of a split of a task source."""


class Bounded:
    """Base class of config dataclasses, which checks every field when an object is created.

    A field of a wrong type, or out of the bounds in its annotation, raises a `UserError`.
    """

    def __post_init__(self) -> None:
        """Checks the fields; a subclass with additional checks must call this method first.

        Raises:
            UserErrors: values have a wrong type or are out of bounds. Each message begins with the
                name of the field; `settings.build_config` puts the name of the config before it.
        """
        cls: Any = type(self)
        errors = []
        for name, annotation in field_annotations(cls).items():
            try:
                check(getattr(self, name), annotation, name)
            except UserError as error:
                errors.append(error)
        if errors:
            raise UserErrors(errors)


@functools.cache
def field_annotations(cls: type[Any]) -> dict[str, Any]:
    """Returns the annotation, including bounds, of each field of a dataclass, by name."""
    types_of_fields = typing.get_type_hints(cls, include_extras=True)
    return {field.name: types_of_fields[field.name] for field in dataclasses.fields(cls)}


def without_none(annotation: Any) -> Any:
    """Removes ``| None`` from an annotation: ``X`` for ``X | None``; others stay unchanged."""
    if not isinstance(annotation, types.UnionType):
        return annotation
    (kind,) = (part for part in typing.get_args(annotation) if part is not types.NoneType)
    return kind


def check(value: T, annotation: Any, where: str) -> T:
    """Returns ``value`` if it has the type and obeys the bounds of an annotation.

    Args:
        value: value of a setting.
        annotation: an annotation such as ``int``, `Count` or ``tuple[Share, ...]``.
        where: name of the setting, used in the error message.

    Raises:
        UserError: the value has a wrong type or is out of bounds.
    """
    if value is None and without_none(annotation) is not annotation:
        return value
    annotation = without_none(annotation)
    kind, bounds = parts(annotation)
    if not _has_type(value, kind) or not all(bound.allows(value) for bound in bounds):
        expected = ", ".join(bound.describe(kind) for bound in bounds) or _NOUNS.get(kind)
        hidden = any(isinstance(bound, Text) and bound.hidden for bound in bounds)
        text = (
            "a text that may be secret"
            if hidden and isinstance(value, str)
            else format_value(value)
        )
        raise UserError(f"{where} is {text}; give {expected or f'a {kind.__name__}'}")
    if isinstance(value, tuple):
        items = typing.get_args(annotation_of(annotation))
        if items[1:] == (...,):
            items = items[:1] * len(value)
        if len(items) != len(value):
            raise UserError(f"{where} is {format_value(value)}; give {len(items)} items")
        for index, (part, item) in enumerate(zip(value, items, strict=True)):
            check(part, item, f"{where}[{index}]")
    return value


def parts(annotation: Any) -> tuple[type[Any], tuple[Bound, ...]]:
    """Returns the class and the bounds that the annotation of a setting declares.

    For a ``Literal``, the class is str, and the first bound is a `OneOf` with the names of the
    ``Literal``.
    """
    plain = annotation_of(annotation)
    marks = () if plain is annotation else typing.get_args(annotation)[1:]
    bounds = tuple(mark for mark in marks if not isinstance(mark, Sparse))
    origin = typing.get_origin(plain)
    if origin is Literal:
        return str, (OneOf(*typing.get_args(plain)), *bounds)
    return (object if plain is Any else origin or plain), bounds


def annotation_of(annotation: Any) -> Any:
    """Returns the type of an annotation without its bounds, such as ``int`` for `Count`.

    Bounds on the items of a tuple are kept.
    """
    annotated = typing.get_origin(annotation) is Annotated
    return typing.get_args(annotation)[0] if annotated else annotation


def freeze(value: Any) -> Any:
    """Converts lists in a value to tuples, so that a config is hashable.

    Configs must be hashable because they are static arguments of compiled functions.
    """
    return tuple(map(freeze, value)) if isinstance(value, list | tuple) else value


def has_default(field: dataclasses.Field[Any]) -> bool:
    """Returns whether a dataclass field has a default value or a default factory."""
    return (field.default, field.default_factory) != (dataclasses.MISSING,) * 2


def format_value(value: Any) -> str:
    """Formats a value for an error message, in one short line."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a whole number of {value.bit_length()} bits"
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number with too many digits, or deep nesting
        return f"a {type(value).__name__} that is too long or too deep to show"
    text = " ".join(text.split())
    return text if len(text) <= 120 else f"{text[:80]}... ({len(text)} characters)"


def _has_type(value: Any, kind: type[Any]) -> bool:
    """Returns whether a value has a type; a bool is not a number, and an int is a valid float."""
    if kind in (int, float):
        number = numbers.Integral if kind is int else numbers.Real
        return isinstance(value, number) and not isinstance(value, bool)
    return isinstance(value, kind)


_NOUNS: dict[type[Any], str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple: "a tuple",
}


def _number(value: float) -> str:
    """Formats a bound exactly, in as few characters as possible."""
    short = str(value) if isinstance(value, int) else f"{value:g}"
    return short if float(short) == value else repr(value)


def seconds_of(variable: str, default: float) -> float:
    """Reads a number of seconds from an environment variable.

    Args:
        variable: name of the variable.
        default: result if the variable is not set.

    Raises:
        UserError: the value is not a number above 0 and below a day.
    """
    text = os.environ.get(variable, str(default))
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 86400:
        raise UserError(f"{variable} is {text!r}; give seconds above 0")
    return value
