"""The monitor stops a text at the first token after which it cannot become valid."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa_jax.protocol import Monitor, Parser, check, get_protocol, parse
from tests.protocol.test_automaton import write

GENERALIST = get_protocol("generalist")
GOOD = "think plan think wiki_search observation think suggested_answer think double_check answer"


def follow(protocol, text: str) -> int | None:
    """Characters after which the monitor calls a text broken; what tools wrote is not parsed."""
    parser, monitor = Parser(protocol), Monitor(protocol)
    opening, closing = f"<{protocol.observation}>", f"</{protocol.observation}>"
    position, calls = 0, tuple(f"</{tool}>" for tool in protocol.tools)
    while position < len(text):
        if text.startswith(opening, position) and text[:position].rstrip().endswith(calls):
            end = text.index(closing, position) + len(closing)
            monitor.observe(text[position:end])
            position = end
            continue
        position += 1
        if monitor.update(parser, parser.feed(text[position - 1])):
            return position
    return None


def test_a_trajectory_that_obeys_is_never_broken():
    assert follow(GENERALIST, write(GENERALIST, GOOD)) is None


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("<think>words</think>\n", "<think>words</think>\n<answer>"),
        ("<think>words</think>\n", "<think>words</think>\nw"),
        ("<think>words</think>\n<plan>", "<think>words</think>\n<plan></plan>"),
        ("<think>words", "<think>words<plan>"),
        ("<think>words</think>", "<think>words</think></think>"),
        ("<think>words</think>\n", "<think>words</think>\n<observation>"),
    ],
)
def test_it_breaks_with_the_first_text_that_breaks_a_rule(good, bad):
    assert follow(GENERALIST, good) is None
    assert follow(GENERALIST, bad) is not None


PIECES = st.sampled_from(
    [
        *(f"<{slash}{role}>" for role in GENERALIST.roles for slash in ("", "/")),
        *(write(GENERALIST, role) for role in GENERALIST.roles if role != "observation"),
        " ",
        "word",
        "The score is 1.",
    ]
)
STEPS = st.lists(st.sampled_from(GOOD.split()), max_size=10)


@settings(max_examples=300)
@given(STEPS, st.lists(PIECES, max_size=4))
def test_what_it_breaks_has_a_violation_and_what_it_passes_has_none(steps, rest):
    policy = [step for step in steps if step != "observation"]
    text = write(GENERALIST, " ".join(policy)) + "".join(rest)
    position = follow(GENERALIST, text)

    def broken(prefix: str) -> bool:
        parsed = parse(GENERALIST, prefix)
        lexical = [v for v in parsed.violations if v.kind != "unclosed"]
        authors = ["policy"] * len(parsed.segments)
        found = check(GENERALIST, parsed.segments, authors)
        return bool(lexical or [v for v in found if v.kind != "missing_answer"])

    if position is None:
        # The last characters may be the beginning of a tag, which is no violation yet.
        assert not broken(text[: text.rfind("<") if "<" in text[-20:] else len(text)])
    else:
        assert broken(text[:position])
        assert broken(text)
