"""Selects the teacher runs that become training data, and counts the others.

The filters are those of the paper's progressive filtering (§3.2.1): complexity, quality, the share
of runs with reflection, and up-sampling of runs that corrected themselves. A filter is a name and a
predicate over one run, so filters compose and the runs that each one drops can be counted.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from coa_jax.distill.chance import uniform
from coa_jax.distill.messages import Kind, MessageLog
from coa_jax.tasks.base import Task
from coa_jax.trajectory import DistilledRecord, Reward


@dataclasses.dataclass(frozen=True)
class Run:
    """A teacher run with the data that filters need.

    Attributes:
        task: the task, including its gold answer.
        log: the messages.
        record: the trajectory converted from them.
        reward: reward of the task's grader, the same grader that grades policies. Its part
            ``format`` says whether the protocol is obeyed.
        correct: whether the answer is right; None if neither the grader nor a judge could decide.
        obeys: verdict of the judge of instructions: whether they were followed; None without a
            verdict.
    """

    task: Task
    log: MessageLog
    record: DistilledRecord
    reward: Reward
    correct: bool | None
    obeys: bool | None = True


@dataclasses.dataclass(frozen=True)
class Filter:
    """A named condition that a run must satisfy."""

    name: str
    keeps: Callable[[Run], bool]


@dataclasses.dataclass(frozen=True)
class SetFilter:
    """A named condition on several runs together; returns for each run whether it is dropped."""

    name: str
    drops: Callable[[Sequence[Run]], list[bool]]


@dataclasses.dataclass(frozen=True)
class FilterReport:
    """Statistics of the filters.

    Attributes:
        total: number of runs.
        kept: number of runs that passed every filter.
        dropped: filter name -> number of runs for which it was the first to fail, in filter order.
    """

    total: int
    kept: int
    dropped: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        return dataclasses.asdict(self)


def has_gold(task: Task) -> bool:
    """Returns whether a task has accepted answers, or a program that scores answers."""
    return bool(task.gold) or "scorer" in task.metadata


def grade_of(task: Task, reward: Reward) -> bool | None:
    """Returns whether an answer is right for the task's grader; None if the grader cannot decide.

    A task without an accepted answer gives None, unless its own program scores answers.
    """
    if not has_gold(task):
        return None
    grader = task.metadata.get("grader", "exact_match")
    if grader in ("exact_match", "judge") or "scorer" in task.metadata:
        score = reward.parts.get("judge", reward.parts.get("exact_match"))
    else:
        score = reward.parts.get(grader.rpartition(":")[2])
    return None if score is None else score == 1.0


def is_correct(run: Run) -> bool:
    """Returns whether the answer is known to be right."""
    return run.correct is True


def obeys_protocol(run: Run) -> bool:
    """Returns whether the trajectory obeys every rule of its protocol."""
    return run.reward.parts["format"] == 1.0


def has_no_fault(run: Run) -> bool:
    """Returns whether no tool call ended with a fault of the tool."""
    return all(message.outcome != "fault" for message in run.log.messages)


def repeats_no_call(run: Run) -> bool:
    """Returns whether no tool was called twice with the same arguments.

    Blanks are ignored, except in programs (where only blanks at the ends of the program and of its
    lines are ignored): corrected indentation makes another call.
    """
    calls = [(tool, _without_blanks(tool, arguments)) for tool, arguments in run.log.calls]
    return len(set(calls)) == len(calls)


def _without_blanks(tool: str, arguments: str) -> str:
    if tool == "code":
        return "\n".join(line.rstrip() for line in arguments.strip().splitlines())
    return " ".join(arguments.split())


def notices_mistakes(run: Run) -> bool:
    """Returns whether every deliberately wrong call was followed by a reflection.

    A wrong query may find the answer by luck; as a training example it would teach the mistake
    without the correction. Only scripted minds record that a call was deliberately wrong. For runs
    of a model or of another system this filter drops nothing.
    """
    messages = run.log.messages
    for message in messages:
        if message.slip and message.kind is Kind.CALL:
            later = messages[message.index + 1 :]
            next_move = next((m for m in later if m.sender == "manager"), None)
            if next_move is None or next_move.recipient != "reflection":
                return False
    return True


def quality_filters(
    max_chars: int, min_interactions: int = 0, *, keep_without_gold: bool = False
) -> tuple[Filter, ...]:
    """Returns the complexity and quality filters, in the order in which they are applied.

    Args:
        max_chars: maximum length of a kept trajectory in characters, including observations.
        min_interactions: minimum number of messages of any kind. The paper's complexity filter
            counts interactions of agents with tools, see ``SelectionConfig.min_tool_calls``.
        keep_without_gold: whether a run without an accepted answer is kept.
    """

    def graded(run: Run) -> bool:
        return run.obeys is not None and (run.correct is not None or not has_gold(run.task))

    return (
        Filter("unanswered", lambda run: run.log.answer is not None),
        Filter("tool_fault", has_no_fault),
        Filter("no_accepted_answer", lambda run: keep_without_gold or has_gold(run.task)),
        Filter("wrong_answer", lambda run: run.correct is not False),
        Filter("ungraded", graded),
        Filter("protocol", obeys_protocol),
        Filter("repeated_call", repeats_no_call),
        Filter("lucky_mistake", notices_mistakes),
        Filter("too_long", lambda run: len(run.record.text) <= max_chars),
        Filter("too_simple", lambda run: len(run.log.messages) >= min_interactions),
        Filter("instruction_judge", lambda run: run.obeys is not False),
    )


def plain_share(fraction: float, seed: int) -> Filter:
    """Returns a filter that keeps a share of the runs without reflection (§3.2.1, third stage)."""

    def keeps(run: Run) -> bool:
        if run.log.count(Kind.REFLECTION) or run.record.metadata["corrected"]:
            return True
        return uniform(seed, run.task.id, "plain_share") < fraction

    return Filter("plain_share", keeps)


def first_failure(run: Run, filters: Sequence[Filter]) -> str | None:
    """Returns the name of the first filter that the run does not pass, or None."""
    return next((f.name for f in filters if not f.keeps(run)), None)


def failures_of(
    runs: Sequence[Run], filters: Sequence[Filter], set_filters: Sequence[SetFilter] = ()
) -> list[str | None]:
    """Returns for each run the name of the first filter that it does not pass, or None.

    Args:
        runs: the runs; of similar ones the first is kept.
        filters: conditions on single runs.
        set_filters: conditions on the runs that pass those, applied one after another.
    """
    failures = [first_failure(run, filters) for run in runs]
    for each in set_filters:
        left = [number for number, failure in enumerate(failures) if failure is None]
        dropped = each.drops([runs[number] for number in left])
        for number, drop in zip(left, dropped, strict=True):
            failures[number] = each.name if drop else None
    return failures


def examples_of(
    runs: Sequence[Run], failures: Sequence[str | None], number: int = 3
) -> list[dict[str, Any]]:
    """Returns the first runs that each filter dropped, as JSON values for inspection.

    Args:
        runs: the runs.
        failures: result of `failures_of`.
        number: number of runs per filter.
    """
    seen: Counter[str] = Counter()
    examples = []
    for run, failure in zip(runs, failures, strict=True):
        if failure is not None and seen[failure] < number:
            seen[failure] += 1
            examples.append({"filter": failure, "record": run.record.to_json()})
    return examples


def report_of(
    failures: Sequence[str | None], filters: Sequence[Filter | SetFilter]
) -> FilterReport:
    """Counts the results of `first_failure` over many runs."""
    counts = Counter(failures)
    dropped = {f.name: counts[f.name] for f in filters}
    return FilterReport(len(failures), counts[None], dropped)


def copies(run: Run, corrected_copies: int) -> list[DistilledRecord]:
    """Returns a kept run as training records; runs that corrected themselves may be repeated.

    Copies after the first have ids ``<id>#2``, ``<id>#3``, ...
    """
    number = corrected_copies if run.record.metadata["corrected"] else 1
    ids = [run.record.id, *(f"{run.record.id}#{k}" for k in range(2, number + 1))]
    return [dataclasses.replace(run.record, id=name) for name in ids]
