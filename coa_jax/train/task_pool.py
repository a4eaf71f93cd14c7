"""Selects the tasks that a run samples, by how often the policy has solved each task.

The run's stream of tasks has a fixed task at each index; a pool only decides which indices are
skipped. A pool changes only when the groups of a step have been chosen, so its state is a function
of the steps of the run. All processes, a resumed run, and a replay therefore have the same state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from coa_jax.config.fields import Bounded, Natural, Place, Prose, Share, format_value
from coa_jax.data.intervals import rates
from coa_jax.errors import UserError
from coa_jax.files import durable, untrusted
from coa_jax.storage import local
from coa_jax.tasks import Task

Score = tuple[int, int]
"""(solved, graded): how many trajectories of a group solved the task, and how many were graded."""

_MOST_PASSED_OVER = 10_000
"""Maximum number of consecutive indices that are skipped."""


@dataclasses.dataclass(frozen=True)
class PoolConfig(Bounded):
    """Settings that select the tasks to sample; by default no task is skipped.

    The solve rate of a task is the share of the graded trajectories in its newest group that solved
    the task, which means that their reward is at least 1. A task rests, which means that it is not
    sampled for some steps, if its solve rate is too low or too high.

    Attributes:
        rest_steps: number of steps for which a task rests; 0 if no task ever rests.
        rest_below: a task rests if its solve rate is at most this share.
        rest_above: a task rests if its solve rate is at least this share.
        curriculum: source of the difficulty of a task; easier tasks are sampled first. The
            difficulty is a number from 0 (easiest) to 1 (hardest). With the name of a field in the
            tasks' metadata, such as ``hops``, the difficulty grows linearly from the field's
            smallest to its largest number. With ``solve_rate``, the difficulty is 1 minus the solve
            rate; while a task has no solve rate yet, its pass rate (see ``pass_rates``) takes the
            place of the solve rate. "" samples all tasks from the start.
        curriculum_steps: number of steps after which tasks of every difficulty are sampled. Until
            then, the maximum difficulty grows linearly, from 0.
        pass_rates: path of the ``results.json`` of an evaluation of the base model on the same
            tasks. The pass rate of a task is the share of its graded samples that were right. ""
            reads the pass rates from the field ``pass_rate`` of the tasks' metadata.
        min_pass_rate: minimum pass rate of a task; tasks with a lower pass rate are never sampled.
        max_pass_rate: maximum pass rate of a task; tasks with a higher pass rate are never sampled.
            The Chain-of-Agents paper keeps tasks with a pass rate of at most 0.3 in 32 samples (eq
            8 and 9). Tasks without a pass rate are sampled only if ``min_pass_rate`` is 0 and
            ``max_pass_rate`` is 1.
    """

    rest_steps: Natural = 0
    rest_below: Share = 0.0
    rest_above: Share = 1.0
    curriculum: Prose = ""
    curriculum_steps: Natural = 0
    pass_rates: Place = ""
    min_pass_rate: Share = 0.0
    max_pass_rate: Share = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rest_below >= self.rest_above:
            raise UserError(
                f"rest_below is {self.rest_below} and rest_above {self.rest_above}: every task "
                "would rest; give a lower rest_below"
            )
        if not self.rest_steps and (self.rest_below > 0 or self.rest_above < 1):
            raise UserError(
                "rest_below and rest_above have no effect while rest_steps is 0; give rest_steps"
            )
        if bool(self.curriculum) != bool(self.curriculum_steps):
            raise UserError(
                f"curriculum is {format_value(self.curriculum)} and curriculum_steps is "
                f"{self.curriculum_steps}; give both or none"
            )

    def __bool__(self) -> bool:
        """Whether the pool may skip tasks."""
        return bool(self.rest_steps or self.curriculum)


class TaskHistory(NamedTuple):
    """What a pool knows of a task: the newest results, and until when the task is not sampled.

    Attributes:
        solved: number of trajectories of the newest group that solved the task.
        graded: number of graded trajectories of the newest group.
        until: last step for which the task rests (is not sampled); 0 if the task has not rested
            yet.
    """

    solved: int = 0
    graded: int = 0
    until: int = 0


class TaskPool:
    """Tracks the solve rates of a run's tasks, and decides which tasks are sampled.

    Attributes:
        known: maps a task id to `TaskHistory`: three numbers, from which a resumed run restores the
        pool.
    """

    def __init__(
        self,
        config: PoolConfig,
        stream: Sequence[Task],
        tasks: Sequence[Task],
        known: Mapping[str, Sequence[Any]] | None = None,
    ):
        """Creates an empty pool, or restores the pool of a resumed run.

        Args:
            config: settings of the pool.
            stream: task at each index of the run's stream of tasks, see `tasks.mixture.stream_of`.
            tasks: all tasks, without repetitions.
            known: attribute ``known`` of the pool at the time of the interruption; None for a new
                run.

        Raises:
            UserError: no task has the metadata field that ``curriculum`` names.
        """
        self._config, self._stream, self._tasks = config, stream, tasks
        self.known = {id: TaskHistory(*entry[:3]) for id, entry in (known or {}).items()}
        self._hardness = _hardness(config.curriculum, tasks)
        self._all_rest: tuple[int, bool] = (-1, False)

    def copy(self) -> TaskPool:
        """Returns a copy of the pool that can change without changing this pool."""
        return TaskPool(self._config, self._stream, self._tasks, self.known)

    def learn(self, step: int, scores: Mapping[int, Sequence[int]]) -> None:
        """Updates the solve rates with the groups of a step.

        Args:
            step: number of the step.
            scores: maps the index of each group's task to the group's `Score`: the number of solved
                and the number of graded samples.
        """
        config = self._config
        for index, (solved, graded) in scores.items():
            if not graded:
                continue
            id = self._stream[index].id
            rests = not config.rest_below < solved / graded < config.rest_above
            self.known[id] = TaskHistory(solved, graded, step + config.rest_steps if rests else 0)

    def next(self, first: int, step: int) -> int:
        """Returns the index of the next task to sample, at or after the index ``first``.

        Tasks that rest, or that are still too hard for the curriculum, are skipped. If all tasks,
        or too many consecutive tasks, would have to be skipped, the result is ``first`` itself.

        Args:
            first: index at which the search begins.
            step: number of steps for which groups have been chosen so far.
        """
        if self._all_rest[0] != step:
            self._all_rest = step, not any(self._awake(task, step) for task in self._tasks)
        if self._all_rest[1]:
            return first
        most = min(_MOST_PASSED_OVER, 2 * len(self._tasks))
        indices = range(first, first + most)
        return next((i for i in indices if self._awake(self._stream[i], step)), first)

    def _awake(self, task: Task, step: int) -> bool:
        config, known = self._config, self.known.get(task.id)
        if known is not None and known.until > step:
            return False
        if not config.curriculum:
            return True
        return self._difficulty(task, known) <= min(step / config.curriculum_steps, 1.0)

    def _difficulty(self, task: Task, known: TaskHistory | None) -> float:
        if self._config.curriculum != "solve_rate":
            return self._hardness.get(task.id, 0.0)
        rate = task.metadata.get("pass_rate", 1.0)
        return 1.0 - float(known.solved / known.graded if known else rate)

    def figures(self, step: int) -> dict[str, float]:
        """Returns the pool's metrics after a step, such as the number of resting tasks."""
        rates = [known.solved / known.graded for known in self.known.values()]
        return {
            "pool/asked": float(len(rates)),
            "pool/resting": float(sum(known.until > step for known in self.known.values())),
            "pool/awake": float(sum(self._awake(task, step) for task in self._tasks)),
            "pool/solve_rate": sum(rates) / max(len(rates), 1),
        }


def _hardness(field: str, tasks: Sequence[Task]) -> dict[str, float]:
    """Maps a task id to a difficulty from 0 to 1, computed from a field of the metadata.

    Tasks without the field are absent from the result, and have the difficulty 0.
    """
    if field in ("", "solve_rate"):
        return {}
    values = {task.id: task.metadata[field] for task in tasks if _is_number(task, field)}
    if not values:
        raise UserError(f"pool.curriculum is {field}; no task has a number in this field")
    low, high = min(values.values()), max(values.values())
    return {id: (value - low) / ((high - low) or 1) for id, value in values.items()}


def _is_number(task: Task, field: str) -> bool:
    value = task.metadata.get(field)
    return isinstance(value, int | float) and not isinstance(value, bool)


def with_pass_rates(config: PoolConfig, tasks: Sequence[Task], name: str) -> list[Task]:
    """Selects the tasks whose pass rate is within the bounds, and adds pass rates to metadata.

    The pass rates of ``config.pass_rates`` are written to the field ``pass_rate`` of the tasks'
    metadata.

    Args:
        config: settings of the pool.
        tasks: tasks of one source.
        name: name of the source, used in messages.

    Raises:
        UserError: the file of pass rates cannot be read, or no task has a pass rate within the
            bounds.
    """
    if config.pass_rates:
        known = _read_rates(Path(local(config.pass_rates)))
        tasks = [
            dataclasses.replace(task, metadata={**task.metadata, "pass_rate": known[task.id]})
            if task.id in known
            else task
            for task in tasks
        ]
    if (config.min_pass_rate, config.max_pass_rate) == (0.0, 1.0):
        return list(tasks)
    rated = [task for task in tasks if _is_number(task, "pass_rate")]
    kept = [
        task
        for task in rated
        if config.min_pass_rate <= task.metadata["pass_rate"] <= config.max_pass_rate
    ]
    between = f"a pass rate from {config.min_pass_rate} to {config.max_pass_rate}"
    if not kept:
        raise UserError(
            f"pool: none of {len(tasks)} tasks of {name} has {between}; {len(rated)} have one"
        )
    print(f"{name}: {len(kept)} of {len(tasks)} tasks have {between}", flush=True)
    return kept


def _read_rates(path: Path) -> dict[str, float]:
    """Reads the pass rate of each task that has graded samples from a result file, by task id."""
    try:
        return {str(id): float(rate) for id, rate in rates(durable.read_json_object(path)).items()}
    except untrusted.MALFORMED as error:
        raise UserError(
            f"pool.pass_rates={path}: not the results.json of an evaluation: "
            f"{untrusted.reason(error)}"
        ) from error
