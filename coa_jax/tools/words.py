"""Defines words in any script, for keyword search and for comparing texts by words."""

from __future__ import annotations

import re
import unicodedata


def _ranges(codes: list[int]) -> str:
    """Returns ascending code points as the content of a regular-expression character class."""
    starts = [c for c, before in zip(codes, [-1, *codes], strict=False) if c != before + 1]
    ends = [c for c, after in zip(codes, [*codes[1:], -1], strict=True) if c != after - 1]
    return "".join(f"{chr(a)}-{chr(b)}" for a, b in zip(starts, ends, strict=True))


# ``\w`` does not match combining marks, such as the vowel signs of Hindi and Thai.
_MARKS = _ranges([c for c in range(0x20000) if unicodedata.category(chr(c)).startswith("M")])

# Thai and Lao, Burmese, Khmer, Japanese and Chinese are written without spaces between words.
_SIGNS = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
)
_LETTER = rf"[^\W_{_SIGNS}]"

WORD = rf"(?=\w)[{_SIGNS}][{_MARKS}]*|{_LETTER}+(?:[{_MARKS}]+{_LETTER}*)*"
"""Pattern of a word: letters and digits with their combining marks.

In scripts without spaces between words, every character is a word.
"""

_WORD = re.compile(WORD)


def words(text: str) -> list[str]:
    """Returns the words of a text in lower case, in order; `WORD` defines a word."""
    return _WORD.findall(text.lower())
