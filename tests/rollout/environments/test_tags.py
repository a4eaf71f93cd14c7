"""An environment whose actions are tags of the protocol, in addition to the run's tools."""

from __future__ import annotations

import asyncio
import dataclasses
import functools

from coa_jax.data.trajectory import Author, StopReason, format_valid
from coa_jax.protocol import Prompt, get_protocol
from coa_jax.rollout.environments import EnvironmentConfig, Step
from coa_jax.rollout.environments.session import Environments
from coa_jax.rollout.replay import recording, replay
from coa_jax.tasks import grade
from coa_jax.tools.base import ToolContext, call_tool
from coa_jax.tools.make import ToolsConfig, make_tools
from tests import tiny_policy
from tests.rollout.small_loop import requests, run

SEEN: list[list[tuple[str, str, int]]] = []


class Library:
    """Answers searches itself, counts them, and grades the answer by the state."""

    tools = {"wiki_search": "Ask the librarian."}  # noqa: RUF012

    def __init__(self, task, patience: int = 9):
        self.task, self.patience, self.turns = task, patience, []
        SEEN.append(self.turns)

    async def reset(self, task):
        await asyncio.sleep(0)
        return task.question

    async def step(self, turn):
        self.turns.append((turn.tag, turn.text, turn.number))
        if turn.tag == "answer":
            return "", float(turn.text in self.task.gold), False
        found = await call_tool(tiny_policy.tools()["wiki_search"], turn.text, ToolContext())
        return Step(found.text, 0.25, done=len(self.turns) >= self.patience)


@functools.cache
def solved(patience: int = 9):
    environments = Environments(
        EnvironmentConfig(f"{__name__}:Library", {"patience": patience}), Prompt("brief")
    )
    SEEN.clear()
    wanted = [
        dataclasses.replace(
            one,
            prompt=(),
            task=dataclasses.replace(one.task, metadata={"grader": "environment"}),
            environment=environments.opener(one.task, 7, one.prompt_id, one.samples),
        )
        for one in requests()
    ]
    return wanted, [group[0] for group in run(wanted)], [list(turns) for turns in SEEN]


def test_tags_and_the_answer_are_steps():
    wanted, trajectories, seen = solved()
    first = trajectories[0]
    assert first.stop_reason == StopReason.ANSWER
    assert [(c.tool, c.reward) for c in first.tool_calls] == [("wiki_search", 0.25), ("answer", 1)]
    assert tiny_policy.PASSAGES[0].text in first.tool_calls[0].observation
    assert [("wiki_search", "river Norrland", 0), ("answer", "Ume", 1)] in seen
    assert grade(wanted[0].task, first).value == 1.25
    assert format_valid(first)


def test_other_tags_are_tools_as_without_an_environment():
    _, trajectories, _ = solved()
    third = trajectories[2]
    assert [c.tool for c in third.tool_calls] == ["code", "answer"]
    assert third.tool_calls[0].reward is None and "84" in third.tool_calls[0].observation


def test_what_the_policy_is_asked_is_the_same_as_without_an_environment():
    _, trajectories, _ = solved()
    plain = [group[0] for group in run(requests())]
    for with_it, without in zip(trajectories, plain, strict=True):
        assert with_it.tokens.tolist() == without.tokens.tolist()
        assert (with_it.logp == without.logp).all()


def test_the_environment_can_end_the_episode_at_a_tag():
    _, trajectories, _ = solved(1)
    first = trajectories[0]
    assert first.stop_reason == StopReason.ENVIRONMENT
    assert first.tool_calls[-1].done
    assert first.author[-1] == Author.ENVIRONMENT  # the last observation is there to be seen


def test_a_replay_gives_what_the_environment_gave():
    for patience in (1, 9):
        found = replay(tiny_policy.policy(), [recording(t) for t in solved(patience)[1]])
        assert all(comparison.identical for comparison in found)


def test_a_protocol_over_tools_and_tags_of_the_environment():
    make_tools(ToolsConfig(names=(), protocol="guessing"), {"guess": "Guess a number."})
    assert get_protocol("guessing").tools == ("guess",)
    assert get_protocol("guessing").described == {"guess": "Guess a number."}
