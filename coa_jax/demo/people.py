"""Generates questions about the World Factbook with varied wordings, some of them held out.

This is the source ``factbook_people``. Its questions ask for a single fact, for a chain of facts,
or for a comparison, a count or arithmetic. Two more topics are optional: ``field`` has questions
for single facts that the Factbook states in many different ways, and ``nationality`` has questions
that name a country by its adjective. Unless the option ``wording`` is ``any``, questions of the
split ``train`` use only the known templates of `people_wording`, and in the other splits,
half of the questions use the held-out templates. Every entity on the way to an answer belongs to
the split of the question.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Literal

from coa_jax.config.preflight import Needs, declares
from coa_jax.demo import people_wording as wording
from coa_jax.demo.factbook import Item, items_of, shares, take_turns
from coa_jax.demo.facts import adjectives, facts, fields, solve
from coa_jax.demo.grammar import (
    Arithmetic,
    Comparison,
    Computed,
    Count,
    Inverse,
    Lookup,
    Neighbour,
    Program,
    Ref,
)
from coa_jax.demo.pages import LICENCE
from coa_jax.demo.people_grammar import render_people, understand_people
from coa_jax.demo.relations import FIELDS
from coa_jax.errors import UserError
from coa_jax.protocol import get_protocol
from coa_jax.tasks.base import Task, fraction, parse_options, split_of

SOURCE = "factbook_people"
_ADDED = ("field", "nationality")  # topics that are drawn only if the option ``topics`` names them
TOPICS: Mapping[str, float] = {
    "single": 0.3,
    "chain": 0.3,
    "comparison": 0.15,
    "counting": 0.1,
    "arithmetic": 0.15,
    "field": 0.3,
    "nationality": 0.3,
}
"""Topic -> its weight among the selected topics."""


_PARTNERS = 12  # number of other entities with which an entity is compared
_HASTY = 0.15  # share of questions without capital letters and question mark


@dataclasses.dataclass(frozen=True)
class _Options:
    """Says which questions to draw.

    Attributes:
        protocol: protocol of the tasks. If the protocol has no tool ``code``, no question needs a
            calculation.
        topics: topics of the questions, from `TOPICS`, joined by "/"; by default all except
            ``field`` and ``nationality``.
        wording: ``known`` for questions with templates that the split ``train`` uses, ``new`` for
            questions with templates that are held out from ``train``, "" for both, or ``any`` for
            any templates, also in the split ``train``.
    """

    protocol: str = "generalist"
    topics: str = "/".join(topic for topic in TOPICS if topic not in _ADDED)
    wording: Literal["", "known", "new", "any"] = ""

    def __post_init__(self) -> None:
        for topic in self.topics.split("/"):
            if topic not in TOPICS:
                raise UserError(f"{SOURCE}: no topic {topic!r}; known are {', '.join(TOPICS)}")


@LICENCE.of
@declares(Needs(("demo",)))
def load_source(split: str, n: int | None, seed: int, source: str) -> list[Task]:
    """Draws questions about the World Factbook in varied wordings, balanced over topics.

    They are also balanced over kinds of questions and relations. The same arguments give the same
    questions.

    Args:
        split: ``train``, ``validation`` or ``test``.
        n: number of questions; None uses each question program once. If ``n`` is larger than the
            number of programs, fewer questions are returned.
        seed: seed of the random choice, order and wording.
        source: ``factbook_people``, or with options, such as
            ``factbook_people:protocol=mhqa,topics=single/chain``. Options are ``protocol`` (in
            which the policy answers), ``topics`` (keys of `TOPICS`, such as ``single`` for a fact
            and ``chain`` for a chain of facts), and ``wording`` (``known`` for wordings of training
            questions, ``new`` for held-out wordings, ``any`` for all wordings).

    Raises:
        UserError: an option is invalid, or the option ``wording`` is ``new`` for the split
            ``train``.
    """
    options = parse_options(_Options, source)
    topics = options.topics.split("/")
    if options.wording == "new" and split == "train":
        raise UserError(f"{SOURCE}: the train split has no held-out wordings")
    programs = "code" in get_protocol(options.protocol).tools
    pools: dict[tuple[str, str], list[Item]] = collections.defaultdict(list)
    for item in _items(split):
        topic = _topic(item.program)
        if topic in topics and (programs or not isinstance(item.program.steps[-1], Computed)):
            pools[topic, item.kind].append(item)
    keys = sorted(pools)
    in_topic = collections.Counter(topic for topic, _ in keys)
    weights = [TOPICS[topic] / in_topic[topic] for topic, _ in keys]
    sizes = [len(pools[key]) for key in keys]
    counts = sizes if n is None else shares(n, weights, sizes)
    tasks: dict[str, Task] = {}
    for key, count in zip(keys, counts, strict=True):
        order = take_turns(pools[key], seed) if count else []
        made = (_task(item, split, seed, options, source) for item in order)
        for task in itertools.islice(filter(None, made), count):
            tasks.setdefault(task.id, task)
    return sorted(tasks.values(), key=lambda task: fraction(seed, "order", task.id))


def _topic(program: Program) -> str:
    first, last = program.steps[0], program.steps[-1]
    if isinstance(first, Inverse) and first.relation == "adjective":
        return "nationality"
    if isinstance(last, Lookup) and last.relation in FIELDS:
        return "field"
    if isinstance(last, Comparison):
        return "comparison"
    if isinstance(last, Count):
        return "counting"
    if isinstance(last, Arithmetic):
        return "arithmetic"
    return "single" if len(program.steps) == 1 else "chain"


def _task(item: Item, split: str, seed: int, options: _Options, source: str) -> Task | None:
    """Returns the task of an item; None if its question is ambiguous.

    A question is ambiguous if `understand_people` parses it as another program.
    """
    question, new = _worded(item.program, split, seed, options.wording)
    if repr(understand_people(question)).casefold() != repr(item.program).casefold():
        return None
    digest = hashlib.sha256(question.encode()).hexdigest()[:16]
    metadata = {
        "hops": item.program.hops,
        "kind": item.kind,
        "topic": _topic(item.program),
        "wording": options.wording if options.wording == "any" else "new" if new else "known",
        "relation": item.relation,
        "entities": list(item.entities),
        "arithmetic": isinstance(item.program.steps[-1], Computed),
    }
    id = f"people-{split}-{digest}"
    return Task(id, question, options.protocol, item.gold, source, metadata)


def _worded(program: Program, split: str, seed: int, words: str) -> tuple[str, bool]:
    """Returns (question of a program, whether its wording is held out)."""
    drawn = fraction(seed, "held out", program) < 0.5
    new = split != "train" and (words == "new" or (not words and drawn))
    select = wording.held_out if new else wording.known

    def choose(templates: wording.Templates) -> str:
        options = templates if words == "any" else select(templates)
        return options[int(fraction(seed, program, templates) * len(options))]

    via = words == "any" and fraction(seed, "via", program) < 0.5
    question = render_people(program, choose, via)
    if fraction(seed, "hasty", program) < _HASTY:
        question = question.lower().rstrip("?.")
    return question, new


# --- programs --------------------------------------------------------------------------------


@functools.cache
def _items(split: str) -> tuple[Item, ...]:
    """Returns all programs of a split that `render_people` can write as a question."""
    plain = [item for item in items_of(split) if _is_asked(item.program)]
    further = dict.fromkeys(_further(split))
    return (*plain, *filter(None, (_item(program, split) for program in further)))


def _is_asked(program: Program) -> bool:
    """Returns whether a person might ask the question: it has few descriptions of entities.

    Arithmetic must also use two values that belong together.
    """
    last, neighbours = program.steps[-1], sum(isinstance(s, Neighbour) for s in program.steps)
    if isinstance(last, Arithmetic):
        return program.hops == 2 and not neighbours and _is_worded(program)
    return neighbours <= 1 and program.hops <= 3


def _is_worded(program: Program) -> bool:
    try:
        render_people(program, lambda templates: templates[0])
    except KeyError:
        return False
    return True


def _further(split: str) -> Iterator[Program]:
    """Yields programs of the added topics, and programs that compare values or count."""
    names = [name for name in facts() if split_of(name) == split]
    for name in names:
        yield from (Program((Lookup(key, name),)) for key in fields()[name] if key in wording.ASK)
        adjective = fields()[name].get("adjective", "")
        if adjectives().get(("adjective", adjective)) == name:
            for relation in wording.ASK_VIA["adjective"]:
                yield Program((Inverse("adjective", adjective), Lookup(relation, Ref(0))))
        yield Program((Lookup("borders", name), Count(Ref(0))))
        neighbour = facts()[name].get("neighbour", "")
        if neighbour in facts() and split_of(neighbour) == split:
            steps = (Neighbour(name), Lookup("borders", Ref(0)), Count(Ref(1)))
            yield Program(steps)
        others = sorted(set(names) - {name}, key=lambda other: fraction("compare", name, other))
        for number, other in enumerate(others[:_PARTNERS]):
            relations = sorted(wording.COMPARE)
            relation = relations[int(fraction(name, other) * len(relations))]
            operations = sorted(wording.COMPARE[relation])
            operation = operations[number % len(operations)]
            yield _comparison(relation, operation, (name, other))
            third = others[(number + 1) % len(others)]
            if number < 3:
                relation = sorted(wording.COMPARE_THREE)[number % 2]
                yield _comparison(relation, "largest", (name, other, third))


def _comparison(relation: str, operation: str, names: tuple[str, ...]) -> Program:
    lookups = tuple(Lookup(relation, name) for name in names)
    refs = tuple(Ref(index) for index in range(len(names)))
    return Program((*lookups, Comparison(operation, refs, names)))


def _item(program: Program, split: str) -> Item | None:
    """Returns the item of a program of `_further`.

    The result is None if the program has no answer, or uses an entity of another split.
    """
    solution = solve(program)
    if solution is None:
        return None
    entities = solution.entities
    if isinstance(program.steps[-1], Count):  # members of the counted list may be in any split
        entities = entities[: len(program.steps) - 1]
    if any(split_of(entity) != split for entity in entities):
        return None
    return Item(program, solution.gold, entities)
