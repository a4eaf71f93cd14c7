"""Pages are decoded to text, whatever encoding they declare."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.tools.net.text import clip_text, decode

WORDS = "Über den Wolken, où l'âge ne compte pas"


@pytest.mark.parametrize(
    ("codec", "content_type", "meta"),
    [
        ("utf-8", "text/html; charset=utf-8", ""),
        ("utf-8", "text/html", ""),
        ("utf-8", "", ""),
        ("utf-8", "text/html; charset=klingon", ""),
        ("utf-8", "text/html; charset=punycode", ""),
        ("latin-1", "text/html; charset=utf-8", ""),
        ("latin-1", "text/html; charset=ISO-8859-1", ""),
        ("latin-1", "", ""),
        ("cp1252", "text/html; charset='windows-1252'", ""),
        ("utf-16", "text/html", ""),
        ("utf-8-sig", "text/html; charset=latin-1", ""),
        ("latin-1", "text/html", '<meta charset="iso-8859-1">'),
        ("cp1250", "", '<meta http-equiv=content-type content="text/html; charset=cp1252">'),
    ],
)
def test_encodings_named_guessed_or_named_wrongly(codec, content_type, meta):
    words = WORDS.replace("ù", "u").replace("â", "a") if codec == "cp1250" else WORDS
    text = meta + words
    assert decode(text.encode(codec), {"content-type": content_type}) == text


@pytest.mark.parametrize("codec", ["shift_jis", "gb18030", "euc_kr", "big5", "koi8_r"])
def test_other_scripts_by_their_name(codec):
    words = {"koi8_r": "облако", "euc_kr": "구름", "big5": "雲", "gb18030": "云"}.get(codec, "雲")
    assert decode(words.encode(codec), {"content-type": f"text/html; charset={codec}"}) == words


def test_a_character_cut_at_the_end_does_not_change_the_encoding():
    assert decode("Wölfe und Bären €".encode()[:-1], {}) == "Wölfe und Bären \ufffd"


@given(st.binary(max_size=200), st.text(max_size=30))
def test_any_bytes_become_text(body, charset):
    decode(body, {"content-type": f"text/html; charset={charset}"}).encode()


@given(st.text(max_size=80), st.integers(1, 60))
def test_clipped_text_says_so(text, room):
    if len(text) <= room:
        assert clip_text(text, room) == text
    else:
        assert clip_text(text, room).endswith(f"[... {len(text) - room} characters left out ...]")
