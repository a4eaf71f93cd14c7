"""Data about the trajectory that a tool call receives."""

from __future__ import annotations

import pytest

from coa_jax.data.trajectory import ToolCall
from coa_jax.errors import UserError
from coa_jax.rollout.request import RolloutConfig, tool_context


def context(seconds=0.0, tool_seconds=0.0, **budgets):
    calls = [
        ToolCall("code", "print(1)", "1", "ok", True, 0.0, 1.0, {}),
        ToolCall("code", "1/0", "ZeroDivisionError", "error", False, 1.0, 2.0, {}),
    ]
    return tool_context(
        RolloutConfig(max_tokens=64, **budgets),
        "task/0",
        calls,
        question="why?",
        think="so",
        seconds=seconds,
        tool_seconds=tool_seconds,
    )


def test_a_call_knows_the_earlier_ones_and_how_they_ended():
    found = context()
    assert found.call_index == 2
    assert found.history == (("code", "print(1)"), ("code", "1/0"))
    assert found.outcomes == ("ok", "error")
    assert (found.trajectory_id, found.question, found.think) == ("task/0", "why?", "so")


@pytest.mark.parametrize(
    ("budgets", "deadline"),
    [
        ({}, None),
        ({"max_seconds": 10.0}, 6.0),
        ({"max_tool_seconds": 5.0}, 3.0),
        ({"max_seconds": 10.0, "max_tool_seconds": 5.0}, 3.0),
        ({"max_seconds": 3.0}, 0.0),
    ],
)
def test_a_call_may_take_what_the_tighter_budget_leaves(budgets, deadline):
    assert context(seconds=4.0, tool_seconds=2.0, **budgets).deadline == deadline


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tool_calls", -1),
        ("max_observation_tokens", -1),
        ("max_turn_tokens", -2),
        ("max_seconds", float("nan")),
        ("max_tool_seconds", -0.5),
    ],
)
def test_a_budget_that_means_nothing_is_refused(name, value):
    with pytest.raises(UserError, match=f"^{name} is {value}; give a"):
        RolloutConfig(**{name: value})
