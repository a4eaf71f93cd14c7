"""Generates questions about tools that are new in each question and that only the prompt describes.

Each task has a protocol of its own with two or three tools. The name of a tool, its description and
the form of its arguments and results are drawn at random from ``drawn_tools.toml``. One tool
answers the question and the others are distractors. In a small share of the tasks, the tool that
could answer is left out, and the accepted answer is `UNKNOWN`. The splits ``validation`` and
``test`` have kinds of tools that the split ``train`` lacks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import numpy as np

from coa_jax.demo.wording import load_templates
from coa_jax.protocol import add_protocol, get_protocol, protocol_with_tools
from coa_jax.tasks.base import Licence, Task
from coa_jax.tools.base import Observation, Tool, ToolContext

_FILE = load_templates(__file__)
KINDS: Mapping[str, Any] = _FILE["tools"]
"""Kind of tool -> its names, purposes, slots (arguments), fields (of results) and questions."""

UNKNOWN = "unknown"
"""The answer of scripted agents if no tool can answer, or if the question is of another kind."""

_LEFT_OUT = 0.08  # share of the tasks without the tool that could answer
_SHAPE = re.compile(r"\b[A-Z]{2,}(?:[ ,;|/]+[A-Z]{2,})*\b")
_SEPARATORS = (" ", " ", " ", ", ", " | ", "; ", " / ")


def _rate(name: str, size: int) -> int:
    """Returns an invented number below ``size``, which depends only on a name."""
    return random.Random(f"rate of {name}").randrange(1, size)


FUNCTIONS: Mapping[str, Callable[..., list[str]]] = {
    "exchange": lambda n, a, b: [f"{int(n) * _rate(a, 40) / _rate(b, 40):.2f}"],
    "zones": lambda hour, a, b: [str((int(hour) + _rate(b, 24) - _rate(a, 24)) % 24)],
    "bases": lambda n, base: [np.base_repr(int(n), int(base))],
    "letters": lambda word, letter: [str(word.count(letter)), str(len(word))],
    "divisors": lambda a, b: [str(math.gcd(int(a), int(b))), str(math.lcm(int(a), int(b)))],
    "backwards": lambda word: [word[::-1]],
    "order": lambda *words: [min(words), max(words)],
    "means": lambda *n: [f"{sum(map(int, n)) / len(n):.2f}", str(sum(map(int, n)))],
    "remainders": lambda a, b: [str(int(a) % int(b)), str(int(a) // int(b))],
    "interest": lambda n, rate, years: [f"{int(n) * int(rate) * int(years) / 100:.2f}"],
}
"""Name -> the function that computes the values of all fields of a result from the arguments."""


def _value(kind: str, draw: random.Random) -> str:
    """Draws a value of a kind, see ``drawn_tools.toml``."""
    form = _FILE["values"][kind]
    if isinstance(form, tuple):
        return str(draw.randrange(*form)) if isinstance(form[0], int) else draw.choice(form)
    signs = {"#": "0123456789", "%": "123456789", "@": "ABCDEFGHKLMNPRSTUVWXYZ",
             "&": "bdfgklmnprstvz", "~": "aeiou"}  # fmt: skip
    return "".join(draw.choice(signs.get(sign, sign)) for sign in form)


@dataclasses.dataclass(frozen=True)
class Use:
    """What a question asks of a tool.

    Attributes:
        kind: kind of the tool, a key of `KINDS`.
        field: index of the asked field of the tool's result.
        values: arguments of the tool, as the question states them, in the order of the ``slots`` in
            `KINDS`.
    """

    kind: str
    field: int
    values: tuple[str, ...]


@functools.cache
def _patterns() -> tuple[tuple[str, int, re.Pattern[str]], ...]:
    slot = re.compile(r"\\{(\d)\\}")
    return tuple(
        (kind, field, re.compile(slot.sub(r"(?P<s\1>\\S+?)", re.escape(template))))
        for kind, spec in KINDS.items()
        for field, templates in enumerate(spec["questions"])
        for template in templates
    )


@functools.lru_cache(maxsize=4096)
def understand(question: str) -> Use | None:
    """Returns the call of a tool that a question of `load_source` asks for; None for other text."""
    for kind, field, pattern in _patterns():
        if match := pattern.fullmatch(question):
            values = (match[f"s{slot}"] for slot in range(len(KINDS[kind]["slots"])))
            return Use(kind, field, tuple(values))
    return None


def kind_of(description: str) -> str:
    """Returns the kind of a tool, a key of `KINDS`, given the description of the tool."""
    kinds = (k for k, spec in KINDS.items() if description.startswith(spec["purposes"]))
    return next(kinds)


def shape_of(description: str) -> tuple[str, tuple[int, ...]]:
    """Parses the description of a tool; returns how the arguments of a call must be written.

    Returns:
        The form, such as ``COIN AMOUNT COIN``, and for each word in it the index of the argument
        that replaces the word, here ``(1, 0, 2)``. Arguments with the same word keep their order.
    """
    slots = KINDS[kind_of(description)]["slots"]
    shape = next(m[0] for m in _SHAPE.finditer(description))
    unused, order = list(range(len(slots))), []
    for word in re.findall(r"[A-Z]+", shape):
        order.append(next(slot for slot in unused if word in slots[slot][1:]))
        unused.remove(order[-1])
    return shape, tuple(order)


def write_call(description: str, values: Sequence[str]) -> str:
    """Writes the arguments of a call as a description demands.

    Args:
        description: description of the tool.
        values: the arguments, in the order of the ``slots`` in `KINDS`.
    """
    shape, order = shape_of(description)
    ordered = iter(order)
    return re.sub(r"[A-Z]+", lambda _: values[next(ordered)], shape)


class DrawnTool:
    """A tool whose name, form of arguments and form of results are chosen at random.

    From tasks with such tools, a policy learns to use tools that it knows only by description.

    Args:
        name: tag of the tool.
        description: description, which determines the kind of the tool and the form of a call. The
            form of the results depends only on the name and the description.
    """

    deadline = 1.0

    def __init__(self, name: str, description: str):
        self.name, self.description = name, description
        self.form = random.Random(f"{name}: {description}").choice(FORMS)

    async def __call__(self, arguments: str, context: ToolContext) -> Observation:
        """Returns the fields of the result for the arguments, in the drawn form of results."""
        shape, order = shape_of(self.description)
        sign = re.sub(r"[A-Z ]", "", shape)[:1]
        parts = [part.strip() for part in arguments.split(sign or None)]
        try:
            values = [parts[order.index(slot)] for slot in range(len(parts))]
            return Observation(self._result(values), True, "ok", 0.0)
        except (ValueError, IndexError, TypeError):
            return Observation(f"Not understood. Write {shape}.", False, "bad_call", 0.0)

    def _result(self, values: Sequence[str]) -> str:
        kind = kind_of(self.description)
        nouns = [noun for _, noun in KINDS[kind]["fields"]]
        return self.form(nouns, fields_of(kind, values))


FORMS: tuple[Callable[[Sequence[str], Sequence[str]], str], ...] = (
    lambda nouns, texts: ", ".join(texts),
    lambda nouns, texts: "; ".join(map("{}: {}".format, nouns, texts)),
    lambda nouns, texts: ", ".join(map("{} {}".format, nouns, texts)),
    lambda nouns, texts: " ".join([texts[0], *(f"({value})" for value in texts[1:])]),
    lambda nouns, texts: ", ".join([texts[0], *map("the {} is {}".format, nouns[1:], texts[1:])]),
)
"""Forms of a result, as functions of the nouns and the values of its fields."""


def fields_of(kind: str, values: Sequence[str]) -> list[str]:
    """Returns the value of each field in the result of a tool.

    Args:
        kind: kind of the tool, a key of `KINDS`.
        values: arguments of the call, in the order of the ``slots`` in `KINDS`.

    Raises:
        ValueError: the number of values is wrong, or the tool does not know a value.
    """
    spec = KINDS[kind]
    for (of, *_), value in zip(spec["slots"], values, strict=True):
        if _closed(of) and value not in _FILE["values"][of]:
            raise ValueError(f"{value} is unknown")
    if "function" in spec:
        return FUNCTIONS[spec["function"]](*values)
    draw = random.Random(f"{kind} {' '.join(values)}")
    return [_value(of, draw) for of, _ in spec["fields"]]


def tools_of(protocol: str) -> dict[str, Tool]:
    """Returns the tools of a protocol of `load_source` by tag, see `DrawnTool`."""
    return {tag: DrawnTool(tag, text) for tag, text in get_protocol(protocol).described.items()}


def _describe(kind: str, draw: random.Random) -> str:
    """Draws the description of a tool: its purpose, and the form of its arguments."""
    spec, which = KINDS[kind], draw.choice((1, 2))
    names = [slot[which] for slot in spec["slots"]]
    draw.shuffle(names)
    shape = draw.choice(_SEPARATORS).join(names)
    purpose, wording = draw.choice(spec["purposes"]), draw.choice(_FILE["wording"])
    values = [_value(of[0], draw) for of in spec["slots"]]
    text = f"{purpose} {wording.format(shape=shape, example='{example}')}"
    text = text.replace("{example}", write_call(text, values))
    few = [of[0] for of in spec["slots"] if 0 < _closed(of[0]) < 9]
    if few and draw.random() < 0.5:
        listed = draw.choice((" ", ", ")).join(_FILE["values"][few[0]])
        text += " " + draw.choice(_FILE["known"]).format(values=listed)
    return text


def _closed(kind: str) -> int:
    """Returns the number of values of a kind with listed values; 0 for other kinds."""
    form = _FILE["values"][kind]
    return len(form) if isinstance(form, tuple) and isinstance(form[0], str) else 0


def _tag(kind: str, used: Container[str], draw: random.Random) -> str:
    """Draws a name, which in a quarter of the cases does not tell the purpose of the tool."""
    while True:
        name: str = draw.choice(_FILE["neutral"] if draw.random() < 0.25 else KINDS[kind]["names"])
        if draw.random() < 0.2:
            name += draw.choice(_FILE["endings"])
        if name not in used:
            return name


def _task(identity: str, kinds: Sequence[str]) -> Task:
    """Draws a task, and registers its protocol.

    Args:
        identity: id of the task, which is also the seed.
        kinds: kinds of tools from which the asked tool is drawn.
    """
    draw = random.Random(identity)
    kind = draw.choice(kinds)
    spec, others = KINDS[kind], [other for other in kinds if other != kind]
    values = tuple(_value(of[0], draw) for of in spec["slots"])
    field = draw.randrange(len(spec["fields"]))
    question = draw.choice(spec["questions"][field]).format(*values)
    gold = fields_of(kind, values)[field]
    members = [kind, *draw.sample(others, draw.choice((1, 1, 1, 2)))]
    if draw.random() < _LEFT_OUT:
        members, gold = members[1:], UNKNOWN
    draw.shuffle(members)
    described: dict[str, str] = {}
    for member in members:
        described[_tag(member, described, draw)] = _describe(member, draw)
    protocol = protocol_with_tools(f"_{identity}", tuple(described), described)
    add_protocol(protocol)
    metadata = {"kind": kind, "hops": 0, "relation": "", "entities": []}
    metadata["task_tools"] = "drawn_tools"
    return Task(identity, question, protocol.name, (gold,), "drawn_tools", metadata)


@Licence("written for this package: Apache-2.0", "apache-2.0", "coa-jax-drawn-tools", "en").of
def load_source(split: str, n: int | None, seed: int) -> list[Task]:
    """Generates tasks with random tools, which the policy knows only from the prompt.

    Args:
        split: ``train``, ``validation`` or ``test``.
        n: number of tasks; None for 1000.
        seed: seed of the tasks.
    """
    held_out = split != "train"
    kinds = [kind for kind, spec in KINDS.items() if bool(spec.get("held_out")) == held_out]
    return [_task(f"{split}{seed}_{number}", kinds) for number in range(n or 1000)]
