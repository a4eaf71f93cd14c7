"""Reads and writes files with one JSON value per line, exactly and atomically.

JSON has no NaN or infinity, so these values are written as ``{"$float": "nan"}``. Every line is
therefore valid JSON and is read back exactly. Only ``\\n`` ends a line; text may contain any other
line separator.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import os
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from coa_jax.config.fields import has_default
from coa_jax.errors import UserError
from coa_jax.files import durable, untrusted

T = TypeVar("T")

_FLOAT = "$float"
_LARGEST = int(sys.float_info.max)


def dumps(value: Any) -> str:
    """Converts a value to one line of strict JSON. NumPy values become lists and numbers.

    NaN and infinities, which JSON lacks, become objects such as ``{"$float": "nan"}``.

    Raises:
        TypeError: ``value`` contains an object that JSON cannot represent.
    """
    text = json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair; a token can end within a character
        return json.dumps(_plain(value), allow_nan=False, separators=(",", ":"))
    return text


def loads(text: str | bytes) -> Any:
    """Parses a JSON value; objects such as ``{"$float": "nan"}`` (see `dumps`) become floats.

    Raises:
        ValueError, RecursionError: the text is not JSON, or exceeds a bound of `files.untrusted`,
            for example the maximum depth of nesting.
    """
    return untrusted.parse_json(text, object_hook=_restore, parse_constant=_reject)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_FLOAT}:
            raise ValueError(f"a dict with the single key {_FLOAT!r} cannot be stored")
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: repr(value)}
    return value


def _restore(value: dict[str, Any]) -> Any:
    if value.keys() == {_FLOAT} and value[_FLOAT] in ("nan", "inf", "-inf"):
        return float(value[_FLOAT])
    return value


def _reject(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_hints = functools.cache(typing.get_type_hints)


def _fits(hint: Any, value: Any) -> bool:
    """Returns whether a JSON value fits the type of a field; lists fit tuples and arrays."""
    if isinstance(hint, types.UnionType):
        return any(_fits(arm, value) for arm in typing.get_args(hint))
    kind, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (Any, typing.Literal) or (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        return True  # the constructor of the dataclass checks the value
    if kind is float:
        return isinstance(value, float) or (isinstance(value, int) and abs(value) <= _LARGEST)
    if kind is dict:
        return isinstance(value, dict) and (
            inner[1:] in ((), (Any,)) or all(_fits(inner[1], item) for item in value.values())
        )
    if kind is tuple and inner[1:] == (Ellipsis,):
        return isinstance(value, list) and all(_fits(inner[0], item) for item in value)
    if kind in (tuple, np.ndarray):
        return isinstance(value, list)
    return isinstance(value, dict if dataclasses.is_dataclass(kind) else kind)


def fields(cls: type, value: Any) -> dict[str, Any]:
    """Reads the fields of a dataclass from a JSON object, as keyword arguments of the class.

    If the object lacks a field that has a default, the result lacks it, too. The values of tuple
    and array fields remain lists.

    Raises:
        KeyError, TypeError: a field without a default is missing, or a value has a wrong type.
    """
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, found {type(value).__name__}")
    chosen = {}
    for field in dataclasses.fields(cls):
        name, hint = field.name, _hints(cls)[field.name]
        if name not in value and has_default(field):
            continue
        if not _fits(hint, value[name]):
            shown = reprlib.repr(value[name])
            raise TypeError(f"the field {name!r} cannot be {type(value[name]).__name__} {shown}")
        chosen[name] = value[name]
    return chosen


def encode_float32(values: np.ndarray) -> list[float | str]:
    """Encodes a one-dimensional float32 array for JSON without loss, in few digits.

    Returns:
        For each finite value, a number with few digits whose nearest float32 is the value. For NaN
        and infinities, a string with the bits, such as ``"0x7fc00000"``.
    """
    bits = values.view(np.uint32)
    encoded: list[float | str] = [float(text) for text in values.astype(str)]
    for index in np.flatnonzero(np.array(encoded, np.float32).view(np.uint32) != bits):
        encoded[index] = float(values[index])  # the short number has another nearest float32
    for index in np.flatnonzero(~np.isfinite(values)):
        encoded[index] = f"0x{bits[index]:08x}"
    return encoded


def decode_float32(values: list[float | str]) -> np.ndarray:
    """Decodes the output of `encode_float32` to a one-dimensional float32 array."""
    decoded = np.array([0.0 if isinstance(value, str) else value for value in values], np.float32)
    for index, value in enumerate(values):
        if isinstance(value, str):
            decoded.view(np.uint32)[index] = int(value, 16)
    return decoded


def read_lines(
    path: str | os.PathLike[str], decode: Callable[[Any], T], *, growing: bool = False
) -> Iterator[T]:
    """Yields ``decode(value)`` for the JSON value of each line of a file; skips blank lines.

    Args:
        path: the file.
        decode: function that converts a JSON value to an object. If it raises an exception of
            `untrusted.MALFORMED`, the line counts as malformed.
        growing: whether another process may be writing to the file. If True, a last line without a
            newline is skipped, because it may be incomplete. If False, such a line is decoded, too.

    Raises:
        UserError: the file cannot be read, or a line is malformed. The message for a malformed line
            begins with ``path:line:``.
    """
    for number, line in untrusted.lines(path):
        if not line.strip() or (growing and not line.endswith(b"\n")):
            continue
        torn = "" if line.endswith(b"\n") else " (the last line is cut off)"
        try:
            value = loads(line.rstrip(b"\r\n"))  # or messages would count the line break
            torn = ""
            yield decode(value)
        except untrusted.MALFORMED as error:
            raise UserError(f"{path}:{number}: {untrusted.reason(error)}{torn}") from error


def read_objects(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads all JSON objects of a file to which a run may be writing; [] if there is no file.

    Raises:
        UserError: the file cannot be read, or a line is not a JSON object.
    """
    return list(read_lines(path, _object, growing=True)) if os.path.lexists(path) else []


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("not a JSON object")
    return value


def write_lines(path: str | os.PathLike[str], values: Iterable[Any]) -> None:
    """Writes values to a file, one per line; the file replaces an older one atomically.

    Raises:
        OSError: the file cannot be written, for example because the disk is full. An older file at
            ``path`` is unchanged.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.replace_with(path, lambda file: file.writelines(_encoded(values)))


def append_lines(path: str | os.PathLike[str], values: Iterable[Any]) -> None:
    """Appends values to a file, one per line; only one process may write to the file.

    If a killed process left an incomplete last line, the function first removes this line. When the
    function has returned, the new lines are kept even if this process is killed.

    Raises:
        OSError: the file cannot be written, for example because the disk is full. No line was
            appended.
    """
    data = b"".join(_encoded(values))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.cut_torn_line(path)
    durable.append(path, data)


def _encoded(values: Iterable[Any]) -> Iterator[bytes]:
    return (dumps(value).encode() + b"\n" for value in values)
