"""Detects runs that reveal questions of an evaluation set, by words, entities or opened pages.

In a showcase of the Chain-of-Agents paper (appendix C), the agent answers a benchmark question from
a web page with a copy of the benchmark. Therefore this module checks both the URLs and the texts of
a run.
"""

from __future__ import annotations

import dataclasses
import re
import unicodedata
import urllib.parse
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence

from coa_jax.distillation.filters import TeacherRun
from coa_jax.distillation.messages import Kind
from coa_jax.tasks.base import Task
from coa_jax.tasks.grading import normalize_answer
from coa_jax.tools.words import words

# Matches a number with its separators, initials with their dots, a word, or a character between
# these.
_PIECE = re.compile(
    r"(?P<number>\d+(?:[.,]\d+)*)|(?P<word>(?:[^\W\d_]\.)+[^\W\d_]\b|[^\W\d_][\w'\u2019-]*)|\S"
)
_POSSESSIVE = re.compile(r"(?:['\u2019]s|['\u2019])\Z", re.IGNORECASE)
_INITIALS = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]")
_LINKS = frozenset(("of", "the", "de", "la", "and"))
_URL = re.compile(r"https?://([^\s|)\"'<>]+)")
_HOST = re.compile(r"(?:.*@)?(.*?)\.*(?::\d*)?")
_OPENING = re.compile(
    r"(?:what|which|who|whose|whom|when|where|why|how|in|of|on|at|the|an?|is|are|was|were|did|does|"
    r"do|name|give|tell|find|list)\b\s*",
    re.IGNORECASE,
)
_FUNCTION_WORDS = frozenset(
    words(
        "a an and are as at be by did do does find for from give has have he her his how in is it "
        "its list me name of on or s she tell that the their they this to was were what when where "
        "which who whom whose why will with you"
    )
)


def ngrams(text: str, n: int) -> frozenset[tuple[str, ...]]:
    """Returns the set of word n-grams of a text, for comparing texts.

    A text with fewer than ``n`` words is a single n-gram.
    """
    tokens = words(text)
    size = min(n, len(tokens))
    return _ngrams(tokens, size) if size else frozenset()


def _ngrams(tokens: Sequence[str], n: int) -> frozenset[tuple[str, ...]]:
    return frozenset(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def entities(question: str) -> frozenset[str]:
    """Returns the names (runs of capitalised words) and the numbers in a question, normalised."""
    names, texts = [], []
    name: list[str] = []
    linked: list[str] = []  # words inside a name if another capitalised word follows

    def close() -> None:
        if name:
            names.append(" ".join(name))
        name.clear()
        linked.clear()

    for piece in _PIECE.finditer(unicodedata.normalize("NFC", question)):
        word = piece["word"] or ""
        if word[:1].isupper():
            plain = _POSSESSIVE.sub("", word)
            name += [*linked, plain]
            linked.clear()
            if plain != word:
                close()
        elif name and not linked and word in _LINKS:
            linked.append(word)
        elif piece[0] != "." or not _INITIALS.fullmatch(name[-1] if name else ""):
            close()
            texts += [piece["number"]] if piece["number"] else []
    close()
    for text in names:
        while opening := _OPENING.match(text):  # capitalised only because it begins the question
            text = text[opening.end() :]
        if text[:1].isupper():
            texts.append(text)
    return frozenset(map(normalize_answer, texts))


def content_words(question: str) -> frozenset[str]:
    """Returns the words of a question, without English function words such as "the"."""
    return frozenset(words(question)) - _FUNCTION_WORDS


@dataclasses.dataclass(frozen=True)
class _Indexed:
    """An evaluation question, as its number of n-grams and the features that are compared."""

    runs: int
    entities: frozenset[str]
    content: frozenset[str]
    answers: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Contamination:
    """An index of evaluation questions, which detects training data that reveals one of them.

    Attributes:
        ngram: number of words of the n-grams that are compared.
        share: a text reveals a question if it contains at least this share of the question's
            n-grams.
        entity_share: a training question reveals an evaluation question if both have the same
            answer, and the training question contains at least this share of the evaluation
            question's `entities` (names and numbers). If these are fewer than two, the second
            condition is that the training question contains the entity, if there is one, and this
            share of the evaluation question's `content_words`. 0 disables this comparison.
        shown: maps each n-gram to the indices of the evaluation questions that contain the n-gram.
        questions: the evaluation questions.
    """

    ngram: int
    share: float
    entity_share: float
    shown: dict[tuple[str, ...], list[int]]
    questions: list[_Indexed]

    def in_text(self, text: str) -> bool:
        """Returns whether a text contains enough n-grams of an evaluation question to reveal it."""
        tokens, lengths = words(text), {len(run) for run in self.shown}
        runs = (run for n in lengths for run in _ngrams(tokens, n))
        matches = Counter(question for run in runs for question in self.shown.get(run, ()))
        return any(count >= self.share * self.questions[q].runs for q, count in matches.items())

    def same_question(self, question: str, gold: Iterable[str]) -> bool:
        """Returns whether a question asks the same as an evaluation question, in other words.

        The two must have the same answer and enough common entities, see ``entity_share``.

        Args:
            question: the question.
            gold: accepted answers to the question.
        """
        if not self.entity_share:
            return False
        names, content = entities(question), content_words(question)
        answers = {normalize_answer(text) for text in gold}
        plain = f" {normalize_answer(question)} "

        def alike(theirs: _Indexed) -> bool:
            if len(theirs.entities) >= 2:
                return len(theirs.entities & names) >= self.entity_share * len(theirs.entities)
            if not all(name in names or f" {name} " in plain for name in theirs.entities):
                return False
            terms = theirs.content
            return len(terms) >= 2 and len(terms & content) >= self.entity_share * len(terms)

        return any(not answers.isdisjoint(q.answers) and alike(q) for q in self.questions)

    def __call__(self, run: TeacherRun) -> bool:
        """Returns whether a run's question or observations reveal an evaluation question."""
        returned = (m.content for m in run.log.messages if m.kind is Kind.OBSERVATION)
        return (
            self.in_text(run.task.question)
            or self.same_question(run.task.question, run.task.gold)
            or any(map(self.in_text, returned))
        )


def contamination(
    tasks: Sequence[Task], ngram: int = 8, share: float = 0.5, entity_share: float = 0.8
) -> Contamination:
    """Creates the index by which runs that reveal an evaluation question are found.

    Args:
        tasks: the evaluation tasks.
        ngram, share, entity_share: thresholds, see `Contamination`.
    """
    shown: dict[tuple[str, ...], list[int]] = defaultdict(list)
    questions = []
    for number, task in enumerate(tasks):
        runs = ngrams(task.question, ngram)
        for run in runs:
            shown[run].append(number)
        answers = frozenset(normalize_answer(text) for text in task.gold)
        names, content = entities(task.question), content_words(task.question)
        questions.append(_Indexed(len(runs), names, content, answers))
    return Contamination(ngram, share, entity_share, dict(shown), questions)


def opens_blocked(run: TeacherRun, blocked: Sequence[str]) -> bool:
    """Returns whether a tool call of a run contains the URL of a blocked page.

    The URL of an archive or a proxy contains the URL of the archived page in its path or query,
    with or without ``https://``. Therefore the function searches for blocked hosts and paths at
    every position of a URL. It also returns True for a URL that mentions a blocked page without
    opening it.

    Args:
        run: a run of the teacher, with its tool calls.
        blocked: blocked pages without ``https://``: a host, which includes its subdomains, or a
            host with the beginning of a path, e.g. ``huggingface.co/datasets``.
    """
    pages = [tuple(text.lower().strip("/").split("/")) for text in blocked]
    hosts = {page[0] for page in pages}
    addresses = [a for _, arguments in run.log.calls for a in _addresses(arguments, hosts)]
    return any(
        segments[at + 1 : at + len(page)] == page[1:] and _is_at(page[0], segments[at])
        for segments in addresses
        for page in pages
        for at in range(len(segments))
    )


def _is_at(host: str, segment: str) -> bool:
    return segment == host or segment.endswith(f".{host}")


def _addresses(arguments: str, hosts: Collection[str]) -> set[tuple[str, ...]]:
    """Returns the normalised URLs in the arguments of a call.

    Args:
        arguments: arguments of the call.
        hosts: blocked hosts; a segment ``..`` never removes one of them.

    Returns:
        Each URL as its segments: the URL is split at every separator of a path or query, and ports,
        user names, empty segments and dots are removed.
    """
    addresses = set()
    text, before = arguments.lower(), ""
    while text != before:  # a URL may be percent-encoded several times
        for address in _URL.findall(text):
            while (plain := urllib.parse.unquote(address)) != address:
                address = plain
            addresses.add(_segments(address.lower(), hosts))
        text, before = urllib.parse.unquote(text), text
    return addresses


def _segments(address: str, hosts: Collection[str]) -> tuple[str, ...]:
    path: list[str] = []
    for part in re.split(r"[/\\?&=#;,\s]+", address):
        if part == "..":
            if path and not any(_is_at(host, path[-1]) for host in hosts):
                path.pop()
        elif part and part != "." and (segment := _HOST.fullmatch(part)):
            path.append(segment[1])
    return tuple(path)
