"""Sources of tasks: names, files and their mistakes, generators."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re

import pytest
import reasoning_gym

from coa_jax.errors import UserError
from coa_jax.tasks import SPLITS, Task, load_splits, load_tasks, rewards
from coa_jax.tasks.rewards import generator
from tests.rows import write as write_rows
from tests.tasks.finished import finished


def test_unknown_sources_and_splits_name_the_known_ones():
    with pytest.raises(UserError, match="arithmetic, drawn_tools, factbook"):
        load_tasks("webwork", "train")
    with pytest.raises(UserError, match=r"'dev'; .* train, validation, test"):
        load_tasks(SUMS, "dev")


SUMS = "tests.tasks.test_load_tasks:sums"


def sums(split: str, seed: int, protocol: str, largest: int = 9) -> list[Task]:
    """A generator of questions, whose splits share none."""
    numbers = range(SPLITS.index(split) + 1, largest, len(SPLITS))
    return [Task(f"{n}", f"{n} + {seed}?", "generalist", (str(n + seed),), "") for n in numbers]


def write(path, *rows):
    lines = (row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    path.write_text("".join(lines))
    return str(path)


def test_what_validates_is_not_trained_on(tmp_path, caplog):
    rows = [{"id": str(i), "question": f"{i}?", "answer": "a"} for i in range(20)]
    path = write(tmp_path / "q.jsonl", *rows)
    splits = load_splits(path, {"train": 15, "validation": 5}, seed=3)
    assert (len(splits["train"]), len(splits["validation"])) == (10, 5)
    assert not {t.id for t in splits["train"]} & {t.id for t in splits["validation"]}
    assert "5 tasks of the training split are used for validation" in caplog.text
    assert splits["validation"] == load_tasks(path, "validation", 5, 3)
    with pytest.raises(UserError, match=f"^{path}: .* validation task"):
        load_splits(path, {"train": 5, "validation": None})


def test_a_split_of_which_nothing_is_wanted_need_not_exist(tmp_path):
    rows = [{"question": f"{i}?", "answer": "a", "split": "train"} for i in range(3)]
    path = write(tmp_path / "q.jsonl", *rows)
    splits = load_splits(path, {"train": None, "validation": 0})
    assert (len(splits["train"]), splits["validation"]) == (3, [])
    with pytest.raises(UserError, match=f"^{path}: .*'validation'"):
        load_splits(path, {"train": 3, "validation": 1})
    generated = {"train": 5, "validation": 5}
    parts = load_splits(f"{SUMS}:largest=40", generated, 1)
    assert parts == {k: load_tasks(f"{SUMS}:largest=40", k, n, 1) for k, n in generated.items()}
    assert all(len(tasks) == 5 for tasks in parts.values())


@pytest.mark.parametrize("source", ["openenv", "textarena:games=Nim-v0+TicTacToe-v0"])
def test_an_environment_has_as_many_tasks_as_are_wanted(source):
    assert [len(load_tasks(source, "train", n)) for n in (0, 3, None)] == [0, 3, 100]


def test_question_files_are_read(tmp_path):
    path = write(
        tmp_path / "q.jsonl",
        {"question": " Who? ", "answer": "Me", "id": 7, "split": "test"},
        {"question": "When?", "golden_answers": ["1 May", "May 1"], "protocol": "mhqa"},
        {"question": "How many?", "answer": 3, "split": "train"},
    )
    tasks = load_tasks(path, "test")
    first = tasks[0]
    assert (first.id, first.question, first.gold) == ("7", "Who?", ("Me",))
    assert first.protocol == "generalist"
    assert tasks[1].gold == ("1 May", "May 1") and tasks[1].protocol == "mhqa" and len(tasks) == 2
    assert load_tasks(path + ":protocol=web", "train")[1].protocol == "web"
    assert load_tasks(path, "train")[1].gold == ("3",)


ASKED = [
    {"question": "Who?", "answer": "Me", "id": "a", "split": "test", "protocol": ""},
    {"question": 'When,\n"exactly"?', "answer": "1 May", "id": "", "split": "", "protocol": "web"},
    {"question": "How many?", "answer": "3", "id": "c", "split": "train", "protocol": "mhqa"},
]


def known(tasks):
    return [(t.id, t.question, t.gold, t.protocol, t.metadata) for t in tasks]


def test_a_file_may_call_the_question_prompt_as_rows_of_python_may(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "And 2?"}]
    rows = [{"prompt": "1?", "answer": 1}, {"prompt": chat, "answer": 2}]
    tasks = {t.question: t for t in load_tasks(write(tmp_path / "q.jsonl", *rows), "train")}
    assert {question: t.gold for question, t in tasks.items()} == {"1?": ("1",), "And 2?": ("2",)}
    assert "Be brief." in str(tasks["And 2?"])


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".array_record"])
def test_a_table_and_an_array_record_ask_as_json_lines_do(tmp_path, suffix):
    rows = [{key: value or None for key, value in row.items()} for row in ASKED]
    lines = load_tasks(write_rows(tmp_path / "q.jsonl", rows), "test")
    assert [task.gold for task in lines] == [("Me",), ("1 May",)]
    other = ASKED if suffix != ".array_record" else rows
    path = write_rows(tmp_path / f"q{suffix}", other)
    assert known(load_tasks(path, "test")) == known(lines)
    assert known(load_tasks(f"{path}:protocol=mhqa", "test"))[0][3] == "mhqa"
    mapped = {"columns": {"question": "question", "shard": "split"}, "grader": "exact_match"}
    task = load_tasks(path, "train", options=mapped)[-1]
    assert task.metadata == {"shard": "train", "grader": "exact_match"}
    path = write_rows(tmp_path / f"q{suffix}", [*other, {**ASKED[0], "answer": ""}])
    where = ": row 4: " if suffix == ".array_record" else ":6: "  # the second row has two lines
    with pytest.raises(UserError, match=rf"q\{suffix}{where}(the answer|there is no answer)"):
        load_tasks(path, "test")


def test_folders_patterns_and_lists_of_files_are_read(tmp_path, monkeypatch):
    folder = tmp_path / "release"
    folder.mkdir()
    for number in range(3):
        row = {"id": f"r{number}", "question": f"{number}?", "answer": "x", "Level": 1}
        write_rows(folder / f"part-{number}.parquet", [row])
    for source in (f"{folder}", f"{folder}/part-*.parquet", f"{folder}:protocol=mhqa"):
        tasks = load_tasks(source, "train")
        assert [task.id for task in tasks] == ["r0", "r1", "r2"]
        assert {task.protocol for task in tasks} == {"mhqa" if "mhqa" in source else "web"}
    monkeypatch.chdir(tmp_path)
    assert load_tasks("release", "train") == [
        dataclasses.replace(task, source="release") for task in load_tasks(f"{folder}", "train")
    ]
    write_rows(tmp_path / "q.csv", ASKED[:1])
    both = load_tasks("q.csv,release/part-1.parquet:protocol=mhqa", "test")
    assert [(task.id, task.protocol) for task in both] == [("a", "mhqa"), ("r1", "mhqa")]
    with pytest.raises(UserError, match=rf"^{folder}/\*\.json: "):
        load_tasks(f"{folder}/*.json", "train")
    with pytest.raises(UserError, match=r"absent/questions: cannot be read"):
        load_tasks("absent/questions", "train")


def test_samples_of_a_file_are_fixed(tmp_path):
    path = write(tmp_path / "q.jsonl", *({"question": f"{i}?", "answer": i} for i in range(50)))
    assert load_tasks(path, "train", 10, 1) == load_tasks(path, "train", 10, 1)
    assert load_tasks(path, "train", 10, 1) != load_tasks(path, "train", 10, 2)
    assert len(load_tasks(path, "train", 99)) == 50


@pytest.mark.parametrize(
    "line",
    ["{broken\n", "[1]\n", '{"question": "a"}\n', '{"question": "", "answer": "a"}\n',
     '{"question": "a", "answer": []}\n', '{"question": "a", "answer": " "}\n',
     '{"question": "a", "answer": true}\n', '{"question": "a", "answer": "b", "split": "dev"}\n',
     '{"question": "a", "answer": "b", "protocol": "morse"}\n'],
)  # fmt: skip
def test_malformed_lines_are_located(tmp_path, line):
    path = write(tmp_path / "q.jsonl", {"question": "ok?", "answer": "yes"}, line)
    with pytest.raises(UserError, match=r"q\.jsonl:2: "):
        load_tasks(path, "train")


def test_a_task_of_an_environment_needs_no_answer(tmp_path):
    by_grader = {"question": "b", "answer": [], "metadata": {"grader": "environment"}}
    path = write(tmp_path / "q.jsonl", {"question": "a", "protocol": "turns"}, by_grader)
    assert [task.gold for task in load_tasks(str(path), "train")] == [(), ()]
    judged = {"question": "a", "protocol": "turns", "metadata": {"grader": "judge"}}
    path = write(tmp_path / "q.jsonl", judged)
    with pytest.raises(
        UserError,
        match=r"q\.jsonl:1: .*task_options\.columns\.answer .* environment ",
    ):
        load_tasks(str(path), "train")


def test_files_without_use_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"absent\.jsonl: "):
        load_tasks(str(tmp_path / "absent.jsonl"), "train")
    row = {"question": "a", "answer": "b", "split": "test"}
    with pytest.raises(UserError, match=r"a\.jsonl: .*'train'"):
        load_tasks(write(tmp_path / "a.jsonl", row), "train")
    with pytest.raises(UserError, match=r"b\.jsonl:2: the id '"):
        load_tasks(write(tmp_path / "b.jsonl", row, row), "test")
    with pytest.raises(UserError, match="protocol=NAME"):
        load_tasks(write(tmp_path / "c.jsonl", row) + ":x=1", "test")


def test_a_protocol_is_the_row_s_own_then_the_source_s_then_the_caller_s(tmp_path, caplog):
    path = write(tmp_path / "q.jsonl", {"question": "a", "answer": "b"},
                 {"question": "c", "answer": "d", "protocol": "web"})  # fmt: skip
    told = {
        "generalist": load_tasks(path, "test"),
        "mhqa": load_tasks(path, "test", protocol="mhqa"),
        "code": load_tasks(f"{path}:protocol=code", "test", protocol="mhqa"),
    }
    for protocol, tasks in told.items():
        assert [task.protocol for task in tasks] == [protocol, "web"]
    assert "1 of 2 rows have a protocol of their own (web)" in caplog.text
    with pytest.raises(UserError, match="protocol 'morse' is unknown"):
        load_tasks(path, "test", protocol="morse")


def test_a_release_row_is_for_the_agent_whose_tools_it_names(tmp_path):
    def row(**tools):
        truth = json.dumps({"target": "b", "question": "a"})
        return {"prompt": [{"role": "user", "content": "a"}], "data_source": "x",
                "reward_model": {"ground_truth": truth},
                "extra_info": {"tools_kwargs": tools}}  # fmt: skip

    rows = [row(wiki_search={}), row(web_search={}, crawl_page={}, code=None), row(web_search={})]
    (tmp_path / "r.json").write_text(json.dumps([*rows, {"question": "a", "answer": "b"}]))
    for default in ("", "web_wiki"):
        tasks = load_tasks(str(tmp_path / "r.json"), "test", protocol=default)
        other = default or "mhqa"
        assert [task.protocol for task in tasks] == ["mhqa", "web", other, other]


def generated(name: str, gold: str = "") -> Task:
    entry = reasoning_gym.create_dataset(name, size=1, seed=1)[0]
    metadata = {"scorer": "reasoning_gym", "generator": name}
    metadata["generator_metadata"] = json.loads(json.dumps(entry["metadata"]))
    return Task("1", entry["question"], "web", (gold or str(entry["answer"]),), "s", metadata)


@pytest.mark.parametrize(
    "name", ["n_queens", "countdown", "polynomial_multiplication", "spiral_matrix"]
)
def test_code_in_an_answer_does_not_run_in_the_trainer(name, tmp_path, monkeypatch):
    """These scorers evaluate the answer."""
    code = f"open({str(tmp_path / 'file')!r}, 'w').write('1') and [[0]]"
    task = generated(name)
    assert asyncio.run(generator(task, finished(code, "web"))) == 0.0
    monkeypatch.setattr(rewards, "_CODE", re.compile("(?!)"))  # the sandbox alone
    assert asyncio.run(generator(task, finished(code, "web"))) == 0.0
    assert not (tmp_path / "file").exists()
    assert asyncio.run(generator(task, finished(task.gold[0], "web"))) == 1.0


def test_code_in_a_file_of_questions_does_not_run_in_the_trainer(tmp_path):
    task = generated("number_sorting", f"open({str(tmp_path / 'file')!r}, 'w') or []")
    assert asyncio.run(generator(task, finished("['1']", "web"))) == 0.0
    assert not (tmp_path / "file").exists()


def test_an_answer_cannot_change_how_the_next_one_is_scored(monkeypatch):
    monkeypatch.setattr(rewards, "_CODE", re.compile("(?!)"))
    task = generated("n_queens")
    patch = "setattr(__import__('reasoning_gym'), 'get_score_answer_fn', lambda n: lambda a, e: 1)"
    asyncio.run(generator(task, finished(f"[{patch}]", "web")))
    assert asyncio.run(generator(task, finished("[[0]]", "web"))) == 0.0
