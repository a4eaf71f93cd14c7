"""Drafts of tasks, and the checks of their texts."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol

from coa_jax.bounds import Bounded, Count, Natural, Share
from coa_jax.distill.contamination import ngrams
from coa_jax.distill.duplicates import similarity
from coa_jax.tasks.base import Task
from coa_jax.tasks.factbook_facts import split_of
from coa_jax.tasks.grading import normalize_answer
from coa_jax.tools.factbook_pages import Passage

Form = Literal["atomic", "depth", "width"]

_OF_THE_TEXT = re.compile(
    r"\b(?:th(?:is|e|at)|given|above) (?:passage|document|text|article|excerpt|paragraph|snippet)\b"
    r"|\b(?:mentioned|described|stated|listed) (?:above|below|here)\b",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True)
class Document:
    """A passage of the corpus, as an author sees it."""

    title: str
    text: str

    @property
    def subject(self) -> str:
        """Subject of the document: the title up to a colon, or the text if there is no title."""
        return self.title.partition(": ")[0].strip() or self.text

    @property
    def split(self) -> str:
        """Split of the questions about its subject, the same as in the factbook source."""
        return split_of(self.subject)


def document_of(passage: Passage) -> Document:
    """Converts a passage of the search index to a document."""
    return Document(passage.title, passage.text)


@dataclasses.dataclass(frozen=True)
class Draft:
    """A question that an author has written, with all data about it.

    Attributes:
        form: how it was made.
        question: the question.
        gold: accepted answers, as in `Task.gold`.
        documents: documents from which it was written, in the order of the hops.
        steps: (question, answer) of its atomic questions, in order.
        hidden: intermediate answers, which the question must not reveal.
        topic: drafts of one topic may be joined to a wider question; None for never.
    """

    form: Form
    question: str
    gold: tuple[str, ...]
    documents: tuple[Document, ...]
    steps: tuple[tuple[str, str], ...]
    hidden: tuple[str, ...] = ()
    topic: str | None = None

    @property
    def split(self) -> str:
        """Split of its documents."""
        return self.documents[0].split

    @property
    def id(self) -> str:
        """Id, a hash of question and answers."""
        text = "\n".join((self.question, *self.gold))
        digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()
        return f"synthetic-{self.form}-{digest[:16]}"

    def task(self, protocol: str, source: str) -> Task:
        """Returns the draft as a task."""
        return Task(self.id, self.question, protocol, self.gold, source, {"hops": len(self.steps)})

    def to_json(self) -> dict[str, Any]:
        """Returns its further data as JSON, besides question and answers."""
        return {
            "kind": self.form,
            "hops": len(self.steps),
            "steps": [{"question": q, "answer": a} for q, a in self.steps],
            "documents": [document.title for document in self.documents],
        }


class Author(Protocol):
    """Writes questions; raises `llm.UnusableReplyError` if a reply could not be used."""

    def reads(self, document: Document) -> bool:
        """Returns whether it could write questions about a document at all; costs nothing."""
        ...

    async def atomic(self, document: Document) -> list[Draft]:
        """Returns questions that a single document answers."""
        ...

    async def deepen(self, draft: Draft, document: Document) -> Draft | None:
        """Returns a question one hop longer, about the answer of `draft`, for `document`."""
        ...

    async def widen(self, one: Draft, other: Draft) -> Draft | None:
        """Returns a question that needs the answers of both drafts."""
        ...


def told(answers: Iterable[str], text: str) -> bool:
    """Returns whether an answer, or a member of an answer set, occurs in a text as whole words."""
    haystack = f" {normalize_answer(text)} "
    parts = (normalize_answer(part) for answer in answers for part in answer.split("|"))
    return any(f" {part} " in haystack for part in parts if part)


def _stands_in(answer: str, text: str) -> bool:
    return all(told([part], text) for part in answer.split("|"))


@dataclasses.dataclass(frozen=True)
class TextRules(Bounded):
    """Rules for the texts of drafts.

    Attributes:
        min_words, max_words: number of words of a question.
        max_answer_words: maximum number of words of each accepted answer.
        near_duplicate: Jaccard similarity of the word bigrams of two questions with the same
            answer, from which they count as duplicates.
    """

    min_words: Natural = 4
    max_words: Count = 80
    max_answer_words: Count = 12
    near_duplicate: Share = 0.8


def fault_of(draft: Draft, rules: TextRules) -> str | None:
    """Returns the name of a fault in the text of a draft; None for no fault."""
    words = len(draft.question.split())
    if not rules.min_words <= words <= rules.max_words:
        return "question_length"
    if not draft.gold or not all(normalize_answer(answer) for answer in draft.gold):
        return "no_answer"
    if any(len(answer.split()) > rules.max_answer_words for answer in draft.gold):
        return "answer_length"
    if _OF_THE_TEXT.search(draft.question):
        return "speaks_of_the_text"
    if told(draft.gold, draft.question):
        return "answer_told"
    if told(draft.hidden, draft.question):
        return "intermediate_told"
    if draft.form == "atomic":
        source = draft.documents[0]
        if not any(_stands_in(a, f"{source.title}\n{source.text}") for a in draft.gold):
            return "answer_not_in_document"
    return None


class Duplicates:
    """The questions so far, to detect repetitions."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._questions: set[str] = set()
        self._by_answer: dict[str, list[frozenset[tuple[str, ...]]]] = {}

    def repeats(self, draft: Draft) -> bool:
        """Returns whether the draft repeats an earlier question; if not, records it."""
        question = normalize_answer(draft.question)
        runs = ngrams(draft.question, 2)
        same_answer = self._by_answer.setdefault(normalize_answer(draft.gold[0]), [])
        if question in self._questions or any(
            similarity(runs, other) >= self._threshold for other in same_answer
        ):
            return True
        self._questions.add(question)
        same_answer.append(runs)
        return False


def screen(drafts: Sequence[Draft], rules: TextRules, duplicates: Duplicates) -> list[str | None]:
    """Returns for each draft the fault of its text, or None; drafts without fault are recorded.

    Args:
        drafts: the drafts.
        rules: rules for texts.
        duplicates: questions so far.
    """
    faults = []
    for draft in drafts:
        fault = fault_of(draft, rules)
        if fault is None and duplicates.repeats(draft):
            fault = "duplicate"
        faults.append(fault)
    return faults
