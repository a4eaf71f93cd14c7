"""Writes question programs in varied English wordings, and parses these questions.

* `render_people(program, choose)` writes a program as a question. The function `choose` selects one
  template of a tuple.
* `understand_people(question)` parses the question. It is the inverse of `render_people`, except
  that it ignores capital letters.

A text may fit several templates, because the place of a name in a template accepts any few words.
The result is then the program whose names have the fewest characters in total.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from coa_jax.demo import people_wording as wording
from coa_jax.demo.grammar import (
    Arithmetic,
    Comparison,
    Count,
    Inverse,
    Lookup,
    Neighbour,
    Program,
    Ref,
    Step,
    Subject,
    density,
    is_density,
)

Choose = Callable[[wording.Templates], str]
"""Selects one of several templates."""

_Part = tuple[tuple[Step, ...], Subject, int]
"""(steps, how the next step refers to their result, number of characters in names)."""

_PLURAL, _NO_PLURAL = "{value}s", "{value} people"
_LONGEST_NAME = 7  # words
_NO_NAME = re.compile(
    r"[?\":]|\b(that|which|whose|what|is|does)\b"
    r"|\bthe (country|state|nation|neighbour|owner|homeland)\b",
    re.IGNORECASE,
)


# --- writing ---------------------------------------------------------------------------------


def render_people(program: Program, choose: Choose, via: bool = False) -> str:
    """Writes a question program as an English question, in a wording that ``choose`` selects.

    Args:
        program: a lookup, a chain of lookups, arithmetic on two values, a comparison of two or
            three values of the same relation, or the number of border countries.
        choose: function that chooses a template for the question, and for each phrase in the
            question.
        via: whether to prefer the templates of `via_templates`. Programs with an adjective of
            nationality always use these templates.

    Raises:
        KeyError: there is no template for the program.
    """
    steps, last = program.steps, program.steps[-1]

    def entity(subject: Subject) -> str:
        if isinstance(subject, str):
            return subject
        step = steps[subject.step]
        if isinstance(step, Inverse):
            return choose(wording.INVERSE[step.relation]).format(value=step.value)
        if isinstance(step, Neighbour):
            return choose(wording.NEIGHBOUR).format(entity=entity(step.subject))
        raise KeyError(f"a lookup cannot be the subject of another step: {step}")

    if isinstance(last, Inverse):
        return choose(wording.ASK_INVERSE[last.relation]).format(value=last.value)
    if isinstance(last, Neighbour):
        return _start(choose(wording.ASK_NEIGHBOUR).format(entity=entity(last.subject)))
    first = steps[0]
    templates = via_templates(program)
    if isinstance(first, Inverse) and templates and (via or first.relation == "adjective"):
        template = choose(templates)
        if not first.value.endswith("an"):  # the plural of Swiss is not "Swisss"
            template = template.replace(_PLURAL, _NO_PLURAL)
        return template.format(value=first.value)
    if isinstance(last, Lookup):
        return _start(choose(wording.ASK[last.relation]).format(entity=entity(last.subject)))
    if isinstance(last, Count):
        return _start(choose(wording.ASK_COUNT).format(entity=entity(_lookup(steps, -2).subject)))
    refs = last.values if isinstance(last, Comparison) else (last.a, last.b)
    lookups = [_lookup(steps, ref.step) for ref in refs]
    relation = lookups[0].relation
    if is_density(program):
        return _start(choose(wording.ASK_DENSITY).format(entity=entity(lookups[0].subject)))
    if any(lookup.relation != relation for lookup in lookups):
        raise KeyError("the values are of different relations")
    if isinstance(last, Comparison):
        tables = {2: wording.COMPARE, 3: wording.COMPARE_THREE}
        templates = tables[len(lookups)][relation][last.operation]
    else:
        templates = wording.ARITHMETIC[relation][last.operation]
    names = [entity(lookup.subject) for lookup in lookups]
    return _start(choose(templates).format(**dict(zip("abc", names, strict=False))))


def via_templates(program: Program) -> wording.Templates:
    """Returns the templates for a program that do not name the country; () if there are none."""
    first, last = program.steps[0], program.steps[-1]
    if len(program.steps) != 2 or not isinstance(first, Inverse) or not isinstance(last, Lookup):
        return ()
    return wording.ASK_VIA.get(first.relation, {}).get(last.relation, ())


def _lookup(steps: Sequence[Step], index: int) -> Lookup:
    step = steps[index]
    if not isinstance(step, Lookup):
        raise KeyError(f"arithmetic takes the answers of lookups, not of {step}")
    return step


def _start(question: str) -> str:
    """Capitalises the first letter of a question, which may belong to an inserted phrase."""
    return question[:1].upper() + question[1:]


# --- reading ---------------------------------------------------------------------------------


def understand_people(question: str) -> Program | None:
    """Parses a question that `render_people` has written; returns its program.

    The result is None for any other text.
    """
    readings = list(_readings(question.strip().rstrip("?.!").strip()))
    return min(readings, key=lambda reading: reading[1])[0] if readings else None


def _readings(text: str) -> Iterator[tuple[Program, int]]:
    """Yields (program, number of characters in names) for each way to parse a question."""
    for steps, _, size in _inverse(text, wording.ASK_INVERSE, 0):
        yield Program(steps), size
    for key, relations in wording.ASK_VIA.items():
        for relation, templates in relations.items():
            others = tuple(t.replace(_PLURAL, _NO_PLURAL) for t in templates if _PLURAL in t)
            for (value,) in _slots(text, templates + others):
                yield Program((Inverse(key, value), Lookup(relation, Ref(0)))), len(value)
    yield from _about(text, wording.ASK_NEIGHBOUR, _neighbour)
    yield from _about(text, wording.ASK_COUNT, _count)
    yield from _about(text, wording.ASK_DENSITY, density)
    for relation, templates in wording.ASK.items():
        yield from _about(text, templates, functools.partial(_value, relation))
    yield from _of_several(text)


def _neighbour(subject: Subject, index: int) -> tuple[Step, ...]:
    return (Neighbour(subject),)


def _value(relation: str, subject: Subject, index: int) -> tuple[Step, ...]:
    return (Lookup(relation, subject),)


def _count(subject: Subject, index: int) -> tuple[Step, ...]:
    return Lookup("borders", subject), Count(Ref(index))


def _about(
    text: str, templates: wording.Templates, last: Callable[[Subject, int], tuple[Step, ...]]
) -> Iterator[tuple[Program, int]]:
    """Yields the ways to parse a question about a single entity.

    Args:
        text: the question.
        templates: templates of the question.
        last: function that returns the last steps of the program from the entity and from the
            number of earlier steps.
    """
    for (entity,) in _slots(text, templates):
        for steps, subject, size in _entity(entity, 0):
            yield Program((*steps, *last(subject, len(steps)))), size


def _of_several(text: str) -> Iterator[tuple[Program, int]]:
    """Yields the ways to parse a question as a comparison, or as arithmetic on two values."""
    for relation, operations in (*wording.COMPARE.items(), *wording.COMPARE_THREE.items()):
        for operation, templates in operations.items():
            for steps, refs, subjects, size in _values(text, templates, relation):
                yield Program((*steps, Comparison(operation, refs, subjects))), size
    for relation, operations in wording.ARITHMETIC.items():
        for operation, templates in operations.items():
            for steps, (a, b), _, size in _values(text, templates, relation):
                yield Program((*steps, Arithmetic(operation, a, b))), size


def _values(
    text: str, templates: wording.Templates, relation: str
) -> Iterator[tuple[tuple[Step, ...], tuple[Ref, ...], tuple[Subject, ...], int]]:
    """Yields the ways to parse a question about the values of several entities.

    Each is (steps, references to the steps with the values, entities, number of characters in
    names).
    """
    for slots in _slots(text, templates):
        steps: tuple[Step, ...] = ()
        refs: tuple[Ref, ...] = ()
        subjects: tuple[Subject, ...] = ()
        total = 0
        for slot in slots:
            entity = min(_entity(slot, len(steps)), key=lambda part: part[2], default=None)
            if entity is None:
                break
            before, subject, size = entity
            steps = (*steps, *before, Lookup(relation, subject))
            refs, subjects = (*refs, Ref(len(steps) - 1)), (*subjects, subject)
            total += size
        else:
            yield steps, refs, subjects, total


def _entity(text: str, offset: int) -> Iterator[_Part]:
    """Yields the ways to parse a phrase that denotes an entity.

    Args:
        text: the phrase.
        offset: index of the first step.
    """
    yield from _inverse(text, wording.INVERSE, offset)
    for (inner,) in _slots(text, wording.NEIGHBOUR):
        for steps, subject, size in _entity(inner, offset):
            yield (*steps, Neighbour(subject)), Ref(offset + len(steps)), size
    if not _NO_NAME.search(text) and len(text.split()) <= _LONGEST_NAME:
        yield (), text, len(text)


def _inverse(text: str, table: Mapping[str, wording.Templates], offset: int) -> Iterator[_Part]:
    """Yields the ways to parse a phrase as the country that a value identifies."""
    for relation, templates in table.items():
        for (value,) in _slots(text, templates):
            if '"' not in value and "?" not in value:
                yield (Inverse(relation, value),), Ref(offset), len(value)


def _slots(text: str, templates: wording.Templates) -> Iterator[tuple[str, ...]]:
    """Yields the texts in the slots of each template that fits, in the order of the slot names."""
    for template in templates:
        for pattern in _regexes(template):
            if match := pattern.fullmatch(text):
                yield tuple(match[name] for name in sorted(match.groupdict()))


@functools.cache
def _regexes(template: str) -> tuple[re.Pattern[str], ...]:
    """Compiles a template to two patterns.

    The first slots of the template match as many characters as possible in the first pattern, and
    as few as possible in the second. Of the two results, one is right if the name of a country
    contains an "and".
    """
    parts = re.split(r"\{(\w+)\}", template.rstrip("?."))

    def pattern(lazy: str) -> str:
        text, slots = "", set[str]()
        for literal, slot in itertools.zip_longest(parts[::2], parts[1::2]):
            text += re.escape(literal)
            if slot:
                text += f"(?P={slot})" if slot in slots else f"(?P<{slot}>.+{lazy})"
                slots.add(slot)
        return text

    return tuple(re.compile(pattern(lazy), re.IGNORECASE) for lazy in ("", "?"))
