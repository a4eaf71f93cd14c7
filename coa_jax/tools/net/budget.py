"""The cost of calls to a language model or a tool, and the limits on it.

A limit applies to a whole run: to all of its processes, each of which may spend an equal share, and
across its restarts, because `spending` keeps the amounts spent in the work directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from coa_jax import files
from coa_jax.bounds import Amount, Bounded, NotNegative, Place
from coa_jax.errors import UserError


class BudgetSpentError(UserError):
    """A limit of the budget is reached, so no further call is made."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget(Bounded):
    """Limits on the calls to a model.

    Attributes:
        prices: (model, money per million prompt tokens, money per million completion tokens).
        max_calls, max_total_tokens, max_money: limits after which the run stops before the next
            call; 0 for no limit. The last two need a server that counts tokens.
        max_per_second: calls that begin in a second, over all processes of the run; later calls
            wait. 0 for no limit.
    """

    prices: tuple[tuple[Place, NotNegative, NotNegative], ...] = ()
    max_calls: Amount = 0
    max_total_tokens: Amount = 0
    max_money: NotNegative = 0.0
    max_per_second: NotNegative = 0.0

    def price_of(self, model: str) -> tuple[float, float] | None:
        """Returns the money per million prompt and completion tokens of a model, if known."""
        return next(((p, c) for name, p, c in self.prices if name == model), None)

    def check_price(self, model: str, where: str) -> None:
        """Checks that a limit on money has a price.

        Raises:
            UserError: the price that ``max_money`` needs is missing, or 0.
        """
        price = self.price_of(model)
        if self.max_money and not any(price or ()):
            raise UserError(
                f"{where}max_money needs the price of {model!r}, which is "
                f"{'missing' if price is None else '0: it would limit nothing'}; give it in "
                f"{where}prices as (model, per million prompt tokens, per million completion "
                "tokens)"
            )


@dataclasses.dataclass
class Spent:
    """The total cost of all calls so far.

    ``unmetered`` counts the calls whose answers had no token counts.
    """

    calls: int = 0
    prompt: int = 0
    completion: int = 0
    money: float = 0.0
    unmetered: int = 0

    def to_json(self) -> dict[str, Any]:
        """Returns the totals as JSON values."""
        return dataclasses.asdict(self)

    def __add__(self, other: Spent) -> Spent:
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return Spent(*(a + b for a, b in zip(mine, theirs, strict=True)))

    def add(self, row: Mapping[str, Any], price: tuple[float, float] | None) -> None:
        """Adds a call (its numbers of ``prompt`` and ``completion`` tokens) at a price."""
        prompt, completion = row["prompt"] or 0, row["completion"] or 0
        per_prompt, per_completion = price or (0.0, 0.0)
        self.calls += 1
        self.unmetered += None in (row["prompt"], row["completion"])
        self.prompt += prompt
        self.completion += completion
        self.money += (prompt * per_prompt + completion * per_completion) / 1e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallBudget(Bounded):
    """What may be spent on the calls of a tool, over all processes of a run.

    Attributes:
        price: money per call.
        max_calls, max_money: the run stops before a call that would exceed the limit; 0 for no
            limit.
        max_per_second: calls that begin in a second; later calls wait.  0 for no limit.
    """

    price: NotNegative = 0.0
    max_calls: Amount = 0
    max_money: NotNegative = 0.0
    max_per_second: NotNegative = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_money and not self.price:
            raise UserError("max_money needs price, the money per call")

    @property
    def as_budget(self) -> Budget:
        """The same limits as calls alone: a price per call makes money a number of calls."""
        most = [self.max_calls] if self.max_calls else []
        most += [int(self.max_money / self.price)] if self.max_money else []
        if 0 in most:
            raise UserError(f"max_money is {self.max_money:g}, less than the price of one call")
        return Budget(max_calls=min(most, default=0), max_per_second=self.max_per_second)


@dataclasses.dataclass(frozen=True)
class _Run:
    """The run that pays: where its processes write what they spend, and what they had spent.

    Attributes:
        folder: with a file for each process.
        process, processes: this one, and how many there are.
        before: name of a purse -> what all processes had spent when this one began.
        own: the same of the processes that had this number.
        now: the purses of this process, by what tells them apart -> name, what it has spent.
    """

    folder: Path
    process: int
    processes: int
    before: Mapping[str, Spent]
    own: Mapping[str, Spent]
    now: dict[int, tuple[str, Spent]] = dataclasses.field(default_factory=dict)

    def share(self, left: float) -> float:
        """This process's part of what is left: whole calls and tokens, and any part of money."""
        if isinstance(left, int):
            return left // self.processes + (self.process < left % self.processes)
        return left / self.processes

    def write(self, purse: int, name: str, spent: Spent) -> None:
        """Notes what a purse has spent."""
        with _lock:
            self.now[purse] = name, spent
            rows = dict(self.own)
            for each, mine in self.now.values():
                rows[each] = rows.get(each, Spent()) + mine
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"{self.process}.json"
            files.write_json(path, {each: total.to_json() for each, total in rows.items()})


_run: _Run | None = None
_purses: dict[tuple[Any, ...], Purse] = {}
_lock = threading.RLock()


@contextlib.contextmanager
def spending(folder: Path, process: int = 0, processes: int = 1) -> Iterator[None]:
    """Makes the budgets of this process those of a run with a work directory.

    All processes must have entered before the first call: each reads what all have spent.

    Args:
        folder: where the processes of the run write what they spend.
        process: number of this one.
        processes: how many there are.

    Raises:
        UserError: what has been spent cannot be read.
    """
    global _run
    told: dict[int, dict[str, Spent]] = {}
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        rows = files.read_json_object(path)
        try:
            told[int(path.stem)] = {name: Spent(**row) for name, row in rows.items()}
        except (TypeError, ValueError):
            raise UserError(f"{path}: does not say what a process has spent") from None
    before: dict[str, Spent] = {}
    for spent in told.values():
        for name, each in spent.items():
            before[name] = before.get(name, Spent()) + each
    with _lock:
        outer, kept = _run, dict(_purses)
        _run = _Run(folder, process, processes, before, told.get(process, {}))
        _purses.clear()
    try:
        yield
    finally:
        with _lock:
            mine = list(_purses.values())
            _purses.clear()
            _purses.update(kept)
            for purse in mine:
                purse.close()
            _run = outer


def purse_of(limits: Budget, name: str, model: str = "", where: str = "") -> Purse:
    """What this process has spent under one budget, within the run that it is part of.

    Args:
        limits: what may be spent.
        name: of what is paid for, such as the address of a server; a part of the purse's name.
        model: its name in the prices.
        where: what errors call the settings.
    """
    with _lock:
        key = (name, model, limits.prices, limits.max_calls, limits.max_total_tokens,
               limits.max_money, limits.max_per_second)  # fmt: skip
        if key not in _purses:
            _purses[key] = Purse(limits, model, where or name, _run, f"{name} {model}".strip())
        return _purses[key]


class Purse:
    """The money and tokens spent on one model or tool; thread-safe.

    Attributes:
        spent: the totals, to which calls of other processes may be added.
        price: money per million prompt and completion tokens, if known.
    """

    def __init__(
        self, limits: Budget, model: str, where: str, run: _Run | None = None, name: str = ""
    ):
        """Creates an empty purse.

        Args:
            limits: limits on the calls.
            model: name of the model in the prices.
            where: name of the settings in error messages.
            run: the run that pays; None for this process alone.
            name: name of the purse in the files of the run.
        """
        self.spent, self.price = Spent(), limits.price_of(model)
        self._limits, self._where, self._run, self._name = limits, where, run, name
        self._inside, self._lock = 0, threading.Lock()
        self._written = 0  # calls that the file of the run counts already
        self._next = 0.0
        self._pause = (run.processes if run else 1) / (limits.max_per_second or math.inf)
        self._before = run.before.get(name, Spent()) if run else Spent()
        spent = self._before
        self._most: dict[str, float] = {}
        for limit, was in (
            ("max_calls", spent.calls),
            ("max_total_tokens", spent.prompt + spent.completion),
            ("max_money", spent.money),
        ):
            if most := getattr(limits, limit):
                left = max(most - was, 0)
                self._most[limit] = run.share(left) if run else left

    def check(self) -> None:
        """Raises BudgetSpentError if a limit is reached or cannot be checked."""
        limits, spent, where = self._limits, self.spent, self._where
        metered = next((n for n in ("max_total_tokens", "max_money") if n in self._most), None)
        unmetered = spent.unmetered + self._before.unmetered
        if metered and unmetered:
            raise BudgetSpentError(
                f"{where}.{metered} cannot be kept: {unmetered} replies came without a count "
                f"of tokens; set {where}.{metered}=0 and limit {where}.max_calls, or have the "
                "server report usage"
            )
        for name, value in (
            ("max_calls", spent.calls + self._inside),
            ("max_total_tokens", spent.prompt + spent.completion),
            ("max_money", spent.money),
        ):
            if name in self._most and value >= self._most[name]:
                told = f"{value:g}"
                if self._run is not None:
                    told += f" by process {self._run.process} of {self._run.processes} since it "
                    told += f"began, its share of what was left being {self._most[name]:g}"
                raise BudgetSpentError(
                    f"the budget {where}.{name}={getattr(limits, name):g} is spent ({told}); what "
                    "is finished is kept: raise it and run the same command again to continue"
                )

    async def turn(self) -> None:
        """Waits until the rate of calls allows a further one."""
        if self._pause:
            with self._lock:
                now = time.monotonic()
                at = max(now, self._next)
                self._next = at + self._pause
            await asyncio.sleep(at - now)

    def begin(self) -> None:
        """Must be called before a request.

        Raises:
            BudgetSpentError: a limit is reached.
        """
        with self._lock:
            self.check()
            self._inside += 1
            if self.spent.calls + self._inside > self._written:
                # Counted before they are made: a kill costs a part of the budget, no more.
                share = self._most.get("max_calls", 10_000)
                self._write(int(min(max(self.spent.calls, 1), max(share // 100, 1), 100)))

    def end(self, usage: Any = None, answered: bool = False) -> None:
        """Must be called after a request, with the ``usage`` of the answer if there is one."""
        with self._lock:
            self._inside -= 1
            if answered:
                self.spent.add(counts_of(usage), self.price)

    def close(self) -> None:
        """Writes what has been spent to the file of the run."""
        with self._lock:
            if self._written:
                self._write(0)

    def _write(self, further: int) -> None:
        """Notes the totals, with what is under way and ``further`` calls counted as made."""
        if self._run is None or not self._most:
            return
        self._written = self.spent.calls + self._inside + further
        # What the calls that are not made yet will cost, by those that were made.
        scale = self._written / self.spent.calls if self.spent.calls else 1.0
        counted = dataclasses.replace(
            self.spent,
            calls=self._written,
            prompt=math.ceil(self.spent.prompt * scale),
            completion=math.ceil(self.spent.completion * scale),
            money=self.spent.money * scale,
        )
        self._run.write(id(self), self._name, counted)


def counts_of(usage: Any) -> dict[str, int | None]:
    """Returns the ``prompt`` and ``completion`` tokens in an answer's ``usage``.

    The values are None if they are missing.
    """
    told = usage if isinstance(usage, Mapping) else {}
    named = {"prompt": told.get("prompt_tokens"), "completion": told.get("completion_tokens")}
    return {name: count if type(count) is int else None for name, count in named.items()}
