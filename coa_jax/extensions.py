"""Names in a config that mean code: tools, task sources, rewards, readers, filters.

A name is a short name that is built in, a short name that an installed package gives (an entry
point of the group of its kind, such as ``coa_jax.tools``), or ``package.module:name``.

The three are found by `find` and called by the same code, which passes arguments by the names of
parameters.  A parameter is one of those that the kind offers (`Kind.offers`), or an option: a
setting that the config gives, with the default and the type of the parameter.

    def load(n: int, seed: int, level: int = 1) -> list[Task]: ...     # a task source

    --config.tasks=my_tasks:load:level=3
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import re
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from ml_collections import ConfigDict

from coa_jax.bounds import Bounded, OneOf, Text, check, parts, present, shown
from coa_jax.errors import UserError
from coa_jax.overrides import suggest

PATH = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
"""``package.module:name``."""

_TOLD = "a known name, or package.module:name"
_CHECKED = (int, float, bool, str, tuple)
"""Types of options that are checked; a parameter of another type takes any value."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of thing that configs name.

    Attributes:
        noun: what one is called, such as "tool".
        group: of entry points, such as "coa_jax.tools".
        built_in: short name -> a function or class, or the ``package.module:name`` of one.
        offers: what a function may ask for by the name of a parameter.
        needs: of those, at least one that it has to ask for; empty for none.
        given: short name -> a function or class of this process, see `name_of`.
    """

    noun: str
    group: str
    built_in: Mapping[str, Any]
    offers: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    given: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @property
    def one(self) -> str:
        """The noun with its article."""
        return f"{'an' if self.noun[0] in 'aeiou' else 'a'} {self.noun}"

    def names(self) -> tuple[str, ...]:
        """The short names: built-in ones, then those of this process and of installed packages."""
        installed = sorted(self._installed().names)
        return tuple(dict.fromkeys((*self.built_in, *self.given, *installed)))

    def knows(self, name: str) -> bool:
        """Whether a text is a short name."""
        return name in self.built_in or name in self.given or name in self._installed().names

    def name_of(self, found: Callable[..., Any], short: str) -> str:
        """The name by which a config calls a function or class that Python code has at hand.

        Args:
            found: the function or class.
            short: a word of the caller's for it.

        Returns:
            ``package.module:name`` if that leads to the function, else ``given.SHORT``, which this
            process alone knows: nothing else leads to a lambda or a function inside another.
        """
        name = getattr(found, "__qualname__", type(found).__qualname__)
        inside: Any = sys.modules.get(getattr(found, "__module__", None) or "")
        for part in name.split("."):
            inside = getattr(inside, part, None)
        if inside is found:
            return f"{found.__module__}:{name}"
        self.given[f"given.{short}"] = found
        return f"given.{short}"

    def path_of(self, name: str) -> str:
        """The ``package.module:name`` that an installed package means by a short name; else ""."""
        found = {entry.value for entry in self._installed().select(name=name)}
        if len(found) > 1:
            raise UserError(
                f"the {self.noun} {name!r} is in several installed packages: "
                f"{', '.join(sorted(found))}; name one of these"
            )
        return "".join(found)

    def _installed(self) -> importlib.metadata.EntryPoints:
        return importlib.metadata.entry_points(group=self.group)


class Named(OneOf):
    """Bound of a setting: a short name of a kind, a further name, or ``package.module:name``."""

    def __init__(self, kind: Kind, *further: str):
        """Takes the kind, and names that are no things of this kind."""
        super().__init__(lambda: (*kind.names(), *further))
        object.__setattr__(self, "at_hand", (*further, *kind.built_in))

    def holds(self, value: Any) -> bool:
        """Whether a value of the annotated type is allowed."""
        # What packages are installed is read from the disk, so it comes last.
        return value in self.at_hand or is_path(value) or value in self.names()  # type: ignore[attr-defined]

    def wanted(self, kind: type[Any]) -> str:
        """Completes "give ..." in the error for a value of type ``kind``."""
        return f"{super().wanted(kind)}, or package.module:name"


@dataclasses.dataclass(frozen=True)
class Extension(Bounded):
    """A thing that a config names, with its settings.

    Attributes:
        path: ``package.module:name``, or a short name; "" where the config's own key is one.
        options: its settings.
    """

    path: Annotated[str, Text(500, rf"({PATH}|[\w.+-]*)", _TOLD)] = ""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Bound:
    """A function with its options.

    Attributes:
        found: the function or class.
        asks: of what its kind offers, what it asks for.
        options: the values of its other parameters, as far as the config gives them.
    """

    found: Callable[..., Any]
    asks: frozenset[str]
    options: Mapping[str, Any]

    def __call__(self, **offered: Any) -> Any:
        """Calls it with what it asks for."""
        asked = {name: value for name, value in offered.items() if name in self.asks}
        return self.found(**asked, **self.options)


def is_path(name: str) -> bool:
    """Whether a text has the form ``package.module:name``."""
    return len(name) <= 500 and re.fullmatch(PATH, name) is not None


def importable(folder: Path) -> None:
    """Lets modules of a folder be imported, after those of installed packages."""
    place = str(folder.resolve())
    if place not in sys.path:
        sys.path.append(place)


def find(kind: Kind, name: str, where: str) -> Callable[..., Any]:
    """The function or class that a name means.

    Args:
        kind: what it shall be.
        name: a short name, or ``package.module:name``.
        where: the setting, for errors.

    Raises:
        UserError: nothing has the name, its module cannot be imported, or it cannot be called.
    """
    found = kind.given.get(name, kind.built_in.get(name))
    if found is None:
        path = name if is_path(name) else kind.path_of(name)
        if not path:
            near = suggest(name, kind.names())
            raise UserError(
                f"{where}: there is no {kind.noun} {name!r}{near}; one of your own is named as"
                " package.module:name"
            )
        found = path
    if isinstance(found, str):
        found = _load(kind, found, where)
    if not callable(found):
        raise UserError(f"{where}: {name} is {shown(found)}; {kind.one} is a function or a class")
    return typing.cast(Callable[..., Any], found)


def parameters_of(
    found: Callable[..., Any], name: str, where: str
) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function or class that `find` gave, by name."""
    try:
        return inspect.signature(found).parameters
    except (ValueError, TypeError):  # of a function in C
        raise UserError(f"{where}: {name} does not say what parameters it has") from None


def _load(kind: Kind, path: str, where: str) -> Any:
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # whatever the code of others raises is told as theirs
        absent = isinstance(error, ModuleNotFoundError) and error.name
        if absent and f"{module}.".startswith(f"{absent}."):
            raise UserError(
                f"{where}: {path}: there is no module {absent!r} among the installed packages, in "
                "the folder of the config file or in the working directory"
                f"{_near(module, kind.names())}"
            ) from None
        raise UserError(f"{where}: {path} cannot be imported: {_reason(error)}") from error
    file = getattr(found, "__file__", None) or module
    for part in name.split("."):
        if not hasattr(found, part):
            known = [n for n in vars(found) if not n.startswith("_")]
            raise UserError(f"{where}: {path}: {file} has no {part!r}{suggest(part, known)}")
        found = getattr(found, part)
    return found


def _reason(error: Exception) -> str:
    """An error of a module, and the line of the module where it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if "importlib" not in frame.filename]
    place = f" ({inside[-1].filename}:{inside[-1].lineno})" if len(inside) > 1 else ""
    return f"{type(error).__name__}: {error}{place}"


def tried(call: Bound, name: str, where: str, advice: str = "", **offered: Any) -> Any:
    """What a function gives for what it asks for.

    Args:
        call: the function with its options.
        name, where: of it, and the setting that names it, for errors.
        advice: what a function of this kind has to be.
        offered: what it may ask for.

    Raises:
        UserError: it failed; the message has its first line and the place in its file.
    """
    try:
        return call(**offered)
    except UserError:
        raise
    except Exception as error:  # whatever the code of others raises is told as theirs
        file = getattr(getattr(call.found, "__code__", None), "co_filename", "")
        frames = traceback.extract_tb(error.__traceback__)
        lines = [str(frame.lineno) for frame in frames if frame.filename == file]
        place = f" ({file}:{lines[-1]})" if lines else ""
        told = "; ".join(filter(None, (f"{first_line(error)}{place}", advice)))
        raise UserError(f"{where}: {name} failed: {told}") from error


def first_line(error: Exception) -> str:
    """An error's name and the first line of its message."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def bind(
    kind: Kind, name: str, options: Mapping[str, Any] | ConfigDict, where: str, text: bool = False
) -> Bound:
    """The function or class that a name means, with its options.

    Args:
        kind, name, where: as for `find`.
        options: settings by parameter.
        text: whether the values of the options are texts, read as the types of the parameters say.

    Raises:
        UserError: as for `find`; an option is unknown, missing or of another type; or the function
            asks for what its kind does not offer.
    """
    found = find(kind, name, where)
    parameters = parameters_of(found, name, where)
    kinds = inspect.Parameter
    named = {n: p for n, p in parameters.items() if p.kind in _BY_NAME}
    only = [n for n, p in parameters.items() if p.kind is kinds.POSITIONAL_ONLY]
    any_option = any(p.kind is kinds.VAR_KEYWORD for p in parameters.values())
    known = [n for n in named if n not in kind.offers]
    if isinstance(options, ConfigDict):
        options = options.to_dict()
    for option in options:
        if option not in known and not any_option:
            has = suggest(option, known) or (f"; there are {', '.join(known)}" if known else "")
            raise UserError(f"{where}: {name} has no option {option!r}{has or '; it has none'}")
    given = {
        option: _value(found, option, value, f"{where}: the option {option} of {name}", text)
        for option, value in options.items()
    }
    for parameter in known:
        if parameter not in given and named[parameter].default is kinds.empty:
            offers = ", ".join(kind.offers) or "nothing"
            raise UserError(
                f"{where}: {name} needs {parameter!r}{_near(parameter, kind.offers)}; {kind.one}"
                f" is called with what it asks for of {offers}, and with its options"
            )
    asks = frozenset(named) & frozenset(kind.offers)
    if only or (kind.needs and not asks & set(kind.needs)):
        takes = str(inspect.signature(found))
        raise UserError(
            f"{where}: {name} takes {takes}; {kind.one} has a parameter "
            f"{' or '.join(kind.needs or kind.offers)}, passed by name"
        )
    return Bound(found, asks, types.MappingProxyType(given))


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _near(name: str, offers: Iterable[str]) -> str:
    hint = suggest(name, offers)
    return hint if "did you mean" in hint else ""


def _value(found: Callable[..., Any], name: str, value: Any, where: str, text: bool) -> Any:
    """An option, checked against the type of its parameter."""
    annotation = _types(found).get(name, Any)
    simple = isinstance(annotation, type) or typing.get_origin(annotation) is not None
    try:
        kind, _ = parts(present(annotation)) if simple else (object, ())
    except ValueError:  # a union of several types
        kind = object
    if text and kind is not str:
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            value = ast.literal_eval(value)
    if kind is bool and value in (0, 1):
        value = bool(value)
    value = _frozen(value)
    return check(value, annotation, where) if kind in _CHECKED else value


@functools.cache
def _types(found: Callable[..., Any]) -> dict[str, Any]:
    """The types of the parameters, as far as they can be read."""
    function = found.__init__ if inspect.isclass(found) else found
    try:
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def read_options(text: str, where: str) -> dict[str, str]:
    """Options that a text gives as ``name=value,name=value``.

    Raises:
        UserError: a part has another form.
    """
    options = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"{where}: the option {part!r} is not understood; give NAME=VALUE")
        options[name] = value
    return options


class MisfitError(UserError):
    """A function gave what does not fit its kind."""


def refuse_result(kind: Kind, name: str, result: Any, wanted: str, where: str) -> MisfitError:
    """The error for a function that gave what does not fit its kind."""
    return MisfitError(
        f"{where}: {name} gave {shown(result)} ({type(result).__name__}); {kind.one} gives {wanted}"
    )
