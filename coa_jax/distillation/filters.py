"""Selects the runs of the teacher that become training data, and counts the runs it drops.

The filters are those of the Chain-of-Agents paper (§3.2.1): complexity, quality, the share of runs
with reflection, and up-sampling of runs that corrected themselves. A filter is a name and a
predicate over one run. So filters can be combined, and the runs that each filter drops can be
counted.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coa_jax.data.trajectory import DistilledRecord, Reward
from coa_jax.distillation.messages import Kind, MessageLog
from coa_jax.distillation.random_numbers import uniform
from coa_jax.files.spool import Chosen
from coa_jax.tasks.base import Task


@dataclasses.dataclass(frozen=True)
class TeacherRun:
    """A run of the teacher, with the data that filters need.

    Attributes:
        task: the task with its accepted answers.
        log: the messages of the run.
        record: the trajectory that was converted from the messages.
        reward: reward of the task's grader, which also grades policies. ``parts["format"]`` is 1 if
            the tags of the trajectory obey the protocol.
        correct: whether the answer is right; None if neither the grader nor a judge could decide.
        obeys: whether the trajectory does what the prompt of its protocol asks, according to a
            judge (a language model). True if no judge was asked; None if the judge gave no verdict.
    """

    task: Task
    log: MessageLog
    record: DistilledRecord
    reward: Reward
    correct: bool | None
    obeys: bool | None = True


@dataclasses.dataclass(frozen=True)
class Filter:
    """A condition that a run of the teacher must satisfy to become training data.

    Attributes:
        name: name of the condition, under which statistics show the number of runs that fail it.
        keeps: function that returns whether a run satisfies the condition.
    """

    name: str
    keeps: Callable[[TeacherRun], bool]


@dataclasses.dataclass(frozen=True)
class SetFilter:
    """A filter that compares the runs of a data set with each other, for example for duplicates.

    Attributes:
        name: name of the filter in statistics.
        drops: function that returns, for each of the given runs, whether to drop the run.
    """

    name: str
    drops: Callable[[Sequence[TeacherRun]], list[bool]]


@dataclasses.dataclass(frozen=True)
class FilterReport:
    """Statistics of the filters.

    Attributes:
        total: number of runs.
        kept: number of runs that passed every filter.
        dropped: maps the name of each filter, in the order of application, to the number of runs
            that passed all earlier filters and failed this one.
        examples: maps the name of each filter that dropped runs to a line about the first of them.
    """

    total: int
    kept: int
    dropped: dict[str, int]
    examples: dict[str, str] = dataclasses.field(default_factory=dict)

    def lines(self) -> list[str]:
        """Returns a line of text for each filter that dropped runs.

        It has the number of these runs, the setting that changes the filter, and an example.
        """
        dropped = ((name, number) for name, number in self.dropped.items() if number)
        return [
            f"dropped {number} of {self.total} runs: {name}"
            + (f" (--config.teacher.{SETTINGS[name]})" if name in SETTINGS else "")
            + (f"; for example {self.examples[name]}" if name in self.examples else "")
            for name, number in dropped
        ]


SETTINGS = {
    "no_accepted_answer": "keep_without_gold",
    "ungraded": "judges.answer.chat.url",
    "too_long": "max_chars",
    "too_simple": "min_interactions",
    "instruction_judge": "judges.instruction.chat.url",
    "plain_share": "plain_fraction",
    "near_repeated_call": "selection.near_query",
    "instruction": "selection.max_answer_words",
    "few_calls": "selection.min_tool_calls",
    "too_many_tokens": "selection.max_tokens",
    "blocked_page": "selection.blocked",
    "contaminated": "selection.evaluation",
    "near_duplicate": "selection.near_duplicate",
}
"""Maps the names of filters to the settings in the group ``teacher`` that change them."""


def why_nothing(dropped: Mapping[str, int], split: str) -> str:
    """Returns an error message for a data set whose runs were all dropped by the filters.

    Args:
        dropped: maps the name of each filter to the number of runs that it dropped.
        split: name of the data set.
    """
    name = max(dropped, key=lambda name: dropped[name])
    setting = SETTINGS.get(name)
    advice = f"change --config.teacher.{setting}, or " if setting else ""
    return (
        f"{split}: the filters kept no run; {name} dropped the most, {dropped[name]} of"
        f" {sum(dropped.values())}; {advice}look at dropped/{split}.jsonl in the work directory"
    )


def has_gold(task: Task) -> bool:
    """Returns whether a task can be graded, by accepted answers or by a program."""
    return bool(task.gold) or "scorer" in task.metadata


def grade_of(task: Task, reward: Reward) -> bool | None:
    """Returns whether the grader of a task found an answer right; None if it could not decide.

    A grader cannot decide if the task has neither an accepted answer nor a program that scores
    answers, or if the reward contains no grade of the answer.

    Args:
        task: the task that the run should solve.
        reward: reward of the run, which the grader computed.
    """
    if not has_gold(task):
        return None
    grader = task.metadata.get("grader", "exact_match")
    if grader in ("exact_match", "judge") or "scorer" in task.metadata:
        score = reward.parts.get("judge", reward.parts.get("exact_match"))
    else:
        score = reward.parts.get(grader.rpartition(":")[2])
    return None if score is None else score == 1.0


def is_correct(run: TeacherRun) -> bool:
    """Returns whether the answer of a run is right; False if the run could not be graded."""
    return run.correct is True


def obeys_protocol(run: TeacherRun) -> bool:
    """Returns whether the trajectory of a run obeys every rule of its protocol."""
    return run.reward.parts["format"] == 1.0


def has_no_fault(run: TeacherRun) -> bool:
    """Returns whether all tools worked in a run: no call has the outcome ``fault``."""
    return all(message.outcome != "fault" for message in run.log.messages)


def repeats_no_call(run: TeacherRun) -> bool:
    """Returns whether a run never called a tool twice with the same arguments.

    Arguments that differ only in white space count as the same. In a program, only white space at
    the ends of lines, and before or after the whole program, is disregarded, because a program with
    corrected indentation is another call.
    """
    calls = [(tool, _without_blanks(tool, arguments)) for tool, arguments in run.log.calls]
    return len(set(calls)) == len(calls)


def _without_blanks(tool: str, arguments: str) -> str:
    if tool == "code":
        return "\n".join(line.rstrip() for line in arguments.strip().splitlines())
    return " ".join(arguments.split())


def notices_mistakes(run: TeacherRun) -> bool:
    """Returns whether a reflection followed every deliberately wrong call of a run.

    In a reflection, an agent of the team reviews the work so far. A wrong query may find the answer
    by luck. Then the run may contain no reflection, and would teach the policy the mistake without
    its correction. Only the team of scripted agents (programs) makes deliberate mistakes, so this
    filter drops no run of a model or of another system.
    """
    unnoticed = False
    for message in run.log.messages:
        if message.sender == "manager":
            if unnoticed and message.recipient != "reflection":
                return False
            unnoticed = False
        unnoticed |= message.kind is Kind.CALL and bool(message.slip)
    return not unnoticed


def quality_filters(
    max_chars: int, min_interactions: int = 0, *, keep_without_gold: bool = False
) -> tuple[Filter, ...]:
    """Returns the basic filters of single runs, in the order in which they are applied.

    They are the complexity and quality filters of the Chain-of-Agents paper (§3.2.1).

    Args:
        max_chars: maximum number of characters of a trajectory, including observations.
        min_interactions: minimum number of messages of any kind. (The paper counts tool calls
            instead, see ``SelectionConfig.min_tool_calls``.)
        keep_without_gold: whether to keep runs of tasks without an accepted answer.
    """

    def graded(run: TeacherRun) -> bool:
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
    """Returns a filter that keeps a random share of runs with neither reflection nor correction.

    It keeps all runs in which an agent reviewed the work (a reflection) or corrected the answer.
    This is the third stage of filtering in the Chain-of-Agents paper (§3.2.1).

    Args:
        fraction: share of the runs with neither reflection nor correction that is kept.
        seed: seed of the random choice.
    """

    def keeps(run: TeacherRun) -> bool:
        if run.log.count(Kind.REFLECTION) or run.record.metadata["corrected"]:
            return True
        return uniform(seed, run.task.id, "plain_share") < fraction

    return Filter("plain_share", keeps)


def first_failure(run: TeacherRun, filters: Sequence[Filter]) -> str | None:
    """Returns the name of the first of some filters that a run fails; None if it passes all."""
    return next((f.name for f in filters if not f.keeps(run)), None)


def failures_of(
    runs: Sequence[TeacherRun], filters: Sequence[Filter], set_filters: Sequence[SetFilter] = ()
) -> list[str | None]:
    """Returns for each run the name of the first filter that it fails; None if it passes all.

    Args:
        runs: the runs.
        filters: conditions on single runs.
        set_filters: filters that compare runs with each other, for example to keep only the first
            of several similar runs. They are applied one after another to the runs that pass
            ``filters``.
    """
    failures = [first_failure(run, filters) for run in runs]
    for each in set_filters:
        passing = [number for number, failure in enumerate(failures) if failure is None]
        dropped = each.drops(Chosen(runs, passing))
        for number, drop in zip(passing, dropped, strict=True):
            failures[number] = each.name if drop else None
    return failures


def dropped_examples(
    runs: Sequence[TeacherRun], failures: Sequence[str | None], number: int = 3
) -> list[dict[str, Any]]:
    """Returns the first runs that each filter dropped, as JSON objects for inspection.

    Args:
        runs: all runs of the teacher, before the filters.
        failures: result of `failures_of` for these runs.
        number: maximum number of runs for each filter.
    """
    counts: Counter[str] = Counter()
    examples = []
    for at, failure in enumerate(failures):
        if failure is not None and counts[failure] < number:
            counts[failure] += 1
            examples.append({"filter": failure, "record": runs[at].record.to_json()})
    return examples


def report_of(
    runs: Sequence[TeacherRun],
    failures: Sequence[str | None],
    filters: Sequence[Filter | SetFilter],
) -> FilterReport:
    """Counts how many runs each filter dropped, and describes the first of them.

    Args:
        runs: all runs of the teacher, before the filters.
        failures: result of `failures_of` for these runs.
        filters: the filters, in the order of application.
    """
    counts = Counter(failures)
    dropped = {f.name: counts[f.name] for f in filters}
    examples: dict[str, str] = {}
    for at, failure in enumerate(failures):
        if failure is not None and failure not in examples:
            examples[failure] = _in_one_line(runs[at])
    return FilterReport(len(failures), counts[None], dropped, examples)


def _in_one_line(run: TeacherRun) -> str:
    gold = f", accepted {run.task.gold[0][:60]!r}" if run.task.gold else ""
    about = f"{len(run.log.calls)} tool calls, {len(run.record.text)} characters"
    answer = (run.log.answer or "nothing")[:60]
    return f"{run.record.id}: {run.task.question[:60]!r} answered {answer!r}{gold}; {about}"


def copies(run: TeacherRun, corrected_copies: int) -> list[DistilledRecord]:
    """Returns the training records of a kept run: several copies if the run corrected its answer.

    The copies give self-corrections more weight in training. There are ``corrected_copies`` of
    them, with the ids ``<id>``, ``<id>#2``, ``<id>#3``, ... Any other run becomes one record.
    """
    number = corrected_copies if run.record.metadata["corrected"] else 1
    ids = [run.record.id, *(f"{run.record.id}#{k}" for k in range(2, number + 1))]
    return [dataclasses.replace(run.record, id=name) for name in ids]
