"""Draws line charts and interval plots as inline SVG, without a library or external resources.

A chart is an ``<svg>`` element, which browsers show without a script. The script of the page only
adds the values under the pointer, which it reads from the JSON in the attribute ``data-chart``.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import json
import math
from collections.abc import Sequence

WIDTH, HEIGHT = 420, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 12, 30
MAX_POINTS = 400
_SMOOTH_FROM = 30


@dataclasses.dataclass(frozen=True)
class Series:
    """A line in a chart.

    Attributes:
        name: name of the line in the legend.
        x: steps, one for each value in ``y``.
        y: value at each step; None at a step without a value.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]


def line_chart(title: str, series: Sequence[Series]) -> str:
    """Renders a chart with axes and a line for each series; returns "" if no series has a value.

    The chart has a legend if there are several series. If there are at most two series, a noisy
    series is drawn faintly, with its moving average on top. A series with more than ``MAX_POINTS``
    points is reduced to this number, and keeps its extremes.
    """
    series = [_thin(s) for s in series]
    points = [(x, y) for s in series for x, y in zip(s.x, s.y, strict=True) if y is not None]
    if not points:
        return ""
    steps, values = zip(*points, strict=True)
    frame = _Frame(_padded(min(steps), max(steps), 0.0), _padded(min(values), max(values), 0.06))
    parts = [_axes(frame, whole_x=all(float(x).is_integer() for x in steps))]
    latest, legend = [], ""
    for index, one in enumerate(series):
        numbers = [y for y in one.y if y is not None]
        smooth = len(series) < 3 and len(numbers) >= _SMOOTH_FROM and _is_noisy(numbers)
        # One of eight colours; from the ninth line on, dashes.
        colour = f"s{index % 8}{' dashed' if index >= 8 else ''}"
        parts.append(_path(one, frame, f"line {colour}{' faint' if smooth else ''}"))
        if smooth:
            parts.append(_path(_smoothed(one), frame, f"line {colour}"))
        latest += [f"{one.name} {number(numbers[-1])}"] if numbers else []
        legend += f'<span><i class="{colour}"></i>{html.escape(one.name)}</span>'
    data = {
        "plot": [_LEFT, _TOP, WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM],
        "x": frame.x_range,
        "y": frame.y_range,
        "series": [{"name": s.name, "x": s.x, "y": s.y} for s in series],
    }
    label = html.escape(f"{title}: latest {', '.join(latest)}")
    below = f'<div class="legend">{legend}</div>' if len(series) > 1 else ""
    return (
        f'<figure class="chart"><figcaption>{html.escape(title)}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" '
        f'data-chart="{html.escape(json.dumps(data))}">{"".join(parts)}'
        f'<line class="cursor" y1="0" y2="0"/></svg>{below}</figure>'
    )


def interval_bar(name: str, value: float, low: float, high: float) -> str:
    """Renders a share between 0 and 1 as a dot, and its confidence interval as a bar.

    Args:
        name: name of the share, which is read aloud by screen readers.
        value: the share.
        low: lower end of the interval.
        high: upper end of the interval.
    """
    width, height = 200, 22

    def x(share: float) -> float:
        return round(6 + (width - 12) * min(1.0, max(0.0, share)), 1)

    ticks = "".join(
        f'<line class="grid" x1="{x(share)}" x2="{x(share)}" y1="2" y2="{height - 2}"/>'
        for share in (0, 0.25, 0.5, 0.75, 1)
    )
    return (
        f'<svg class="interval" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{html.escape(f"{name}: {value:.3f}")}">{ticks}'
        f'<line class="bar" x1="{x(low)}" x2="{x(high)}" y1="{height / 2}" y2="{height / 2}"/>'
        f'<circle class="dot" cx="{x(value)}" cy="{height / 2}" r="5"/></svg>'
    )


def number(value: float | int | None) -> str:
    """Formats a number for people: about four significant digits, and commas at thousands."""
    if value is None or not math.isfinite(value):
        return "\u2013"
    if float(value).is_integer() and abs(value) < 1e9:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3g}"
    if abs(value) >= 1e-3:
        return f"{value:.4g}"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def nice_ticks(low: float, high: float, count: int = 5, whole: bool = False) -> list[float]:
    """Returns about ``count`` round numbers from ``low`` to ``high``, as ticks of an axis.

    Args:
        low: lower end of the axis.
        high: upper end of the axis.
        count: desired number of ticks.
        whole: whether ticks must be integers.
    """
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    if whole:
        step = max(1.0, float(math.ceil(step)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(k * step, 12) for k in range(first, last + 1)]


def _padded(low: float, high: float, share: float) -> tuple[float, float]:
    """Extends a range by a share of its length; a range that is a single number gets a length."""
    pad = (high - low) * share if high > low else abs(low) * 0.1 or 0.5
    # If no value is negative, the axis does not go below 0.
    return 0.0 if low >= 0 > low - pad else low - pad, high + pad


@dataclasses.dataclass(frozen=True)
class _Frame:
    """The plot of a chart: the ranges of steps and values, and where each point is drawn."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def x(self, step: float) -> float:
        share = (step - self.x_range[0]) / (self.x_range[1] - self.x_range[0])
        return round(_LEFT + share * (WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        share = (value - self.y_range[0]) / (self.y_range[1] - self.y_range[0])
        return round(HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM), 1)


def _axes(frame: _Frame, whole_x: bool) -> str:
    parts, bottom = [], HEIGHT - _BOTTOM
    for tick in nice_ticks(*frame.y_range, count=5):
        y = frame.y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{number(tick)}</text>')
    for tick in nice_ticks(*frame.x_range, count=6, whole=whole_x):
        x = frame.x(tick)
        parts.append(f'<line class="axis" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(f'<text x="{x}" y="{bottom + 17}" text-anchor="middle">{number(tick)}</text>')
    ends = f'x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"'
    return "".join(parts) + f'<line class="axis" {ends}/>'


def _path(one: Series, frame: _Frame, style: str) -> str:
    commands, pen = [], "M"
    for x, y in zip(one.x, one.y, strict=True):
        if y is not None:
            commands.append(f"{pen}{frame.x(x)} {frame.y(y)}")
        pen = "M" if y is None else "L"
    if len(commands) == 1:  # a path with a single point would be invisible
        cx, cy = commands[0][1:].split()
        return f'<circle class="{style} dot" cx="{cx}" cy="{cy}" r="3"/>'
    return f'<path class="{style}" d="{"".join(commands)}"/>'


def _smoothed(one: Series) -> Series:
    """Returns the centred moving average of a series, over about a tenth of its length."""
    reach = max(2, len(one.y) // 20)
    smooth: list[float | None] = []
    for index in range(len(one.y)):
        near = [y for y in one.y[max(0, index - reach) : index + reach + 1] if y is not None]
        smooth.append(sum(near) / len(near) if near else None)
    return dataclasses.replace(one, y=tuple(smooth))


def _is_noisy(values: Sequence[float]) -> bool:
    """Returns whether the total variation of a line is much larger than its range."""
    way = sum(abs(b - a) for a, b in itertools.pairwise(values))
    return way > 3 * (max(values) - min(values))


def _thin(one: Series) -> Series:
    """Reduces a series to ``MAX_POINTS`` points: the lowest and the highest of each bucket."""
    points = [
        (x, y if y is not None and math.isfinite(y) else None)
        for x, y in zip(one.x, one.y, strict=True)
    ]
    if len(points) > MAX_POINTS:
        size = math.ceil(len(points) / (MAX_POINTS // 2))
        selected = []
        for start in range(0, len(points), size):
            bucket = points[start : start + size]
            drawn = [(y, i) for i, (_, y) in enumerate(bucket) if y is not None] or [(0.0, 0)]
            lowest = min(drawn)[1]
            highest = max(drawn, key=lambda pair: pair[0])[1]
            selected += [bucket[i] for i in sorted({lowest, highest})]
        points = selected
    return Series(one.name, tuple(x for x, _ in points), tuple(y for _, y in points))
