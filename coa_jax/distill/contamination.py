"""Runs that show an evaluation set: by shared words, by shared entities, by the pages they open.

The paper's own showcase answers a benchmark question from a page that mirrors the benchmark
(App C), so addresses are looked at as well as texts.
"""

from __future__ import annotations

import dataclasses
import re
import urllib.parse
from collections import defaultdict
from collections.abc import Iterable, Sequence

from coa_jax.distill.filters import Run
from coa_jax.distill.messages import Kind
from coa_jax.tasks.base import Task
from coa_jax.tasks.grading import normalize_answer
from coa_jax.tools.words import words

MIRRORS = (
    "huggingface.co/datasets",
    "huggingface.co/spaces",
    "datasets-server.huggingface.co",
    "hf-mirror.com",
    "paperswithcode.com",
    "kaggle.com/datasets",
)
"""Addresses under which copies of benchmarks are found."""

_NAME = re.compile(r"[A-Z][\w'-]*(?:(?: (?:of|the|de|la|and))? [A-Z][\w'-]*)*|\d+")
# An address may stand inside another: an archive, a proxy.
_URL = re.compile(r"(?=https?://([^\s|)\"'<>]+))", re.IGNORECASE)
_HOST = re.compile(r"(?:[^/@]*@)?(?:www\.)?([^/:?#]*?)\.?(?::\d*)?(?=[/?#]|\Z)")
_OPENING = re.compile(
    r"(?:what|which|who|whose|whom|when|where|why|how|in|of|on|at|the|an?|is|are|was|were|did|does|"
    r"do|name|give|tell|find|list)\b\s*",
    re.IGNORECASE,
)


def ngrams(text: str, n: int) -> frozenset[tuple[str, ...]]:
    """Its runs of `n` words; a shorter text is one run."""
    found = words(text)
    if len(found) <= n:
        return frozenset([tuple(found)] if found else [])
    return frozenset(tuple(found[i : i + n]) for i in range(len(found) - n + 1))


def entities(question: str) -> frozenset[str]:
    """Names (runs of capitalised words) and numbers of a question, normalised."""
    names = set()
    for match in _NAME.finditer(" ".join(question.split())):
        name = match[0]
        while opening := _OPENING.match(name):  # a capital that only begins the sentence
            name = name[opening.end() :]
        if name[:1].isdigit() or name[:1].isupper():
            names.add(normalize_answer(name))
    return frozenset(names)


@dataclasses.dataclass(frozen=True)
class Contamination:
    """An index of evaluation questions.

    Attributes:
        ngram: length of the runs of words that are compared.
        share: part of a question's runs from which on it counts as shown.
        entity_share: part of a question's entities from which on another question with the same
            answer counts as the same; 0 compares no entities.
        shown: run of words -> questions that have it.
        questions: for each question: (runs of words, entities, normalised answers).
    """

    ngram: int
    share: float
    entity_share: float
    shown: dict[tuple[str, ...], list[int]]
    questions: list[tuple[int, frozenset[str], frozenset[str]]]

    def in_text(self, text: str) -> bool:
        """Whether a text shows an evaluation question."""
        found: dict[int, int] = defaultdict(int)
        lengths = {len(run) for run in self.shown}
        for n in lengths:
            for run in _exact_ngrams(text, n):
                for question in self.shown.get(run, ()):
                    found[question] += 1
        return any(count >= self.share * self.questions[q][0] for q, count in found.items())

    def same_question(self, question: str, gold: Iterable[str]) -> bool:
        """Whether a question has the entities and the answer of an evaluation question."""
        if not self.entity_share:
            return False
        named, answers = entities(question), {normalize_answer(text) for text in gold}
        return any(
            len(theirs) >= 2
            and len(theirs & named) >= self.entity_share * len(theirs)
            and not answers.isdisjoint(accepted)
            for _, theirs, accepted in self.questions
        )

    def __call__(self, run: Run) -> bool:
        """Whether a run shows an evaluation question, by itself or in what a tool returned."""
        returned = (m.content for m in run.log.messages if m.kind is Kind.OBSERVATION)
        return (
            self.in_text(run.task.question)
            or self.same_question(run.task.question, run.task.gold)
            or any(map(self.in_text, returned))
        )


def _exact_ngrams(text: str, n: int) -> frozenset[tuple[str, ...]]:
    found = words(text)
    return frozenset(tuple(found[i : i + n]) for i in range(len(found) - n + 1))


def contamination(
    tasks: Sequence[Task], ngram: int = 8, share: float = 0.5, entity_share: float = 0.8
) -> Contamination:
    """Indexes evaluation tasks; see `Contamination` for the settings."""
    shown: dict[tuple[str, ...], list[int]] = defaultdict(list)
    questions = []
    for number, task in enumerate(tasks):
        runs = ngrams(task.question, ngram)
        for run in runs:
            shown[run].append(number)
        answers = frozenset(normalize_answer(text) for text in task.gold)
        questions.append((len(runs), entities(task.question), answers))
    return Contamination(ngram, share, entity_share, dict(shown), questions)


def opens_blocked(run: Run, blocked: Sequence[str]) -> bool:
    """Whether a call of a run goes to an address of a block list.

    Args:
        run: the run.
        blocked: beginnings of addresses without ``https://``, e.g. ``huggingface.co/datasets``.
    """
    starts = tuple(text.lower().rstrip("/") for text in blocked)
    addresses = [a for _, arguments in run.log.calls for a in _addresses(arguments)]
    return any(
        address.startswith(start) and address[len(start) : len(start) + 1] in ("", *"/?#")
        for address in addresses
        for start in starts
    )


def _addresses(arguments: str) -> list[str]:
    """The addresses in a call, those of one page in one form: without port, user and ``www``."""
    found = _URL.findall(urllib.parse.unquote(arguments).lower())
    return [re.sub("/+", "/", _HOST.sub(r"\1", address, count=1)) for address in found]
