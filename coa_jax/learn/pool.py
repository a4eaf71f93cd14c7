"""Which tasks a run asks, by how often the policy has solved them.

The stream of tasks stays what it is: an index has the same task always.  A pool says of an index
whether it is passed over.  It learns from composed steps only, so that its state is a function of
the steps of the run: several processes, a resumed run and a repeated one have the same.
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
"""Of a group: trajectories that solved the task, and trajectories that were graded."""

_MOST_PASSED_OVER = 10_000
"""Indices that are passed over for one that is asked."""


@dataclasses.dataclass(frozen=True)
class PoolConfig(Bounded):
    """Which tasks are asked; by default all in turn.

    The solve rate of a task is the share of its graded trajectories, over the run, that solved it.

    Attributes:
        rest_steps: steps for which a task rests whose solve rate is at or beyond a bound; 0 for
            none: no task rests.
        rest_most: a task that comes back and is beyond a bound again rests twice as long as before,
            up to so many steps; 0 for ``rest_steps`` each time.
        rest_below, rest_above: the bounds, both included.
        memory: by how much an earlier group of a task counts less than the one after it: 1 counts
            all alike, 0 the newest only.
        solved_at: reward from which a trajectory has solved its task; penalties for length do not
            count.
        curriculum: asks easy tasks first: a field of the metadata with numbers that grow with the
            difficulty, such as ``hops``; or ``solve_rate``, by which a task is the harder the lower
            its solve rate (before its first group, its pass rate) is; "" for all tasks at once.
        curriculum_steps: steps until the hardest tasks are asked.
        curriculum_start: difficulty up to which tasks are asked at first, from 0 (the easiest) to
            1 (the hardest); it grows evenly.
        pass_rates: ``results.json`` of an evaluation of the base model on these very tasks; "" to
            read the field ``pass_rate`` of their metadata.
        min_pass_rate, max_pass_rate: tasks whose pass rate is outside are never asked, nor are
            tasks without one unless these are 0 and 1.  The paper keeps those of at most 0.3 in 32
            samples (eq 8 and 9).
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
        """Whether a task may be passed over."""
        return bool(self.rest_steps or self.curriculum)


class Known(NamedTuple):
    """What a pool knows of a task.

    Attributes:
        solved, graded: trajectories, those of earlier groups by `PoolConfig.memory`.
        until: step up to which it rests.
        times: how often it has begun to rest without teaching anything between.
    """

    solved: float = 0.0
    graded: float = 0.0
    until: int = 0
    times: int = 0


class Pool:
    """The solve rates of a run.

    Attributes:
        known: task id -> `Known`; JSON values, to go on from.
    """

    def __init__(
        self,
        config: PoolConfig,
        stream: Sequence[Task],
        tasks: Sequence[Task],
        known: Mapping[str, Sequence[Any]] | None = None,
    ):
        """Begins with nothing known, or goes on.

        Args:
            config: settings.
            stream: the tasks by index, see `tasks.mixture.stream_of`.
            tasks: each task once.
            known: of an earlier part of the run.

        Raises:
            UserError: no task has the field of the curriculum.
        """
        self._config, self._stream, self._tasks = config, stream, tasks
        self.known = {id: Known(*entry) for id, entry in (known or {}).items()}
        self._hardness = _hardness(config.curriculum, tasks)
        self._all_rest: tuple[int, bool] = (-1, False)

    def copy(self) -> Pool:
        """Another pool that knows the same now."""
        return Pool(self._config, self._stream, self._tasks, self.known)

    def learn(self, step: int, scores: Mapping[int, Sequence[int]]) -> None:
        """Notes the groups of a step.

        Args:
            step: its number.
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
                length = config.rest_steps << min(times - 1, 30)  # of no thousand bits
                length = min(length, max(config.rest_most, config.rest_steps))
                now = now._replace(until=step + length, times=times)
            self.known[id] = now

    def next(self, first: int, step: int) -> int:
        """The first index from one on whose task is asked.

        If all tasks rest, or thousands in a row, it is the very first one.

        Args:
            first: the index to begin with.
            step: steps that are composed.
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
    """The tasks whose pass rate is within the bounds, with that rate in their metadata.

    Args:
        config: settings.
        tasks: of one source.
        name: of the source, for errors.

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
    """Task id -> share of its graded samples that are right, from a result file."""
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
