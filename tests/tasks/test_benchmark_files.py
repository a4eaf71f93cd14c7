"""Published benchmark files are read as their authors define them, and can be graded."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import pickle
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.errors import UserError
from coa_jax.protocol import format_code, get_protocol
from coa_jax.tasks import Graders, GradersConfig, load_tasks
from coa_jax.tasks.benchmark_rows import BENCHMARKS, decrypt
from tests.rows import write
from tests.tasks.finished import finished

GRADERS = Graders(GradersConfig())


def encrypt(text, canary):
    """As the authors of BrowseComp describe it, byte by byte."""
    key = itertools.cycle(hashlib.sha256(canary.encode()).digest())
    return base64.b64encode(bytes(b ^ k for b, k in zip(text.encode(), key, strict=False))).decode()


def packed(tests):
    """As LiveCodeBench packs its private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


CANARY = "BENCHMARK DATA canary GUID 6f2c"
LCB = {
    "question_title": "Sum", "question_content": "Print the sum.", "platform": "atcoder",
    "question_id": "abc400_a", "contest_id": "abc400", "contest_date": "2024-09-01T00:00:00",
    "starter_code": "", "difficulty": "easy", "metadata": "{}",
    "public_test_cases": json.dumps([{"input": "1 2", "output": "3", "testtype": "stdin"}]),
    "private_test_cases": packed([{"input": "5 5", "output": "10", "testtype": "stdin"}]),
}  # fmt: skip
CONTEST = {
    "name": "1_A. Sum", "description": "Print the sum.", "difficulty": 7, "source": 2,
    "public_tests": {"input": ["1 2"], "output": ["3"]},
    "private_tests": {"input": [], "output": []},
    "generated_tests": {"input": ["5 5"], "output": ["10"]},
    "solutions": {"language": [], "solution": []},
}  # fmt: skip
PROGRAM, WRONG = "print(sum(map(int, input().split())))", "print(3)"

# name -> (file, rows, id, gold, metadata) of the first row that is measured
SAMPLES = {
    "gaia": (
        "metadata.jsonl",
        [
            {"task_id": "a", "Question": "See the file?", "Level": 1, "Final answer": "2",
             "file_name": "a.xlsx", "Annotator Metadata": {"Steps": "1."}},
            {"task_id": "b", "Question": "Which zip code?", "Level": 2, "Final answer": "34689",
             "file_name": "", "Annotator Metadata": {"Steps": "1."}},
        ],
        ("b", ("34689",), {"level": 2}),
    ),
    "browsecomp": (
        "browse_comp_test_set.csv",
        [{"problem": encrypt("Which “author”?", CANARY), "answer": encrypt("1988-96", CANARY),
          "problem_topic": "Art", "canary": CANARY}],
        ("1", ("1988-96",), {"topic": "Art"}),
    ),
    "hle": (
        "test.parquet",
        [
            {"id": "x", "question": "What is shown?", "image": "data:image/png;base64,AA==",
             "answer": "A cat", "answer_type": "exactMatch", "category": "Other",
             "raw_subject": "Trivia"},
            {"id": "y", "question": "Which?", "image": "", "answer": "B",
             "answer_type": "multipleChoice", "category": "Math", "raw_subject": "Topology"},
        ],
        ("y", ("B",), {"topic": "Math", "subject": "Topology", "answer_type": "multipleChoice"}),
    ),
    "webwalker": (
        "main.jsonl",
        [{"question": "Which program?", "answer": "EU4Health", "root_url": "https://ehaweb.org/",
          "info": {"domain": "organization", "difficulty_level": "medium", "lang": "en",
                   "type": "multi_source", "golden_path": ["a"]}}],
        ("1", ("EU4Health",), {"root_url": "https://ehaweb.org/", "level": "medium",
                               "kind": "multi_source", "lang": "en", "topic": "organization"}),
    ),
    "nq": (
        "NQ-open.dev.jsonl",
        [{"question": "who got the first nobel prize in physics", "answer": ["Röntgen", "W|R"]}],
        ("1", ("Röntgen", "W/R"), {}),
    ),
    "triviaqa": (
        "web-dev.json",
        [{"Question": "Who?", "QuestionId": "tc_1",
          "Answer": {"Value": "Angela", "Aliases": ["Angela", "Merkel"], "Type": "Entity"}}],
        ("tc_1", ("Angela", "Merkel"), {}),
    ),
    "popqa": (
        "popQA.tsv",
        [{"id": "7", "subj": "G", "prop": "occupation", "question": "What is G's occupation?",
          "possible_answers": '["politician", "polit."]'}],
        ("7", ("politician", "polit."), {"kind": "occupation"}),
    ),
    "hotpotqa": (
        "hotpot_dev_distractor_v1.json",
        [{"_id": "5a", "question": "Were they of the same nationality?", "answer": "yes",
          "type": "comparison", "level": "hard", "context": [["A", ["x"]]],
          "supporting_facts": [["A", 0], ["A", 1], ["B", 0]]}],
        ("5a", ("yes",), {"kind": "comparison", "level": "hard", "hops": 2}),
    ),
    "2wiki": (
        "dev.parquet",
        [{"_id": "8b", "question": "Who is older?", "answer": "Ann", "type": "bridge_comparison",
          "supporting_facts": {"title": ["A", "B", "C", "D"], "sent_id": [0, 0, 0, 0]}}],
        ("8b", ("Ann",), {"kind": "bridge_comparison", "hops": 4}),
    ),
    "musique": (
        "musique_full_v1.0_dev.jsonl",
        [
            {"id": "2hop__1_2", "question": "Nothing?", "answer": "x", "answer_aliases": [],
             "answerable": False, "paragraphs": []},
            {"id": "3hop1__1_2_3", "question": "Where?", "answer": "Oslo",
             "answer_aliases": ["Kristiania"], "answerable": True, "paragraphs": []},
        ],
        ("3hop1__1_2_3", ("Oslo", "Kristiania"), {"hops": 3}),
    ),
    "bamboogle": (
        "Bamboogle.csv",
        [{"Question": "Who was president when\nit was, \"quoted\"?", "Answer": "Ford"}],
        ("1", ("Ford",), {}),
    ),
    "aime": (
        "aime_2024.parquet",
        [{"ID": "2024-II-4", "Problem": "Find $x$.", "Solution": "so", "Answer": 33}],
        ("2024-II-4", ("33",), {}),
    ),
    "amc": (
        "test.jsonl",
        [{"id": 3, "problem": "Find x.", "answer": 27.0, "url": "https://a"}],
        ("3", ("27.0",), {}),
    ),
    "math500": (
        "test.jsonl",
        [{"problem": "Convert.", "solution": "so", "answer": r"\left( 3, \frac{\pi}{2} \right)",
          "subject": "Precalculus", "level": 2, "unique_id": "test/precalculus/807.json"}],
        ("test/precalculus/807.json", (r"\left( 3, \frac{\pi}{2} \right)",),
         {"level": 2, "topic": "Precalculus"}),
    ),
    "olympiadbench": (
        "OE_TO_maths_en_COMP.parquet",
        [
            {"id": 1, "question": "Shown.", "final_answer": ["1"], "context": None,
             "modality": "Multimodal", "answer_type": "Numerical", "question_type": "Open-ended",
             "subfield": "Algebra", "image_1": None},
            {"id": 2, "question": "Prove.", "final_answer": ["1"], "context": None,
             "modality": "Text-only", "answer_type": "Need_human_evaluate",
             "question_type": "Open-ended", "subfield": "Algebra", "image_1": None},
            {"id": 3, "question": "Find all.", "final_answer": ["$1,-2$"], "context": "Let x be.",
             "modality": "Text-only", "answer_type": "Numerical", "question_type": "Open-ended",
             "subfield": "Algebra", "image_1": None},
        ],
        ("3", ("$1,-2$",), {"topic": "Algebra", "kind": "Numerical"}),
    ),
    "livecodebench": (
        "test5.jsonl", [LCB],
        ("abc400_a", None, {"level": "easy", "platform": "atcoder", "question_id": "abc400_a",
                            "date": "2024-09-01T00:00:00"}),
    ),
    "codecontests": (
        "test-00000.parquet", [CONTEST], ("1_A. Sum", None, {"level": 7, "question_id": "1_A. Sum"})
    ),
}  # fmt: skip


def load(name, folder, rows=None, options="", **more):
    file, sample, _ = SAMPLES[name]
    rows = sample if rows is None else rows
    content = {"Data": rows, "Version": 1.0} if name == "triviaqa" else rows
    return load_tasks(f"{name}:{write(folder / file, content)}{options}", "test", **more)


def test_every_benchmark_has_a_sample():
    assert set(SAMPLES) == set(BENCHMARKS)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_file_is_read_as_its_authors_mean_it(name, tmp_path):
    (task,) = load(name, tmp_path)
    identity, gold, metadata = SAMPLES[name][2]
    benchmark = BENCHMARKS[name]
    assert (task.id, task.protocol) == (identity, benchmark.protocol)
    assert task.metadata == {**metadata, "grader": benchmark.grader}
    assert get_protocol(task.protocol)
    assert "See the file" not in task.question and "shown" not in task.question.lower()
    if benchmark.grader == "code":
        answers = format_code(PROGRAM), format_code(WRONG)
    else:
        assert task.gold == gold
        right = task.gold[-1]
        answers = (rf"\boxed{{{right}}}", r"\boxed{977}") if benchmark.grader == "math" else (
            right, "something else")  # fmt: skip
    values = [GRADERS(task, finished(answer, task.protocol)).value for answer in answers]
    assert values == [1.0, 0.0]


def test_private_tests_count(tmp_path):
    (task,) = load("livecodebench", tmp_path)
    only_public = format_code("print({'1 2': 3}.get(input(), 0))")
    assert GRADERS(task, finished(only_public, "code")).value == 0.0


def test_a_packed_test_that_would_run_something_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "owned"), "w"))

    private = base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()
    with pytest.raises(UserError, match=":1: tests must be a list"):
        load("livecodebench", tmp_path, [{**LCB, "private_test_cases": private}])
    assert not (tmp_path / "owned").exists()


@given(st.text(), st.text(min_size=1))
def test_what_was_encrypted_is_decrypted(text, canary):
    assert decrypt(encrypt(text, canary), canary) == text


def test_contests_are_chosen_by_date_and_files_by_a_star(tmp_path):
    for number, date in enumerate(("2024-08-01", "2024-09-15", "2025-02-01")):
        row = {**LCB, "question_id": f"q{number}", "contest_date": f"{date}T00:00:00"}
        write(tmp_path / f"test{number}.jsonl", [row])
    source = f"livecodebench:{tmp_path}/test*.jsonl"

    def ids(options):
        return [task.id for task in load_tasks(source + options, "test")]

    assert ids("") == ["q0", "q1", "q2"]
    assert ids(":since=2024-08-01,until=2024-09-15") == ["q0", "q1"]
    assert ids(":since=2025-01-01,platform=atcoder+leetcode") == ["q2"]
    with pytest.raises(UserError, match=":level=hard: "):
        ids(":level=hard")


def test_ids_that_repeat_in_many_files_are_told_apart(tmp_path):
    for number in range(4):
        rows = [{"id": "a", "question": f"{number}{i}?", "answer": ["x"]} for i in range(2)]
        rows.append({"id": "a#2", "question": f"{number}2?", "answer": ["x"]})
        write(tmp_path / f"part{number}.jsonl", rows)
    tasks = load_tasks(f"nq:{tmp_path}/part*.jsonl", "test")
    assert len({task.id for task in tasks}) == len(tasks) == 12
    assert [task.id for task in tasks[:3]] == ["a", "a#2", "a#2#3"]
    assert tasks == load_tasks(f"nq:{tmp_path}/part*.jsonl", "test")


def test_questions_about_files_are_asked_when_wanted(tmp_path):
    tasks = load("gaia", tmp_path, options=":attachments=yes")
    assert tasks[0].question == f"See the file?\n\nAttached file: {tmp_path / 'a.xlsx'}"
    assert [task.metadata["level"] for task in tasks] == [1, 2]
    assert [t.id for t in load("gaia", tmp_path, options=":attachments=yes,level=1")] == ["a"]


def test_forms_of_copies(tmp_path):
    flashrag = [{"id": "test_0", "question": "Which?", "golden_answers": ["A", "B"],
                 "metadata": {"type": "bridge", "level": "hard"}}]  # fmt: skip
    for name in ("nq", "triviaqa", "popqa", "hotpotqa", "2wiki", "musique", "bamboogle"):
        path = write(tmp_path / f"{name}.jsonl", flashrag)
        (task,) = load_tasks(f"{name}:{path}:protocol=web_wiki", "test")
        assert (task.id, task.gold, task.protocol) == ("test_0", ("A", "B"), "web_wiki")
    boxed = [{"problem": "Find.", "solution": r"So \boxed{204}.", "url": "u"}]
    (task,) = load_tasks(f"aime:{write(tmp_path / 'aime.jsonl', boxed)}", "test")
    assert task.gold == ("204",)
    plain = [{"question": "Who?", "answer": "Ann", "topic": "Art"}]
    (task,) = load_tasks(f"browsecomp:{write(tmp_path / 'b.json', plain)}", "test")
    assert (task.question, task.gold, task.metadata["topic"]) == ("Who?", ("Ann",), "Art")


def test_samples_are_fixed_by_the_seed(tmp_path):
    rows = [{"question": f"{i}?", "answer": [str(i)]} for i in range(9)]
    drawn = load("nq", tmp_path, rows, n=4, seed=1)
    assert drawn == load("nq", tmp_path, rows, n=4, seed=1) != load("nq", tmp_path, rows, n=4)
    assert load("nq", tmp_path, rows, n=9, seed=1)[:4] == drawn


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("gaia", [{"Question": "a", "Final answer": "?", "Level": 1}], "the answers of G"),
        ("gaia", [{"Question": "a"}], "there is no field 'Final answer'"),
        ("browsecomp", [{"problem": "@", "answer": "b", "canary": "c"}], ".*decrypted"),
        ("nq", [{"question": " ", "answer": "b"}], "the field 'question' is empty"),
        ("nq", [{"question": "a", "answer": []}], "there is no answer"),
        ("nq", [{"question": "a", "answer": [["b"]]}], "an answer must be"),
        ("popqa", [{"question": "a", "possible_answers": "b"}], ""),
        ("codecontests", [{"description": "a"}], "there are no tests"),
        (
            "popqa",
            [{"question": "a", "possible_answers": "[" * 100_000}],
            "nested too deeply",
        ),
        *(
            ("livecodebench", [{"question_content": "a", "question_id": "b",
              "public_test_cases": packed}], "packed tests cannot be unpacked")
            for packed in ("", "eHg=", base64.b64encode(zlib.compress(b"zz")).decode(),
                           base64.b64encode(zlib.compress(b"\x80\x04")).decode())
        ),
        ("hle", [{"question": "a", "answer": "b", "image": "c"}], r"^hle:.*/test\.parquet: "),
    ],
)  # fmt: skip
def test_rows_that_are_none_are_located(name, rows, message, tmp_path):
    place = "" if name == "hle" else f"{SAMPLES[name][0]}(:[12]|: row 1): "
    with pytest.raises(UserError, match=place + message):
        load(name, tmp_path, rows)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("gaia:absent.jsonl", "absent.jsonl: cannot be read"),
        ("gaia:", "give gaia:PATH"),
        ("gaia:x.jsonl:level", "'level' is not understood"),
        ("gaiaa:x.txt", "there is no module 'gaiaa'.*did you mean 'gaia'"),
    ],
)
def test_sources_that_mean_nothing_are_explained(source, message):
    with pytest.raises(UserError, match=message):
        load_tasks(source, "test")


def test_options_that_mean_nothing_are_explained(tmp_path):
    for options, message in (
        (":topic=Art", "have no 'topic' to choose by; they have level"),
        (":since=2024", "no 'date'"),
        (":attachments=1", ": attachments=1; "),
        (":protocol=webb", "webb"),
    ):
        with pytest.raises(UserError, match=message):
            load("gaia", tmp_path, options=options)


def test_a_folder_of_a_benchmark_is_read(tmp_path):
    rows = [{"id": f"q{i}", "question": f"{i}?", "answer": ["x"]} for i in range(3)]
    folder = tmp_path / "nq"
    folder.mkdir()
    write(folder / "a.parquet", rows[:2])
    write(folder / "b.parquet", rows[2:])
    tasks = load_tasks(f"nq:{folder}:protocol=web", "test")
    assert [(task.id, task.protocol) for task in tasks] == [(f"q{i}", "web") for i in range(3)]
