"""Converts mathematics that is typed without LaTeX to LaTeX, the input of ``math-verify``.

Policies write ``π/6``, ``3½`` or ``2**10`` as often as LaTeX. Without this conversion the parser of
``math-verify`` reads such symbols as words, and assigns wrong values to some expressions (3/7 to
``1 2/7``).
"""

from __future__ import annotations

import re
import unicodedata

_SIGNS = str.maketrans(
    {
        "\N{MINUS SIGN}": "-",
        "\N{EN DASH}": "-",
        "\N{DIVISION SIGN}": "/",
        "\N{FRACTION SLASH}": "/",
        "\N{MULTIPLICATION SIGN}": r"\times ",
        "·": r"\cdot ",
        "±": r"\pm ",
        "°": r"^{\circ}",
        "π": r"\pi ",
        "θ": r"\theta ",
        "∞": r"\infty ",
        "∅": r"\emptyset ",
        "∈": r"\in ",
        "\N{UNION}": r"\cup ",
        "∩": r"\cap ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
    }
)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_FRACTION = re.compile("([0-9]*) ?([¼½¾⅐-⅞])")
_SPELLINGS = tuple(
    (re.compile(pattern), written)
    for pattern, written in (
        (r"\A\*\*(?=\S)(.*\S)\*\*\Z", r"\1"),  # Markdown bold
        (r"\*\*", "^"),
        (r"√ ?\(((?:[^()\\]|\\[A-Za-z])*)\)", r"\\sqrt{\1}"),
        (r"√ ?([0-9]+(?:\.[0-9]+)?|[a-z])", r"\\sqrt{\1}"),
        (r"(?<=[0-9]),?(?:\\[,;:! ]|\{,\})(?=[0-9]{3}(?![0-9]))", ""),  # between thousands
        (r"(?<![\w\\.])([0-9]+) +([0-9]+)/([0-9]+)(?![\w.])", r"(\1+\\frac{\2}{\3})"),
        (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
        (r"(?<![A-Za-z\\])oo(?![A-Za-z])", r"\\infty "),
        (r"(?<=[\])]) *U *(?=[\[(])", r"\\cup "),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"(?<=[0-9]) +((?:k?m|cm|mi|ft|k?g)/(?:s|h|hr|min|m|L))\Z", r"\\text{ \1}"),
        (r"(?<=[0-9]) *([ckm]m|ft|in|mi|yd)(?=\^\{?[23]\}?\Z)", r"\\text{ \1}"),
    )
)
_OR = re.compile(r"\s*(?:\\text\{ *or *\}|\bor\b|\\lor(?![a-z])|\\vee(?![a-z]))\s*")
_LESS = r"\s*(?:(<)|<=|\\leq?(?:slant)?(?![a-z]))\s*"
_MORE = r"\s*(?:(>)|>=|\\geq?(?:slant)?(?![a-z]))\s*"
_BOUND = r"((?:[^<>=\\]|\\(?![lg]eq?(?:slant)?(?![a-z])))+?)"
_BETWEEN = re.compile(rf"{_BOUND}{_LESS}([a-z]){_LESS}{_BOUND}")
_BELOW, _ABOVE = re.compile(rf"([a-z]){_LESS}{_BOUND}"), re.compile(rf"([a-z]){_MORE}{_BOUND}")
_NEEDLESS = re.compile(r"(?<![A-Za-z0-9])\s+|\s+(?![A-Za-z0-9])")


def in_latex(text: str) -> str:
    """Converts Unicode symbols, roots, powers, fractions and inequalities of a text to LaTeX."""
    text = _FRACTION.sub(_fraction, text)
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda m: f"^{{{m[0].translate(_RAISED)}}}", text)
    text = text.translate(_SIGNS)
    for pattern, written in _SPELLINGS:
        text = pattern.sub(written, text)
    return _as_intervals(text.strip())


def _fraction(match: re.Match[str]) -> str:
    above, _, below = unicodedata.normalize("NFKC", match[2]).partition("\N{FRACTION SLASH}")
    fraction = rf"\frac{{{above}}}{{{below}}}"
    return f"({match[1]}+{fraction})" if match[1] else fraction


def _as_intervals(text: str) -> str:
    """Writes an inequality such as ``-2 < x \\le 7`` as the interval ``(-2,7]``.

    Several inequalities joined by "or" become a union of intervals. Any other text is returned
    unchanged, and also a single inequality with one bound, which math-verify can read.
    """
    pieces = [_interval(piece) for piece in _OR.split(text)]
    intervals = [piece for piece in pieces if piece is not None]
    variables = {variable for variable, _ in intervals}
    alone = len(pieces) == 1 and not _BETWEEN.fullmatch(text)  # math-verify can read it
    if len(intervals) < len(pieces) or len(variables) > 1 or alone:
        return text
    return r" \cup ".join(interval for _, interval in intervals)


def _interval(text: str) -> tuple[str, str] | None:
    """Parses one inequality; returns (variable, interval), or None for any other text."""
    if match := _BETWEEN.fullmatch(text):
        low, open_low, variable, open_high, high = match.groups()
        return variable, f"{'(' if open_low else '['}{low},{high}{')' if open_high else ']'}"
    if match := _BELOW.fullmatch(text):
        return match[1], rf"(-\infty,{match[3]}{')' if match[2] else ']'}"
    if match := _ABOVE.fullmatch(text):
        return match[1], rf"{'(' if match[2] else '['}{match[3]},\infty)"
    return None


def tight(text: str) -> str:
    """Removes needless spaces, so that two spellings of an expression can be compared as texts.

    Spaces that separate two words or numbers are kept.
    """
    return _NEEDLESS.sub("", text)
