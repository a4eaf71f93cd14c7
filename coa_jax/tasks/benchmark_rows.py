"""Parses rows of public benchmarks, with the field names that the authors publish.

The name of the benchmark selects the parser, not the fields of a row. The benchmarks are:

* web: GAIA, BrowseComp, HLE and WebWalkerQA,
* encyclopaedia: NQ, TriviaQA, PopQA, HotpotQA, 2WikiMultihopQA, MuSiQue and Bamboogle,
* mathematics: AIME, AMC, MATH500 and OlympiadBench,
* programs: LiveCodeBench and CodeContests.

The original files, the copies on Hugging Face and the copies of FlashRAG use different field names.
The parsers accept all of these names.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import re
from collections.abc import Callable
from typing import Any

from coa_jax.data.rows import Fields
from coa_jax.files.untrusted import parse_json
from coa_jax.protocol import parse_boxed
from coa_jax.tasks.release_rows import contest_task


@dataclasses.dataclass(frozen=True)
class Found:
    """A question of a benchmark.

    Attributes:
        id: id of the question in the benchmark; "" if the benchmark has no ids.
        question: text of the question.
        gold: accepted answers. An accepted answer of the form "A|B" is a set, and a right answer
            contains all its members.
        metadata: fields by which evaluations group their results, such as ``level``.
        attachment: name of the file that the question is about; "" if there is none.
    """

    id: str
    question: str
    gold: tuple[str, ...]
    metadata: dict[str, Any]
    attachment: str = ""


Read = Callable[[Fields], Found | None]
"""A parser of rows.

The result is None for a row that the benchmark does not score. For a row that does not belong to
the benchmark, the parser raises KeyError, TypeError or ValueError.
"""


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """The functions and names with which a benchmark's questions are parsed, solved and graded.

    Attributes:
        read: function that converts a row of the benchmark's files to a question. If the function
            returns None, the row is left out.
        protocol: name of the protocol in which the policy must answer.
        grader: name of the reward that grades the answers, see `coa_jax.tasks.graders`.
    """

    read: Read
    protocol: str
    grader: str


def _text(row: Fields, *keys: str) -> str:
    """Returns the text of the first of the given fields that the row has."""
    key = next((key for key in keys if key in row), None)
    if key is None:
        raise ValueError(f"there is no field {keys[0]!r}")
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"the field {key!r} must be a string")
    if not str(value).strip():
        raise ValueError(f"the field {key!r} is empty")
    return str(value).strip()


def _identity(row: Fields, *keys: str) -> str:
    return next((str(row[key]) for key in keys if row.get(key) not in (None, "")), "")


def _kept(row: Fields, **names: str) -> dict[str, Any]:
    """Returns a selection of a row's fields under new names; ``names`` maps new to old names."""
    return {new: row[old] for new, old in names.items() if row.get(old) not in (None, "")}


def _aliases(values: Any) -> tuple[str, ...]:
    """Converts the names of an answer to distinct accepted answers.

    The character "|" in a name is replaced, because it would turn the name into a set of answers.
    """
    values = list(values) if isinstance(values, list | tuple) else [values]
    if not all(isinstance(value, str | int | float) for value in values):
        raise ValueError("an answer must be a string, a number or a list of them")
    aliases = dict.fromkeys(str(value).replace("|", "/").strip() for value in values)
    aliases.pop("", None)
    if not aliases:
        raise ValueError("there is no answer")
    return tuple(aliases)


# --- the web -------------------------------------------------------------------------------


def gaia(row: Fields) -> Found:
    """Parses a row of GAIA (arXiv 2311.12983), which is a line of the file metadata.jsonl.

    Raises:
        ValueError: the row belongs to the test split, whose answers are not public.
    """
    answer = _text(row, "Final answer", "answer")
    if answer == "?":
        raise ValueError(
            "the answers of GAIA's test split are not public; use the validation split"
        )
    metadata = _kept(row, level="Level")
    if "level" in metadata:
        metadata["level"] = int(metadata["level"])
    question, attachment = _text(row, "Question", "question"), str(row.get("file_name") or "")
    return Found(_identity(row, "task_id", "id"), question, (answer,), metadata, attachment)


def decrypt(text: str, canary: str) -> str:
    """Decrypts a field of BrowseComp.

    The field is decoded from base64, and then XORed with the repeated SHA-256 hash of the canary.

    Args:
        text: the encrypted field.
        canary: the field ``canary`` of the same row.

    Raises:
        ValueError: the text was not encrypted with this canary.
    """
    try:
        data = base64.b64decode(text, validate=True)
        key = hashlib.sha256(canary.encode()).digest()
        key = (key * (len(data) // len(key) + 1))[: len(data)]
        return bytes(a ^ b for a, b in zip(data, key, strict=True)).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise ValueError("a field cannot be decrypted with the canary of its row") from error


def browsecomp(row: Fields) -> Found:
    """Parses a row of BrowseComp (arXiv 2504.12516), encrypted or already decrypted."""
    question, answer = _text(row, "problem", "question"), _text(row, "answer")
    if canary := str(row.get("canary") or ""):
        question, answer = decrypt(question, canary).strip(), decrypt(answer, canary).strip()
    if not question or not answer:
        raise ValueError("the question or its answer is empty")
    topic = _kept(row, topic="problem_topic") or _kept(row, topic="topic")
    return Found(_identity(row, "id"), question, (answer,), topic)


def hle(row: Fields) -> Found | None:
    """Parses a row of Humanity's Last Exam (arXiv 2501.14249).

    The result is None for a question with an image.
    """
    if row.get("image"):
        return None
    metadata = _kept(row, topic="category", subject="raw_subject", answer_type="answer_type")
    return Found(_identity(row, "id"), _text(row, "question"), (_text(row, "answer"),), metadata)


def webwalker(row: Fields) -> Found:
    """Parses a row of WebWalkerQA (arXiv 2501.07572)."""
    info = row.get("info") or {}
    info = parse_json(info) if isinstance(info, str) else info
    metadata = _kept(row, root_url="root_url")
    metadata |= _kept(info, level="Level", kind="type", lang="lang", topic="domain")
    metadata |= _kept(info, level="difficulty_level")
    return Found(_identity(row, "id"), _text(row, "question"), (_text(row, "answer"),), metadata)


# --- questions over an encyclopaedia -------------------------------------------------------


def open_question(row: Fields) -> Found:
    """Parses a row with the field names of FlashRAG, for example of NQ-open or Bamboogle."""
    key = next((k for k in ("golden_answers", "answers", "answer", "Answer") if k in row), None)
    if key is None:
        raise ValueError("there is no field 'answer'")
    extra = row.get("metadata") or {}
    extra = {k: v for k, v in dict(extra).items() if k in ("type", "level")}
    metadata = _kept({**extra, **row}, kind="type", level="level")
    return Found(_identity(row, "id"), _text(row, "question", "Question"), _aliases(row[key]),
                 metadata)  # fmt: skip


def triviaqa(row: Fields) -> Found:
    """Parses a row of TriviaQA (arXiv 1705.03551). Every alias of the answer is accepted."""
    answer = row.get("Answer", row.get("answer"))
    if not isinstance(answer, dict):
        return open_question(row)
    names = [answer.get("Value", answer.get("value"))]
    names += answer.get("Aliases", answer.get("aliases")) or []
    identity = _identity(row, "QuestionId", "question_id")
    gold = _aliases([name for name in names if name])
    return Found(identity, _text(row, "Question", "question"), gold, {})


def popqa(row: Fields) -> Found:
    """Parses a row of PopQA (arXiv 2212.10511), whose answers are a JSON list in one column."""
    if "possible_answers" not in row:
        return open_question(row)
    answers = row["possible_answers"]
    answers = parse_json(answers) if isinstance(answers, str) else answers
    return Found(_identity(row, "id"), _text(row, "question"), _aliases(answers),
                 _kept(row, kind="prop"))  # fmt: skip


def wikipedia_hops(row: Fields) -> Found:
    """Parses a row of HotpotQA or 2WikiMultihopQA.

    The metadata key ``hops`` is the number of pages with supporting facts.
    """
    facts = row.get("supporting_facts")
    titles = facts["title"] if isinstance(facts, dict) else [fact[0] for fact in facts or []]
    if "answer" not in row:
        return open_question(row)
    metadata = _kept(row, kind="type", level="level")
    if titles:
        metadata["hops"] = len(set(titles))
    identity = _identity(row, "_id", "id")
    return Found(identity, _text(row, "question"), _aliases(row["answer"]), metadata)


def musique(row: Fields) -> Found | None:
    """Parses a row of MuSiQue (arXiv 2108.00573).

    The result is None for a question that is marked as unanswerable.
    """
    if row.get("answerable") is False:
        return None
    identity = _identity(row, "id")
    hops = re.match(r"(\d+)hop", identity)
    metadata = {"hops": int(hops[1])} if hops else {}
    if "answer" not in row:
        question = open_question(row)
        return dataclasses.replace(question, metadata=metadata)
    gold = _aliases([row["answer"], *(row.get("answer_aliases") or [])])
    return Found(identity, _text(row, "question"), gold, metadata)


# --- mathematics and programs --------------------------------------------------------------


def maths(row: Fields) -> Found:
    r"""Parses a row of AIME, AMC or MATH500.

    If the row has no answer field, the answer is the content of ``\boxed`` in the solution.
    """
    question = _text(row, "problem", "Problem", "question", "Question")
    key = next((k for k in ("answer", "Answer", "expected_answer") if k in row), None)
    gold = _text(row, key) if key else parse_boxed(_text(row, "solution", "Solution"))
    if not gold:
        raise ValueError("there is no answer, and the solution has no \\boxed{...}")
    metadata = _kept(row, level="level", topic="subject") | _kept(row, level="Level", topic="type")
    identity = _identity(row, "unique_id", "ID", "id", "problem_idx")
    return Found(identity, question, (gold,), metadata)


def olympiadbench(row: Fields) -> Found | None:
    """Parses a row of OlympiadBench (arXiv 2402.14008).

    The result is None for questions with images, for multiple-choice questions, and for questions
    that people must grade, such as proofs.
    """
    images = any(value for key, value in row.items() if key.startswith("image_"))
    if images or str(row.get("modality") or "Text-only") != "Text-only":
        return None
    kind = str(row.get("answer_type") or "")
    open_ended = str(row.get("question_type") or "Open-ended") == "Open-ended"
    if not open_ended or "human" in kind.lower() or not row.get("final_answer"):
        return None
    final = row["final_answer"]
    final = final if isinstance(final, list) else [final]
    question = _text(row, "question")
    if context := str(row.get("context") or "").strip():
        question = f"{context}\n{question}"
    metadata = _kept(row, topic="subfield", subject="subject", lang="language")
    if kind:
        metadata["kind"] = kind
    gold = (", ".join(str(part).strip() for part in final),)
    return Found(_identity(row, "id"), question, gold, metadata)


def contest(row: Fields) -> Found:
    """Parses a row of LiveCodeBench or CodeContests, with its tests.

    The tests of LiveCodeBench contain a pickle. Reading it runs no code from the file, because the
    unpickler replaces every class that the pickle names by a simple record.
    """
    metadata = _kept(row, level="difficulty", platform="platform", date="contest_date")
    if "date" in metadata:
        metadata["date"] = str(metadata["date"])
    task = contest_task(row, 0, "code", "", metadata)
    return Found(task.id, task.question, task.gold, task.metadata)


BENCHMARKS: dict[str, Benchmark] = {
    "gaia": Benchmark(gaia, "web", "judge"),
    "browsecomp": Benchmark(browsecomp, "web", "judge"),
    "hle": Benchmark(hle, "web", "judge"),
    "webwalker": Benchmark(webwalker, "web", "judge"),
    "nq": Benchmark(open_question, "mhqa", "exact_match"),
    "triviaqa": Benchmark(triviaqa, "mhqa", "exact_match"),
    "popqa": Benchmark(popqa, "mhqa", "exact_match"),
    "hotpotqa": Benchmark(wikipedia_hops, "mhqa", "exact_match"),
    "2wiki": Benchmark(wikipedia_hops, "mhqa", "exact_match"),
    "musique": Benchmark(musique, "mhqa", "exact_match"),
    "bamboogle": Benchmark(open_question, "mhqa", "exact_match"),
    "aime": Benchmark(maths, "code", "math"),
    "amc": Benchmark(maths, "code", "math"),
    "math500": Benchmark(maths, "code", "math"),
    "olympiadbench": Benchmark(olympiadbench, "code", "math"),
    "livecodebench": Benchmark(contest, "code", "code"),
    "codecontests": Benchmark(contest, "code", "code"),
}
