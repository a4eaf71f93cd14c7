"""Charts show every value inside their frame, and numbers are short."""

from __future__ import annotations

import html
import json
import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.report.charts import (
    HEIGHT,
    MAX_POINTS,
    WIDTH,
    Series,
    interval_bar,
    line_chart,
    nice_ticks,
    number,
)

VALUES = st.none() | st.floats(-1e12, 1e12)


def points(svg: ElementTree.Element) -> list[tuple[float, float]]:
    found = []
    for path in svg.iter("path"):
        pairs = re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path.get("d", ""))
        found += [(float(x), float(y)) for x, y in pairs]
    return found + [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in svg.iter("circle")]


def drawn(chart: str) -> ElementTree.Element:
    return ElementTree.fromstring(chart).find("svg")


@given(st.lists(st.lists(VALUES, min_size=1, max_size=60), min_size=1, max_size=3))
def test_any_series_are_drawn_inside_the_frame(columns):
    series = [Series(f"<s{i}>", tuple(range(len(c))), tuple(c)) for i, c in enumerate(columns)]
    chart = line_chart("T & <i>", series)
    if all(y is None for c in columns for y in c):
        assert chart == ""
        return
    svg = drawn(chart)
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points(svg))
    data = json.loads(svg.get("data-chart", ""))
    assert [s["y"] for s in data["series"]] == [list(s.y) for s in series]


def test_a_higher_value_is_drawn_higher_and_a_later_one_further_right():
    (x0, y0), (x1, y1), (x2, y2) = points(
        drawn(line_chart("T", [Series("a", (0, 1, 4), (0, 5, 10))]))
    )
    assert x1 - x0 == pytest.approx((x2 - x0) / 4, abs=0.2)
    assert y0 - y1 == pytest.approx((y0 - y2) / 2, abs=0.2) and y2 < y1 < y0


def test_a_missing_value_breaks_the_line():
    svg = drawn(line_chart("T", [Series("a", (0, 1, 2, 3, 4), (1, 2, None, 2, 1))]))
    assert svg.find("path").get("d").count("M") == 2


def test_non_finite_values_are_left_out():
    svg = drawn(line_chart("T", [Series("a", (0, 1, 2), (1.0, math.nan, math.inf))]))
    assert json.loads(svg.get("data-chart"))["series"][0]["y"] == [1.0, None, None]


def test_a_single_point_is_visible():
    assert len(points(drawn(line_chart("T", [Series("a", (3,), (1.0,))])))) == 1


@pytest.mark.parametrize("values", [(0.0, 0.0), (0.0, 1.0), (2.0, 2.0)])
def test_an_axis_of_values_that_are_not_negative_does_not_go_below_zero(values):
    svg = drawn(line_chart("T", [Series("a", (1, 2), values)]))
    low, high = json.loads(svg.get("data-chart"))["y"]
    assert 0 <= low <= min(values) and high > max(values)


def test_long_series_are_thinned_but_keep_their_extremes():
    values = [0.0] * 100_000
    values[77_777], values[12_345] = 9.0, -9.0
    svg = drawn(line_chart("T", [Series("a", tuple(range(100_000)), tuple(values))]))
    kept = json.loads(svg.get("data-chart"))["series"][0]
    assert len(kept["y"]) <= MAX_POINTS
    assert (
        dict(zip(kept["x"], kept["y"], strict=True)).items() >= {77_777: 9.0, 12_345: -9.0}.items()
    )


def test_only_noise_is_smoothed():
    x = tuple(range(100))
    noisy = line_chart("T", [Series("a", x, tuple(float(i % 2) for i in x))])
    steady = line_chart("T", [Series("a", x, tuple(float(i) for i in x))])
    assert noisy.count("<path") == 2 and steady.count("<path") == 1


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 8))
def test_ticks_lie_in_their_range_and_are_evenly_spaced(low, width, count):
    high = low + width
    if high - low < abs(low) * 1e-9:
        return
    ticks = nice_ticks(low, high, count)
    slack = (high - low) * 1e-6 + abs(low) * 1e-9
    assert all(low - slack <= tick <= high + slack for tick in ticks)
    assert len(ticks) <= count + 2


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (3.0, "3"), (12345, "12,345"), (0.123456, "0.1235"), (1234.5, "1,234"),
     (1e-6, "1e-6"), (0.00075, "7.5e-4"), (None, "\u2013"), (math.nan, "\u2013"), (2e12, "2e+12")],
)  # fmt: skip
def test_numbers_are_short(value, text):
    assert number(value) == text


def test_an_interval_is_drawn_around_its_value():
    svg = ElementTree.fromstring(interval_bar("a<b", 0.5, 0.25, 1.0))
    bar = next(line for line in svg.iter("line") if line.get("class") == "bar")
    left, dot, right = float(bar.get("x1")), float(svg.find("circle").get("cx")), bar.get("x2")
    assert left < dot < float(right) and (dot - left) * 2 == pytest.approx(float(right) - dot)
    assert "a&lt;b" in html.escape(svg.get("aria-label"))
