"""The facts behind factbook questions: who is in which split, and the answers of programs.

Only the generator of tasks uses this.  Policies, planners and search agents never see it: they
read questions (`factbook_grammar`) and passages (`coa_jax.tools.wiki_search`).
"""

from __future__ import annotations

import collections
import dataclasses
import decimal
import functools
import hashlib

from coa_jax.tasks.factbook_grammar import (
    Arithmetic,
    Comparison,
    Computed,
    Count,
    Inverse,
    Neighbour,
    Program,
    Ref,
    bind,
)
from coa_jax.tools.factbook_pages import load_entities
from coa_jax.tools.factbook_relations import INVERTIBLE, RELATIONS

_NOT_A_COUNTRY = frozenset({"ee", "um", "xx"})  # the union, a group of atolls, the World
_SALT = "1"
_SHARES = (("train", 0.6), ("validation", 0.7), ("test", 1.0))  # cumulated


def fraction(*parts: object) -> float:
    """A number in [0, 1) that depends on nothing but the arguments: a hash, not a random draw."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:7], "big") / 2**56


def split_of(entity: str) -> str:
    """The split of an entity: 60 % train, 10 % validation, 30 % test, by hash of its name."""
    share = fraction(_SALT, entity)
    return next(split for split, limit in _SHARES if share < limit)


@functools.cache
def facts() -> dict[str, dict[str, str]]:
    """Entity name -> relation key -> value; numbers with separators, lists joined by "; "."""
    return {e.name: e.facts for e in load_entities() if e.code not in _NOT_A_COUNTRY}


@functools.cache
def inverse_keys() -> dict[tuple[str, str], str]:
    """(relation, value) -> entity, for the values that belong to one page of the Factbook only."""
    owners = collections.defaultdict(list)
    for entity in load_entities():
        for relation in INVERTIBLE:
            if relation in entity.facts:
                owners[relation, entity.facts[relation].casefold()].append(entity)
    return {
        (relation, owner.facts[relation]): owner.name
        for (relation, _), (owner, *others) in owners.items()
        if not others and owner.name in facts()
    }


@dataclasses.dataclass(frozen=True)
class Solution:
    """What a program comes to.

    Attributes:
        gold: accepted answers, as in `Task.gold`.
        entities: every entity on the way, answers included, in the order of first use.
    """

    gold: tuple[str, ...]
    entities: tuple[str, ...]


def to_decimal(text: str) -> decimal.Decimal:
    """A number of the Factbook, "1,234.5"."""
    return decimal.Decimal(text.replace(",", ""))


def solve(program: Program) -> Solution | None:
    """Carries out a program on the facts; None where one is missing or is of no use.

    A zero counts as of no use (the coastline of a landlocked country).
    """
    values: list[str] = []
    used: list[str] = []
    for step in program.steps:
        if isinstance(step, Inverse):
            value = inverse_keys().get((step.relation, step.value))
            used += [value] if value else []
        elif isinstance(step, Arithmetic):
            value = compute(step.operation, values[step.a.step], values[step.b.step])
        elif isinstance(step, Count):
            value = str(len(values[step.items.step].split("; ")))
        elif isinstance(step, Comparison):
            value = _extreme(step, values)
        else:
            subject = values[step.subject.step] if isinstance(step.subject, Ref) else step.subject
            key = "neighbour" if isinstance(step, Neighbour) else step.relation
            value = facts().get(subject, {}).get(key)
            used.append(subject)
            if value and key in ("neighbour", "borders"):
                used += value.split("; ")
        if not value or value == "0":
            return None
        values.append(value)
    return Solution(accepted_answers(program, values[-1]), tuple(dict.fromkeys(used)))


def _extreme(step: Comparison, values: list[str]) -> str | None:
    """The name with the largest or smallest value; None where two have the same."""
    numbers = [to_decimal(values[ref.step]) for ref in step.values]
    wanted = max(numbers) if step.operation == "largest" else min(numbers)
    bound = bind(step, values)
    assert isinstance(bound, Comparison)
    return str(bound.subjects[numbers.index(wanted)]) if numbers.count(wanted) == 1 else None


def compute(operation: str, a: str, b: str) -> str:
    """Computes the result of an operation on two numbers of the Factbook.

    Args:
        operation: one of `OPERATIONS`.
        a: first number, as in the Factbook.
        b: second number, as in the Factbook.

    Returns:
        The result as text.
    """
    x, y = to_decimal(a), to_decimal(b)
    if operation == "ratio":
        return repr(round(float(x) / float(y), 2))
    value = x + y if operation == "sum" else x - y
    return f"{value.normalize():f}"


def accepted_answers(program: Program, value: str) -> tuple[str, ...]:
    """What is accepted as the answer of a program (`Task.gold`), given the value of its result."""
    last = program.steps[-1]
    if isinstance(last, Computed):
        return (value,)
    relation = getattr(last, "relation", "neighbour")
    if relation == "borders":
        return (value.replace("; ", "|"),)
    if isinstance(last, Inverse | Neighbour) or not RELATIONS[relation].number:
        return (value,)
    plain, unit = value.replace(",", ""), RELATIONS[relation].unit
    units = (f"{value} {unit}",) if unit else ()
    return tuple(dict.fromkeys((value, plain, *units)))
