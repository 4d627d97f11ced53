"""report.html from what report.json holds: one file without a script and with nothing from elsewhere. Text of the data
and of the model is always escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from manyhands.core.limits import GIB
from manyhands.core.units import format_duration
from manyhands.metrics.charts import BarPart, Line, bar, line_chart

TEMPLATE = Path(__file__).with_name("report.html.jinja")
GRAY = 7  # of the page's colors: what was measured
LARGEST_PARTS = 7  # of a bar, by size; the rest is one


def render_report(report: Mapping[str, Any]) -> str:
    """The page. Raises jinja2's UndefinedError where the template shows what the report does not hold."""
    planned = report["planned"]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
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
