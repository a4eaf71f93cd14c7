"""Generates multi-hop questions about the World Factbook, with answers that can be checked.

A question needs one to four searches, and some questions also need arithmetic. Every entity on the
way to an answer belongs to the split of the question. No text of a training question contains an
accepted answer of a validation or test question.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

from coa_jax.config.fields import Between, Text
from coa_jax.config.preflight import Needs, declares
from coa_jax.demo.facts import facts, inverse_keys, solve, to_decimal
from coa_jax.demo.grammar import (
    OPERATIONS,
    TEMPLATES,
    Arithmetic,
    Computed,
    Inverse,
    Lookup,
    Neighbour,
    Program,
    Ref,
    Step,
    Subject,
    density,
    kind_of,
    render,
)
from coa_jax.demo.pages import LICENCE
from coa_jax.errors import UserError
from coa_jax.protocol import get_protocol
from coa_jax.tasks.base import Task, fraction, parse_options, split_of
from coa_jax.tasks.grading import normalize_answer

HOPS = (1, 2, 3, 4)

_QUANTITIES = ("area", "population", "coastline", "railways")
_LONGEST_PHRASE = 16  # words; no answer has more
_PARTNERS = 12  # number of other entities with which an entity is combined in arithmetic
_SHARE = r"(\d*\.?\d+)"
_HOPS = "a number from 1 to 4, or a range such as 1-3"


@dataclasses.dataclass(frozen=True)
class _Options:
    """Says which questions to draw.

    Attributes:
        hops: numbers of hops of the questions: a number, or a range such as ``1-3``.
        weights: shares of the questions with 1, 2, 3 and 4 hops. A number of hops with the share 0
            gets no questions.
        arithmetic: whether to draw questions that need arithmetic too.
        templates: number of paraphrases that are used for each kind of question.
        protocol: protocol in which the policy answers. If this protocol has no tool ``code``, no
            question needs arithmetic.
    """

    hops: Annotated[str, Text(3, "[1-4](-[1-4])?", _HOPS)] = "1-4"
    weights: Annotated[str, Text(200, rf"({_SHARE}/){{3}}{_SHARE}", "four shares: 60/30/10/0")] = (
        "0.3/0.35/0.2/0.15"
    )
    arithmetic: bool = True
    templates: Annotated[int, Between(1, TEMPLATES)] = TEMPLATES
    protocol: str = "generalist"

    def __post_init__(self) -> None:
        if not {"wiki_search", "web_search"} & set(get_protocol(self.protocol).tools):
            raise UserError(f"factbook: protocol={self.protocol} has no search; use mhqa or web")
        if not sum(self.shares.values()):
            raise UserError("factbook: hops and weights select no questions; give a weight above 0")

    @property
    def shares(self) -> dict[int, float]:
        """Share of the questions for each number of hops."""
        shares = zip(HOPS, map(float, self.weights.split("/")), strict=True)
        return {hops: s for hops, s in shares if int(self.hops[0]) <= hops <= int(self.hops[-1])}


# --- programs -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Expression:
    """Steps that lead to an entity, and how a later step refers to the entity."""

    steps: tuple[Step, ...]
    subject: Subject
    entity: str

    @property
    def hops(self) -> int:
        return len(self.steps)


def _expressions(split: str) -> Iterator[_Expression]:
    """Yields the ways to denote an entity of a split.

    An entity is denoted by its name, by a value that only this entity has, or as the neighbour of
    another entity.
    """
    level = [_Expression((), name, name) for name in facts() if split_of(name) == split]
    level += [
        _Expression((Inverse(relation, value),), Ref(0), entity)
        for (relation, value), entity in inverse_keys().items()
        if split_of(entity) == split
    ]
    yield from level
    for _ in range(2):
        onward = []
        for before in level:
            entity = facts()[before.entity].get("neighbour", "")
            if entity in facts() and split_of(entity) == split:
                steps = (*before.steps, Neighbour(before.subject))
                onward.append(_Expression(steps, Ref(len(steps) - 1), entity))
        yield from onward
        level = onward


def _shifted(expression: _Expression, offset: int) -> _Expression:
    """Renumbers the references of an expression whose steps follow ``offset`` other steps."""

    def shift(subject: Subject) -> Subject:
        return Ref(subject.step + offset) if isinstance(subject, Ref) else subject

    steps = tuple(
        dataclasses.replace(step, subject=shift(step.subject))
        if isinstance(step, Neighbour)
        else step
        for step in expression.steps
    )
    return _Expression(steps, shift(expression.subject), expression.entity)


def _arithmetic(operation: str, relation: str, a: _Expression, b: _Expression) -> Program:
    first = (*a.steps, Lookup(relation, a.subject))
    b = _shifted(b, len(first))
    steps = (*first, *b.steps, Lookup(relation, b.subject))
    return Program((*steps, Arithmetic(operation, Ref(len(first) - 1), Ref(len(steps) - 1))))


def _pairs(expressions: Sequence[_Expression]) -> Iterator[Program]:
    """Yields programs with arithmetic on a quantity of two entities, the larger value first."""
    by_entity = collections.defaultdict(list)
    for expression in expressions:
        if not any(isinstance(step, Neighbour) for step in expression.steps):
            by_entity[expression.entity].append(expression)
    for entity, own_expressions in by_entity.items():
        others = sorted(by_entity.keys() - {entity}, key=lambda name: fraction(entity, name))
        for other in others[:_PARTNERS]:
            for number, (a, b) in enumerate(itertools.product(own_expressions, by_entity[other])):
                draw = fraction(entity, other, number)
                if a.hops + b.hops and draw >= 0.15:  # only 15 % of these many pairs are used
                    continue
                operation = OPERATIONS[int(draw * 1e6) % len(OPERATIONS)]
                relation = _QUANTITIES[int(draw * 1e9) % len(_QUANTITIES)]
                first, second = (facts()[e.entity].get(relation, "0") for e in (a, b))
                if to_decimal(first) < to_decimal(second):
                    a, b = b, a
                yield _arithmetic(operation, relation, a, b)


def _all_programs(split: str) -> Iterator[Program]:
    """Yields programs of 1 to 4 hops whose steps all have a result."""
    expressions = list(_expressions(split))
    for expression in expressions:
        steps, subject, entity = expression.steps, expression.subject, expression.entity
        if steps:
            yield Program(steps)
        keys = [key for key in facts()[entity] if key != "neighbour"]
        if expression.hops < max(HOPS):
            yield from (Program((*steps, Lookup(key, subject))) for key in keys)
        if expression.hops <= max(HOPS) - 2:
            yield Program((*steps, *density(subject, len(steps))))
    yield from _pairs(expressions)


# --- questions ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Item:
    """A question before it is put into words: a program of steps, with its answer.

    Attributes:
        program: the question program: the steps that lead to the answer.
        gold: accepted answers, as in `Task.gold`.
        entities: names of all entities on the way to the answer.
    """

    program: Program
    gold: tuple[str, ...]
    entities: tuple[str, ...]

    @functools.cached_property
    def kind(self) -> str:
        """Kinds of the program's steps, such as ``inverse>lookup``, see `kind_of`."""
        return kind_of(self.program)

    @property
    def relation(self) -> str:
        """Relation that the question asks for, such as ``capital``."""
        *before, last = self.program.steps
        step = before[-1] if isinstance(last, Computed) else last
        return str(getattr(step, "relation", "neighbour"))


def _parts(gold: Iterable[str]) -> Iterator[str]:
    """Yields the accepted answers. Of an accepted set "A|B", the members are yielded."""
    for answer in gold:
        yield from answer.split("|")


def _has_answer(gold: Iterable[str], text: str) -> bool:
    """Returns whether a text contains an accepted answer, or a member of one, as whole words."""
    haystack = f" {normalize_answer(text)} "
    return any(f" {_normal(part)} " in haystack for part in _parts(gold))


_normal = functools.cache(normalize_answer)
"""Normalises an answer. The cache pays off because many programs have the same answers."""


@functools.cache
def items_of(split: str) -> tuple[Item, ...]:
    """Returns the question programs from which the questions of a split are written.

    A program is left out if its question contains the answer, if it visits an entity twice, or if
    an entity belongs to another split. In splits other than ``train``, a program is also left out
    if a training question contains its answer.
    """
    items: dict[Program, Item] = {}
    known_phrases = frozenset() if split == "train" else _training_phrases()
    for program in _all_programs(split):
        solution = solve(program)
        if solution is None or program in items or program.hops not in HOPS:
            continue
        inside = all(split_of(entity) == split for entity in solution.entities)
        again = len(solution.entities) < _distinct(program)
        if not inside or again or _has_answer(solution.gold, render(program)):
            continue
        if any(_normal(part) in known_phrases for part in _parts(solution.gold)):
            continue
        items[program] = Item(program, solution.gold, solution.entities)
    return tuple(items.values())


def _distinct(program: Program) -> int:
    """Returns the number of entities that a program visits if it visits no entity twice."""
    subjects = {s.subject for s in program.steps if isinstance(s, Lookup | Neighbour)}
    named = sum(isinstance(subject, str) for subject in subjects)
    return named + sum(isinstance(step, Inverse | Neighbour) for step in program.steps)


@functools.cache
def _training_phrases() -> frozenset[str]:
    """Returns every sequence of words that can occur in a training question."""
    parts = {render(item.program, t) for item in _one_of_each() for t in range(TEMPLATES)}
    for item in items_of("train"):
        for step in item.program.steps:
            if isinstance(step, Inverse):
                parts.add(step.value)
            elif isinstance(step, Lookup | Neighbour) and isinstance(step.subject, str):
                parts.add(step.subject)
    phrases = set()
    for part in parts:
        words = normalize_answer(part).split()
        for start in range(len(words)):
            for end in range(start + 1, min(start + _LONGEST_PHRASE, len(words)) + 1):
                phrases.add(" ".join(words[start:end]))
    return frozenset(phrases)


def _one_of_each() -> Iterable[Item]:
    """Returns one training item for each kind and relation, which together use every template."""
    firsts: dict[tuple[object, ...], Item] = {}
    for item in items_of("train"):
        relations = tuple(getattr(step, "relation", "") for step in item.program.steps)
        firsts.setdefault((item.kind, relations), item)
    return firsts.values()


def _task(item: Item, template: int, split: str, protocol: str, source: str) -> Task:
    question = render(item.program, template)
    digest = hashlib.sha256(question.encode()).hexdigest()[:16]
    metadata = {
        "hops": item.program.hops,
        "kind": item.kind,
        "relation": item.relation,
        "entities": list(item.entities),
        "arithmetic": isinstance(item.program.steps[-1], Arithmetic),
        "template": template,
    }
    return Task(f"factbook-{split}-{digest}", question, protocol, item.gold, source, metadata)


def take_turns(pool: Iterable[Item], *salt: object) -> list[Item]:
    """Shuffles items, so that the relations for which they ask take turns.

    Args:
        pool: the items.
        salt: values that determine the order. The same values give the same order.
    """
    order = sorted(pool, key=lambda item: fraction(*salt, item.program))
    turn: collections.Counter[str] = collections.Counter()
    ranked = []
    for item in order:
        ranked.append((turn[item.relation], fraction(*salt, item.relation), item))
        turn[item.relation] += 1
    return [item for *_, item in sorted(ranked, key=lambda row: row[:2])]


def _kind_weight(kind: str) -> float:
    """Returns the weight of a kind of question among the kinds with the same number of hops.

    Lookups have the largest weight. The three kinds of arithmetic together count as one kind.
    """
    last = kind.rpartition(">")[2]
    return {"lookup": 3.0, "density": 0.5}.get(last, 1 / 3 if last in OPERATIONS else 1.0)


def shares(total: int, weights: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """Divides a number of items among kinds, in proportion to the weights of the kinds.

    Args:
        total: number of items to divide.
        weights: weight of each kind.
        sizes: number of items that each kind has. If a kind has fewer items than its share, the
            rest of the share goes to the other kinds.

    Returns:
        Number of items for each kind.
    """
    counts = [0] * len(weights)
    for _ in range(min(total, sum(sizes))):
        open_ = [i for i, size in enumerate(sizes) if counts[i] < size and weights[i] > 0]
        if not open_:
            break
        best = min(open_, key=lambda i: ((counts[i] + 0.5) / weights[i], i))
        counts[best] += 1
    return counts


@LICENCE.of
@declares(Needs(("demo",)))
def load_source(split: str, n: int | None, seed: int, source: str) -> list[Task]:
    """Draws questions about the World Factbook, balanced over hops, kinds, relations and entities.

    The same arguments give the same questions.

    Args:
        split: ``train``, ``validation`` or ``test``.
        n: number of questions; None for all. Each question is used in one wording before any
            question is used in a second wording. If ``n`` is larger than the number of questions in
            all wordings, fewer tasks are returned.
        seed: seed of the random choice, order and wording.
        source: ``factbook``, or ``factbook:`` with options, such as
            ``factbook:hops=1-2,arithmetic=0``. Options are ``hops`` (number of searches),
            ``weights`` (shares of the questions with 1, 2, 3 and 4 hops, such as 60/30/10/0),
            ``arithmetic`` (0 for no arithmetic), ``templates`` (number of wordings), and
            ``protocol`` (in which the policy answers).

    Raises:
        UserError: an option is invalid.
    """
    options = parse_options(_Options, source)
    arithmetic = options.arithmetic and "code" in get_protocol(options.protocol).tools
    of_hops = options.shares
    pools: dict[str, list[Item]] = collections.defaultdict(list)
    for item in items_of(split):
        plain = not isinstance(item.program.steps[-1], Arithmetic)
        if of_hops.get(item.program.hops, 0) > 0 and (plain or arithmetic):
            pools[item.kind].append(item)
    kinds = sorted(pools)
    hops = [pools[kind][0].program.hops for kind in kinds]
    total: dict[int, float] = collections.defaultdict(float)
    for kind, h in zip(kinds, hops, strict=True):
        total[h] += _kind_weight(kind)
    weights = [of_hops[h] * _kind_weight(k) / total[h] for k, h in zip(kinds, hops, strict=True)]
    sizes = [len(pools[kind]) * options.templates for kind in kinds]
    counts = sizes if n is None else shares(n, weights, sizes)
    chosen: list[tuple[Item, int]] = []
    for kind, count in zip(kinds, counts, strict=True):
        order = take_turns(pools[kind], seed) if count else []
        for position in range(count):
            turn, index = divmod(position, len(order))
            first = int(fraction(seed, "wording", order[index].program) * options.templates)
            chosen.append((order[index], (first + turn) % options.templates))
    chosen.sort(key=lambda pair: fraction(seed, "order", pair[0].program, pair[1]))
    return [_task(item, template, split, options.protocol, source) for item, template in chosen]
