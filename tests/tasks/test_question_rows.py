"""Rows of any data set become tasks by a mapping of their columns."""

from __future__ import annotations

import json
import math

import datasets
import numpy as np
import pytest

from coa_jax.errors import UserError
from coa_jax.tasks import load_tasks
from coa_jax.tasks.question_rows import Columns, question_task, tasks_of_rows
from coa_jax.tasks.task_protocol import with_task_protocol
from tests.rows import write

ROWS = [
    {"problem": f" {i}+1? ", "solution": f"So it is. #### {i + 1}", "answers": {"text": ["x", "y"]},
     "level": i, "unique_id": f"n{i}", "track": "web", "other": None}
    for i in range(4)
]  # fmt: skip
MAPPING = {"question": "problem", "answer": "solution", "id": "unique_id", "hops": "level"}


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_a_mapping_reads_a_file(tmp_path, suffix):
    options = {"columns": MAPPING, "answer_after": "####", "grader": "math"}
    path = write(tmp_path / f"rows{suffix}", ROWS)
    tasks = load_tasks(path, "train", options=options)
    assert [(t.id, t.question, t.gold, t.metadata) for t in tasks] == [
        (f"n{i}", f"{i}+1?", (str(i + 1),),
         {"solution": f"So it is. #### {i + 1}", "track": "web", "hops": i, "grader": "math"})
        for i in range(4)
    ]  # fmt: skip
    assert tasks[0].protocol == "generalist"
    nested = {"columns": {**MAPPING, "answer": "answers.text", "protocol": "track"}}
    task = load_tasks(path + ":protocol=code", "train", options=nested)[1]
    assert (task.gold, task.protocol) == (("x", "y"), "web")
    drawn = load_tasks(path + ":protocol=code", "train", 2, 5, options=options)
    assert len(drawn) == 2 and drawn[0].protocol == "code"
    named = load_tasks(path, "train", options={**options, "protocol": "code"})
    assert [task.protocol for task in named] == ["code"] * 4


def test_rows_of_another_split_are_left_out(tmp_path):
    splits = ["train", "test", None, "easy", "test"]
    rows = [{**ROWS[0], "unique_id": f"n{i}", "split": s} for i, s in enumerate(splits)]
    path, options = write(tmp_path / "rows.jsonl", rows), {"columns": MAPPING}
    found = {s: [t.id for t in load_tasks(path, s, options=options)] for s in ("train", "test")}
    assert found == {"train": ["n0", "n2", "n3"], "test": ["n1", "n2", "n3", "n4"]}
    path = write(tmp_path / "rows.jsonl", rows[:2])
    with pytest.raises(UserError, match="no task of the split 'validation'"):
        load_tasks(path, "validation", options=options)


def test_usual_columns_need_no_entry(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"problem": "Who?", "answer": 3}])
    (task,) = load_tasks(path, "train", options={"grader": "exact_match"})
    assert (task.id, task.question, task.gold) == ("1", "Who?", ("3",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": {"answer": "solutoin"}}, r"no such column; did you mean 'solution'\?"),
        ({"columns": {"hops": "level"}, "answer_after": ""}, ":1: the tests cannot be read"),
        ({"columns": {**MAPPING, "answer": "answers.txt"}}, ":1: there is no 'answers.txt'"),
        ({"columns": {**MAPPING, "answer": "other"}}, ":1: there is no answer"),
        ({"columns": {**MAPPING, "id": 3}}, "columns.id is 3; give a column"),
        ({"columns": MAPPING, "grader": "own:grade"}, "the grader 'own:grade' is unknown"),
        ({"colums": MAPPING}, "no option 'colums'; did you mean 'columns'"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, options, message):
    path = write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(UserError, match=message) as refused:
        load_tasks(path, "train", options=options)
    assert "\n" not in str(refused.value)


def test_rows_of_python_may_have_other_columns_and_a_separator():
    rows = [{"text": "Who?", "shelf": {"code": "On the left #### B4"}, "hint": "left"}]
    columns = {"question": "text", "answer": "shelf.code"}
    mapping = Columns(columns, "####", "exact_match", "generalist", "tasks")
    (task,) = tasks_of_rows(rows, mapping, graded=True)
    assert (task.question, task.gold, task.metadata["hint"]) == ("Who?", ("B4",), "left")
    assert task.metadata["grader"] == "exact_match"
    plain = Columns({}, "", "", "generalist", "tasks")
    (task,) = tasks_of_rows([{"prompt": "Who?", "expected_answer": 3}], plain, graded=True)
    assert task.gold == ("3",)
    with pytest.raises(UserError, match=r"tasks\[0\]: there is no answer: .*ground_truth.*columns"):
        tasks_of_rows([{"prompt": "Who?", "shelf": "B4"}], plain, graded=True)


def test_a_data_set_of_the_hub_library_is_rows():
    columns = {"question": ["Who?", "Where?"], "answer": [None, "here"], "level": [1, None]}
    rows = datasets.Dataset.from_dict(columns)
    tasks = tasks_of_rows(rows, Columns({}, "", "", "generalist", "tasks"), graded=False)
    assert [task.gold for task in tasks] == [(), ("here",)]
    assert [task.metadata.get("level") for task in tasks] == [1, None]


def test_rows_of_python_may_have_values_of_numpy_and_ids_that_occur_twice():
    plain = Columns({}, "", "", "generalist", "tasks")
    answers = np.int64(12), np.array(["a", "b"]), np.float64(0.5)
    rows = [{"question": "Who?", "answer": answer, "id": 7} for answer in answers]
    tasks = tasks_of_rows(rows, plain, graded=True)
    assert [task.gold for task in tasks] == [("12",), ("a", "b"), ("0.5",)]
    # The samples of an evaluation are stored by the ids of their tasks.
    assert [task.id for task in tasks] == ["7", "7#1", "7#2"]


@pytest.mark.parametrize("row", [{"answer": math.nan}, {"answer": "a", "metadata": "x"}])
def test_a_row_of_a_table_without_a_value_is_refused_by_its_index(row):
    with pytest.raises(UserError, match=rf"tasks\[0\]: .*{[*row][-1]}"):
        tasks_of_rows(
            [{"question": "Who?", **row}], Columns({}, "", "", "generalist", "x"), graded=True
        )


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
@pytest.mark.parametrize("options", [{}, {"grader": "exact_match"}])
def test_other_columns_of_a_file_become_metadata_as_those_of_rows_of_python(
    tmp_path, suffix, options
):
    rows = [{"question": "Who?", "ground_truth": "B4", "word": "a", "split": "train"}]
    if suffix == ".csv":
        path = tmp_path / "rows.csv"
        path.write_text("\n".join(",".join(line) for line in (rows[0], rows[0].values())) + "\n")
    else:
        path = write(tmp_path / f"rows{suffix}", rows)
    (task,) = load_tasks(str(path), "train", options=options)
    assert task.gold == ("B4",)
    assert task.metadata == {"ground_truth": "B4", "word": "a", **options}
    mapping = Columns({}, "", options.get("grader", ""), "generalist", "tasks")
    (same,) = tasks_of_rows(rows, mapping, graded=True)
    assert {**same.metadata} == {**task.metadata, "split": "train"}


def test_a_field_of_the_metadata_precedes_a_column_and_a_value_without_json_is_left_out():
    row = {"question": "Who?", "answer": "B4", "hops": 1, "metadata": {"hops": 2}, "image": b"\xff"}
    row |= {"generator": "a name that selects code in metadata alone"}
    plain = Columns({}, "", "", "generalist", "tasks")
    (same,) = tasks_of_rows([row], plain, graded=True)
    assert question_task(row, "train", "generalist", "rows").metadata == {"hops": 2}
    assert same.metadata == {"hops": 2}
    with pytest.raises(UserError, match=r"tasks\[0\]: .*'metadata'"):
        tasks_of_rows([{**row, "metadata": "easy"}], plain, graded=True)


def test_rows_of_pandas_have_nan_for_no_value_and_arrays_for_lists():
    plain = Columns({}, "", "", "generalist", "tasks")
    rows = [{"question": "Who?", "answer": np.array(["B4", "D7"]), "hops": np.int64(3)}]
    (task,) = tasks_of_rows(rows, plain, graded=True)
    assert (task.gold, task.metadata) == (("B4", "D7"), {"hops": 3})
    rows = [{"question": "Who?", "answer": float("nan"), "hops": float("nan")}]
    (task,) = tasks_of_rows(rows, plain, graded=False)
    assert (task.gold, task.metadata) == ((), {"grader": "environment"})
    with pytest.raises(UserError, match=r"tasks\[0\]: there is no answer"):
        tasks_of_rows(rows, plain, graded=True)


@pytest.mark.parametrize(
    ("asked", "protocol"), [("", "own_tools"), ("free_search_dice", "free_search_dice")]
)
def test_questions_get_the_protocol_that_an_evaluation_asks_for(asked, protocol):
    own = {"days": {"path": "examples.own_tool.days:Days"}}
    values = {
        "tasks": "questions.jsonl",
        "protocol": asked,
        "tools": {"names": ("days",), "own": own},
    }
    assert with_task_protocol(values)["task_options"]["protocol"] == protocol


@pytest.mark.parametrize(
    ("changes", "form"),
    [
        ({}, "hermes"),
        ({"tasks": "questions.jsonl:protocol=own_tools"}, "hermes"),
        ({"protocol": "free_my_price"}, None),
        ({"tasks": "questions.jsonl:protocol=free_my_price"}, None),
        ({"task_options": {"protocol": "free_my_price"}}, None),
        ({"protocol": "free_my_price", "rollout": {"format": "react"}}, "react"),
    ],
)
def test_a_function_is_called_in_the_tags_of_the_protocol_that_the_questions_name(changes, form):
    own = {"my_price": {"path": f"{__name__}:my_price"}}
    values = {"tasks": "questions.jsonl", "tools": {"names": ("my_price",), "own": own}}
    made = with_task_protocol(values | changes)
    assert made.get("rollout", {}).get("format") == form


@pytest.mark.parametrize(
    ("tag", "changes", "protocol", "form"),
    [
        ("my_price", {}, "free_my_price", None),
        ("my_price", {"rollout": {"format": "hermes"}}, "own_tools", "hermes"),
        ("my_price", {"protocol": "own_tools"}, "own_tools", "hermes"),
        ("another", {}, "own_tools", "hermes"),
    ],
)
def test_questions_get_the_protocol_of_the_models_training_if_its_tools_are_those_of_the_run(
    tag, changes, protocol, form, tmp_path
):
    made = {"tools": [tag], "described": {tag: "Tells the price of an item."}, "free": True}
    (tmp_path / "protocols.json").write_text(json.dumps({f"free_{tag}": made}))
    (tmp_path / "agent.json").write_text(json.dumps({"protocol": f"free_{tag}"}))
    own = {"my_price": {"path": f"{__name__}:my_price"}}
    values = {"tasks": "questions.jsonl", "tools": {"names": ("my_price",), "own": own}}
    for _ in range(2):  # the first call registers the protocol of the model
        settings = with_task_protocol({**values, "model": str(tmp_path), **changes})
    assert settings["task_options"]["protocol"] == protocol
    assert settings.get("rollout", {}).get("format") == form


def my_price(item: str) -> str:
    """Tells the price of an item."""
    return "3"
