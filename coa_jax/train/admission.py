"""Decides which tasks are sampled next, and which groups of samples form the next training step.

A group is the set of samples of one task. A `Ledger` receives the groups that have finished, and
returns the tasks to sample and the groups to train on. A ledger uses no clock, thread or model, so
processes that report the same events to their ledgers in the same order reach the same decisions.

Step s updates policy version s - 1 to version s. The age (staleness) of a group at step s is s - 1
minus the oldest policy version that sampled one of the group's tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from coa_jax.train.task_pool import Score, TaskPool

ATTEMPTS = 3
"""Number of dropped (too old) groups of a task after which the task is given up."""
_MEMORY = 0.5  # decay of earlier steps in the moving estimate of `Ledger.share`
_LOWEST_SHARE = 0.05


@dataclasses.dataclass(frozen=True)
class AdmissionRules:
    """The rules by which a run composes its steps, which `RLConfig.rules` derives from the config.

    Attributes:
        groups: number of groups that a step trains on.
        most: maximum number of groups that a step examines. The step looks at one finished group
            after another until it has found ``groups`` groups with a signal (rewards that differ),
            or has looked at ``most`` groups. In the second case, it trains on those that it has
            found. With ``learn_from=all``, every group counts as a group with a signal.
        max_staleness: maximum age of a group that a step trains on. The age is the number of steps
            between the oldest policy version that sampled the group and the version that the step
            updates.
        in_order: whether steps take groups in task order; False takes groups in the order in which
            they finish.
        in_flight: number of groups that are sampled at the same time; 0 derives the number from the
            share of groups with a signal, see `Ledger.admit`.
        steps: number of steps of the run.
    """

    groups: int
    most: int
    max_staleness: int
    in_order: bool
    in_flight: int
    steps: int


@dataclasses.dataclass(frozen=True)
class Composition:
    """The groups of samples that a step uses.

    A group is named by the index of its task in the run's endless stream of tasks. If a task occurs
    again, it has another index.

    Attributes:
        step: number of the step, from 1.
        used: the groups to train on.
        examined: all groups that the step examined, in the order of examination: the groups in
            ``used``, and groups without a signal, whose rewards are all equal.
        dropped: groups that were dropped since the previous step because they were too old.
        discarded: number of groups that were requested, but unfinished or unused when the step was
            composed. Their tasks are sampled again with the next policy version. If
            ``max_staleness`` is above 0, the number is 0, because later steps can use the groups.
        given_up: number of tasks that are not sampled again, because their groups were dropped
            `ATTEMPTS` times.
        state: state of the ledger after this step, for `Ledger.restore`.
        scores: for each group in ``examined``, the number of solved samples and the number of
            graded samples, see `task_pool.Score`.
    """

    step: int
    used: tuple[int, ...]
    examined: tuple[int, ...]
    dropped: tuple[int, ...]
    discarded: int
    given_up: int
    state: dict[str, Any]
    scores: tuple[Score, ...] = ()

    @property
    def unused(self) -> tuple[int, ...]:
        """Indices of the groups that this step looked at, but does not train on."""
        used = set(self.used)
        return tuple(index for index in self.examined if index not in used)


class _Ended(NamedTuple):
    """A group whose samples have all finished; `Ledger.end` describes the fields."""

    signal: bool
    oldest: int
    score: Score


class Ledger:
    """Decides which tasks are sampled next, and which finished groups form the next step.

    A ledger tracks each group of samples from the request for the samples to the step that trains
    on the group. `admit` names the tasks to sample, `end` reports a finished group, and `next_step`
    composes a step.

    Attributes:
        step: number of steps composed so far.
        version: newest policy version that the samplers of all processes have received.
    """

    def __init__(self, rules: AdmissionRules, pool: TaskPool | None = None):
        """Creates the ledger of a new run.

        Args:
            rules: the rules by which the run composes its steps.
            pool: decides which tasks are skipped, and is updated with the scores of every step.
                None samples the tasks one after the other and skips none.
        """
        self.rules, self._pool = rules, pool
        self.step = self.version = 0
        self._next = 0  # index of the next new task
        self._open: dict[int, int] = {}  # task index -> failed attempts; not in a step yet
        self._again: list[int] = []  # open tasks that must be requested again
        self._ended: dict[int, _Ended] = {}  # open tasks whose groups have finished
        self._dropped: list[int] = []
        self._given_up = 0
        # Decayed counts over earlier steps: groups with a signal, and all examined groups.
        self._signals = self._examined = 0.0

    @classmethod
    def restore(
        cls, rules: AdmissionRules, state: Mapping[str, Any], pool: TaskPool | None = None
    ) -> Ledger:
        """Creates the ledger of a resumed run from the state that was saved with a step.

        Tasks whose samples were still unfinished or unused after that step are requested again.

        Args:
            rules: the rules by which the run composes its steps.
            state: `Composition.state` of that step; {} for a new run.
            pool: the run's task pool (`task_pool.TaskPool`), which decides which tasks are skipped,
                in its state after that step; None without a pool.
        """
        ledger = cls(rules, pool)
        if state:
            ledger.step = ledger.version = int(state["step"])
            ledger._next = int(state["next"])
            ledger._open = {int(index): int(attempts) for index, attempts in state["open"]}
            ledger._again = list(ledger._open)
            ledger._signals, ledger._examined = map(float, state["share"])
        return ledger

    @property
    def complete(self) -> bool:
        """Whether the groups of all steps of the run have been chosen."""
        return self.step >= self.rules.steps

    @property
    def oldest_useful(self) -> int:
        """The oldest policy version whose samples the next step may train on."""
        return self.step - self.rules.max_staleness

    def is_open(self, index: int) -> bool:
        """Returns whether the group of a task is in progress.

        The group of a task is in progress from the request for its samples until a step uses the
        group, or until the task is given up because its groups were too old too often.

        Args:
            index: index of the task.
        """
        return index in self._open

    def end(self, index: int, signal: bool, oldest: int, score: Sequence[int] = (0, 0)) -> None:
        """Records that all samples of a group have finished.

        Args:
            index: index of the group's task.
            signal: whether the rewards of the group differ.
            oldest: oldest policy version that sampled one of the group's tokens.
            score: number of solved samples and number of graded samples of the group, from which
                the task pool (`task_pool.TaskPool`) computes how often the policy solves the task.
        """
        if index in self._open:
            self._ended[index] = _Ended(signal, oldest, (score[0], score[1]))

    def late(self, index: int) -> None:
        """Drops a task's group that is older than `AdmissionRules.max_staleness` allows.

        The task is sampled again. Once `ATTEMPTS` groups of a task have been dropped, the task is
        given up: it is not sampled any more.

        Args:
            index: index of the group's task.
        """
        if index not in self._open:
            return
        self._ended.pop(index, None)
        self._dropped.append(index)
        self._open[index] += 1
        if self._open[index] < ATTEMPTS:
            self._again.append(index)
        else:
            del self._open[index]
            self._given_up += 1

    def next_step(self) -> Composition | None:
        """Composes the next step from groups that have finished.

        Returns:
            The groups of the step; None while too few groups have finished.
        """
        if self.complete:
            return None
        for index, ended in list(self._ended.items()):
            if ended.oldest < self.oldest_useful:
                self.late(index)
        used: list[int] = []
        examined: list[int] = []
        for index in self._candidates():
            examined.append(index)
            if self._ended[index].signal:
                used.append(index)
            if len(used) == self.rules.groups or len(examined) == self.rules.most:
                return self._compose(used, examined)
        return None

    def _candidates(self) -> Iterable[int]:
        """Yields the task indices of finished groups, in the order in which steps take them."""
        if not (self.rules.in_order or self.rules.max_staleness == 0):
            yield from list(self._ended)
            return
        for index in sorted(self._open):
            if index not in self._ended:
                return
            yield index

    def _compose(self, used: list[int], examined: list[int]) -> Composition:
        self.step += 1
        scores = tuple(self._ended[index].score for index in examined)
        if self._pool is not None:
            self._pool.learn(self.step, dict(zip(examined, scores, strict=True)))
        for index in examined:
            del self._open[index], self._ended[index]
        discarded = 0
        if self.rules.max_staleness == 0:
            # The next step starts after the last task of this step, even if later groups have
            # finished.
            discarded, self._next = len(self._open), examined[-1] + 1
            self._open, self._ended, self._again = {}, {}, []
        self._signals = _MEMORY * self._signals + len(used)
        self._examined = _MEMORY * self._examined + len(examined)
        dropped, self._dropped = tuple(self._dropped), []
        given_up, self._given_up = self._given_up, 0
        state = {
            "step": self.step,
            "next": self._next,
            "open": [list(pair) for pair in self._open.items()],
            "share": [self._signals, self._examined],
        }
        return Composition(
            self.step, tuple(used), tuple(examined), dropped, discarded, given_up, state, scores
        )

    @property
    def share(self) -> float:
        """Estimated share of groups with a signal (different rewards); 1 at the start of a run."""
        signals = self._signals + sum(ended.signal for ended in self._ended.values())
        return max((signals + 1) / (self._examined + len(self._ended) + 1), _LOWEST_SHARE)

    def admit(self) -> list[int]:
        """Returns the indices of the tasks to sample now, and counts their groups as in flight.

        The reachable steps are those that can use a group that starts now: all steps up to step
        ``version + max_staleness + 1``. `AdmissionRules.in_flight` sets the number of groups in
        flight. If it is 0, the number is computed: the number of groups with a signal that the
        reachable steps still lack, divided by the estimated share of groups with a signal.

        If steps are composed faster than the policy is trained, a group that starts now can be too
        old for the next step already. Then no task is sampled until the samplers have received a
        newer policy version.

        The groups in flight and the finished groups that no step uses yet are together never more
        than the reachable steps can examine (or than ``in_flight``, if that is more and
        ``max_staleness`` is above 0). Otherwise, while a step that takes groups in task order waits
        for a slow group, and the finished groups have no signal, tasks would be sampled without
        end.
        """
        rules = self.rules
        if self.version < self.oldest_useful:
            return []
        last = min(self.version + rules.max_staleness + 1, rules.steps)
        missing = rules.groups * (last - self.step)
        missing -= sum(ended.signal for ended in self._ended.values())
        again, self._again = self._again, []
        if missing <= 0:
            return again
        in_flight = len(self._open) - len(self._ended)
        number = (rules.in_flight or math.ceil(missing / self.share)) - in_flight
        limit = rules.most * (last - self.step)
        if rules.max_staleness > 0:  # surplus groups in flight: the steps take the quickest
            limit = max(limit, rules.in_flight)
        number = min(number, limit - len(self._open))
        new = [self._take_next() for _ in range(number)]
        self._open.update(dict.fromkeys(new, 0))
        return [*again, *new]

    def _take_next(self) -> int:
        """Returns the index of the next task to sample; the pool may skip tasks."""
        index = self._next if self._pool is None else self._pool.next(self._next, self.step)
        self._next = index + 1
        return index
