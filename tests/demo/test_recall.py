import asyncio

import pytest

from coa_jax.demo.recall import remaining
from coa_jax.distillation.messages import Kind
from coa_jax.distillation.pipeline import DistillConfig, as_run, run_teacher
from coa_jax.errors import UserError
from coa_jax.tasks import load_tasks
from coa_jax.tools.make import ToolsConfig, make_tools

TASKS = "factbook:protocol=mhqa,weights=0/100/0/0,templates=1"
TEAM = "coa_jax.demo.recall:recalling_agents"


def runs_of(tasks, **settings):
    tools = {tool.name: tool for tool in make_tools(ToolsConfig(names=("wiki_search",)))}
    logs = asyncio.run(run_teacher(tasks, tools, DistillConfig(mistake_rate=0.0, **settings)))
    return [as_run(task, log) for task, log in zip(tasks, logs, strict=True)]


def test_a_team_that_remembers_a_fact_answers_without_searching_for_it():
    tasks = load_tasks(TASKS, "train", 20, 0)
    searched, recalled = runs_of(tasks), runs_of(tasks, team=TEAM)
    fewer = 0
    for task, before, after in zip(tasks, searched, recalled, strict=True):
        assert after.reward.value == before.reward.value == 1.0
        known = remaining(task.question) != task.question
        assert after.log.count(Kind.CALL) == before.log.count(Kind.CALL) - known
        fewer += known
    # It knows about 0.7 of the countries.
    assert 8 < fewer < 20


def test_questions_of_one_hop_and_of_other_kinds_are_not_remembered():
    for task in load_tasks("factbook:protocol=mhqa,hops=1", "train", 40, 0):
        assert remaining(task.question) == task.question
    assert remaining("Who are you?") == "Who are you?"


@pytest.mark.parametrize("team", ["nobody", "coa_jax.demo.recall:nobody"])
def test_a_team_that_does_not_exist_is_refused(team):
    with pytest.raises(UserError, match="nobody"):
        DistillConfig(team=team).agents()
