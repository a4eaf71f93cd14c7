"""Draws random numbers that depend on a decision, not on the order in which decisions are made."""

from __future__ import annotations

import hashlib


def uniform(seed: int, episode: str, decision: str) -> float:
    """Returns a pseudo-random number in [0, 1) that depends only on the arguments.

    Args:
        seed: seed of the random choices.
        episode: id of the episode or task in which the decision is made.
        decision: name of the decision for which the number is drawn, e.g. ``"query/2"``.
    """
    key = f"{seed}\0{episode}\0{decision}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) / 2**64
