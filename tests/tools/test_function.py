"""Typed Python functions as tools."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import functools
import time
from typing import Literal

import pytest

from coa_jax.errors import UserError
from coa_jax.run.settings import build_config
from coa_jax.tools.base import Tool, ToolContext, call_tool
from coa_jax.tools.function import FunctionTool
from coa_jax.tools.make import ToolsConfig, make_tools, named_tools


def multiply(a: int, b: int = 2) -> int:
    """Multiplies two integers.

    The result is exact.
    """
    return a * b


async def find(query: str, kinds: list[str] | None = None) -> dict[str, str]:
    """Finds documents.

    Args:
        query: what to look for
    """
    await asyncio.sleep(0)
    return {"found": f"{query} {kinds}"}


def fail(text: str) -> str:
    """Fails."""
    raise ValueError(f"no {text}")


def first(names: list[str]) -> str:
    """Finds the first long name."""
    return next(name for name in names if len(name) > 9)


def wave(height: int, unit: Literal["m", "ft"] = "m", count: int | str = 1) -> str:
    """Makes waves.

    Args:
        unit: unit of the height

    Raises:
        ValueError: never
    """
    return f"{count} of {height} {unit}"


@functools.wraps(find)
def find_again(**arguments):
    return find(**arguments)


def without_json(text: str) -> dict[tuple[str], int]:
    """Has a result that is no JSON."""
    return {(text,): 1}


def called(function, arguments: str):
    return asyncio.run(FunctionTool(function)(arguments, ToolContext()))


def test_types_and_docstring_describe_a_function():
    tool = FunctionTool(multiply)
    assert isinstance(tool, Tool) and tool.name == "multiply"
    assert tool.description.startswith("Multiplies two integers. The result is exact.")
    assert tool.schema["required"] == ["a"]
    assert {name: kind["type"] for name, kind in tool.schema["properties"].items()} == {
        "a": "integer",
        "b": "integer",
    }
    properties = FunctionTool(find).schema["properties"]
    assert properties["query"]["description"] == "what to look for"
    assert properties["kinds"]["items"] == {"type": "string"}


@pytest.mark.parametrize(
    ("function", "arguments", "text", "outcome"),
    [
        (multiply, '{"a": 12, "b": 34}', "408", "ok"),
        (multiply, '{"a": 12}', "24", "ok"),
        (multiply, '{"a": "12"}', "'a' must be of the type integer", "bad_call"),
        (multiply, '{"a": true}', "'a' must be of the type integer", "bad_call"),
        (multiply, '{"a": 1, "c": 2}', "no argument 'c'", "bad_call"),
        (multiply, '{"b": 1}', '"a" (integer)', "bad_call"),
        (multiply, "12 times 34", '"a" (integer)', "bad_call"),
        (find, '{"query": "tides"}', '{"found": "tides None"}', "ok"),
        (find, '{"query": "tides", "kinds": ["map"]}', "['map']", "ok"),
        (fail, '{"text": "tide"}', "ValueError: no tide", "error"),
        (first, '{"names": ["tide"]}', "StopIteration", "error"),
        (find_again, '{"query": "tides"}', '{"found": "tides None"}', "ok"),
        (wave, '{"height": 3, "unit": "ft"}', "1 of 3 ft", "ok"),
        (wave, '{"height": 3, "unit": "km"}', "'unit' must be one of ['m', 'ft']", "bad_call"),
        (without_json, '{"text": "tide"}', "TypeError: keys must be str", "error"),
    ],
)
def test_a_call_gives_the_result_or_says_what_is_wrong(function, arguments, text, outcome):
    seen = called(function, arguments)
    assert text in seen.text and seen.outcome == outcome


def test_the_policy_reads_which_values_an_argument_may_have():
    described = FunctionTool(wave).description
    assert '"unit" ("m" or "ft", optional): unit of the height' in described
    assert '"count" (integer or string, optional)' in described


def test_functions_that_hang_delay_neither_other_calls_nor_the_end_of_the_loop():
    def hang(a: int) -> str:
        """Hangs."""
        time.sleep(60)
        return ""

    async def calls() -> list[str]:
        tool = FunctionTool(hang)
        tool.deadline = 0.2
        hung = [call_tool(tool, '{"a": 1}', ToolContext()) for _ in range(64)]
        seen = [*await asyncio.gather(*hung), await FunctionTool(multiply)('{"a": 1}', None)]
        return [one.outcome for one in seen]

    began = time.monotonic()
    assert asyncio.run(calls()) == ["timeout"] * 64 + ["ok"]
    assert time.monotonic() - began < 30


def without_docstring(a: int) -> int:
    return a


def without_type(a) -> int:
    """Does."""
    return a


def any_object(a: object) -> int:
    """Does."""
    return 1


def positional(a: int, /) -> int:
    """Does."""
    return a


class Colour(enum.Enum):
    RED = "red"


def enumeration(a: Colour) -> str:
    """Does."""
    return a.value


@dataclasses.dataclass
class Point:
    x: int


def of_class(a: Point) -> int:
    """Does."""
    return a.x


def many(*numbers: int) -> int:
    """Adds."""
    return sum(numbers)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (without_docstring, "without_docstring.*no docstring"),
        (without_type, "without_type.*parameter a has no type"),
        (any_object, "any_object.*cannot be described"),
        (many, r"many.*\*numbers"),
        (positional, "positional: a .*name"),
        (enumeration, "enumeration.*Colour"),
        (of_class, "of_class.*Point"),
        (3, "^tool 3: "),
    ],
)
def test_a_function_that_cannot_be_described_is_refused(function, words):
    with pytest.raises(UserError, match=words):
        named_tools([function])


class Library:
    """Two libraries have the same method `search`."""

    def __init__(self, text: str):
        self.text = text

    def search(self, query: str) -> str:
        """Searches the library."""
        return f"{self.text} of {query}"


def test_methods_are_tools_and_each_has_a_name_of_its_own():
    one, other = Library("one"), Library("other")
    config = build_config(ToolsConfig, named_tools(one.search))
    assert asyncio.run(make_tools(config)[0]('{"query": "a"}', ToolContext())).text == "one of a"
    # They would both call the second method.
    with pytest.raises(UserError, match="two have the name 'search'"):
        named_tools([one.search, other.search])


@pytest.mark.parametrize("kind", [iter, set, tuple])
def test_functions_may_come_in_any_iterable(kind):
    assert named_tools(kind([multiply]))["names"] == ("multiply",)


def test_a_config_names_a_function():
    config = build_config(
        ToolsConfig, {"names": ("tests.tools.test_function:multiply",), "protocol": "sums"}
    )
    (tool,) = make_tools(config)
    seen = asyncio.run(tool('{"a": 3}', ToolContext()))
    assert (tool.name, seen.text) == ("multiply", "6")
