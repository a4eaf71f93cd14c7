"""Converts rows of the AFM release and of benchmarks to tasks.

The fields of a row determine which kind of row it is:

* A row with ``reward_model`` and ``prompt`` belongs to a parquet file of the release.
* A row with ``public_test_cases`` belongs to LiveCodeBench.
* A row with ``public_tests`` belongs to CodeContests.
* A row with a question (``question``, ``problem``, ``Question``, ``Problem``) and an answer
  (``answer``, ``answers``, ``golden_answers``, ``Final answer``, ``Answer``) belongs to GAIA,
  BrowseComp, HLE, WebWalker, MATH, AIME or another set of questions.

``metadata["grader"]`` of a task names the reward that grades its answers (see
``coa_jax.tasks.graders``). The messages in the field ``prompt`` are copied unchanged to
``Task.prompt`` and ``Task.context``.
"""

from __future__ import annotations

import ast
import json
from typing import Any

from coa_jax.data.rows import Fields
from coa_jax.files import untrusted
from coa_jax.protocol import Messages, get_protocol, split_level
from coa_jax.tasks.base import Task
from coa_jax.tasks.checks import checked
from coa_jax.tasks.code_tests import read_tests
from coa_jax.tasks.private_tests import livecodebench_tests
from coa_jax.tasks.prompts import read_messages, split_message
from coa_jax.tasks.question_rows import ANSWERS, QUESTIONS, golds

_KEPT = {  # field of a row -> metadata key, by which evaluations group their results
    "Level": "level", "level": "level", "topic": "topic", "category": "topic", "subject": "topic",
    "answer_type": "answer_type", "data_source": "data_source", "difficulty": "level",
    "platform": "platform", "contest_date": "date", "root_url": "root_url",
}  # fmt: skip
_WEB_FIELDS = frozenset({"Level", "root_url", "topic", "answer_type", "Final answer"})
_MATHS = ("math", "aime", "amc", "olympiad")


def release_task(row: Fields, number: int, protocol: str, source: str, default: str) -> Task:
    """Converts a row of the AFM release or of a benchmark to a task.

    Args:
        row: fields of the row, with the names that its authors gave them.
        number: number of the task, used as id of a row without an id.
        protocol: protocol of the task; "" to choose the protocol by the fields of the row.
        source: source of the task.
        default: protocol if ``protocol`` is "" and no field of the row determines the protocol.

    Raises:
        KeyError, TypeError, ValueError: the row cannot become a task.
    """
    task = _task(row, number, protocol, source, default)
    # `_task` has already checked the tests of programs, which may have megabytes.
    return task if task.is_program else checked(task)


def _task(row: Fields, number: int, protocol: str, source: str, default: str) -> Task:
    metadata = {new: row[old] for old, new in _KEPT.items() if row.get(old) not in (None, "")}
    info = row.get("info")
    if isinstance(info, dict):
        keys = (("Level", "level"), ("type", "kind"), ("lang", "lang"), ("domain", "topic"))
        metadata |= {new: info[old] for old, new in keys if old in info}
    if "reward_model" in row:
        return _verl_task(row, number, protocol, source, metadata, default)
    if "public_test_cases" in row or "public_tests" in row:
        return contest_task(row, number, protocol, source, metadata)
    question = _question(row)
    key = next((key for key in ANSWERS if key in row), None)
    if key is None:
        raise ValueError("there is no answer")
    gold, web = golds(row[key]), bool(_WEB_FIELDS & set(row))
    maths = "problem" in row or "Problem" in row
    name = protocol or ("code" if maths else "web" if web else default)
    # Under the code protocol `checked` determines the kind of the answers.
    if maths or web or split_level(name)[0] != "code":
        metadata["grader"] = "math" if maths else "judge" if web else "exact_match"
    identity = row.get("id", row.get("task_id", row.get("unique_id", number)))
    chat = row.get("prompt")  # only a list is a prompt; a string may be any text
    messages = read_messages(chat) if chat and isinstance(chat, list) else Messages("")
    return Task(str(identity), question, name, gold, source, metadata, *messages[:2])


def _question(row: Fields) -> str:
    key = next((key for key in QUESTIONS if key in row), None)
    if key is None:
        raise ValueError("there is no question")
    if not isinstance(row[key], str) or not row[key].strip():
        raise ValueError(f"the field {key!r} must be a string")
    return str(row[key]).strip()


def _verl_task(
    row: Fields,
    number: int,
    protocol: str,
    source: str,
    metadata: dict[str, Any],
    default: str,
) -> Task:
    """Parses a row of the release's training and evaluation files, which have verl's schema."""
    extra = row.get("extra_info") or {}
    data_source = str(row.get("data_source") or "")
    truth = _ground_truth(row["reward_model"]["ground_truth"])
    messages = read_messages(row["prompt"])
    _, question = split_message(messages.user)
    metadata |= {new: extra[old] for old, new in _KEPT.items() if extra.get(old) not in (None, "")}
    metadata["data_source"] = data_source
    if isinstance(truth, dict) and "target" in truth:
        question = str(truth.get("question") or extra.get("question") or question)
        gold, grader = golds(truth["target"]), "exact_match"
    elif isinstance(truth, dict):
        read_tests(truth)  # tests in an unknown format must be refused now, not during grading
        gold, grader = (json.dumps(truth, ensure_ascii=False),), "code"
        metadata["question_id"] = str(truth.get("question_id") or "")
    else:
        gold = golds(truth)
        maths_source = any(word in data_source.lower() for word in _MATHS)
        maths = maths_source or row.get("ability") in ("math", "fact-reasoning")
        grader = "math" if maths else "exact_match"
    metadata["grader"] = grader
    default = "code" if grader in ("code", "math") else _by_tools(extra) or default
    identity = f"{data_source}/{extra.get('index', number)}"
    name = protocol or default
    return Task(identity, question, name, gold, source, metadata, *messages[:2])


def _by_tools(extra: Fields) -> str:
    """Returns the protocol whose tools are exactly those that a row names; "" if there is none."""
    tools = {name for name, value in (extra.get("tools_kwargs") or {}).items() if value is not None}
    protocols = ("mhqa", "web", "code", "universal")
    return next((name for name in protocols if tools == {*get_protocol(name).tools}), "")


def _ground_truth(value: Any) -> Any:
    """Parses the accepted answer of a row, which may be a string with JSON or a Python literal."""
    if not isinstance(value, str):
        return value
    for read in (untrusted.parse_json, ast.literal_eval):
        try:
            parsed = read(value)
        except (SyntaxError, *untrusted.MALFORMED):
            continue
        texts = isinstance(parsed, list) and all(isinstance(item, str) for item in parsed)
        return parsed if parsed and (texts or isinstance(parsed, dict | str)) else value
    return value


def contest_task(
    row: Fields, number: int, protocol: str, source: str, metadata: dict[str, Any]
) -> Task:
    """Parses a row of LiveCodeBench or CodeContests, with the field names of the authors.

    Args:
        row: fields of a row as the authors publish it.
        number: row number in the file. A CodeContests row without a name gets this number as its
            id.
        protocol: protocol of the task; "" for ``code``.
        source: source of the task.
        metadata: metadata of the task. The function adds ``grader`` and ``question_id``.
    """
    if "public_test_cases" in row:
        tests = livecodebench_tests(dict(row))
        question = str(row["question_content"]).strip()
        if row.get("starter_code"):
            question += f"\n\nUse this starting point:\n```py\n{row['starter_code']}\n```"
        identity = str(row["question_id"])
        test_fields: dict[str, Any] = {
            "fn_name": tests.entry,
            "inputs": [case.given for case in tests.cases],
            "outputs": [case.expected for case in tests.cases],
        }
    else:
        question, identity = str(row["description"]).strip(), str(row.get("name") or number)
        groups = [row.get(key) for key in ("public_tests", "private_tests", "generated_tests")]
        test_fields = {
            "input": [text for group in groups if group for text in group["input"]],
            "output": [text for group in groups if group for text in group["output"]],
            "compare": "tokens",
        }
        read_tests(test_fields)
    metadata |= {"grader": "code", "question_id": identity}
    gold = (json.dumps(test_fields, ensure_ascii=False),)
    return Task(identity, question, protocol or "code", gold, source, metadata)
