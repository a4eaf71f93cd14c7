"""Runs in the sandbox: an assertion in one process, and the program that it tests in another.

`coa_jax.tasks.assertions` starts two processes with the text of this file. `judge` executes the
assertion, which sees the functions of the program as objects of the class `Remote`. `serve`
executes the program and answers the calls. Only values cross from one process to the other:
numbers, texts, bytes, None, containers of such values, arrays of numbers, and exceptions. The
program sees the arguments of its functions, but neither the text of the assertion nor the expected
results. All comparisons take place in the process of the assertion, where an object of the program
is nothing but a number.

A program may change its arguments, as functions that sort in place do. It could also empty an
argument with which the assertion then compares the result. If arguments have changed, a passed
assertion is therefore executed again with the same answers and unchanged arguments.

A message is one line of JSON. The file needs nothing but the standard library of Python 3.9.
"""

from __future__ import annotations

import builtins
import collections
import decimal
import fractions
import json
import operator
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NoReturn

_LONGEST = 64 << 20  # bytes of a message
_PLAIN = (bool, int, float, str)
_TYPES: dict[type, Callable[[Any], list[Any]]] = {
    complex: lambda v: [v.real, v.imag],
    bytes: lambda v: [v.decode("latin-1"), "latin-1"],
    bytearray: lambda v: [v.decode("latin-1"), "latin-1"],
    tuple: lambda v: [list(v)],
    set: lambda v: [list(v)],
    frozenset: lambda v: [list(v)],
    range: lambda v: [v.start, v.stop, v.step],
    collections.Counter: lambda v: [dict(v)],
    collections.OrderedDict: lambda v: [[list(pair) for pair in v.items()]],
    collections.defaultdict: lambda v: [v.default_factory, dict(v)],
    collections.deque: lambda v: [list(v), v.maxlen],
    dict: lambda v: [[list(pair) for pair in v.items()]],
    fractions.Fraction: lambda v: [v.numerator, v.denominator],
    decimal.Decimal: lambda v: [str(v)],
    type({}.keys()): lambda v: [list(v)],
    type({}.values()): lambda v: [list(v)],
    type({}.items()): lambda v: [list(v)],
}
"""Type of a value that crosses -> the arguments from which `_NAMES` builds the value again."""
_NAMES: dict[str, Callable[..., Any]] = {
    **{kind.__name__: kind for kind in _TYPES},
    "dict_keys": lambda keys: dict.fromkeys(keys).keys(),
    "dict_values": lambda values: dict(enumerate(values)).values(),
    "dict_items": lambda items: dict(items).items(),
    "ndarray": lambda *parts: _array(*parts),
}


class NotAValueError(Exception):
    """Raised if an object cannot be sent between the processes of assertion and program."""


def pack(value: Any, other: Callable[[Any], Any]) -> Any:
    """Converts a value to JSON, to send it to the other process.

    Args:
        value: None, a number, a text, bytes, a container of such values, an array of numbers, or a
            built-in type.
        other: function that converts an object of any other type to JSON.
    """
    kind: type = type(value)
    if kind in (*_PLAIN, type(None)):
        return value
    if kind is list:
        return [pack(item, other) for item in value]
    if kind in _TYPES:
        return {kind.__name__: [pack(item, other) for item in _TYPES[kind](value)]}
    if _is_array(value):
        return {"ndarray": [pack(part, other) for part in _parts(value)]}
    if isinstance(value, type) and _is_builtin(value):
        return {"type": value.__name__}
    return other(value)


def _is_builtin(kind: type) -> bool:
    return getattr(builtins, kind.__name__, None) is kind


def _is_array(value: Any) -> bool:
    kind = type(value)
    return (kind.__module__, kind.__name__) == ("numpy", "ndarray") and value.dtype.kind in "biufc"


def _parts(array: Any) -> tuple[list[Any], str, list[int]]:
    return array.ravel().tolist(), array.dtype.str, list(array.shape)


def _array(flat: list[Any], kind: str, shape: list[int]) -> Any:
    array = __import__("numpy").array(flat, kind).reshape(shape)
    if not _is_array(array):
        raise ValueError(f"an array of {kind} is not a value")
    return array


def unpack(data: Any, other: Callable[[str, Any], Any]) -> Any:
    """Converts the result of `pack` back to a value.

    Args:
        data: the result of `pack`.
        other: function that restores an object of any other type from the only key and the value of
            its JSON object.
    """
    if isinstance(data, list):
        return [unpack(item, other) for item in data]
    if not isinstance(data, dict):
        return data
    ((name, content),) = data.items()
    if name == "type":
        kind = getattr(builtins, content)
        if not isinstance(kind, type) or not _is_builtin(kind):
            raise ValueError(f"{content} is not a type")
        return kind
    if name not in _NAMES:
        return other(name, content)
    return _NAMES[name](*(unpack(item, other) for item in content))


def update(old: Any, new: Any) -> Any:
    """Returns an argument with the changes that a function of the program made to it.

    Args:
        old: the argument in the process of the assertion; changed in place if it is mutable.
        new: its value in the process of the program after the call.
    """
    if type(old) is not type(new):
        return new
    if isinstance(old, (list, collections.deque)):
        items = [*map(update, old, new), *list(new)[len(old) :]]
        old.clear()
        old.extend(items)
    elif isinstance(old, dict):
        items = [(k, update(old[k], v) if k in old else v) for k, v in new.items()]
        old.clear()
        dict.update(old, items)
    elif isinstance(old, set):
        old.clear()
        old.update(new)
    elif isinstance(old, bytearray) or (_is_array(old) and old.shape == new.shape):
        old[:] = new
    elif isinstance(old, tuple):
        return old if all(map(operator.is_, old, map(update, old, new))) else new
    else:
        return new
    return old


def _channel() -> tuple[BinaryIO, BinaryIO, int]:
    """Takes the standard streams away from the code that is executed next."""
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    streams = os.dup(0), os.dup(1), os.dup(2)
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    return os.fdopen(streams[0], "rb"), os.fdopen(streams[1], "wb"), streams[2]


# --- the process of the assertion -----------------------------------------------------------


class _Link:
    """The connection to the program."""

    def __init__(self, mark: str) -> None:
        self.reads, self.writes, self.verdicts = _channel()
        self.mark = mark
        self.objects: dict[int, Remote] = {}
        self.exchanges: list[tuple[bytes, bytes]] = []  # requests and their answers
        self.replayed: Iterator[tuple[bytes, bytes]] | None = None
        self.changed = False

    def write(self, verdict: str) -> None:
        """Writes a verdict, which replaces an earlier one."""
        os.write(self.verdicts, f"\n{self.mark}{verdict}\n".encode())

    def end(self, verdict: str) -> NoReturn:
        if self.replayed is None or verdict == "pass":
            self.write(verdict)
        os._exit(0)

    def ask(self, action: str, target: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Sends a request, and returns the result of the program or raises its exception."""
        values = [*args, *named.values()]
        try:
            data = [action, target, [pack(value, _number) for value in values], list(named)]
        except NotAValueError:
            # An object of the program must not be a way to another kind of test.
            self.end("fail" if self.objects else "object")
        line = self._answer(json.dumps(data).encode() + b"\n")

        def other(name: str, content: Any) -> Any:
            if name == "argument":
                changed = content in changes and self.replayed is not None
                return unpack(changes[content], other) if changed else values[content]
            return self.objects.setdefault(int(content), Remote(self, int(content)))

        try:
            result, error, after = json.loads(line)
            changes = dict(after)
            self.changed |= bool(changes)
            for number, change in changes.items() if self.replayed is None else ():
                update(values[number], unpack(change, other))
            value = _exception(*unpack(error, other)) if error else unpack(result, other)
        except Exception:
            self.end("garbled")
        if error and action == "call" and isinstance(value, StopIteration):
            # The exception ends a loop such as ``map``, and what follows would not be tested.
            self.changed = True
            value = RuntimeError("StopIteration") if self.replayed else value
        if error:
            raise value
        return value

    def _answer(self, request: bytes) -> bytes:
        """Returns the answer of the program, which is an earlier one in the second execution."""
        if self.replayed is not None:
            earlier, line = next(self.replayed, (b"", b""))
            if earlier != request:
                self.end("changed")
            return line
        try:
            self.writes.write(request)
            self.writes.flush()
            line = self.reads.readline(_LONGEST)
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            self.end("gone" if len(line) < _LONGEST else "garbled")
        self.exchanges.append((request, line))
        return line


class Remote:
    """A proxy, in the process that evaluates an assertion, for an object of the graded program."""

    __slots__ = ("_link", "_target")

    def __init__(self, link: _Link, target: Any) -> None:
        self._link, self._target = link, target

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._link.ask("call", self._target, args, named)

    def __iter__(self) -> Any:
        return self._link.ask("iterate", self._target, (), {})

    def __next__(self) -> Any:
        return self._link.ask("next", self._target, (), {})

    def __eq__(self, other: object) -> bool:
        if type(other) is Remote:
            return self is other
        try:
            pack(other, _number)
        except NotAValueError:  # no program can pass this comparison with a value
            self._link.end("object")
        return False

    __hash__ = object.__hash__


def _number(value: Any) -> dict[str, Any]:
    if type(value) is Remote:
        return {"object": value._target}
    raise NotAValueError


def _exception(name: str, args: list[Any]) -> BaseException:
    kind = getattr(builtins, name)
    if not issubclass(kind, BaseException):
        raise TypeError(name)
    try:
        return kind(*args)
    except TypeError:  # such as UnicodeDecodeError, which needs five arguments
        error = kind.__new__(kind)
        error.args = tuple(args)
        return error


def judge(
    namespace: dict[str, Any],
    setup: str,
    test: str,
    stubs: dict[str, str],
    modules: dict[str, str],
    mark: str,
) -> None:
    """Executes an assertion, and writes the mark and the verdict on the standard error stream.

    The verdict is ``pass``, ``changed`` (does not pass again if the program's changes to arguments
    are undone, so the program may have cheated), ``fail``, ``object`` (the assertion needs an
    object of the program), ``gone`` (the process of the program ended) or ``garbled`` (this process
    sent an invalid answer). If several verdicts are written, the last one counts.

    Args:
        namespace: global variables of the assertion.
        setup: source that is executed first.
        test: source of the assertion.
        stubs: name in the assertion -> expression for a function of the program.
        modules: name in the assertion -> module that the assertion uses without an import.
        mark: text before the verdict.
    """
    link, again = _Link(mark), dict(namespace)

    def passes(names: dict[str, Any]) -> bool:
        try:
            exec(compile(setup, "<setup>", "exec", dont_inherit=True), names)
            for name, module in modules.items():
                names[name] = __import__(module)
            names.update({name: Remote(link, target) for name, target in stubs.items()})
            exec(compile(test, "<test>", "exec", dont_inherit=True), names)
        except BaseException:
            return False
        return True

    if not passes(namespace):
        link.end("fail")
    if link.changed:
        link.write("changed")  # in case that the second execution reaches a limit
        link.replayed = iter(link.exchanges)
        if not passes(again):
            link.end("changed")
    link.end("pass")


# --- the process of the program -------------------------------------------------------------


def serve(namespace: dict[str, Any], setup: str, program: str) -> None:
    """Executes a program, and runs its functions when the process of the assertion calls them.

    When the process of the assertion has ended, the function ends this process.

    Args:
        namespace: global variables of the program.
        setup: source that is executed before the program.
        program: source of the program.
    """
    reads, writes, errors = _channel()
    os.dup2(errors, 2)
    exec(compile(setup, "<setup>", "exec", dont_inherit=True), namespace)
    exec(compile(program, "<program>", "exec", dont_inherit=True), namespace)
    objects: list[Any] = []

    kinds: tuple[Any, ...] = (int, float, complex, str, bytes, tuple, list, set, frozenset, dict)

    def other(value: Any) -> Any:
        for kind in kinds:
            if isinstance(value, kind):  # a subclass, such as a named tuple
                return pack(kind(value), other)
        if type(value).__module__ == "numpy" and hasattr(value, "item") and not value.shape:
            return pack(value.item(), other)
        objects.append(value)
        return {"object": len(objects) - 1}

    def given(name: str, content: Any) -> Any:
        return eval(content, namespace) if isinstance(content, str) else objects[content]

    for line in reads:
        action, target, packed, names = json.loads(line)
        values = [unpack(item, given) for item in packed]
        cut = len(values) - len(names)
        result, error = None, None
        try:
            outcome = given("object", target)
            if action == "call":
                outcome = outcome(
                    *values[:cut], **{name: values[cut + i] for i, name in enumerate(names)}
                )
            else:
                outcome = iter(outcome) if action == "iterate" else next(outcome)
            mutable = [isinstance(item, (list, dict)) for item in packed]
            same = [i for i, v in enumerate(values) if v is outcome and mutable[i]]
            result = {"argument": same[0]} if same else pack(outcome, other)
        except BaseException as problem:
            bases = [k for k in type(problem).__mro__ if getattr(builtins, k.__name__, 0) is k]
            simple = [a for a in problem.args if a is None or type(a) in _PLAIN]
            error = [bases[0].__name__, simple]
        after = [
            [i, new]
            for i, old in enumerate(packed)
            if isinstance(old, (list, dict)) and (new := pack(values[i], other)) != old
        ]
        writes.write(json.dumps([result, error, after]).encode() + b"\n")
        writes.flush()
    os._exit(0)
