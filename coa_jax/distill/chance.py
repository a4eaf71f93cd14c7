"""Chance that belongs to a decision: the same whatever ran before or beside it."""

from __future__ import annotations

import hashlib


def uniform(seed: int, episode: str, decision: str) -> float:
    """A number in [0, 1) that is fixed by its arguments alone.

    Args:
        seed: seed of the run.
        episode: identity of the task.
        decision: name of the decision, e.g. ``"query/2"``.
    """
    key = f"{seed}\0{episode}\0{decision}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) / 2**64
