"""Models that judge and summarise keep to a budget."""

from __future__ import annotations

import asyncio
import json

import pytest

from coa_jax.errors import UserError
from coa_jax.tasks import Graders, GradersConfig, Task
from coa_jax.tasks.judge import JudgeConfig
from coa_jax.tools.net.budget import BudgetSpentError
from coa_jax.tools.net.chat import ChatConfig, budget_tracker_of, chat
from tests.tasks.finished import finished

ASK = [{"role": "user", "content": "?"}]
TASK = Task("j", "Which?", "web", ("Oslo",), "s", {"grader": "judge"})


@pytest.fixture(scope="module")
def server(server):
    def answer(usage):
        verdict = json.dumps({"rationale": "r", "judgement": "correct"})
        body = {"choices": [{"message": {"content": verdict}}]}
        return lambda handler: handler.json({**body, **usage})

    usage = {"usage": {"prompt_tokens": 30, "completion_tokens": 5}}
    server.pages["/metered/chat/completions"] = answer(usage)
    server.pages["/plain/chat/completions"] = answer({})
    return server


@pytest.mark.parametrize(
    ("limit", "calls"),
    [
        ({"max_calls": 2}, 2),
        ({"max_total_tokens": 100}, 3),  # of 35 tokens each
        ({"max_money": 1.5, "prices": (("m1", 20_000.0, 40_000.0),)}, 2),  # of 0.8 each
    ],
)
def test_a_model_is_asked_until_its_budget_is_spent(server, limit, calls):
    config = ChatConfig(server.url("/metered"), "m1", **limit)

    async def ask():
        for _ in range(10):
            await chat(config, ASK)

    with pytest.raises(BudgetSpentError, match=rf"budget chat \(m1\)\.{next(iter(limit))}="):
        asyncio.run(ask())
    spent = budget_tracker_of(config).spent
    assert (spent.calls, spent.prompt, spent.completion) == (calls, 30 * calls, 5 * calls)


def test_calls_that_are_under_way_count(server):
    config = ChatConfig(server.url("/metered"), "m2", max_calls=3)

    async def ask():
        return await asyncio.gather(*(chat(config, ASK) for _ in range(8)), return_exceptions=True)

    refused = [found for found in asyncio.run(ask()) if isinstance(found, BudgetSpentError)]
    assert len(refused) == 5 and budget_tracker_of(config).spent.calls == 3


def test_a_server_that_counts_no_tokens_cannot_keep_a_limit_of_them(server):
    config = ChatConfig(server.url("/plain"), "m3", max_total_tokens=1000)
    asyncio.run(chat(config, ASK))
    with pytest.raises(BudgetSpentError, match=r"^chat \(m3\)\.max_total_tokens .* 1 replies"):
        asyncio.run(chat(config, ASK))
    with pytest.raises(UserError, match=r"max_money needs the price of 'm3', which is missing"):
        ChatConfig(server.url("/plain"), "m3", max_money=1.0)


def test_a_judge_whose_budget_is_spent_ends_the_run(server):
    judge = JudgeConfig(ChatConfig(server.url("/metered"), "m4", max_calls=1))
    graders = Graders(GradersConfig(judge=judge))
    assert graders(TASK, finished("Oslo")).value == 1.0
    with pytest.raises(BudgetSpentError, match=r"max_calls=1 is spent"):
        graders(TASK, finished("Bergen"))
