"""What calls of a language model cost, and what may be spent on them."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from typing import Any

from coa_jax.bounds import Amount, Bounded, NotNegative, Place
from coa_jax.errors import UserError


class BudgetSpentError(UserError):
    """No further call may be paid for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget(Bounded):
    """What may be spent on a model.

    Attributes:
        prices: (model, money per million prompt tokens, per million completion tokens).
        max_calls, max_total_tokens, max_money: the run stops before a call once so much has been
            spent; 0 for no limit.  The last two need a server that counts tokens.
    """

    prices: tuple[tuple[Place, NotNegative, NotNegative], ...] = ()
    max_calls: Amount = 0
    max_total_tokens: Amount = 0
    max_money: NotNegative = 0.0

    def price_of(self, model: str) -> tuple[float, float] | None:
        """Money per million tokens of prompts and of completions of a model, if it is known."""
        return next(((p, c) for name, p, c in self.prices if name == model), None)

    def check_price(self, model: str, where: str) -> None:
        """Refuses a limit of money that no price goes with.

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
    """What the calls so far have cost; ``unmetered`` of them came back without token counts."""

    calls: int = 0
    prompt: int = 0
    completion: int = 0
    money: float = 0.0
    unmetered: int = 0

    def to_json(self) -> dict[str, Any]:
        """The totals as JSON values."""
        return dataclasses.asdict(self)

    def add(self, row: Mapping[str, Any], price: tuple[float, float] | None) -> None:
        """Counts an exchange (its ``prompt`` and ``completion``) at a price."""
        prompt, completion = row["prompt"] or 0, row["completion"] or 0
        per_prompt, per_completion = price or (0.0, 0.0)
        self.calls += 1
        self.unmetered += None in (row["prompt"], row["completion"])
        self.prompt += prompt
        self.completion += completion
        self.money += (prompt * per_prompt + completion * per_completion) / 1e6


class Purse:
    """What has been spent on one model; may be used by several threads.

    Attributes:
        spent: the totals, to which calls of other processes may be added.
        price: money per million tokens of prompts and of completions, if it is known.
    """

    def __init__(self, limits: Budget, model: str, where: str):
        """An empty purse.

        Args:
            limits: what may be spent.
            model: its name in the prices.
            where: what errors call the settings.
        """
        self.spent, self.price = Spent(), limits.price_of(model)
        self._limits, self._where = limits, where
        self._inside, self._lock = 0, threading.Lock()

    def check(self) -> None:
        """Raises BudgetSpentError if a limit has been reached, or if nobody can tell."""
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
        """To be called before a request.

        Raises:
            BudgetSpentError: there is nothing left for it.
        """
        with self._lock:
            self.check()
            self._inside += 1

    def end(self, usage: Any = None, answered: bool = False) -> None:
        """To be called after it, with the ``usage`` of the answer if there was one."""
        with self._lock:
            self._inside -= 1
            if answered:
                self.spent.add(counts_of(usage), self.price)


def counts_of(usage: Any) -> dict[str, int | None]:
    """``prompt`` and ``completion`` of the ``usage`` of an answer; None for what it lacks."""
    told = usage if isinstance(usage, Mapping) else {}
    named = {"prompt": told.get("prompt_tokens"), "completion": told.get("completion_tokens")}
    return {name: count if type(count) is int else None for name, count in named.items()}
