"""Corpora in JSONL, in the forms in which they are passed around."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coa_jax import jsonl
from coa_jax.errors import UserError
from coa_jax.storage import local
from coa_jax.tools.factbook_pages import Passage


def read_corpus(path: str) -> tuple[Passage, ...]:
    """Passages of a file with one JSON object a line.

    ``title`` and ``text``, or ``contents`` as Search-R1 has it: the title in quotation marks on the
    first line, the text below.

    Raises:
        UserError: the file cannot be read or is empty; ``path:line: why`` for a malformed line.
    """
    passages = tuple(jsonl.read_lines(Path(local(str(path))).expanduser(), _passage))
    if not passages:
        raise UserError(f"{path}: there is no passage in it")
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
    """Title and text of a document in Search-R1's form."""
    title, _, text = contents.partition("\n")
    return Passage(title.strip().strip('"'), text)


def join_contents(passage: Passage) -> str:
    """What `split_contents` reads."""
    return f'"{passage.title}"\n{passage.text}'
