"""Line charts and bars as SVG, without a script or a library: what the report's page shows. Knows numbers and labels.

Colors are CSS variables of the page, so a chart follows its light and dark modes; every line is labeled by text too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 34  # margins for the labels of the axes
NUM_TICKS = 5
COLORS = 8  # --c0 .. --c7 of the page


@dataclass(frozen=True)
class Line:
    """One series: (x, y) in order; a point without a y leaves a gap. ``dots``: few points, each marked."""

    label: str
    points: Sequence[tuple[float, float | None]]
    dots: bool = False


@dataclass(frozen=True)
class BarPart:
    """One piece of a bar, with its value as text."""

    label: str
    value: float
    text: str


def line_chart(title: str, lines: Sequence[Line], unit: str = "") -> str:
    """The chart, or nothing where no line has two points; ``title`` is what a screen reader says of it."""
    known = [(x, y) for line in lines for x, y in line.points if _is_finite(y)]
    if len({x for x, _ in known}) < 2:
        return ""
    x_ticks, y_ticks = _ticks([x for x, _ in known], whole=True), _ticks([float(y or 0.0) for _, y in known])
    x_range = min(x for x, _ in known), max(x for x, _ in known)
    y_range = (
        min(y_ticks[0], *(float(y or 0.0) for _, y in known)),
        max(y_ticks[-1], *(float(y or 0) for _, y in known)),
    )
    place = _Place(x_range, y_range)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for y in y_ticks:
        at = place.y(y)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{format_tick(y)}{escape(unit)}</text>')
    for x in x_ticks:
        if x_range[0] <= x <= x_range[1]:
            parts.append(f'<text x="{place.x(x):.1f}" y="{HEIGHT - 12}" text-anchor="middle">{format_tick(x)}</text>')
    for number, line in enumerate(lines):
        parts += _draw(line, f"var(--c{number % COLORS})", place)
    return "".join([*parts, "</svg>"])


def bar(title: str, parts: Sequence[BarPart], whole: float, first_color: int = 0) -> str:
    """Parts side by side in one bar, whose length is ``whole``; each tells its label and value when pointed at."""
    if whole <= 0:
        return ""
    drawn, begin = [f'<svg class="bar" viewBox="0 0 {WIDTH} 20" role="img" aria-label="{escape(title)}">'], 0.0
    for number, part in enumerate(parts):
        width = max(0.0, part.value / whole * WIDTH)
        drawn.append(
            f'<rect x="{begin:.1f}" y="2" width="{max(0.0, width - 1):.1f}" height="16" '
            f'fill="var(--c{(number + first_color) % COLORS})">'
            f"<title>{escape(part.label)}: {escape(part.text)}</title></rect>"
        )
        begin += width
    return "".join([*drawn, "</svg>"])


def format_tick(value: float) -> str:
    """As short as it can be said: 12,000, 0.25, 3e-05."""
    if value and (abs(value) < 1e-3 or abs(value) >= 1e7):
        return f"{value:.2g}"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.10g}"


@dataclass(frozen=True)
class _Place:
    """From values to pixels."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def x(self, value: float) -> float:
        low, high = self.x_range
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return HEIGHT - BOTTOM - (value - low) / ((high - low) or 1.0) * (HEIGHT - TOP - BOTTOM)


def _draw(line: Line, color: str, place: _Place) -> list[str]:
    parts, piece = [], list[str]()
    for x, y in [*line.points, (math.nan, None)]:
        if y is not None and _is_finite(y):
            piece.append(f"{place.x(x):.1f},{place.y(y):.1f}")
            if line.dots:
                label = f"{line.label}, step {format_tick(x)}: {y:.4g}"
                at = f'cx="{place.x(x):.1f}" cy="{place.y(y):.1f}"'
                parts.append(f'<circle {at} r="3.5" fill="{color}"><title>{escape(label)}</title></circle>')
            continue
        if len(piece) > 1:
            dashes = ' stroke-dasharray="5 4"' if line.dots else ""
            parts.append(f'<polyline points="{" ".join(piece)}" fill="none" stroke="{color}"{dashes}/>')
        piece = []
    return parts


def _ticks(values: Sequence[float], whole: bool = False) -> list[float]:
    """Round numbers around the values: steps of 1, 2 or 5 times a power of ten."""
    low, high = min(values), max(values)
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / NUM_TICKS))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= NUM_TICKS)
    step = max(1.0, step) if whole else step
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
