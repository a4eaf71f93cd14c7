"""Generates calculation tasks for the protocol ``code`` with the package reasoning-gym.

Each split has its own range of generator seeds. In addition, a hash of the text of each question
assigns the question to exactly one split, so that no question can be in two splits.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from typing import Any

from coa_jax.config.preflight import Needs, declares
from coa_jax.errors import UserError
from coa_jax.tasks.base import SPLITS, Licence, Task
from coa_jax.tasks.checks import reasoning_gym

_DEFAULT_SIZE = 1000
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
    entries = reasoning_gym().create_dataset(name, size=_BATCH, seed=first, **config)
    return tuple(entry for entry in entries if _in_split(entry["question"], split))


def _entries(name: str, split: str, seed: int, count: int) -> list[dict[str, Any]]:
    """Returns up to ``count`` distinct questions, fewer if the generator has no more."""
    by_question: dict[str, dict[str, Any]] = {}
    number = barren = 0
    while len(by_question) < count and barren < 20:
        before = len(by_question)
        for entry in _batch(name, split, seed, number):
            by_question.setdefault(entry["question"], entry)
        barren = barren + 1 if len(by_question) == before else 0
        number += 1
    return list(by_question.values())[:count]


@Licence("reasoning-gym: Apache-2.0", "apache-2.0", "reasoning-gym", "en").of
@declares(Needs(("tasks",)))
def load_source(split: str, n: int | None, seed: int, source: str) -> list[Task]:
    """Generates calculation tasks. Consecutive tasks come from different generators.

    The same arguments give the same tasks.

    Args:
        split: ``train``, ``validation`` or ``test``.
        n: number of tasks; None for 1000.
        seed: seed of the generators.
        source: ``arithmetic`` for all generators, or ``arithmetic:NAME,NAME`` for the generators
            with these names, such as ``gcd`` and ``lcm``.

    Raises:
        UserError: reasoning-gym is not installed, or a generator is unknown.
    """
    parts = filter(None, map(str.strip, source.partition(":")[2].split(",")))
    names = tuple(dict.fromkeys(parts)) or tuple(_GENERATORS)
    for name in names:
        if name not in _GENERATORS:
            generators = ", ".join(_GENERATORS)
            raise UserError(f"arithmetic: unknown generator {name!r}; known are {generators}")
    n = _DEFAULT_SIZE if n is None else n
    columns = [_entries(name, split, seed, -(-n // len(names))) for name in names]
    rows = itertools.zip_longest(*columns)
    pairs = (pair for row in rows for pair in zip(names, row, strict=True) if pair[1] is not None)
    return [_task(name, entry, split, source) for name, entry in itertools.islice(pairs, n)]


def _task(name: str, entry: dict[str, Any], split: str, source: str) -> Task:
    question = entry["question"].strip()
    digest = hashlib.sha256(f"{name}\n{question}".encode()).hexdigest()[:16]
    metadata: dict[str, Any] = {"hops": 0, "kind": name, "relation": "", "entities": []}
    if name in _OWN_SCORER:
        plain = json.loads(json.dumps(entry["metadata"], default=str))
        metadata |= {"scorer": "reasoning_gym", "generator": name, "generator_metadata": plain}
    return Task(
        f"arithmetic-{split}-{digest}", question, "code", (str(entry["answer"]),), source, metadata
    )
