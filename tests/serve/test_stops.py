"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coa_jax.serve.samples import StopStrings

LETTERS = st.text("ab<", max_size=30)
STOPS = st.lists(st.text("ab<", min_size=1, max_size=4), max_size=4)


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the stop string that ends first (the longest of those), found by trial."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@given(st.lists(LETTERS, max_size=8), STOPS)
def test_the_pieces_join_to_the_text_before_the_first_stop_string(pieces, stops):
    stream = StopStrings(stops)
    out = "".join(stream.feed(piece) for piece in pieces) + stream.flush()
    assert (out, stream.match) == cut("".join(pieces), stops)


@given(LETTERS, STOPS)
def test_no_piece_is_taken_back_and_none_is_held_without_need(text, stops):
    stream, out = StopStrings(stops), ""
    for at, letter in enumerate(text):
        out += stream.feed(letter)
        seen = text[: at + 1]
        if stream.match is not None:
            break
        held = seen[len(out) :]
        assert seen.startswith(out)
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


@given(LETTERS, STOPS)
def test_a_kept_stop_string_is_the_end_of_the_text(text, stops):
    stream = StopStrings(stops, keep=True)
    out = stream.feed(text) + stream.flush()
    before, stop = cut(text, stops)
    assert out == before + (stop or "")
