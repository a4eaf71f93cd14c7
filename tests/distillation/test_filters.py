import dataclasses
import re
from pathlib import Path

import pytest

from coa_jax.config.overrides import check_key
from coa_jax.distillation.dataset import statistics_of
from coa_jax.distillation.filters import (
    SETTINGS,
    copies,
    first_failure,
    plain_share,
    quality_filters,
)
from coa_jax.distillation.pipeline import as_run
from coa_jax.distillation.random_numbers import uniform
from coa_jax.run.command import load_config
from coa_jax.tasks.base import Task
from tests.distillation.logs import log_of

TASK = Task("e", "What is the capital of Peru?", "generalist", ("Lima",), "test")
START = [("plan", "1. look"), ("call", "capital of Peru"), ("observation", "Lima.")]
END = [("suggestion", "Lima"), ("verdict", "4"), ("answer", "Lima")]
GOOD = log_of(*START, *END)


def failure(log, task=TASK, **settings):
    return first_failure(as_run(task, log), quality_filters(**{"max_chars": 2000, **settings}))


def test_a_run_without_a_double_check_or_with_few_messages_is_dropped():
    assert failure(log_of(*START, ("answer", "Lima"))) == "protocol"
    assert failure(GOOD, min_interactions=8) == "too_simple"
    assert failure(GOOD, min_interactions=7) is None


def test_the_same_arguments_to_two_tools_are_no_repetition():
    program = "```py\nprint(1)\n```"
    calls = [
        ("call", program, "", "code"),
        ("observation", "[EXECUTED]\n1", "", "code"),
        ("call", program, "", "wiki_search"),
        ("observation", "Lima.", "", "wiki_search"),
    ]
    assert failure(log_of(START[0], *calls, *END)) is None


def test_a_program_with_another_indentation_is_no_repetition():
    def run(again):
        program = "```py\nfor i in range(3):\n    print(i)\nprint(9)\n```"
        rows = []
        for body in (program, again(program)):
            rows += [("call", body, "", "code"), ("observation", "[EXECUTED]\n0", "", "code")]
        return log_of(START[0], *rows, *END)

    assert failure(run(lambda text: text.replace("\nprint", "\n    print"))) is None
    assert failure(run(lambda text: text.replace(":\n", ":  \n") + "\n")) == "repeated_call"


def test_the_answer_of_the_code_protocol_is_read_from_its_box():
    task = Task("e", "6 * 7?", "code", ("42",), "test")
    rows = [
        ("plan", "1. compute"),
        ("call", "```py\nprint(6 * 7)\n```", "", "code"),
        ("observation", "[EXECUTED]\n42", "", "code"),
        ("reflection", "As expected."),
    ]
    assert failure(log_of(*rows, ("answer", "\\boxed{42}"), protocol="code"), task) is None
    assert (
        failure(log_of(*rows, ("answer", "\\boxed{41}"), protocol="code"), task) == "wrong_answer"
    )


def test_plain_runs_are_thinned_and_reflective_ones_kept():
    share = plain_share(0.3, seed=1)
    runs = [as_run(dataclasses.replace(TASK, id=f"t{i}"), GOOD) for i in range(500)]
    kept = [run.task.id for run in runs if share.keeps(run)]
    assert 100 < len(kept) < 200
    assert kept == [run.task.id for run in runs if share.keeps(run)]
    assert not any(plain_share(0.0, 1).keeps(run) for run in runs)
    assert all(plain_share(1.0, 1).keeps(run) for run in runs)
    low = [("suggestion", "Quito"), ("verdict", "1"), ("plan", "1. again")]
    assert plain_share(0.0, 1).keeps(as_run(TASK, log_of(*START, *low, *END)))


def test_a_corrected_run_may_count_more_than_once():
    low = [("suggestion", "Quito"), ("verdict", "1"), ("plan", "1. again")]
    corrected = as_run(TASK, log_of(*START, *low, *END))
    assert [record.id for record in copies(corrected, 3)] == ["e", "e#2", "e#3"]
    assert [record.id for record in copies(as_run(TASK, GOOD), 3)] == ["e"]
    assert statistics_of([corrected.record])["with_correction"] == 1


@pytest.mark.parametrize(
    ("first", "score"),
    [("Lima", "1"), (" Lima\n", "2"), ("Quito", "4"), ("Quito", "3"), ("Quito", "so-so")],
)
def test_a_second_check_alone_is_no_correction(first, score):
    rows = [("suggestion", first), ("verdict", score), ("plan", "1. again")]
    run = as_run(TASK, log_of(*START, *rows, *END))
    assert [record.id for record in copies(run, 2)] == ["e"]
    assert not plain_share(0.0, 1).keeps(run)
    assert statistics_of([run.record])["with_correction"] == 0


def test_chance_is_uniform_and_depends_on_every_argument():
    draws = [uniform(0, f"t{i}", "query/1") for i in range(2000)]
    assert all(0 <= u < 1 for u in draws)
    assert abs(sum(draws) / len(draws) - 0.5) < 0.03
    base = uniform(0, "t", "a")
    assert base == uniform(0, "t", "a")
    assert len({base, uniform(1, "t", "a"), uniform(0, "u", "a"), uniform(0, "t", "b")}) == 4


def test_the_message_names_the_documented_setting_of_each_filter():
    page = (Path(__file__).parents[2] / "docs" / "distillation.md").read_text()
    rows = re.findall(r"^\| (`[a-z_`, ]+`) \| .* \|(.*)\|$", page, re.MULTILINE)
    settings = dict(rows)
    config = load_config("configs/distill/factbook.py")
    for name, setting in SETTINGS.items():
        row = next(row for row in settings if f"`{name}`" in row)
        assert setting in settings[row] or setting.startswith("judges."), name
        check_key(config, f"teacher.{setting}".removesuffix(".url"))
