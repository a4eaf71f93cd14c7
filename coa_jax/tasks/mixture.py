r"""The tasks of a run, from one source or from a weighted mixture of sources.

    --config.tasks= --config.mixture.facts.tasks=factbook:hops=1 --config.mixture.facts.weight=2 \
        --config.mixture.sums.tasks=arithmetic
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol

import grain

from coa_jax.bounds import Between, Bounded, Name, Natural, OneOf, Place, check
from coa_jax.errors import UserError
from coa_jax.settings import build
from coa_jax.tasks import load_tasks
from coa_jax.tasks.base import SPLITS, Task


@dataclasses.dataclass(frozen=True)
class Part(Bounded):
    """One source of a mixture.

    Attributes:
        tasks: task source, see `tasks.load_tasks`.
        weight: relative frequency of its tasks in training.
        options: options of the source, see `tasks.load_tasks`.
        num_tasks: number of tasks; 0 for the number of the run.
        split: split of the source; "" for the split of the run.
    """

    tasks: Place
    weight: Annotated[float, Between(0, 1e6, above=True)] = 1.0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    num_tasks: Natural = 0
    split: Annotated[str, OneOf("", *SPLITS)] = ""


class Sources(Protocol):
    """The settings of a run for the source of its tasks: one source, or several by name."""

    @property
    def tasks(self) -> str:
        """The source; "" if there are several."""

    @property
    def task_options(self) -> Mapping[str, Any]:
        """Options of the source."""

    @property
    def mixture(self) -> Mapping[str, Any]:
        """Name -> settings of a `Part`; empty if there is one source."""


def parts_of(sources: Sources) -> dict[str, Part]:
    """Returns the parts by name; a single source has the name "".

    Raises:
        UserError: there is no source, both a source and a mixture are set, or a setting is wrong.
    """
    if not sources.mixture:
        if not sources.tasks:
            raise UserError('tasks is ""; give a source, or several by mixture.NAME.tasks')
        return {"": Part(sources.tasks, options=sources.task_options)}
    for name in sources.mixture:
        check(name, Name, "mixture")
    if sources.tasks or sources.task_options:
        raise UserError(
            f"tasks is {sources.tasks!r} and mixture has {', '.join(sources.mixture)}; give tasks= "
            "to mix, and options as mixture.NAME.options"
        )
    return {name: build(Part, part, f"mixture.{name}") for name, part in sources.mixture.items()}


def load_parts(
    sources: Sources, split: str, n: int | None, seed: int, protocol: str = ""
) -> dict[str, list[Task]]:
    """Returns the tasks of each part, by its name.

    The name of its part becomes the source of a task (also in its metadata, by which results are
    broken down), and a prefix of its id.

    Args:
        sources: the settings.
        split, n, seed, protocol: see `load_tasks`; a part may set its own split and number.

    Raises:
        UserError: see `parts_of` and `load_tasks`.
    """
    found = {}
    for name, part in parts_of(sources).items():
        number = part.num_tasks or n
        tasks = load_tasks(part.tasks, part.split or split, number, seed, protocol, part.options)
        found[name] = [_of_part(task, name) if name else task for task in tasks]
    return found


def _of_part(task: Task, name: str) -> Task:
    metadata = {**task.metadata, "source": name}
    return dataclasses.replace(task, id=f"{name}/{task.id}", source=name, metadata=metadata)


def load_shares(sources: Sources, split: str, n: int, seed: int) -> list[Task]:
    """``n`` tasks in all, of each part as many as its weight is of all weights, rounded.

    A part that names its ``num_tasks`` gives that many.

    Args:
        sources: the settings.
        split, n, seed: see `load_parts`.

    Raises:
        UserError: see `load_parts`.
    """
    parts = parts_of(sources)
    total = sum(part.weight for part in parts.values())
    found = []
    for name, part in parts.items():
        number = part.num_tasks or round(n * part.weight / total)
        tasks = load_tasks(part.tasks, part.split or split, number, seed, "", part.options)
        found += [_of_part(task, name) if name else task for task in tasks]
    return found


def stream_of(sources: Sources, tasks: Mapping[str, Sequence[Task]], seed: int) -> Sequence[Task]:
    """Returns an endless stream of tasks in training order; see `alternate`.

    Args:
        sources: the settings.
        tasks: tasks of each part, see `load_parts`.
        seed: seed of the orders.
    """
    parts = parts_of(sources)
    weights = [part.weight for part in parts.values()]
    return alternate([tasks[name] for name in parts], weights, seed)


def alternate(parts: Sequence[Sequence[Any]], weights: Sequence[float], seed: int) -> Any:
    """Returns an endless stream that repeats the parts, in proportion to their weights.

    A part is shuffled anew in every pass. An index gives the same item in every run.

    Args:
        parts: the parts, none of them empty.
        weights: one weight per part; ignored if there is a single part.
        seed: seed of the orders.

    Returns:
        A ``grain.MapDataset``.
    """
    orders = [grain.MapDataset.source(part).seed(seed).shuffle().repeat() for part in parts]
    return orders[0] if len(orders) == 1 else grain.MapDataset.mix(orders, weights).seed(seed)
