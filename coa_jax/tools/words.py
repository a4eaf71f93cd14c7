"""Defines words in any script, and simplifies texts, for search and for comparing texts."""

from __future__ import annotations

import functools
import html
import re
import unicodedata


def _ranges(codes: list[int]) -> str:
    """Returns ascending code points as the content of a regular-expression character class."""
    starts = [c for c, before in zip(codes, [-1, *codes], strict=False) if c != before + 1]
    ends = [c for c, after in zip(codes, [*codes[1:], -1], strict=True) if c != after - 1]
    return "".join(f"{chr(a)}-{chr(b)}" for a, b in zip(starts, ends, strict=True))


# Thai and Lao, Burmese, Khmer, Japanese and Chinese are written without spaces between words.
_SIGNS = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
)
_LETTER = rf"[^\W_{_SIGNS}]"


@functools.cache
def _word() -> str:
    # ``\w`` does not match combining marks, such as the vowel signs of Hindi and Thai.
    marks = _ranges([c for c in range(0x20000) if unicodedata.category(chr(c)).startswith("M")])
    return rf"(?=\w)[{_SIGNS}][{marks}]*|{_LETTER}+(?:[{marks}]+{_LETTER}*)*"


@functools.cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Compiles a regular expression in which WORD stands for a word.

    A word consists of letters and digits with their combining marks. In scripts without spaces
    between words, every character is a word.
    """
    return re.compile(pattern.replace("WORD", _word()))


def words(text: str) -> list[str]:
    """Returns the words of a text in lower case, in order; `compiled` defines a word."""
    return compiled("WORD").findall(text.lower())


_ACCENTS = re.compile("(?<=[A-Za-z\u00aa-\u02af\u0370-\u03ff])[\u0300-\u036f]+")
"""Combining marks after a Latin or Greek letter, in decomposed text."""

_TYPOGRAPHY = str.maketrans(
    {"\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"', "\u2026": "...", "\xa0": " "}
    | {"\u2013": "-", "\u2014": "-", "\u2212": "-", "\u00d7": "x", "\u0131": "i", "\u0111": "d"}
    | {"ø": "o", "Ø": "O", "ł": "l", "Ł": "L", "ß": "ss", "æ": "ae", "Æ": "AE"}
    | {"²": "2", "³": "3", "°": " degrees ", "€": "EUR ", "£": "GBP "}
)


def fold(text: str) -> str:
    """Simplifies a text: removes markup and accents, and replaces typographic characters.

    HTML tags and accents are removed, and repeated spaces become one. HTML entities and typographic
    characters are replaced by simple characters. All combining marks of Latin and Greek letters
    count as accents. In other scripts, a mark that forms another letter is kept, for example in the
    Cyrillic й.
    """
    if "<" in text:
        text = re.sub(r"<\s*(br|/?p|/?li|/?ul)\b[^>]*>", " ", text, flags=re.IGNORECASE)
        text = re.sub(r"</?[a-zA-Z][^>]*>", "", text)
    if "&" in text:
        text = html.unescape(html.unescape(text))
    if not text.isascii():
        text = unicodedata.normalize("NFKD", text.translate(_TYPOGRAPHY))
        text = unicodedata.normalize("NFKC", _ACCENTS.sub("", text))
        text = re.sub("[\u0300-\u036f]", "", text)  # marks that do not form another letter
    return " ".join(text.split())
