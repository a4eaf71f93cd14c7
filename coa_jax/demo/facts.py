"""Holds the facts of the World Factbook: splits of entities, and answers of question programs.

Only the generators of tasks use this module. Policies and teachers never see the facts: they read
the questions (`grammar`) and the passages that a search returns
(`coa_jax.tools.wiki_search`).
"""

from __future__ import annotations

import collections
import dataclasses
import decimal
import functools
import re

from coa_jax.demo.grammar import (
    Arithmetic,
    Comparison,
    Computed,
    Count,
    Inverse,
    Neighbour,
    Program,
    Ref,
    resolve_references,
)
from coa_jax.demo.pages import load_entities, passages
from coa_jax.demo.relations import FIELDS, INVERTIBLE, read_passage, relation_of

_NOT_A_COUNTRY = frozenset({"ee", "um", "xx"})  # European Union, a group of atolls, World
_SHORT_NAMES = {"USA": "United States", "UK": "United Kingdom", "UAE": "United Arab Emirates"}
_OFFICES = "President|King|Queen|Prime Minister|Chancellor|Governor|Premier|Emir|Sultan|Prince"


@functools.cache
def facts() -> dict[str, dict[str, str]]:
    """Returns the main facts, as a mapping: name of an entity -> (key in `RELATIONS` -> value).

    Numbers have thousands separators. The items of a list are joined by "; ".
    """
    return {e.name: e.facts for e in load_entities() if e.code not in _NOT_A_COUNTRY}


@functools.cache
def fields() -> dict[str, dict[str, str]]:
    """Returns further facts, as a mapping: name of an entity -> (key in `FIELDS` -> value).

    Passages quote these facts in the words of the Factbook. A value is left out if the passages of
    the entity state several values.
    """
    by_title = {relation.title: relation for relation in FIELDS.values()}
    values_of: dict[str, dict[str, set[str]]] = {name: {} for name in facts()}
    for passage in passages():
        name, _, title = passage.title.partition(": ")
        relation = by_title.get(title)
        value = relation and read_passage(relation, passage.title, passage.text)
        if relation and value and name in values_of:
            values_of[name].setdefault(relation.key, set()).add(value[1])
    return {
        name: {key: values.pop() for key, values in of.items() if len(values) == 1}
        for name, of in values_of.items()
    }


@functools.cache
def inverse_keys() -> dict[tuple[str, str], str]:
    """Returns the facts that identify an entity, such as a capital, for questions about the entity.

    The result maps each pair (key of a relation, value) to the name of the only entity for which
    the relation has this value.
    """
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


@functools.cache
def adjectives() -> dict[tuple[str, str], str]:
    """Returns {("adjective", adjective of nationality): the only entity with this adjective}.

    Adjectives that several entities share are left out.
    """
    owners = collections.defaultdict(list)
    for name, values in fields().items():
        if "adjective" in values:
            owners[values["adjective"]].append(name)
    return {("adjective", key): names[0] for key, names in owners.items() if len(names) == 1}


@dataclasses.dataclass(frozen=True)
class Solution:
    """The result of a question program.

    Attributes:
        gold: accepted answers, as in `Task.gold`.
        entities: names of all entities on the way to the answer, including the answer, in the order
            of first use.
    """

    gold: tuple[str, ...]
    entities: tuple[str, ...]


def to_decimal(text: str) -> decimal.Decimal:
    """Parses a number of the Factbook, which may have thousands separators, such as "1,234.5"."""
    return decimal.Decimal(text.replace(",", ""))


def solve(program: Program) -> Solution | None:
    """Executes a question program on the facts.

    The result is None if a fact is missing, if a value is 0 (such as the coastline of a landlocked
    country), or if a comparison has two equal values.
    """
    values: list[str] = []
    used: list[str] = []
    for step in program.steps:
        if isinstance(step, Inverse):
            inverse = adjectives() if step.relation == "adjective" else inverse_keys()
            value = inverse.get((step.relation, step.value))
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
            values_of = fields() if key in FIELDS else facts()
            value = values_of.get(subject, {}).get(key)
            used.append(subject)
            if value and key in ("neighbour", "borders"):
                used += value.split("; ")
        if not value or value == "0":
            return None
        values.append(value)
    return Solution(accepted_answers(program, values[-1]), tuple(dict.fromkeys(used)))


def _extreme(step: Comparison, values: list[str]) -> str | None:
    """Returns the name with the largest or smallest value; None if two names have this value."""
    numbers = [to_decimal(values[ref.step]) for ref in step.values]
    extreme = max(numbers) if step.operation == "largest" else min(numbers)
    bound = resolve_references(step, values)
    assert isinstance(bound, Comparison)
    return str(bound.subjects[numbers.index(extreme)]) if numbers.count(extreme) == 1 else None


def compute(operation: str, a: str, b: str) -> str:
    """Computes an operation of `OPERATIONS` on two numbers; returns the result as text.

    Args:
        operation: name of the operation, such as ``sum``.
        a, b: the numbers, as the Factbook writes them.
    """
    x, y = to_decimal(a), to_decimal(b)
    if operation == "ratio":
        return repr(round(float(x) / float(y), 2))
    value = x + y if operation == "sum" else x - y
    return f"{value.normalize():f}"


def accepted_answers(program: Program, value: str) -> tuple[str, ...]:
    """Returns the accepted answers (`Task.gold`) of a question program.

    Args:
        program: the steps that answer the question.
        value: result of the program's last step, as written in the Factbook.
    """
    last = program.steps[-1]
    if isinstance(last, Computed):
        return (value,)
    relation = getattr(last, "relation", "neighbour")
    if relation == "borders":
        return (value.replace("; ", "|"),)
    if relation in FIELDS:
        person = re.fullmatch(rf".*?\b(?:{_OFFICES}) (.+)", value)
        others = (value.strip("$%"), _SHORT_NAMES.get(value, value), person[1] if person else value)
        return tuple(dict.fromkeys((value, *others)))
    if isinstance(last, Inverse | Neighbour) or not relation_of(relation).number:
        return (value,)
    plain, unit = value.replace(",", ""), relation_of(relation).unit
    units = (f"{value} {unit}",) if unit else ()
    return tuple(dict.fromkeys((value, plain, *units)))
