"""Parses arithmetic questions whose answer is the value of a single Python expression.

Only the wordings of the reasoning-gym generators in the task source ``arithmetic`` are understood.
"""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Expression:
    """A Python expression that computes the answer to a question.

    Attributes:
        what: description of the calculation in words, for plans.
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


def read_expression(question: str) -> Expression | None:
    """Returns the expression that computes the answer to an arithmetic question.

    The result is None if the question is not worded like those of the reasoning-gym generators in
    the task source ``arithmetic``.
    """
    question = question.strip()
    if match := _SUM.search(question):
        source = " ".join(match[1].split())
        # Sums of decimal fractions have a rounding error in the last binary digits.
        return Expression(source, f"round({source}, 9)" if "." in source else source)
    if match := _DIVISOR_OR_MULTIPLE.search(question):
        name, numbers = match.groups()
        return Expression(f"{name} of {numbers}", f"math.{name.lower()}({numbers})", "import math")
    if match := _BITS.search(question):
        return Expression(f"1 bits of {match[1]}", f'bin({match[1]}).count("1")')
    if match := _PRIMES.search(question):
        first, last = match.groups()
        test = "prime = lambda n: n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))"
        source = f"sum(prime(n) for n in range({first}, {last} + 1))"
        return Expression(f"primes from {first} to {last}", source, test)
    if match := _EQUATION.search(question):
        name, side, value = match.groups()
        setup = f"f = lambda {name}: {side} - ({value})"
        # f is linear, so two of its values determine its root.
        return Expression(f"{name} with {side} = {value}", "f(0) // (f(0) - f(1))", setup)
    return None
