import asyncio

import pytest

from coa_jax.distill import DistillConfig
from coa_jax.distill.economy import economy, team_tokens
from coa_jax.distill.export import prompt_of
from coa_jax.distill.pipeline import as_run, run_teacher
from coa_jax.tasks.base import Task
from tests.distill.logs import log_of

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


def test_only_solved_questions_count():
    task = Task("e", "Q?", "generalist", ("Lima",), "test")
    wrong = as_run(task, log_of(("plan", "w"), ("answer", "Quito")))
    assert economy([wrong], TOOLS, words, lambda run: "Q?")["questions"] == 0
    right = as_run(
        task, log_of(("plan", "a b"), ("call", "c d"), ("observation", "e"), ("answer", "Lima"))
    )
    told = economy([wrong, right], TOOLS, words, lambda run: "one two")
    asked, replied = team_tokens(right.log, TOOLS, words)
    assert told["questions"] == 1
    assert (told["team_prompt"], told["team_completion"]) == (asked, replied)
    assert told["trajectory"] == 2 + words(right.record.text)
    assert told["saved"] == pytest.approx(1 - told["trajectory"] / (asked + replied))


def test_one_trajectory_costs_a_fraction_of_the_team(tools, factbook_tasks):
    logs = asyncio.run(run_teacher(factbook_tasks, tools, DistillConfig()))
    runs = [as_run(task, log) for task, log in zip(factbook_tasks, logs, strict=True)]
    told = economy(runs, list(tools), words, lambda run: prompt_of(run.record, "full"))
    assert told["questions"] > 100
    assert told["saved"] > 0.5
