"""Distils a multi-agent system that is a Python function: its right runs become training data.

    def team(question: str) -> list[dict]:
        ...
        return messages  # as sent to and received from OpenAI's API

Each run is appended to ``runs.jsonl`` when it ends, so a killed distillation continues.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

from coa_jax.data.function_calls import PROTOCOL
from coa_jax.data.row_formats import convert_row
from coa_jax.data.text_parts import Unusable
from coa_jax.data.trajectory import DistilledRecord
from coa_jax.distillation.convert import as_trajectory
from coa_jax.distillation.filters import grade_of
from coa_jax.distillation.messages import Ending, Kind, Message, MessageLog
from coa_jax.distillation.readers.answers import marked_answer
from coa_jax.errors import UserError
from coa_jax.files import jsonl, untrusted
from coa_jax.run.progress import progress
from coa_jax.tasks.base import Task
from coa_jax.tasks.graders import grade
from coa_jax.tools.concurrency import guarded

Conversation: TypeAlias = Sequence[Mapping[str, Any]]
Team: TypeAlias = Callable[[str], Conversation | Awaitable[Conversation]]
"""A function that solves a question, and returns the messages of its run."""


async def solve_all(
    team: Team, tasks: Sequence[Task], path: Path, concurrency: int
) -> list[dict[str, Any]]:
    """Lets a team (a Python function) solve the tasks that the file of runs does not contain yet.

    Args:
        team: function that takes a question, and returns the messages of a run as OpenAI's API
            writes them. It may be asynchronous; if it is not, it runs in threads.
        tasks: all tasks, also those that were solved before.
        path: JSONL file of runs. A run has the fields ``id`` and ``question``, and either
            ``messages`` or ``error``. The next call repeats runs with an error.
        concurrency: number of tasks that are solved at the same time.

    Returns:
        The run of each task, in the order of the tasks.
    """
    jsonl.append_lines(path, [])  # creates the file, or cuts an incomplete last line
    runs = {(row["id"], row["question"]): row for row in jsonl.read_objects(path)}
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(concurrency))
    free, made = asyncio.Semaphore(concurrency), 0

    async def solve(task: Task) -> dict[str, Any]:
        run = runs.get((task.id, task.question), {})
        if "messages" in run:
            return run
        async with free:
            run = {"id": task.id, "question": task.question, **await _attempt(team, task)}
        jsonl.append_lines(path, [run])
        return run

    with progress("distil", total=len(tasks)) as bar:

        async def count(task: Task) -> dict[str, Any]:
            nonlocal made
            run = await solve(task)
            made += 1
            bar.reach(made)
            return run

        return await asyncio.gather(*map(count, tasks))


async def _attempt(team: Team, task: Task) -> dict[str, Any]:
    try:
        messages = await asyncio.to_thread(guarded(team), task.question)
        if inspect.isawaitable(messages):  # the team is asynchronous
            messages = await messages
    except Exception as error:  # one task that fails does not end the run
        return {"error": f"{type(error).__name__}: {error}"}
    if not isinstance(messages, Sequence) or not all(isinstance(m, Mapping) for m in messages):
        raise UserError(
            f"the team returned {type(messages).__name__} for {task.question[:60]!r}; return the "
            "messages of the run, a list of dicts as in OpenAI's API"
        )
    return {"messages": [dict(message) for message in messages]}


def select(
    tasks: Sequence[Task], runs: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> tuple[list[DistilledRecord], Counter[str]]:
    """Selects the runs whose answers are right, according to the graders of the tasks.

    The answer is the marked part of the last message (`marked_answer`), or the whole message if
    nothing is marked.

    Args:
        tasks: the tasks that the runs should solve.
        runs: the run of each task, from `solve_all`.
        tools: JSON schemas of the functions that the team calls; [] if the prompt need not describe
            them.

    Returns:
        A record for each right run, and the number of dropped runs by reason.
    """
    records, dropped = list[DistilledRecord](), Counter[str]()
    for task, run in zip(tasks, runs, strict=True):
        if "error" in run:
            dropped[f"the team failed: {run['error'][:100]}"] += 1
            continue
        row = {"id": task.id, "messages": run["messages"], "tools": list(tools)}
        try:
            row |= {"protocol": PROTOCOL, "gold": list(task.gold)}
            record = convert_row(row, task.id).record
        except Unusable as error:
            dropped[str(error)] += 1
            continue
        except untrusted.MALFORMED as error:
            raise UserError(f"messages of the task {task.id}: {untrusted.reason(error)}") from error
        marked = marked_answer(record.answer)
        answer = marked[1] if marked else record.answer
        if right := _is_right(task, answer):
            records.append(dataclasses.replace(record, answer=answer))
        else:
            dropped["not graded" if right is None else "wrong answer"] += 1
    return records, dropped


def _is_right(task: Task, answer: str) -> bool | None:
    """Grades an answer; returns None if the task has no accepted answer."""
    parts = (("policy", f"<answer>{answer}</answer>"),)
    record = DistilledRecord(task.id, task.question, task.protocol, task.gold, parts, answer)
    messages = (Message(0, "manager", "user", Kind.ANSWER, answer),)
    log = MessageLog(task.id, task.question, task.protocol, messages, Ending.ANSWER)
    return grade_of(task, grade(task, as_trajectory(record, log)))
