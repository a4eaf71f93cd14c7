"""Finds the code that names in a config stand for, such as tools, task sources and rewards.

A name is one of the following:

- a built-in short name,
- a short name that an installed package defines, by an entry point of the group of its kind, such
  as ``coa_jax.tools``,
- a path ``package.module:name``.

`find` looks up a name of any of these forms. `BoundFunction` calls the function that was found, and
passes arguments by the names of its parameters. A parameter is either an argument that the kind of
code offers (`ExtensionKind.offers`), or an option, which is set in the config. The parameter gives
the option its default and type.

    def load(n: int, seed: int, level: int = 1) -> list[Task]: ...   # a task source

    --config.tasks=my_tasks:load:level=3
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from ml_collections import ConfigDict

from coa_jax.config.fields import (
    Bounded,
    OneOf,
    Text,
    check,
    format_value,
    freeze,
    parts,
    without_none,
)
from coa_jax.config.overrides import suggest
from coa_jax.errors import UserError

PATH = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
"""Regular expression that matches ``package.module:name``."""

_TOLD = "a known name, or package.module:name"
_CHECKED = (int, float, bool, str, tuple)
"""Types against which the values of options are checked; other types accept any value."""


class Reference(str):
    """A function or class of the caller, as the value of a setting that names code.

    In a Python program, a config holds the object itself. In a file it holds the object's name: the
    path ``package.module:name`` if the object can be imported from there, else a name such as
    ``given.tasks``. No later process can find the object by such a name: give the object again.

    Attributes:
        target: the function or class.
    """

    target: Callable[..., Any]

    def __new__(cls, target: Callable[..., Any], short: str) -> Reference:
        """Refers to ``target``, by the name ``given.`` plus ``short`` if it cannot be imported."""
        name = getattr(target, "__qualname__", type(target).__qualname__)
        inside: Any = sys.modules.get(getattr(target, "__module__", None) or "")
        for part in name.split("."):
            inside = getattr(inside, part, None)
        path = f"{target.__module__}:{name}" if inside is target else f"given.{short}"
        reference = super().__new__(cls, path)
        reference.target = target
        return reference

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Reference:
        """Returns the reference itself, because `dataclasses.asdict` copies its values."""
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Pickles the reference as its name alone, without the object."""
        return str, (str(self),)


@dataclasses.dataclass(frozen=True)
class ExtensionKind:
    """A kind of code that configs can name, for example tools or rewards.

    Attributes:
        noun: singular noun of the kind, such as "tool".
        group: group of the entry points by which packages define short names, such as
            "coa_jax.tools".
        built_in: maps each built-in short name to a function or class, or to its path
            ``package.module:name``.
        offers: names of the arguments that coa_jax offers to a function of the kind. The function
            receives an argument if it has a parameter of the same name.
        needs: names of offered arguments; a function must accept at least one of them. If empty, a
            function need not accept any argument.
        adapt: function that converts functions with the signatures of other libraries.
    """

    noun: str
    group: str
    built_in: Mapping[str, Any]
    offers: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    adapt: Callable[[Any], Any] = lambda target: target

    @property
    def one(self) -> str:
        """The noun with its indefinite article, such as "a tool", for error messages."""
        return f"{'an' if self.noun[0] in 'aeiou' else 'a'} {self.noun}"

    def names(self) -> tuple[str, ...]:
        """Returns the short names of this kind: those built in, then those of other packages."""
        installed = sorted(self._installed().names)
        return tuple(dict.fromkeys((*self.built_in, *installed)))

    def knows(self, name: str) -> bool:
        """Returns whether a string is a short name of this kind."""
        return name in self.built_in or name in self._installed().names

    def path_of(self, name: str) -> str:
        """Returns the path ``package.module:name`` for a name that an installed package defines.

        The path is "" if no installed package defines the name.

        Raises:
            UserError: several installed packages define the name.
        """
        paths = {entry.value for entry in self._installed().select(name=name)}
        if len(paths) > 1:
            several = f"the {self.noun} {name!r} is in several installed packages"
            raise UserError(f"{several}: {', '.join(sorted(paths))}; name one of these")
        return "".join(paths)

    def _installed(self) -> importlib.metadata.EntryPoints:
        places = [place for place in sys.path if os.path.exists(place)]
        return _entry_points(
            self.group, tuple((place, os.stat(place).st_mtime_ns) for place in places)
        )


@functools.lru_cache(maxsize=32)
def _entry_points(
    group: str, places: tuple[tuple[str, int], ...]
) -> importlib.metadata.EntryPoints:
    """Reads a group of entry points again if ``sys.path`` or one of its folders has changed."""
    return importlib.metadata.entry_points(group=group)


class Named(OneOf):
    """Allows names of code of one kind, such as rewards, as the value of a setting.

    These are the short names of the kind, some further names, and paths ``package.module:name``.
    """

    def __init__(self, kind: ExtensionKind, *further: str):
        """Takes the kind, and further names that the setting allows."""
        super().__init__(lambda: (*kind.names(), *further))
        object.__setattr__(self, "at_hand", (*further, *kind.built_in))

    def allows(self, value: Any) -> bool:
        """Returns whether a value is an allowed name, has the form of a path, or is an object."""
        if isinstance(value, Reference) or value in self.at_hand or is_path(value):  # type: ignore[attr-defined]
            return True
        # Listing the names of installed packages reads from the disk, so this test comes last.
        return value in self.names()

    def describe(self, kind: type[Any]) -> str:
        """Describes the allowed names for an error such as "give one of a, b"; ignores ``kind``."""
        return f"{super().describe(kind)}, or package.module:name"


@dataclasses.dataclass(frozen=True)
class Extension(Bounded):
    """A reference to code in a config, with the options of the code.

    Attributes:
        path: a path ``package.module:name`` or a short name. It may be "" if the group that holds
            ``path`` has the short name as its key, as in ``rewards.f1.weight=2``.
        options: values of the function's options, keyed by the name of the parameter.
    """

    path: Annotated[str, Text(500, rf"({PATH}|[\w.+-]*)", _TOLD)] = ""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class BoundFunction:
    """A user-defined or built-in function, together with the options that the config gives.

    Attributes:
        function: the function or class.
        asks: names of the function's parameters to which the caller passes arguments. Each kind of
            extension offers a fixed set of such arguments, see `ExtensionKind.offers`.
        options: maps the names of the function's other parameters to values; parameters that keep
            their defaults are left out.
    """

    function: Callable[..., Any]
    asks: frozenset[str]
    options: Mapping[str, Any]

    def __call__(self, **offered: Any) -> Any:
        """Calls the function with its options and with the offered arguments that it accepts."""
        return self.function(**self.arguments(offered))

    def arguments(self, offered: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the function's arguments: its options, and the offered values it accepts."""
        accepted = {name: value for name, value in offered.items() if name in self.asks}
        return {**accepted, **self.options}


def is_path(name: str) -> bool:
    """Returns whether a string has the form ``package.module:name``."""
    return len(name) <= 500 and re.fullmatch(PATH, name) is not None


def importable(folder: Path) -> None:
    """Makes the modules of a folder importable, unless installed modules have the same names."""
    directory = str(folder.resolve())
    if directory not in sys.path:
        sys.path.append(directory)


def find(kind: ExtensionKind, name: str, where: str) -> Callable[..., Any]:
    """Returns the function or class that a name stands for.

    Args:
        kind: what the code is for, such as rewards.
        name: a short name, a path ``package.module:name``, or a `Reference`.
        where: name of the setting, used in error messages.

    Raises:
        UserError: the name is unknown, its module cannot be imported, or the object is not
            callable.
    """
    target = name.target if isinstance(name, Reference) else kind.built_in.get(name)
    if target is None:
        target = name if is_path(name) else kind.path_of(name)
    if target == "":
        fault = f"there is no {kind.noun} {name!r}{suggest(name, kind.names())}"
        raise UserError(f"{where}: {fault}; name your own as package.module:name")
    if isinstance(target, str):
        target = _load(kind, target, where)
    if not callable(target):
        raise UserError(
            f"{where}: {name} is {format_value(target)}; {kind.one} is a function or a class"
        )
    return typing.cast(Callable[..., Any], kind.adapt(target))


def parameters_of(
    function: Callable[..., Any], name: str, where: str
) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a function or class from `find`, by name.

    Args:
        function: the function or class.
        name, where: names of the function and of the setting, used in error messages.

    Raises:
        UserError: the parameters cannot be determined, as for some functions written in C.
    """
    try:
        return inspect.signature(function).parameters
    except (ValueError, TypeError):  # a function in C
        raise UserError(f"{where}: the parameters of {name} cannot be determined") from None


def check_module(path: str, where: str) -> None:
    """Checks that the module of a path ``package.module:name`` exists, without importing it.

    Packages around the module are imported; if one of them fails, the check ends without an error,
    because the import of the module will report it.

    Raises:
        UserError: there is no such module.
    """
    module = path.partition(":")[0]
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            return  # importing the module reports it
        found, module = False, str(error.name)
    except (Exception, SystemExit):  # foreign code may raise anything; importing it reports it
        return
    if not found:
        raise _no_module(module, path, where, ())


def _no_module(absent: str, path: str, where: str, names: Iterable[str]) -> UserError:
    return UserError(
        f"{where}: {path}: there is no module {absent!r} among the installed packages, in "
        "the folder of the config file or in the working directory"
        f"{_suggestion(path.partition(':')[0], names)}"
    )


def _load(kind: ExtensionKind, path: str, where: str) -> Any:
    module, _, name = path.partition(":")
    try:
        value: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # foreign code may raise anything
        absent = isinstance(error, ModuleNotFoundError) and error.name
        if absent and f"{module}.".startswith(f"{absent}."):
            raise _no_module(absent, path, where, kind.names()) from None
        raise UserError(f"{where}: {path} cannot be imported: {_reason(error)}") from error
    file = getattr(value, "__file__", None) or module
    for part in name.split("."):
        if not hasattr(value, part):
            attributes = [n for n in vars(value) if not n.startswith("_")]
            raise UserError(f"{where}: {path}: {file} has no {part!r}{suggest(part, attributes)}")
        value = getattr(value, part)
    return value


def _reason(error: BaseException) -> str:
    """Formats an exception that importing a module raised, with the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if "importlib" not in frame.filename]
    location = f" ({inside[-1].filename}:{inside[-1].lineno})" if len(inside) > 1 else ""
    return f"{type(error).__name__}: {error}{location}"


@contextlib.contextmanager
def explain_errors_of(
    call: BoundFunction, name: str, where: str, advice: str = ""
) -> Iterator[None]:
    """Turns an exception of a user's function into a `UserError`, as a context manager.

    Args:
        call: the function with its options.
        name, where: name of the function and name of the setting, used in error messages.
        advice: requirements on functions of this kind, with which the error message ends; "" for no
            advice.

    Raises:
        UserError: the function raised an exception. The message has the first line of the exception
            and the line number in the function's file.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # foreign code may raise anything
        file = getattr(getattr(call.function, "__code__", None), "co_filename", "")
        frames = traceback.extract_tb(error.__traceback__)
        lines = [str(frame.lineno) for frame in frames if frame.filename == file]
        location = f" ({file}:{lines[-1]})" if lines else ""
        message = "; ".join(filter(None, (f"{first_line(error)}{location}", advice)))
        raise UserError(f"{where}: {name} failed: {message}") from error


def first_line(error: BaseException) -> str:
    """Returns the type of an exception and the first line of its message, as one line of text."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def bind(
    kind: ExtensionKind,
    name: str,
    options: Mapping[str, Any] | ConfigDict,
    where: str,
    text: bool = False,
) -> BoundFunction:
    """Returns the function or class that a name stands for, together with its options.

    Args:
        kind, name, where: kind of the code, name of the code and name of the setting, as in `find`.
        options: values of options, keyed by the name of the parameter.
        text: whether the values are strings, which must be parsed according to the types of the
            parameters.

    Raises:
        UserError: `find` fails; an option is unknown, missing or of a wrong type; or the function
            has a required parameter that the kind does not offer and the options do not set.
    """
    function = find(kind, name, where)
    parameters = parameters_of(function, name, where)
    kinds = inspect.Parameter
    by_name = {n: p for n, p in parameters.items() if p.kind in _BY_NAME}
    only = [n for n, p in parameters.items() if p.kind is kinds.POSITIONAL_ONLY]
    any_option = any(p.kind is kinds.VAR_KEYWORD for p in parameters.values())
    option_names = [n for n in by_name if n not in kind.offers]
    if isinstance(options, ConfigDict):
        options = options.to_dict()
    for option in options:
        if option not in option_names and not any_option:
            listed = f"; there are {', '.join(option_names)}" if option_names else "; it has none"
            has = suggest(str(option), option_names) or listed
            raise UserError(f"{where}: {name} has no option {option!r}{has}")
    bound_options = {
        option: _value(function, option, value, f"{where}: the option {option} of {name}", text)
        for option, value in options.items()
    }
    for parameter in option_names:
        if parameter not in bound_options and by_name[parameter].default is kinds.empty:
            offers = ", ".join(kind.offers) or "nothing"
            needs = f"{name} needs {parameter!r}{_suggestion(parameter, kind.offers)}"
            gets = f"{kind.one} gets these arguments by name: {offers}; and its own options"
            raise UserError(f"{where}: {needs}; {gets}")
    asks = frozenset(by_name) & frozenset(kind.offers)
    if only or (kind.needs and not asks & set(kind.needs)):
        has = f"{kind.one} has a parameter {' or '.join(kind.needs or kind.offers)}, passed by name"
        raise UserError(f"{where}: {name} takes {inspect.signature(function)}; {has}")
    return BoundFunction(function, asks, types.MappingProxyType(bound_options))


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _suggestion(name: str, offers: Iterable[str]) -> str:
    hint = suggest(name, offers)
    return hint if "did you mean" in hint else ""


def _value(function: Callable[..., Any], name: str, value: Any, where: str, text: bool) -> Any:
    """Checks an option against the type of its parameter."""
    annotation = _types(function).get(name, Any)
    simple = isinstance(annotation, type) or typing.get_origin(annotation) is not None
    try:
        kind, _ = parts(without_none(annotation)) if simple else (object, ())
    except ValueError:  # a union of several types
        kind = object
    if text and kind is not str:
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            value = ast.literal_eval(value)
    if kind is bool and value in (0, 1):
        value = bool(value)
    value = freeze(value)
    return check(value, annotation, where) if kind in _CHECKED else value


@functools.cache
def _types(target: Callable[..., Any]) -> dict[str, Any]:
    """Returns the types of the parameters; parameters whose type is unknown are left out."""
    function = target.__init__ if inspect.isclass(target) else target
    try:
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}


def read_options(text: str, where: str) -> dict[str, str]:
    """Parses options that are written as ``name=value,name=value``.

    Raises:
        UserError: a part between commas does not have the form ``name=value``.
    """
    options = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"{where}: the option {part!r} is not understood; give NAME=VALUE")
        options[name] = value
    return options


class MisfitError(UserError):
    """Raised if a user-defined function, such as a reward or a filter, returns an invalid value."""


def refuse_result(
    kind: ExtensionKind, name: str, result: Any, valid: str, where: str
) -> MisfitError:
    """Returns the error for a user-defined function whose result is invalid for its kind.

    Args:
        kind: what the function is for, such as rewards.
        name: the name by which a setting selects it.
        result: value that the function returned.
        valid: description of a valid result.
        where: name of the setting that names the function.
    """
    return MisfitError(
        f"{where}: {name} gave {format_value(result)} ({type(result).__name__}); {kind.one} gives "
        f"{valid}"
    )
