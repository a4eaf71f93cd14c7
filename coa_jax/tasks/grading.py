"""Compares the answers of a policy with the accepted answers of a task.

The comparison is exact match after the usual normalisation (Chain-of-Agents paper §4.1.1, eq 9),
without the bugs of the released grader:

* A text that is empty after normalisation, such as "The The", matches only itself.
* An answer that joins several alternatives with "|" is wrong if one alternative is wrong. Several
  accepted names of the same thing are right.
* If an accepted answer is a list "A|B", the answer must contain all members of the list.
* Numbers are compared by value: "1.5" is not "15", and "-5" is not "5".
"""

from __future__ import annotations

import decimal
import itertools
import re
import string
import unicodedata
from collections.abc import Iterable

from coa_jax.protocol import split_answers

_PUNCTUATION = str.maketrans("", "", string.punctuation)
# These combining marks are removed: accents of Latin, Greek and Cyrillic, and vowel points, which
# are optional in Hebrew and Arabic. Other marks form another letter and stay: the Japanese words
# for Bali and Paris differ only in such a mark.
_MARKS = re.compile(
    "[\u0300-\u036f\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u064b-\u0652\u0670]"
)
_TYPED = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u02bb\u02bc", "'"),
        **dict.fromkeys("\u201c\u201d", '"'),
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212", "-"),
        **dict.fromkeys("\u00ad\u200b\u2060\ufeff"),
    }
)
"""Typographic quotes, dashes and the minus sign -> the ASCII characters.

Characters without width, such as the soft hyphen, are removed.
"""

_NUMBER = re.compile(
    r"(?P<sign>[-+\u2212\u2013]?)(?P<currency>[$£€¥]?)(?P<digits>\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)"
    r"(?P<power>e[-+]?\d{1,3})?(?:\s*(?P<unit>%|[℃℉]|(?:° ?)?[a-z][a-z0-9 /²]*\.?))?",
    re.IGNORECASE,
)
_GROUPED = re.compile(r"(?<![\d.,'])\d{1,3}(?:[,']\d{2,3})*[,']\d{3}(?!\d|[,']\d)")
_NUMERAL = re.compile(r"(?:(?<!\w)(-?\.?))?(\d+(?:[^\w\s]+\d+)*)")
_BESIDE_NUMBERS = str.maketrans("", "", "$£€¥%")
_LONG_TEXT = 1000  # characters
_LONG_NUMBER = 7  # digits; in a phone number, ISBN or date punctuation only groups the digits
_ARTICLE = re.compile(r"\A\s*(?:a|an|the)\s+", re.IGNORECASE)
_SPELLINGS = {
    "sq km": "sq km, km2, km², square km, square kilometers, square kilometres",
    "km": "km, kilometers, kilometres, kilometer, kilometre",
    "m": "m, meters, metres, meter, metre",
    "cm": "cm, centimeters, centimetres, centimeter, centimetre",
    "mm": "mm, millimeters, millimetres, millimeter, millimetre",
    "miles": "miles, mi",
    "feet": "feet, foot, ft",
    "inches": "inches, inch, in",
    "liters": "liters, litres, liter, litre",
    "°c": "°c, ° c, ℃, celsius, degrees celsius, degree celsius, degrees c",
    "°f": "°f, ° f, ℉, fahrenheit, degrees fahrenheit, degree fahrenheit, degrees f",
    "people": "people",
    "%": "%, percent",
    "seconds": "seconds, second, secs, sec",
    "minutes": "minutes, minute, mins, min",
    "hours": "hours, hour, hrs, hr",
    "days": "days, day",
    "weeks": "weeks, week",
    "months": "months, month",
    "years": "years, year, yrs, yr",
    "dollars": "dollars, dollar, us dollars, us dollar, usd",
    "euros": "euros, euro, eur",
    "yen": "yen",
    "rupees": "rupees, rupee",
    "cents": "cents, cent",
    "pounds": "pounds, pound, lbs, lb",
    "ounces": "ounces, ounce, oz",
    "tons": "tons, ton",
    "tonnes": "tonnes, tonne, metric tons, metric ton",
    "kg": "kg, kilograms, kilogram, kilos, kilo",
    "grams": "grams, gram",
    "mg": "mg, milligrams, milligram",
}
"""Unit -> its spellings. "5G", "4L", "8 Mile" and "98 Degrees" are names, so "g", "l", "mile" and
"degrees" are not included.
"""

_CURRENCIES = {"$": "dollars", "£": "pounds", "€": "euros", "¥": "yen", "": ""}
_UNITS = {text: unit for unit, texts in _SPELLINGS.items() for text in texts.split(", ")}
_FLOAT_NOISE = decimal.Decimal("1e-14")  # 0.1 + 0.2 prints as 0.30000000000000004
_PLAIN_WORDS = re.compile(r"(?:[a-z]{3,}(?: [a-z]{3,}){0,2} ?)?")  # matches in linear time
_NO_UNITS = frozenset(
    {"not", "nor", "and", "but", "plus", "minus", "times", "half", "maybe", "perhaps", "possibly"}
    | {"wrong", "incorrect", "false", "never", "none", "unknown", "nothing", "something", "else"}
    | {"hundred", "hundreds", "dozen", "two", "three", "four", "five", "six", "seven", "eight"}
    | {"nine", "ten", "eleven", "twelve", "fifteen", "twenty", "thirty", "forty", "fifty"}
    | {"halves", "thirds", "fifths", "sixths", "sevenths", "eighths", "ninths", "tenths"}
    | {"hundredths", "thousandths", "millionths", "squared", "cubed", "factorial", "below"}
)
"""Words after a number that change its meaning."""

_SCALES = {
    **{"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12},
    **{"quadrillion": 10**15, "lakh": 10**5, "crore": 10**7},
}


def normalize_answer(text: str) -> str:
    """Normalises a text so that texts that differ only in spelling details become equal.

    The result is in lower case, without accents, vowel points, punctuation, English articles and
    double spaces. Punctuation here means ASCII punctuation, and typographic quotes and dashes.
    """
    return _without_punctuation(_normalized(text))


def _normalized(text: str) -> str:
    if text.isascii():  # the most frequent case, in which only capital letters change
        return text.lower()
    if len(text) > _LONG_TEXT:
        text = _with_few_marks(text)
    text = _MARKS.sub("", unicodedata.normalize("NFKD", text.translate(_TYPED).lower()))
    return unicodedata.normalize("NFKC", text)


def _with_few_marks(text: str) -> str:
    """Keeps at most 30 combining marks per letter, the limit of Unicode's stream-safe format.

    Python sorts the combining marks of a letter in quadratic time, so a long sequence of marks
    would take minutes.
    """
    runs = itertools.groupby(text, lambda c: c == "\u034f" or unicodedata.combining(c) > 0)
    return "".join("".join(itertools.islice(run, 30) if marks else run) for marks, run in runs)


def _without_punctuation(folded: str) -> str:
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", folded.translate(_PUNCTUATION)).split())


def parse_number(text: str) -> tuple[decimal.Decimal, str] | None:
    """Parses a text that contains only a number and, optionally, its unit.

    The number may have thousands separators and a word such as "million" after it. The unit is a
    unit of measurement, or up to three words that name the counted things, such as "people".

    Returns:
        (value, unit), where the unit is "" if there is none; None if the text is not only a number
        and a unit, for example "5N" or "30 September 1966".
    """
    match = _NUMBER.fullmatch(text.strip().rstrip("."))
    if not match:
        return None
    unit = (match["unit"] or "").strip().rstrip(".").lower()
    glued = bool(unit) and not match.string[: match.start("unit")].endswith(" ")
    value = decimal.Decimal(match["digits"].replace(",", "") + (match["power"] or ""))
    first, _, rest = unit.partition(" ")
    if scale := _SCALES.get(first.removesuffix("s")):
        value, unit = value * scale, rest.strip()
    unit = unit or _CURRENCIES[match["currency"]]
    if unit in _UNITS:
        unit = _UNITS[unit]
    elif glued or not _PLAIN_WORDS.fullmatch(unit) or _NO_UNITS & set(unit.split()):
        return None
    return (-value if match["sign"] and match["sign"] != "+" else value), unit


def _without_marks(text: str) -> str:
    """Removes quotes, asterisks, parentheses, an article and a full stop around an answer."""
    text = text.strip()
    inner = _ARTICLE.sub("", text.lstrip("\"'\u201c\u2018*`("))
    end = len(inner.rstrip("\"'\u201d\u2019*`)."))
    return inner[:end].rstrip() or text


def _equal(answer: str, gold: str, units: frozenset[str]) -> bool:
    """Returns whether an answer equals an accepted answer.

    Args:
        answer: the answer of the policy.
        gold: the accepted answer.
        units: units of all accepted answers of the task. An answer that has a unit must have one of
            these units, unless ``units`` is empty.
    """
    number, answered = parse_number(gold), parse_number(_without_marks(answer))
    if number is None:
        return _same_text(answer, gold)
    if number[1] and number[1] not in _SPELLINGS:
        # Words that are not a known unit may be part of a name ("12 Angry Men"), so the number
        # alone is not the answer. A known unit may be left out: "30" fully answers "How many
        # minutes?", for which the accepted answer is "30 minutes".
        return _same_text(answer, gold) or answered == number
    if answered is None:
        long = number[0].adjusted() + 1 >= _LONG_NUMBER  # such as a phone number without hyphens
        return long and _same_text(answer, gold)
    if answered[1] and units and answered[1] not in units:
        return False
    return _same_value(answered[0], number[0])


def _same_text(answer: str, gold: str) -> bool:
    actual, right = _normalized(answer), _normalized(gold)
    normal = _without_punctuation(right)
    if not normal:  # normalisation removes every character, for example of "A", "The The" or "!!!"
        return _without_marks(answer).casefold() == _without_marks(gold).casefold()
    return normal == _without_punctuation(actual) and _numerals(actual) == _numerals(right)


def _numerals(folded: str) -> list[str]:
    """Returns the numbers in a text, with their punctuation in a uniform spelling.

    A sign (a hyphen that does not follow a letter or digit) and a decimal point are kept. Any other
    separator ("2-1", "1:30", "1/2") becomes "-", or disappears from a number of seven or more
    digits.

    Args:
        folded: a text in lower case without accents, see `_normalized`.
    """
    text = re.sub("-+", "-", folded.translate(_BESIDE_NUMBERS))
    text = _GROUPED.sub(lambda match: re.sub("[,']", "", match[0]), text)
    numerals = []
    for sign, digits in _NUMERAL.findall(text):
        parts = re.split(r"[^\w\s]+", digits)
        decimal_point = len(parts) == 2 and digits[len(parts[0]) : -len(parts[1])] == "."
        long = sum(map(len, parts)) >= _LONG_NUMBER
        between = "." if decimal_point else "" if long else "-"
        numerals.append(sign + between.join(parts))
    return numerals


def _same_value(a: decimal.Decimal, b: decimal.Decimal) -> bool:
    if a == a.to_integral_value() and b == b.to_integral_value():
        return a == b  # integers must be equal, because only fractions have rounding errors
    return abs(a - b) <= _FLOAT_NOISE * max(abs(a), abs(b))


def grade_answer(answer: str | None, gold: Iterable[str] | str) -> float:
    """Returns 1.0 if an answer is right, else 0.0.

    An answer "X|Y" has the parts X and Y. It is right if each part is an accepted answer, or if its
    parts are the members of one accepted answer of the form "A|B". For example, if "A" and "B" are
    accepted, "A" and "B|A" are right; if "A|B" is accepted, only "A|B" and "B|A" are right.

    Args:
        answer: answer of the policy. None, which means that the policy gave no answer, is wrong.
        gold: accepted answers. A string is a single accepted answer.
    """
    accepted = (gold,) if isinstance(gold, str) else tuple(gold)
    parts = [part for part in split_answers(answer or "") if part.strip()]
    if not parts:
        return 0.0
    plain = [text for text in accepted if "|" not in text]
    numbers = [parse_number(text) for text in plain]
    units = frozenset(number[1] for number in numbers if number and number[1])
    if all(any(_equal(part, text, units) for text in plain) for part in parts):
        return 1.0
    for text in accepted:
        required = [item for item in text.split("|") if item.strip()] if "|" in text else []
        complete = all(any(_equal(part, item, frozenset()) for part in parts) for item in required)
        extra = any(not any(_equal(part, item, frozenset()) for item in required) for part in parts)
        if required and complete and not extra:
            return 1.0
    return 0.0
