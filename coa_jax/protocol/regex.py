"""Defines regular languages of byte strings, whose derivatives are the states of automata.

The derivative of a language by a byte is the set of strings that may follow this byte at the
beginning of a string (Brzozowski 1964). Derivatives also exist for intersections and complements,
so that a rule such as "no tag inside a body" can be written directly. The derivatives of a language
are the states of its automaton. Their number is finite, because equal expressions are represented
by the same object. Owens, Reppy and Turon 2009, "Regular-expression derivatives re-examined",
describe this method and how bytes with the same derivatives are grouped (`byte_groups`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterable
from typing import Any, Literal

Kind = Literal["bytes", "empty_string", "concat", "star", "or", "and", "not"]

_ALL_BYTES = (1 << 256) - 1


@dataclasses.dataclass(frozen=True, eq=False)
class Regex:
    """A regular language.

    ``a + b`` is the concatenation, ``a | b`` the union and ``a & b`` the intersection of two
    languages, and ``~a`` is the complement of a language.

    Attributes:
        kind: operation that forms the language.
        parts: operands of the operation. For the kind ``bytes``, a mask with one bit for each of
            the 256 bytes.
        nullable: whether the empty string belongs to the language.
    """

    kind: Kind
    parts: Any
    nullable: bool

    def __add__(self, other: Regex) -> Regex:
        if self is NOTHING or other is NOTHING:
            return NOTHING
        if self is EMPTY_STRING or other is EMPTY_STRING:
            return other if self is EMPTY_STRING else self
        if self.kind == "concat":
            first, rest = self.parts
            return first + (rest + other)
        return _node("concat", (self, other), self.nullable and other.nullable)

    def __or__(self, other: Regex) -> Regex:
        if self is NOTHING or other is NOTHING:
            return other if self is NOTHING else self
        parts = _operands("or", self, other)
        if ANYTHING in parts:
            return ANYTHING
        mask = 0
        for part in parts:
            mask |= part.parts if part.kind == "bytes" else 0
        parts = {part for part in parts if part.kind != "bytes"} | ({_bytes(mask)} - {NOTHING})
        return _set("or", parts, NOTHING)

    def __and__(self, other: Regex) -> Regex:
        if self is NOTHING or other is NOTHING:
            return NOTHING
        return _set("and", _operands("and", self, other) - {ANYTHING}, ANYTHING)

    def __invert__(self) -> Regex:
        return self.parts if self.kind == "not" else _node("not", self, not self.nullable)


@functools.cache
def _node(kind: Kind, parts: Hashable, nullable: bool) -> Regex:
    return Regex(kind, parts, nullable)


def _bytes(mask: int) -> Regex:
    return _node("bytes", mask, False)


def _operands(kind: Kind, *regexes: Regex) -> set[Regex]:
    """Returns the operands of a union or intersection, without nested operations of its kind."""
    return {part for r in regexes for part in (r.parts if r.kind == kind else (r,))}


def _set(kind: Literal["or", "and"], parts: set[Regex], neutral: Regex) -> Regex:
    if len(parts) <= 1:
        return next(iter(parts), neutral)
    decide = any if kind == "or" else all
    return _node(kind, frozenset(parts), decide(part.nullable for part in parts))


NOTHING = _bytes(0)
EMPTY_STRING = _node("empty_string", None, True)
ANYTHING = ~NOTHING
ANY_BYTE = _bytes(_ALL_BYTES)


def one_of(values: Iterable[int]) -> Regex:
    """Returns the language of all strings that are a single byte of a set, such as ``b"ab"``."""
    return _bytes(functools.reduce(lambda mask, byte: mask | 1 << byte, values, 0))


def none_of(values: Iterable[int]) -> Regex:
    """Returns the language of all strings that are a single byte outside a set."""
    return _bytes(_ALL_BYTES & ~one_of(values).parts)


def literal(text: str, ignore_case: bool = False) -> Regex:
    """Returns the language that contains only one text, encoded as UTF-8.

    Args:
        text: the only member of the language.
        ignore_case: whether each ASCII letter may be upper or lower case.
    """
    result = EMPTY_STRING
    for byte in text.encode():
        character = bytes([byte])
        both = {*character.lower(), *character.upper()} if ignore_case else character
        result += one_of(both)
    return result


def union(regexes: Iterable[Regex]) -> Regex:
    """Returns the union of regular languages."""
    return functools.reduce(Regex.__or__, regexes, NOTHING)


def optional(regex: Regex) -> Regex:
    """Returns a language with the empty string added, like ``?`` in a regular expression."""
    return regex | EMPTY_STRING


def star(regex: Regex) -> Regex:
    """Returns the Kleene star: the concatenations of any number of strings of a language."""
    if regex is ANY_BYTE:
        return ANYTHING
    return EMPTY_STRING if regex in (NOTHING, EMPTY_STRING) else _node("star", regex, True)


def up_to(count: int, regex: Regex) -> Regex:
    """Returns a regular expression for 0 to ``count`` repetitions of ``regex``."""
    result = EMPTY_STRING
    for _ in range(count):
        result = optional(regex + result)
    return result


def containing(regex: Regex) -> Regex:
    """Returns the language of all strings that contain a string of the given language."""
    return ANYTHING + regex + ANYTHING


@functools.cache
def derivative(regex: Regex, byte: int) -> Regex:
    """Returns the language of the strings s for which ``byte`` followed by s is in ``regex``."""
    parts = regex.parts
    match regex.kind:
        case "bytes":
            return EMPTY_STRING if parts >> byte & 1 else NOTHING
        case "empty_string":
            return NOTHING
        case "concat":
            first, rest = parts
            after = derivative(first, byte) + rest
            return after | derivative(rest, byte) if first.nullable else after
        case "star":
            return derivative(parts, byte) + regex
        case "not":
            return ~derivative(parts, byte)
        case "or":
            return union(derivative(part, byte) for part in parts)
        case "and":
            return functools.reduce(Regex.__and__, (derivative(part, byte) for part in parts))


def byte_groups(regexes: Iterable[Regex]) -> list[list[int]]:
    """Divides the 256 byte values into groups that the given languages do not distinguish.

    Each of the languages has the same derivative by all bytes of a group, see `derivative`.
    """
    groups = [_ALL_BYTES]
    for mask in frozenset[int]().union(*map(_first_sets, regexes)):
        groups = [part for group in groups for part in (group & mask, group & ~mask) if part]
    return [[byte for byte in range(256) if group >> byte & 1] for group in groups]


@functools.cache
def _first_sets(regex: Regex) -> frozenset[int]:
    """Returns sets of bytes, as masks, that determine the derivative of a language by a byte."""
    match regex.kind:
        case "bytes":
            return frozenset({regex.parts})
        case "empty_string":
            return frozenset()
        case "concat":
            first, rest = regex.parts
            return _first_sets(first) | (_first_sets(rest) if first.nullable else frozenset())
        case "star" | "not":
            return _first_sets(regex.parts)
        case "or" | "and":
            return frozenset[int]().union(*map(_first_sets, regex.parts))
