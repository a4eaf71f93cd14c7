"""The ``wiki_search`` tool: embedded BM25 search over the World Factbook, without a server.

``coa_jax.tools.dense`` has searches by vectors as alternatives.

Observations have the format of the authors' wiki server: ``Doc k (Title: t)``, the passage on the
next line, a blank line between documents. The index is built once (in seconds) and stored on disk.
Of passages with the same score, the earlier one in the corpus comes first.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import json
import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from coa_jax import files
from coa_jax.errors import UserError
from coa_jax.tools import factbook_pages, factbook_relations, words
from coa_jax.tools.base import Observation, ToolContext, refused_query
from coa_jax.tools.factbook_pages import Passage, fold

if TYPE_CHECKING:
    # Imported where it is used: on import it computes something with JAX, before which the
    # processes of a pod must have been joined.
    import bm25s

_log = logging.getLogger(__name__)

TITLE_WEIGHT = 2
"""Number of times that the words of a title count in its passage."""

_K1, _B = 1.2, 0.75
_STOP_WORDS = frozenset(
    {"a", "an", "and", "are", "by", "does", "for", "has", "how", "in", "is", "it", "of", "on"}
    | {"or", "that", "the", "to", "was", "what", "when", "where", "which", "who", "whose", "with"}
)
_WORD = re.compile(rf"(?<![\w.])\.[a-z]{{2}}\b|{words.WORD}")


@dataclasses.dataclass(frozen=True)
class Hit:
    """A passage that answers a query, and its score.

    Scores of different searches are not comparable.
    """

    passage: Passage
    score: float


class Index(Protocol):
    """A search index over a fixed list of passages; safe to use from several threads."""

    def __len__(self) -> int: ...

    @property
    def passages(self) -> Sequence[Passage]:
        """The indexed passages, in order."""
        ...

    def rank(self, query: str, top_k: int) -> list[tuple[int, float]]:
        """Returns (number of a passage, its score), best first, at most ``top_k``."""
        ...

    def search(self, query: str, top_k: int) -> list[Hit]:
        """Returns the passages of `rank`."""
        ...


def tokenize(text: str) -> list[str]:
    """Splits text into words: lower case, no accents, no stop words, "1,234" as one number.

    An internet country code keeps its dot (".is"), to distinguish it from the word; see
    `words.WORD`.
    """
    text = re.sub(r"(?<=\d),(?=\d{3})", "", fold(text).lower())
    return [word for word in _WORD.findall(text) if word not in _STOP_WORDS]


class WikiIndex:
    """A BM25 index over a fixed list of passages; safe to use from several threads."""

    def __init__(self, passages: Sequence[Passage], scorer: bm25s.BM25):
        self._passages = passages
        self._scorer = scorer

    def __len__(self) -> int:
        return len(self._passages)

    @property
    def passages(self) -> Sequence[Passage]:
        """The indexed passages, in order."""
        return self._passages

    @classmethod
    def build(cls, passages: Sequence[Passage]) -> WikiIndex:
        """Indexes the passages; words of titles count `TITLE_WEIGHT` times.

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
        """See `Index`; returns only passages that share a word with the query."""
        known = [word for word in tokenize(query) if word in self._scorer.vocab_dict]
        if not known:
            return []
        scores = self._scorer.get_scores(known)
        return [(i, float(scores[i])) for i in best_rows(scores, top_k) if scores[i] > 0]

    def search(self, query: str, top_k: int) -> list[Hit]:
        """See `Index`."""
        return [Hit(self._passages[i], score) for i, score in self.rank(query, top_k)]

    def save(self, folder: Path) -> None:
        """Writes the index with a manifest of checksums."""
        self._scorer.save(str(folder), show_progress=False)
        lines = [json.dumps([p.title, p.text]) for p in self._passages]
        (folder / "passages.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        sums = {file.name: _checksum(file) for file in sorted(folder.iterdir())}
        (folder / "manifest.json").write_text(json.dumps(sums), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> WikiIndex:
        """Reads an index written by `save`.

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

        scorer = bm25s.BM25.load(str(folder), load_vocab=True, show_progress=False)
        lines = (folder / "passages.jsonl").read_text(encoding="utf-8").splitlines()
        rows = json.loads("[" + ",".join(lines) + "]")
        return cls([Passage(title, text) for title, text in rows], scorer)


def best_rows(scores: np.ndarray, top_k: int) -> list[int]:
    """Returns the indices of the largest scores, best first; ties go to the lower index."""
    top_k = min(top_k, len(scores))
    least = np.partition(scores, -top_k)[-top_k]
    candidates = np.flatnonzero(scores >= least)
    best = candidates[np.argsort(-scores[candidates], kind="stable")][:top_k]
    return [int(i) for i in best]


def _checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def default_cache_dir() -> Path:
    """Returns ``$XDG_CACHE_HOME/coa_jax/wiki`` or ``~/.cache/coa_jax/wiki``."""
    return files.cache_folder("wiki")


def _key(passage_chars: int, passages: Sequence[Passage] | None) -> str:
    """Returns the name of an index, a hash of its text, settings and code."""
    import bm25s

    parts: list[object] = [bm25s.__version__, _K1, _B, TITLE_WEIGHT]
    if passages is None:
        parts += [factbook_pages.PACKAGE, factbook_pages.package_version(), passage_chars]
        sources = [factbook_pages.__file__, factbook_relations.__file__]
    else:
        parts += [(p.title, p.text) for p in passages]
        sources = [factbook_pages.__file__]
    digest = hashlib.sha256(json.dumps(parts).encode())
    for source in (*sources, words.__file__, __file__):
        digest.update(Path(source).read_bytes())
    return digest.hexdigest()[:24]


def load_index(
    cache_dir: Path | str | None = None,
    passage_chars: int = 300,
    passages: Sequence[Passage] | None = None,
) -> WikiIndex:
    """Loads the index from the cache; builds and stores it if it is absent or damaged.

    If the cache cannot be written, the index is built every time.

    Args:
        cache_dir: folder of indexes; `default_cache_dir` if None.
        passage_chars: maximum length of a passage of free text, in characters.
        passages: a corpus that replaces the Factbook.

    Raises:
        UserError: the Factbook is not installed, or the corpus is empty.
    """
    root = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
    folder = root / _key(passage_chars, passages)
    if folder.is_dir():
        try:
            return WikiIndex.load(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("rebuilding the search index in %s: %s", folder, error)
            shutil.rmtree(folder, ignore_errors=True)
    corpus = tuple(factbook_pages.passages(passage_chars) if passages is None else passages)
    index = WikiIndex.build(corpus)
    try:
        files.make_folder(folder, index.save)
    except OSError as error:
        _log.warning("the search index cannot be kept in %s: %s", root, error)
    return index


class WikiSearch:
    """The tool that answers a query with the best passages of a corpus, by default the Factbook.

    Calls run in threads, so a search never blocks the event loop, and any number of calls may run
    concurrently. A query that the trajectory has made before is not searched again.
    """

    name = "wiki_search"

    def __init__(
        self,
        top_k: int = 3,
        passage_chars: int = 300,
        cache_dir: Path | str | None = None,
        passages: Sequence[Passage] | None = None,
        deadline: float = 30.0,
        load: Callable[..., Index] = load_index,
    ):
        """Sets up the tool; the index is loaded at the first call or by `warm_up`.

        Args:
            top_k: number of passages in an observation.
            passage_chars: maximum length of a passage of free text, in characters.
            cache_dir: folder for the index; the user's cache folder if None.
            passages: a corpus that replaces the Factbook.
            deadline: seconds a call may take.
            load: loads or builds the index from the previous three settings.

        Raises:
            UserError: a number is out of range.
        """
        if top_k < 1:
            raise UserError(f"wiki_search: top_k is {top_k}; give 1 or more")
        if passage_chars < 40:
            raise UserError(f"wiki_search: passage_chars is {passage_chars}; give 40 or more")
        self.top_k = top_k
        self.deadline = deadline
        self._load = functools.partial(load, cache_dir, passage_chars, passages)
        self._index: Index | None = None
        self._lock = threading.Lock()

    def warm_up(self) -> Index:
        """Loads (or builds) the index now and returns it."""
        with self._lock:
            if self._index is None:
                self._index = self._load()
            return self._index

    def search(self, query: str) -> list[Hit]:
        """Returns the passages that a call with this query shows."""
        return self.warm_up().search(query, self.top_k)

    async def __call__(self, arguments: str, context: ToolContext) -> Observation:
        """Searches for the text between the tags."""
        start = time.monotonic()
        if refused := refused_query(self.name, arguments, context):
            return refused
        hits = await asyncio.to_thread(self.search, " ".join(arguments.split()))
        seconds = time.monotonic() - start
        if not hits:
            text = "Nothing was found. Try other or fewer words."
            return Observation(text, False, "error", seconds, {"hits": 0})
        found: dict[str, Any] = {
            "hits": len(hits),
            "titles": [hit.passage.title for hit in hits],
            "scores": [round(hit.score, 4) for hit in hits],
        }
        return Observation(format_hits(hits), True, "ok", seconds, found)


def format_hits(hits: Sequence[Hit]) -> str:
    """Formats hits as an observation: "Doc k (Title: t)", passage, blank line between hits."""
    documents = (
        f"Doc {k} (Title: {hit.passage.title})\n{hit.passage.text}" for k, hit in enumerate(hits, 1)
    )
    return "\n\n".join(documents)
