import asyncio
import dataclasses
import random

import pytest

from coa_jax.distillation.journal import open_journal
from coa_jax.distillation.messages import AGENTS
from coa_jax.distillation.pipeline import DistillConfig, graded_runs, run_teacher, teacher_block
from coa_jax.errors import UserError
from tests.distillation.logs import distill_tasks
from tests.distillation.small_team import TASKS, TEAM


@pytest.fixture(scope="module")
def config():
    return DistillConfig(team=TEAM, mistake_rate=0.4, unrecovered_rate=0.2)


@pytest.fixture(scope="module")
def distilled(tools, config):
    return distill_tasks(TASKS, tools, config)


def graded(tasks, tools, config):
    logs = asyncio.run(run_teacher(tasks, tools, config))
    return graded_runs(tasks, logs, config.judges)


def test_records_and_report_add_up(distilled):
    records, report = distilled
    assert report.total == len(TASKS)
    assert report.kept == len(records)
    assert report.kept + sum(report.dropped.values()) == report.total
    assert report.dropped["wrong_answer"] > 0
    assert report.kept > 0.7 * report.total


def test_records_stand_in_the_order_of_the_tasks(distilled):
    ids = [record.id for record in distilled[0]]
    assert ids == [task.id for task in TASKS if task.id in set(ids)]


def test_records_carry_what_learning_needs(distilled):
    tasks = {task.id: task for task in TASKS}
    for record in distilled[0]:
        task = tasks[record.id]
        assert (record.question, record.gold) == (task.question, task.gold)
        assert record.metadata["hops"] == task.metadata["hops"]
        assert record.metadata["source"] == "small"
        assert record.parts[0][0] == record.parts[-1][0] == "policy"
        assert record.text.endswith(f"<answer>{record.answer}</answer>")


@pytest.mark.slow
def test_results_depend_neither_on_order_nor_on_concurrency(tools, distilled):
    shuffled = list(TASKS)
    random.Random(1).shuffle(shuffled)
    one = DistillConfig(team=TEAM, mistake_rate=0.4, unrecovered_rate=0.2, concurrency=1)
    records, report = distill_tasks(shuffled, tools, one)
    assert sorted(records, key=lambda r: r.id) == sorted(distilled[0], key=lambda r: r.id)
    # The example of a filter is the first run that it drops, so it depends on the order.
    first, second = (dataclasses.replace(r, examples={}) for r in (report, distilled[1]))
    assert first == second


@pytest.mark.slow
def test_the_teacher_is_measured_without_filters(tools, config, distilled):
    runs = graded(TASKS, tools, config)
    block = teacher_block(runs, count_tokens=lambda text: len(text.split()))
    wrong = distilled[1].dropped["wrong_answer"] + distilled[1].dropped["unanswered"]
    assert block["n"] == len(TASKS)
    assert block["pass_at_1"] == pytest.approx(1 - wrong / block["n"])
    assert block["ci95"][0] < block["pass_at_1"] < block["ci95"][1]
    assert block["tool_calls_per_task"] > 1.5
    assert block["tokens_per_task"] > 30
    assert block["format_valid"] >= block["pass_at_1"]
    assert block["faults"] == 0


def test_runs_on_a_broken_tool_are_counted_and_not_graded(config):
    class Broken:
        name, deadline = "wiki_search", 5.0

        async def __call__(self, arguments, context):
            raise OSError("gone")

    tasks = TASKS[:5]
    records, report = distill_tasks(tasks, {"wiki_search": Broken()}, config)
    assert records == []
    assert report.dropped["tool_fault"] == 5
    block = teacher_block(graded(tasks, {"wiki_search": Broken()}, config))
    assert (block["n"], block["faults"], block["pass_at_1"]) == (0, 5, None)


def test_token_counts_are_left_open_without_a_counter(tools, config):
    runs = graded(TASKS[:3], tools, config)
    assert teacher_block(runs)["tokens_per_task"] is None


def test_existing_runs_are_not_made_again(tools, config, tmp_path):
    tasks = TASKS[:6]
    logs = asyncio.run(run_teacher(tasks, tools, config))
    path, finished = tmp_path / "journal.jsonl", []
    for log in logs[:4]:
        open_journal(path, {}).append(log)
    again = asyncio.run(
        run_teacher(tasks, tools, config, journal=open_journal(path, {}), on_done=finished.append)
    )
    assert again == logs
    assert finished == [5, 6]
    assert open_journal(path, {}).done == {log.episode: log for log in logs}


def test_a_run_on_another_question_of_the_same_id_is_made_again(tools, config, tmp_path):
    journal = open_journal(tmp_path / "journal.jsonl", {})
    first, second = TASKS[:2]
    asyncio.run(run_teacher([first], tools, config, journal=journal))
    changed = dataclasses.replace(second, id=first.id)
    (log,) = asyncio.run(run_teacher([changed], tools, config, journal=journal))
    assert log.question == second.question


def test_mistakes_of_the_user_are_explained(tools, config):
    with pytest.raises(UserError, match=r"mistake_rate is 1\.5"):
        DistillConfig(mistake_rate=1.5)
    with pytest.raises(UserError, match="concurrency is 0"):
        DistillConfig(concurrency=0)
    with pytest.raises(UserError, match=f"^teacher: 1 task ids .*'{TASKS[0].id}'"):
        distill_tasks(TASKS[:1] * 2, tools, config)
    agents = dict.fromkeys(AGENTS[:-1], config.agents()["manager"])
    with pytest.raises(UserError, match=r"^teacher: .* verification; "):
        distill_tasks(TASKS[:1], tools, config, agents=agents)


def test_no_tasks_give_no_records(tools, config):
    records, report = distill_tasks([], tools, config)
    assert (records, report.total) == ([], 0)
