"""Settings keep the types and bounds of their annotations, however they are constructed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.config.fields import (
    Amount,
    Between,
    Bounded,
    Count,
    Items,
    OneOf,
    Place,
    Seconds,
    Share,
    Variable,
    check,
)
from coa_jax.errors import UserError
from coa_jax.run.settings import build_config, complete_config

LATER = ["a"]


def later() -> list[str]:
    return LATER


@dataclasses.dataclass(frozen=True)
class Group(Bounded):
    share: Share = 0.5
    slots: Count = 1
    bytes: Amount = 0
    wait: Seconds = 1.0
    open: Annotated[float, Between(0, 1, above=True, below=True, also=(-1,))] = 0.5
    mode: Literal["read", "write"] = "read"
    dtype: Annotated[str, OneOf("", "float32")] = ""
    late: Annotated[str, OneOf(later)] = "a"
    path: Place = ""
    key: Variable = ""
    on: bool = False
    names: Annotated[tuple[Annotated[str, OneOf("x", "y")], ...], Items(1, 2)] = ("x",)
    prices: tuple[tuple[Place, Share], ...] = ()
    table: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Whole(Bounded):
    group: Group = dataclasses.field(default_factory=Group)
    low: Count = 1
    high: Count = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise UserError(f"low is {self.low}; give at most high, {self.high}")


GOOD = [
    {"share": 1, "slots": 2**31 - 1, "bytes": 2**40, "open": -1},
    {"share": np.float32(0.5), "slots": np.int64(3)},
    {"mode": "write", "dtype": "float32", "key": "A_KEY", "path": "Łódź/☃", "on": True},
    {"names": ("x", "y"), "prices": (("m", 0.5), ("n", 1)), "table": {"anything": None}},
]
BAD = [
    ("share", 1.5, "share is 1.5; give a number from 0 to 1"),
    ("share", math.nan, "share is nan; give a number from 0 to 1"),
    ("share", math.inf, "share is inf; give a number from 0 to 1"),
    ("share", True, "share is True; give a number from 0 to 1"),
    ("share", "0.5", "share is '0.5'; give a number from 0 to 1"),
    ("share", None, "share is None; give a number from 0 to 1"),
    ("share", 0.5j, "share is 0.5j; give a number from 0 to 1"),
    ("slots", 1e3, "slots is 1000.0; give a whole number from 1 to 2147483647"),
    ("slots", 2**31, "slots is 2147483648; give a whole number from 1 to 2147483647"),
    ("slots", 10**5000, "slots is a whole number of 16610 bits; give a whole number from 1"),
    ("bytes", 2**63, "bytes is 9223372036854775808; give a whole number from 0 to 922337203685477"),
    ("wait", 0, "wait is 0; give a number above 0 and at most 2592000"),
    ("open", 1, "open is 1; give a number above 0 and below 1, or -1"),
    ("mode", "append", "mode is 'append'; give one of read, write"),
    ("mode", ["read"], "mode is ['read']; give one of read, write"),
    ("dtype", "bf16", "dtype is 'bf16'; give one of \"\", float32"),
    ("late", "b", "late is 'b'; give one of a"),
    ("path", "a\0b", r"path is 'a\x00b'; give at most 4096 characters of UTF-8 without NUL"),
    ("path", "\udcff", r"path is '\udcff'; give at most 4096 characters of UTF-8 without NUL"),
    ("path", "x" * 5000, f"path is '{'x' * 79}... (5002 characters); give at most 4096"),
    ("path", 3, "path is 3; give at most 4096 characters"),
    ("key", "sk-secret!", "key is a text that may be secret; give the name of an environment"),
    ("on", 1, "on is 1; give True or False"),
    ("names", (), "names is (); give 1 to 2 items"),
    ("names", ("x", "z"), "names[1] is 'z'; give one of x, y"),
    ("names", ["x"], "names is ['x']; give 1 to 2 items"),
    ("prices", (("m",),), "prices[0] is ('m',); give 2 items"),
    ("prices", (("m", 2),), "prices[0][1] is 2; give a number from 0 to 1"),
    ("prices", ("m",), "prices[0] is 'm'; give a tuple"),
    ("table", 3, "table is 3; give a Mapping"),
]


@pytest.mark.parametrize("values", GOOD)
def test_values_within_their_bounds_are_accepted(values):
    assert Group(**values) == build_config(Group, values)


@pytest.mark.parametrize(("name", "value", "message"), BAD, ids=[row[0] for row in BAD])
def test_other_values_are_refused_in_python_too(name, value, message):
    with pytest.raises(UserError) as refused:
        Group(**{name: value})
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_a_config_file_and_a_change_are_refused_with_their_place():
    with pytest.raises(UserError, match=r"^config\.group\.share is 2; give a number from 0 to 1$"):
        build_config(Whole, {"group": {"share": 2}})
    with pytest.raises(UserError, match=r"^config\.low is 3; give at most high, 2$"):
        build_config(Whole, {"low": 3})
    with pytest.raises(UserError, match=r"^group is 3; give a Group$"):
        Whole(group=3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^slots is 0; give a whole number"):
        dataclasses.replace(Group(), slots=0)


def test_tables_of_names_may_grow():
    LATER.append("b")
    try:
        assert Group(late="b").late == "b"
    finally:
        LATER.remove("b")


def test_a_config_file_may_write_lists_for_nested_tuples():
    assert build_config(Group, {"prices": [["m", 0.5]]}).prices == (("m", 0.5),)
    assert hash(build_config(Group, {"prices": [["m", 0.5]]}).prices)
    assert build_config(Group, complete_config(Group, {})) == Group()
    assert build_config(Group, {"prices": "(('m', 0.5),)"}).prices == (("m", 0.5),)


@given(st.one_of(st.integers(), st.floats(), st.text(), st.binary(), st.booleans(), st.none()))
def test_whatever_is_given_for_a_share_is_one_or_is_refused_in_one_line(value):
    try:
        accepted = check(value, Share, "share")
    except UserError as error:
        assert len(str(error)) < 300
        assert len(str(error).splitlines()) == 1
    else:
        assert 0 <= accepted <= 1
        assert not isinstance(accepted, bool)
