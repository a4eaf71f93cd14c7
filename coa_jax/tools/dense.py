"""Implements dense and hybrid retrieval.

Dense retrieval is an exact search over the vectors of an encoder. Hybrid retrieval combines dense
retrieval with BM25. The vectors of a corpus are computed once and stored on disk, in a file whose
name depends on the encoder and the corpus. The file is memory-mapped, so that all processes of a
machine share the vectors.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from coa_jax.errors import UserError
from coa_jax.files import durable
from coa_jax.model.config import EncoderConfig
from coa_jax.run.progress import progress
from coa_jax.tools.bm25 import Index, best_rows, load_index
from coa_jax.tools.corpus import Passage, default_corpus

if TYPE_CHECKING:
    from coa_jax.tools.encoder import TextEncoder

_log = logging.getLogger(__name__)

Retrieval = Literal["bm25", "dense", "hybrid"]
"""Kind of retrieval: ``bm25`` (by words), ``dense`` (by vectors) or ``hybrid`` (both combined)."""

RETRIEVALS: tuple[Retrieval, ...] = get_args(Retrieval)

FUSION_K = 60
"""The constant of reciprocal rank fusion (Cormack, Clarke and Buettcher, SIGIR 2009)."""

FUSION_DEPTH = 100
"""Number of best results of each search that hybrid retrieval combines."""

_ROWS = 1 << 16
"""Number of vectors in a block of the search. A block has 192 MiB for vectors of length 768."""

_CHUNK = 4096
"""Number of passages that are encoded between two progress reports."""

_VECTORS = "vectors.npy"


def nearest(vectors: np.ndarray, queries: np.ndarray, top_k: int) -> list[list[tuple[int, float]]]:
    """Finds the vectors with the largest inner products with each query, by an exact search.

    Args:
        vectors: float32 of shape ``[N, D]``, which may be memory-mapped.
        queries: float32 of shape ``[Q, D]``.
        top_k: maximum number of vectors per query.

    Returns:
        For each query a list of (index of a vector, inner product), the largest product first.
        Among equal products, the lower index comes first.
    """
    best: list[list[tuple[int, float]]] = [[] for _ in queries]
    for start in range(0, len(vectors), _ROWS):
        block = queries @ vectors[start : start + _ROWS].T
        for i, scores in enumerate(block):
            candidates = [(start + row, float(scores[row])) for row in best_rows(scores, top_k)]
            # Indices ascend and the sort is stable, so the lowest index of equal products is first.
            best[i] = sorted(best[i] + candidates, key=lambda item: -item[1])[:top_k]
    return best


class DenseIndex(Index):
    """A search index that ranks passages by the cosine between passage vector and query vector."""

    def __init__(self, passages: Sequence[Passage], vectors: np.ndarray, encoder: TextEncoder):
        """Creates the index.

        Args:
            passages: the N passages.
            vectors: unit vectors of the passages, float32 of shape ``[N, D]``.
            encoder: encoder of the queries.
        """
        super().__init__(passages)
        self._vectors, self._encoder = vectors, encoder

    def rank(self, query: str, top_k: int) -> list[tuple[int, float]]:
        """Returns (index of a passage, cosine) of the ``top_k`` best passages, see `Index.rank`."""
        return nearest(self._vectors, self._encoder.queries([query]), top_k)[0]


class HybridIndex(Index):
    """A search index that combines other indexes over the same passages, such as BM25 and dense."""

    def __init__(self, indexes: Sequence[Index]):
        super().__init__(indexes[0].passages)
        self._indexes = indexes

    def rank(self, query: str, top_k: int) -> list[tuple[int, float]]:
        """Returns (index of a passage, score) of the best passages, see `Index.rank`.

        The score of a passage is the sum of 1 / (60 + rank) over the indexes that found the
        passage, where rank is the passage's position in the index's result, counted from 1.
        """
        depth = max(FUSION_DEPTH, top_k)
        return fuse([index.rank(query, depth) for index in self._indexes])[:top_k]


def fuse(rankings: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, float]]:
    """Combines several rankings of the same passages into one, by reciprocal rank fusion.

    Args:
        rankings: several lists of (index of a passage, score), each with the best passage first.

    Returns:
        (index of a passage, combined score), the best first. Among equal scores, the lower index
        comes first.
    """
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, (number, _) in enumerate(ranking, 1):
            scores[number] = scores.get(number, 0.0) + 1.0 / (FUSION_K + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))


def load_retriever(
    retrieval: Retrieval,
    encoder: EncoderConfig,
    passages: Sequence[Passage] | None = None,
    folder: Path | None = None,
) -> Index:
    """Loads a search index from the cache, or builds and stores the index.

    Args:
        retrieval: kind of retrieval.
        encoder: model that computes the vectors for dense and hybrid retrieval.
        passages, folder: see `coa_jax.tools.bm25.load_index`.

    Raises:
        UserError: the encoder is missing or cannot be read, or the corpus is missing or empty.
    """
    check_retrieval(retrieval, encoder)
    if retrieval == "bm25":
        return load_index(passages, folder)
    words = load_index(passages, folder) if retrieval == "hybrid" else None
    if words is not None:
        corpus = words.passages
    else:
        corpus = tuple(default_corpus().passages() if passages is None else passages)
        if not corpus:
            raise UserError("wiki_search has no text to index; give it passages with words")
    from coa_jax.tools.encoder import TextEncoder  # here, because it loads JAX

    model = TextEncoder(encoder)
    dense = DenseIndex(corpus, _load_vectors(model, corpus, folder), model)
    return dense if words is None else HybridIndex((words, dense))


def check_retrieval(retrieval: str, encoder: EncoderConfig) -> None:
    """Checks that an encoder is configured if the kind of retrieval needs an encoder.

    Raises:
        UserError: no encoder is configured.
    """
    if retrieval != "bm25" and not encoder:
        raise UserError(
            f"wiki_search: {retrieval} retrieval needs an encoder; give its Hugging Face directory"
            " as encoder.path"
        )


def _load_vectors(
    encoder: TextEncoder, corpus: Sequence[Passage], folder: Path | None
) -> np.ndarray:
    folder = (folder or durable.cache_folder("wiki")) / _name(encoder, corpus)
    shape = (len(corpus), encoder.width)
    if folder.is_dir():
        try:
            return _opened(folder, shape)
        except (OSError, ValueError, EOFError) as error:
            _log.warning("computing the vectors of %s again: %s", folder, error)
            shutil.rmtree(folder, ignore_errors=True)
    durable.make_folder(folder, lambda fresh: _write_vectors(encoder, corpus, fresh / _VECTORS))
    return _opened(folder, shape)


def _name(encoder: TextEncoder, corpus: Sequence[Passage]) -> str:
    digest = hashlib.sha256(encoder.fingerprint.encode())
    for passage in corpus:
        digest.update(json.dumps([passage.title, passage.text]).encode())
    return f"dense-{digest.hexdigest()[:24]}"


def _opened(folder: Path, shape: tuple[int, int]) -> np.ndarray:
    vectors: np.ndarray = np.load(folder / _VECTORS, mmap_mode="r")
    if vectors.shape != shape or vectors.dtype != np.float32:
        raise ValueError(f"{folder / _VECTORS} has {vectors.shape} vectors, expected {shape}")
    return vectors


def _write_vectors(encoder: TextEncoder, corpus: Sequence[Passage], path: Path) -> None:
    shape = (len(corpus), encoder.width)
    vectors = np.lib.format.open_memmap(path, "w+", np.float32, shape)
    with progress("vectors of passages", total=len(corpus)) as bar:
        for start in range(0, len(corpus), _CHUNK):
            texts = [f"{p.title}\n{p.text}" for p in corpus[start : start + _CHUNK]]
            vectors[start : start + len(texts)] = encoder.passages(texts)
            bar.update(len(texts))
    vectors.flush()
