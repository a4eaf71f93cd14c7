"""Detects runs that nearly repeat an earlier run of the data set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from coa_jax.config.installed import missing
from coa_jax.distillation.contamination import ngrams
from coa_jax.distillation.filters import TeacherRun

_SHINGLE = 3
_PERMUTATIONS = 128


def similarity(a: frozenset[Any], b: frozenset[Any]) -> float:
    """Returns the Jaccard similarity of two sets; 1 for two empty sets."""
    return len(a & b) / len(a | b) if a or b else 1.0


def _similarity_of_hashes(a: np.ndarray, b: np.ndarray) -> float:
    common = len(np.intersect1d(a, b, assume_unique=True))
    return common / (len(a) + len(b) - common) if len(a) or len(b) else 1.0


def policy_shingles(run: TeacherRun) -> frozenset[tuple[str, ...]]:
    """Returns the word trigrams of a run, by which similar runs are found.

    The trigrams come from the question, and from the text that the policy will learn to write.
    """
    policy_text = " ".join(text for author, text in run.record.parts if author == "policy")
    return ngrams(f"{run.task.question} {policy_text}", _SHINGLE)


def repeats_another(runs: Sequence[TeacherRun], threshold: float, seed: int) -> list[bool]:
    """Returns for each run whether the run is similar to an earlier run that is kept.

    A run is kept if the result for it is False. Two runs are similar if the Jaccard similarity of
    their word trigrams is at least ``threshold``.

    MinHash with locality-sensitive hashing (Broder 1997) finds candidate pairs, so a pair close to
    the threshold may be missed. Each candidate pair is then compared exactly, so no dissimilar run
    is dropped.

    Args:
        runs: runs of the teacher; the first of similar runs is kept.
        threshold: Jaccard similarity of the word trigrams.
        seed: seed of the hash functions.

    Raises:
        UserError: datasketch is not installed.
    """
    try:
        import datasketch
    except ImportError:
        raise missing("near_duplicate", "datasketch", "distill") from None
    # The hash uses half the threshold, so that it misses few pairs: a missed pair leaves a
    # duplicate, but a false candidate only costs one comparison.
    index = datasketch.MinHashLSH(threshold=threshold / 2, num_perm=_PERMUTATIONS)
    kept: dict[int, np.ndarray] = {}
    repeated = []
    for number, run in enumerate(runs):
        shingles = policy_shingles(run)
        sketch = datasketch.MinHash(num_perm=_PERMUTATIONS, seed=seed + 1)
        sketch.update_batch([" ".join(shingle).encode() for shingle in sorted(shingles)])
        hashes = np.fromiter(map(hash, shingles), np.int64, len(shingles))
        near = any(
            # The hashes take little memory, but only the words are exact.
            _similarity_of_hashes(hashes, kept[k]) >= threshold
            and similarity(shingles, policy_shingles(runs[k])) >= threshold
            for k in index.query(sketch)
        )
        repeated.append(near)
        if not near:
            kept[number] = hashes
            index.insert(number, sketch)
    return repeated
