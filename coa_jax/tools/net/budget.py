"""Counts the cost of calls to language models and tools, and limits this cost.

A limit applies to a whole run. Each process of the run may spend an equal share. The limit also
includes the cost before a restart, because `charge_to_run` stores the cost in the work directory.
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

from coa_jax.config.fields import Amount, Bounded, NotNegative, Place
from coa_jax.errors import UserError
from coa_jax.files import durable


class BudgetSpentError(UserError):
    """Raised if a budget's limit is reached; no further call is made, and the run ends."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget(Bounded):
    """Limits on the calls to a model in all processes of a run.

    If a limit is reached, the run stops before the next call.

    Attributes:
        prices: (name of a model, money per million prompt tokens, money per million completion
            tokens) of each model. Any currency may be used.
        max_calls: maximum number of calls; 0 for no limit.
        max_total_tokens: maximum total number of prompt tokens and completion tokens; 0 for no
            limit. The server must report the number of tokens.
        max_money: maximum cost, in the currency of ``prices``; 0 for no limit. The server must
            report the number of tokens.
        max_per_second: maximum number of calls that begin in a second; 0 for no limit. Further
            calls wait.
    """

    prices: tuple[tuple[Place, NotNegative, NotNegative], ...] = ()
    max_calls: Amount = 0
    max_total_tokens: Amount = 0
    max_money: NotNegative = 0.0
    max_per_second: NotNegative = 0.0

    def price_of(self, model: str) -> tuple[float, float] | None:
        """Returns the price of a model; None if ``prices`` does not contain the model.

        The price is (money per million prompt tokens, money per million completion tokens).
        """
        return next(((p, c) for name, p, c in self.prices if name == model), None)

    def check_price(self, model: str, where: str) -> None:
        """Checks that there is a price if ``max_money`` limits the cost.

        Args:
            model: name of the model.
            where: prefix of the settings' names in the error message.

        Raises:
            UserError: ``max_money`` is set, and the price of the model is missing or 0.
        """
        price = self.price_of(model)
        if self.max_money and not any(price or ()):
            wrong = "missing" if price is None else "0: it would limit nothing"
            form = "(model, per million prompt tokens, per million completion tokens)"
            raise UserError(
                f"{where}max_money needs the price of {model!r}, which is {wrong}; give it in "
                f"{where}prices as {form}"
            )


@dataclasses.dataclass
class Spent:
    """The total cost of some calls.

    Attributes:
        calls: number of calls.
        prompt: number of prompt tokens.
        completion: number of completion tokens.
        money: cost in the currency of the price; 0 if the price is unknown.
        unmetered: number of calls for which the server did not report the number of tokens.
    """

    calls: int = 0
    prompt: int = 0
    completion: int = 0
    money: float = 0.0
    unmetered: int = 0

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as a JSON object, from which ``Spent(**object)`` restores them."""
        return dataclasses.asdict(self)

    def amounts(self) -> dict[str, float]:
        """Returns the amount spent so far for each limit of a `Budget`, by name of the limit."""
        tokens = self.prompt + self.completion
        return {"max_calls": self.calls, "max_total_tokens": tokens, "max_money": self.money}

    def __add__(self, other: Spent) -> Spent:
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return Spent(*(a + b for a, b in zip(mine, theirs, strict=True)))

    def add(self, row: Mapping[str, Any], price: tuple[float, float] | None) -> None:
        """Adds the cost of a call.

        Args:
            row: number of ``prompt`` tokens and number of ``completion`` tokens of the call, see
                `counts_of`.
            price: (money per million prompt tokens, money per million completion tokens); None if
                the price is unknown.
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
    """Limits on the calls of a tool in all processes of a run.

    The run stops before a call that would exceed a limit.

    Attributes:
        price: money per call, in any currency.
        max_calls: maximum number of calls; 0 for no limit.
        max_money: maximum cost, in the currency of ``price``; 0 for no limit.
        max_per_second: maximum number of calls that begin in a second; 0 for no limit. Further
            calls wait.
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
        """The same limits as a `Budget`, with ``max_money`` converted to a number of calls."""
        most = [self.max_calls] if self.max_calls else []
        # The factor is needed because the quotient may be rounded to less than a whole number.
        most += [int(self.max_money / self.price * (1 + 1e-12))] if self.max_money else []
        if 0 in most:
            raise UserError(f"max_money is {self.max_money:g}, less than the price of one call")
        return Budget(max_calls=min(most, default=0), max_per_second=self.max_per_second)


@dataclasses.dataclass(frozen=True)
class _Run:
    """The run to which the cost of calls is charged.

    Attributes:
        folder: folder with one file per process, which contains the cost of its calls.
        process: index of this process in the run.
        processes: number of processes of the run.
        before: name of a tracker -> cost of all processes before this process began.
        own: name of a tracker -> cost of earlier processes with the index of this process.
        now: identity of a tracker of this process -> (name of the tracker, its cost).
    """

    folder: Path
    process: int
    processes: int
    before: Mapping[str, Spent]
    own: Mapping[str, Spent]
    now: dict[int, tuple[str, Spent]] = dataclasses.field(default_factory=dict)

    def share(self, remaining: float) -> float:
        """Returns the share of this process in the remaining budget of the run.

        If ``remaining`` is an integer, each share is an integer. The shares of all processes add
        up to ``remaining``.
        """
        if isinstance(remaining, int):
            return remaining // self.processes + (self.process < remaining % self.processes)
        return remaining / self.processes

    def write(self, tracker: int, name: str, spent: Spent) -> None:
        """Writes the cost of this process to its file.

        Args:
            tracker: identity of the tracker whose cost has changed.
            name: name of the tracker.
            spent: cost of the tracker.
        """
        with _lock:
            self.now[tracker] = name, spent
            rows = dict(self.own)
            for each, mine in self.now.values():
                rows[each] = rows.get(each, Spent()) + mine
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"{self.process}.json"
            durable.write_json(path, {each: total.to_json() for each, total in rows.items()})


_run: _Run | None = None
_trackers: dict[tuple[Any, ...], BudgetTracker] = {}
_lock = threading.RLock()


@contextlib.contextmanager
def charge_to_run(folder: Path, process: int = 0, processes: int = 1) -> Iterator[None]:
    """Charges the cost of calls in this process to a run, inside a ``with`` block.

    A process reads the cost of all processes when it enters the block, and takes a share of the
    remaining budget. No process may make a call before all have entered, because the cost of the
    call would then reduce the shares of the processes that enter later.

    Args:
        folder: folder in which the processes of the run store their cost.
        process: index of this process in the run.
        processes: number of processes of the run.

    Raises:
        UserError: a file with the cost of a process cannot be read.
    """
    global _run, _trackers
    spent_by_process: dict[int, dict[str, Spent]] = {}
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        rows = durable.read_json_object(path)
        try:
            spent_by_process[int(path.stem)] = {name: Spent(**row) for name, row in rows.items()}
        except (TypeError, ValueError):
            raise UserError(f"{path}: not a file with the costs of a process") from None
    before: dict[str, Spent] = {}
    for spent in spent_by_process.values():
        for name, each in spent.items():
            before[name] = before.get(name, Spent()) + each
    with _lock:
        outer = _run, _trackers
        _run = _Run(folder, process, processes, before, spent_by_process.get(process, {}))
        _trackers = {}
    try:
        yield
    finally:
        with _lock:
            mine = _trackers
            _run, _trackers = outer
            for tracker in mine.values():
                tracker.close()


def budget_tracker(limits: Budget, name: str, model: str = "", where: str = "") -> BudgetTracker:
    """Returns the tracker (the counter of costs) for calls to a model or tool in the current run.

    The same limits and names always give the same tracker in a run.

    Args:
        limits: limits on the calls.
        name: name of the service, such as the URL of a server.
        model: name of the model in the prices; "" for a tool.
        where: name of the settings, used in error messages. If "", error messages use ``name``.
    """
    with _lock:
        key = (name, model, limits.prices, limits.max_calls, limits.max_total_tokens,
               limits.max_money, limits.max_per_second)  # fmt: skip
        if key not in _trackers:
            _trackers[key] = BudgetTracker(
                limits, model, where or name, _run, f"{name} {model}".strip()
            )
        return _trackers[key]


class BudgetTracker:
    """Counts the cost of the calls to a model or tool in this process, and checks the limits.

    Call `begin` before and `end` after each request.

    Several threads may use the same tracker.

    Attributes:
        spent: cost of the calls so far. Code outside this class may add the cost of other
            processes.
        price: (money per million prompt tokens, money per million completion tokens); None if the
            price is unknown.
    """

    def __init__(
        self, limits: Budget, model: str, where: str, run: _Run | None = None, name: str = ""
    ):
        """Creates an empty tracker.

        Args:
            limits: limits on the calls.
            model: name of the model in the prices; "" for a tool.
            where: name of the settings, used in error messages.
            run: run to which the cost is charged; None for a process that belongs to no run.
            name: name of the tracker in the files of the run.
        """
        self.spent, self.price = Spent(), limits.price_of(model)
        self._limits, self._where, self._run, self._name = limits, where, run, name
        self._inside, self._lock = 0, threading.Lock()
        self._written = 0  # number of calls that the file already includes
        self._next = 0.0
        self._pause = (run.processes if run else 1) / (limits.max_per_second or math.inf)
        self._before = run.before.get(name, Spent()) if run else Spent()
        self._most: dict[str, float] = {}
        for limit, was in self._before.amounts().items():
            if most := getattr(limits, limit):
                remaining = max(most - was, 0)
                self._most[limit] = run.share(remaining) if run else remaining

    def check(self) -> None:
        """Checks that no limit is reached.

        Raises:
            BudgetSpentError: a limit is reached, or cannot be checked because the server does not
                report the number of tokens.
        """
        limits, spent, where = self._limits, self.spent, self._where
        metered = next((n for n in ("max_total_tokens", "max_money") if n in self._most), None)
        unmetered = spent.unmetered + self._before.unmetered
        if metered and unmetered:
            raise BudgetSpentError(
                f"{where}.{metered} cannot be kept: {unmetered} replies came without a count "
                f"of tokens; set {where}.{metered}=0 and limit {where}.max_calls, or have the "
                "server report usage"
            )
        begun = dataclasses.replace(spent, calls=spent.calls + self._inside)
        for name, value in begun.amounts().items():
            if name in self._most and value >= self._most[name]:
                amount = f"{value:g}"
                if self._run is not None:
                    amount += f" by process {self._run.process} of {self._run.processes} since its "
                    amount += f"start; its share of the remaining budget was {self._most[name]:g}"
                raise BudgetSpentError(
                    f"the budget {where}.{name}={getattr(limits, name):g} is spent ({amount}); "
                    "finished work is kept: raise the budget, and run the same command again to "
                    "continue"
                )

    async def wait_for_rate_limit(self) -> None:
        """Waits until the limit on calls per second, ``max_per_second``, allows another call."""
        if self._pause:
            with self._lock:
                now = time.monotonic()
                at = max(now, self._next)
                self._next = at + self._pause
            await asyncio.sleep(at - now)

    def begin(self) -> None:
        """Records that a request begins. Must be called before each request.

        Raises:
            BudgetSpentError: a limit is reached.
        """
        with self._lock:
            self.check()
            self._inside += 1
            if self.spent.calls + self._inside > self._written:
                # Some future calls are stored as made, so that a killed run stays in its budget.
                share = self._most.get("max_calls", 10_000)
                self._write(int(min(max(self.spent.calls, 1), max(share // 100, 1), 100)))

    def end(self, usage: Any = None, answered: bool = False) -> None:
        """Records that a request has ended, and its cost. Must be called after each request.

        Args:
            usage: field ``usage`` of the answer; None if there is none.
            answered: whether the server has answered. If False, the request has no cost.
        """
        with self._lock:
            self._inside -= 1
            if answered:
                self.spent.add(counts_of(usage), self.price)

    def close(self) -> None:
        """Writes the cost so far to this process's file in the work directory."""
        with self._lock:
            if self._written:
                self._write(0)

    def _write(self, further: int) -> None:
        """Stores the cost, including the calls in progress and ``further`` future calls."""
        if self._run is None or not self._most:
            return
        self._written = self.spent.calls + self._inside + further
        # The cost of calls that are not complete is estimated by the mean cost of complete calls.
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
    """Returns the numbers of tokens of a request by the keys ``prompt`` and ``completion``.

    Args:
        usage: field ``usage`` of the server's answer. A number that is missing from the field
            becomes None.
    """
    fields = usage if isinstance(usage, Mapping) else {}
    counts = {"prompt": fields.get("prompt_tokens"), "completion": fields.get("completion_tokens")}
    return {name: count if type(count) is int else None for name, count in counts.items()}
