"""Renaming in distilled records, so that a policy learns to copy names instead of knowing them.

A corpus has a few hundred entities.  A policy that is trained from nothing memorises them sooner
than it learns to copy a name from its question into a query, and then fails on every entity that it
has not seen.  Renaming replaces the names and the numbers of a record by random ones, the same
everywhere in the record, observations included: what the policy must do stays the same, what it
could remember does not.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from coa_jax.protocol import Prompt
from coa_jax.small.scratch import template_words
from coa_jax.trajectory import DistilledRecord

Change = Callable[[DistilledRecord, np.random.Generator], DistilledRecord]

_WORD = re.compile(r"[^\W\d_]+")
_NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+|\d{4,}")
_LOWER_SHARE = 0.2  # of the new names: values such as currencies are copied too


def renaming(share: float) -> Callable[[Any, Sequence[DistilledRecord], Prompt], Change] | None:
    """The augmentation of `learn.sft.train` that renames a share of the records.

    Words that many of the records have are no names, see `scratch.template_words`.  None for a
    share of 0.
    """
    if not share:
        return None

    def prepare(tokenizer: Any, records: Sequence[DistilledRecord], prompt: Prompt) -> Change:
        keep, pieces = template_words(records, prompt), NamePieces.of(tokenizer)

        def change(record: DistilledRecord, rng: np.random.Generator) -> DistilledRecord:
            return rename(record, keep, pieces, rng) if rng.random() < share else record

        return change

    return prepare


@dataclasses.dataclass(frozen=True)
class NamePieces:
    """What new names are spelt with: all the letters that a tokenizer has tokens for.

    A token that no training record asks for is one that the policy never writes, whatever it reads.
    Names made of every piece alike leave none out.

    Attributes:
        first: pieces that may begin a name, capitalised.
        further: pieces in lower case.
    """

    first: tuple[str, ...]
    further: tuple[str, ...]

    @classmethod
    def of(cls, tokenizer: Any) -> NamePieces:
        """The pieces of a tokenizer's vocabulary."""
        tokens = {tokenizer.decode([index]).strip() for index in range(len(tokenizer))}
        words = sorted(token for token in tokens if _WORD.fullmatch(token))
        capitalised = tuple(word for word in words if word == word.capitalize())
        return cls(capitalised, tuple(word for word in words if word == word.lower()))

    def name(self, rng: np.random.Generator) -> str:
        """A new name of two to four pieces."""
        pieces = [self.further[int(i)] for i in rng.integers(0, len(self.further), 4)]
        if rng.random() < _LOWER_SHARE:
            start = pieces[3]
        elif rng.random() < 0.5:
            start = self.first[int(rng.integers(0, len(self.first)))]
        else:
            start = pieces[3].capitalize()
        return start + "".join(pieces[: int(rng.integers(1, 4))])


def rename(
    record: DistilledRecord,
    keep: frozenset[str],
    pieces: NamePieces,
    rng: np.random.Generator,
) -> DistilledRecord:
    """Replaces the record's names and long numbers.

    Names are words with a capital letter that the policy copies: they occur in its parts and in the
    question or an observation.  Numbers have four digits or more, and keep their length and commas,
    so that "19,416" and "19416" stay the same number.

    Args:
        record: a record.
        keep: words that are not names.
        pieces: what new names are spelt with.
        rng: source of the new ones.
    """
    around = (record.prompt, *(text for _, text in record.context))
    texts = (record.question, *around, *(t for _, t in record.parts), record.answer, *record.gold)
    written = _words(text for author, text in record.parts if author == "policy")
    given = _words([record.question, *(t for author, t in record.parts if author != "policy")])
    names = sorted(w for w in written & given if w not in keep and w != w.lower())
    table = {name: _new_name(name, pieces, rng) for name in names}
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


def _new_name(name: str, pieces: NamePieces, rng: np.random.Generator) -> str:
    if name.isupper():
        return "".join(chr(ord("A") + int(i)) for i in rng.integers(0, 26, len(name)))
    return pieces.name(rng)


def _new_number(number: str, rng: np.random.Generator) -> str:
    first = str(rng.integers(1, 10))
    return first + "".join(str(d) for d in rng.integers(0, 10, len(number) - 1))


def _like(number: str, table: dict[str, str]) -> str:
    """The replacement of a number with the commas where they were."""
    digits = iter(table[number.replace(",", "")])
    return "".join(c if c == "," else next(digits) for c in number)
