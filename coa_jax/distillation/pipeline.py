"""Lets the teacher solve tasks, many at the same time, and turns its runs into records.

A run depends on its task, the tools and the seed, but not on the order of tasks or on concurrency.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from coa_jax.config.extensions import Named
from coa_jax.config.fields import Bounded, Count, Natural, Seed, Share, Times
from coa_jax.data.intervals import wilson_interval
from coa_jax.data.trajectory import DistilledRecord
from coa_jax.distillation import filters
from coa_jax.distillation.agent_functions import TEACHERS, AgentFunctions, load_agents
from coa_jax.distillation.convert import as_trajectory, convert
from coa_jax.distillation.filters import Filter, FilterReport, TeacherRun
from coa_jax.distillation.gather import gather
from coa_jax.distillation.journal import TeacherJournal
from coa_jax.distillation.judges import JudgesConfig, judge_answers, judge_instructions
from coa_jax.distillation.messages import AGENTS, MessageLog
from coa_jax.distillation.selection import SelectionConfig, further_filters, set_filters
from coa_jax.distillation.team import solve
from coa_jax.errors import UserError
from coa_jax.files.spool import Chosen, held
from coa_jax.tasks.base import Task, tools_of
from coa_jax.tasks.graders import grade
from coa_jax.tools.base import Tool
from coa_jax.tools.concurrency import run_blocking


@dataclasses.dataclass(frozen=True)
class DistillConfig(Bounded):
    """Settings of the teacher and of the filters.

    Attributes:
        team: name, or path ``package.module:name``, of a function that makes a team without a
            language model, see `agent_functions.TEACHERS`.
        mistake_rate: probability that a decision of a scripted agent is a deliberate mistake.
        unrecovered_rate: probability that the scripted double check overlooks a wrong suggested
            answer. The filter ``wrong_answer`` drops the runs that end with this answer.
        seed: seed of the deliberate mistakes and of the random selection of runs.
        concurrency: number of tasks that the teacher solves at the same time.
        max_messages: number of messages after which a run is abandoned.
        max_chars: maximum number of characters of a kept trajectory.
        min_interactions: minimum number of messages, of any kind, of a kept run.
        keep_without_gold: whether to keep runs of tasks without an accepted answer, which cannot be
            graded. If False, the filter ``no_accepted_answer`` drops them.
        plain_fraction: share of the runs with neither reflection nor correction that is kept. All
            other runs are kept.
        corrected_copies: number of equal records that are written for a run that corrected its
            answer.
        selection: thresholds of further filters.
        judges: models that judge answers, and whether trajectories do what their prompts ask.
    """

    team: Annotated[str, Named(TEACHERS)] = "scripted"
    mistake_rate: Share = 0.1
    unrecovered_rate: Share = 0.02
    seed: Seed = 0
    concurrency: Times = 16
    max_messages: Count = 80
    max_chars: Count = 8000
    min_interactions: Natural = 5
    keep_without_gold: bool = False
    plain_fraction: Share = 1.0
    corrected_copies: Times = 1
    selection: SelectionConfig = dataclasses.field(default_factory=SelectionConfig)
    judges: JudgesConfig = dataclasses.field(default_factory=JudgesConfig)

    def agents(self) -> AgentFunctions:
        """Returns the agent function of each agent of ``team``, by name of the agent."""
        return load_agents(self.team, self.mistake_rate, self.unrecovered_rate, self.seed)

    def filters(self, count_tokens: Callable[[str], int] | None = None) -> tuple[Filter, ...]:
        """Returns the filters that judge one run at a time, with the thresholds of these settings.

        Args:
            count_tokens: function that counts the tokens of a text; needed if
                ``selection.max_tokens`` is set.
        """
        bounds = self.max_chars, self.min_interactions
        quality = filters.quality_filters(*bounds, keep_without_gold=self.keep_without_gold)
        further = further_filters(self.selection, count_tokens)
        return (*quality, *further, filters.plain_share(self.plain_fraction, self.seed))


async def run_teacher(
    tasks: Sequence[Task],
    tools: Mapping[str, Tool],
    config: DistillConfig,
    agents: AgentFunctions | None = None,
    journal: TeacherJournal | None = None,
    on_done: Callable[[int], None] | None = None,
) -> list[MessageLog]:
    """Lets the teacher solve tasks, many at the same time.

    Args:
        tasks: the tasks. The agents do not see the accepted answers of the tasks.
        tools: maps the name of each tool to the tool.
        config: settings of the teacher.
        agents: maps the name of each agent to its agent function, which decides the agent's next
            message; None for the agent functions of ``config.team``.
        journal: journal of finished runs, to which new runs are appended. A task whose run the
            journal contains is not solved again. None to store no runs.
        on_done: function to call whenever a new run ends, with the number of finished runs.

    Returns:
        The messages of each run, in the order of ``tasks``.

    Raises:
        UserError: tasks or agent functions are invalid, or an agent function cannot continue
            because its budget is spent. Then the journal contains all runs that had ended.
    """
    agents = config.agents() if agents is None else agents
    missing = [name for name in AGENTS if name not in agents]
    if missing:
        raise UserError(
            f"teacher: no agent function for {', '.join(missing)}; give one for each agent"
        )
    repeated = [name for name, times in Counter(task.id for task in tasks).items() if times > 1]
    if repeated:
        raise UserError(
            f"teacher: {len(repeated)} task ids occur more than once, e.g. {repeated[0]!r}; "
            "make ids unique"
        )
    done = {} if journal is None else journal.done
    logs = {
        task.id: done[task.id]
        for task in tasks
        if task.id in done
        and (done[task.id].question, done[task.id].protocol) == (task.question, task.protocol)
    }
    waiting: Iterator[Task] = iter([task for task in tasks if task.id not in logs])

    async def work() -> None:
        for task in waiting:
            request = task.question, task.protocol, task.id
            callable_tools = {**tools, **tools_of(task)}
            log = await solve(*request, agents, callable_tools, config.max_messages)
            logs[task.id] = log
            if journal is not None:
                journal.append(log)
            if on_done is not None:
                on_done(len(logs))

    await gather(work() for _ in range(min(config.concurrency, len(tasks))))
    return [logs[task.id] for task in tasks]


_KEPT = ("hops", "kind", "relation", "entities", "trace")
"""Metadata fields of a task that its records keep; ``trace`` holds data from other systems' logs.
"""


def as_run(task: Task, log: MessageLog, record: DistilledRecord | None = None) -> TeacherRun:
    """Makes a `TeacherRun`: converts the messages of a run to a trajectory, and grades it.

    Args:
        task: the task, which names the protocol. If it has neither an accepted answer nor a program
            that scores answers, the run has no grade (``correct`` is None).
        log: messages of the run.
        record: trajectory of the run; None to convert ``log``.
    """
    if record is None:
        metadata = {key: value for key, value in task.metadata.items() if key in _KEPT}
        metadata["source"] = task.source
        record = convert(log, task.protocol, task.gold, metadata)
    reward = grade(task, as_trajectory(record, log))
    return TeacherRun(task, log, record, reward, filters.grade_of(task, reward))


def graded_runs(
    tasks: Sequence[Task],
    logs: Sequence[MessageLog],
    judges: JudgesConfig,
    records: Sequence[DistilledRecord] = (),
    folder: Path | None = None,
) -> Sequence[TeacherRun]:
    """Converts runs to trajectories, and grades their answers.

    A configured judge checks answers that the graders find wrong or cannot grade (`JudgesConfig`).
    Each run should be graded only once, because a judge without a cache is asked again, which costs
    money and may give another verdict.

    Args:
        tasks: task of each run.
        logs: messages of each run.
        judges: settings of the judges.
        records: trajectory of each run; empty if the function should convert the logs.
        folder: folder of a temporary file that holds the runs; None to hold them in memory. A judge
            needs them in memory.

    Raises:
        UserError: the API key or the cache of the judge cannot be used.
    """
    records_or_none: Sequence[DistilledRecord | None] = records or [None] * len(logs)
    given = zip(tasks, logs, records_or_none, strict=True)
    runs = held((as_run(*run) for run in given), folder)
    return run_blocking(judge_answers(runs, judges.answer)) if judges.answer else runs


def select(
    runs: Sequence[TeacherRun],
    config: DistillConfig,
    count_tokens: Callable[[str], int] | None = None,
    on_example: Callable[[dict[str, Any]], None] | None = None,
    folder: Path | None = None,
) -> tuple[Sequence[DistilledRecord], FilterReport]:
    """Selects the graded runs that become training data.

    The result depends only on the runs, on the settings, and on the verdicts of the judge
    ``config.judges.instruction``.

    Args:
        runs: runs from `graded_runs`.
        config: settings of the filters.
        count_tokens: function that counts the tokens of a text; needed if
            ``config.selection.max_tokens`` is set.
        on_example: function to call with each example of a dropped run, see
            `filters.dropped_examples`.
        folder: folder of a temporary file that holds the records; None to hold them in memory.

    Returns:
        The kept records in the order of ``runs``, and statistics of the filters.
    """
    single, together = config.filters(count_tokens), set_filters(config.selection, config.seed)
    if config.judges.instruction:
        runs = run_blocking(judge_instructions(runs, single, config.judges.instruction))
    failures = filters.failures_of(runs, single, together)
    if on_example is not None:
        for example in filters.dropped_examples(runs, failures):
            on_example(example)
    kept = Chosen(runs, [number for number, failure in enumerate(failures) if failure is None])
    records = (record for run in kept for record in filters.copies(run, config.corrected_copies))
    return held(records, folder), filters.report_of(runs, failures, (*single, *together))


def teacher_block(
    runs: Sequence[TeacherRun], count_tokens: Callable[[str], int] | None = None
) -> dict[str, Any]:
    """Returns the block "teacher" of ``summary.json``: statistics of unfiltered runs.

    Runs in which a tool had a fault and runs without a grade count neither as right nor as wrong.
    They are left out of the rates, and counted separately.

    Args:
        runs: runs from `graded_runs`.
        count_tokens: function that counts the tokens of a text. It is used for ``tokens_per_task``,
            the mean number of tokens that the agents of a run write to each other and to tools. If
            ``count_tokens`` is None, ``tokens_per_task`` is None.
    """
    graded = [run for run in runs if filters.has_no_fault(run) and run.correct is not None]
    n, right = len(graded), sum(map(filters.is_correct, graded))
    spoken = (
        f"{message.thought} {message.content}".strip()
        for run in graded
        for message in run.log.messages
        if message.sender in AGENTS
    )
    tokens = None if count_tokens is None else sum(map(count_tokens, spoken))
    return {
        "pass_at_1": right / n if n else None,
        "ci95": list(wilson_interval(right, n)),
        "n": n,
        "tokens_per_task": tokens / n if n and tokens is not None else None,
        "tool_calls_per_task": sum(len(run.log.calls) for run in graded) / n if n else None,
        "format_valid": sum(map(filters.obeys_protocol, graded)) / n if n else None,
        "faults": len(runs) - n,
    }
