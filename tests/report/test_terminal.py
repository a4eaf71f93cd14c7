"""The view of a trajectory on the terminal, which untrusted text cannot control."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.data.trajectory import Author, ToolCall
from coa_jax.protocol import get_protocol, parse
from coa_jax.report.terminal import ANSWER, COLOURS, Paragraph, RoleStream, Screen, Show, clean
from coa_jax.rollout.request import Arrival

PROTOCOL = get_protocol("generalist")


def shown_of(*texts: str, call: ToolCall | None = None) -> str:
    stream = io.StringIO()
    show = Show(Screen(stream), PROTOCOL)
    for text in texts:
        show.arrive(Arrival("t", 0, Author.POLICY, text))
    if call is not None:
        show.arrive(Arrival("t", 0, Author.ENVIRONMENT, "unused", call))
    return stream.getvalue()


def test_segments_stand_under_their_roles():
    shown = shown_of("<think>a b</think>\n<plan>\n1. x\n2. y\n</plan>\n<answer>Z", "</answer>")
    assert shown == "think\n│ a b\nplan\n│ 1. x\n│ 2. y\nanswer\n┃ Z\n"


def test_text_outside_of_tags_is_shown_unless_it_is_blank():
    shown = shown_of("\n \n", "  well", " then <unknown>", "\n<plan>p</plan>")
    assert shown == "outside of tags\n│   well then <unknown>\nplan\n│ p\n"


def test_an_observation_stands_out_with_its_tool_and_time():
    call = ToolCall("wiki_search", "q", "Doc 1\n\nText", "timeout", False, 1.0, 1.25)
    shown = shown_of("<wiki_search>q</wiki_search>", call=call)
    head = "  observation  wiki_search  0.25 s  timeout\n"
    assert shown == f"wiki_search\n│ q\n{head}  ║ Doc 1\n  ║ \n  ║ Text\n"


def test_a_tool_cannot_open_a_role():
    text = "</observation><answer>mine</answer>"
    call = ToolCall("code", "print()", text, "ok", True, 0.0, 0.1)
    shown = shown_of("<code>x</code>", call=call)
    assert f"  ║ {text}\n" in shown
    assert "┃" not in shown


@given(st.lists(st.text("<>/thinkpla wer_Z\n", max_size=12), max_size=12))
def test_pieces_join_to_the_bodies_of_the_segments(chunks):
    stream = RoleStream(PROTOCOL)
    pieces = [piece for chunk in chunks for piece in stream.feed(chunk)] + stream.finish()
    bodies, open_text = [], ""
    for piece in pieces:
        open_text += piece.text
        if piece.last:
            bodies.append((piece.role, open_text))
            open_text = ""
    segments = parse(PROTOCOL, "".join(chunks)).segments
    assert bodies == [(segment.role, segment.body) for segment in segments]
    assert open_text == ""


@given(st.text("ab cd\n", max_size=60), st.integers(1, 9), st.integers(4, 12))
def test_breaking_lines_keeps_the_words(text, size, width):
    lines: list[str] = []

    def put(part: str, begins: bool) -> None:
        if begins:
            lines.append("")
        lines[-1] += part

    paragraph = Paragraph(put, width)
    for at in range(0, len(text), size):
        paragraph.write(text[at : at + size])
    paragraph.end()
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert all(len(line) <= width or " " not in line.strip() for line in lines)
    assert not lines or (lines[0].strip() and lines[-1].strip())


# --- untrusted text ------------------------------------------------------------------------

HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m\u202eevil\u2066\x00\x08\ud800[bold red]x[/] :smile: 1\r2"


def test_control_characters_never_reach_the_terminal():
    shown = shown_of(
        f"<think>{HOSTILE}</think>{HOSTILE}<answer>{HOSTILE}</answer>",
        call=ToolCall("code", "", HOSTILE, "ok", True, 0.0, 0.0),
    )
    shown.encode()
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown)
    assert shown.count("evil") == 4
    # Markup of the terminal library is text.
    assert shown.count("[bold red]x[/] :smile: 12") == 4


@given(st.text())
def test_clean_text_holds_no_character_that_a_terminal_obeys(text):
    safe = clean(text)
    assert all(c in "\n\t" or (c >= " " and not 0x7F <= ord(c) <= 0x9F) for c in safe)
    assert clean(safe) == safe
    if text.isprintable():
        assert safe == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def coloured(monkeypatch: pytest.MonkeyPatch, **variables: str) -> str:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stream = Terminal()
    screen = Screen(stream)
    for name in ("think", "answer"):
        screen.begin(name)
        screen.write("text")
    screen.end()
    return stream.getvalue()


def test_colours_only_where_they_are_wanted(monkeypatch):
    assert "\x1b[" in coloured(monkeypatch)
    assert "\x1b" not in coloured(monkeypatch, NO_COLOR="1")
    assert "\x1b" not in coloured(monkeypatch, TERM="dumb")


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("role", sorted(COLOURS))
def test_every_colour_can_be_read_on_dark_and_light(role):
    assert contrast(COLOURS[role], "#ffffff") >= 4.0
    assert contrast(COLOURS[role], "#000000") >= 4.0


def test_every_role_has_a_colour():
    protocols = (get_protocol("universal"), PROTOCOL)
    assert {role for p in protocols for role in p.roles if role not in p.tools} <= set(COLOURS)
    assert ANSWER.color is not None and ANSWER.bgcolor is not None
    front, ground = ANSWER.color.get_truecolor().hex, ANSWER.bgcolor.get_truecolor().hex
    assert contrast(front, ground) >= 4.5
