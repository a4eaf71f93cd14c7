"""The files of the release load and grade: gold answers score 1 and wrong ones 0, row by row."""

from __future__ import annotations

import datetime
import decimal
import json
from pathlib import Path

import pytest

from coa_jax.errors import UserError
from coa_jax.files import jsonl
from coa_jax.protocol import format_code, get_protocol
from coa_jax.tasks import Graders, GradersConfig, load_tasks
from coa_jax.tasks.code_tests import read_tests
from tests.rows import write
from tests.tasks.finished import finished

DATA = Path(__file__).resolve().parents[2] / "../shared/data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the sample data are not on this machine")
GRADERS = Graders(GradersConfig())


def oracle(task, wrong=False):
    """A program that prints what each input asks for, or something else."""
    tests = read_tests(json.loads(task.gold[0]))
    known = {case.given: case.expected + ("1" if wrong else "") for case in tests.cases}
    return format_code(f"import sys\nprint({known!r}[sys.stdin.read()], end='')")


def right_and_wrong(task):
    if task.metadata.get("grader") == "code":
        return oracle(task), oracle(task, wrong=True)
    if task.metadata.get("grader") == "math":
        return rf"\boxed{{{task.gold[0]}}}", rf"\boxed{{{task.gold[0]} + 1}}"
    return task.gold[-1], f"{task.gold[0]} not"


def check(task):
    good, bad = right_and_wrong(task)
    assert GRADERS(task, finished(good, task.protocol)).value == 1.0, task
    for answer in (bad, "", " ", None):
        assert GRADERS(task, finished(answer, task.protocol)).value == 0.0, (task, answer)


@needs_data
@pytest.mark.parametrize(
    ("name", "rows", "protocol", "grader"),
    [
        ("aime24.parquet", 30, "code", "math"),
        ("livecodebench_v4_20.parquet", 20, "code", "code"),
        ("webwalker_30.json", 30, "web", "judge"),
        ("nq_200.jsonl:protocol=mhqa", 200, "mhqa", None),
    ],
)
def test_every_row_of_every_file_grades(name, rows, protocol, grader):
    pytest.importorskip("pyarrow")
    tasks = load_tasks(str(DATA / name), "test")
    assert len(tasks) == rows == len({task.id for task in tasks})
    for task in tasks:
        assert (task.protocol, task.metadata.get("grader")) == (protocol, grader)
        assert task.question and "<think>" not in task.question
        check(task)


@needs_data
def test_questions_are_freed_of_their_instructions():
    pytest.importorskip("pyarrow")
    first = load_tasks(str(DATA / "aime24.parquet"), "test")[0]
    assert first.question.startswith("Every morning Aya goes for a $9$-kilometer-long walk")
    assert (first.gold, first.id) == (("204",), "aime24/0")
    walk = load_tasks(str(DATA / "webwalker_30.json"), "test")[0]
    assert walk.metadata["root_url"] == "https://ehaweb.org/" and walk.metadata["level"] == "medium"
    program = load_tasks(str(DATA / "livecodebench_v4_20.parquet"), "test")[0]
    assert program.metadata["question_id"] == "abc366_f" and program.metadata["level"] == "hard"


TABLE = [
    {"id": 1, "task_id": "x", "question": "Which zip code?", "answer": "34689", "Level": 2},
    {"task_id": "g", "Question": "Who?", "Final answer": "Me", "Level": "1"},
    {"question": "African author?", "answer": "1988-96", "topic": "Art"},
    {"id": 0, "question": "Volume?", "answer": "11520", "answer_type": "exactMatch",
     "category": "Math"},
    {"problem": "1/2 as decimal?", "answer": r"\frac{1}{2}", "level": 3, "subject": "Algebra",
     "unique_id": "test/1.json"},
    {"Problem": "2+2?", "Answer": 4},
    {"question": "Which city?", "golden_answers": ["Oslo", "Kristiania"], "data_source": "nq"},
]  # fmt: skip


def test_rows_of_other_files_of_the_release_and_of_the_benchmarks(tmp_path):
    tasks = load_tasks(write(tmp_path / "all.json", TABLE), "test")
    graders = [task.metadata["grader"] for task in tasks]
    assert graders == ["judge"] * 4 + ["math"] * 2 + ["exact_match"]
    assert [task.protocol for task in tasks] == ["web"] * 4 + ["code"] * 2 + ["mhqa"]
    assert [task.id for task in tasks] == ["1", "g", "3", "0", "test/1.json", "6", "7"]
    assert tasks[0].metadata["level"] == 2 and tasks[2].metadata["topic"] == "Art"
    for task in tasks:
        get_protocol(task.protocol)
        check(task)


def verl(truth, source="hotpotqa", index="0", prompt="Rules.\n\nQuestion: Which city?", **extra):
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "qa",
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": {"index": index, **extra},
    }


CALLS = {"inputs": ["1\n2"], "outputs": ["3"], "fn_name": "add"}


@pytest.mark.parametrize(
    ("row", "gold", "grader"),
    [
        (verl('{"target": ["Oslo"], "question": "Which city?"}'), ("Oslo",), "exact_match"),
        (verl({"target": "Oslo"}), ("Oslo",), "exact_match"),
        (verl("27.0", "amc23"), ("27.0",), "math"),
        (verl('["204"]', "aime24"), ("204",), "math"),
        (verl("[0,1]", "MATH500"), ("[0,1]",), "math"),
        (verl(r"\left( 3, \frac{\pi}{2} \right)", "math500"), (r"\left( 3, \frac{\pi}{2} \right)",),
         "math"),
        (verl(json.dumps(CALLS), "taco"), (json.dumps(CALLS),), "code"),
    ],
)  # fmt: skip
def test_ground_truths_of_the_releases_schema(tmp_path, row, gold, grader):
    suffix = ".json" if isinstance(row["reward_model"]["ground_truth"], dict) else ".parquet"
    path = write(tmp_path / f"a{suffix}", [row])
    (task,) = load_tasks(path, "train")
    assert (task.question, task.gold, task.metadata["grader"]) == ("Which city?", gold, grader)


def test_dates_of_parquet_files_are_written_again_as_texts(tmp_path):
    date = datetime.datetime(2024, 9, 1)
    rows = [
        {"question": "Who?", "answer": "Ann", "contest_date": date, "level": decimal.Decimal("1.5")}
    ]
    (task,) = load_tasks(write(tmp_path / "a.parquet", rows), "test")
    kept = {"date": "2024-09-01T00:00:00", "level": "1.5", "grader": "exact_match"}
    assert json.loads(jsonl.dumps(task.metadata)) == task.metadata == kept


def test_contests_as_their_authors_publish_them(tmp_path):
    rows = [
        {"question_id": "3", "question_content": "Add.", "starter_code": "class Solution:",
         "public_test_cases": '[{"input": "1\\n2", "output": "3", "testtype": "functional"}]',
         "private_test_cases": "[]", "metadata": '{"func_name": "add"}', "platform": "leetcode"},
        {"name": "1_A", "description": "Sum.", "public_tests": {"input": ["1 2"], "output": ["3"]},
         "private_tests": {"input": [], "output": []},
         "generated_tests": {"input": ["2 2"], "output": ["4"]}},
    ]  # fmt: skip
    call, contest = load_tasks(write(tmp_path / "a.json", rows), "test")
    assert "class Solution:" in call.question and call.metadata["platform"] == "leetcode"
    program = format_code("class Solution:\n    def add(self, a, b):\n        return a + b")
    assert GRADERS(call, finished(program, "code")).value == 1.0
    program = format_code("print(sum(map(int, input().split())))")
    assert GRADERS(contest, finished(program, "code")).value == 1.0
    assert GRADERS(contest, finished(format_code("print(3)"), "code")).value == 0.0


def test_ids_that_repeat_are_told_apart_and_samples_are_fixed(tmp_path):
    rows = [{"id": "0", "question": f"{i}?", "answer": str(i)} for i in range(9)]
    path = write(tmp_path / "a.json", rows)
    tasks = load_tasks(path, "test")
    assert len({task.id for task in tasks}) == 9
    assert load_tasks(path, "test", 4, 1) == load_tasks(path, "train", 4, 1)
    assert load_tasks(path + ":protocol=web", "test")[0].protocol == "web"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"question": "a"}], "row 1: there is no answer"),
        ([{"question": "a", "answer": "b"}, {"answer": "b"}], "row 2: there is no question"),
        ([{"question": "a", "answer": ""}], "row 1: an answer is empty"),
        ([{"question": "a", "answer": True}], "row 1: an answer must be"),
        ([verl('{"stdin": ["1"], "expected_output": []}')], "row 1: there must be as many"),
        ([{"reward_model": {}, "prompt": "a"}], "row 1: the field 'ground_truth' is"),
        (
            [{"reward_model": {"ground_truth": "1"}, "prompt": []}],
            "row 1: the prompt has no message",
        ),
        ([], "no task of the split"),
        ({"a": 1}, ":1: there is no question"),
        ([1], "row 1: expected an object, found int"),
    ],
)
def test_malformed_files_are_located(tmp_path, content, message):
    with pytest.raises(UserError, match=rf"a\.json.*{message}"):
        load_tasks(write(tmp_path / "a.json", content), "test")


def test_files_that_cannot_be_read_are_explained(tmp_path):
    with pytest.raises(UserError, match=r"absent\.json: "):
        load_tasks(str(tmp_path / "absent.json"), "test")
    (tmp_path / "b.parquet").write_bytes(b"no parquet")
    with pytest.raises(UserError, match=r"b\.parquet: damaged parquet"):
        load_tasks(str(tmp_path / "b.parquet"), "test")
    with pytest.raises(UserError, match="protocol=NAME"):
        load_tasks(write(tmp_path / "c.json", TABLE) + ":x=1", "test")
