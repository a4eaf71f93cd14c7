"""Which tasks are asked, and which groups make the next step.

The decisions of a stream of groups, without clocks, threads or models: a `Ledger` is told what has
ended and says what to do.  Several processes that tell their ledgers the same news in the same
order decide the same.

Step s trains policy version s - 1 into version s.  The age of a group at step s is s - 1 less the
oldest version that sampled one of its tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from coa_jax.learn.pool import Pool, Score

ATTEMPTS = 3
"""How often a task is asked whose groups end too old each time, before it is given up."""
_MEMORY = 0.5  # weight of the steps before the last one in the share of groups with a signal
_LOWEST_SHARE = 0.05


@dataclasses.dataclass(frozen=True)
class Rules:
    """How a run composes its steps; see `RLConfig` for all but the last two.

    Attributes:
        groups: groups of a step.
        most: groups that a step looks at before it learns from fewer than ``groups``.
        max_staleness: greatest age of a group that is learned.
        in_order: whether groups are taken in the order of their tasks and not as they end.
        in_flight: groups that are sampled at a time; 0 for as many as the share with a signal
            makes necessary.
        steps: steps of the run.
    """

    groups: int
    most: int
    max_staleness: int
    in_order: bool
    in_flight: int
    steps: int


@dataclasses.dataclass(frozen=True)
class Composition:
    """The groups of a step, by index of their task.

    Attributes:
        step: number of the step, from 1.
        used: groups to learn from.
        examined: all groups that were looked at, in that order: the used ones, and groups without a
            signal.
        dropped: groups that ended too old since the step before.
        discarded: groups that were asked, and are asked again with the next policy.
        given_up: tasks that were dropped for the last time.
        state: of the ledger after this step, for `Ledger.restore`.
        scores: of each examined group.
    """

    step: int
    used: tuple[int, ...]
    examined: tuple[int, ...]
    dropped: tuple[int, ...]
    discarded: int
    given_up: int
    state: dict[str, Any]
    scores: tuple[Score, ...] = ()


class _Ended(NamedTuple):
    """A group whose samples have all ended; see `Ledger.end`."""

    signal: bool
    oldest: int
    score: Score


class Ledger:
    """The groups that were asked, that have ended and that were learned.

    Attributes:
        step: steps that were composed.
        version: policy version that samples everywhere.
    """

    def __init__(self, rules: Rules, pool: Pool | None = None):
        """A ledger of a run that begins.

        Args:
            rules: of the run.
            pool: says which tasks are passed over, and learns with every step; None for none.
        """
        self.rules, self._pool = rules, pool
        self.step = self.version = 0
        self._next = 0  # index of the next new task
        self._open: dict[int, int] = {}  # asked, and in no step yet: index -> attempts
        self._again: list[int] = []  # of those, what has to be asked again
        self._ended: dict[int, _Ended] = {}  # of those
        self._dropped: list[int] = []
        self._given_up = 0
        self._found = self._looked = 0.0  # with a signal, and all, in earlier steps

    @classmethod
    def restore(cls, rules: Rules, state: Mapping[str, Any], pool: Pool | None = None) -> Ledger:
        """The ledger after a composed step; what was in flight then is asked again.

        Args:
            rules: of the run.
            state: `Composition.state`; {} for the beginning.
            pool: as it was after that step.
        """
        ledger = cls(rules, pool)
        if state:
            ledger.step = ledger.version = int(state["step"])
            ledger._next = int(state["next"])
            ledger._open = {int(index): int(attempts) for index, attempts in state["open"]}
            ledger._again = list(ledger._open)
            ledger._found, ledger._looked = map(float, state["share"])
        return ledger

    @property
    def complete(self) -> bool:
        """Whether all steps are composed."""
        return self.step >= self.rules.steps

    @property
    def oldest_useful(self) -> int:
        """The oldest version whose groups the next step still learns from."""
        return self.step - self.rules.max_staleness

    def is_open(self, index: int) -> bool:
        """Whether a task was asked and is neither in a step nor given up."""
        return index in self._open

    def end(self, index: int, signal: bool, oldest: int, score: Sequence[int] = (0, 0)) -> None:
        """Notes a group whose samples have all ended.

        Args:
            index: of its task.
            signal: whether its rewards differ.
            oldest: oldest version that sampled one of its tokens.
            score: for the pool.
        """
        if index in self._open:
            self._ended[index] = _Ended(signal, oldest, (score[0], score[1]))

    def late(self, index: int) -> None:
        """Notes a group that is too old; its task is asked again, `ATTEMPTS` times in all."""
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

    def take(self) -> Composition | None:
        """The next step as soon as what has ended decides it, else None."""
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
        """Groups that have ended, in the order in which a step takes them."""
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
            # The next step begins behind the last group of this one, whatever else has ended.
            discarded, self._next = len(self._open), examined[-1] + 1
            self._open, self._ended, self._again = {}, {}, []
        self._found = _MEMORY * self._found + len(used)
        self._looked = _MEMORY * self._looked + len(examined)
        dropped, self._dropped = tuple(self._dropped), []
        given_up, self._given_up = self._given_up, 0
        state = {
            "step": self.step,
            "next": self._next,
            "open": [list(pair) for pair in self._open.items()],
            "share": [self._found, self._looked],
        }
        return Composition(
            self.step, tuple(used), tuple(examined), dropped, discarded, given_up, state, scores
        )

    @property
    def share(self) -> float:
        """Estimated share of groups with a signal; 1 at the beginning."""
        found = self._found + sum(ended.signal for ended in self._ended.values())
        return max((found + 1) / (self._looked + len(self._ended) + 1), _LOWEST_SHARE)

    def admit(self) -> list[int]:
        """Indices of the tasks to ask now, which are in flight from then on.

        Groups that begin now serve the steps up to ``version + max_staleness + 1``.  As many are in
        flight as these steps still miss, divided by the share of groups with a signal.
        """
        rules = self.rules
        last = min(self.version + rules.max_staleness + 1, rules.steps)
        missing = rules.groups * (last - self.step)
        missing -= sum(ended.signal for ended in self._ended.values())
        again, self._again = self._again, []
        if missing <= 0:
            return again
        in_flight = len(self._open) - len(self._ended)
        room = (rules.in_flight or math.ceil(missing / self.share)) - in_flight
        if rules.max_staleness == 0:
            room = min(room, rules.most - len(self._open))
        new = [self._take_next() for _ in range(room)]
        self._open.update(dict.fromkeys(new, 0))
        return [*again, *new]

    def _take_next(self) -> int:
        """The next index that is asked."""
        index = self._next if self._pool is None else self._pool.next(self._next, self.step)
        self._next = index + 1
        return index
