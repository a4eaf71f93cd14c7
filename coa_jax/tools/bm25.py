"""Finds passages by their words (BM25), in this process and without a server.

`tools.dense` finds passages by vectors and not by words. An index is built once, which takes
seconds, and is stored on disk. Of passages with equal scores, the earlier passage of the corpus
comes first.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from coa_jax.errors import UserError
from coa_jax.files import durable
from coa_jax.tools import words
from coa_jax.tools.corpus import Passage, default_corpus
from coa_jax.tools.words import fold

if TYPE_CHECKING:
    # Importing bm25s runs a JAX computation, which must not happen before the processes of a pod
    # are connected. Functions therefore import the package when they need it.
    import bm25s

_log = logging.getLogger(__name__)

TITLE_WEIGHT = 2
"""Number of times that each word of a title counts in the score of its passage."""

_K1, _B = 1.2, 0.75
_STOP_WORDS = frozenset(
    {"a", "an", "and", "are", "by", "does", "for", "has", "how", "in", "is", "it", "of", "on"}
    | {"or", "that", "the", "to", "was", "what", "when", "where", "which", "who", "whose", "with"}
)
_WORD = r"(?<![\w.])\.[a-z]{2}\b|WORD"


@dataclasses.dataclass(frozen=True)
class Hit:
    """A result of ``wiki_search``: a passage with its score for the query (higher is better).

    Scores of different kinds of retrieval cannot be compared.
    """

    passage: Passage
    score: float


class Index(abc.ABC):
    """A search index over a fixed list of passages. Several threads may use the same index.

    Attributes:
        passages: the indexed passages, in order.
    """

    def __init__(self, passages: Sequence[Passage]):
        self.passages = passages

    @abc.abstractmethod
    def rank(self, query: str, top_k: int) -> list[tuple[int, float]]:
        """Returns (index of a passage, score) of the best passages, the best first.

        Args:
            query: words to search for.
            top_k: maximum number of passages.
        """

    def search(self, query: str, top_k: int) -> list[Hit]:
        """Returns the ``top_k`` best passages for a query with their scores, the best first."""
        return [Hit(self.passages[i], score) for i, score in self.rank(query, top_k)]


def tokenize(text: str) -> list[str]:
    """Splits a text into the words that the index contains.

    The words are in lower case and without accents. Stop words are left out. A number such as
    "1,234" is one word. An internet country code such as ".is" keeps its dot, so that it differs
    from the word "is". `words.compiled` defines words.
    """
    text = re.sub(r"(?<=\d),(?=\d{3})", "", fold(text).lower())
    return [word for word in words.compiled(_WORD).findall(text) if word not in _STOP_WORDS]


class WikiIndex(Index):
    """A search index that ranks passages by BM25, that is, by the words of the query."""

    def __init__(self, passages: Sequence[Passage], scorer: bm25s.BM25):
        super().__init__(passages)
        self._scorer = scorer

    @classmethod
    def build(cls, passages: Sequence[Passage]) -> WikiIndex:
        """Builds an index. A word in a title counts as much as `TITLE_WEIGHT` words in a text.

        Raises:
            UserError: no passage contains a word.
        """
        indexed = [tokenize(p.title) * TITLE_WEIGHT + tokenize(p.text) for p in passages]
        if not any(indexed):
            raise UserError("wiki_search has no text to index; give it passages with words")
        import bm25s

        scorer = bm25s.BM25(k1=_K1, b=_B, backend="numpy")
        scorer.index(indexed, show_progress=False)
        return cls(tuple(passages), scorer)

    def rank(self, query: str, top_k: int) -> list[tuple[int, float]]:
        """Returns (index of a passage, score) of the best passages, see `Index.rank`.

        Only passages with at least one word of the query are returned.
        """
        terms = [word for word in tokenize(query) if word in self._scorer.vocab_dict]
        if not terms:
            return []
        scores = self._scorer.get_scores(terms)
        return [(i, float(scores[i])) for i in best_rows(scores, top_k) if scores[i] > 0]

    def save(self, folder: Path) -> None:
        """Writes the index to a folder, with a file of checksums."""
        self._scorer.save(str(folder), show_progress=False)
        lines = [json.dumps([p.title, p.text]) for p in self.passages]
        (folder / "passages.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        sums = {file.name: _checksum(file) for file in sorted(folder.iterdir())}
        (folder / "manifest.json").write_text(json.dumps(sums), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> WikiIndex:
        """Reads an index that `save` has written.

        Raises:
            OSError, ValueError: a file is missing or damaged.
        """
        sums = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        if not isinstance(sums, dict) or "passages.jsonl" not in sums:
            raise ValueError(f"{folder}/manifest.json is not a manifest")
        for name, checksum in sums.items():
            if _checksum(folder / name) != checksum:
                raise ValueError(f"{folder / name} is damaged")
        import bm25s

        scorer = bm25s.BM25.load(str(folder), load_vocab=True)
        lines = (folder / "passages.jsonl").read_text(encoding="utf-8").splitlines()
        rows = json.loads("[" + ",".join(lines) + "]")
        return cls([Passage(title, text) for title, text in rows], scorer)


def best_rows(scores: np.ndarray, top_k: int) -> list[int]:
    """Returns the indices of the largest scores, the largest first.

    Among equal scores, the lower index comes first.

    Args:
        scores: float array of shape ``[N]``.
        top_k: maximum number of indices.
    """
    top_k = min(top_k, len(scores))
    least = np.partition(scores, -top_k)[-top_k]
    candidates = np.flatnonzero(scores >= least)
    best = candidates[np.argsort(-scores[candidates], kind="stable")][:top_k]
    return [int(i) for i in best]


def _checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _key(passages: Sequence[Passage] | None) -> str:
    """Returns the file name of an index, which is a hash of its text, settings and code."""
    import bm25s

    parts: list[object] = [bm25s.__version__, _K1, _B, TITLE_WEIGHT]
    if passages is None:
        parts += [default_corpus().version]
    else:
        parts += [(p.title, p.text) for p in passages]
    digest = hashlib.sha256(json.dumps(parts).encode())
    for source in (words.__file__, __file__):
        digest.update(Path(source).read_bytes())
    return digest.hexdigest()[:24]


def load_index(
    passages: Sequence[Passage] | None = None,
    folder: Path | None = None,
) -> WikiIndex:
    """Loads an index from the cache. If the index is missing or damaged, it is built and stored.

    If the folder of the cache cannot be written, the index is built in every call.

    Args:
        passages: passages of the corpus; None for the default corpus.
        folder: folder of the cache; None for `durable.cache_folder`.

    Raises:
        UserError: the default corpus is not installed, or the corpus contains no words.
    """
    folder = (folder or durable.cache_folder("wiki")) / _key(passages)
    if folder.is_dir():
        try:
            return WikiIndex.load(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("rebuilding the search index in %s: %s", folder, error)
            shutil.rmtree(folder, ignore_errors=True)
    corpus = tuple(default_corpus().passages() if passages is None else passages)
    index = WikiIndex.build(corpus)
    try:
        durable.make_folder(folder, index.save)
    except OSError as error:
        _log.warning("the search index cannot be stored in %s: %s", folder.parent, error)
    return index
