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
from collections.abc import Iterable, Iterator, Mapping, Sequence

from coa_jax.errors import UserError
from coa_jax.protocol import get_protocol
from coa_jax.tasks.base import Task
from coa_jax.tasks.factbook_facts import facts, fraction, inverse_keys, solve, split_of, to_decimal
from coa_jax.tasks.factbook_grammar import (
    OPERATIONS,
    TEMPLATES,
    Arithmetic,
    Inverse,
    Lookup,
    Neighbour,
    Program,
    Ref,
    Step,
    Subject,
    kind_of,
    render,
)
from coa_jax.tasks.grading import normalize_answer

HOPS = (1, 2, 3, 4)
DEFAULT_WEIGHTS: Mapping[int, float] = {1: 0.3, 2: 0.35, 3: 0.2, 4: 0.15}

_QUANTITIES = ("area", "population", "coastline", "railways")
_LONGEST_PHRASE = 16  # words; no answer has more
_PARTNERS = 12  # number of other entities with which an entity is combined in arithmetic


@dataclasses.dataclass(frozen=True)
class Options:
    """Says which questions to draw.

    Attributes:
        weights: number of hops -> share of the questions. A number of hops that is absent, or has
            the share 0, gets no questions.
        arithmetic: whether to draw questions that need arithmetic too.
        templates: number of paraphrases that are used for each kind of question, 1 to `TEMPLATES`.
        protocol: protocol in which the policy answers. If this protocol has no tool ``code``, no
            question needs arithmetic.
    """

    weights: Mapping[int, float] = dataclasses.field(default_factory=lambda: DEFAULT_WEIGHTS)
    arithmetic: bool = True
    templates: int = TEMPLATES
    protocol: str = "generalist"


def parse_options(text: str) -> Options:
    """Parses the options of a source, for example ``hops=1-2,arithmetic=0,templates=1``.

    * ``hops=2`` or ``hops=1-3``: draws only questions with these numbers of hops, in the default
      proportions.
    * ``weights=60/30/10/0``: sets the shares of questions with 1, 2, 3 and 4 hops.
    * ``arithmetic=0``: draws no questions that need arithmetic.
    * ``templates=1``: sets the number of paraphrases that are used for each kind of question.
    * ``protocol=mhqa``: sets the protocol of the tasks.

    Raises:
        UserError: an option or the protocol is unknown, or a value is out of range.
    """
    options = Options()
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = item.partition("=")
        try:
            if name == "hops":
                low, _, high = value.partition("-")
                kept = range(int(low), int(high or low) + 1)
                weights = {hops: DEFAULT_WEIGHTS[hops] for hops in kept}
                options = dataclasses.replace(options, weights=weights)
            elif name == "weights":
                weights = dict(zip(HOPS, map(float, value.split("/")), strict=True))
                options = dataclasses.replace(options, weights=weights)
            elif name == "arithmetic":
                options = dataclasses.replace(options, arithmetic={"0": False, "1": True}[value])
            elif name == "templates":
                options = dataclasses.replace(options, templates=int(value))
            elif name == "protocol":
                options = dataclasses.replace(options, protocol=value)
            else:
                raise KeyError(name)
        except (KeyError, ValueError):
            raise UserError(
                f"factbook: option {item!r} is not understood; use hops=1-2, "
                f"weights=60/30/10/0, arithmetic=0, templates=1 to {TEMPLATES} or protocol=mhqa"
            ) from None
    _check(options)
    return options


def _check(options: Options) -> None:
    shares = [options.weights.get(hops, 0.0) for hops in HOPS]
    if set(options.weights) - set(HOPS) or not all(0 <= s < float("inf") for s in shares):
        raise UserError("factbook: weights must be 0 or more, one each for 1, 2, 3 and 4 hops")
    if sum(shares) <= 0:
        raise UserError("factbook: all weights are 0; give at least one weight above 0")
    if not 1 <= options.templates <= TEMPLATES:
        raise UserError(f"factbook: templates={options.templates}; give 1 to {TEMPLATES}")
    if not {"wiki_search", "web_search"} & set(get_protocol(options.protocol).tools):
        raise UserError(f"factbook: protocol={options.protocol} has no search; use mhqa or web")


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
    for entity, own in by_entity.items():
        others = sorted(by_entity.keys() - {entity}, key=lambda name: fraction(entity, name))
        for other in others[:_PARTNERS]:
            for number, (a, b) in enumerate(itertools.product(own, by_entity[other])):
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
            lookups = (Lookup("population", subject), Lookup("area", subject))
            ratio = Arithmetic("ratio", Ref(len(steps)), Ref(len(steps) + 1))
            yield Program((*steps, *lookups, ratio))
    yield from _pairs(expressions)


# --- questions ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Item:
    """A question program, from which questions are written, with its answer.

    Attributes:
        program: the question program: the steps that lead to the answer.
        gold: accepted answers, as in `Task.gold`.
        entities: names of all entities on the way to the answer.
        kind: shape of the program, see `kind_of`.
        relation: relation that the question asks for, such as ``capital``.
    """

    program: Program
    gold: tuple[str, ...]
    entities: tuple[str, ...]
    kind: str
    relation: str


def _parts(gold: Iterable[str]) -> Iterator[str]:
    """Yields the accepted answers. Of an accepted set "A|B", the members are yielded."""
    for answer in gold:
        yield from answer.split("|")


def _told(gold: Iterable[str], text: str) -> bool:
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
    seen = frozenset() if split == "train" else _training_phrases()
    for program in _all_programs(split):
        solution = solve(program)
        if solution is None or program in items or program.hops not in HOPS:
            continue
        inside = all(split_of(entity) == split for entity in solution.entities)
        again = len(solution.entities) < _distinct(program)
        if not inside or again or _told(solution.gold, render(program)):
            continue
        if any(_normal(part) in seen for part in _parts(solution.gold)):
            continue
        last = program.steps[-1]
        source = program.steps[-2] if isinstance(last, Arithmetic) else last
        relation = getattr(source, "relation", "neighbour")
        items[program] = Item(program, solution.gold, solution.entities, kind_of(program), relation)
    return tuple(items.values())


def _distinct(program: Program) -> int:
    """Returns the number of entities that a program visits if it visits no entity twice."""
    named = {s.subject for s in program.steps if isinstance(s, Lookup | Neighbour)}
    return len([s for s in program.steps if isinstance(s, Inverse | Neighbour)]) + len(
        [subject for subject in named if isinstance(subject, str)]
    )


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


def _one_of_each() -> Iterator[Item]:
    """Returns one training item for each kind and relation, which together use every template."""
    firsts: dict[tuple[object, ...], Item] = {}
    for item in items_of("train"):
        relations = tuple(getattr(step, "relation", "") for step in item.program.steps)
        firsts.setdefault((item.kind, relations), item)
    return iter(firsts.values())


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
    """Shuffles items so that consecutive items ask for different relations where possible.

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


def load_source(split: str, n: int | None, seed: int, source: str) -> list[Task]:
    """Draws questions about the World Factbook, balanced over hops, kinds, relations and entities.

    The same arguments give the same questions.

    Args:
        split: ``train``, ``validation`` or ``test``.
        n: number of questions; None for all. Each question is used in one wording before any
            question is used in a second wording. If ``n`` is larger than the number of questions in
            all wordings, fewer tasks are returned.
        seed: seed of the random choice, order and wording.
        source: ``factbook``, or ``factbook:`` with options after the colon, see `parse_options`.

    Raises:
        UserError: ``n`` is negative, or an option is invalid.
    """
    options = parse_options(source.partition(":")[2])
    if n is not None and n < 0:
        raise UserError(f"factbook: n is {n}; give 0 or more, or None for all")
    arithmetic = options.arithmetic and "code" in get_protocol(options.protocol).tools
    pools: dict[str, list[Item]] = collections.defaultdict(list)
    for item in items_of(split):
        plain = not isinstance(item.program.steps[-1], Arithmetic)
        if options.weights.get(item.program.hops, 0) > 0 and (plain or arithmetic):
            pools[item.kind].append(item)
    kinds = sorted(pools)
    hops = [pools[kind][0].program.hops for kind in kinds]
    total: dict[int, float] = collections.defaultdict(float)
    for kind, h in zip(kinds, hops, strict=True):
        total[h] += _kind_weight(kind)
    weights = [
        options.weights[h] * _kind_weight(k) / total[h] for k, h in zip(kinds, hops, strict=True)
    ]
    sizes = [len(pools[kind]) * options.templates for kind in kinds]
    counts = sizes if n is None else shares(n, weights, sizes)
    chosen: list[tuple[Item, int]] = []
    for kind, count in zip(kinds, counts, strict=True):
        order = take_turns(pools[kind], seed) if count else []
        for position in range(count):
            turn, place = divmod(position, len(order))
            first = int(fraction(seed, "wording", order[place].program) * options.templates)
            chosen.append((order[place], (first + turn) % options.templates))
    chosen.sort(key=lambda pair: fraction(seed, "order", pair[0].program, pair[1]))
    return [_task(item, template, split, options.protocol, source) for item, template in chosen]
