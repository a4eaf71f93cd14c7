"""Defines corpora of search tools, and reads corpora from JSONL files in the common formats."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from coa_jax.config.extensions import ExtensionKind, find
from coa_jax.config.preflight import Needs, code_needs
from coa_jax.errors import UserError
from coa_jax.files import jsonl
from coa_jax.storage import local


@dataclasses.dataclass(frozen=True)
class Passage:
    """A passage, which is the unit of search.

    Attributes:
        title: title of the passage.
        text: text of the passage.
    """

    title: str
    text: str


class Corpus(Protocol):
    """A list of passages for search tools, which an installed package provides.

    Attributes:
        version: a text that changes whenever the passages change. A stored index is used only for
            the version from which it was built.
    """

    @property
    def version(self) -> str: ...

    def passages(self) -> Iterator[Passage]:
        """Yields the passages."""


DEFAULT = "factbook"
"""Name of the corpus that search tools read if the config names none."""

CORPORA = ExtensionKind("corpus", "coa_jax.corpora", {})
"""The corpora of installed packages, as functions or classes that return a `Corpus`."""


def default_corpus() -> Corpus:
    """Returns the corpus `DEFAULT`.

    Raises:
        UserError: no installed package has this corpus.
    """
    corpus: Corpus = find(CORPORA, DEFAULT, "tools.wiki_search.corpus")()
    return corpus


def corpus_needs(path: str) -> Needs:
    """Returns what a corpus needs: nothing, or what `DEFAULT` declares if ``path`` is ""."""
    return Needs() if path else code_needs(CORPORA, DEFAULT, {})


def read_corpus(path: str) -> tuple[Passage, ...]:
    """Reads the passages of a JSONL file, which has one JSON object per line.

    An object has the keys ``title`` and ``text``, or the key ``contents`` in the format of
    Search-R1: the title in quotation marks on the first line, and then the text.

    Raises:
        UserError: the file cannot be read, is empty, or contains a malformed line. In the last case
            the message begins with ``path:line:``.
    """
    passages = tuple(jsonl.read_lines(Path(local(str(path))).expanduser(), _passage))
    if not passages:
        raise UserError(f"{path}: the file has no passages")
    return passages


def _passage(row: Any) -> Passage:
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, found {type(row).__name__}")
    if isinstance(row.get("contents"), str):
        return split_contents(row["contents"])
    title, text = row.get("title", ""), row.get("text")
    if not isinstance(title, str) or not isinstance(text, str) or not text.strip():
        raise ValueError("expected the texts 'title' and 'text', or 'contents'")
    return Passage(title, text)


def split_contents(contents: str) -> Passage:
    """Splits a document in the format of Search-R1 into title and text.

    The format has the title in quotation marks on the first line, and then the text.
    """
    title, _, text = contents.partition("\n")
    return Passage(title.strip().strip('"'), text)


def join_contents(passage: Passage) -> str:
    """Writes a passage in the format of Search-R1. This is the inverse of `split_contents`."""
    return f'"{passage.title}"\n{passage.text}'
