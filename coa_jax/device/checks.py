"""A check of the device report: its name, verdict and figures."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

Verdict = Literal["pass", "FAIL", "look", "skip"]
"""``FAIL`` means a wrong result.  ``look`` means a correct result with an unexpected speed or size,
whose reason somebody should find.  ``skip`` means that the check cannot run on this device."""


@dataclasses.dataclass(frozen=True)
class Check:
    """A finished check.

    Attributes:
        group: part of the report to which the check belongs.
        name: name of the check, unique in its group.
        verdict: see `Verdict`.
        text: one line with the measured values, their limits and the suspected fault.
        figures: the same values by name, for the JSON report.
    """

    group: str
    name: str
    verdict: Verdict
    text: str
    figures: Mapping[str, float | str] = dataclasses.field(default_factory=dict)


def within(
    group: str, name: str, measured: Mapping[str, float], limits: Mapping[str, float], why: str = ""
) -> Check:
    """Creates a check that passes if every measured value is at most its limit.

    Args:
        group: see `Check`.
        name: see `Check`.
        measured: errors by name, at least 0; NaN fails.
        limits: maximum of each error.
        why: suspected fault, which is shown if the check fails.
    """
    good = all(measured[key] <= limit for key, limit in limits.items())
    shown = [f"{key} {measured[key]:.1e} (limit {limit:.0e})" for key, limit in limits.items()]
    text = ", ".join(shown) + ("" if good or not why else f"; suspected: {why}")
    figures = {**measured, **{f"{key} limit": limit for key, limit in limits.items()}}
    return Check(group, name, "pass" if good else "FAIL", text, figures)


def guarded(
    group: str, name: str, checks: Callable[[], Iterable[Check]], show: Callable[[str], None]
) -> Iterator[Check]:
    """Yields the checks of a function; an exception becomes a failed check.

    Args:
        group: group of the failed check.
        name: name of the failed check.
        checks: function that yields checks.
        show: receives the traceback of an exception.
    """
    try:
        yield from checks()
    except Exception as error:
        show("".join(traceback.format_exception(error)))
        first = (str(error).strip() or repr(error)).splitlines()[0][:300]
        yield Check(group, name, "FAIL", f"stopped by {type(error).__name__}: {first}")
