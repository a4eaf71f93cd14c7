r"""Defines the bodies of segments as regular languages of UTF-8 bytes, for constrained decoding.

The parsers in `bodies` accept every string of these languages. The reverse is not always true: if
the set of strings that a parser accepts is not regular, or would need many states, the language is
a subset. The following table lists the strings that a parser accepts and the language leaves out:

==============  =================================================================================
form of body    left out
==============  =================================================================================
all forms       more than a few spaces or line ends in a row, and spaces that are not ASCII
``grades``      several empty pairs between two grades
``score``       ``<``; digits other than the score and those of ``out of 4`` or ``/4`` after it; a
                score more than 48 bytes after the word "score", "grade" or "rating"; a score
                right after ``of``
``urls``        ``<``; parts that are not URLs
``inspection``  ``<``; keys other than ``file_path`` and, after this key, ``question``; a path
                whose first character is an escape sequence or not ASCII
``solution``    braces nested more than three levels deep; programs that contain ``\boxed{``
==============  =================================================================================

Bytes that are not valid UTF-8 become U+FFFD when the text is decoded. This character is not a
space, so the parsers accept such strings too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from coa_jax.protocol.bodies import CRITERIA, format_double_check, format_reflection
from coa_jax.protocol.formats import BodyForm
from coa_jax.protocol.regex import (
    ANY_BYTE,
    ANYTHING,
    Regex,
    containing,
    literal,
    none_of,
    one_of,
    optional,
    star,
    union,
    up_to,
)

_SPACE, _BLANK = one_of(b" \t\r"), one_of(b" \t\r\n")
_GAP, _SPACES = up_to(4, _BLANK), up_to(2, _SPACE)
_NEWLINE, _FENCE = literal("\n"), literal("```")

BLANKS_BETWEEN = _GAP
"""Text that is allowed between segments: a few spaces and line ends.

The number is bounded, because an untrained policy might write spaces endlessly.
"""


MAY_SHOW_TAGS: frozenset[BodyForm] = frozenset({"text", "code", "solution"})
"""Forms of bodies that may contain ``<``, and therefore tags."""


def outcomes(form: BodyForm, pass_score: int) -> tuple[tuple[Regex, str], ...]:
    """Returns the allowed bodies of a form as regular languages, for constrained decoding.

    There is one language for each effect that a body can have on what comes next. For example,
    reflections have two: those with a poor grade, after which the policy must write a plan, and all
    others, after which it need not.

    Args:
        form: form of the body, see `BodyForm`.
        pass_score: lowest score of a ``double_check`` after which ``answer`` may follow.

    Returns:
        (language, sample body) for each effect. The sample body has this effect; it is "" if the
        bodies of the form have no effect.
    """
    if form == "grades":
        good = _grades(("good", "average", "fair"))
        poor = _grades(("good", "average", "fair", "poor")) & ~good
        pairs = ((good, "good"), (poor, "poor"))
        return tuple((r, format_reflection(dict.fromkeys(CRITERIA, grade))) for r, grade in pairs)
    if form == "score":
        failed = [score for score in _SCALE if score < pass_score]
        passed = [score for score in _SCALE if score >= pass_score]
        return tuple((_score(s), format_double_check(s[0])) for s in (failed, passed) if s)
    return ((_FORMS[form], ""),)


# --- text ----------------------------------------------------------------------------------

# The characters that str.strip removes. The last of these characters is U+3000.
_UNICODE_BLANK = union(literal(c) for c in map(chr, range(0x3001)) if c.isspace())
_NOT_BLANK = ~star(_UNICODE_BLANK)

# --- grades --------------------------------------------------------------------------------


def _grades(grades: tuple[str, ...]) -> Regex:
    """Returns the language of reflections: one ``criterion: grade`` pair per criterion."""
    grade = union(literal(name, ignore_case=True) for name in grades) + optional(literal("."))

    def pair(name: str) -> Regex:
        first, *others = (literal(word, ignore_case=True) for word in name.split("_"))
        for word in others:
            first += one_of(b"_ -") + word
        return first + _SPACES + literal(":") + _SPACES + grade + _SPACES

    separator = one_of(b"\n,;") + _GAP
    orders = itertools.permutations(map(pair, CRITERIA))
    return _GAP + union(
        a + separator + b + separator + c + optional(separator) for a, b, c in orders
    )


# --- score ---------------------------------------------------------------------------------

_SCALE = (1, 2, 3, 4)
_DIGITS = b"0123456789"
_WORD = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_" + _DIGITS + bytes(range(128, 256))
_NO_DIGIT = none_of(_DIGITS + b"<")
_EDGE = none_of(_WORD + b"<")


def _score(scores: Sequence[int]) -> Regex:
    """Returns the language of sentences that name one of the scores, or contain only a score."""
    words = (literal(word, ignore_case=True) for word in ("score", "grade", "rating"))
    word = union(words) + optional(one_of(b"sdSD"))
    # The text up to the first word that announces a score, and the character after this word.
    announced = optional(star(_NO_DIGIT) + _EDGE) + word + (_EDGE & none_of(b"/\n"))
    announced &= ~(announced + _NO_DIGIT + star(_NO_DIGIT))
    between = up_to(48, none_of(_DIGITS + b"\n</"))
    # A digit after "of" is excluded, because "out of 4" names the scale and not the score.
    blanks = _UNICODE_BLANK + star(_UNICODE_BLANK)
    between &= ~(ANYTHING + literal("of", ignore_case=True) + blanks)
    space = literal(" ")
    slash = optional(space) + literal("/") + optional(space)
    scale = (slash | space + literal("out of ")) + literal("4")
    digit = union(literal(str(score)) for score in scores)
    rest = optional(_EDGE + star(_NO_DIGIT))
    sentence = announced + between + digit + optional(scale) + rest
    alone = _GAP + digit + optional(scale) + _SPACES + optional(literal(".")) + _GAP
    return sentence | alone


# --- programs ------------------------------------------------------------------------------

_FENCE_LINE = (
    optional(ANYTHING + _NEWLINE) + _FENCE + star(_UNICODE_BLANK) + optional(_NEWLINE + ANYTHING)
)
_LINES = ~_FENCE_LINE
_CLOSED = _NEWLINE + _FENCE + _SPACES


def _fence(*names: str) -> Regex:
    name = union(literal(name, ignore_case=True) for name in names)
    return _FENCE + name + _SPACES + _NEWLINE


_PROGRAM = _GAP + _fence("py", "python") + (_LINES & _NOT_BLANK) + _CLOSED
_TAIL = optional(_NEWLINE + _GAP)
_STDIN = _NEWLINE + _GAP + _fence("sh", "bash") + optional(_LINES + _NEWLINE) + _FENCE + _SPACES
_CODE = _PROGRAM + optional(_STDIN) + _TAIL

# --- addresses -----------------------------------------------------------------------------

_ADDRESS = literal("http", ignore_case=True) + optional(one_of(b"sS")) + literal("://")
_ADDRESS += none_of(b"|<") + star(none_of(b"|<"))
_ADDRESS &= ~containing(_UNICODE_BLANK)
_LINK = literal("[") + star(none_of(b"[]|<\n")) + literal("](") + _ADDRESS + literal(")")
_PART = _GAP + (_ADDRESS | _LINK) + _GAP
_URLS = _PART + star(literal("|") + _PART)

# --- JSON ----------------------------------------------------------------------------------

_HEX = one_of(b"0123456789abcdefABCDEF")
_ESCAPE = literal("\\") + (one_of(b'"\\/bfnrt') | literal("u") + _HEX + _HEX + _HEX + _HEX)
_PLAIN = none_of(b'"\\<' + bytes(range(32)))
_STRING_REST = star(_PLAIN | _ESCAPE) + literal('"')
_PATH = literal('"') + one_of(set(range(33, 127)) - set(b'"\\<')) + _STRING_REST
_SPLIT, _COLON = _GAP + literal(",") + _GAP, _GAP + literal(":") + _GAP
_ASKED = _SPLIT + literal('"question"') + _COLON + literal('"') + _STRING_REST
_OBJECT = literal("{") + _GAP + literal('"file_path"') + _COLON + _PATH + optional(_ASKED) + _GAP
_OBJECT += literal("}")
_INSPECTION = _GAP + (
    _OBJECT + _GAP | _fence("json") + _GAP + _OBJECT + up_to(2, _BLANK) + _CLOSED + _TAIL
)

# --- solutions -----------------------------------------------------------------------------

_BOX = literal("\\boxed{")
_NO_BOX = ~containing(_BOX)


def _balanced(depth: int) -> Regex:
    piece = none_of(b"\\{}") | literal("\\") + ANY_BYTE
    if depth:
        piece |= literal("{") + _balanced(depth - 1) + literal("}")
    return star(piece)


# The parser reads only the last box, so no box may follow.
_BOXED = ANYTHING + _BOX + (_balanced(3) & _NO_BOX & _NOT_BLANK) + literal("}") + _NO_BOX
_SOLUTION = _BOXED | (_PROGRAM + _TAIL & _NO_BOX)

_FORMS: dict[BodyForm, Regex] = {
    "text": _NOT_BLANK,
    "code": _CODE,
    "urls": _URLS,
    "inspection": _INSPECTION,
    "solution": _SOLUTION,
}
