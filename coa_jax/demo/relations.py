"""Defines the relations of the World Factbook, with the words that state a fact.

A relation is a kind of fact, such as ``capital``; this module contains no facts about countries.
The passages of the search tool state facts with the words of a relation (`RELATIONS`), or quote a
field of the Factbook (`FIELDS`). The grammar of the factbook tasks parses the values in the
passages.
"""

from __future__ import annotations

import dataclasses
import functools
import re


@dataclasses.dataclass(frozen=True)
class Relation:
    """A kind of fact about an entity, such as its capital.

    Passages state the facts of `RELATIONS` in the sentence ``sentence``. The facts of `FIELDS` are
    quoted in the words of the Factbook, from which ``pattern`` takes the value.

    Attributes:
        key: identifier of the relation, such as ``capital``.
        title: second part of the title of a passage, such as ``Capital``.
        noun: name of the relation in questions and queries, such as ``capital``.
        sentence: template of the sentence that states a fact, with the placeholders ``{entity}``
            and ``{value}``; "" in `FIELDS`.
        preposition: word between the noun and the entity in questions.
        unit: unit that follows the number in the sentence; "" for no unit.
        number: whether the value is a number.
        invertible: whether a question may identify an entity by the value of this relation.
        pattern: regular expression that matches a whole passage, and whose group is the value; ""
            in `RELATIONS`.
    """

    key: str
    title: str
    noun: str
    sentence: str
    preposition: str = "of"
    unit: str = ""
    number: bool = False
    invertible: bool = False
    pattern: str = ""


_BORDERS = "The border countries of {entity} are {value}."
_LONGEST_BORDER = "The longest border of {entity} is with {value}."


def _relation(key: str, title: str, noun: str, **more: object) -> Relation:
    """Returns a relation whose sentence is "The <noun> of <entity> is <value> <unit>."."""
    unit = f" {more['unit']}" if more.get("unit") else ""
    preposition = "in" if noun.startswith("number of ") else "of"
    sentence = f"The {noun} {preposition} {{entity}} is {{value}}{unit}."
    return Relation(key, title, noun, sentence, preposition, **more)  # type: ignore[arg-type]


_ALL = (
    _relation("capital", "Capital", "capital", invertible=True),
    _relation("area", "Area", "area", unit="sq km", number=True),
    _relation("population", "Population", "population", number=True),
    _relation("currency", "Currency", "currency"),
    _relation("internet_code", "Internet code", "internet code", invertible=True),
    _relation("demonym", "Demonym", "demonym", invertible=True),
    _relation("highest_point", "Highest point", "highest point", invertible=True),
    _relation("highest_elevation", "Top elevation", "top elevation", unit="m", number=True),
    _relation("mean_elevation", "Mean elevation", "mean elevation", unit="m", number=True),
    _relation("lowest_point", "Lowest point", "lowest point"),
    _relation("coastline", "Coastline", "coastline", unit="km", number=True),
    _relation("government", "Government type", "government type"),
    _relation("independence", "Independence", "independence date"),
    _relation("anthem", "National anthem", "national anthem", invertible=True),
    _relation("largest_city", "Largest city", "largest city"),
    _relation("aircraft_prefix", "Aircraft prefix", "aircraft prefix", invertible=True),
    _relation("airports", "Airports", "number of airports", number=True),
    _relation("railways", "Railways", "railway length", unit="km", number=True),
    _relation(
        "heritage_sites", "World Heritage Sites", "number of World Heritage Sites", number=True
    ),
    _relation("median_age", "Median age", "median age", unit="years", number=True),
    _relation("life_expectancy", "Life expectancy", "life expectancy", unit="years", number=True),
    Relation("borders", "Border countries", "border countries", _BORDERS),
    Relation("neighbour", "Longest border", "longest border", _LONGEST_BORDER),
)

RELATIONS: dict[str, Relation] = {relation.key: relation for relation in _ALL}
"""Key -> relation, for all relations that a passage states in a sentence of this module."""

INVERTIBLE: tuple[str, ...] = tuple(r.key for r in _ALL if r.invertible)
"""Keys of the relations that can identify an entity by their value."""


_PERCENT = r"(-?[\d.]+%)(?: .*)?"
_PARTNER = r"([A-Z][A-Za-z ]+?) \d+%.*"
_MOST = r"([A-Z][A-Za-z' -]+?)(?: at least)?(?: \([^)]*\))? (?:[5-9]\d|100)(?:\.\d+)?%.*"
_ONLY = r"([A-Z][A-Za-z' -]+)(?: \([^)]*\))?"
_FIRST = r"(?!no |small |sometimes )([A-Za-z](?:(?! is )[A-Za-z' -])+?)(?: \([^)]*\))?(?:[,;].*)?"
_OFFICIAL = r"([A-Z][a-z]+) \(official\)(?!.*\(official\)).*"  # one official language only
_PERSON = r"([A-Z][A-Za-z' .-]+?) \(since .*"
_PATTERNS = (  # key, title of the field, noun ("" for the key), pattern
    ("language", "Languages", "official languages", _OFFICIAL),
    ("religion", "Religions", "religions", _MOST),
    ("ethnic_group", "Ethnic groups", "ethnic groups", _MOST),
    ("former_name", "Country name, former", "former country name", _ONLY),
    ("holiday", "National holiday", "national holiday", r".*?, (\d{1,2} [A-Z][a-z]+).*"),
    ("symbol", "National symbol(s)", "national symbol", _FIRST),
    ("voting_age", "Suffrage", "suffrage", r"(\d\d) years of age.*"),
    ("chief_of_state", "Executive branch, chief of state", "", _PERSON),
    ("head_of_government", "Executive branch, head of government", "", _PERSON),
    ("time_zone", "Capital, time difference", "time difference", r"UTC([+-]\d+) .*"),
    ("export_partner", "Exports - partners", "exports partners", _PARTNER),
    ("import_partner", "Imports - partners", "imports partners", _PARTNER),
    ("export_good", "Exports - commodities", "exports commodities", _FIRST),
    ("farm_product", "Agricultural products", "agricultural products", _FIRST),
    ("unemployment", "Unemployment rate 2024", "unemployment rate 2024", _PERCENT),
    ("inflation", "Inflation rate (consumer prices) 2024", "inflation rate 2024", _PERCENT),
    ("growth", "Population growth rate", "population growth rate", _PERCENT),
    ("internet_users", "Internet users, percent of population", "internet users", _PERCENT),
    ("literacy", "Literacy, total population", "total literacy", _PERCENT),
    ("urban", "Urbanization, urban population", "urban population", _PERCENT),
    ("adjective", "Nationality, adjective", "", r"([A-Z][A-Za-z]+(?: [A-Z][a-z]+)?)"),
    ("income", "Real GDP per capita 2024", "real GDP per capita 2024", r"(\$[\d,]+) .*"),
)

FIELDS: dict[str, Relation] = {
    key: Relation(key, title, noun or key.replace("_", " "), "", pattern=pattern)
    for key, title, noun, pattern in _PATTERNS
}
"""Key -> relation, for all relations that a passage states in the words of the Factbook."""


def relation_of(key: str) -> Relation:
    """Returns the relation of `RELATIONS` or `FIELDS` with a key."""
    return RELATIONS.get(key) or FIELDS[key]


def state(relation: Relation, entity: str, value: str) -> str:
    """Returns the sentence that states the value of a relation of `RELATIONS` for an entity.

    The items of a list in ``value`` are joined by "; ".
    """
    return relation.sentence.format(entity=entity, value=value)


@functools.cache
def _pattern(relation: Relation) -> re.Pattern[str]:
    text = re.escape(relation.sentence)
    text = text.replace(r"\{entity\}", "(?P<entity>.+?)").replace(r"\{value\}", "(?P<value>.+)")
    return re.compile(text)


def read(relation: Relation, text: str) -> tuple[str, str] | None:
    """Parses a sentence that `state` has written; returns (entity, value).

    The result is None for any other text. The name of an entity must not contain the verb of the
    sentence. No name in the World Factbook contains such a verb.
    """
    match = _pattern(relation).fullmatch(text.strip())
    return (match["entity"], match["value"]) if match else None


def read_passage(relation: Relation, title: str, text: str) -> tuple[str, str] | None:
    """Parses a passage of the search tool; returns (entity, value).

    Args:
        relation: the relation, of `RELATIONS` or `FIELDS`.
        title: title of the passage, such as "Botswana: Capital".
        text: text of the passage.

    Returns:
        None if the passage has the title of another relation, or does not state a value.
    """
    entity, _, field = title.partition(": ")
    if field != relation.title:
        return None
    if not relation.pattern:
        return read(relation, text)
    match = re.fullmatch(relation.pattern, text)
    return (entity, match[1].strip()) if match else None
