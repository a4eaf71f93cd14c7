"""Warns about a run that goes wrong, and names the likely cause.

The rules read only the rows of `metrics.jsonl`, in order. A resumed run restores the state of the
rules from these rows, and the report of a run finds the same warnings again.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

QUIET = 5
"""Number of consecutive rows without a fault after which a rule may warn again.

Noise around a bound therefore causes a single warning.
"""
_FIRST = 5  # number of first rows, and of newest rows, that rules compare


class MetricHistory:
    """The state of all warning rules for one phase of a run, such as ``rl``.

    A rule looks at the rows of ``metrics.jsonl``, and warns of a likely mistake or failure.
    """

    def __init__(self, rows: Iterable[Row] = ()):
        """Creates the state after the given rows, which a run wrote before it was interrupted."""
        self._first: dict[str, list[float]] = {}
        self._last: dict[str, deque[float]] = {}
        self._best: tuple[float, int] = (math.inf, 0)
        self._open: dict[Rule, int] = {}  # rule that has warned -> rows without a fault since then
        for row in rows:
            self.see(row)

    def see(self, row: Row) -> list[str]:
        """Applies all rules to the next row of ``metrics.jsonl``, and returns the new warnings.

        A rule that has warned stays silent until `QUIET` consecutive rows show no fault.
        """
        texts = []
        for rule, metric in RULES.items():
            if metric not in row:
                continue  # only some steps have this metric
            text = rule(self, row)
            if text is not None:
                texts += [] if rule in self._open else [text]
                self._open[rule] = 0
            elif rule in self._open:
                self._open[rule] += 1
                if self._open[rule] >= QUIET:
                    del self._open[rule]
        return texts

    def start(self, row: Row, name: str) -> float | None:
        """Returns the mean of the first 5 values of a metric, for comparison with later values.

        Args:
            row: the next row of ``metrics.jsonl``.
            name: name of the metric.

        Returns:
            The mean; None while ``row`` has one of the first 5 values itself.
        """
        values = self._first.setdefault(name, [])
        value = _value(row, name)
        if value is not None and len(values) < _FIRST:
            values.append(value)
            return None
        return sum(values) / len(values) if len(values) == _FIRST else None

    def risen(self, row: Row, name: str) -> tuple[float, float] | None:
        """Returns the means of a metric's first 5 and newest 5 values, if the metric has risen.

        The metric has risen if each of its 5 newest values is above all of its 5 first values;
        otherwise the result is None. If the distribution of the metric does not change, chance
        alone makes the metric rise in one of ``C(10, 5) = 252`` cases (the extreme case of the
        rank-sum test).
        """
        first = self._first.setdefault(name, [])
        last = self._last.setdefault(name, deque(maxlen=_FIRST))
        (first if len(first) < _FIRST else last).append(_value(row, name) or 0.0)
        if len(last) < _FIRST or min(last) <= max(first):
            return None
        return sum(first) / _FIRST, sum(last) / _FIRST

    def last(self, row: Row, name: str) -> Sequence[float]:
        """Returns the newest 5 values of a metric, without the first row of the run.

        The first row is left out because the first step includes the start of the input pipeline.

        Args:
            row: the next row of ``metrics.jsonl``.
            name: name of the metric.
        """
        values = self._last.get(name)
        if values is None:  # the first step includes the start of the input pipeline
            self._last[name] = deque(maxlen=_FIRST)
            return ()
        values.append(_value(row, name) or 0.0)
        return values

    def lowest(self, value: float, step: int) -> tuple[float, int]:
        """Updates and returns the lowest validation loss so far, as a pair (loss, step).

        Args:
            value: newest validation loss.
            step: number of the step after which this loss was measured.
        """
        self._best = min(self._best, (value, step))
        return self._best


def warnings_of(rows: Sequence[Row]) -> list[tuple[str, int, str]]:
    """Returns every warning about the rows of a run, as a triple (phase, step, text)."""
    watches: dict[str, MetricHistory] = {}
    warnings = []
    for row in rows:
        phase = str(row.get("phase", "run"))
        for text in watches.setdefault(phase, MetricHistory()).see(row):
            warnings.append((phase, int(row.get("step", 0)), text))
    return warnings


def _value(row: Row, name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


@dataclasses.dataclass(frozen=True, eq=False)
class Limit:
    """A rule that warns if a share of the trajectories, or another metric, is above a bound.

    Attributes:
        metric: metric that holds the share.
        bound: largest share without a warning.
        text: text of the warning, in which {share} and {cause} are replaced.
        causes: maps the metric of each possible cause to the text that replaces {cause} if this
            metric is the largest.
    """

    metric: str
    bound: float
    text: str
    causes: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __call__(self, watch: MetricHistory, row: Row) -> str | None:
        """Returns a warning if the share is above the bound."""
        share = _value(row, self.metric)
        if share is None or share <= self.bound:
            return None
        most = max(self.causes, key=lambda name: _value(row, name) or 0.0, default="")
        return self.text.format(share=share, cause=self.causes.get(most))


_LIMITS = (
    Limit(
        "len/cut_off_frac",
        0.2,
        "{share:.0%} of the trajectories were cut off (above 20 %), most of them by {cause}: raise "
        "this setting, or find out why the policy does not finish",
        {
            "stop/length": "rollout.max_tokens",
            "stop/turn_length": "rollout.max_turn_tokens",
            "stop/turns": "rollout.max_tool_calls",
            "stop/deadline": "rollout.max_seconds",
            "stop/tool_time": "rollout.max_tool_seconds",
        },
    ),
    Limit(
        "tool/fail_frac",
        0.5,
        "{share:.0%} of the tool calls failed: read their outcomes in traces.jsonl. bad_call means "
        "that the policy's arguments cannot be read (more SFT may help); for others, run "
        "`coa-jax doctor --tools`",
    ),
    Limit(
        "group/frac_all_pass",
        0.9,
        "in {share:.0%} of the groups all samples are right, so these groups have no signal: give "
        "harder tasks",
    ),
    Limit(
        "group/frac_all_fail",
        0.9,
        "in {share:.0%} of the groups all samples are wrong, so these groups have no signal: give "
        "easier tasks, more SFT or a larger group_size, and check the grader on a known answer",
    ),
    Limit(
        "reward/masked_frac",
        0.05,
        "{share:.0%} of the trajectories are masked (above 5 %), most of them because {cause}; the "
        "policy does not learn from masked trajectories",
        {
            "masked/ungraded": "a grader gave no verdict (reward.reason in traces.jsonl says why; "
            "for example, a reward function raised an exception, or the judge is down)",
            "masked/tool_fault": "a tool had a system failure: run `coa-jax doctor --tools`",
            "masked/fault": "the system failed: the log has the reason",
            "masked/deadline": "rollout.max_seconds was reached: raise it, or reduce the load of "
            "the machine",
            "masked/tool_time": "rollout.max_tool_seconds was reached: raise it, or find out which "
            "tool is slow",
        },
    ),
)


def no_tools(watch: MetricHistory, row: Row) -> str | None:
    """Returns a warning if no trajectory of the step called a tool, and None otherwise."""
    if _value(row, "tool/calls") != 0.0 or "agent/turns" in row:  # a program has its own tools
        return None
    return (
        "no trajectory called a tool: the policy has not learnt to call tools (try more SFT, or "
        "prompt_style=full), or the tasks can be solved without tools"
    )


def masked_more(watch: MetricHistory, row: Row) -> str | None:
    """Returns a warning if more trajectories are masked than in the first steps, or None.

    A masked trajectory has no reward to train on, for example because a tool failed. The rule looks
    at each reason for masking separately. It warns if the share of masked trajectories has risen
    (see `MetricHistory.risen`) to more than 5 %. The rule exists because a policy may learn to
    cause failures that prevent a bad reward.
    """
    dip = None
    for name in sorted(name for name in row if name.startswith("masked/")):
        means = watch.risen(row, name)
        if means is not None and means[1] > 0.05 and dip is None:
            dip = (
                f"{means[1]:.0%} of the trajectories of the last {_FIRST} steps are masked because "
                f"of {name.removeprefix('masked/')}, {means[0]:.0%} of the first {_FIRST}: "
                "something fails more often, or the policy has learnt to cause failures that "
                "prevent a bad reward; read these trajectories in traces.jsonl"
            )
    return dip


def entropy_collapse(watch: MetricHistory, row: Row) -> str | None:
    """Returns a warning if the entropy fell below a fifth of its first values, or None."""
    start, now = watch.start(row, "policy/entropy"), _value(row, "policy/entropy")
    if start is None or now is None or now >= 0.2 * start:
        return None
    return (
        f"entropy fell from {start:.3g} to {now:.3g} nats: the policy stops exploring; lower the "
        "learning rate, raise clip_high or the temperature, or add an entropy bonus"
    )


def mismatch(watch: MetricHistory, row: Row) -> str | None:
    """Returns a warning if sampler and trainer disagree more than in the first steps, or None.

    The mismatch of a step is the mean absolute difference between the log-probabilities of sampler
    and trainer. The rule warns if the mismatch is above 0.001, and above three times the mean of
    its first 5 values.
    """
    name = "mismatch/abs_logp_mean"
    start, now = watch.start(row, name), _value(row, name)
    if start is None or now is None or now <= max(3 * start, 1e-3):
        return None
    return (
        f"sampler and trainer differ by {now:.2g} nats per token, and by {start:.2g} at the start: "
        "dtype, engine.dtype or engine.cache_dtype is too coarse for this policy, or rollouts are "
        "too old; set these to float32, or use truncated importance sampling (algorithm.tis_cap)"
    )


def overfitting(watch: MetricHistory, row: Row) -> str | None:
    """Returns a warning if the validation loss is over 10 % above its minimum, or None."""
    loss = _value(row, "validation/loss")
    if loss is None:
        return None
    best, step = watch.lowest(loss, int(row.get("step", 0)))
    if loss <= 1.1 * best:
        return None
    return (
        f"validation loss is {loss:.3g}, above its minimum {best:.3g} at step {step}: the policy "
        "overfits the data; use the checkpoint of that step (keep_best=validation/loss keeps it)"
    )


def starved(watch: MetricHistory, row: Row) -> str | None:
    """Returns a warning if the newest 5 steps waited for data over 5 % of their time, or None.

    The rule sums over 5 steps, because a single slow read does not show that the input pipeline is
    slow.
    """
    waits, steps = watch.last(row, "time/data"), watch.last(row, "time/step")
    waited, total = sum(waits), sum(steps)
    if len(waits) < _FIRST or waited <= 0.05 * total:
        return None
    return (
        f"the last {_FIRST} steps waited {waited / total:.0%} of their time for data (above 5 %): "
        "raise data_workers, or keep the data on a faster disk"
    )


def still(watch: MetricHistory, row: Row) -> str | None:
    """Returns a warning if training has hardly changed the policy after ten steps, or None.

    The rule warns if ``moved/argmax``, the share of tokens that are the most probable choice under
    only one of the initial and the current policy, is below 0.5 %.
    """
    changed, step = _value(row, "moved/argmax"), int(row.get("step", 0))
    if changed is None or changed >= 0.005 or step < 10:
        return None
    return (
        f"after {step} steps the most probable token has changed at only {changed:.2%} of the "
        "tokens: the policy hardly moves; raise optimizer.learning_rate (adapters take about ten "
        "times the rate of full training), or give more samples per step and more steps"
    )


def diverged(watch: MetricHistory, row: Row) -> str | None:
    """Returns a warning if the loss of the step is not finite, and None otherwise."""
    # JSON has no NaN, so `RunDir.metrics` writes null.
    if _value(row, "loss") is not None:
        return None
    return "the loss is not finite: lower the learning rate, or look for a broken record"


Rule = Callable[[MetricHistory, Row], str | None]
RULES: dict[Rule, str] = {
    **{limit: limit.metric for limit in _LIMITS},
    no_tools: "tool/calls",
    masked_more: "reward/masked_frac",
    entropy_collapse: "policy/entropy",
    mismatch: "mismatch/abs_logp_mean",
    overfitting: "validation/loss",
    starved: "time/data",
    still: "moved/argmax",
    diverged: "loss",
}
"""Maps each rule to the metric that a row must have for the rule to apply."""
