"""Generates calculation tasks for the protocol ``code`` with the package reasoning-gym.

Each split has its own range of generator seeds. In addition, the hash of its text assigns each
question to exactly one split, so that no question can be in two splits.
"""

from __future__ import annotations

import functools
import hashlib
import json
from typing import Any

from coa_jax.errors import UserError
from coa_jax.installed import missing
from coa_jax.tasks.base import SPLITS, Task

DEFAULT_SIZE = 1000
"""Number of tasks if the run sets none, because the generators could generate tasks without end."""

_GENERATORS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_digits": 2, "max_digits": 6, "max_terms": 6},
    "basic_arithmetic": {"min_digits": 2, "max_digits": 4, "max_terms": 6},
    "products": {"min_digits": 2, "max_digits": 5},
    "decimal_chain_sum": {},
    "gcd": {},
    "lcm": {},
    "simple_equations": {},
    "count_primes": {},
    "count_bits": {},
    "calendar_arithmetic": {},
    "prime_factorization": {},
    "fraction_simplification": {},
    "number_sorting": {},
    "number_filtering": {},
}
_OWN_SCORER = frozenset(
    {"prime_factorization", "fraction_simplification", "number_sorting", "number_filtering"}
)  # these generators accept several answers to a question
_SHARES = {"train": (0.0, 0.6), "validation": (0.6, 0.7), "test": (0.7, 1.0)}
_SEEDS = 1_000_000_000  # seeds per split
_BATCH = 64  # questions per generator seed


def _reasoning_gym() -> Any:
    try:
        import reasoning_gym
    except ImportError:
        raise missing("the source arithmetic", "reasoning-gym", "tasks") from None
    return reasoning_gym


def _parse_names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip()) or tuple(_GENERATORS)
    unknown = [name for name in names if name not in _GENERATORS]
    if unknown:
        known = ", ".join(_GENERATORS)
        raise UserError(f"arithmetic: unknown generator {unknown[0]!r}; known are {known}")
    return tuple(dict.fromkeys(names))


def _in_split(question: str, split: str) -> bool:
    share = int.from_bytes(hashlib.sha256(question.encode()).digest()[:7], "big") / 2**56
    low, high = _SHARES[split]
    return low <= share < high


@functools.lru_cache(maxsize=256)
def _batch(name: str, split: str, seed: int, number: int) -> tuple[dict[str, Any], ...]:
    """Generates a batch of questions; returns those that belong to the split."""
    key = f"{name}/{seed}/{number}".encode()
    offset = int.from_bytes(hashlib.sha256(key).digest()[:7], "big") % _SEEDS
    first = SPLITS.index(split) * _SEEDS + offset
    config = _GENERATORS[name]
    entries = _reasoning_gym().create_dataset(name, size=_BATCH, seed=first, **config)
    return tuple(entry for entry in entries if _in_split(entry["question"], split))


def _entries(name: str, split: str, seed: int, count: int) -> list[dict[str, Any]]:
    """Returns up to ``count`` distinct questions, fewer if the generator has no more."""
    found: dict[str, dict[str, Any]] = {}
    number = barren = 0
    while len(found) < count and barren < 20:
        before = len(found)
        for entry in _batch(name, split, seed, number):
            found.setdefault(entry["question"], entry)
        barren = barren + 1 if len(found) == before else 0
        number += 1
    return list(found.values())[:count]


def load_source(split: str, n: int | None, seed: int, source: str) -> list[Task]:
    """Generates tasks. Consecutive tasks come from different generators.

    The same arguments give the same tasks.

    Args:
        split: ``train``, ``validation`` or ``test``.
        n: number of tasks; None for 1000.
        seed: seed of the generators.
        source: ``arithmetic`` for all generators, or ``arithmetic:NAME,NAME`` for the generators
            with these names, such as ``gcd`` and ``lcm``.

    Raises:
        UserError: reasoning-gym is not installed, a generator is unknown, or n is negative.
    """
    names = _parse_names(source.partition(":")[2])
    n = DEFAULT_SIZE if n is None else n
    if n < 0:
        raise UserError(f"arithmetic: n is {n}; give 0 or more, or None for {DEFAULT_SIZE}")
    columns = [_entries(name, split, seed, -(-n // len(names))) for name in names]
    tasks = []
    for row in range(max(map(len, columns), default=0)):
        for name, column in zip(names, columns, strict=True):
            if row < len(column):
                tasks.append(_task(name, column[row], split, source))
    return tasks[:n]


def _task(name: str, entry: dict[str, Any], split: str, source: str) -> Task:
    question = entry["question"].strip()
    digest = hashlib.sha256(f"{name}\n{question}".encode()).hexdigest()[:16]
    metadata: dict[str, Any] = {"hops": 0, "kind": name, "entities": []}
    if name in _OWN_SCORER:
        plain = json.loads(json.dumps(entry["metadata"], default=str))
        metadata |= {"scorer": "reasoning_gym", "generator": name, "generator_metadata": plain}
    return Task(
        f"arithmetic-{split}-{digest}", question, "code", (str(entry["answer"]),), source, metadata
    )
