"""The parser is total, exact, incremental, linear in time, and follows its documentation."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa_jax.protocol import Parser, Segment, get_protocol, parse, protocol_names, quote_tool_text
from tests.protocol.rules import violations

GENERALIST = get_protocol("generalist")
TAGS = [f"<{slash}{role}>" for role in GENERALIST.roles for slash in ("", "/")]
# Text that is dense in tags, broken tags and things that look like them.
PIECES = st.sampled_from(
    [*TAGS, "<b>", "</b>", "<", ">", "</", "<thi", "nk>", "<think ", "< plan>", "\n", "a < b", "é"]
)
TAGGED = st.one_of(st.lists(PIECES, max_size=30).map("".join), st.text(max_size=60))


def kinds(text: str) -> list[tuple[str, int]]:
    return [(v.kind, v.position) for v in parse(GENERALIST, text).violations]


def roles_and_bodies(text: str) -> list[tuple[str | None, str]]:
    return [(s.role, s.body) for s in parse(GENERALIST, text).segments]


@given(TAGGED, st.sampled_from(protocol_names()))
def test_any_text_parses_into_contiguous_segments_that_join_back(text, name):
    segments = parse(get_protocol(name), text).segments
    assert "".join(text[s.start : s.end] for s in segments) == text
    ends = [0, *(s.end for s in segments)]
    assert [s.start for s in segments] == ends[:-1]
    for s in segments:
        opening, closing = (f"<{s.role}>", f"</{s.role}>") if s.role else ("", "")
        assert text[s.start : s.end] == opening + s.body + (closing if s.closed else "")


@settings(max_examples=100)
@given(TAGGED, st.data())
def test_any_chunks_give_the_same_segments_and_violations(text, data):
    some = st.lists(st.integers(0, len(text)), max_size=12)
    cuts = data.draw(some.map(sorted) | st.just(list(range(len(text)))))
    parser = Parser(GENERALIST)
    segments = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        segments += parser.feed(text[start:end])
    segments += parser.finish()
    whole = parse(GENERALIST, text)
    assert tuple(segments) == whole.segments
    assert tuple(parser.violations) == whole.violations


@given(TAGGED)
def test_violations_of_any_text_lie_inside_it_and_are_ordered(text):
    positions = [v.position for v in violations(GENERALIST, text)]
    assert positions == sorted(positions)
    assert all(0 <= position <= len(text) for position in positions)


@given(st.text(max_size=40).filter(lambda text: "<" not in text))
def test_text_without_tags_is_one_plain_segment(text):
    expected = (Segment(None, text, 0, len(text), True),) if text else ()
    assert parse(GENERALIST, text).segments == expected


def test_a_segment_is_returned_by_the_chunk_that_closes_it():
    parser = Parser(GENERALIST)
    assert parser.feed("<think>a</thi") == []
    assert parser.open_role == "think"
    assert parser.feed("nk") == []
    assert parser.feed(">\n<pl") == [Segment("think", "a", 0, 16, True)]
    assert parser.open_role is None
    assert parser.feed("an>") == [Segment(None, "\n", 16, 17, True)]
    assert parser.open_role == "plan"
    assert parser.finish() == [Segment("plan", "", 17, 23, False)]
    assert parser.finish() == []
    with pytest.raises(ValueError, match=r"after Parser\.finish"):
        parser.feed("more")


def test_an_unclosed_tag_takes_the_rest_of_the_text():
    text = "<think>a <plan>b</plan>"
    assert roles_and_bodies(text) == [("think", "a <plan>b</plan>")]
    assert not parse(GENERALIST, text).segments[0].closed
    assert kinds(text) == [("nested", 9), ("nested", 16), ("unclosed", 0)]


def test_a_closing_tag_only_ends_the_segment_that_it_opened():
    text = "<plan>a</think>b</plan>"
    assert roles_and_bodies(text) == [("plan", "a</think>b")]
    assert kinds(text) == [("nested", 7)]


def test_a_tool_tag_inside_a_thought_calls_nothing():
    text = "<think>I use <code>x</code> now</think>"
    assert roles_and_bodies(text) == [("think", "I use <code>x</code> now")]
    assert [kind for kind, _ in kinds(text)] == ["nested", "nested"]


def test_the_same_tag_twice_does_not_nest():
    text = "<think><think>a</think></think>"
    assert roles_and_bodies(text) == [("think", "<think>a"), (None, "</think>")]
    assert kinds(text) == [("nested", 7), ("unexpected_close", 23)]


def test_unknown_tags_are_text_and_reported_only_outside_of_segments():
    assert kinds("<search>q</search>") == [("unknown_tag", 0), ("unknown_tag", 9)]
    assert kinds("<think>if a<b> then <i>c</i></think>") == []


def test_programs_and_observations_may_show_any_tag():
    for role in ("code", "observation"):
        text = f"<{role}>print('<answer>42</answer> </think>')</{role}>"
        assert kinds(text) == []
        assert [role for role, _ in roles_and_bodies(text)] == [role]


@pytest.mark.parametrize("tag", ["<think >", "< think>", "<Think>", "<think", "<think/>", "<>"])
def test_only_the_exact_tag_opens_a_segment(tag):
    assert [role for role, _ in roles_and_bodies(tag + "a")] == [None]


def test_a_tag_that_is_cut_off_is_text():
    assert roles_and_bodies("<think>a</thin") == [("think", "a</thin")]
    assert roles_and_bodies("a<thin") == [(None, "a<thin")]


def test_names_longer_than_any_tag_are_no_tags_however_they_arrive():
    long = "<" + "a" * 65 + ">"
    parser = Parser(GENERALIST)
    for character in long:
        parser.feed(character)
    parser.finish()
    assert parser.violations == []
    assert kinds(long) == []
    assert [kind for kind, _ in kinds("<" + "a" * 64 + ">")] == ["unknown_tag"]


@given(TAGGED)
def test_quoted_tool_text_stays_inside_its_observation(text):
    quoted = quote_tool_text(GENERALIST, text)
    wrapped = f"<observation>\n{quoted}\n</observation>"
    assert roles_and_bodies(wrapped) == [("observation", f"\n{quoted}\n")]
    assert kinds(wrapped) == []


HOSTILE = ["<", "</", "<think>", "</think>", "<code></", "<a", "<thin", "<x>", "<plan></plan>"]


def _work(text: str, chunk: int) -> int:
    """Bytecode lines and characters copied while a text is parsed: a clock that does not jitter."""
    work = 0

    def trace(frame, event, argument):
        nonlocal work
        if not frame.f_code.co_filename.endswith("parser.py"):
            return None
        work += 1
        if event == "line":
            work += len(frame.f_locals.get("data", "")) // 64
        return trace

    parser = Parser(GENERALIST)
    sys.settrace(trace)
    try:
        for start in range(0, len(text), chunk):
            parser.feed(text[start : start + chunk])
        parser.finish()
    finally:
        sys.settrace(None)
    return work


@pytest.mark.parametrize("piece", HOSTILE)
def test_work_in_small_chunks_grows_linearly_with_the_text(piece):
    small, large = (piece * n for n in (400, 3200))
    ratio = _work(large, chunk=3) / _work(small, chunk=3)
    assert 7 < ratio < 9


@pytest.mark.parametrize("piece", HOSTILE)
def test_a_megabyte_of_hostile_text_parses_at_once_and_in_chunks(piece):
    text = piece * (1_000_000 // len(piece))
    whole = parse(GENERALIST, text)
    assert sum(s.end - s.start for s in whole.segments) == len(text)
    parser = Parser(GENERALIST)
    segments = []
    for start in range(0, len(text), 997):
        segments += parser.feed(text[start : start + 997])
        # Nothing but a possible beginning of a tag is looked at twice.
        assert len(parser._carry) <= 66
    assert (*segments, *parser.finish()) == whole.segments
