"""Checks that a solver with tools can answer a draft, and that a solver without tools cannot."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coa_jax.distillation.agent_functions import AgentFunctions
from coa_jax.distillation.journal import open_journal
from coa_jax.distillation.messages import MessageLog
from coa_jax.distillation.pipeline import DistillConfig, run_teacher
from coa_jax.distillation.synthesis.closed_book import ClosedBook, ClosedBookConfig
from coa_jax.errors import UserError
from coa_jax.files import jsonl
from coa_jax.tasks.base import Task
from coa_jax.tasks.grading import grade_answer
from coa_jax.tasks.judge import Judge
from coa_jax.tools.base import Tool

Verdict = tuple[str | None, dict[str, Any]]
"""(reason why the task is dropped, or None to keep it; statistics of the check)."""


class WithTools:
    """Checks which tasks can be solved with live tools, by letting the team try.

    Tasks that the team does not solve, or solves without a tool call, are dropped. The team is that
    of `coa_jax.distillation.team`.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool],
        agents: AgentFunctions,
        team: DistillConfig,
        attempts: int,
        journal: Path,
        fingerprint: Mapping[str, Any],
        judge: Judge | None = None,
    ) -> None:
        """Opens the journal.

        Args:
            tools: maps the name of each tool to the tool.
            agents: an agent function for each agent of the team.
            team: settings of the team; the concurrency and the maximum length of a run are used.
            attempts: number of runs of a task, after which the task counts as unsolved.
            journal: file of finished runs, which are not repeated.
            fingerprint: settings on which runs depend, as JSON values.
            judge: decides about answers that do not literally equal an accepted answer; None for no
                judge.

        Raises:
            UserError: the journal was written with other settings.
        """
        self._tools, self._agents, self._team = tools, agents, team
        self._attempts, self._judge = attempts, judge
        self._journal = open_journal(journal, dict(fingerprint))
        self.resumed = len(self._journal.done)

    async def __call__(self, tasks: Sequence[Task]) -> list[Verdict]:
        """Returns for each task the reason to drop it, or None, and statistics (`Verdict`)."""
        verdicts: dict[str, Verdict] = {}
        for attempt in range(self._attempts):
            unsolved = [task for task in tasks if verdicts.get(task.id, ("",))[0] is not None]
            again = [dataclasses.replace(task, id=f"{task.id}#{attempt}") for task in unsolved]
            logs = await run_teacher(again, self._tools, self._team, self._agents, self._journal)
            for task, log in zip(unsolved, logs, strict=True):
                reason = await self._reason(task, log)
                calls = len(log.calls)
                verdicts[task.id] = reason, {"tool_calls": calls, "attempts": attempt + 1}
        return [verdicts[task.id] for task in tasks]

    async def _reason(self, task: Task, log: MessageLog) -> str | None:
        if any(message.outcome == "fault" for message in log.messages):
            return "tool_fault"
        if log.answer is None:
            return "not_solved_with_tools"
        if grade_answer(log.answer, task.gold) != 1.0:
            verdict: bool | None = False
            if self._judge is not None:
                verdict = await self._judge(task.question, task.gold, log.answer)
            if not verdict:
                return "ungraded" if verdict is None else "not_solved_with_tools"
        return None if log.calls else "solved_without_a_call"


class WithoutTools:
    """Finds the tasks that are often solved without tools; such tasks are dropped.

    The Chain-of-Agents paper drops them too (§3.3.1).
    """

    def __init__(
        self, config: ClosedBookConfig, name: str, solver: ClosedBook, record: Path
    ) -> None:
        """Opens the record of answers.

        Args:
            config: settings of the check; the number of samples and the maximum rate are used.
            name: label of the solver's answers in the record.
            solver: the solver without tools.
            record: file of answers, which are not requested again.

        Raises:
            UserError: the record is malformed.
        """
        self._config, self._solver, self._record = config, solver, record
        self._name = f"{name}/{config.samples}"
        jsonl.append_lines(record, [])  # creates the file, or removes a partial last line
        self._known = dict(jsonl.read_lines(record, self._row))

    def _row(self, row: Any) -> tuple[tuple[str, str], list[str]]:
        answers = row["answers"]
        if not isinstance(answers, list) or not all(isinstance(a, str | None) for a in answers):
            raise ValueError("'answers' must be a list of strings")
        if not all(isinstance(row[name], str) for name in ("solver", "id")):
            raise ValueError("'solver' and 'id' must be strings")
        return (row["solver"], row["id"]), answers

    async def __call__(self, tasks: Sequence[Task]) -> list[Verdict]:
        """Returns a verdict for each task; its ``closed_book`` is the share of right answers."""
        new = [task for task in tasks if (self._name, task.id) not in self._known]
        answered = await self._solver(new, self._config.samples) if new else []
        rows = [
            {"solver": self._name, "id": task.id, "answers": answers}
            for task, answers in zip(new, answered, strict=True)
        ]
        jsonl.append_lines(self._record, rows)
        self._known.update(map(self._row, rows))
        return [self._verdict(task) for task in tasks]

    def _verdict(self, task: Task) -> Verdict:
        answers = self._known[self._name, task.id]
        if len(answers) != self._config.samples:
            raise UserError(f"{self._record}: {task.id} has {len(answers)} answers; remove it")
        right = sum(grade_answer(answer, task.gold) == 1.0 for answer in answers)
        rate = right / len(answers)
        reason = "known_without_tools" if rate > self._config.max_rate else None
        return reason, {"closed_book": rate}
