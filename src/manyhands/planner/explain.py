"""A plan as text: decisions with their reasons, memory by term, candidates and why each was rejected; and what it
predicted beside what the run's report measured. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from manyhands.core.limits import GIB
from manyhands.planner.phrases import describe_run
from manyhands.planner.sentences import SENTENCES, explain
from manyhands.planner.types import Candidate, Plan, TimeEstimate, describe_checkpointing

MIN_SHARE = 0.002  # of a step: smaller terms are not shown
WARNINGS = ("high_learning_rate", "long_warmup", "high_rank")
Row = tuple[str, str, str, str]  # what, planned, measured, error

OUTSIDE = "overhead"  # of the terms: outside of torch's allocator, which the report does not count


def explain_plan(plan: Plan) -> RenderableType:
    """Compact tables for ``rich``: decisions, memory per rank, time of a step, and the candidates with their
    reasons.
    """
    cause = "" if plan.cause == "first" else f" ({plan.cause.replace('_', ' ')})"
    title = Text(f"Plan {plan.number}{cause}  {plan.digest}", style="bold")
    costs = Table.grid(padding=(0, 6, 0, 0))
    costs.add_row(_memory(plan), *(() if plan.time is None else (_time(plan.time),)))
    run = () if plan.time is None else (Text(describe_run(plan.time)),)
    return Group(title, _decisions(plan), Text(), costs, *run, Text(), *_candidates(plan))


def _decisions(plan: Plan) -> Table:
    table = _table()
    for reason in plan.why:
        topic, sentence = SENTENCES[reason.code]
        style = "bold yellow" if reason.code in WARNINGS else "cyan"
        table.add_row(Text(topic, style=style), Text(sentence(reason.values)))
    return table


def _memory(plan: Plan) -> Table:
    table = _table()
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    total, limit = plan.memory.total, plan.memory.limit
    table.add_row(Text("memory per rank", style="bold"), "GiB", "share")
    for name, size in plan.memory.terms.items():
        if size:
            table.add_row(Text(f"  {name}", style="cyan"), f"{size / GIB:.2f}", f"{size / limit:.0%}")
    table.add_row(Text("  total", style="bold"), f"{total / GIB:.2f}", f"{total / limit:.0%}")
    table.add_row(Text("  limit"), f"{limit / GIB:.2f}", "")
    return table


def _time(time: TimeEstimate) -> Table:
    table = _table()
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_row(Text("step time", style="bold"), "s", "share")
    for name, seconds in time.terms.items():
        if seconds >= MIN_SHARE * time.step_s:
            table.add_row(Text(f"  {name}", style="cyan"), f"{seconds:.3f}", f"{seconds / time.step_s:.0%}")
    table.add_row(Text("  total", style="bold"), f"{time.step_s:.3f}", "")
    return table


def _candidates(plan: Plan) -> list[RenderableType]:
    table = _table()
    unit = "tokens" if plan.packing else "samples"
    numbers = (f"micro {unit}", "GiB", "s/step")
    for title in ("strategy", "activation checkpointing", *numbers, ""):
        table.add_column(title, justify="right" if title in numbers else "left")
    table.show_header = True
    shown = _one_each(plan)
    for candidate in shown:
        style = "bold green" if candidate.chosen else "dim"
        total = f"{candidate.memory.total / GIB:.1f}"
        checkpointing = describe_checkpointing(candidate.layout)
        table.add_row(
            _name(candidate),
            checkpointing,
            f"{candidate.layout.micro:,}",
            total,
            "-" if plan.time is None or candidate.step_s is None else f"{candidate.step_s:.3f}",
            explain(candidate.reason) if candidate.reason else "chosen",
            style=style,
        )
    if len(shown) < len(plan.candidates):
        return [table, Text(f"and {len(plan.candidates) - len(shown)} more (--json)", style="dim")]
    return [table]


def _one_each(plan: Plan) -> list[Candidate]:
    """The chosen one first; of every other strategy and checkpointing mode the largest that leaves its margin free, or
    else the largest that fits, or else the smallest.
    """
    groups: dict[tuple[str, bool, str], list[Candidate]] = {}
    for candidate in plan.candidates:
        groups.setdefault(
            (
                candidate.layout.strategy,
                candidate.layout.reshard_after_forward,
                candidate.layout.activation_checkpointing,
            ),
            [],
        ).append(candidate)
    best = [max(group, key=_shown_first) for group in groups.values()]
    return sorted(best, key=lambda candidate: not candidate.chosen)


def _shown_first(candidate: Candidate) -> tuple[bool, bool, bool, int]:
    memory, micro = candidate.memory, candidate.layout.micro
    return candidate.chosen, memory.is_safe, memory.fits, micro if memory.fits else -micro


def _name(candidate: Candidate) -> str:
    layout = candidate.layout
    return f"{layout.strategy}, resharded" if layout.reshard_after_forward else layout.strategy


def _table() -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), show_header=False, pad_edge=False)


def compare(plan: Plan, report: Mapping[str, Any]) -> list[Row]:
    """Memory of the rank that held most, seconds of a step and tokens/s; then what was planned by term, which a run
    measures only as a whole. ``report`` is what report.json holds.
    """
    found = report.get("measured")
    found = found if isinstance(found, dict) else {}  # a file may be damaged
    measured = {name: value for name, value in found.items() if isinstance(value, int | float)}
    listed = found.get("peak_memory_bytes_by_rank")
    peaks = [peak for peak in listed if isinstance(peak, int | float)] if isinstance(listed, list) else []
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
