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
    """Limits on the calls to a model, over all processes of a run.

    If a limit is reached, the run stops before the next call.

    Attributes:
        prices: (model, money per million prompt tokens, money per million completion tokens).
        max_calls: maximum number of calls; 0 for no limit.
        max_total_tokens: maximum number of prompt and completion tokens; 0 for no limit. Needs a
            server that counts tokens.
        max_money: maximum cost; 0 for no limit. Needs a server that counts tokens.
        max_per_second: maximum number of calls that begin in a second; later calls wait. 0 for no
            limit.
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

    Attributes:
        calls: number of calls.
        prompt: number of prompt tokens.
        completion: number of completion tokens.
        money: cost at the known price.
        unmetered: number of calls whose answers had no token counts.
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
        """Adds a call.

        Args:
            row: numbers of ``prompt`` and ``completion`` tokens, see `counts_of`.
            price: money per million prompt and completion tokens; None if unknown.
        """
        prompt, completion = row["prompt"] or 0, row["completion"] or 0
        per_prompt, per_completion = price or (0.0, 0.0)
        self.calls += 1
        self.unmetered += None in (row["prompt"], row["completion"])
        self.prompt += prompt
        self.completion += completion
        self.money += (prompt * per_prompt + completion * per_completion) / 1e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallBudget(Bounded):
    """Limits on the calls of a tool, over all processes of a run.

    The run stops before a call that would exceed a limit.

    Attributes:
        price: money per call.
        max_calls: maximum number of calls; 0 for no limit.
        max_money: maximum cost; 0 for no limit.
        max_per_second: maximum number of calls that begin in a second; later calls wait.  0 for no
            limit.
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
        """The same limits as a number of calls, in which the price converts ``max_money``."""
        most = [self.max_calls] if self.max_calls else []
        most += [int(self.max_money / self.price)] if self.max_money else []
        if 0 in most:
            raise UserError(f"max_money is {self.max_money:g}, less than the price of one call")
        return Budget(max_calls=min(most, default=0), max_per_second=self.max_per_second)


@dataclasses.dataclass(frozen=True)
class _Run:
    """The run to which costs are charged.

    Attributes:
        folder: folder with a file of costs for each process.
        process: number of this process.
        processes: number of processes.
        before: name of a purse -> costs of all processes before this process began.
        own: name of a purse -> costs of earlier processes with this process's number.
        now: identity of a purse of this process -> its name and its costs.
    """

    folder: Path
    process: int
    processes: int
    before: Mapping[str, Spent]
    own: Mapping[str, Spent]
    now: dict[int, tuple[str, Spent]] = dataclasses.field(default_factory=dict)

    def share(self, left: float) -> float:
        """This process's share of the remaining budget; a share of an integer is an integer."""
        if isinstance(left, int):
            return left // self.processes + (self.process < left % self.processes)
        return left / self.processes

    def write(self, purse: int, name: str, spent: Spent) -> None:
        """Writes the costs of this process to its file.

        Args:
            purse: identity of the purse whose costs changed.
            name: name of the purse.
            spent: costs of the purse.
        """
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
    """Context manager that charges the costs of this process to a run.

    Each process reads the earlier costs of all processes, so all processes must have entered before
    the first call.

    Args:
        folder: folder in which the processes of the run store their costs.
        process: number of this process.
        processes: number of processes.

    Raises:
        UserError: a file of costs cannot be read.
    """
    global _run
    told: dict[int, dict[str, Spent]] = {}
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        rows = files.read_json_object(path)
        try:
            told[int(path.stem)] = {name: Spent(**row) for name, row in rows.items()}
        except (TypeError, ValueError):
            raise UserError(f"{path}: not a file with the costs of a process") from None
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
    """Returns the purse of a budget in the current run; equal budgets share a purse.

    Args:
        limits: limits on the calls.
        name: name of the paid service, such as the URL of a server; a part of the purse's name.
        model: name of the model in the prices; "" for a tool.
        where: name of the settings in errors; "" for ``name``.
    """
    with _lock:
        key = (name, model, limits.prices, limits.max_calls, limits.max_total_tokens,
               limits.max_money, limits.max_per_second)  # fmt: skip
        if key not in _purses:
            _purses[key] = Purse(limits, model, where or name, _run, f"{name} {model}".strip())
        return _purses[key]


class Purse:
    """The costs of one model or tool in this process, with their limits; thread-safe.

    Attributes:
        spent: costs so far; a caller may add the costs of other processes.
        price: money per million prompt and completion tokens; None if unknown.
    """

    def __init__(
        self, limits: Budget, model: str, where: str, run: _Run | None = None, name: str = ""
    ):
        """Creates an empty purse.

        Args:
            limits: limits on the calls.
            model: name of the model in the prices.
            where: name of the settings in error messages.
            run: run to which the costs are charged; None for this process alone.
            name: name of the purse in the files of the run.
        """
        self.spent, self.price = Spent(), limits.price_of(model)
        self._limits, self._where, self._run, self._name = limits, where, run, name
        self._inside, self._lock = 0, threading.Lock()
        self._written = 0  # calls that the file of costs includes already
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
                    told += f" by process {self._run.process} of {self._run.processes} since its "
                    told += f"start; its share of the remaining budget was {self._most[name]:g}"
                raise BudgetSpentError(
                    f"the budget {where}.{name}={getattr(limits, name):g} is spent ({told}); "
                    "finished work is kept: raise the budget, and run the same command again to "
                    "continue"
                )

    async def turn(self) -> None:
        """Waits until ``max_per_second`` allows another call."""
        if self._pause:
            with self._lock:
                now = time.monotonic()
                at = max(now, self._next)
                self._next = at + self._pause
            await asyncio.sleep(at - now)

    def begin(self) -> None:
        """Counts a request; call this before each request.

        Raises:
            BudgetSpentError: a limit is reached.
        """
        with self._lock:
            self.check()
            self._inside += 1
            if self.spent.calls + self._inside > self._written:
                # Store future calls as made, so that a killed run never exceeds its budget.
                share = self._most.get("max_calls", 10_000)
                self._write(int(min(max(self.spent.calls, 1), max(share // 100, 1), 100)))

    def end(self, usage: Any = None, answered: bool = False) -> None:
        """Ends a request; call this after each request.

        Args:
            usage: ``usage`` of the answer, if there is one.
            answered: whether there was an answer, whose costs count.
        """
        with self._lock:
            self._inside -= 1
            if answered:
                self.spent.add(counts_of(usage), self.price)

    def close(self) -> None:
        """Writes the final costs to the file of costs."""
        with self._lock:
            if self._written:
                self._write(0)

    def _write(self, further: int) -> None:
        """Stores the costs, including those of calls in progress and of ``further`` calls."""
        if self._run is None or not self._most:
            return
        self._written = self.spent.calls + self._inside + further
        # Estimate the cost of the calls that are not complete from the mean of the others.
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
