"""Detects runs that nearly repeat another run of the set (MinHash, then an exact comparison)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coa_jax.distill.contamination import ngrams
from coa_jax.distill.filters import Run
from coa_jax.installed import missing

_SHINGLE = 3
_PERMUTATIONS = 128


def similarity(a: frozenset[Any], b: frozenset[Any]) -> float:
    """Returns the Jaccard similarity of two sets; 1 for two empty sets."""
    return len(a & b) / len(a | b) if a or b else 1.0


def policy_shingles(run: Run) -> frozenset[tuple[str, ...]]:
    """Returns the word trigrams of a run's question and of the policy's text, for comparison."""
    said = " ".join(text for author, text in run.record.parts if author == "policy")
    return ngrams(f"{run.task.question} {said}", _SHINGLE)


def repeats_another(runs: Sequence[Run], threshold: float, seed: int) -> list[bool]:
    """Returns for each run whether an earlier kept run is as similar as `threshold` or more.

    Candidates come from MinHash with locality-sensitive hashing (Broder 1997), so a pair right at
    the threshold may be missed. Each candidate is compared exactly, so dissimilar runs are never
    dropped.

    Args:
        runs: the runs.
        threshold: Jaccard similarity.
        seed: seed of the hash functions.

    Raises:
        UserError: datasketch is not installed.
    """
    try:
        import datasketch
    except ImportError:
        raise missing("near_duplicate", "datasketch", "distill") from None
    # The hash uses half the threshold: a miss leaves a duplicate, a false candidate costs one
    # comparison.
    index = datasketch.MinHashLSH(threshold=threshold / 2, num_perm=_PERMUTATIONS)
    kept: dict[int, frozenset[tuple[str, ...]]] = {}
    repeated = []
    for number, run in enumerate(runs):
        shingles = policy_shingles(run)
        sketch = datasketch.MinHash(num_perm=_PERMUTATIONS, seed=seed + 1)
        sketch.update_batch([" ".join(shingle).encode() for shingle in sorted(shingles)])
        near = any(similarity(shingles, kept[k]) >= threshold for k in index.query(sketch))
        repeated.append(near)
        if not near:
            kept[number] = shingles
            index.insert(number, sketch)
    return repeated
