"""The structured relations of the Factbook: the names and the sentence of each.

A relation is only wording; it does not refer to a country. The search tool's pages use these
sentences, and the grammar of the factbook tasks parses values out of them.
"""

from __future__ import annotations

import dataclasses
import functools
import re


@dataclasses.dataclass(frozen=True)
class Relation:
    """A kind of fact about an entity.

    Attributes:
        key: identifier used in programs, e.g. ``capital``.
        title: second half of a passage title, e.g. ``Capital``.
        noun: name in questions and queries, e.g. ``capital``.
        sentence: template of the sentence that states the fact; slots ``{entity}`` and ``{value}``.
        preposition: word between noun and entity in questions.
        unit: unit of a number in the sentence; "" for none.
        number: whether the value is a number.
        invertible: whether a question may identify an entity by a value.
    """

    key: str
    title: str
    noun: str
    sentence: str
    preposition: str = "of"
    unit: str = ""
    number: bool = False
    invertible: bool = False


def _of(key: str, title: str, noun: str, **more: object) -> Relation:
    """Returns a relation whose sentence is "The <noun> of <entity> is <value> <unit>."."""
    unit = f" {more['unit']}" if more.get("unit") else ""
    preposition = more.get("preposition", "of")
    sentence = f"The {noun} {preposition} {{entity}} is {{value}}{unit}."
    return Relation(key, title, noun, sentence, **more)  # type: ignore[arg-type]


_ALL = (
    _of("capital", "Capital", "capital", invertible=True),
    _of("area", "Area", "area", unit="sq km", number=True),
    _of("population", "Population", "population", number=True),
    _of("currency", "Currency", "currency"),
    _of("internet_code", "Internet code", "internet code", invertible=True),
    _of("demonym", "Demonym", "demonym", invertible=True),
    _of("highest_point", "Highest point", "highest point", invertible=True),
    _of("highest_elevation", "Top elevation", "top elevation", unit="m", number=True),
    _of("mean_elevation", "Mean elevation", "mean elevation", unit="m", number=True),
    _of("lowest_point", "Lowest point", "lowest point"),
    _of("coastline", "Coastline", "coastline", unit="km", number=True),
    _of("government", "Government type", "government type"),
    _of("independence", "Independence", "independence date"),
    _of("anthem", "National anthem", "national anthem", invertible=True),
    _of("largest_city", "Largest city", "largest city"),
    _of("aircraft_prefix", "Aircraft prefix", "aircraft prefix", invertible=True),
    _of("airports", "Airports", "number of airports", preposition="in", number=True),
    _of("railways", "Railways", "railway length", unit="km", number=True),
    _of(
        "heritage_sites",
        "World Heritage Sites",
        "number of World Heritage Sites",
        preposition="in",
        number=True,
    ),
    _of("median_age", "Median age", "median age", unit="years", number=True),
    _of("life_expectancy", "Life expectancy", "life expectancy", unit="years", number=True),
    Relation(
        "borders",
        "Border countries",
        "border countries",
        "The border countries of {entity} are {value}.",
    ),
    Relation(
        "neighbour",
        "Longest border",
        "longest border",
        "The longest border of {entity} is with {value}.",
    ),
)

RELATIONS: dict[str, Relation] = {relation.key: relation for relation in _ALL}
"""All relations, by key."""

INVERTIBLE: tuple[str, ...] = tuple(r.key for r in _ALL if r.invertible)
"""Keys of the relations that can identify an entity by their value."""


def state(relation: Relation, entity: str, value: str) -> str:
    """Returns the passage text that states a fact.

    Args:
        relation: the relation.
        entity: name of the entity.
        value: value of the relation; values of ``borders`` are joined by "; ".
    """
    return relation.sentence.format(entity=entity, value=value)


@functools.cache
def _pattern(relation: Relation) -> re.Pattern[str]:
    text = re.escape(relation.sentence)
    text = text.replace(r"\{entity\}", "(?P<entity>.+?)").replace(r"\{value\}", "(?P<value>.+)")
    return re.compile(text)


def read(relation: Relation, text: str) -> tuple[str, str] | None:
    """Parses (entity, value) from a sentence of `state`; None for any other text.

    An entity name that contains the verb of the sentence would be cut short; no name does.
    """
    found = _pattern(relation).fullmatch(text.strip())
    return (found["entity"], found["value"]) if found else None
