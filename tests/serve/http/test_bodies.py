"""JSON bodies: accepted texts, refused texts, and the wording of errors."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from coa_jax.serve.http.bodies import parse_json, validated
from coa_jax.serve.http.errors import Refused

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text('ab",[{\\\n'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('ab",[{\\'), inner),
    max_leaves=30,
)


def separators(value) -> int:
    """Opening brackets and commas of a JSON text, counted in the value."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return 0
    return 1 + max(0, len(value) - 1) + sum(map(separators, value))


@given(VALUES, st.booleans())
def test_a_text_is_parsed_if_and_only_if_it_holds_few_enough_values(value, plain):
    body, most = json.dumps(value, ensure_ascii=plain).encode(), separators(value)
    assert parse_json(body, most, most) == value
    if most:
        with pytest.raises(Refused, match=f" {most - 1} values"):
            parse_json(body, most - 1, most)


@given(st.binary() | st.text('{}[]",:\\ 1a').map(str.encode))
def test_whatever_is_sent_is_parsed_or_refused_in_a_line(body):
    try:
        parse_json(body, 1000, 1000)
    except Refused as error:
        assert error.status == 400 and "\n" not in error.message


@pytest.mark.parametrize(
    "body",
    [
        b"9" * 5000,
        b"[" * 5000,
        b'{"a":' * 5000,
        b"[" * 500 + b"]" * 500,
        "[1]".encode("utf-16"),
        b'"\\"' * 400_000,
    ],
)
def test_long_numbers_deep_texts_and_other_encodings_are_refused(body):
    with pytest.raises(Refused, match="JSON"):
        parse_json(body, 10_000, 10_000)


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid")
    number: Annotated[int, Field(ge=1, le=5)] = 1
    share: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.5
    words: Annotated[list[Annotated[str, Field(max_length=3)]], Field(max_length=2)] = []
    kind: Literal["a", "b"] = "a"
    needed: bool


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"number": 0}, "number: must be at least 1"),
        ({"number": 10**300}, "number: must be at most 5"),
        ({"number": 1.5}, "number: must be a whole number"),
        ({"number": "x"}, "number: must be a whole number"),
        ({"number": None}, "number: must be a whole number"),
        ({"share": 0}, "share: must be more than 0"),
        ({"share": float("nan")}, "share: must be a finite number"),
        ({"share": []}, "share: must be a number"),
        ({"words": "a"}, "words: must be a list"),
        ({"words": ["a", "b", "c"]}, "words: must have at most 2 entries"),
        ({"words": ["a", 1]}, "words.1: must be a string"),
        ({"words": ["abcd"]}, "words.0: must have at most 3 characters"),
        ({"kind": "c"}, "kind: must be 'a' or 'b'; this server supports no other value"),
        ({"needed": "perhaps"}, "needed: must be true or false"),
        ({"secret": 1}, "secret: this server does not know the field"),
    ],
)
def test_a_mistake_names_the_field_and_the_limit(change, message):
    with pytest.raises(Refused) as raised:
        validated(Request, {"needed": True, **change})
    assert (raised.value.status, raised.value.message) == (400, message)
    assert "secret" not in raised.value.reason


def test_bodies_that_are_no_objects_or_have_very_many_fields_are_refused():
    for value in ([], "x", None, 3):
        with pytest.raises(Refused, match="must be a JSON object"):
            validated(Request, value)
    with pytest.raises(Refused, match="the body has 100 fields; this server knows 5"):
        validated(Request, {f"k{i}": i for i in range(100)})
    with pytest.raises(Refused, match="needed: is missing"):
        validated(Request, {})
