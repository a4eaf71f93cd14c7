"""Questions about the Factbook as programs: rendering, reading and carrying them out step by step.

A `Program` is a tuple of steps in the order of execution; a step names the answer of an earlier
step by `Ref(index)`.  The program is the meaning of a question:

* `render(program, template)` writes it in English (`TEMPLATES` paraphrases of each kind),
* `understand(question)` is the exact inverse: ``understand(render(p, t)) == p`` for all of them,
* `bind(step, answers)` puts answers of earlier steps in place of references,
* `query_for(step)` is what to search for, `read_value(step, title, text)` reads the step's answer
  from one passage (and from nothing else), `source_for(step, answers)` is the Python program of
  an arithmetic step, and `describe(step)` says in words what a step is to find.

Nothing here knows a fact: a planner or search agent built on this module works from the question
and from the text it retrieves.  Example::

    program = understand("What is the area of the country whose capital is Gaborone?")
    # Program((Inverse("capital", "Gaborone"), Lookup("area", Ref(0))))
    query_for(program.steps[0])                      # "capital Gaborone"
    read_value(program.steps[0], "Botswana: Capital", "The capital of Botswana is Gaborone.")
    # "Botswana"
    query_for(bind(program.steps[1], ("Botswana",)))  # "area of Botswana"
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence

from coa_jax.tasks import factbook_wording as wording
from coa_jax.tools import factbook_relations
from coa_jax.tools.factbook_relations import RELATIONS

TEMPLATES = wording.TEMPLATES
"""Number of paraphrases of every kind of question."""

OPERATIONS = ("sum", "difference", "ratio")
"""Arithmetic of two numbers; a ratio is rounded to two decimals."""


@dataclasses.dataclass(frozen=True)
class Ref:
    """The answer of the step with this index, counted from 0."""

    step: int


Subject = str | Ref


@dataclasses.dataclass(frozen=True)
class Lookup:
    """The value of a relation of an entity (``borders`` gives a list joined by "|")."""

    relation: str
    subject: Subject


@dataclasses.dataclass(frozen=True)
class Inverse:
    """The one entity for which an invertible relation has this value."""

    relation: str
    value: str


@dataclasses.dataclass(frozen=True)
class Neighbour:
    """The country with which an entity shares its longest land border."""

    subject: Subject


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """``a + b``, ``a - b`` or ``a / b`` (two decimals) of the answers of two earlier steps."""

    operation: str
    a: Ref
    b: Ref


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The subject whose value is the ``largest`` or the ``smallest`` of several numbers."""

    operation: str
    values: tuple[Ref, ...]
    subjects: tuple[Subject, ...]


@dataclasses.dataclass(frozen=True)
class Count:
    """How many members the list has that an earlier step found."""

    items: Ref


Computed = Arithmetic | Comparison | Count
"""Steps that a program carries out, without a search."""

Step = Lookup | Inverse | Neighbour | Computed


@dataclasses.dataclass(frozen=True)
class Program:
    """Steps in the order of execution; the last one gives the answer."""

    steps: tuple[Step, ...]

    @property
    def hops(self) -> int:
        """Number of steps that need a search, 1 to 4 (arithmetic is not one)."""
        return sum(not isinstance(step, Computed) for step in self.steps)


def bind(step: Step, answers: Sequence[str]) -> Step:
    """Replaces subjects that are references by the answers of those steps.

    Arithmetic, numbers to compare and literals stay as they are.
    """

    def bound(subject: Subject) -> Subject:
        return answers[subject.step] if isinstance(subject, Ref) else subject

    if isinstance(step, Lookup | Neighbour):
        return dataclasses.replace(step, subject=bound(step.subject))
    if isinstance(step, Comparison):
        return dataclasses.replace(step, subjects=tuple(map(bound, step.subjects)))
    return step


def query_for(step: Step) -> str:
    """The search query of a bound step, e.g. "capital of Botswana" or "capital Gaborone".

    Raises:
        ValueError: the step is arithmetic or has a reference that was not bound.
    """
    if isinstance(step, Inverse):
        return f"{RELATIONS[step.relation].noun} {step.value}"
    if isinstance(step, Computed) or isinstance(step.subject, Ref):
        raise ValueError(f"no search query for {step}")
    relation = RELATIONS[step.relation if isinstance(step, Lookup) else "neighbour"]
    return f"{relation.noun} {relation.preposition} {step.subject}"


def read_value(step: Step, title: str, text: str) -> str | None:
    """Reads the answer of a bound search step from one passage.

    Args:
        step: a bound `Lookup`, `Inverse` or `Neighbour`.
        title: title of the passage; must name the relation that the step asks for.
        text: the passage.

    Returns:
        The answer as the passage words it, a list joined by "|", or None when the passage does
        not state what the step asks for.
    """
    if isinstance(step, Computed):
        return None
    relation = RELATIONS["neighbour" if isinstance(step, Neighbour) else step.relation]
    found = factbook_relations.read(relation, text)
    if found is None or not title.endswith(f": {relation.title}"):
        return None
    entity, value = found
    if isinstance(step, Inverse):
        return entity if value.casefold() == step.value.casefold() else None
    if isinstance(step.subject, Ref) or entity.casefold() != step.subject.casefold():
        return None
    return value.replace("; ", "|") if relation.key == "borders" else value


def source_for(step: Computed, answers: Sequence[str]) -> str:
    """The Python program that prints the answer of a step that needs no search.

    Args:
        step: the step; bound, where it compares.
        answers: texts of the answers of all earlier steps; thousands separators are allowed.
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
    a, b = number(step.a), number(step.b)
    if step.operation == "ratio":
        return f"print(round({a} / {b}, 2))"
    return f"print({a} {'+' if step.operation == 'sum' else '-'} {b})"


def describe(step: Step) -> str:
    """A short phrase for plans: what the step is to find; references read as "#1", "#2"."""
    if isinstance(step, Inverse):
        return _inverse(step, 0)
    if isinstance(step, Arithmetic):
        sign = {"sum": "+", "difference": "-", "ratio": "/"}[step.operation]
        return f"#{step.a.step + 1} {sign} #{step.b.step + 1}"
    if isinstance(step, Comparison):
        return f"the {step.operation} of {', '.join(f'#{ref.step + 1}' for ref in step.values)}"
    if isinstance(step, Count):
        return f"the number of #{step.items.step + 1}"
    subject = f"#{step.subject.step + 1}" if isinstance(step.subject, Ref) else step.subject
    if isinstance(step, Neighbour):
        return wording.NEIGHBOUR[0].format(entity=subject)
    relation = RELATIONS[step.relation]
    return wording.QUANTITY.format(
        noun=relation.noun, preposition=relation.preposition, entity=subject
    )


def kind_of(program: Program) -> str:
    """The shape of a program, e.g. ``inverse>neighbour>lookup`` or ``lookup+lookup>ratio``."""
    names = [
        step.operation if isinstance(step, Arithmetic) else type(step).__name__.lower()
        for step in program.steps
    ]
    if _is_density(program):
        return ">".join([*names[:-3], "density"])
    return ">".join(names)


def render(program: Program, template: int = 0) -> str:
    """Writes a program as a question.

    Args:
        program: a program as `understand` returns them: steps in the canonical order, each used.
        template: which paraphrase, 0 to `TEMPLATES` - 1; used for the question and its parts.
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
        raise ValueError("only people's wordings ask for comparisons and counts")
    a, b = steps[last.a.step], steps[last.b.step]
    if not isinstance(a, Lookup) or not isinstance(b, Lookup):
        raise ValueError("arithmetic takes the answers of lookups")
    if _is_density(program):
        return wording.ASK_DENSITY[template].format(entity=entity(a.subject))
    return wording.ASK_ARITHMETIC[last.operation][template].format(
        a=_phrase(wording.QUANTITY, a, entity(a.subject)),
        b=_phrase(wording.QUANTITY, b, entity(b.subject)),
    )


def understand(question: str) -> Program | None:
    """Reads a question back into its program; None for a text that `render` does not write."""
    text = question.strip()
    for reader in (_read_arithmetic, _read_density, _read_simple):
        for program in reader(text):
            return program
    return None


def _is_density(program: Program) -> bool:
    *rest, last = program.steps
    if not isinstance(last, Arithmetic) or last.operation != "ratio" or len(rest) < 2:
        return False
    a, b = rest[-2:]
    return (
        isinstance(a, Lookup)
        and isinstance(b, Lookup)
        and (a.relation, b.relation) == ("population", "area")
        and a.subject == b.subject
    )


def _quoted(step: Inverse) -> str:
    return f'"{step.value}"' if step.relation == "anthem" else step.value


def _inverse(step: Inverse, template: int) -> str:
    return wording.INVERSE[template].format(noun=RELATIONS[step.relation].noun, value=_quoted(step))


def _phrase(template: str, step: Lookup, entity: str) -> str:
    relation = RELATIONS[step.relation]
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
    """A template with its slots as groups.

    A ``{noun}`` only matches names of relations and a quantity begins with one, so that an "and"
    inside the name of a country does not split a sum.
    """
    nouns = "|".join(sorted((re.escape(r.noun) for r in RELATIONS.values()), key=len)[::-1])
    text = re.escape(template)
    text = text.replace(r"\{noun\}", f"(?P<noun>{nouns})")
    text = text.replace(r"\{preposition\}", "(?P<preposition>of|in)")
    text = re.sub(r"\\{(a|b)\\}", rf"(?P<\1>the (?:{nouns}) (?:of|in) .+)", text)
    return re.compile(re.sub(r"\\{(entity|value)\\}", r"(?P<\1>.+)", text))


def _relation(match: re.Match[str], invertible: bool = False) -> str | None:
    """Key of the relation that a match names, if it may stand in this place."""
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
    """Reads a noun phrase for an entity; its first step gets the index ``offset``."""
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
    """(match, steps, subject) of each template with an entity slot that fits a question."""
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
        lookups = (Lookup("population", subject), Lookup("area", subject))
        ratio = Arithmetic("ratio", Ref(len(steps)), Ref(len(steps) + 1))
        yield Program((*steps, *lookups, ratio))


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
