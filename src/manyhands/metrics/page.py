"""report.html from what report.json holds: one file without a script and with nothing from elsewhere; its line charts
are SVG, drawn without a library. Text of the data and of the model is always escaped.

Colors are CSS variables of the page, so a chart follows its light and dark modes; every line is labeled by text too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined

from manyhands.core.limits import GIB
from manyhands.core.text import printable_value
from manyhands.core.units import format_duration
from manyhands.metrics.summary import format_number, metrics_of

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
        f"{report['task']}, {report['method']}, {planned['strategy']} on {planned['world_size']} × {device}"
        f"{planned.get('degrees', '')}, "
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
    peak = f"{max(peaks) / GIB:.2f} GiB" if peaks else "-"
    rows = [
        ("steps", f"{planned['steps']:,}", f"{done['steps']:,}"),
        (f"peak memory of a rank{resident}", f"{planned['memory_bytes'] / GIB:.2f} GiB", peak),
    ]
    for label, name, form in (("seconds a step", "step_s", ".3f"), ("tokens/s, all ranks", "tokens_per_s", ",.0f")):
        rows.append((label, format_number(planned, name, form), format_number(done, name, form)))
    return [*rows, ("share of time waiting for input", "-", format_number(done, "input_wait_share", ".2%"))]


def _bars(report: Mapping[str, Any]) -> list[tuple[str, list[BarPart]]]:
    """Memory of a rank and seconds of a step, as planned by term; of memory what each rank held at most as well."""
    planned, bars = report["planned"], []
    peaks = report["measured"].get("peak_memory_bytes_by_rank") or []
    longest = max([planned["memory_bytes"], *peaks])
    if parts := _largest(planned["memory_terms_bytes"], longest, lambda value: f"{value / GIB:.2f} GiB"):
        bars.append(("Memory of a rank, planned", parts))
        for rank, peak in enumerate(peaks if len(peaks) <= 8 else []):
            part = BarPart("held at most", f"{peak / GIB:.2f} GiB", 100 * peak / longest, GRAY)
            bars.append((f"Memory of rank {rank}, measured", [part]))
    terms = (planned.get("time") or {}).get("terms") or {}
    if parts := _largest(terms, sum(terms.values()), lambda value: f"{value:.3f} s"):
        bars.append(("Seconds of a step, planned", parts))
    return bars


def _largest(terms: Mapping[str, float], longest: float, text: Callable[[float], str]) -> list[BarPart]:
    ordered = sorted(((name, value) for name, value in terms.items() if value > 0), key=lambda item: -item[1])
    rest = sum(value for _, value in ordered[LARGEST_PARTS:])
    shown = [*ordered[:LARGEST_PARTS], *([("other", rest)] if rest else [])]
    return [
        BarPart(name.replace("_", " "), text(value), 100 * value / longest, number % COLORS)
        for number, (name, value) in enumerate(shown)
    ]


def _evaluations(report: Mapping[str, Any]) -> list[list[str]]:
    """Labels, then cells; empty where there is no evaluation."""
    if not (rows := report.get("evaluations")):
        return []
    metrics = metrics_of(report)
    return [["step", "held-out loss", *(metric.label for metric in metrics)]] + [
        [
            f"{row['step']:,}",
            format_number(row, "loss", ".4f"),
            *(metric.format(row.get(metric.name), ".4g", ".2%") for metric in metrics),
        ]
        for row in rows
    ]


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


class BarPart(NamedTuple):
    """One piece of a bar: its value as text, and as a share of the longest bar in percent."""

    label: str
    text: str
    percent: float
    color: int


def line_chart(title: str, lines: Sequence[Line]) -> str:
    """The chart, or nothing where no line has two points; ``title`` is what a screen reader says of it."""
    known = [(x, y) for line in lines for x, y in line.points if y is not None and math.isfinite(y)]
    xs, ys = [x for x, _ in known], [y for _, y in known]
    if len(set(xs)) < 2:
        return ""
    y_ticks = _ticks(ys)
    left, right, low, high = min(xs), max(xs), min(y_ticks[0], *ys), max(y_ticks[-1], *ys)

    def place_x(x: float) -> float:
        return LEFT + (x - left) / (right - left) * (WIDTH - LEFT - RIGHT)

    def place_y(y: float) -> float:
        return HEIGHT - BOTTOM - (y - low) / ((high - low) or 1.0) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for y in y_ticks:
        at = place_y(y)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{format_tick(y)}</text>')
    for x in _ticks(xs, whole=True):
        if left <= x <= right:
            parts.append(f'<text x="{place_x(x):.1f}" y="{HEIGHT - 12}" text-anchor="middle">{format_tick(x)}</text>')
    for number, line in enumerate(lines):
        color, piece = f"var(--c{number % COLORS})", list[str]()
        for x, value in [*line.points, (math.nan, None)]:
            if value is not None and math.isfinite(value):
                piece.append(f"{place_x(x):.1f},{place_y(value):.1f}")
                if line.dots:
                    label = f"{line.label}, step {format_tick(x)}: {value:.4g}"
                    center = f'cx="{place_x(x):.1f}" cy="{place_y(value):.1f}"'
                    parts.append(f'<circle {center} r="3.5" fill="{color}"><title>{escape(label)}</title></circle>')
                continue
            if len(piece) > 1:
                dashes = ' stroke-dasharray="5 4"' if line.dots else ""
                parts.append(f'<polyline points="{" ".join(piece)}" fill="none" stroke="{color}"{dashes}/>')
            piece = []
    return "".join([*parts, "</svg>"])


def format_tick(value: float) -> str:
    """As short as it can be said: 12,000, 0.25, 3e-05."""
    if value and (abs(value) < 1e-3 or abs(value) >= 1e7):
        return f"{value:.2g}"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.10g}"


def _ticks(values: Sequence[float], whole: bool = False) -> list[float]:
    """Round numbers around the values: steps of 1, 2 or 5 times a power of ten."""
    low, high = min(values), max(values)
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / NUM_TICKS))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= NUM_TICKS)
    step = max(1.0, step) if whole else step
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(number * step, 12) for number in range(first, last + 1)]
