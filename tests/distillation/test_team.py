import asyncio
import dataclasses

import pytest

from coa_jax.distillation.agent_functions import Action
from coa_jax.distillation.convert import convert
from coa_jax.distillation.messages import AGENTS, Ending, Kind
from coa_jax.distillation.team import solve, tools_of
from coa_jax.tools.base import Observation


@dataclasses.dataclass
class Playback:
    """An agent function that says what it was given, in order."""

    actions: list

    async def __call__(self, view):
        action = self.actions.pop(0)
        if isinstance(action, Exception):
            raise action
        return action


def run(tools, limit=80, protocol="generalist", **actions):
    agents = {role: Playback(list(actions.get(role, []))) for role in AGENTS}
    return asyncio.run(solve("Q?", protocol, "e", agents, tools, limit))


ASK = Action("search", Kind.REQUEST, "Look.")
SEARCH = Action("wiki_search", Kind.CALL, "capital of Peru", "I search.")
REPORT = Action("manager", Kind.REPORT, "Lima.")
ANSWER = Action("user", Kind.ANSWER, "Lima")


def test_messages_pass_between_agents_and_a_real_tool(tools):
    log = run(tools, manager=[ASK, ANSWER], search=[SEARCH, REPORT])
    route = [(m.sender, m.recipient) for m in log.messages]
    assert route == [
        ("user", "manager"),
        ("manager", "search"),
        ("search", "wiki_search"),
        ("wiki_search", "search"),
        ("search", "manager"),
        ("manager", "user"),
    ]
    assert "The capital of Peru is Lima." in log.messages[3].content
    assert [m.index for m in log.messages] == list(range(6))
    assert (log.ending, log.answer) == (Ending.ANSWER, "Lima")


def test_a_tool_is_told_about_earlier_calls(tools):
    log = run(tools, manager=[ASK, ASK, ANSWER], search=[SEARCH, REPORT, SEARCH, REPORT])
    repeated = log.messages[7]
    assert repeated.outcome == "error"
    assert "already searched" in repeated.content


def test_an_agent_may_not_leave_its_role(tools):
    log = run(tools, manager=[ASK], search=[ANSWER])
    assert (log.ending, log.answer) == (Ending.ILLEGAL, None)
    assert "search may not send answer to user" in log.error


@pytest.mark.parametrize("name", ["code", "tool", "nothing"])
def test_an_agent_may_only_call_its_own_tool(tools, name):
    log = run(tools, manager=[ASK], search=[Action(name, Kind.CALL, "```py\nprint(1)\n```")])
    assert log.ending is Ending.ILLEGAL


def test_an_agent_may_only_call_a_tool_that_the_protocol_has_a_tag_for(tools):
    program = Action("code", Kind.CALL, "```py\nprint(1)\n```")
    actions = {
        "manager": [Action("code", Kind.REQUEST, "Compute."), ANSWER],
        "code": [program, REPORT],
    }
    assert run(tools, **actions).ending is Ending.ANSWER
    log = run(tools, protocol="web_wiki", **actions)
    assert (log.ending, log.calls) == (Ending.ILLEGAL, ())
    assert convert(log, "web_wiki").answer == ""  # a run with an untagged call has no trajectory
    assert tools_of("search", "mhqa", ("web_search", "wiki_search", "code")) == ("wiki_search",)


def test_a_mind_that_raises_ends_only_its_run(tools):
    log = run(tools, manager=[ValueError("no idea")])
    assert log.ending is Ending.MIND_ERROR
    assert log.error == "manager: ValueError: no idea"


def test_a_run_without_end_is_given_up(tools):
    log = run(tools, limit=21, manager=[ASK] * 50, search=[REPORT] * 50)
    assert (log.ending, log.answer) == (Ending.LIMIT, None)
    assert len(log.messages) == 21


def test_a_broken_tool_is_a_message_and_not_a_crash():
    class Broken:
        name, deadline = "wiki_search", 5.0

        async def __call__(self, arguments, context) -> Observation:
            raise OSError("disk gone")

    log = run({"wiki_search": Broken()}, manager=[ASK, ANSWER], search=[SEARCH, REPORT])
    assert log.messages[3].outcome == "fault"
    assert log.ending is Ending.ANSWER
