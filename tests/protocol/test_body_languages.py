"""Every body of a language is accepted by the reader of its form, and means what it should."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.protocol import bodies
from coa_jax.protocol.body_languages import outcomes
from coa_jax.protocol.regex import NOTHING, byte_groups, derivative
from tests.protocol.test_regex import matches

READERS = {
    "text": lambda body: body.strip() or None,
    "grades": bodies.parse_reflection,
    "score": bodies.parse_double_check,
    "code": bodies.parse_code,
    "urls": lambda body: bodies.parse_urls(body) or None,
    "inspection": bodies.parse_inspection,
    "solution": bodies.parse_solution,
}


def means(form, value):
    """What the automaton makes of a body."""
    if form == "grades":
        return "poor" in value.values()
    return value >= 3 if form == "score" else None


def explore(regex):
    """The shortest way to each derivative, and the byte groups that lead on from it."""
    ways, follow, todo = {regex: b""}, {}, deque([regex])
    while todo:
        node = todo.popleft()
        follow[node] = {}
        for group in byte_groups([node]):
            after = derivative(node, group[0])
            if after is NOTHING:
                continue
            follow[node][tuple(group)] = after
            if after not in ways:
                ways[after] = ways[node] + bytes(group[:1])
                todo.append(after)
    return ways, follow


def endings(follow):
    """The shortest rest of a string from each derivative from which there is one."""
    ends = {node: b"" for node in follow if node.nullable}
    grown = True
    while grown:
        grown = False
        for node, after in follow.items():
            for group, target in after.items():
                if target in ends and (node not in ends or len(ends[node]) > 1 + len(ends[target])):
                    ends[node], grown = bytes(group[:1]) + ends[target], True
    return ends


@pytest.mark.parametrize("form", READERS)
def test_a_string_through_every_transition_is_read_as_it_should(form):
    seen = 0
    for regex, example in outcomes(form, 3):
        ways, follow = explore(regex)
        ends = endings(follow)
        for node, after in follow.items():
            for group, target in after.items():
                if target not in ends:
                    continue
                for byte in {group[0], group[len(group) // 2], group[-1]}:
                    text = ways[node] + bytes([byte]) + ends[target]
                    body = text.decode("utf-8", "replace")
                    value = READERS[form](body)
                    assert value is not None, body
                    if form in ("grades", "score"):
                        assert means(form, value) == means(form, READERS[form](example)), body
                    seen += 1
    assert seen > 20


@pytest.mark.parametrize("space", [" ", "\t", "\x0b", "\x85", "\u00a0", "\u2003", "\u3000"])
def test_the_scale_of_a_score_is_no_score_whatever_space_it_has(space):
    body = f"The score out of{space}4"
    assert bodies.parse_double_check(body) is None
    assert not any(matches(language, body.encode()) for language, _ in outcomes("score", 3))


@given(st.text())
def test_the_language_of_words_is_exactly_what_is_not_blank(text):
    ((regex, _),) = outcomes("text", 3)
    assert matches(regex, text.encode()) == bool(text.strip())


@given(st.binary(max_size=8), st.sampled_from(["\u2003", "\u00a0", "\u3000", "\u2028"]))
def test_bytes_that_are_no_text_are_not_blank(data, blank):
    data = data + blank.encode()[:-1]
    ((regex, _),) = outcomes("text", 3)
    assert matches(regex, data) == bool(data.decode("utf-8", "replace").strip())


LINES = st.lists(st.sampled_from(["```", "```py", "x", " ", "", "``` ", "```\u2003", "\r"]))


@given(LINES)
def test_a_program_ends_with_its_first_fence(lines):
    body = "\n".join(["```py", *lines, "```"])
    ((regex, _),) = outcomes("code", 3)
    assert not matches(regex, body.encode()) or bodies.parse_code(body) is not None
    if not any(line.rstrip() == "```" for line in lines) and "".join(lines).strip():
        assert matches(regex, body.encode())
