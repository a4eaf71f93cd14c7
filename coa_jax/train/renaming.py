"""Renames entities in records, so that a policy learns to copy names instead of memorising them.

A corpus has only a few hundred entities. A policy that is trained from scratch memorises these
entities sooner than it learns to copy a name from the question into a query. It then fails on every
unseen entity. Renaming replaces the names and numbers of a record by random names and numbers,
consistently in the whole record including observations. The behaviour to learn stays the same, but
there is nothing to memorise.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from coa_jax.data.trajectory import DistilledRecord
from coa_jax.protocol import Prompt, messages_of

Change = Callable[[DistilledRecord, np.random.Generator], DistilledRecord]

_WORD = re.compile(r"[^\W\d_]+")
_NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+|\d{4,}")
_LOWER_SHARE = 0.2  # share of new names in lower case, as of currencies


def renaming(share: float) -> Callable[[Any, Sequence[DistilledRecord], Prompt], Change] | None:
    """Returns the argument ``augmentation`` of `sft.train` that renames entities in some records.

    Words that occur in many records do not count as names, see `template_words`.

    Args:
        share: probability that the entities of a record are renamed each time the record is used.

    Returns:
        A function that takes the tokenizer, the records and the prompt style, and returns the
        function that renames the entities of a record; None if ``share`` is 0.
    """
    if not share:
        return None

    def prepare(tokenizer: Any, records: Sequence[DistilledRecord], prompt: Prompt) -> Change:
        keep, pieces = frozenset(template_words(records, prompt)), NamePieces.of(tokenizer)

        def change(record: DistilledRecord, rng: np.random.Generator) -> DistilledRecord:
            return rename(record, keep, pieces, rng) if rng.random() < share else record

        return change

    return prepare


@dataclasses.dataclass(frozen=True)
class NamePieces:
    """The pieces that new names consist of: all tokens of a tokenizer that contain only letters.

    The policy never learns to write a token that does not occur in training. Therefore the pieces
    of new names are drawn uniformly, so that all these tokens occur.

    Attributes:
        first: capitalised pieces, with which names begin.
        further: pieces in lower case, with which names continue.
    """

    first: tuple[str, ...]
    further: tuple[str, ...]

    @classmethod
    def of(cls, tokenizer: Any) -> NamePieces:
        """Collects the pieces of random names from a tokenizer's vocabulary."""
        tokens = {tokenizer.decode([index]).strip() for index in range(len(tokenizer))}
        words = sorted(token for token in tokens if _WORD.fullmatch(token))
        capitalised = tuple(word for word in words if word == word.capitalize())
        return cls(capitalised, tuple(word for word in words if word == word.lower()))

    def name(self, rng: np.random.Generator) -> str:
        """Returns a random name of two to four pieces."""
        pieces = [self.further[int(i)] for i in rng.integers(0, len(self.further), 4)]
        if rng.random() < _LOWER_SHARE:
            start = pieces[3]
        elif rng.random() < 0.5:
            start = self.first[int(rng.integers(0, len(self.first)))]
        else:
            start = pieces[3].capitalize()
        return start + "".join(pieces[: int(rng.integers(1, 4))])


def rename(
    record: DistilledRecord, keep: frozenset[str], pieces: NamePieces, rng: np.random.Generator
) -> DistilledRecord:
    """Replaces the names and the long numbers in a record by random names and numbers.

    A word is a name if it is capitalised and the policy copies it, that is, if it occurs in the
    policy's text and in the question or an observation. Numbers of four or more digits are replaced
    by numbers of the same length with commas at the same places, so that "19,416" and "19416"
    remain the same number.

    Args:
        record: the record whose names are replaced.
        keep: words that do not count as names.
        pieces: pieces of the new names.
        rng: random generator for the new names and numbers.
    """
    around = (record.prompt, *(text for _, text in record.context))
    texts = (record.question, *around, *(t for _, t in record.parts), record.answer, *record.gold)
    written = _words(text for author, text in record.parts if author == "policy")
    others = _words([record.question, *(t for author, t in record.parts if author != "policy")])
    names = sorted(w for w in written & others if w not in keep and w != w.lower())
    table = {name: _capitals(name, rng) if name.isupper() else pieces.name(rng) for name in names}
    numbers = dict.fromkeys(m.replace(",", "") for m in _NUMBER.findall("\n".join(texts)))
    digits = {number: _new_number(number, rng) for number in numbers}

    def replace(text: str) -> str:
        text = _WORD.sub(lambda match: table.get(match[0], match[0]), text)
        return _NUMBER.sub(lambda match: _like(match[0], digits), text)

    return dataclasses.replace(
        record,
        question=replace(record.question),
        parts=tuple((author, replace(text)) for author, text in record.parts),
        answer=replace(record.answer),
        gold=tuple(replace(text) for text in record.gold),
        prompt=replace(record.prompt),
        context=tuple((role, replace(text)) for role, text in record.context),
        metadata={**record.metadata, "renamed": True},
    )


def _words(texts: Iterable[str]) -> set[str]:
    return {word for text in texts for word in _WORD.findall(text)}


def _capitals(name: str, rng: np.random.Generator) -> str:
    return "".join(chr(ord("A") + int(i)) for i in rng.integers(0, 26, len(name)))


def _new_number(number: str, rng: np.random.Generator) -> str:
    digits = [rng.integers(1, 10), *rng.integers(0, 10, len(number) - 1)]
    return "".join(map(str, digits))


def _like(number: str, table: dict[str, str]) -> str:
    """Returns the replacement of a number, with commas at the places of the original."""
    digits = iter(table[number.replace(",", "")])
    return "".join(c if c == "," else next(digits) for c in number)


def texts_of(records: Sequence[DistilledRecord], prompt: Prompt) -> list[str]:
    """Returns the text of each record, with the text of the prompt before it."""
    return [
        "\n".join((*(text for _, text in messages_of(record, prompt).turns), record.text))
        for record in records
    ]


def template_words(
    records: Sequence[DistilledRecord], prompt: Prompt, share: float = 0.1
) -> list[str]:
    """Returns the capitalised words, such as "Step", that occur in many records, sorted.

    These words belong to the templates of questions and trajectories, and are not names.

    Args:
        records: the training records.
        prompt: prompt style of the questions.
        share: a word is returned if at least this share of the records contains it.
    """
    texts = texts_of(records, prompt)
    counts: Counter[str] = Counter()
    for text in texts:
        words = {w.strip(".,:?()<>/`'\"") for line in text.split("\n") for w in line.split(" ")}
        counts.update(word for word in words if word.isalpha() and word != word.lower())
    return sorted(word for word, count in counts.items() if count >= share * len(texts))
