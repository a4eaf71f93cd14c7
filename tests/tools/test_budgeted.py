"""Calls of tools keep to a budget and a rate, over the processes and restarts of a run."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from coa_jax.errors import UserError
from coa_jax.run.settings import build_config
from coa_jax.tools.base import Observation, ToolContext, call_tool
from coa_jax.tools.budgeted import Budgeted
from coa_jax.tools.make import ToolsConfig, make_tools
from coa_jax.tools.net.budget import (
    Budget,
    BudgetSpentError,
    CallBudget,
    budget_tracker,
    charge_to_run,
)
from coa_jax.tools.recorded import Recorded


class Counting:
    """Answers, and counts how often."""

    name, deadline = "search", 5.0

    def __init__(self):
        self.calls = 0

    async def __call__(self, arguments, context):
        self.calls += 1
        return Observation("seen", True, "ok", 0.0)


def calls_until_spent(budget):
    """How many calls a tool gets."""
    counting = Counting()
    tool = Budgeted(counting, budget)

    async def ask():
        for _ in range(1000):
            await call_tool(tool, "x", ToolContext())

    with pytest.raises(BudgetSpentError):
        asyncio.run(ask())
    return counting.calls


def test_a_tool_is_called_until_its_budget_is_spent(tmp_path):
    for number, (limits, calls) in enumerate(
        [({"max_calls": 3}, 3), ({"price": 0.25, "max_money": 1.1}, 4),
         ({"price": 1.0, "max_money": 9.0, "max_calls": 5}, 5)]
    ):  # fmt: skip
        with charge_to_run(tmp_path / str(number)):
            assert calls_until_spent(CallBudget(**limits)) == calls


@pytest.mark.parametrize(
    ("price", "max_money", "calls"),
    [(0.1, 0.3, 3), (0.1, 0.7, 7), (0.1, 0.39, 3), (1e-6, 1.1, 1_100_000), (0.1, 1e8, 10**9)],
)
def test_money_for_a_whole_number_of_calls_pays_for_all_of_them(price, max_money, calls):
    assert CallBudget(price=price, max_money=max_money).as_budget.max_calls == calls


def test_processes_spend_a_budget_together_and_exactly(tmp_path):
    spent = []
    for process in range(4):  # one after the other, each as if the others were there
        with charge_to_run(tmp_path / f"of-{process}", process, 4):
            spent.append(calls_until_spent(CallBudget(max_calls=10)))
    assert spent == [3, 3, 2, 2]


def test_a_run_that_goes_on_has_what_is_left(tmp_path):
    budget = CallBudget(max_calls=10)
    with charge_to_run(tmp_path, 0, 2):  # process 1 is killed before it calls
        assert calls_until_spent(budget) == 5
    with charge_to_run(tmp_path, 0, 3):
        assert calls_until_spent(budget) == 2  # of the five, which three share
    with charge_to_run(tmp_path, 0, 1):
        assert calls_until_spent(budget) == 3
    with charge_to_run(tmp_path, 0, 1):
        assert calls_until_spent(budget) == 0
        assert calls_until_spent(CallBudget(max_calls=12)) == 2  # raised
    told = json.loads((tmp_path / "0.json").read_text())
    assert told["search"]["calls"] == 12


def test_calls_are_noted_before_they_are_made(tmp_path):
    """Whenever the process is killed, the file counts no fewer calls than were made."""
    limits = Budget(max_calls=100_000)
    with charge_to_run(tmp_path):
        tracker = budget_tracker(limits, "search")
        for made in range(1, 500):
            tracker.begin()
            noted = json.loads((tmp_path / "0.json").read_text())["search"]["calls"]
            assert made <= noted <= made + 100
            tracker.end({"prompt_tokens": 0, "completion_tokens": 0}, answered=True)
    assert json.loads((tmp_path / "0.json").read_text())["search"]["calls"] == 499


def test_tokens_and_money_are_shared_and_kept_too(tmp_path):
    limits = Budget(prices=(("m", 1e6, 1e6),), max_money=10.0)

    def pay(count):
        tracker = budget_tracker(limits, "http://x", "m")
        for _ in range(count):
            tracker.begin()
            tracker.end({"prompt_tokens": 1, "completion_tokens": 0}, answered=True)

    with charge_to_run(tmp_path, 0, 2):
        pay(5)
        with pytest.raises(BudgetSpentError, match=r"max_money=10 is spent \(5 by process 0 of 2"):
            pay(1)
    with charge_to_run(tmp_path, 1, 2), pytest.raises(BudgetSpentError, match=r"budget was 2\.5"):
        pay(4)
    told = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    assert sum(rows["http://x m"]["money"] for rows in told) == pytest.approx(8.0)


def test_calls_wait_for_their_turn_and_not_within_the_deadline_of_the_tool(tmp_path):
    counting = Counting()
    counting.deadline = 0.05
    tool = Budgeted(counting, CallBudget(max_per_second=20.0))

    async def ask():
        return await asyncio.gather(*(call_tool(tool, "x", ToolContext()) for _ in range(9)))

    with charge_to_run(tmp_path, 1, 2):  # this process has half of the rate
        start = time.monotonic()
        seen = asyncio.run(ask())
        seconds = time.monotonic() - start
    assert [one.outcome for one in seen] == ["ok"] * 9
    assert seconds >= 8 / 10  # the first begins at once


def test_a_budget_is_a_setting_and_an_answer_from_the_store_costs_nothing(tmp_path):
    pages = tmp_path / "pages.jsonl"
    pages.write_text('{"title": "Norway: Capital", "text": "The capital of Norway is Oslo."}\n')
    config = build_config(
        ToolsConfig,
        {
            "names": ("wiki_search",),
            "wiki_search": {"corpus": str(pages)},
            "budgets": {"wiki_search": {"max_calls": 1}},
            "store": {"path": str(tmp_path / "kept"), "tools": ("wiki_search",)},
        },
    )
    (tool,) = make_tools(config)
    assert isinstance(tool, Recorded) and isinstance(tool.tool, Budgeted)
    with charge_to_run(tmp_path / "spent"):
        first = asyncio.run(call_tool(tool, "capital of Norway", ToolContext()))
        again = asyncio.run(call_tool(tool, "capital of Norway", ToolContext()))
        assert first.ok and again.text == first.text and again.detail["stored"]
        with pytest.raises(BudgetSpentError, match=r"tools\.budgets\.wiki_search\.max_calls=1 is"):
            asyncio.run(call_tool(tool, "capital of Chad", ToolContext()))


@pytest.mark.parametrize(
    ("budgets", "said"),
    [
        ({"web_search": {"max_calls": 1}}, "tools.budgets.web_search is the budget of no tool"),
        ({"wiki_search": {"max_cals": 1}}, "budgets.wiki_search.max_cals is not a setting"),
        ({"wiki_search": {"max_money": 1.0}}, "max_money needs price, the money per call"),
        ({"wiki_search": {"max_calls": -1}}, "budgets.wiki_search.max_calls is -1"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(budgets, said):
    with pytest.raises(UserError, match=said):
        make_tools(ToolsConfig(names=("wiki_search",), budgets=budgets))


def test_what_was_spent_is_read_or_refused(tmp_path):
    (tmp_path / "0.json").write_text('{"search": {"cals": 1}}')
    with (
        pytest.raises(UserError, match=r"0\.json: not a file with the costs"),
        charge_to_run(tmp_path),
    ):
        pass
