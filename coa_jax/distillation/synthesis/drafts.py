"""Defines drafts, the questions that may become tasks, and checks their texts."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol

from coa_jax.config.extensions import ExtensionKind, bind
from coa_jax.config.fields import Bounded, Count, Natural, Share
from coa_jax.distillation.contamination import ngrams
from coa_jax.distillation.duplicates import similarity
from coa_jax.tasks.base import Task, split_of
from coa_jax.tasks.grading import normalize_answer
from coa_jax.tools.corpus import Passage

Form = Literal["atomic", "depth", "width"]

_OF_THE_TEXT = re.compile(
    r"\b(?:th(?:is|e|at)|given|above) (?:passage|document|text|article|excerpt|paragraph|snippet)\b"
    r"|\b(?:mentioned|described|stated|listed) (?:above|below|here)\b",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True)
class Document:
    """A passage of the corpus, about which an author (a program or a model) writes questions.

    Attributes:
        title: title of the passage.
        text: text of the passage.
    """

    title: str
    text: str

    @property
    def subject(self) -> str:
        """Subject of the document: the title up to a colon, or the text if there is no title."""
        return self.title.partition(": ")[0].strip() or self.text

    @property
    def split(self) -> str:
        """Name of the split, such as ``train``, to which questions about the subject belong.

        The task source ``factbook`` divides its questions in the same way.
        """
        return split_of(self.subject)


def document_of(passage: Passage) -> Document:
    """Converts a passage of the search index to a document."""
    return Document(passage.title, passage.text)


@dataclasses.dataclass(frozen=True)
class Draft:
    """A question that an author has written, with the documents and answers that belong to it.

    Attributes:
        form: how the question was made: from one document (``atomic``), by adding a hop
            (``depth``), or by joining two questions (``width``).
        question: text of the question.
        gold: accepted answers, as in `Task.gold`.
        documents: documents from which the question was written, in the order of the hops.
        steps: pairs (question, answer) of the atomic questions that the question consists of.
        hidden: intermediate answers, which the question must not reveal.
        topic: name of a topic; a draft is joined only with drafts of the same topic. If ``topic``
            is None, the draft is never joined with another draft.
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
        """Name of the split to which the draft belongs, which is the split of its documents."""
        return self.documents[0].split

    @property
    def id(self) -> str:
        """Id of the draft, which contains a hash of the question and the answers."""
        text = "\n".join((self.question, *self.gold))
        digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()
        return f"synthetic-{self.form}-{digest[:16]}"

    def task(self, protocol: str, source: str) -> Task:
        """Returns the draft as a task of the given protocol and source."""
        return Task(self.id, self.question, protocol, self.gold, source, {"hops": len(self.steps)})

    def to_json(self) -> dict[str, Any]:
        """Returns form, steps and documents of the draft as a JSON object, for metadata."""
        return {
            "kind": self.form,
            "hops": len(self.steps),
            "steps": [{"question": q, "answer": a} for q, a in self.steps],
            "documents": [document.title for document in self.documents],
        }


class Author(Protocol):
    """An interface for authors of drafts; a method returns [] or None if it has no draft."""

    def reads(self, document: Document) -> bool:
        """Returns whether the author can write about a document."""

    async def atomic(self, document: Document) -> list[Draft]:
        """Returns drafts of questions that the document alone answers."""

    async def add_hop(self, draft: Draft, document: Document) -> Draft | None:
        """Returns a draft with one more hop, which asks about the answer of ``draft``."""

    async def join_drafts(self, one: Draft, other: Draft) -> Draft | None:
        """Returns a draft of a question that asks for the answers of both drafts."""


AUTHORS = ExtensionKind(
    "author", "coa_jax.authors", {}, offers=("documents", "seed"), needs=("documents",)
)
"""Classes of authors without a language model, for documents of a known form."""


def facts_author(documents: Iterable[Document], seed: int) -> Author:
    """Returns the author ``facts``, which writes about plain sentences that state a fact.

    Raises:
        UserError: the author, an entry point of coa_jax, is not installed.
    """
    author: Author = bind(AUTHORS, "facts", {}, "the author")(documents=documents, seed=seed)
    return author


def contains_answer(answers: Iterable[str], text: str) -> bool:
    """Returns whether a text contains one of several answers as whole words.

    For an answer that is a set, such as ``red|blue``, one member suffices.
    """
    haystack = f" {normalize_answer(text)} "
    parts = (normalize_answer(part) for answer in answers for part in answer.split("|"))
    return any(f" {part} " in haystack for part in parts if part)


@dataclasses.dataclass(frozen=True)
class TextRules(Bounded):
    """Rules for the texts of drafts.

    Attributes:
        min_words, max_words: minimum and maximum number of words of a question.
        max_answer_words: maximum number of words of each accepted answer.
        near_duplicate: two questions with the same answer count as duplicates if their word bigrams
            have at least this Jaccard similarity.
    """

    min_words: Natural = 4
    max_words: Count = 80
    max_answer_words: Count = 12
    near_duplicate: Share = 0.8


def fault_of(draft: Draft, rules: TextRules) -> str | None:
    """Returns the name of the first rule that a draft's text breaks; None if it breaks none."""
    words = len(draft.question.split())
    if not rules.min_words <= words <= rules.max_words:
        return "question_length"
    if not draft.gold or not all(normalize_answer(answer) for answer in draft.gold):
        return "no_answer"
    if any(len(answer.split()) > rules.max_answer_words for answer in draft.gold):
        return "answer_length"
    if _OF_THE_TEXT.search(draft.question):
        return "speaks_of_the_text"
    if contains_answer(draft.gold, draft.question):
        return "answer_told"
    if contains_answer(draft.hidden, draft.question):
        return "intermediate_told"
    if draft.form == "atomic":
        text = f"{draft.documents[0].title}\n{draft.documents[0].text}"
        if not any(
            all(contains_answer([p], text) for p in answer.split("|")) for answer in draft.gold
        ):
            return "answer_not_in_document"
    return None


class Duplicates:
    """Remembers questions, to detect questions that repeat an earlier one."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._questions: set[str] = set()
        self._by_answer: dict[str, list[frozenset[tuple[str, ...]]]] = {}

    def repeats(self, draft: Draft) -> bool:
        """Returns whether a draft repeats an earlier question; if not, remembers its question."""
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
    """Returns for each draft the name of the first rule that its text breaks, or None.

    Args:
        drafts: questions that an author has just written.
        rules: rules for texts.
        duplicates: earlier questions. The questions of the drafts that break no rule are added.
    """
    faults = []
    for draft in drafts:
        fault = fault_of(draft, rules)
        if fault is None and duplicates.repeats(draft):
            fault = "duplicate"
        faults.append(fault)
    return faults
