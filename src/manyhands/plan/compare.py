"""What a run's plan said beside what its report measured, as rows of text. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manyhands.core.limits import GIB
from manyhands.plan.types import Plan

Row = tuple[str, str, str, str]  # what, planned, measured, error

OUTSIDE = "overhead"  # of the terms: outside of torch's allocator, which the report does not count


def compare(plan: Plan, report: Mapping[str, Any]) -> list[Row]:
    """Memory of the rank that held most, seconds of a step and tokens/s; then what was planned by term, which a run
    measures only as a whole. ``report`` is what report.json holds.
    """
    measured = report.get("measured", {})
    peaks = measured.get("peak_memory_bytes_by_rank") or []
    rows = []
    on_gpu = plan.layout.device == "cuda"
    if peaks:
        allocated = plan.memory.total
        if on_gpu:  # what tensors held: neither pools nor what is outside of the allocator
            allocated -= plan.memory.terms.get(OUTSIDE, 0) + plan.memory.terms.get("pools", 0)
        rows.append(_row("tensors' memory, GiB" if on_gpu else "memory, GiB", allocated / GIB, max(peaks) / GIB, ".2f"))
    time = plan.time
    if "step_s" in measured:
        rows.append(_row("seconds a step", plan.step_s, measured["step_s"], ".4g"))
    if "tokens_per_s" in measured:
        rows.append(_row("tokens/s", time.tokens_per_s if time else None, measured["tokens_per_s"], ",.0f"))
    if "training_s" in measured:
        planned_s = time.total_s - time.start_s if time else None
        rows.append(_row("seconds of training", planned_s, measured["training_s"], ",.0f"))
    rows += [(f"  rank {rank}, GiB", "", f"{peak / GIB:.2f}", "") for rank, peak in enumerate(peaks)]
    rows += [(f"  {name}, GiB", f"{size / GIB:.2f}", "", "") for name, size in plan.memory.terms.items() if size]
    rows += [(f"  {name}, s", f"{seconds:.4g}", "", "") for name, seconds in (time.terms if time else {}).items()]
    return rows


def _row(what: str, planned: float | None, measured: float, how: str) -> Row:
    if planned is None:
        return what, "-", format(measured, how), ""
    return what, format(planned, how), format(measured, how), f"{planned / measured - 1:+.1%}" if measured else ""
