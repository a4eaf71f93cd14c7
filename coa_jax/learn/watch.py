"""Warnings about a run that goes wrong, each with its likely cause.

Rules read nothing but the rows of `metrics.jsonl`, one after the other: a resumed run goes on where
it was, and the report of a run finds the same warnings again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

QUIET = 5
"""Rows with its metric and without a fault after which a rule may warn again: noise around a bound
warns once."""
_FIRST = 5  # rows whose mean is what a policy began with, and as many for what it does now


class Watch:
    """The state of all rules for one phase of a run."""

    def __init__(self, rows: Iterable[Row] = ()):
        """Begins after the rows of an earlier part of the run."""
        self._first: dict[str, list[float]] = {}
        self._last: dict[str, deque[float]] = {}
        self._best: tuple[float, int] = (math.inf, 0)
        self._open: dict[str, int] = {}  # rows without a fault since a rule warned
        for row in rows:
            self.see(row)

    def see(self, row: Row) -> list[str]:
        """The warnings that this row is the first to deserve."""
        texts = []
        for rule, metric in RULES.items():
            if metric not in row:
                continue  # a metric of some steps only, which is no sign that all is well again
            text = rule(self, row)
            name = rule.__name__
            if text is None:
                if name in self._open:
                    self._open[name] += 1
                    if self._open[name] >= QUIET:
                        del self._open[name]
                continue
            if name not in self._open:
                texts.append(text)
            self._open[name] = 0
        return texts

    def start(self, row: Row, name: str) -> float | None:
        """Mean of a metric over its first rows; None until there are enough."""
        seen = self._first.setdefault(name, [])
        value = _value(row, name)
        if value is not None and len(seen) < _FIRST:
            seen.append(value)
            return None
        return sum(seen) / len(seen) if len(seen) == _FIRST else None

    def risen(self, row: Row, name: str) -> tuple[float, float] | None:
        """Means of a metric over its first and over its last rows, if it has risen; else None.

        It has if each of the last is above all of the first, which by chance, without a change, is
        so once in ``C(10, 5) = 252`` times (the extreme case of the rank-sum test).
        """
        first = self._first.setdefault(name, [])
        last = self._last.setdefault(name, deque(maxlen=_FIRST))
        (first if len(first) < _FIRST else last).append(_value(row, name) or 0.0)
        if len(last) < _FIRST or min(last) <= max(first):
            return None
        return sum(first) / _FIRST, sum(last) / _FIRST

    def last(self, row: Row, name: str) -> Sequence[float]:
        """The newest values of a metric, as many as are compared; that of the first row is none."""
        seen = self._last.get(name)
        if seen is None:  # the first row of a run waits until reading has begun
            self._last[name] = deque(maxlen=_FIRST)
            return ()
        seen.append(_value(row, name) or 0.0)
        return seen

    def lowest(self, value: float, step: int) -> tuple[float, int]:
        """The lowest validation loss so far and its step."""
        self._best = min(self._best, (value, step))
        return self._best


def warnings_of(rows: Sequence[Row]) -> list[tuple[str, int, str]]:
    """(phase, step, text) of every warning that the rows of a run deserve."""
    watches: dict[str, Watch] = {}
    found = []
    for row in rows:
        phase = str(row.get("phase", "run"))
        for text in watches.setdefault(phase, Watch()).see(row):
            found.append((phase, int(row.get("step", 0)), text))
    return found


def _value(row: Row, name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _above(row: Row, name: str, bound: float) -> float | None:
    value = _value(row, name)
    return value if value is not None and value > bound else None


def cut_off(watch: Watch, row: Row) -> str | None:
    share = _above(row, "len/cut_off_frac", 0.2)
    if share is None:
        return None
    reasons = {
        "length": "rollout.max_tokens",
        "turn_length": "rollout.max_turn_tokens",
        "turns": "rollout.max_tool_calls",
        "deadline": "rollout.max_seconds",
        "tool_time": "rollout.max_tool_seconds",
    }
    most = max(reasons, key=lambda reason: _value(row, f"stop/{reason}") or 0.0)
    return (
        f"{share:.0%} of the trajectories were cut off (above 20 %), most of them by "
        f"{reasons[most]}: raise it, or find out why the policy does not come to an end"
    )


def no_tools(watch: Watch, row: Row) -> str | None:
    if _value(row, "tool/calls") != 0.0 or "agent/turns" in row:  # a program has its own tools
        return None
    return (
        "no trajectory called a tool: the policy has not learnt to (more SFT, prompt_style=full), "
        "or the reward does not need it"
    )


def broken_tools(watch: Watch, row: Row) -> str | None:
    share = _above(row, "tool/fail_frac", 0.5)
    if share is None:
        return None
    return (
        f"{share:.0%} of the tool calls failed: look at their outcomes in traces.jsonl, and run "
        "`python -m coa_jax.tools.doctor`"
    )


def all_solved(watch: Watch, row: Row) -> str | None:
    share = _above(row, "group/frac_all_pass", 0.9)
    if share is None:
        return None
    return f"{share:.0%} of the groups are all right and teach nothing: give harder tasks"


def all_failed(watch: Watch, row: Row) -> str | None:
    share = _above(row, "group/frac_all_fail", 0.9)
    if share is None:
        return None
    return (
        f"{share:.0%} of the groups are all wrong and teach nothing: give easier tasks, more SFT "
        "or a larger group_size, and check the grader on a known answer"
    )


def masked(watch: Watch, row: Row) -> str | None:
    share = _above(row, "reward/masked_frac", 0.05)
    if share is None:
        return None
    most = max(_MASKED, key=lambda cause: _value(row, f"masked/{cause}") or 0.0)
    return (
        f"{share:.0%} of the trajectories are masked (above 5 %), most of them because "
        f"{_MASKED[most]}; they do not learn, and are not scored 0"
    )


_MASKED = {
    "ungraded": "a reward had no verdict: the judge or the sandbox is down or too slow",
    "tool_fault": "a part of ours failed in a tool: run `python -m coa_jax.tools.doctor`",
    "fault": "a part of ours failed: the log has the reason",
    "deadline": "rollout.max_seconds ran out: raise it, or give the machine less to do",
    "tool_time": "rollout.max_tool_seconds ran out: raise it, or find out which tool is slow",
}


def masked_more(watch: Watch, row: Row) -> str | None:
    """A policy may learn to provoke what spares it a bad reward."""
    found = None
    for name in sorted(name for name in row if name.startswith("masked/")):
        means = watch.risen(row, name)
        if means is not None and means[1] > 0.05 and found is None:
            found = (
                f"{means[1]:.0%} of the trajectories of the last {_FIRST} steps are masked because "
                f"of {name.removeprefix('masked/')}, {means[0]:.0%} of the first {_FIRST}: "
                "something fails more often, or the policy has learnt to provoke what spares it a "
                "bad reward; look at these trajectories in traces.jsonl"
            )
    return found


def entropy_collapse(watch: Watch, row: Row) -> str | None:
    start, now = watch.start(row, "policy/entropy"), _value(row, "policy/entropy")
    if start is None or now is None or now >= 0.2 * start:
        return None
    return (
        f"entropy fell from {start:.3g} to {now:.3g} nats: the policy stops exploring; lower the "
        "learning rate, raise clip_high or the temperature, or add an entropy bonus"
    )


def mismatch(watch: Watch, row: Row) -> str | None:
    name = "mismatch/abs_logp_mean"
    start, now = watch.start(row, name), _value(row, name)
    if start is None or now is None or now <= max(3 * start, 1e-3):
        return None
    return (
        f"sampler and trainer differ by {now:.2g} nats a token, {start:.2g} at first: engine.dtype "
        "or cache_dtype is too coarse for this policy, or rollouts are too old; use float32 in the "
        "engine, or a truncated importance correction"
    )


def overfitting(watch: Watch, row: Row) -> str | None:
    loss = _value(row, "validation/loss")
    if loss is None:
        return None
    best, step = watch.lowest(loss, int(row.get("step", 0)))
    if loss <= 1.1 * best:
        return None
    return (
        f"validation loss is {loss:.3g}, above its best {best:.3g} of step {step}: the policy "
        "learns its data by heart; stop there (keep_best=validation/loss keeps that checkpoint)"
    )


def starved(watch: Watch, row: Row) -> str | None:
    """Compares sums over some rows: a single slow read is no sign of a slow pipeline."""
    waits, steps = watch.last(row, "time/data"), watch.last(row, "time/step")
    waited, total = sum(waits), sum(steps)
    if len(waits) < _FIRST or waited <= 0.05 * total:
        return None
    return (
        f"the last {_FIRST} steps waited {waited / total:.0%} of their time for data (above 5 %): "
        "raise data_workers, or keep the data on a faster disk"
    )


def diverged(watch: Watch, row: Row) -> str | None:
    # JSON has no NaN; `RunDir.metrics` writes null.
    if _value(row, "loss") is not None:
        return None
    return "the loss is not a number: lower the learning rate, or look for a broken record"


Rule = Callable[[Watch, Row], str | None]
RULES: dict[Rule, str] = {
    cut_off: "len/cut_off_frac",
    no_tools: "tool/calls",
    broken_tools: "tool/fail_frac",
    all_solved: "group/frac_all_pass",
    all_failed: "group/frac_all_fail",
    masked: "reward/masked_frac",
    masked_more: "reward/masked_frac",
    entropy_collapse: "policy/entropy",
    mismatch: "mismatch/abs_logp_mean",
    overfitting: "validation/loss",
    starved: "time/data",
    diverged: "loss",
}
"""Each rule and the metric that it judges."""
