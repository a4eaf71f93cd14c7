r"""Loads the tasks of a run from one source, or from a weighted mixture of several sources.

For example, these flags mix two sources, and training draws a question of the first source twice as
often as a calculation task of the second:

    --config.tasks= --config.mixture.facts.tasks=factbook:hops=1 --config.mixture.facts.weight=2 \
        --config.mixture.sums.tasks=arithmetic
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol

from coa_jax.config.fields import Between, Bounded, Name, Natural, OneOf, Place, check
from coa_jax.config.preflight import Needs
from coa_jax.errors import UserError
from coa_jax.run.settings import build_config
from coa_jax.tasks import load_tasks, source_needs
from coa_jax.tasks.base import SPLITS, Task


@dataclasses.dataclass(frozen=True)
class Part(Bounded):
    """The settings of one source in a mixture.

    Attributes:
        tasks: task source, see `tasks.load_tasks`.
        weight: how often training draws a task of this source, relative to the other sources.
        options: option name -> value for the source, see `tasks.load_tasks`.
        num_tasks: number of tasks to load; 0 loads as many as the run requests.
        split: split to read; "" reads the split that the run requests.
    """

    tasks: Place
    weight: Annotated[float, Between(0, 1e6, above=True)] = 1.0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    num_tasks: Natural = 0
    split: Annotated[str, OneOf("", *SPLITS)] = ""


class Sources(Protocol):
    """Settings that name the task source of a run, or several sources.

    Exactly one of ``tasks`` and ``mixture`` must be set.
    """

    @property
    def tasks(self) -> str:
        """The task source; "" if ``mixture`` names several sources."""

    @property
    def task_options(self) -> Mapping[str, Any]:
        """Options of the task source ``tasks``, by name."""

    @property
    def mixture(self) -> Mapping[str, Any]:
        """Settings (`Part`) of each task source, by name; empty if ``tasks`` names the source."""


def parts_of(sources: Sources) -> dict[str, Part]:
    """Returns the task sources of a run: name of a source -> its settings.

    If the run has a single source, its name is "".

    Raises:
        UserError: neither ``tasks`` nor ``mixture`` is set, both are set, or a setting is invalid.
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
    return {
        name: build_config(Part, part, f"mixture.{name}") for name, part in sources.mixture.items()
    }


def sources_need(sources: Sources) -> Needs:
    """Returns the packages, API keys and servers that the task sources of a run need."""
    parts = parts_of(sources) if sources.tasks or sources.mixture else {}
    return sum((source_needs(part.tasks, part.options) for part in parts.values()), Needs())


def load_parts(
    sources: Sources, split: str, n: int | None, seed: int, protocol: str = ""
) -> dict[str, list[Task]]:
    """Loads the tasks of each source of a run.

    In a mixture, ``Task.source`` of each task becomes the name of its source, and ``Task.id`` gets
    this name as a prefix. The metadata key ``source`` also contains the name, so that evaluations
    can group results by source.

    Args:
        sources: the settings of the sources.
        split: split to read from sources that set no ``split``.
        n: number of tasks to load from each source that sets no ``num_tasks``; None for all.
        seed: seed of the random choice and order of the tasks.
        protocol: default protocol, see `load_tasks`.

    Returns:
        Name of a source -> its tasks. If the run has a single source, its name is "".

    Raises:
        UserError: for the reasons that `parts_of` and `load_tasks` list.
    """
    parts = parts_of(sources).items()
    return {name: _load(name, part, split, n, seed, protocol) for name, part in parts}


def _load(
    name: str, part: Part, split: str, n: int | None, seed: int, protocol: str = ""
) -> list[Task]:
    number = part.num_tasks or n
    tasks = load_tasks(part.tasks, part.split or split, number, seed, protocol, part.options)
    if name:
        source = {"source": name}
        tasks = [
            dataclasses.replace(t, id=f"{name}/{t.id}", source=name, metadata=t.metadata | source)
            for t in tasks
        ]
    return tasks


def load_shares(sources: Sources, split: str, n: int, seed: int) -> list[Task]:
    """Loads about ``n`` tasks in total, divided among the sources in proportion to their weights.

    A source that sets ``num_tasks`` gives this number of tasks instead of its share. Shares are
    rounded, so the total may differ from ``n``. A source without ``num_tasks`` whose rounded share
    is 0 is not read.

    Args:
        sources: the settings of the sources.
        split: split to read from sources that set no ``split``.
        n: total number of tasks.
        seed: seed of the random choice and order of the tasks.

    Returns:
        The tasks of all sources, one source after the other.

    Raises:
        UserError: for the reasons that `parts_of` and `load_tasks` list.
    """
    parts = parts_of(sources)
    total = sum(part.weight for part in parts.values())
    return [
        task
        for name, part in parts.items()
        if (share := round(n * part.weight / total)) or (n and part.num_tasks)
        for task in _load(name, part, split, share, seed)
    ]


def stream_of(sources: Sources, tasks: Mapping[str, Sequence[Task]], seed: int) -> Sequence[Task]:
    """Returns the endless sequence of tasks that training uses, mixed by the sources' weights.

    The task at an index depends only on the arguments, see `alternate`.

    Args:
        sources: the settings of the sources.
        tasks: name of a source -> its tasks, as `load_parts` returns them.
        seed: seed of the random order of the tasks.
    """
    parts = parts_of(sources)
    weights = [part.weight for part in parts.values()]
    return alternate([tasks[name] for name in parts], weights, seed)


def alternate(parts: Sequence[Sequence[Any]], weights: Sequence[float], seed: int) -> Any:
    """Mixes several sequences into an endless sequence.

    The weight of a sequence says how often the next item is taken from this sequence. Each sequence
    is repeated, and shuffled anew for each repetition. The item at an index depends only on the
    arguments.

    Args:
        parts: the sequences. Each must contain at least one item.
        weights: relative frequency of each sequence. A single sequence needs no weight.
        seed: seed of the random orders.

    Returns:
        The sequence, a ``grain.MapDataset``.
    """
    import grain  # here, because commands that draw no tasks would load it for a second

    orders = [grain.MapDataset.source(part).seed(seed).shuffle().repeat() for part in parts]
    return orders[0] if len(orders) == 1 else grain.MapDataset.mix(orders, weights).seed(seed)
