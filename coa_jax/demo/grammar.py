"""Represents questions about the World Factbook as programs, and writes and parses the questions.

A `Program` is a tuple of steps in the order of execution. A step refers to the answer of an
earlier step by `Ref(index)`. The program expresses the meaning of a question:

* `render(program, template)` writes the program as an English question, in one of `TEMPLATES`
  paraphrases.
* `understand(question)` parses the question. It is the exact inverse of `render`:
  ``understand(render(p, t)) == p`` for every program and every paraphrase.
* `resolve_references(step, answers)` replaces the references of a step by the answers of earlier
  steps.
* `query_for(step)` returns the search query of a step.
* `read_value(step, title, text)` reads the answer of a step from a passage.
* `source_for(step, answers)` returns the Python program of a step that needs no search.
* `describe(step)` describes in words what a step must find.

This module contains no facts: a teacher that uses it works only with the question and with the text
that a search returns. Example::

    program = understand("What is the area of the country whose capital is Gaborone?")
    # Program((Inverse("capital", "Gaborone"), Lookup("area", Ref(0))))
    query_for(program.steps[0])                      # "capital Gaborone"
    read_value(program.steps[0], "Botswana: Capital", "The capital of Botswana is Gaborone.")
    # "Botswana"
    query_for(resolve_references(program.steps[1], ("Botswana",)))  # "area of Botswana"
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence

from coa_jax.demo import wording as wording
from coa_jax.demo.relations import RELATIONS, read_passage, relation_of

TEMPLATES = wording.TEMPLATES
"""Number of paraphrases of every kind of question."""

_SIGNS = {"sum": "+", "difference": "-", "ratio": "/"}
OPERATIONS = tuple(_SIGNS)
"""Arithmetic of two numbers; a ratio is rounded to two decimals."""


@dataclasses.dataclass(frozen=True)
class Ref:
    """A reference, in a step, to the answer of an earlier step, by its index (from 0)."""

    step: int


Subject = str | Ref


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A step that looks up the value of ``relation`` (such as the capital) for ``subject``."""

    relation: str
    subject: Subject


@dataclasses.dataclass(frozen=True)
class Inverse:
    """A step that finds the only entity whose ``relation`` (such as the capital) is ``value``."""

    relation: str
    value: str


@dataclasses.dataclass(frozen=True)
class Neighbour:
    """A step that finds the country with which ``subject`` shares its longest land border."""

    subject: Subject


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """A step that applies ``operation`` of `OPERATIONS` to the answers of steps ``a`` and ``b``."""

    operation: str
    a: Ref
    b: Ref


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A step that finds which of ``subjects`` has the largest or smallest value.

    ``operation`` is ``largest`` or ``smallest``. ``values`` are the steps with the values of the
    subjects.
    """

    operation: str
    values: tuple[Ref, ...]
    subjects: tuple[Subject, ...]


@dataclasses.dataclass(frozen=True)
class Count:
    """A step that counts the members of a list, which the step ``items`` found."""

    items: Ref


Computed = Arithmetic | Comparison | Count
"""Steps that Python code computes, without a search."""

Step = Lookup | Inverse | Neighbour | Computed


@dataclasses.dataclass(frozen=True)
class Program:
    """The meaning of a question: steps in the order of execution.

    The answer of the last step is the answer to the question. Do not rename this class, the classes
    of steps or their fields: `tasks.base.fraction` hashes the text of a program, names included, so
    a new name changes which questions are drawn.
    """

    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return self._text

    @functools.cached_property
    def _text(self) -> str:
        # Kept, because each random choice about a program hashes its text.
        return repr(self)

    @property
    def hops(self) -> int:
        """Number of steps that need a search, 1 to 4. Computed steps do not count."""
        return sum(not isinstance(step, Computed) for step in self.steps)


def resolve_references(step: Step, answers: Sequence[str]) -> Step:
    """Replaces references to earlier steps by the answers of these steps.

    Only the subjects of a step are replaced. References to numbers (in arithmetic, comparisons and
    counts) stay, because `source_for` resolves them.

    Args:
        step: a step that may refer to answers of earlier steps.
        answers: answers of all earlier steps.
    """

    def bound(subject: Subject) -> Subject:
        return answers[subject.step] if isinstance(subject, Ref) else subject

    if isinstance(step, Lookup | Neighbour):
        return dataclasses.replace(step, subject=bound(step.subject))
    if isinstance(step, Comparison):
        return dataclasses.replace(step, subjects=tuple(map(bound, step.subjects)))
    return step


def query_for(step: Step) -> str:
    """Returns the search query of a step, such as "capital of Botswana" or "capital Gaborone".

    Args:
        step: a step without references, see `resolve_references`.

    Raises:
        ValueError: the step needs no search, or contains a reference.
    """
    if isinstance(step, Inverse):
        return f"{relation_of(step.relation).noun} {step.value}"
    if isinstance(step, Computed) or isinstance(step.subject, Ref):
        raise ValueError(f"no search query for {step}")
    relation = relation_of(step.relation if isinstance(step, Lookup) else "neighbour")
    return f"{relation.noun} {relation.preposition} {step.subject}"


def read_value(step: Step, title: str, text: str) -> str | None:
    """Reads the answer of a step from the passage of a search result.

    Args:
        step: a `Lookup`, `Inverse` or `Neighbour` without references, see `resolve_references`.
        title: title of the passage, such as "Botswana: Capital". The part after the first ": " must
            be the title of the relation that the step asks for.
        text: text of the passage.

    Returns:
        The answer as the passage writes it, but border countries are joined by "|", as in accepted
        answers. The result is None if the passage does not contain the answer.
    """
    if isinstance(step, Computed):
        return None
    relation = relation_of("neighbour" if isinstance(step, Neighbour) else step.relation)
    pair = read_passage(relation, title, text)
    if pair is None:
        return None
    entity, value = pair
    if isinstance(step, Inverse):
        return entity if value.casefold() == step.value.casefold() else None
    if isinstance(step.subject, Ref) or entity.casefold() != step.subject.casefold():
        return None
    return value.replace("; ", "|") if relation.key == "borders" else value


def source_for(step: Computed, answers: Sequence[str]) -> str:
    """Returns a Python program that prints the answer of a step that needs no search.

    Args:
        step: the step. The subjects of a comparison must not be references, see
            `resolve_references`.
        answers: answers of all earlier steps as text. Numbers may have thousands separators.
    """

    def number(ref: Ref) -> str:
        return answers[ref.step].replace(",", "").strip()

    if isinstance(step, Count):
        return f'print(len("{answers[step.items.step]}".split("|")))'
    if isinstance(step, Comparison):
        pairs = zip(map(number, step.values), step.subjects, strict=True)
        choose = {"largest": "max", "smallest": "min"}[step.operation]
        listed = ", ".join(f'({value}, "{subject}")' for value, subject in pairs)
        return f"print({choose}({listed})[1])"
    assert isinstance(step, Arithmetic)
    result = f"{number(step.a)} {_SIGNS[step.operation]} {number(step.b)}"
    return f"print(round({result}, 2))" if step.operation == "ratio" else f"print({result})"


def describe(step: Step) -> str:
    """Describes in a short phrase, for use in plans, what a step of a program must find.

    References to earlier steps are written as "#1", "#2" and so on.
    """
    if isinstance(step, Inverse):
        return _inverse(step, 0)
    if isinstance(step, Arithmetic):
        return f"#{step.a.step + 1} {_SIGNS[step.operation]} #{step.b.step + 1}"
    if isinstance(step, Comparison):
        return f"the {step.operation} of {', '.join(f'#{ref.step + 1}' for ref in step.values)}"
    if isinstance(step, Count):
        return f"the number of #{step.items.step + 1}"
    subject = f"#{step.subject.step + 1}" if isinstance(step.subject, Ref) else step.subject
    if isinstance(step, Neighbour):
        return wording.NEIGHBOUR[0].format(entity=subject)
    return _phrase(wording.QUANTITY, step, subject)


def kind_of(program: Program) -> str:
    """Returns the kinds of a program's steps in order, such as ``inverse>neighbour>lookup``.

    If the last three steps divide population by area, they have the common kind ``density``.
    """
    names = [
        step.operation if isinstance(step, Arithmetic) else type(step).__name__.lower()
        for step in program.steps
    ]
    return ">".join([*names[:-3], "density"] if is_density(program) else names)


def render(program: Program, template: int = 0) -> str:
    """Writes a question program as an English question.

    Args:
        program: the steps. Each step must contribute to the answer. For arithmetic on two values,
            the steps of the first value come first.
        template: index of the paraphrase, from 0 to `TEMPLATES` - 1, that is used for the question
            and for the phrases in the question.

    Raises:
        ValueError: the last step is a `Comparison` or a `Count`, which only `render_people` can
            express, or arithmetic on the answers of steps that are not a `Lookup`.
    """
    steps, last = program.steps, program.steps[-1]
    entity = functools.partial(_entity_phrase, steps, template)
    if isinstance(last, Inverse):
        noun = RELATIONS[last.relation].noun
        return wording.ASK_INVERSE[template].format(noun=noun, value=_quoted(last))
    if isinstance(last, Neighbour):
        return wording.ASK_NEIGHBOUR[template].format(entity=entity(last.subject))
    if isinstance(last, Lookup):
        if last.relation == "borders":
            return wording.ASK_BORDERS[template].format(entity=entity(last.subject))
        return _phrase(wording.ASK_LOOKUP[template], last, entity(last.subject))
    if not isinstance(last, Arithmetic):
        raise ValueError("comparisons and counts are written by render_people only")
    a, b = steps[last.a.step], steps[last.b.step]
    if not isinstance(a, Lookup) or not isinstance(b, Lookup):
        raise ValueError("arithmetic takes the answers of lookups")
    if is_density(program):
        return wording.ASK_DENSITY[template].format(entity=entity(a.subject))
    return wording.ASK_ARITHMETIC[last.operation][template].format(
        a=_phrase(wording.QUANTITY, a, entity(a.subject)),
        b=_phrase(wording.QUANTITY, b, entity(b.subject)),
    )


def understand(question: str) -> Program | None:
    """Parses a question that `render` has written, and returns its program.

    The result is None for any other text.
    """
    text = question.strip()
    readers = (_read_arithmetic, _read_density, _read_simple)
    return next((program for reader in readers for program in reader(text)), None)


def density(subject: Subject, index: int) -> tuple[Step, ...]:
    """Returns the steps that divide the population of a subject by its area.

    Args:
        subject: name of the entity, or a reference to an earlier step whose answer is the entity.
        index: index of the first of these steps in the program.
    """
    lookups = Lookup("population", subject), Lookup("area", subject)
    return (*lookups, Arithmetic("ratio", Ref(index), Ref(index + 1)))


def is_density(program: Program) -> bool:
    """Returns whether a program ends with the steps of `density`: population divided by area."""
    before, end = program.steps[:-3], program.steps[-3:]
    return isinstance(end[0], Lookup) and end == density(end[0].subject, len(before))


def _quoted(step: Inverse) -> str:
    return f'"{step.value}"' if step.relation == "anthem" else step.value


def _inverse(step: Inverse, template: int) -> str:
    noun = relation_of(step.relation).noun
    return wording.INVERSE[template].format(noun=noun, value=_quoted(step))


def _phrase(template: str, step: Lookup, entity: str) -> str:
    relation = relation_of(step.relation)
    return template.format(noun=relation.noun, preposition=relation.preposition, entity=entity)


def _entity_phrase(steps: Sequence[Step], template: int, subject: Subject) -> str:
    if isinstance(subject, str):
        return subject
    step = steps[subject.step]
    if isinstance(step, Inverse):
        return _inverse(step, template)
    if isinstance(step, Neighbour):
        inner = _entity_phrase(steps, template, step.subject)
        return wording.NEIGHBOUR[template].format(entity=inner)
    raise ValueError(f"a lookup cannot be the subject of another step: {step}")


@functools.cache
def _regex(template: str) -> re.Pattern[str]:
    """Compiles a template to a pattern whose groups are the slots of the template.

    The slot ``{noun}`` matches only names of relations, and a quantity must begin with such a name.
    Therefore an "and" in the name of a country is not mistaken for the "and" of a sum.
    """
    nouns = "|".join(sorted((re.escape(r.noun) for r in RELATIONS.values()), key=len)[::-1])
    text = re.escape(template)
    text = text.replace(r"\{noun\}", f"(?P<noun>{nouns})")
    text = text.replace(r"\{preposition\}", "(?P<preposition>of|in)")
    text = re.sub(r"\\{(a|b)\\}", rf"(?P<\1>the (?:{nouns}) (?:of|in) .+)", text)
    return re.compile(re.sub(r"\\{(entity|value)\\}", r"(?P<\1>.+)", text))


def _relation(match: re.Match[str], invertible: bool = False) -> str | None:
    """Returns the key of the relation in a match; None if the relation does not fit there.

    Args:
        match: match of a template with the slot ``{noun}``.
        invertible: whether the relation must be invertible.
    """
    groups = match.groupdict()
    for relation in RELATIONS.values():
        if relation.noun == groups["noun"] and relation.key != "neighbour":
            right = groups.get("preposition") in (None, relation.preposition)
            return relation.key if right and (relation.invertible or not invertible) else None
    return None


def _read_inverse(templates: Sequence[str], text: str) -> Inverse | None:
    for template in templates:
        match = _regex(template).fullmatch(text)
        key = _relation(match, invertible=True) if match else None
        if match is None or key is None:
            continue
        value = match["value"]
        if key != "anthem":
            return Inverse(key, value)
        if len(value) > 2 and value[0] == value[-1] == '"':
            return Inverse(key, value[1:-1])
    return None


def _read_entity(text: str, offset: int) -> tuple[tuple[Step, ...], Subject] | None:
    """Parses a noun phrase that denotes an entity; returns its steps and how to refer to it.

    Args:
        text: the noun phrase.
        offset: index of the first step.
    """
    for template in wording.NEIGHBOUR:
        match = _regex(template).fullmatch(text)
        inner = _read_entity(match["entity"], offset) if match else None
        if inner:
            steps = (*inner[0], Neighbour(inner[1]))
            return steps, Ref(offset + len(steps) - 1)
    step = _read_inverse(wording.INVERSE, text)
    if step:
        return (step,), Ref(offset)
    is_name = text[:1].isupper() and not re.search(r"[?\"]|\bthe (country|neighbour) ", text)
    return ((), text) if is_name else None


def _read_around(
    templates: Sequence[str], text: str
) -> Iterator[tuple[re.Match[str], tuple[Step, ...], Subject]]:
    """Yields (match, steps, subject) for each template with an entity slot that fits a question."""
    for template in templates:
        match = _regex(template).fullmatch(text)
        inner = _read_entity(match["entity"], 0) if match else None
        if match and inner:
            yield match, *inner


def _read_simple(text: str) -> Iterator[Program]:
    for _, steps, subject in _read_around(wording.ASK_NEIGHBOUR, text):
        yield Program((*steps, Neighbour(subject)))
    for _, steps, subject in _read_around(wording.ASK_BORDERS, text):
        yield Program((*steps, Lookup("borders", subject)))
    for match, steps, subject in _read_around(wording.ASK_LOOKUP, text):
        key = _relation(match)
        if key and key != "borders":
            yield Program((*steps, Lookup(key, subject)))
    step = _read_inverse(wording.ASK_INVERSE, text)
    if step:
        yield Program((step,))


def _read_density(text: str) -> Iterator[Program]:
    for _, steps, subject in _read_around(wording.ASK_DENSITY, text):
        yield Program((*steps, *density(subject, len(steps))))


def _read_quantity(text: str, offset: int) -> tuple[Step, ...] | None:
    match = _regex(wording.QUANTITY).fullmatch(text)
    key = _relation(match) if match else None
    if match is None or key is None or not RELATIONS[key].number:
        return None
    inner = _read_entity(match["entity"], offset)
    return (*inner[0], Lookup(key, inner[1])) if inner else None


def _read_arithmetic(text: str) -> Iterator[Program]:
    for operation, templates in wording.ASK_ARITHMETIC.items():
        for template in templates:
            match = _regex(template).fullmatch(text)
            a = _read_quantity(match["a"], 0) if match else None
            b = _read_quantity(match["b"], len(a)) if match and a else None
            if a and b:
                last = Arithmetic(operation, Ref(len(a) - 1), Ref(len(a) + len(b) - 1))
                yield Program((*a, *b, last))
