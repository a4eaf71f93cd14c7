"""The level ``paper`` refuses exactly the texts that the paper's instructions forbid."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.errors import UserError
from coa_jax.protocol import (
    State,
    add_protocol,
    advance,
    allowed_after,
    at_level,
    get_protocol,
    protocol_names,
    protocol_with_tools,
    split_level,
)
from tests.protocol.rules import violations
from tests.protocol.test_automaton import BODIES, CHECKED, bodies_of, kinds, write

NAMES = tuple(f"{name}:paper" for name in protocol_names())
VERIFYING = ("web", "web_wiki", "generalist", "universal")
WITH_CODE = ("generalist", "universal")

MHQA, CODE = "think plan think wiki_search observation", "plan think code observation reflection"


def call(name: str) -> str:
    return f"think {get_protocol(name).tools[0]} observation"


# (protocol, what the paper forbids, whether the level lenient forbids it too)
FORBIDDEN = [
    *((n, f"{call(n)} {CHECKED} answer", True) for n in VERIFYING),
    *((n, f"think plan {call(n)} think reflection=POOR {call(n)} {CHECKED} answer", True)
      for n in VERIFYING),
    *((n, f"think plan {call(n)} think reflection=POOR {CHECKED} answer", True)
      for n in VERIFYING),
    *((n, f"think plan {call(n)} {CHECKED}=2 answer", True) for n in VERIFYING),
    *((n, f"think plan {call(n)} {CHECKED}=1 {call(n)} {CHECKED} answer", True) for n in VERIFYING),
    *((n, f"think plan {call(n)} {CHECKED}=3 {call(n)} {CHECKED} answer", False)
      for n in VERIFYING),
    *((n, f"think plan {call(n)} {CHECKED}=4 think plan {CHECKED} answer", False)
      for n in VERIFYING),
    *((n, f"think plan think code observation {CHECKED} answer", False) for n in WITH_CODE),
    *((n, f"think plan think code observation think code observation think reflection {CHECKED}"
          " answer", False) for n in WITH_CODE),
    ("mhqa", "think wiki_search observation think answer", False),
    ("mhqa", "think plan think answer", False),
    ("mhqa", "think answer", True),
    ("code", "plan think answer", False),
    ("code", "think code observation reflection think answer", True),
    ("code", "plan think code observation think answer", True),
    ("code", f"{CODE} plan think code observation reflection think answer", True),
]  # fmt: skip

ALLOWED = [
    *((n, f"think plan {call(n)} {CHECKED} answer") for n in ("web", "web_wiki")),
    *((n, f"think plan {CHECKED}=3 think answer") for n in VERIFYING),
    *((n, f"think plan {call(n)} {CHECKED}=2 think plan {CHECKED}=4 answer")
      for n in ("web", "web_wiki")),
    *((n, f"think plan think code observation think reflection {CHECKED} answer")
      for n in WITH_CODE),
    ("mhqa", f"{MHQA} think answer"),
    ("mhqa", f"{MHQA} think reflection think answer"),
    ("code", f"{CODE} think answer"),
    ("code", f"{CODE} think code observation reflection think answer"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "steps", "lenient"), FORBIDDEN)
def test_what_the_paper_forbids_is_refused_at_its_level(name, steps, lenient):
    assert kinds(f"{name}:paper", steps)
    assert bool(kinds(name, steps)) == lenient


@pytest.mark.parametrize(("name", "steps"), ALLOWED)
def test_what_the_paper_demands_is_allowed_at_both_levels(name, steps):
    assert kinds(f"{name}:paper", steps) == kinds(name, steps) == []


def test_the_broken_rule_is_named():
    name, begun = "web:paper", "think plan think web_search observation"
    assert kinds(name, f"{begun} {CHECKED}=2 answer") == ["answer_unverified"]
    assert kinds(name, f"{begun} {CHECKED}=2 think web_search observation {CHECKED} answer") == [
        "missing_replan"
    ]
    text = write(get_protocol(name), f"{begun} {CHECKED} think plan")
    (found,) = violations(get_protocol(name), text, complete=False)
    assert (found.kind, found.message) == ("transition", "<plan> although the double check passed")


@given(st.sampled_from(NAMES), st.data())
def test_what_the_strict_level_accepts_the_lenient_one_accepts(name, data):
    strict, lenient = get_protocol(name), get_protocol(split_level(name)[0])
    bodies = {**BODIES, "poor": "", "unscored": "no number"}
    steps = data.draw(st.lists(st.sampled_from(strict.roles), max_size=10))
    state = State()
    for role in steps:
        assert allowed_after(strict, state) <= allowed_after(lenient, state)
        body = data.draw(st.sampled_from([*bodies_of(strict, role), *bodies.values()]))
        after = advance(lenient, state, role, body)
        if role in allowed_after(strict, state):
            assert advance(strict, state, role, body) == after
        state = after


def test_names_of_levels_are_one_line_when_they_are_wrong():
    with pytest.raises(UserError, match="'web:strict' has no level 'strict'; use web or web:paper"):
        get_protocol("web:strict")
    with pytest.raises(UserError, match="level 'strict' is unknown; use one of: lenient, paper"):
        at_level("web", "strict")
    with pytest.raises(UserError, match="protocol 'wab' is unknown"):
        get_protocol("wab:paper")
    with pytest.raises(UserError, match="protocol 'mine:paper'"):
        add_protocol(protocol_with_tools("mine:paper", ("code",)))


def test_a_level_is_part_of_a_name():
    assert [at_level("web", level) for level in ("", "lenient", "paper")] == [
        "web", "web", "web:paper"]  # fmt: skip
    assert [at_level("web:paper", level) for level in ("", "lenient", "paper")] == [
        "web:paper", "web", "web:paper"]  # fmt: skip
    assert get_protocol("web:paper").name == "web:paper"
