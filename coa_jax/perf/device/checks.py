"""Defines the result of a check in the device report: its name, verdict and figures."""

from __future__ import annotations

import dataclasses
import os
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

Verdict = Literal["pass", "FAIL", "look", "skip"]
"""The verdict of a check.

- ``FAIL`` means that a result is wrong.
- ``look`` means that the result is correct, but has an unexpected speed or size, whose reason
  somebody should find.
- ``skip`` means that the check cannot run on this device.
"""


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of a check.

    Attributes:
        group: part of the report to which the check belongs.
        name: name of the check, unique in its group.
        verdict: the verdict, see `Verdict`.
        text: one line of text with the measured values, the limits and, after a failure, the
            suspected fault.
        figures: the measured values and limits by name, for the JSON report.
        traceback: traceback of the exception that stopped the check; "" if there was none.
    """

    group: str
    name: str
    verdict: Verdict
    text: str
    figures: Mapping[str, float | str] = dataclasses.field(default_factory=dict)
    traceback: str = ""


def within(
    group: str, name: str, measured: Mapping[str, float], limits: Mapping[str, float], why: str = ""
) -> Check:
    """Creates a check that passes if no measured error exceeds its limit.

    Args:
        group: part of the report to which the check belongs.
        name: name of the check, unique in its group.
        measured: nonnegative errors by name; a NaN fails the check.
        limits: maximum of each error by name.
        why: suspected fault, which is shown if the check fails; "" for none.
    """
    good = all(measured[key] <= limit for key, limit in limits.items())
    shown = [f"{key} {measured[key]:.1e} (limit {limit:.0e})" for key, limit in limits.items()]
    text = ", ".join(shown) + ("" if good or not why else f"; suspected: {why}")
    figures = {**measured, **{f"{key} limit": limit for key, limit in limits.items()}}
    return Check(group, name, "pass" if good else "FAIL", text, figures)


def guarded(group: str, name: str, checks: Callable[[], Iterable[Check]]) -> Iterator[Check]:
    """Yields the checks of a function and, if it raises an exception, a failed check.

    Args:
        group: group of the failed check.
        name: name of the failed check.
        checks: function that yields checks.
    """
    try:
        yield from checks()
    except Exception as error:
        first = (str(error).strip() or repr(error)).splitlines()[0][:300]
        text, trace = f"stopped by {type(error).__name__}: {first}", traceback.format_exc()
        yield Check(group, name, "FAIL", text, traceback=trace)


RUNNING = threading.Lock()
"""Held while the program of a kernel runs, so that a fault of the device belongs to one check."""


def executor() -> ThreadPoolExecutor:
    """Creates threads for checks that do not depend on each other.

    The threads save time, because XLA compiles their programs at the same time.
    """
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1))


def at_once(group: str, checks: Mapping[str, Callable[[], Iterable[Check]]]) -> Iterator[Check]:
    """Runs functions in threads; yields the checks that they make, in the order of the functions.

    If a function raises an exception, a failed check replaces its remaining checks.

    Args:
        group: group of such a failed check.
        checks: maps the name of a function's failed check to the function.
    """
    with executor() as threads:
        for results in threads.map(lambda item: list(guarded(group, *item)), checks.items()):
            yield from results
