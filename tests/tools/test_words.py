"""Words of any script."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.tools.words import words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A snake_case, 42 cafés!", "a snake case 42 cafés"),
        ("हिन्दी भाषा।", "हिन्दी भाषा"),
        ("தமிழ் மொழி", "தமிழ் மொழி"),
        ("বাংলা ভাষা", "বাংলা ভাষা"),
        ("שָׁלוֹם עולם", "שָׁלוֹם עולם"),
        ("ภาษาที่นี่", "ภ า ษ า ที่ นี่"),
        ("ភាសាខ្មែរ", "ភា សា ខ្ មែ រ"),
        ("東京・AIの「本」", "東 京 ai の 本"),
    ],
)
def test_words_go_on_over_their_marks(text, expected):
    assert words(text) == expected.split()


@given(st.text())
def test_every_letter_is_in_a_word_and_nothing_else_begins_one(text):
    found = words(text)
    assert "".join(found).count("_") == 0
    letters = [c for c in text.lower() if c.isalnum()]
    assert [c for word in found for c in word if c.isalnum()] == letters
    for word in found:
        assert word[0].isalnum()
        assert all(c.isalnum() or unicodedata.category(c).startswith("M") for c in word)
