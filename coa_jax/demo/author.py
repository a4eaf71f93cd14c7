"""Implements an author for the Factbook that needs no language model.

An author writes the questions of ``coa-jax synthesize``. This author parses passages with the
wordings of `relations`, and writes questions with the grammar of the Factbook tasks. All facts come
from the corpus, so any corpus with such sentences works.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

from coa_jax.demo import grammar, relations
from coa_jax.demo.facts import accepted_answers, compute, to_decimal
from coa_jax.demo.relations import RELATIONS, Relation
from coa_jax.distillation.random_numbers import uniform
from coa_jax.distillation.synthesis.drafts import Document, Draft, Form
from coa_jax.tasks.base import Task, fraction

Fact = tuple[Relation, str, str]
"""A fact that a passage states: (relation, entity, value)."""


def fact_of(document: Document) -> Fact | None:
    """Parses the fact that a document states, such as the capital of a country.

    The result is None if the document is not a single sentence in a known wording.
    """
    for relation in RELATIONS.values():
        if document.title.endswith(f": {relation.title}"):
            pair = relations.read(relation, document.text)
            return (relation, *pair) if pair else None
    return None


class FactsAuthor:
    """An author without a language model: writes questions about facts that documents state."""

    def __init__(self, documents: Iterable[Document], seed: int) -> None:
        """Reads all documents, to find values that belong to a single entity."""
        self._seed = seed
        self._owners: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
        for document in documents:
            fact = fact_of(document)
            if fact is not None:
                relation, entity, value = fact
                self._owners[relation.key, value.casefold()].add(entity)

    def reads(self, document: Document) -> bool:
        """Returns whether the author can write about the document.

        The document must be one sentence in a known wording, and state a value other than 0.
        """
        fact = fact_of(document)
        return fact is not None and fact[2] != "0"

    async def atomic(self, document: Document) -> list[Draft]:
        """Returns up to two questions about the fact that a document states.

        The first question asks for the value of the fact, for example for the capital of a country.
        The second question asks for the entity, for example for the country with this capital. It
        is left out if several entities have this value, or if values of this kind do not identify
        an entity.
        """
        fact = fact_of(document)
        if fact is None or fact[2] == "0":
            return []
        relation, entity, value = fact
        drafts = [self._draft("atomic", (_step_about(relation, entity),), value, (document,))]
        if relation.invertible and len(self._owners[relation.key, value.casefold()]) == 1:
            step = grammar.Inverse(relation.key, value)
            drafts.append(self._draft("atomic", (step,), entity, (document,)))
        return drafts

    async def add_hop(self, draft: Draft, document: Document) -> Draft | None:
        """Adds a hop to a question: asks about a fact of the entity that is its answer.

        Args:
            draft: the question, whose answer is an entity.
            document: document that states the fact.

        Returns:
            The longer question; None if the document states no such fact.
        """
        program, fact = grammar.understand(draft.question), fact_of(document)
        if program is None or fact is None or fact[2] == "0":
            return None
        relation, entity, value = fact
        answer = draft.steps[-1][1]
        entity_is_answer = isinstance(program.steps[-1], grammar.Inverse | grammar.Neighbour)
        if not entity_is_answer or entity.casefold() != answer.casefold():
            return None
        steps = (*program.steps, _step_about(relation, grammar.Ref(len(program.steps) - 1)))
        alone = grammar.render(grammar.Program((_step_about(relation, entity),)))
        documents, parts = (*draft.documents, document), (*draft.steps, (alone, value))
        return self._draft("depth", steps, value, documents, parts, (*draft.hidden, answer))

    async def join_drafts(self, one: Draft, other: Draft) -> Draft | None:
        """Returns a question about the sum, difference or ratio of the answers of two questions.

        The answers must be numbers of the same kind. The result is None if a question is not
        understood, or if both questions ask the same.
        """
        if to_decimal(one.steps[-1][1]) < to_decimal(other.steps[-1][1]):
            one, other = other, one
        a, b = (grammar.understand(draft.question) for draft in (one, other))
        if a is None or b is None or a == b:
            return None
        (first,), (second,) = a.steps, b.steps
        x, y = one.steps[-1][1], other.steps[-1][1]
        draw = fraction(self._seed, one.question, other.question)
        operation = grammar.OPERATIONS[int(draw * len(grammar.OPERATIONS))]
        steps = (first, second, grammar.Arithmetic(operation, grammar.Ref(0), grammar.Ref(1)))
        documents, parts = (*one.documents, *other.documents), (*one.steps, *other.steps)
        value = compute(operation, x, y)
        return self._draft("width", steps, value, documents, parts, (x, y))

    def _draft(
        self,
        form: Form,
        steps: tuple[grammar.Step, ...],
        value: str,
        documents: tuple[Document, ...],
        parts: tuple[tuple[str, str], ...] = (),
        hidden: tuple[str, ...] = (),
    ) -> Draft:
        program, last = grammar.Program(steps), steps[-1]
        wording = int(fraction(self._seed, "wording", program) * grammar.TEMPLATES)
        question = grammar.render(program, wording)
        topic = None
        if form == "atomic" and isinstance(last, grammar.Lookup):
            topic = last.relation if RELATIONS[last.relation].number else None
        gold, parts = accepted_answers(program, value), parts or ((question, value),)
        return Draft(form, question, gold, documents, parts, hidden, topic)


def _step_about(relation: Relation, subject: grammar.Subject) -> grammar.Lookup | grammar.Neighbour:
    if relation.key == "neighbour":
        return grammar.Neighbour(subject)
    return grammar.Lookup(relation.key, subject)


class Prior:
    """A solver that guesses answers, knowing only which answers are usual for a relation.

    A relation is the kind of a fact, such as the capital of a country. For a question about the
    value of a relation, the guess is the value of this relation in a random document of the corpus.
    For a question about an entity, the guess is the entity of a random document. The answer to a
    question that the prior does not understand is "".
    """

    def __init__(self, documents: Iterable[Document], seed: int) -> None:
        """Collects the values and entities of all documents."""
        self._seed = seed
        self._values: dict[str, list[str]] = collections.defaultdict(list)
        self._entities: dict[str, list[str]] = collections.defaultdict(list)
        for document in documents:
            fact = fact_of(document)
            if fact is not None and fact[2] != "0":
                self._values[fact[0].key].append(fact[2].replace("; ", "|"))
                self._entities[fact[0].key].append(fact[1])

    async def __call__(self, tasks: Sequence[Task], samples: int) -> list[list[str]]:
        """Returns ``samples`` answers for each task."""
        return [[self._guess(task, str(k)) for k in range(samples)] for task in tasks]

    def _guess(self, task: Task, draw: str) -> str:
        program = grammar.understand(task.question)
        if program is None:
            return ""
        last = program.steps[-1]
        if not isinstance(last, grammar.Arithmetic):
            return self._pick(last, task.id, draw)
        a, b = (
            self._pick(program.steps[ref.step], task.id, f"{draw}/{side}")
            for side, ref in (("a", last.a), ("b", last.b))
        )
        if not a or not b or to_decimal(b) == 0:
            return ""
        return compute(last.operation, a, b)

    def _pick(self, step: grammar.Step, episode: str, draw: str) -> str:
        if isinstance(step, grammar.Computed):
            return ""
        choices = self._entities if isinstance(step, grammar.Inverse) else self._values
        options = choices["neighbour" if isinstance(step, grammar.Neighbour) else step.relation]
        return options[int(uniform(self._seed, episode, draw) * len(options))] if options else ""
