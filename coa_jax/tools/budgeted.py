"""Limits the number, cost and rate of a tool's calls, over all processes of a run."""

from __future__ import annotations

import dataclasses
import time

from coa_jax.tools.base import Observation, Tool, ToolContext, Wrapper, call_tool
from coa_jax.tools.net.budget import CallBudget, budget_tracker

LONGEST_WAIT_S = 3600.0
"""Maximum time in seconds that a call waits for its turn, in addition to the tool's deadline."""

_NO_TOKENS = {"prompt_tokens": 0, "completion_tokens": 0}


class Budgeted(Wrapper):
    """A tool that limits number, cost and rate of the calls of another tool, the wrapped tool.

    If the number or the cost reaches a limit, a call raises `BudgetSpentError`, which ends the run.
    Calls that come too fast are delayed.

    Attributes:
        name: name of the wrapped tool.
        deadline: time limit of a call in seconds: the deadline of the wrapped tool plus the maximum
            time that a call is delayed.
    """

    def __init__(self, tool: Tool, budget: CallBudget):
        """Wraps a tool.

        Args:
            tool: the tool whose calls are limited.
            budget: limits on the calls of the tool, and their price. A budget without limits only
                records the cost of the calls.
        """
        super().__init__(tool)
        self._budget = budget.as_budget
        self.deadline = tool.deadline + LONGEST_WAIT_S

    def __getattr__(self, name: str) -> object:
        """Returns an attribute of the wrapped tool, because `Recorded` and prompts read them."""
        if name in ("settings", "remembers", "tailored", "depends_on", "schema", "description"):
            return getattr(self.tool, name)
        raise AttributeError(name)

    async def __call__(self, arguments: str, context: ToolContext) -> Observation:
        """Waits until the rate limit allows a call, and calls the tool.

        Raises:
            BudgetSpentError: the budget is spent.
        """
        start = time.monotonic()
        tracker = budget_tracker(self._budget, self.name, where=f"tools.budgets.{self.name}")
        await tracker.wait_for_rate_limit()
        tracker.begin()
        if context.deadline is not None:
            seconds = max(context.deadline - (time.monotonic() - start), 0.001)
            context = dataclasses.replace(context, deadline=seconds)
        try:
            return await call_tool(self.tool, arguments, context)
        finally:
            # A call costs money even if it fails.
            tracker.end(_NO_TOKENS, answered=True)
