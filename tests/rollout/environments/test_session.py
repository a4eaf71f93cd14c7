"""Environments in the agent loop: turns, rewards, ends, faults, and what replays need."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import json
import threading
import time

import pytest

from coa_jax.data.trajectory import Author, StopReason, Trajectory, format_valid
from coa_jax.engine.config import EngineConfig, SamplingParams
from coa_jax.engine.engine import Engine
from coa_jax.errors import UserError
from coa_jax.model.tokenizer import decode_ids, eos_ids
from coa_jax.rollout.collect import collect
from coa_jax.rollout.environments import EnvironmentConfig, Step
from coa_jax.rollout.environments.session import graded_by_environment
from coa_jax.rollout.replay import recording, replay
from coa_jax.rollout.request import RolloutConfig
from coa_jax.tasks import grade
from coa_jax.tools.base import ToolContext
from tests.rollout.environments import guesser
from tests.rollout.environments.guesser import TASK, environments, request

SHAPES = EngineConfig(slots=4, max_length=192, chunk=8, extend_buckets=(64,))
BUDGET = RolloutConfig(max_tokens=192, max_tool_calls=6, max_turn_tokens=12)
HOT = SamplingParams(temperature=1.0)
MESSAGES = [["user", "Guess my number. It is from 1 to 9."]]


@functools.cache
def engine() -> Engine:
    model = guesser.policy()
    return Engine(model.params, model.config, SHAPES, eos_ids(model.tokenizer))


def run(*requests, config=BUDGET, tools=()) -> list[Trajectory]:
    with asyncio.Runner() as runner:
        tokenizer = guesser.policy().tokenizer
        groups = collect(runner, engine(), tokenizer, requests, tools, config)
    return [trajectory for group in groups for trajectory in group]


@functools.cache
def games() -> tuple[Trajectory, ...]:
    made = environments()
    return tuple(run(*(request(made, 4, HOT, number) for number in range(3))))


def test_an_environment_answers_whole_turns_and_ends_the_episode():
    ended = [t for t in games() if t.stop_reason == StopReason.ENVIRONMENT]
    assert len(ended) >= 6
    for t in ended:
        assert [call.done for call in t.tool_calls] == [False] * (len(t.tool_calls) - 1) + [True]
        assert all(call.tool == "turn" and call.ok for call in t.tool_calls)
        text = decode_ids(guesser.policy().tokenizer, t.tokens)
        assert text.startswith(f"<|im_start|>user\n{MESSAGES[0][1]}<|im_end|>\n")
        for call in t.tool_calls[:-1]:
            reply = f"<|im_end|>\n<|im_start|>user\n{call.observation}<|im_end|>\n"
            assert f"{call.arguments}{reply}<|im_start|>assistant\n" in text
        assert t.metadata["begun"]["messages"] == MESSAGES
        assert format_valid(t)
    lengths = {len(t.tool_calls) for t in ended}
    assert len(lengths) > 1


def test_a_turn_in_a_format_of_turns_is_not_the_end():
    asked = [request(environments(), 4, HOT, number) for number in range(3)]
    tasks = [dataclasses.replace(TASK, protocol="turns:hermes")] * 3
    played = run(*(dataclasses.replace(r, task=t) for r, t in zip(asked, tasks, strict=True)))
    for one, other in zip(played, games(), strict=True):
        assert one.stop_reason == other.stop_reason
        assert one.tokens.tolist() == other.tokens.tolist()
        assert [call.tool for call in one.tool_calls] == ["turn"] * len(other.tool_calls)


def test_the_policy_writes_its_turns_and_the_environment_the_replies():
    tokenizer = guesser.policy().tokenizer
    for t in games():
        written = t.author == Author.POLICY
        said = [call.arguments + "<|im_end|>" for call in t.tool_calls]
        if t.stop_reason == StopReason.ENVIRONMENT:
            assert decode_ids(tokenizer, t.tokens[written]) == "".join(said)
        assert (t.logp[~written] == 0).all()


def test_rewards_of_turns_are_the_reward():
    for t in games():
        rewards = [call.reward for call in t.tool_calls]
        assert all(reward in (1.0, 0.1, -0.1) for reward in rewards)
        assert grade(TASK, t).value == pytest.approx(sum(rewards))


def test_a_trajectory_comes_back_from_json():
    for t in games():
        back = Trajectory.from_json(json.loads(json.dumps(t.to_json())))
        assert back.tool_calls == t.tool_calls
        assert back.stop_reason == t.stop_reason


def test_a_replay_needs_no_environment():
    found = replay(guesser.policy(), [recording(t) for t in games()])
    assert [comparison.identical for comparison in found] == [True] * len(games())
    assert all((c.recorded.logp == c.replayed.logp).all() for c in found)


def test_the_same_seed_gives_the_same_games():
    made = environments()
    again = run(*(request(made, 4, HOT, number) for number in range(3)))
    assert [t.tokens.tolist() for t in again] == [t.tokens.tolist() for t in games()]


# --- what goes wrong -----------------------------------------------------------------------


class Base:
    closed = 0

    def reset(self, task):
        return MESSAGES

    def step(self, turn):
        return "It is larger.", 0.1, False

    def close(self):
        type(self).closed += 1


class Raises(Base):
    def step(self, turn):
        raise RuntimeError("the game is lost")


class LosesItsPool(Base):
    def step(self, turn):
        raise concurrent.futures.CancelledError("the pool has ended")


class Hangs(Base):
    over = threading.Event()

    def step(self, turn):
        self.over.wait(600)


class HangsAsync(Base):
    async def step(self, turn):
        await asyncio.sleep(600)


class FailsToBegin(Base):
    def reset(self, task):
        raise OSError("no board")


class FailsToClose(Base):
    def step(self, turn):
        return Step("That is it.", 1.0, done=True)

    def close(self):
        raise OSError("the board is stuck")


class GivesNonsense(Base):
    def step(self, turn):
        return "It is larger."


class BeginsWithNonsense(Base):
    def reset(self, task):
        return 5


class RewardsNotANumber(Base):
    def step(self, turn):
        return "x", float("nan"), False


class NoEnvironment:
    pass


def one(kind, **settings) -> Trajectory:
    (found,) = run(request(environments(f"{__name__}:{kind.__name__}", **settings), 1))
    return found


@pytest.mark.parametrize("kind", [Raises, LosesItsPool, Hangs, HangsAsync, FailsToBegin])
def test_an_environment_that_fails_masks_its_trajectory(kind, caplog):
    engine()
    Hangs.over.clear()
    start = time.monotonic()
    found = one(kind, deadline_s=0.5)
    assert time.monotonic() - start < 120
    Hangs.over.set()
    assert found.stop_reason == StopReason.FAULT
    call = found.tool_calls[-1]
    assert (call.outcome, call.tool) == ("fault", "reset" if kind is FailsToBegin else "turn")
    why = {Raises: "the game is lost", LosesItsPool: "the pool has ended", FailsToBegin: "no board"}
    assert why.get(kind, "no result within 0.5") in call.detail["exception"]
    assert grade(TASK, found).value is None
    assert f"{kind.__name__}: its {'reset' if kind is FailsToBegin else 'step'} failed" in (
        caplog.text
    )


def test_a_close_that_fails_is_told_and_nothing_else(caplog):
    found = one(FailsToClose)
    assert (found.stop_reason, grade(TASK, found).value) == (StopReason.ENVIRONMENT, 1.0)
    assert "its close failed (OSError: the board is stuck)" in caplog.text


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (GivesNonsense, r"GivesNonsense gave 'It is larger\.' .* Step or"),
        (RewardsNotANumber, r"RewardsNotANumber gave \('x', nan, False\) .* Step or"),
        (BeginsWithNonsense, "gave 5 .int.; an environment gives a text, or messages"),
        (NoEnvironment, r"NoEnvironment gave .* reset\(task\) and step\(turn\)"),
    ],
)
def test_what_is_no_environment_ends_the_run_with_one_line(kind, message):
    with pytest.raises(UserError, match=message) as told:
        one(kind)
    assert "\n" not in str(told.value)


def test_every_environment_is_closed():
    for kind in (Base, Raises):
        kind.closed = 0
        run(request(environments(f"{__name__}:{kind.__name__}"), 3), config=BUDGET)
        assert kind.closed == 3


class BeginsLate(Base):
    may_begin, was_closed = threading.Event(), threading.Event()

    def __init__(self):
        self.may_begin.wait(60)

    def close(self):
        self.was_closed.set()


class BeginsLateAndClosesAsync(BeginsLate):
    may_begin, was_closed = threading.Event(), threading.Event()

    async def close(self):
        self.was_closed.set()


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("kind", [BeginsLate, BeginsLateAndClosesAsync])
def test_an_environment_that_is_made_after_its_deadline_is_closed(kind, waits):
    kind.may_begin.clear()
    kind.was_closed.clear()
    made = environments(f"{__name__}:{kind.__name__}", deadline_s=0.5)

    async def episode():
        session = made.opener(TASK, 7, 0, (0,))(0, {})
        seen = await session.reset(ToolContext())
        if waits:  # the creation ends while the session is being closed
            asyncio.get_running_loop().call_later(0.1, kind.may_begin.set)
        await session.close()
        return seen

    assert asyncio.run(episode()).outcome == "fault"
    kind.may_begin.set()
    assert kind.was_closed.wait(20)


class HangsWithoutClose:
    over = threading.Event()

    def reset(self, task):
        return MESSAGES

    def step(self, turn):
        self.over.wait(600)


def test_an_environment_without_close_is_not_waited_for(caplog):
    engine()
    HangsWithoutClose.over.clear()
    assert one(HangsWithoutClose, deadline_s=0.5).stop_reason == StopReason.FAULT
    HangsWithoutClose.over.set()
    assert "its step failed" in caplog.text and "its close failed" not in caplog.text


def test_turns_end_at_their_number():
    found = run(request(environments(f"{__name__}:Base"), 1))[0]
    assert found.stop_reason in (StopReason.TURNS, StopReason.LENGTH)
    assert len(found.tool_calls) <= BUDGET.max_tool_calls


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("guess:Gess", {}, "has no 'Gess'; did you mean 'Guess'"),
        ("guess:Guess", {"largst": 5}, "has no option 'largst'; did you mean 'largest'"),
        ("guess:Guess", {"largest": "many"}, "the option largest of guess:Guess is 'many'"),
        ("chess", {}, "there is no environment 'chess'"),
    ],
)
def test_a_wrong_name_or_option_is_one_line(path, options, message):
    with pytest.raises(UserError, match=message):
        environments(path, **options)


class WithTags(Base):
    tools = {"guess": "Guess a number."}  # noqa: RUF012


def test_tasks_need_a_protocol_that_has_the_tags():
    config = EnvironmentConfig(f"{__name__}:WithTags")
    with pytest.raises(
        UserError, match=r"^config\.environment: .* guess, .* turns .*config\.tools\.protocol"
    ):
        graded_by_environment(config, [TASK])


def test_a_policy_behind_an_endpoint_is_refused():
    from coa_jax.evaluation.config import EvaluateRun
    from coa_jax.run.command import load_config
    from coa_jax.run.settings import build_config

    config = load_config("configs/evaluate/tiny.py")
    config.environment.path = "guess:Guess"
    config.endpoint.url, config.endpoint.model = "http://localhost:1/v1", "m"
    with pytest.raises(UserError, match=r"environment and endpoint are set"):
        build_config(EvaluateRun, config)


def test_a_constraint_needs_tags():
    from coa_jax.rollout.constrain import constraint_for

    with pytest.raises(UserError, match="a task has the protocol turns"):
        constraint_for(RolloutConfig(constrain=True), None, 9, ["turns"])
