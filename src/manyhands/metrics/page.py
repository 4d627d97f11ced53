"""report.html from what report.json holds: one file without a script and with nothing from elsewhere; and its line
charts and bars as SVG, without a library. Text of the data and of the model is always escaped.

Colors are CSS variables of the page, so a chart follows its light and dark modes; every line is labeled by text too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from manyhands.core.limits import GIB
from manyhands.core.text import printable_value
from manyhands.core.units import format_duration

TEMPLATE = Path(__file__).with_name("report.html.jinja")
GRAY = 7  # of the page's colors: what was measured
LARGEST_PARTS = 7  # of a bar, by size; the rest is one
WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 34  # margins for the labels of the axes
NUM_TICKS = 5
COLORS = 8  # --c0 .. --c7 of the page


def render_report(report: Mapping[str, Any]) -> str:
    """The page. Raises jinja2's UndefinedError where the template shows what the report does not hold."""
    planned = report["planned"]
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=printable_value
    )
    device = planned.get("device_name") or planned["device"]
    how = (
        f"{report['task']}, {report['method']}, {planned['strategy']} on {planned['world_size']} × {device}, "
        f"activation checkpointing {planned['activation_checkpointing']}"
    )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        r=report,
        how=how,
        tiles=_tiles(report),
        charts=_charts(report),
        table=_table(report),
        bars=_bars(report),
        evaluations=_evaluations(report),
        sources=report["data"].get("sources", []),
        settings=[(key, _text(value)) for key, value in report["settings"].items()],
    )


def _tiles(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    done, evaluations = report["measured"], report.get("evaluations", [])
    tiles = [(f"{done['steps']:,}", f"steps ({done['stop_reason']})")]
    losses = [row["loss"] for row in evaluations if row.get("loss") is not None]
    if len(losses) > 1:
        tiles.append((f"{losses[0]:.4f} → {losses[-1]:.4f}", "held-out loss"))
    elif "first_loss" in done:
        tiles.append((f"{done['first_loss']:.4f} → {done['last_loss']:.4f}", "training loss of this launch"))
    if done.get("tokens_per_s"):
        tiles.append((f"{done['tokens_per_s']:,.0f}", "tokens/s, all ranks"))
    if peaks := done.get("peak_memory_bytes_by_rank"):
        tiles.append((f"{max(peaks) / GIB:.1f} GiB", "peak memory of a rank"))
    tiles.append((format_duration(done["training_s"]), "of training"))
    return tiles


def _charts(report: Mapping[str, Any]) -> list[tuple[str, list[tuple[int, str]], str]]:
    """(caption, labels of the lines by color, SVG)"""
    curve = report.get("curve", [])

    def of(key: str) -> list[tuple[float, float | None]]:
        return [(point["step"], point.get(key)) for point in curve]

    held_out = [(row["step"], row.get("loss")) for row in report.get("evaluations", [])]
    wanted = [
        ("Loss by step", [Line("training", of("loss")), Line("held out", held_out, dots=True)]),
        ("Gradient norm by step", [Line("gradient norm", of("grad_norm"))]),
        ("Learning rate by step", [Line("learning rate", of("learning_rate"))]),
        ("Tokens/s by step, all ranks", [Line("tokens/s", of("tokens_per_s"))]),
    ]
    drawn = []
    for caption, lines in wanted:
        known = [line for line in lines if any(y is not None for _, y in line.points)]
        if svg := line_chart(caption, known):
            keys = [(number, line.label) for number, line in enumerate(known)] if len(known) > 1 else []
            drawn.append((caption, keys, svg))
    return drawn


def _table(report: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    planned, done = report["planned"], report["measured"]
    peaks = done.get("peak_memory_bytes_by_rank")
    resident = "" if planned["device"] == "cuda" else " (resident, libraries included)"
    rows = [
        ("steps", f"{planned['steps']:,}", f"{done['steps']:,}"),
        (
            f"peak memory of a rank{resident}",
            f"{planned['memory_bytes'] / GIB:.2f} GiB",
            f"{max(peaks) / GIB:.2f} GiB" if peaks else "-",
        ),
        ("seconds a step", _number(planned, "step_s", ".3f"), _number(done, "step_s", ".3f")),
        ("tokens/s, all ranks", _number(planned, "tokens_per_s", ",.0f"), _number(done, "tokens_per_s", ",.0f")),
        ("share of time waiting for input", "-", _number(done, "input_wait_share", ".2%")),
    ]
    return rows


def _bars(report: Mapping[str, Any]) -> list[tuple[str, str, list[BarPart]]]:
    """Memory of a rank and seconds of a step, as planned by term; of memory what each rank held at most beside it."""
    planned, found = report["planned"], []
    peaks = report["measured"].get("peak_memory_bytes_by_rank") or []
    parts = _largest(planned["memory_terms_bytes"], lambda value: f"{value / GIB:.2f} GiB")
    whole = max([planned["memory_bytes"], *peaks])
    if svg := bar("planned memory of a rank by term", parts, whole):
        found.append(("Memory of a rank, planned", svg, parts))
        for rank, peak in enumerate(peaks if len(peaks) <= 8 else []):
            part = BarPart("held at most", peak, f"{peak / GIB:.2f} GiB")
            found.append(
                (f"Memory of rank {rank}, measured", bar(f"peak memory of rank {rank}", [part], whole, GRAY), [part])
            )
    time = planned.get("time") or {}
    if terms := time.get("terms"):
        parts = _largest(terms, lambda value: f"{value:.3f} s")
        if svg := bar("planned seconds of a step by term", parts, sum(part.value for part in parts)):
            found.append(("Seconds of a step, planned", svg, parts))
    return found


def _largest(terms: Mapping[str, float], text: Any) -> list[BarPart]:
    ordered = sorted(((name, value) for name, value in terms.items() if value > 0), key=lambda item: -item[1])
    parts = [BarPart(name.replace("_", " "), value, text(value)) for name, value in ordered[:LARGEST_PARTS]]
    rest = sum(value for _, value in ordered[LARGEST_PARTS:])
    return [*parts, BarPart("other", rest, text(rest))] if rest else parts


def _evaluations(report: Mapping[str, Any]) -> list[list[str]]:
    forms = {"loss": ".4f", "perplexity": ".4g", "accuracy": ".2%"}
    return [
        [f"{row['step']:,}", *(_number(row, name, form) for name, form in forms.items())]
        for row in report.get("evaluations", [])
    ]


def _number(values: Mapping[str, Any], name: str, form: str) -> str:
    return format(values[name], form) if values.get(name) is not None else "-"


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_text(item)}" for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


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
