import asyncio

import pytest

from coa_jax.distillation.endpoint import Endpoint, EndpointConfig
from coa_jax.distillation.pipeline import DistillConfig
from coa_jax.distillation.synthesis.closed_book import (
    ClosedBookConfig,
    PolicySolver,
    closed_book_solver,
)
from coa_jax.distillation.synthesis.solvers import WithoutTools, WithTools
from coa_jax.errors import UserError
from coa_jax.tasks.base import Task
from tests import tiny_policy
from tests.distillation.chat_server import serving
from tests.distillation.small_team import small_team

LIMA = Task("a", "What is the capital of Peru?", "generalist", ("Lima",), "test")
WRONG = Task("b", "What is the capital of Chile?", "generalist", ("Lima",), "test")
ODD = Task("c", "Why is the sea salt?", "generalist", ("rivers",), "test")


def with_tools(tools, path, attempts=1, agents=None):
    agents = agents or small_team()
    return WithTools(tools, agents, DistillConfig(), attempts, path, {"minds": "small"})


def test_the_team_says_what_can_be_solved_with_tools(tools, tmp_path):
    solver = with_tools(tools, tmp_path / "runs.jsonl")
    reasons = [reason for reason, _ in asyncio.run(solver([LIMA, WRONG, ODD]))]
    assert reasons == [None, "not_solved_with_tools", "not_solved_with_tools"]


def test_a_solved_task_is_not_tried_again_and_an_unsolved_one_is(tools, tmp_path):
    path = tmp_path / "runs.jsonl"
    verdicts = asyncio.run(with_tools(tools, path, attempts=3)([LIMA, WRONG]))
    assert [figures["attempts"] for _, figures in verdicts] == [1, 3]
    again = with_tools({}, path, attempts=3)  # without tools nothing could be solved anew
    assert again.resumed == 4
    assert asyncio.run(again([LIMA, WRONG])) == verdicts


def test_an_answer_without_a_call_needs_no_tool(tmp_path):
    from coa_jax.distillation.agent_functions import Action
    from coa_jax.distillation.messages import AGENTS, Kind

    class Knows:
        async def __call__(self, view):
            return Action("user", Kind.ANSWER, "Lima")

    solver = with_tools({}, tmp_path / "runs.jsonl", agents=dict.fromkeys(AGENTS, Knows()))
    assert asyncio.run(solver([LIMA]))[0][0] == "solved_without_a_call"


class Knows:
    """Answers right a given number of times."""

    def __init__(self, right):
        self.right, self.asked = right, 0

    async def __call__(self, tasks, samples):
        self.asked += len(tasks)
        return [["Lima"] * self.right + ["?"] * (samples - self.right) for _ in tasks]


# 0.3 of 32 is 9.6: nine right answers pass, ten do not (paper §3.3.1: dropped if above 0.3).
@pytest.mark.parametrize(("right", "kept"), [(0, True), (9, True), (10, False), (32, False)])
def test_the_papers_rate_decides(tmp_path, right, kept):
    solver = WithoutTools(ClosedBookConfig(), "x", Knows(right), tmp_path / "closed.jsonl")
    ((reason, figures),) = asyncio.run(solver([LIMA]))
    assert reason == (None if kept else "known_without_tools")
    assert figures == {"closed_book": right / 32}


def test_answers_are_kept_for_the_same_solver(tmp_path):
    path, model = tmp_path / "closed.jsonl", Knows(32)
    first = asyncio.run(WithoutTools(ClosedBookConfig(), "x", model, path)([LIMA]))
    assert asyncio.run(WithoutTools(ClosedBookConfig(), "x", model, path)([LIMA])) == first
    assert model.asked == 1
    asyncio.run(WithoutTools(ClosedBookConfig(), "y", model, path)([LIMA]))
    assert model.asked == 2


def test_a_model_is_asked_that_often_and_its_words_count_as_they_stand(tmp_path):
    said = {
        '{"answer": "Lima"}': "Lima",
        "Lima": "Lima",
        "It may be Quito.": "It may be Quito.",
        '{"answer": 1912}': "1912",
        '{"answer": ["Lima"]}': "Lima",
        '{"answer": ["Lima", 3.5]}': "Lima|3.5",
        '{"answer": {"a": 1}}': '{"answer": {"a": 1}}',
        '<think>Is it {Quito}, as in {"answer": "Quito"}?</think>\n{"answer": "Lima"}': "Lima",
        "<think>Perhaps {Lima}.</think>Lima": "Lima",
        '{"answer": "Lima"} (I am {sure})': "Lima",
    }
    replies = iter(said)

    async def work(server):
        config = EndpointConfig(url=server.url, model="m")
        endpoint = Endpoint(config, tmp_path / "calls.jsonl")
        answers = await closed_book_solver(endpoint, 1)([LIMA], len(said))
        again = await closed_book_solver(endpoint, 1)([LIMA], len(said))
        await endpoint.close()
        return answers, again

    with serving(lambda chat: next(replies)) as server:
        answers, again = asyncio.run(work(server))
        assert len(server.seen) == len(said)
    assert answers == again == [list(said.values())]


def test_a_spent_budget_is_one_line(tmp_path):
    async def work(server):
        config = EndpointConfig(url=server.url, model="m", max_calls=2)
        await closed_book_solver(Endpoint(config, tmp_path / "calls.jsonl"), 16)([LIMA, ODD], 4)

    with serving(lambda chat: "x") as server, pytest.raises(UserError, match="max_calls=2 is spe"):
        asyncio.run(work(server))


@pytest.mark.slow
def test_a_local_policy_gets_no_tool(tmp_path):
    """The tiny policy answers these questions from what its tools return, and from nothing else."""
    model = tiny_policy.policy()
    from coa_jax.model.api import save_model

    save_model(model, tmp_path / "policy")
    config = ClosedBookConfig(who="policy", policy=str(tmp_path / "policy"), samples=3)
    policy = PolicySolver(config)
    answers = asyncio.run(policy(tiny_policy.TASKS[:2], 3))
    assert [len(row) for row in answers] == [3, 3]
    alone = asyncio.run(policy(tiny_policy.TASKS[1:2], 3))
    assert alone == answers[1:]


def test_mistakes_of_the_user_are_explained():
    with pytest.raises(UserError, match="who is 'nobody'"):
        ClosedBookConfig(who="nobody")
    with pytest.raises(UserError, match=r"^policy is '' and who is 'policy'"):
        ClosedBookConfig(who="policy")
    with pytest.raises(UserError, match="max_rate"):
        ClosedBookConfig(max_rate=2.0)
