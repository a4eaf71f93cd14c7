"""Compares mathematical expressions with the package ``math-verify``.

The comparison runs in a separate process that can be killed, because some expressions, such as a
tower of powers, occupy a computer algebra system for an unlimited time.
"""

from __future__ import annotations

import functools
import importlib.util
import re

from coa_jax.config.installed import missing
from coa_jax.protocol import parse_boxed
from coa_jax.tasks.grading import parse_number
from coa_jax.tasks.maths_spelling import in_latex, tight
from coa_jax.tools.worker import WorkerBusyError, WorkerError, Workers, WorkerTimeoutError

_LONGEST = 2000
_DELIMITED = re.compile(
    r"\$\$(.+?)\$\$|(?<!\\)\$(.+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL
)
_GOES_ON = re.compile(r"[-+*/^=<>|\\0-9]")
_SEPARATORS = re.compile(r"(?:[\s,;.]|and|or)*")
_IN_BASE = re.compile(r"([0-9A-Za-z]+)_\{?([0-9]+)\}?")
_WORD = re.compile("[A-Za-z]{4,}")
_FUNCTIONS = re.compile(r"sqrt|sin|cos|tan|log|exp|alpha|beta|gamma|delta|theta|lambda|sigma|omega")

_POWER_OF_TEN = re.compile(
    r"\A([-+]?[0-9]+(?:\.[0-9]*)?) *(?:\\times|\\cdot|[*xX]) *10 *\^ *\{?([-+]?[0-9]{1,3})\}?"
)
_SMALL = 1e-3
_UNDER = re.compile(r"_\{[^{}]*\}")
_NAMED = re.compile(
    r"(?:\A|(?<=[,;]))\s*"
    r"(?:\\?[A-Za-z]+(?:_\w)?(?:\([A-Za-z, ]*\))?|\((?:[A-Za-z](?:_\w)?,? *){2,}\))\s*"
    r"(?:=|\\(?:in|approx)(?![a-z]))"
)
_JOINS = re.compile(
    r"[=≈∧→⇒⇔≡]|\N{LOGICAL OR}|(?<!\^)(?<!\^\{)\\(?:lor|vee|cup|cap|land|wedge|to|[Rr]ightarrow|in"
    r"|subset|mid|iff|equiv|sim|circ|setminus|mapsto|approx)(?![a-zA-Z])"
)


class MathsUnsureError(Exception):
    """Raised if a comparison failed for a reason other than the answer, so there is no verdict."""


def _expression(text: str) -> str:
    r"""Extracts the expression to compare from an answer.

    If there is a ``\boxed``, only its content is considered. A single formula between dollar signs
    in a sentence is the expression, without the dollar signs. If the formulas are parts of a larger
    formula or of a list, the whole formula or list is the expression.
    """
    boxed = parse_boxed(text)
    text = text if boxed is None else boxed
    if len(text) > _LONGEST:
        return text.strip()  # too long to compare or to search for formulas
    matches = list(_DELIMITED.finditer(text))
    formulas = ["".join(filter(None, match.groups())) for match in matches]
    if len(matches) == 1:
        before, after = text[: matches[0].start()].rstrip(), text[matches[0].end() :].lstrip()
        parted = not _GOES_ON.search(before[-1:]) and not _GOES_ON.search(after[:1])
        return (formulas[0] if parted else f"{before} {formulas[0]} {after}").strip()
    if matches and _SEPARATORS.fullmatch(_DELIMITED.sub("", text)):
        return ", ".join(formulas)
    return text.strip()


def is_expression(gold: str) -> bool:
    """Returns whether an accepted answer contains an expression that `same_expression` can use.

    The expression must have between 1 and 2000 characters.
    """
    expression = _expression(gold)
    return 0 < len(expression) <= _LONGEST


def _balanced(text: str) -> bool:
    r"""Returns whether the braces of a text are balanced.

    An unbalanced closing brace would end the ``\boxed`` that `verify` writes around the text.
    """
    depth = 0
    for brace in re.findall(r"\\.|[{}]", text):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        if depth < 0:
            return False
    return depth == 0


def verify(gold: str, answer: str) -> bool:
    """Returns whether math-verify considers two expressions equal.

    This function must run in a worker process, which can be killed, because it may never return.

    Args:
        gold: accepted expression in LaTeX.
        answer: expression of the answer in LaTeX.
    """
    import math_verify

    first, second = (
        math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (gold, answer)
    )
    return bool(math_verify.verify(first, second, timeout_seconds=None))


def _joins(expression: str) -> bool:
    r"""Returns whether an expression joins several ones, of which math-verify may compare only one.

    The name of a value is ignored, as in ``x = 5``, and so are indices, as in ``\sum_{k=1}^n``.
    """
    return bool(_JOINS.search(_NAMED.sub("", _UNDER.sub("", expression))))


def check_installed() -> None:
    """Checks that the package math-verify is installed.

    Raises:
        UserError: the package is not installed.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise missing("grading of maths", "math-verify", "maths")


@functools.cache
def _workers() -> Workers:
    check_installed()
    return Workers("coa_jax.tasks.maths:verify")


def _same_number(answer: str, gold: str) -> bool | None:
    """Returns whether two texts are the same number; None if math-verify must decide.

    One of the numbers may be followed by words for the counted things, as in "12 apples".
    """
    first, second = (parse_number(_POWER_OF_TEN.sub(r"\1e\2", text)) for text in (answer, gold))
    if first is None or second is None:
        return None
    if first[0] != second[0]:
        # math-verify rounds to six decimals, with which small numbers are equal.
        larger = max(abs(first[0]), abs(second[0]))
        return False if larger < _SMALL and abs(first[0] - second[0]) > larger / 10_000 else None
    unit = first[1] or second[1]
    named = (first[1] and second[1]) or unit == "%" or _FUNCTIONS.search(unit)
    return True if first[1] == second[1] or not named else None


def same_expression(answer: str | None, gold: str, timeout: float = 10.0) -> bool:
    r"""Returns whether an answer is mathematically equal to an accepted answer.

    Args:
        answer: answer of the policy, with or without ``\boxed`` and dollar signs. None, which means
            that the policy gave no answer, is wrong.
        gold: accepted answer, with or without ``\boxed`` and dollar signs.
        timeout: time limit of the comparison in seconds of processor time, after which the answer
            counts as wrong.

    Raises:
        UserError: math-verify is not installed.
        MathsUnsureError: there is no result within a wall time of six times ``timeout``, because
            the machine or all worker processes are busy.
    """
    if answer is None:
        return False
    expression, expected = _expression(answer), _expression(gold)
    if not expression or not expected or len(expression) > _LONGEST or not _balanced(expression):
        return False
    expression, expected = in_latex(expression), in_latex(expected)
    same = True if tight(expression) == tight(expected) else _same_number(expression, expected)
    if same is not None:
        return same
    bases = _IN_BASE.fullmatch(expression), _IN_BASE.fullmatch(expected)
    if bases[0] and bases[1]:  # math-verify ignores the base of digits
        return bases[0].groups() == bases[1].groups()
    if _WORD.fullmatch(expression) and _WORD.fullmatch(expected):  # words, not products of letters
        return expression.lower() == expected.lower()
    if _joins(expression) and not _joins(expected):
        return False
    try:
        return bool(_workers().ask(expected, expression, timeout=timeout, wait=6 * timeout))
    except WorkerTimeoutError:
        return False
    except WorkerBusyError as error:
        raise MathsUnsureError(str(error)) from error
    except WorkerError:
        return False  # an expression that makes the parser fail is not the right answer
