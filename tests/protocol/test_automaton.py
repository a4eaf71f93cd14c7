"""The automaton accepts what the paper's protocols allow and names every rule that is broken."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa_jax.errors import UserError
from coa_jax.protocol import (
    CRITERIA,
    State,
    advance,
    allowed_after,
    check,
    format_reflection,
    get_protocol,
    parse,
    parse_solution,
    protocol_names,
    protocol_with_tools,
    split_level,
)
from tests.protocol.rules import violations

GOOD = format_reflection(dict.fromkeys(CRITERIA, "good"))
POOR = format_reflection({**dict.fromkeys(CRITERIA, "good"), "tool_effectiveness": "poor"})
BODIES = {
    "grades": GOOD,
    "score": "The score is 3.",
    "code": "```py\nprint(1)\n```",
    "urls": "https://a.org",
    "inspection": '{"file_path": "a.png"}',
    "solution": r"\boxed{1}",
    "text": "words",
}


def write(protocol, steps: str) -> str:
    """Text of steps such as ``think plan think code observation``, with bodies of the right form.

    A body can be given after ``=``: ``double_check=2``.
    """
    lines = []
    for step in steps.split():
        role, _, body = step.partition("=")
        body = {"POOR": POOR}.get(body, body) or BODIES[protocol.form_of(role)]
        lines.append(f"<{role}>{body}</{role}>")
    return "\n".join(lines)


def kinds(name: str, steps: str) -> list[str]:
    protocol = get_protocol(name)
    return [v.kind for v in violations(protocol, write(protocol, steps))]


LOOKUP = "think plan think wiki_search observation"
CHECKED = "think suggested_answer think double_check"

LEGAL = [
    ("generalist", f"{LOOKUP} {CHECKED} answer"),
    ("generalist", f"{LOOKUP} {CHECKED} think answer"),
    ("generalist", f"{LOOKUP} think code observation think reflection {CHECKED} answer"),
    ("generalist", f"{LOOKUP} think reflection=POOR {LOOKUP} {CHECKED} answer"),
    ("generalist", f"{LOOKUP} {CHECKED}=2 {LOOKUP} {CHECKED}=4 answer"),
    ("generalist", f"{LOOKUP} {CHECKED}=3 think wiki_search observation {CHECKED} answer"),
    ("web", "think plan think web_search observation think crawl_page observation "
            f"{CHECKED} answer"),
    ("web", f"think plan {CHECKED} answer"),
    ("web_wiki", f"{LOOKUP} {CHECKED} answer"),
    ("universal", f"think plan think visual_inspector observation {CHECKED} answer"),
    ("mhqa", f"{LOOKUP} think answer"),
    ("mhqa", "think wiki_search observation think reflection think plan think wiki_search "
             "observation think answer=a|b"),
    ("code", "plan think code observation reflection think code observation reflection "
             "think answer"),
    ("code", "plan think answer"),
]  # fmt: skip

BROKEN = [
    ("generalist", f"{CHECKED} answer", ["transition"]),
    ("generalist", f"plan think wiki_search observation {CHECKED} answer", ["missing_think"]),
    ("generalist", f"think plan wiki_search observation {CHECKED} answer", ["missing_think"]),
    ("generalist", f"think {LOOKUP} {CHECKED} answer", ["misplaced_think"]),
    ("generalist", f"{LOOKUP} observation {CHECKED} answer", ["transition"]),
    ("generalist", f"think plan think wiki_search {CHECKED} answer", ["transition"]),
    ("generalist", f"{LOOKUP} think answer", ["transition"]),
    ("generalist", f"{LOOKUP} think suggested_answer answer", ["transition"]),
    ("generalist", f"{LOOKUP} {CHECKED}=2 answer", ["answer_unverified"]),
    ("generalist", f"{LOOKUP} {CHECKED}=2 think answer", ["answer_unverified"]),
    ("generalist", f"{LOOKUP} {CHECKED}=fine answer", ["bad_body", "answer_unverified"]),
    ("generalist", f"{LOOKUP} {CHECKED}=1 think code observation {CHECKED} answer",
     ["missing_replan"]),
    ("generalist", f"{LOOKUP} think reflection=POOR {CHECKED} answer", ["missing_replan"]),
    ("generalist", f"{LOOKUP} think reflection=well {CHECKED} answer", ["bad_body"]),
    ("generalist", f"{LOOKUP} {CHECKED} answer think", ["after_answer"]),
    ("generalist", f"{LOOKUP} {CHECKED} answer answer", ["after_answer"]),
    ("generalist", f"{LOOKUP} {CHECKED}", ["missing_answer"]),
    ("generalist", f"think plan think code=1+1 observation {CHECKED} answer", ["bad_body"]),
    ("web", f"think plan think crawl_page=here observation {CHECKED} answer", ["bad_body"]),
    ("mhqa", f"{LOOKUP} answer", ["missing_think"]),
    ("mhqa", f"{LOOKUP} think suggested_answer think answer",
     ["unknown_tag", "stray_text", "unknown_tag", "misplaced_think"]),
    ("code", "think plan think code observation reflection think answer", ["misplaced_think"]),
    ("code", "plan code observation reflection think answer", ["missing_think"]),
    ("code", "plan think code observation think reflection think answer", ["misplaced_think"] ),
    ("code", "plan think code observation think code observation reflection think answer",
     ["misplaced_think", "transition"]),
    ("code", "plan think answer=7", ["bad_body"]),
    ("code", "plan think code observation reflection plan think answer", ["transition"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "steps"), LEGAL)
def test_legal_trajectories_break_no_rule(name, steps):
    assert kinds(name, steps) == []


@pytest.mark.parametrize(("name", "steps", "expected"), BROKEN)
def test_broken_rules_are_named(name, steps, expected):
    assert kinds(name, steps) == expected


def test_positions_point_at_the_place_that_is_wrong():
    text = "<think>a</think>\n<plan>b</plan>\n  words\n<think> </think><answer></answer>"
    found = {v.kind: text[v.position :] for v in violations(get_protocol("generalist"), text)}
    assert found["stray_text"].startswith("words")
    assert found["transition"].startswith("<answer>")
    empty = [v.position for v in violations(get_protocol("generalist"), text)
             if v.kind == "empty_body"]  # fmt: skip
    assert [text[p : p + 8] for p in empty] == ["<think> ", "<answer>"]


def test_an_empty_observation_is_not_the_policys_fault():
    protocol = get_protocol("generalist")
    text = write(protocol, f"{LOOKUP} {CHECKED} answer").replace(
        "<observation>words</observation>", "<observation></observation>"
    )
    assert violations(protocol, text) == []


def test_an_observation_written_by_the_policy_is_forged():
    protocol = get_protocol("mhqa")
    segments = parse(protocol, write(protocol, f"{LOOKUP} think answer")).segments
    authors = ["environment" if s.role == "observation" else "policy" for s in segments]
    assert check(protocol, segments, authors) == []
    forged = check(protocol, segments, ["policy"] * len(segments))
    assert [v.kind for v in forged] == ["forged_observation"]
    assert forged[0].position == next(s.start for s in segments if s.role == "observation")


def test_an_answer_written_by_the_environment_does_not_count():
    protocol = get_protocol("mhqa")
    segments = parse(protocol, write(protocol, f"{LOOKUP} think answer")).segments
    authors = ["environment" if s.role in ("observation", "answer") else "policy" for s in segments]
    assert [v.kind for v in check(protocol, segments, authors)] == ["missing_answer"]
    with pytest.raises(ValueError, match=r"12 authors .* 13 segments"):
        check(protocol, segments, authors[:-1])


def test_an_unfinished_text_may_be_checked_as_it_stands():
    protocol = get_protocol("generalist")
    text = write(protocol, LOOKUP)
    assert violations(protocol, text, complete=False) == []
    assert [v.kind for v in violations(protocol, text)] == ["missing_answer"]
    assert [v.kind for v in violations(protocol, text + "\n<think>a", complete=False)] == [
        "unclosed"
    ]


@pytest.mark.parametrize(
    ("name", "steps", "expected"),
    [
        ("generalist", "", {"think"}),
        ("generalist", "think", {"plan"}),
        ("generalist", "think plan think", {"wiki_search", "code", "suggested_answer"}),
        ("generalist", "think plan think code", {"observation"}),
        ("generalist", LOOKUP + " think",
         {"wiki_search", "code", "suggested_answer", "reflection"}),
        ("generalist", f"{LOOKUP} think reflection=POOR think", {"plan"}),
        ("generalist", f"{LOOKUP} {CHECKED}=2", {"think"}),
        ("generalist", f"{LOOKUP} {CHECKED}=2 think", {"plan"}),
        ("generalist", f"{LOOKUP} {CHECKED}=3", {"think", "answer"}),
        ("generalist", f"{LOOKUP} {CHECKED}=3 think", {"plan", "wiki_search", "code", "answer"}),
        ("generalist", f"{LOOKUP} {CHECKED}=? think", {"plan", "wiki_search", "code"}),
        ("generalist", f"{LOOKUP} {CHECKED}=3 answer", set()),
        ("code", "", {"plan"}),
        ("code", "plan", {"think"}),
        ("code", "plan think code observation", {"reflection"}),
        ("mhqa", "think", {"plan", "wiki_search"}),
    ],
)  # fmt: skip
def test_the_tags_that_may_come_next(name, steps, expected):
    protocol = get_protocol(name)
    state = State()
    for segment in parse(protocol, write(protocol, steps)).segments:
        if segment.role is not None:
            state = advance(protocol, state, segment.role, segment.body)
    assert allowed_after(protocol, state) == expected


def bodies_of(protocol, role: str) -> list[str]:
    """Legal bodies of a role, those that force a new plan included."""
    body = BODIES[protocol.form_of(role)]
    return {"grades": [body, POOR], "score": [body, "score 2"]}.get(protocol.form_of(role), [body])


LEVELS = [name + level for name in protocol_names() for level in ("", ":paper")]


@settings(max_examples=100)
@given(st.sampled_from(LEVELS), st.randoms(use_true_random=False))
def test_every_walk_of_the_automaton_is_legal_and_can_reach_an_answer(name, rng: random.Random):
    protocol = get_protocol(name)
    ways_out = ("answer", "double_check", "suggested_answer", "observation", "reflection")
    state, text, steps = State(), "", 0
    while allowed := allowed_after(protocol, state):
        steps += 1
        assert steps < 100
        role, leave = rng.choice(sorted(allowed)), steps > 30
        if leave:
            role = next((way for way in ways_out if way in allowed), role)
        body = bodies_of(protocol, role)[0] if leave else rng.choice(bodies_of(protocol, role))
        text += f"<{role}>{body}</{role}>\n"
        state = advance(protocol, state, role, body)
    assert violations(protocol, text) == []
    assert violations(get_protocol(split_level(name)[0]), text) == []


@given(st.sampled_from(protocol_names()), st.data())
def test_a_role_is_accepted_exactly_when_it_is_allowed(name, data):
    protocol = get_protocol(name)
    steps = data.draw(st.lists(st.sampled_from(protocol.roles), max_size=8))
    text, state = "", State()
    for role in steps:
        body = BODIES[protocol.form_of(role)]
        before = violations(protocol, text, complete=False)
        allowed = role in allowed_after(protocol, state)
        text += f"<{role}>{body}</{role}>"
        after = violations(protocol, text, complete=False)
        assert allowed == (len(after) == len(before))
        state = advance(protocol, state, role, body)


def test_an_unknown_protocol_is_the_users_mistake():
    with pytest.raises(UserError, match=r"'wab' is unknown; use one of: web, web_wiki, mhqa"):
        get_protocol("wab")


def test_protocols_over_other_tools():
    protocol = protocol_with_tools("mine", ("code", "web_search"))
    assert protocol.stops == ("</code>", "</web_search>", "</answer>")
    steps = f"think plan think web_search observation think code observation {CHECKED} answer"
    assert violations(protocol, write(protocol, steps)) == []
    alone = protocol_with_tools("alone", ())
    assert alone.stops == ("</answer>",)
    assert violations(alone, write(alone, f"think plan {CHECKED} answer")) == []
    for tools in (("teleport",), ("code", "code")):
        with pytest.raises(
            UserError, match=re.escape(f"protocol 'mine' cannot have the tools {tools}")
        ):
            protocol_with_tools("mine", tools)
    for role in ("answer", "think", "plan", "observation", "tool_call"):
        with pytest.raises(UserError, match=f"the name '{role}'"):
            protocol_with_tools("mine", ("code", role), {role: "A tool."})


@pytest.mark.parametrize("name", protocol_names())
def test_tables_of_a_protocol_agree_with_each_other(name):
    protocol = get_protocol(name)
    actions = set(protocol.roles) - {"think", "observation"}
    assert set(protocol.next_actions) == actions | {"start"}
    assert set(protocol.think_rule) == actions
    assert set().union(*protocol.next_actions.values()) == actions
    assert set(protocol.body_form) <= actions
    assert protocol.stops == tuple(f"</{tag}>" for tag in (*protocol.tools, "answer"))
    assert protocol.next_actions["answer"] == frozenset()


DATA = Path(__file__).resolve().parents[2] / "../shared/data"


@pytest.mark.skipif(not DATA.is_dir(), reason="the sample data are not on this machine")
def test_real_math_answers_and_code_prompts_have_the_forms_of_the_code_protocol():
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = parquet.read_table(DATA / "aime24.parquet").to_pylist()
    assert rows
    protocol = get_protocol("code")
    for row in rows:
        gold = row["reward_model"]["ground_truth"].strip('"[] ')
        assert parse_solution(f"Therefore $\\boxed{{{gold}}}$.") == gold
    # The release tells the model the same tags, in the same prompt, as our protocol has.
    for row in [*rows, *parquet.read_table(DATA / "livecodebench_v4_20.parquet").to_pylist()]:
        shown = row["prompt"][0]["content"]
        assert all(f"<{role}>" in shown for role in protocol.roles)
        assert "```py" in shown
