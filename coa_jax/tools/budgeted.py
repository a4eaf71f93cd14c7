"""A tool whose calls have a budget and a rate, which all processes of a run share."""

from __future__ import annotations

import dataclasses
import time

from coa_jax.tools.base import Observation, Tool, ToolContext, begun, call
from coa_jax.tools.net.budget import CallBudget, purse_of

LONGEST_WAIT_S = 3600.0
"""How long a call may wait for its turn, before and beside the deadline of its tool."""

_NO_TOKENS = {"prompt_tokens": 0, "completion_tokens": 0}


class Budgeted:
    """A tool that counts its calls, and makes them wait where they come too fast.

    Attributes:
        name: that of the tool.
        deadline: that of the tool, after the longest wait.
    """

    def __init__(self, tool: Tool, budget: CallBudget):
        """Wraps a tool.

        Args:
            tool: the tool.
            budget: what its calls may cost; a budget without limits only names a price.
        """
        self.tool, self.name, self._budget = tool, tool.name, budget.as_budget
        self.deadline = tool.deadline + LONGEST_WAIT_S

    def __getattr__(self, name: str) -> object:
        """What stores of answers ask of a tool: on what these depend."""
        if name in ("settings", "remembers", "tailored", "depends_on", "schema", "description"):
            return getattr(self.tool, name)
        raise AttributeError(name)

    def begin(self) -> Budgeted:
        """The tool for one trajectory, where the tool has state; the budget is the same."""
        return begun(self)

    async def close(self) -> None:
        """Ends the trajectory of `begin`."""
        await self.tool.close()  # type: ignore[attr-defined]

    async def __call__(self, arguments: str, context: ToolContext) -> Observation:
        """Calls the tool when it is its turn; see ``coa_jax.tools.base.Tool``.

        Raises:
            BudgetSpentError: nothing is left for the call.
        """
        start = time.monotonic()
        purse = purse_of(self._budget, self.name, where=f"tools.budgets.{self.name}")
        await purse.turn()
        purse.begin()
        if context.deadline is not None:
            left = max(context.deadline - (time.monotonic() - start), 0.001)
            context = dataclasses.replace(context, deadline=left)
        try:
            return await call(self.tool, arguments, context)
        finally:
            # Whoever is paid has been asked, whatever came back.
            purse.end(_NO_TOKENS, answered=True)
