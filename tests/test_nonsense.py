"""Nonsense in a config is refused in one line, or is within the bounds that the fields declare."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
import random
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coa_jax.config.fields import (
    Between,
    Bounded,
    OneOf,
    Text,
    field_annotations,
    parts,
    without_none,
)
from coa_jax.errors import UserError
from coa_jax.run.command import load_config
from coa_jax.run.settings import build_config
from coa_jax.tools.mcp_tool import McpConfig
from tests import forked
from tests.test_configs import COMMANDS, SPECS, build_all, leaves

REPOSITORY = Path(__file__).resolve().parent.parent
NUMBERS = (0, -1, 1, 3, 2**31 - 1, 2**31, 2**63, 10**400, -(10**400))
FLOATS = (1.5, -0.0, 1e-320, 1e20, -1e20, math.nan, math.inf, -math.inf)
TEXTS = ("", " ", "nonsense", "nan", "1e20", "Łódź ☃ 一", "a\0b", "a\nb", "\udcff", "'", '"', "(")
QUOTED = ("('a',)", "[1, 2", "${HOME}", "../../x", "{'a': 1}", "--config", "=", "\x1b[31m")
LONG = ("x" * 200_000, "1" * 5000, tuple(range(2000)), "[" * 5000)
TUPLES = ((), (1,), ("a", "b"), (math.nan,), (1.5, -1), ("",), ((1, 2), 3), [], ["a"], [[]])
OTHERS = (None, True, False, 1j, b"x", {}, {"a": 1}, {"a": {"b": 2}}, {1: 2}, ..., int, range(3))
NONSENSE = (*NUMBERS, *FLOATS, *TEXTS, *QUOTED, *LONG, *TUPLES, *OTHERS)


@dataclasses.dataclass(frozen=True)
class Words(Bounded):
    """Words that a command line gives."""

    words: tuple[str, ...] = ()


def dataclasses_of(kind: Any) -> Iterator[type[Any]]:
    """A dataclass and those inside it."""
    yield kind
    for annotation in field_annotations(kind).values():
        inner, _ = parts(without_none(annotation))
        if dataclasses.is_dataclass(inner):
            yield from dataclasses_of(inner)


def unbounded(annotation: Any) -> str:
    """What of an annotation has no bound; empty if it has those of its type."""
    kind, bounds = parts(without_none(annotation))
    if kind is tuple:
        items = typing.get_args(annotation)
        items = typing.get_args(items[0]) if bounds else items
        return "".join(unbounded(item) for item in items if item is not ...)
    wanted = {int: Between, float: Between, str: OneOf | Text}.get(kind)
    return "" if wanted is None or any(isinstance(b, wanted) for b in bounds) else kind.__name__


def test_every_number_and_every_text_of_a_command_has_a_bound():
    kinds = {each for kind in (*COMMANDS.values(), McpConfig) for each in dataclasses_of(kind)}
    assert len(kinds) > 40
    assert [kind.__name__ for kind in kinds if not issubclass(kind, Bounded)] == []
    without = [
        f"{kind.__name__}.{name}: {lack}"
        for kind in kinds
        for name, annotation in field_annotations(kind).items()
        if (lack := unbounded(annotation))
    ]
    assert without == []


def fault(value: Any, annotation: Any) -> str:
    """What is wrong with an accepted value, told without the code under test."""
    annotation = without_none(annotation)
    kind, bounds = parts(annotation)
    if dataclasses.is_dataclass(kind):
        return value and " ".join(
            f"{name} {wrong}"
            for name, inner in field_annotations(kind).items()
            if (wrong := fault(getattr(value, name), inner))
        )
    if kind in (int, float):
        (between,) = bounds
        if type(value) not in (int, kind) or not abs(value) <= 2**63:
            return f"is {value!r}"
        return (
            "" if between.low <= value <= between.high or value in between.also else f"is {value}"
        )
    if kind in (str, bool, tuple) and type(value) is not kind:
        return f"is a {type(value).__name__}"
    if kind is str:
        return "" if len(value) <= 100_000 and "\0" not in value else "is no text"
    if kind is tuple:
        items = typing.get_args(annotation if not bounds else typing.get_args(annotation)[0])
        return "".join(fault(item, items[0]) for item in value if items[1:] == (...,))
    return ""


@functools.cache
def values_of(spec: str) -> dict[str, Any]:
    return load_config(spec).to_dict()


def replaced(values: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The values with another one under a dotted key."""
    *groups, name = key.split(".")
    values = copy.copy(values)
    inner = values
    for group in groups:
        inner[group] = copy.copy(inner[group])
        inner = inner[group]
    inner[name] = value
    return values


def groups_of(values: dict[str, Any], key: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield f"{key}{name}"
            yield from groups_of(value, f"{key}{name}.")


def overrides(number: int, seed: int) -> Iterator[tuple[str, str, Any]]:
    """(config file, dotted key, value): known keys, groups and unknown ones, some values nested."""
    chance = random.Random(seed)
    keys = {
        spec: [
            *dict(leaves(values_of(spec))),
            *groups_of(values_of(spec)),
            *("nonsense", "a b", "\0", "x" * 5000),
        ]
        for spec in SPECS
    }
    for _ in range(number):
        spec = chance.choice(SPECS)
        value = chance.choice(NONSENSE)
        if chance.random() < 0.1:
            value = chance.choice([(value,), [value], {"a": value}, (value, value)])
        yield spec, chance.choice(keys[spec]), value


def test_values_that_no_command_line_can_give_are_refused_in_one_line_too():
    loop: list[Any] = []
    loop.append(loop)
    sft = values_of("configs/sft/tiny.py")
    dense = {**sft, "optimizer": {**sft["optimizer"], None: 1, ("a",): 2}}
    values = [dense, *(replaced(sft, key, loop) for key in ("mesh", "rows", "model", "graders"))]
    long = [{"words": f"({text},)"} for text in ("-" * 50_000 + "1", "1+" * 5000 + "1j")]
    for kind, each in [*((COMMANDS["sft"], v) for v in values), *((Words, v) for v in long)]:
        with pytest.raises(UserError) as refused:
            build_config(kind, each)
        assert str(refused.value) == " ".join(str(refused.value).split())


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_overrides_are_within_their_bounds_or_refused_in_one_line(count):
    accepted = refused = 0
    for spec, key, value in overrides(count, seed=33):
        stage = Path(spec).parts[1]
        try:
            command = build_all(stage, replaced(values_of(spec), key, value))
        except UserError as error:
            refused += 1
            line = str(error)
            assert len(line) < 1000, (spec, key, line)
            assert line == " ".join(line.split()), (spec, key, line)
        else:
            accepted += 1
            assert not fault(command, COMMANDS[stage]), (spec, key, value)
    assert accepted > 0.03 * count
    assert refused > 0.5 * count


ABSENT = [
    spec
    for spec in SPECS
    if Path(spec).parts[1] in ("sft", "rft", "dpo", "rl", "scratch", "economy")
]
ON_A_LINE = (
    *(repr(value) for value in (*NUMBERS[:-2], *FLOATS)),
    *(t for t in TEXTS if "\0" not in t),
    *QUOTED,
    "1" * 5000,
    "x" * 100_000,
    "None",
    "True",
    "1,2",
    "nan,nan",
    "()",
    "9" * 400,
)
ODD_FLAGS = (
    "--config.",
    "--config.=1",
    "--config.optimizer=3",
    "--config.rows",
    "--noconfig.rows",
    "--config.a b=1",
    "--config.rows.x=1",
    "--config.rows[0]=1",
    "--config=",
    "--config=nonsense.py",
    "--config=tests",
    "--config=configs/sft/web.py:nonsense",
    "--workdir=",
    "--rows=1",
    "rows=1",
    "--config.rows=",
)


def command_lines(number: int, seed: int) -> Iterator[tuple[str, list[str]]]:
    """(command, arguments) whose input is absent, so that none of them runs for long."""
    chance = random.Random(seed)
    for _ in range(number):
        spec = chance.choice(ABSENT)
        keys = [*dict(leaves(values_of(spec))), *groups_of(values_of(spec)), "nonsense", "a b"]
        override = f"--config.{chance.choice(keys)}={chance.choice(ON_A_LINE)}"
        if chance.random() < 0.2:
            override = chance.choice(ODD_FLAGS)
        yield Path(spec).parts[1], [f"--config={spec}", override]


def assert_one_line(name: str, arguments: list[str], workdir: Path) -> None:
    words = ["-m", "coa_jax", name, f"--workdir={workdir}", *arguments]
    run = forked.run(words, cwd=workdir.parent)
    said = run.stderr
    case = (name, [a[:200] for a in arguments], said[-2000:])
    assert run.returncode == 2, case
    assert "Traceback" not in said, case
    lines = said.strip().splitlines()
    assert lines[-1].startswith("error: "), case
    assert len(lines) == 1, case
    assert len(lines[0]) < 2000, case


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("sft", ["--config.rename_share=inf", "--config.mesh.wait_seconds=nan"]),
        ("rl", [f"--config.engine.pages={'9' * 5000}"]),
        ("evaluate", ["--config.tools.store.tools=nonsense"]),
    ],
)
def test_a_command_refuses_nonsense_in_one_line(tmp_path, name, arguments):
    assert_one_line(name, arguments, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 100, 20))
def test_a_hundred_command_lines_end_in_one_line(tmp_path, first):
    lines = itertools.islice(command_lines(100, seed=33), first, first + 20)
    for number, (name, arguments) in enumerate(lines, first):
        assert_one_line(name, arguments, tmp_path / f"run{number}")
