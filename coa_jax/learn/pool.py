"""Selects the tasks that a run samples, by how often the policy has solved them.

An index of the stream always has the same task; a pool only decides which indices are skipped.  It
learns only from composed steps, so its state is a function of the steps of the run.  All processes,
a resumed run and a replay therefore have the same state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from coa_jax import files, reading
from coa_jax.bounds import Bounded, Natural, NotNegative, Place, Prose, Share, shown
from coa_jax.errors import UserError
from coa_jax.storage import local
from coa_jax.tasks import Task

Score = tuple[int, int]
"""(solved, graded): trajectories of a group that solved the task, and that were graded."""

_MOST_PASSED_OVER = 10_000
"""Maximum number of consecutive indices that are skipped."""


@dataclasses.dataclass(frozen=True)
class PoolConfig(Bounded):
    """Selection of the tasks to sample; by default all tasks in turn.

    The solve rate of a task is the share of its graded trajectories in this run that solved the
    task.  A task rests (is not sampled for some steps) while its solve rate is too low or too high.

    Attributes:
        rest_steps: number of steps for which a task rests; 0 if no task rests.
        rest_most: a task that must rest again right after a rest does so for twice as many steps
            as before, up to this maximum; 0 for ``rest_steps`` each time.
        rest_below: a task rests if its solve rate is at most this.
        rest_above: a task rests if its solve rate is at least this.
        memory: weight of a task's earlier groups relative to the next later group in its solve
            rate: with 1 all groups count equally, with 0 only the newest counts.
        solved_at: lowest reward of a trajectory that solved its task, before length penalties.
        curriculum: measure of difficulty, by which easier tasks are sampled first: a field of the
            metadata with numbers that grow with the difficulty, such as ``hops``, or ``solve_rate``
            (a lower solve rate is harder; a task without groups has its pass rate).  "" samples all
            tasks from the start.
        curriculum_steps: number of steps until the hardest tasks are sampled.
        curriculum_start: maximum difficulty of tasks at the start, from 0 (the easiest) to 1 (the
            hardest); the maximum grows linearly.
        pass_rates: ``results.json`` of an evaluation of the base model on the same tasks; "" reads
            the field ``pass_rate`` of the tasks' metadata.
        min_pass_rate: tasks with a lower pass rate are never sampled.
        max_pass_rate: tasks with a higher pass rate are never sampled.  The paper keeps tasks with
            a pass rate of at most 0.3 in 32 samples (eq 8 and 9).  Tasks without a pass rate are
            sampled only if the bounds are 0 and 1.
    """

    rest_steps: Natural = 0
    rest_most: Natural = 0
    rest_below: Share = 0.0
    rest_above: Share = 1.0
    memory: Share = 0.0
    solved_at: NotNegative = 1.0
    curriculum: Prose = ""
    curriculum_steps: Natural = 0
    curriculum_start: Share = 0.0
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
        if bool(self.curriculum) != bool(self.curriculum_steps):
            raise UserError(
                f"curriculum is {shown(self.curriculum)} and curriculum_steps is "
                f"{self.curriculum_steps}; give both or none"
            )

    def __bool__(self) -> bool:
        """Whether the pool may skip tasks."""
        return bool(self.rest_steps or self.curriculum)


class Known(NamedTuple):
    """A pool's knowledge of a task.

    Attributes:
        solved: number of trajectories that solved the task, weighted by `PoolConfig.memory`.
        graded: number of graded trajectories, with the same weights.
        until: step up to which the task rests.
        times: number of rests in a row, without a solve rate between the bounds in between.
    """

    solved: float = 0.0
    graded: float = 0.0
    until: int = 0
    times: int = 0


class Pool:
    """Tracks the solve rates of a run's tasks, and decides which tasks are sampled.

    Attributes:
        known: task id -> `Known`; consists of JSON values, from which a resumed run restores it.
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
            stream: the tasks by index, see `tasks.mixture.stream_of`.
            tasks: each task once.
            known: `known` of the pool when the run was interrupted; None for a new run.

        Raises:
            UserError: no task has the field of the curriculum.
        """
        self._config, self._stream, self._tasks = config, stream, tasks
        self.known = {id: Known(*entry) for id, entry in (known or {}).items()}
        self._hardness = _hardness(config.curriculum, tasks)
        self._all_rest: tuple[int, bool] = (-1, False)

    def copy(self) -> Pool:
        """Returns an independent copy of the pool."""
        return Pool(self._config, self._stream, self._tasks, self.known)

    def learn(self, step: int, scores: Mapping[int, Sequence[int]]) -> None:
        """Updates the solve rates with the groups of a step.

        Args:
            step: number of the step.
            scores: `Score` of each group by the index of its task.
        """
        config = self._config
        for index, (solved, graded) in scores.items():
            if not graded:
                continue
            id = self._stream[index].id
            before = self.known.get(id, Known())
            now = Known(
                config.memory * before.solved + solved, config.memory * before.graded + graded
            )
            if not config.rest_below < now.solved / now.graded < config.rest_above:
                times = before.times + 1
                length = config.rest_steps << min(times - 1, 30)  # bounds the size of the integer
                length = min(length, max(config.rest_most, config.rest_steps))
                now = now._replace(until=step + length, times=times)
            self.known[id] = now

    def next(self, first: int, step: int) -> int:
        """Returns the next index to sample: ``first`` or the first later index of an awake task.

        If all tasks rest, or too many in a row, the result is ``first`` itself.

        Args:
            first: index at which the search begins.
            step: number of steps composed so far.
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
        share = min(step / config.curriculum_steps, 1.0)
        bound = config.curriculum_start + (1.0 - config.curriculum_start) * share
        return self._difficulty(task, known) <= bound

    def _difficulty(self, task: Task, known: Known | None) -> float:
        if self._config.curriculum != "solve_rate":
            return self._hardness.get(task.id, 0.0)
        rate = task.metadata.get("pass_rate", 1.0)
        return 1.0 - float(known.solved / known.graded if known else rate)

    def figures(self, step: int) -> dict[str, float]:
        """Metrics after a step."""
        rates = [known.solved / known.graded for known in self.known.values()]
        return {
            "pool/asked": float(len(rates)),
            "pool/resting": float(sum(known.until > step for known in self.known.values())),
            "pool/awake": float(sum(self._awake(task, step) for task in self._tasks)),
            "pool/solve_rate": sum(rates) / max(len(rates), 1),
        }


def _hardness(field: str, tasks: Sequence[Task]) -> dict[str, float]:
    """Task id -> difficulty from 0 to 1 by a field of the metadata; 0 without the field."""
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
    """Returns the tasks whose pass rate is within the bounds, with the rate in their metadata.

    Args:
        config: settings of the pool.
        tasks: tasks of one source.
        name: name of the source, for messages.

    Raises:
        UserError: the file of pass rates cannot be read, or no task is left.
    """
    if config.pass_rates:
        rates = _read_rates(Path(local(config.pass_rates)))
        tasks = [
            dataclasses.replace(task, metadata={**task.metadata, "pass_rate": rates[task.id]})
            if task.id in rates
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
    """Reads pass rates from a result file: task id -> share of right samples among the graded."""
    try:
        found = {}
        for task in files.read_json_object(path)["tasks"]:
            values = [s["value"] for s in task["samples"] if s["value"] is not None]
            if values:
                found[str(task["id"])] = sum(value == 1.0 for value in values) / len(values)
        return found
    except reading.MALFORMED as error:
        raise UserError(
            f"pool.pass_rates={path}: not the results.json of an evaluation: "
            f"{reading.reason(error)}"
        ) from error
