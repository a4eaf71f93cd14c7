"""Reward functions with the signatures of TRL and verl.

- TRL: a function of ``completions`` and of columns of the task, which returns a list of numbers. It
  is called with one completion, the text that the policy wrote. A column is a list with one value:
  a field of the task's metadata, ``prompts`` (the question) or ``answer`` (an accepted answer).
- verl: a function of ``solution_str`` (the text that the policy wrote), ``ground_truth``,
  ``data_source`` and ``extra_info``, which returns a number.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from coa_jax.data.trajectory import Author, Trajectory
from coa_jax.errors import UserError
from coa_jax.tasks.base import Task
from coa_jax.tools.concurrency import guarded


def as_reward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a reward function with the signature of TRL or verl as one of this package.

    Other functions, and functions whose parameters are unknown, are returned as they are. The
    attribute ``_check_columns`` of a converted function is a function of a task, which raises a
    `UserError` if the task lacks a column that the reward needs.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return function
    trl = "completions" in parameters
    if not trl and "solution_str" not in parameters:
        return function
    every = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and parameter.default is parameter.empty
    ]

    def check(task: Task) -> None:
        there = (_columns if trl else _fields)(task, "")
        if absent := [name for name in needed if name not in there]:
            raise UserError(
                f"the reward {getattr(function, '__name__', function)} needs {', '.join(absent)}, "
                f"which task {task.id} lacks; it has {', '.join(there)}"
            )

    async def reward(task: Task, trajectory: Trajectory) -> Any:
        values = (_columns if trl else _fields)(task, written(trajectory))
        values = {name: value for name, value in values.items() if every or name in parameters}
        if inspect.iscoroutinefunction(function):
            result = await function(**values)
        else:
            result = await asyncio.to_thread(guarded(function), **values)
        single = trl and isinstance(result, list | tuple) and len(result) == 1
        return result[0] if single else result

    reward._check_columns = check  # type: ignore[attr-defined]
    return reward


def _columns(task: Task, text: str) -> dict[str, Any]:
    columns = {"prompts": task.question, "answer": next(iter(task.gold), None), **task.metadata}
    return {"completions": [text], **{name: [value] for name, value in columns.items()}}


def _fields(task: Task, text: str) -> dict[str, Any]:
    gold = task.gold[0] if len(task.gold) == 1 else list(task.gold)
    return {
        "solution_str": text,
        "ground_truth": gold,
        "data_source": task.source,
        "extra_info": task.metadata,
    }


def written(trajectory: Trajectory) -> str:
    """Returns the text that the policy wrote in a trajectory, without observations."""
    policy_texts = (span.text for span in trajectory.segments if span.author == Author.POLICY)
    return "".join(policy_texts)
