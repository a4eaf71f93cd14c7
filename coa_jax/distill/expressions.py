"""Parses arithmetic questions whose answer is the value of a single Python expression.

Only the wordings of the reasoning-gym generators in the task source ``arithmetic`` are understood.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Expression:
    """A Python expression that computes the answer to a question.

    Attributes:
        what: description of the calculation in words, which plans contain.
        source: the expression.
        setup: a line of Python that must precede the expression; "" if none is necessary.
    """

    what: str
    source: str
    setup: str = ""


_SUM = re.compile(
    r"(?:arithmetic problem:|multiplication:|final value\.|^Calculate|^Compute|^What is)\s+"
    r"([(\-\d][\d\s.+\-*/()]*[\d)])(?=\.?\s|\.?$|\?$)"
)
_DIVISOR_OR_MULTIPLE = re.compile(r"\((GCD|LCM)\) of these numbers: (\d+(?:, \d+)*)")
_BITS = re.compile(r"How many 1 bits are there in the binary representation of the number (\d+)\?")
_PRIMES = re.compile(r"how many prime numbers there are between (\d+) and (\d+) \(inclusive\)")
_EQUATION = re.compile(
    r"\b([a-z])\b[^:]*: ([-\d*+. a-z]*?\b\1\b[-\d*+. ]*?) = (-?\d+)$", re.MULTILINE
)


def _sum(match: re.Match[str]) -> Expression:
    source = " ".join(match[1].split())
    # Sums of decimal fractions have a rounding error in the last binary digits.
    exact = f"round({source}, 9)" if "." in source else source
    return Expression(source, exact)


def _divisor_or_multiple(match: re.Match[str]) -> Expression:
    return Expression(
        f"{match[1]} of {match[2]}", f"math.{match[1].lower()}({match[2]})", "import math"
    )


def _bits(match: re.Match[str]) -> Expression:
    return Expression(f"1 bits of {match[1]}", f'bin({match[1]}).count("1")')


def _primes(match: re.Match[str]) -> Expression:
    first, last = match[1], match[2]
    test = "prime = lambda n: n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))"
    source = f"sum(prime(n) for n in range({first}, {last} + 1))"
    return Expression(f"primes from {first} to {last}", source, test)


def _equation(match: re.Match[str]) -> Expression:
    name, side, value = match.groups()
    setup = f"f = lambda {name}: {side} - ({value})"
    # f is linear, so two of its values determine its root.
    return Expression(f"{name} with {side} = {value}", "f(0) // (f(0) - f(1))", setup)


_READERS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Expression]], ...] = (
    (_SUM, _sum),
    (_DIVISOR_OR_MULTIPLE, _divisor_or_multiple),
    (_BITS, _bits),
    (_PRIMES, _primes),
    (_EQUATION, _equation),
)


def read_expression(question: str) -> Expression | None:
    """Returns the expression that computes the answer to an arithmetic question.

    The result is None unless the question is worded like those of the reasoning-gym generators in
    the task source ``arithmetic``.
    """
    for pattern, build in _READERS:
        match = pattern.search(question.strip())
        if match:
            return build(match)
    return None
