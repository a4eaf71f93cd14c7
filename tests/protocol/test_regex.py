"""Derivatives agree with the regular expressions of the standard library."""

from __future__ import annotations

import functools
import re

from hypothesis import given
from hypothesis import strategies as st

from coa_jax.protocol.regex import (
    ANYTHING,
    EMPTY_STRING,
    NOTHING,
    byte_groups,
    containing,
    derivative,
    literal,
    none_of,
    one_of,
    optional,
    star,
    up_to,
)

# Pairs of an expression and the same in the notation of `re`.
LEAVES = st.sampled_from(
    [
        (literal("ab"), b"ab"),
        (literal("aB", ignore_case=True), b"(?i:ab)"),
        (one_of(b"ac"), b"[ac]"),
        (none_of(b"a"), b"[^a]"),
        (EMPTY_STRING, b""),
        (ANYTHING, b".*"),
        (NOTHING, b"(?!)"),
    ]
)


def combine(parts):
    pairs = st.tuples(parts, parts)
    return st.one_of(
        pairs.map(lambda p: (p[0][0] + p[1][0], b"(?:%b)(?:%b)" % (p[0][1], p[1][1]))),
        pairs.map(lambda p: (p[0][0] | p[1][0], b"(?:%b|%b)" % (p[0][1], p[1][1]))),
        parts.map(lambda p: (star(p[0]), b"(?:%b)*" % p[1])),
        parts.map(lambda p: (optional(p[0]), b"(?:%b)?" % p[1])),
        parts.map(lambda p: (up_to(2, p[0]), b"(?:%b){0,2}" % p[1])),
        parts.map(lambda p: (containing(p[0]), b".*(?:%b).*" % p[1])),
    )


EXPRESSIONS = st.recursive(LEAVES, combine, max_leaves=6)
TEXTS = st.lists(st.sampled_from(b"abcB\n"), max_size=6).map(bytes)


def matches(regex, text):
    return functools.reduce(derivative, text, regex).nullable


@given(EXPRESSIONS, EXPRESSIONS, TEXTS)
def test_membership_is_that_of_the_standard_library(first, second, text):
    (a, pattern_a), (b, pattern_b) = first, second
    in_a = re.fullmatch(pattern_a, text, re.DOTALL) is not None
    in_b = re.fullmatch(pattern_b, text, re.DOTALL) is not None
    assert matches(a, text) == in_a
    assert matches(a & b, text) == (in_a and in_b)
    assert matches(~a | b, text) == (not in_a or in_b)
    assert matches(a & ~b, text) == (in_a and not in_b)


@given(EXPRESSIONS)
def test_a_group_holds_bytes_with_the_same_derivative(pair):
    groups = byte_groups([pair[0]])
    assert sorted(byte for group in groups for byte in group) == list(range(256))
    for group in groups:
        assert len({derivative(pair[0], byte) for byte in group}) == 1


@given(EXPRESSIONS)
def test_derivatives_are_finitely_many(pair):
    seen, todo = {pair[0]}, [pair[0]]
    for regex in todo:
        for group in byte_groups([regex]):
            after = derivative(regex, group[0])
            if after not in seen:
                seen.add(after)
                todo.append(after)
        assert len(seen) < 500
