"""Dense and hybrid retrieval: exact search over an encoder's vectors, and fusion with BM25.

The vectors of a corpus are computed once and stored on disk, named by encoder and text. They are
memory-mapped, so the processes of a machine share them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from coa_jax import files
from coa_jax.errors import UserError
from coa_jax.progress import progress
from coa_jax.tools import factbook_pages
from coa_jax.tools.encoder import Encoder, EncoderConfig
from coa_jax.tools.factbook_pages import Passage
from coa_jax.tools.wiki_search import Hit, Index, best_rows, default_cache_dir, load_index

_log = logging.getLogger(__name__)

Retrieval = Literal["bm25", "dense", "hybrid"]
"""Kind of retrieval: ``bm25`` by words, ``dense`` by vectors, ``hybrid`` by both, fused by rank."""

RETRIEVALS: tuple[Retrieval, ...] = get_args(Retrieval)

FUSION_K = 60
"""The constant of reciprocal rank fusion (Cormack, Clarke and Buettcher, SIGIR 2009)."""

FUSION_DEPTH = 100
"""Number of top results of each search that are fused."""

_ROWS = 1 << 16
"""Vectors in a block of the search; 192 MiB at a width of 768."""

_CHUNK = 4096
"""Passages that are encoded between two progress reports."""

_VECTORS = "vectors.npy"


def nearest(vectors: np.ndarray, queries: np.ndarray, top_k: int) -> list[list[tuple[int, float]]]:
    """Returns the rows with the largest inner products, exactly; ties go to the lower row.

    Args:
        vectors: float32 [rows, width]; may be memory-mapped.
        queries: float32 [number, width].
        top_k: maximum number of rows per query.

    Returns:
        For each query a list of (row, inner product), best first.
    """
    best: list[list[tuple[int, float]]] = [[] for _ in queries]
    for start in range(0, len(vectors), _ROWS):
        block = queries @ vectors[start : start + _ROWS].T
        for i, scores in enumerate(block):
            found = [(start + row, float(scores[row])) for row in best_rows(scores, top_k)]
            # Row numbers ascend and the sort is stable, so the first of equal products stays first.
            best[i] = sorted(best[i] + found, key=lambda item: -item[1])[:top_k]
    return best


class DenseIndex:
    """A search index by the cosine between the vectors of passages and query."""

    def __init__(self, passages: Sequence[Passage], vectors: np.ndarray, encoder: Encoder):
        """Creates the index.

        Args:
            passages: the N passages.
            vectors: vectors of the passages with norm 1, float32 ``[N, D]``.
            encoder: encodes queries.
        """
        self._passages, self._vectors, self._encoder = passages, vectors, encoder

    def __len__(self) -> int:
        return len(self._passages)

    @property
    def passages(self) -> Sequence[Passage]:
        """See `Index`."""
        return self._passages

    def rank(self, query: str, top_k: int) -> list[tuple[int, float]]:
        """See `Index`; the score is a cosine, and there is always a best passage."""
        return nearest(self._vectors, self._encoder.queries([query]), top_k)[0]

    def search(self, query: str, top_k: int) -> list[Hit]:
        """See `Index`."""
        return [Hit(self._passages[i], score) for i, score in self.rank(query, top_k)]


class HybridIndex:
    """Several indexes over the same passages, fused by rank."""

    def __init__(self, indexes: Sequence[Index]):
        self._indexes = indexes

    def __len__(self) -> int:
        return len(self._indexes[0])

    @property
    def passages(self) -> Sequence[Passage]:
        """See `Index`."""
        return self._indexes[0].passages

    def rank(self, query: str, top_k: int) -> list[tuple[int, float]]:
        """See `Index`.

        The score is the sum of 1 / (60 + rank) over the searches that found the passage.
        """
        depth = max(FUSION_DEPTH, top_k)
        return fuse([index.rank(query, depth) for index in self._indexes])[:top_k]

    def search(self, query: str, top_k: int) -> list[Hit]:
        """See `Index`."""
        return [Hit(self.passages[i], score) for i, score in self.rank(query, top_k)]


def fuse(rankings: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, float]]:
    """Fuses rankings by reciprocal rank; ties are ordered by passage number."""
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, (number, _) in enumerate(ranking, 1):
            scores[number] = scores.get(number, 0.0) + 1.0 / (FUSION_K + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))


def load_retriever(
    retrieval: Retrieval,
    encoder: EncoderConfig,
    cache_dir: Path | str | None = None,
    passage_chars: int = 300,
    passages: Sequence[Passage] | None = None,
) -> Index:
    """Loads the index of a kind of retrieval from the cache, or builds and stores it.

    Args:
        retrieval: kind of retrieval.
        encoder: model for dense and hybrid retrieval.
        cache_dir, passage_chars, passages: see `coa_jax.tools.wiki_search.load_index`.

    Raises:
        UserError: the kind is unknown, its encoder is missing or cannot be read, or the corpus is
            missing or empty.
    """
    check_retrieval(retrieval, encoder)
    if retrieval == "bm25":
        return load_index(cache_dir, passage_chars, passages)
    words = load_index(cache_dir, passage_chars, passages) if retrieval == "hybrid" else None
    if words is not None:
        corpus = words.passages
    else:
        corpus = tuple(factbook_pages.passages(passage_chars) if passages is None else passages)
        if not corpus:
            raise UserError("wiki_search has no text to index; give it passages with words")
    model = Encoder(encoder)
    dense = DenseIndex(corpus, _load_vectors(model, corpus, cache_dir), model)
    return dense if words is None else HybridIndex((words, dense))


def check_retrieval(retrieval: str, encoder: EncoderConfig) -> None:
    """Raises UserError unless the kind of retrieval is known and has the settings it needs."""
    if retrieval not in RETRIEVALS:
        known = ", ".join(RETRIEVALS)
        raise UserError(f"wiki_search: retrieval {retrieval!r} is unknown; known are {known}")
    if retrieval != "bm25" and not encoder:
        raise UserError(
            f"wiki_search: {retrieval} retrieval needs an encoder; give its Hugging Face directory"
            " as encoder.path"
        )


def _load_vectors(
    encoder: Encoder, corpus: Sequence[Passage], cache_dir: Path | str | None
) -> np.ndarray:
    root = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
    folder = root / _name(encoder, corpus)
    shape = (len(corpus), encoder.width)
    if folder.is_dir():
        try:
            return _opened(folder, shape)
        except (OSError, ValueError, EOFError) as error:
            _log.warning("computing the vectors of %s again: %s", folder, error)
            shutil.rmtree(folder, ignore_errors=True)

    def fill(fresh: Path) -> None:
        _write_vectors(encoder, corpus, fresh / _VECTORS, shape)

    files.make_folder(folder, fill)
    return _opened(folder, shape)


def _name(encoder: Encoder, corpus: Sequence[Passage]) -> str:
    digest = hashlib.sha256(encoder.fingerprint.encode())
    for passage in corpus:
        digest.update(json.dumps([passage.title, passage.text]).encode())
    return f"dense-{digest.hexdigest()[:24]}"


def _opened(folder: Path, shape: tuple[int, int]) -> np.ndarray:
    vectors: np.ndarray = np.load(folder / _VECTORS, mmap_mode="r")
    if vectors.shape != shape or vectors.dtype != np.float32:
        raise ValueError(f"{folder / _VECTORS} has {vectors.shape} vectors, expected {shape}")
    return vectors


def _write_vectors(
    encoder: Encoder, corpus: Sequence[Passage], path: Path, shape: tuple[int, int]
) -> None:
    vectors = np.lib.format.open_memmap(path, "w+", np.float32, shape)
    with progress("vectors of passages", total=len(corpus)) as bar:
        for start in range(0, len(corpus), _CHUNK):
            texts = [f"{p.title}\n{p.text}" for p in corpus[start : start + _CHUNK]]
            vectors[start : start + len(texts)] = encoder.passages(texts)
            bar.update(len(texts))
    vectors.flush()
