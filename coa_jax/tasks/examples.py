"""Writes a few questions in the format of each benchmark, for test runs of configs/evaluate.

The files are ``NAME.jsonl`` for each benchmark of `coa_jax.tasks.benchmark_rows`, and
``tests/ID.json`` with the private tests of the LiveCodeBench questions. No question comes from the
benchmarks: the questions were written for this module.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coa_jax.files import durable, jsonl
from coa_jax.tasks.benchmark_rows import BENCHMARKS

_CAPITALS = {"Lesotho": "Maseru", "Bhutan": "Thimphu", "Iceland": "Reykjavik", "Chad": "N'Djamena"}
_SUMS = {"What is 12 times 7?": "84", "What is half of 3?": "\\frac{3}{2}"}
_ADD = "Read two whole numbers from one line and print their sum."


def _questions() -> list[tuple[str, str]]:
    return [(f"What is the capital of {name}?", capital) for name, capital in _CAPITALS.items()]


def _case(stdin: str, expected: str) -> dict[str, str]:
    return {"input": stdin, "output": expected, "testtype": "stdin"}


def _rows(name: str) -> list[dict[str, Any]]:
    """Returns questions as rows with the fields of a benchmark."""
    if name == "livecodebench":
        public = json.dumps([_case("1 2\n", "3\n")])
        return [{"question_id": f"debug_{number}", "question_content": _ADD, "platform": "debug",
                 "difficulty": level, "contest_date": "2024-09-01", "starter_code": "",
                 "public_test_cases": public, "private_test_cases": "", "metadata": "{}"}
                for number, level in enumerate(("easy", "hard"))]  # fmt: skip
    if name == "codecontests":
        tests = {"input": ["1 2\n"], "output": ["3\n"]}
        return [{"name": "debug", "description": _ADD, "public_tests": tests}]
    if name == "olympiadbench":
        return [{"id": number, "question": question, "final_answer": [answer],
                 "answer_type": "Numerical", "subfield": "Algebra", "question_type": "Open-ended"}
                for number, (question, answer) in enumerate(_SUMS.items())]  # fmt: skip
    if BENCHMARKS[name].grader == "math":
        return [{"problem": question, "answer": answer, "level": 1, "subject": "Algebra"}
                for question, answer in _SUMS.items()]  # fmt: skip
    if name == "gaia":
        return [{"task_id": str(number), "Question": question, "Final answer": answer, "Level": 1}
                for number, (question, answer) in enumerate(_questions())]  # fmt: skip
    kinds: dict[str, dict[str, Any]] = {
        "browsecomp": {"problem_topic": "Geography"},
        "hle": {"image": "", "category": "Other", "answer_type": "exactMatch"},
        "webwalker": {"root_url": "https://debug.example/", "info": {"lang": "en", "type": "one"}},
        "hotpotqa": {"type": "bridge", "supporting_facts": [["Lesotho", 0]]},
    }
    key = "problem" if name == "browsecomp" else "question"
    return [
        {key: question, "answer": answer, **kinds.get(name, {})}
        for question, answer in _questions()
    ]


def write_examples(folder: Path) -> None:
    """Writes example questions in the format of each benchmark to a folder, which is created.

    The docstring of this module lists the files.
    """
    (folder / "tests").mkdir(parents=True, exist_ok=True)
    for name in BENCHMARKS:
        jsonl.write_lines(folder / f"{name}.jsonl", _rows(name))
    tests = {"public_test_cases": [_case("1 2\n", "3\n"), _case("-5 5\n", "0\n")]}
    for row in _rows("livecodebench"):
        durable.write_json(folder / "tests" / f"{row['question_id']}.json", tests)
