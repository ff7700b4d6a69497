"""Charts as inline SVG: axes with units, colours from the page's style sheet, numbers under the pointer.

Drawn 420 units wide, so that text stays readable on a phone and is not huge on a wide screen.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

WIDTH, HEIGHT = 420, 232
LEFT, RIGHT, TOP, BOTTOM = 56, 20, 14, 40
MOST_POINTS = 600


@dataclass(frozen=True)
class Series:
    """One line of a chart. `style`: a class of the style sheet (c1, c2, c3, faint)."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: str = "c1"


def line_chart(
    title: str,
    series: list[Series],
    *,
    x_label: str,
    y_label: str,
    log_y: bool = False,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Lines over a common x axis. marks: vertical lines with a word, such as where a run resumed."""
    series = [_thinned(s) for s in series if len(s.x)]
    values = np.concatenate([np.asarray(s.y, float) for s in series])
    values = values[np.isfinite(values) & (values > 0 if log_y else True)]
    xs = np.concatenate([np.asarray(s.x, float) for s in series])
    if not len(values):
        return ""
    across = _Axis.linear(float(xs.min()), float(xs.max()), LEFT, WIDTH - RIGHT)
    low = float(values.min()) if log_y else min(0.0, float(values.min()))
    make = _Axis.logarithmic if log_y else _Axis.linear
    up = make(low, float(values.max()) * (1.0 if log_y else 1.05), HEIGHT - BOTTOM, TOP)
    body = [_grid(across, up, x_label, y_label)]
    for x, word in marks:
        at = across.place(x)
        body.append(
            f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text class="mark" x="{at - 4:.1f}" y="{TOP + 10}" text-anchor="end">{escape(word)}</text>'
        )
    for s in series:
        points = " ".join(
            f"{across.place(x):.1f},{up.place(y):.1f}" for x, y in zip(s.x, s.y, strict=True) if _drawable(y, log_y)
        )
        body.append(f'<polyline class="line {s.style}" points="{points}"/>')
    return _figure(title, "".join(body), _legend([(s.name, s.style) for s in series]), _readout(series, across))


def stacked_chart(title: str, series: list[Series], *, x_label: str, y_label: str) -> str:
    """Areas on top of each other, first at the bottom; all series share their x."""
    series = [_thinned(s) for s in series]
    x = np.asarray(series[0].x, float)
    if not len(x):
        return ""
    tops = np.cumsum([np.asarray(s.y, float) for s in series], axis=0)
    across = _Axis.linear(float(x.min()), float(x.max()), LEFT, WIDTH - RIGHT)
    up = _Axis.linear(0.0, float(np.percentile(tops[-1], 98)) * 1.15 or 1.0, HEIGHT - BOTTOM, TOP)
    body, floor = [_grid(across, up, x_label, y_label)], np.zeros(len(x))
    for s, top in zip(series, tops, strict=True):
        upper = [f"{across.place(a):.1f},{max(TOP, up.place(b)):.1f}" for a, b in zip(x, top, strict=True)]
        lower = [
            f"{across.place(a):.1f},{max(TOP, up.place(b)):.1f}" for a, b in zip(x[::-1], floor[::-1], strict=True)
        ]
        body.append(f'<polygon class="area {s.style}" points="{" ".join(upper + lower)}"/>')
        floor = top
    return _figure(title, "".join(body), _legend([(s.name, s.style) for s in series]), _readout(series, across))


def histogram(title: str, values: np.ndarray, *, x_label: str, y_label: str, bins: int = 24) -> str:
    """How often values fall where; float [n]."""
    counts, edges = np.histogram(values, bins=min(bins, max(1, len(np.unique(values)))))
    across = _Axis.linear(float(edges[0]), float(edges[-1]), LEFT, WIDTH - RIGHT)
    up = _Axis.linear(0.0, float(counts.max()) * 1.05, HEIGHT - BOTTOM, TOP)
    bars = []
    for count, start, end in zip(counts, edges[:-1], edges[1:], strict=True):
        x, width = across.place(start), max(1.0, across.place(end) - across.place(start) - 1)
        y = up.place(float(count))
        bars.append(
            f'<rect class="bar c1" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{HEIGHT - BOTTOM - y:.1f}">'
            f"<title>{count} between {_short(float(start))} and {_short(float(end))}</title></rect>"
        )
    return _figure(title, _grid(across, up, x_label, y_label) + "".join(bars), "", "")


def sparkline(values: np.ndarray, bins: int = 32) -> str:
    """A histogram without axes, for a table cell; float [n]."""
    counts, _ = np.histogram(values, bins=bins)
    tallest = max(1, int(counts.max()))
    bars = "".join(
        f'<rect class="bar c1" x="{3 * i}" y="{24 - 24 * c / tallest:.1f}" width="2.4" height="{24 * c / tallest:.1f}"/>'
        for i, c in enumerate(counts)
    )
    return f'<svg class="spark" viewBox="0 0 {3 * bins} 24" preserveAspectRatio="none" role="img">{bars}</svg>'


@dataclass(frozen=True)
class _Axis:
    place: Callable[[float], float]
    ticks: list[float]

    @staticmethod
    def linear(low: float, high: float, start: float, end: float) -> _Axis:
        if high <= low:
            low, high = low - 0.5, low + 0.5
        scale = (end - start) / (high - low)
        return _Axis(lambda v: start + (v - low) * scale, _ticks(low, high))

    @staticmethod
    def logarithmic(low: float, high: float, start: float, end: float) -> _Axis:
        bottom, top = math.log10(low), math.log10(high)
        if top - bottom < 0.05:
            bottom, top = bottom - 0.05, top + 0.05
        scale = (end - start) / (top - bottom)
        steps = (1, 2, 5) if top - bottom < 2.5 else (1,)
        ticks = [m * 10.0**e for e in range(math.floor(bottom), math.ceil(top) + 1) for m in steps]
        return _Axis(lambda v: start + (math.log10(v) - bottom) * scale, [t for t in ticks if low <= t <= high])


def _ticks(low: float, high: float, about: int = 4) -> list[float]:
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough)
    first = math.ceil(low / step - 1e-9)
    return [step * i for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _grid(across: _Axis, up: _Axis, x_label: str, y_label: str) -> str:
    parts = []
    for tick in up.ticks:
        y = up.place(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_short(tick)}</text>')
    for tick in across.ticks:
        parts.append(
            f'<text x="{across.place(tick):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{_short(tick)}</text>'
        )
    base = HEIGHT - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="label" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    height = (TOP + base) / 2
    turned = f'transform="rotate(-90 12 {height})" x="12" y="{height}" text-anchor="middle"'
    return "".join(parts) + f'<text class="label" {turned}>{escape(y_label)}</text>'


def _figure(title: str, body: str, legend: str, readout: str) -> str:
    return (
        f"<figure><figcaption><b>{escape(title)}</b>{legend}</figcaption>"
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" {readout}>'
        f'{body}<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}" x1="-9" x2="-9"/></svg>'
        f'<output class="readout"></output></figure>'
    )


def _legend(entries: list[tuple[str, str]]) -> str:
    if len(entries) < 2:
        return ""
    return "".join(f'<span class="key"><i class="{style}"></i>{escape(name)}</span>' for name, style in entries)


def _readout(series: list[Series], across: _Axis) -> str:
    """The numbers that the page's script shows under the pointer."""
    longest = max(series, key=lambda s: len(s.x))
    data = {
        "x": [_rounded(x) for x in longest.x],
        "at": [round(across.place(x), 1) for x in longest.x],
        "y": {s.name: [_rounded(y) for y in s.y] for s in series if len(s.x) == len(longest.x)},
    }
    return f"data-points='{escape(json.dumps(data), quote=True)}'"


def _thinned(series: Series) -> Series:
    """At most MOST_POINTS of the points, evenly chosen."""
    keep = np.unique(np.linspace(0, len(series.x) - 1, min(len(series.x), MOST_POINTS)).astype(int))
    return Series(series.name, [series.x[i] for i in keep], [series.y[i] for i in keep], series.style)


def _drawable(value: float, log_y: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log_y)


def _rounded(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _short(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.0e}".replace("e-0", "e-") if abs(value) < 1e-3 else f"{value:.4g}"
