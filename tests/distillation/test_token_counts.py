import asyncio

import numpy as np
import pytest

from coa_jax.data.trajectory import Author, Reward, StopReason, Trajectory
from coa_jax.distillation.export import prompt_of
from coa_jax.distillation.pipeline import DistillConfig, as_run, run_teacher
from coa_jax.distillation.token_counts import (
    compare_policy_tokens,
    compare_tokens,
    resent_tokens,
    team_tokens,
)
from coa_jax.tasks.base import Task
from tests.distillation.logs import log_of
from tests.distillation.small_team import TASKS, TEAM

TOOLS = ("wiki_search", "code")


def words(text):
    return len(text.split())


def test_every_agent_pays_for_what_was_said_before_it():
    short = log_of(("plan", "w"), ("answer", "w"))
    longer = log_of(("plan", " ".join("w" * 100)), ("answer", "w"))
    asked, replied = team_tokens(short, TOOLS, words)
    more_asked, more_replied = team_tokens(longer, TOOLS, words)
    # The plan is written once, and read once by the manager who answers.
    assert (more_asked - asked, more_replied - replied) == (99, 99)
    observed = log_of(("plan", "w"), ("call", "q"), ("observation", "w " * 50), ("answer", "w"))
    empty = log_of(("plan", "w"), ("call", "q"), ("observation", ""), ("answer", "w"))
    assert team_tokens(observed, TOOLS, words)[0] - team_tokens(empty, TOOLS, words)[0] == 50
    assert team_tokens(observed, TOOLS, words)[1] == team_tokens(empty, TOOLS, words)[1]


def test_the_team_pays_only_for_tools_that_the_protocol_has_a_tag_for():
    rows = ("plan", "w"), ("call", "q"), ("observation", "w"), ("answer", "w")
    log = log_of(*rows, protocol="mhqa")
    more = team_tokens(log, ("web_search", "wiki_search"), words)
    assert more == team_tokens(log, ("wiki_search",), words)


def test_only_solved_questions_count():
    task = Task("e", "Q?", "generalist", ("Lima",), "test")
    wrong = as_run(task, log_of(("plan", "w"), ("answer", "Quito")))
    assert compare_tokens([wrong], TOOLS, words)["questions"] == 0
    right = as_run(
        task, log_of(("plan", "a b"), ("call", "c d"), ("observation", "e"), ("answer", "Lima"))
    )
    told = compare_tokens([wrong, right], TOOLS, words)
    asked, replied = team_tokens(right.log, TOOLS, words)
    assert told["questions"] == 1
    assert (told["team_prompt"], told["team_completion"]) == (asked, replied)
    assert told["trajectory"] == words(prompt_of(right.record)) + words(right.record.text)
    assert told["saved"] == pytest.approx(1 - told["trajectory"] / (asked + replied))


def test_one_trajectory_costs_a_fraction_of_the_team(tools):
    logs = asyncio.run(run_teacher(TASKS, tools, DistillConfig(team=TEAM)))
    runs = [as_run(task, log) for task, log in zip(TASKS, logs, strict=True)]
    told = compare_tokens(runs, list(tools), words)
    assert told["questions"] > 50
    assert told["saved"] > 0.5


# --- a trained policy ------------------------------------------------------------------------


def policy_trace(name, prompt, *turns, right=True):
    """A trajectory of (tokens of the policy, tokens of the tool) after a prompt."""
    author = [Author.PROMPT] * prompt
    for written, returned in turns:
        author += [Author.POLICY] * written + [Author.ENVIRONMENT] * returned
    nothing = np.zeros(len(author))
    return Trajectory(
        name, 0, "Q?", "generalist", nothing, np.array(author), nothing, "", (), (),
        StopReason.ANSWER, None if right is None else Reward(float(right)), ("Lima",),
    )  # fmt: skip


def test_a_turn_pays_for_all_that_came_before_it_when_prompts_are_sent_again():
    # Calls of 10 + 4, 10 + 4 + 6 + 3 and 10 + 4 + 6 + 3 + 5 + 2 tokens.
    assert resent_tokens(policy_trace("e", 10, (4, 6), (3, 5), (2, 0))) == 14 + 23 + 30
    assert resent_tokens(policy_trace("e", 10, (4, 0))) == 14
    assert resent_tokens(policy_trace("e", 10, (4, 6))) == 14
    assert resent_tokens(policy_trace("e", 10)) == 0


def test_policy_and_team_are_compared_on_what_both_solved_and_over_all_attempts():
    def run(name, answer):
        task = Task(name, "Q?", "generalist", ("Lima",), "test")
        return as_run(task, log_of(("plan", "w " * 30), ("answer", answer), episode=name))

    runs = {"a": run("a", "Lima"), "b": run("b", "Quito"), "c": run("c", "Lima")}
    team = {name: sum(team_tokens(r.log, TOOLS, words)) for name, r in runs.items()}
    traces = [
        policy_trace("a", 10, (4, 6), (2, 0)),  # 22 tokens, 14 + 22 if sent again
        policy_trace("b", 10, (3, 0)),  # 13; solved by the policy alone
        policy_trace("c", 10, (5, 0), right=False),  # 15; by the team alone
        policy_trace("c", 10, (1, 0)),  # 11
        policy_trace("c", 10, (1, 0), right=None),
    ]
    told = compare_policy_tokens(runs, traces, TOOLS, words)
    assert (told["samples"], told["left_out"]) == (4, 1)
    assert (told["team"]["success"], told["policy"]["success"]) == (0.75, 0.75)
    both = told["both_solved"]
    assert (both["samples"], both["policy"], both["policy_resent"]) == (2, 16.5, 23.5)
    assert both["team"] == (team["a"] + team["c"]) / 2
    assert both["policy_written"] == 3.5
    assert told["policy"]["tokens_per_solved"] == (22 + 13 + 15 + 11) / 3
    assert told["team"]["tokens_per_solved"] == (team["a"] + team["b"] + 2 * team["c"]) / 3
    assert told["saved"]["both_solved"] == pytest.approx(1 - 16.5 / both["team"])
    # Sent again: 14 + 22, 13, 15 and 11 tokens.
    assert told["policy"]["resent_per_solved"] == (36 + 13 + 15 + 11) / 3
    assert told["saved"]["per_solved"] == pytest.approx(
        1 - told["policy"]["tokens_per_solved"] / told["team"]["tokens_per_solved"]
    )


def test_nothing_is_said_of_savings_where_nothing_was_solved_by_both():
    task = Task("a", "Q?", "generalist", ("Lima",), "test")
    runs = {"a": as_run(task, log_of(("plan", "w"), ("answer", "Quito"), episode="a"))}
    told = compare_policy_tokens(runs, [policy_trace("a", 10, (4, 0))], TOOLS, words)
    assert "saved" not in told
    assert told["team"]["tokens_per_solved"] is None
