"""Loads the tasks that a teacher solves to make training data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from coa_jax.config.fields import Bounded, Natural, Place, Seed
from coa_jax.config.preflight import Needs
from coa_jax.protocol import Level
from coa_jax.tasks import Task, disjoint, load_splits
from coa_jax.tasks.base import with_level
from coa_jax.tasks.mixture import load_shares, sources_need


@dataclasses.dataclass(frozen=True)
class Tasks(Bounded):
    """The tasks that the teacher solves.

    Attributes:
        tasks: task source, see `tasks.load_tasks`; "" if ``mixture`` names the sources.
        train: number of tasks that are taken from the training split.
        validation: number of tasks that are taken from the validation split.
        seed: seed of the random choice of tasks.
        level: how strict the rules of the protocol are for all tasks, ``lenient`` or ``paper``; ""
            keeps the level of each task.
        task_options: options of the task source ``tasks``.
        mixture: maps names to task sources, see `tasks.mixture.Part`. The number of tasks from each
            source is in proportion to its weight.
    """

    tasks: Place
    train: Natural
    validation: Natural
    seed: Seed = 0
    level: Level = ""
    task_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    mixture: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def needs(self) -> Needs:
        """Returns what the sources of the tasks need, see `config.preflight`."""
        return sources_need(self)

    def load(self) -> dict[str, list[Task]]:
        """Loads the tasks; returns a list for each split, keyed by the name of the split."""
        sizes = {"train": self.train, "validation": self.validation}
        if not self.mixture and not self.task_options:
            splits = load_splits(self.tasks, sizes, self.seed)
        else:
            shares = {name: load_shares(self, name, n, self.seed) for name, n in sizes.items()}
            splits = disjoint(shares, self.tasks or ", ".join(self.mixture))
        return {name: with_level(tasks, self.level) for name, tasks in splits.items()}
