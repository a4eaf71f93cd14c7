"""The cost of calls to a language model, and the limits on it."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from typing import Any

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
    """

    prices: tuple[tuple[Place, NotNegative, NotNegative], ...] = ()
    max_calls: Amount = 0
    max_total_tokens: Amount = 0
    max_money: NotNegative = 0.0

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

    def add(self, row: Mapping[str, Any], price: tuple[float, float] | None) -> None:
        """Adds a call (its numbers of ``prompt`` and ``completion`` tokens) at a price."""
        prompt, completion = row["prompt"] or 0, row["completion"] or 0
        per_prompt, per_completion = price or (0.0, 0.0)
        self.calls += 1
        self.unmetered += None in (row["prompt"], row["completion"])
        self.prompt += prompt
        self.completion += completion
        self.money += (prompt * per_prompt + completion * per_completion) / 1e6


class Purse:
    """The money and tokens spent on one model; thread-safe.

    Attributes:
        spent: the totals, to which calls of other processes may be added.
        price: money per million prompt and completion tokens, if known.
    """

    def __init__(self, limits: Budget, model: str, where: str):
        """Creates an empty purse.

        Args:
            limits: limits on the calls.
            model: name of the model in the prices.
            where: name of the settings in error messages.
        """
        self.spent, self.price = Spent(), limits.price_of(model)
        self._limits, self._where = limits, where
        self._inside, self._lock = 0, threading.Lock()

    def check(self) -> None:
        """Raises BudgetSpentError if a limit is reached or cannot be checked."""
        limits, spent, where = self._limits, self.spent, self._where
        metered = next((n for n in ("max_total_tokens", "max_money") if getattr(limits, n)), None)
        if metered and spent.unmetered:
            raise BudgetSpentError(
                f"{where}.{metered} cannot be kept: {spent.unmetered} replies came without a count "
                f"of tokens; set {where}.{metered}=0 and limit {where}.max_calls, or have the "
                "server report usage"
            )
        for name, value, limit in (
            ("max_calls", spent.calls + self._inside, limits.max_calls),
            ("max_total_tokens", spent.prompt + spent.completion, limits.max_total_tokens),
            ("max_money", spent.money, limits.max_money),
        ):
            if limit and value >= limit:
                raise BudgetSpentError(
                    f"the budget {where}.{name}={limit:g} is spent ({value:g}); what is "
                    "finished is kept: raise it and run the same command again to continue"
                )

    def begin(self) -> None:
        """Must be called before a request.

        Raises:
            BudgetSpentError: a limit is reached.
        """
        with self._lock:
            self.check()
            self._inside += 1

    def end(self, usage: Any = None, answered: bool = False) -> None:
        """Must be called after a request, with the ``usage`` of the answer if there is one."""
        with self._lock:
            self._inside -= 1
            if answered:
                self.spent.add(counts_of(usage), self.price)


def counts_of(usage: Any) -> dict[str, int | None]:
    """Returns the ``prompt`` and ``completion`` tokens in an answer's ``usage``.

    The values are None if they are missing.
    """
    told = usage if isinstance(usage, Mapping) else {}
    named = {"prompt": told.get("prompt_tokens"), "completion": told.get("completion_tokens")}
    return {name: count if type(count) is int else None for name, count in named.items()}
