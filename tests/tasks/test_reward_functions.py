"""Rewards with the signatures of TRL and verl."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from coa_jax.config.extensions import Reference
from coa_jax.data.trajectory import Author, SegmentSpan
from coa_jax.errors import UserError
from coa_jax.tasks import Graders, GradersConfig, Task
from coa_jax.tasks.graders import MAX_EXCEPTIONS
from coa_jax.tasks.question_rows import Columns, tasks_of_rows, without_answers
from tests.tasks.finished import finished

TASK = Task("t", "What is 12 * 34?", "web", ("408",), "sums", {"level": 3})


def of_columns(completions, answer, level, **kwargs):
    assert set(kwargs) == {"prompts"}
    return [n * float(g in text) for n, text, g in zip(level, completions, answer, strict=True)]


async def of_two_columns(prompts, completions):
    return [float(len(prompts) == len(completions) == 1)]


def of_verl(data_source, solution_str, ground_truth, extra_info=None):
    return extra_info["level"] * float(data_source == "sums" and ground_truth in solution_str)


def of_text_as_list(prompts, completions, answer):
    return [0.0 * len("".join(answer) + answer.upper())]  # answer is a list


def says_yes(completions):
    return ["yes"]


def of_ground_truth(completions, ground_truth, **kwargs):
    return [float(g in text) for g, text in zip(ground_truth, completions, strict=True)]


def graders(function) -> Graders:
    path = Reference(function, function.__name__)
    return Graders(GradersConfig(rewards={"own": {"path": path}}))


def graded(function, answer: str = "408") -> float | None:
    return graders(function)(TASK, finished(answer)).value


@pytest.mark.parametrize(
    ("function", "right", "wrong"),
    [(of_columns, 3.0, 0.0), (of_two_columns, 1.0, 1.0), (of_verl, 3.0, 0.0)],
)
def test_a_reward_of_another_library_gets_its_own_arguments(function, right, wrong):
    assert (graded(function), graded(function, "12")) == (right, wrong)


def test_a_reward_that_returns_a_string_is_refused():
    with pytest.raises(UserError, match=r"own.*'yes'.*a finite number"):
        graded(says_yes)


def test_a_reward_is_tried_before_a_run_and_its_errors_do_not_count_there():
    with pytest.raises(UserError, match=r"own.*'yes'.*a finite number"):
        graders(says_yes).check([TASK])

    answers = []

    def needs_an_answer(answer):
        answers.append(answer)
        return 1 / len(answer)

    checked = graders(needs_an_answer)
    checked.check([TASK])
    checked.check([TASK])
    assert answers == [""]
    assert graded(needs_an_answer, "408") == pytest.approx(1 / 3)


def test_observations_are_no_part_of_a_completion():
    silent = finished(None)
    last, text = silent.segments[-1].end, "<observation>408</observation>"
    spans = (*silent.segments, SegmentSpan("observation", Author.ENVIRONMENT, text, last, last))
    seen = dataclasses.replace(silent, segments=spans, text=silent.text + text)
    assert graders(of_columns)(TASK, seen).value == 0.0


@pytest.mark.parametrize("column", ["ground_truth", "solution", "label"])
def test_the_column_of_the_answer_reaches_a_reward_under_its_own_name(column):
    def reward(completions, **columns):
        return of_ground_truth(completions, columns[column])

    (task,) = tasks_of_rows(
        [{"prompt": "What is 12 * 34?", column: "408", "hint": "40"}],
        Columns({"answer": column} if column == "label" else {}, "", "", "web", "tasks"),
        graded=False,
    )
    checked = graders(reward)
    checked.check([task])
    assert [checked(task, finished(text)).value for text in ("408", "12")] == [1.0, 0.0]
    assert without_answers(task) == {"hint": "40"}  # as an agent program sees the task


def test_a_worked_answer_in_a_column_of_any_name_is_no_metadata():
    columns = Columns({"question": "q", "answer": "label"}, "####", "", "web", "tasks")
    row = {"q": "What is 12 * 34?", "label": "12 * 34 is so much #### 408", "hint": "40"}
    (task,) = tasks_of_rows([row], columns, graded=True)
    of_file = columns.reader("train")(row, 0)
    for one in (task, of_file):
        assert one.gold == ("408",)
        assert without_answers(one)["hint"] == "40"
        assert "#### 408" not in str(without_answers(one))


def test_a_column_that_a_reward_needs_and_a_task_lacks_is_named():
    with pytest.raises(UserError, match=r"of_ground_truth .*ground_truth.* t .*answer, level"):
        graders(of_ground_truth).check([TASK])


def test_a_reward_that_raises_for_every_trajectory_ends_the_run_and_says_where(caplog):
    every, line = graders(of_text_as_list), of_text_as_list.__code__.co_firstlineno + 1
    every.check([TASK])
    assert f"{__file__}:{line}" in caplog.text  # tried before the run
    masked = [every(TASK, finished("408")) for _ in range(MAX_EXCEPTIONS - 1)]
    assert {reward.value for reward in masked} == {None}
    with pytest.raises(UserError, match=rf"own .*AttributeError.*{__file__}:{line}"):
        every(TASK, finished("408"))


def of_digits(completions):
    return [float(completions[0].split(">")[-2].split("<")[0])]


def of_a_match(completions):  # raises StopIteration, which cannot be awaited
    return [next(1.0 for text in completions if "<answer>1<" in text)]


@pytest.mark.parametrize("function", [of_digits, of_a_match])
def test_a_reward_that_raises_for_some_trajectories_only_masks_them(function):
    every = graders(function)
    assert every(TASK, finished("1")).value == 1.0
    masked = [every(TASK, finished("one")) for _ in range(2 * MAX_EXCEPTIONS)]
    assert {reward.value for reward in masked} == {None}


def test_a_reward_of_the_group_that_raises_for_every_sample_ends_the_run():
    def compares(trajectories):
        return [trajectories[0].score] * len(trajectories)

    every, sample = graders(compares), finished("408")

    async def grade_group():
        alone = [await every.grade_alone(TASK, sample) for _ in range(MAX_EXCEPTIONS // 2)]
        return await every.grade_together(TASK, [sample] * len(alone), alone)

    assert {reward.value for reward in asyncio.run(grade_group())} == {None}
    with pytest.raises(UserError, match=r"own .*AttributeError"):
        asyncio.run(grade_group())
