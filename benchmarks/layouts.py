"""The layout that the plan chooses beside others of the same work, all measured on the same GPUs.

    python -m benchmarks.layouts list
    python -m benchmarks.layouts judge benchmarks/results/*.jsonl
    python -m benchmarks.layouts measure --output rows.jsonl --budget 540 [--have FILE ...]

``judge`` plans every workload of ``benchmarks.foresight_cases`` with all keys of the layout left free, and looks for
rows of it: those of ``benchmarks.foresight_case`` and of ``manyhands.bench.case``. Machines differ by 1 to 2 %, and the
code becomes faster: seconds are compared only between rows of one lease, that is of the same GPUs since the same start
of their machine. Rows whose memory was limited are left out.

``measure`` takes what is missing for that: workload after workload, as many as fit into the time; of each the plan's
choice first, then the layouts that were not measured beside it yet. It is the schedule of ``benchmarks.foresight``: a
process group of its own for each case, cases of one GPU side by side on several, but those of one workload on one GPU.
Cases of two GPUs need a machine of two, as on more they may come to run on different pairs. ``--alone`` runs one case
at a time: a busy neighbour costs up to 3 %.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from benchmarks.foresight import Schedule
from benchmarks.foresight_cases import BY_NAME, TRIED, WORKLOADS, Case, Workload
from manyhands.bench.case import find_facts, folder_of
from manyhands.bench.rows import BY_NAME as ROWS
from manyhands.bench.rows import BenchRow, read
from manyhands.core.errors import UserError
from manyhands.facts.gpu_kinds import AskedGpus, describe_host, kind_of, load_kinds
from manyhands.facts.host import read_host_facts
from manyhands.facts.types import GpuKind
from manyhands.planner.layout import Checkpointing, Layout, Strategy
from manyhands.planner.search import plan
from manyhands.planner.time.rates import REFERENCE_KIND
from manyhands.planner.types import Candidate, Plan

OTHER = "this machine"  # of no known kind, such as a CPU
BOUND = 0.01  # how far behind the fastest measured layout a choice may be
WORK = Path(tempfile.gettempdir()) / "manyhands-layouts"
LAYOUT_KEYS = {
    *("parallel.strategy", "parallel.shard_degree", "parallel.reshard_after_forward"),
    *("parallel.activation_checkpointing", "parallel.offload_activations", "batch.micro_tokens", "batch.micro_samples"),
}


@dataclass(frozen=True, order=True)
class Way:
    """One layout, as far as every row names it."""

    strategy: Strategy
    reshard: bool
    checkpointing: Checkpointing
    lighter_layers: int
    offloads_activations: bool
    micro: int  # tokens of a micro-batch

    def __str__(self) -> str:
        sharding = f"{self.strategy} ({'reshards' if self.reshard else 'keeps'})"
        words = [self.strategy if self.strategy == "ddp" else sharding] if self.strategy != "single" else []
        words += [self.checkpointing.replace("_", " ")]
        words += [f"last {self.lighter_layers} lighter"] if self.lighter_layers else []
        words += ["activations offloaded"] if self.offloads_activations else []
        return ", ".join([*words, f"{self.micro:,}"])


def way_of_layout(layout: Layout) -> Way:
    return Way(
        strategy=layout.strategy,
        reshard=layout.reshard_after_forward,
        checkpointing=layout.activation_checkpointing,
        lighter_layers=layout.lighter_layers,
        offloads_activations=layout.offload_activations,
        micro=layout.pack_tokens or layout.micro,
    )


def way_of_row(row: dict[str, Any]) -> Way | None:
    """None of a row of before there were such layouts."""
    if row.get("strategy") not in get_args(Strategy) or row.get("activation_checkpointing") not in get_args(
        Checkpointing
    ):
        return None
    return Way(
        strategy=row["strategy"],
        reshard=bool(row.get("reshard_after_forward")),
        checkpointing=row["activation_checkpointing"],
        lighter_layers=row.get("lighter_layers") or 0,
        offloads_activations=bool(row.get("offload_activations")),
        micro=row.get("pack_tokens") or row.get("micro_tokens") or 0,
    )


def work_of_row(row: dict[str, Any]) -> str | None:
    """The name of the work that a row is of, without its layout; None if it is not known, or was limited."""
    named: Case | BenchRow | None = BY_NAME.get(row.get("case", "")) or ROWS.get(row.get("row", ""))
    if named is None or any(row.get(key) for key in ("layers", "lengths", "limit_gib")):
        return None
    if not all(row.get(key) for key in ("strategy", "shape", "step_s")):
        return None
    keys = dict(named.keys)
    for text in row.get("by_hand") or ():
        key, _, value = text.partition("=")
        try:
            keys[key] = json.loads(value)
        except json.JSONDecodeError:
            keys[key] = value
    keys = {key: value for key, value in keys.items() if key not in LAYOUT_KEYS}
    return Case(row["shape"], row["method"], row["gpus"], row["rows"], row["length"], named.data, keys).name  # type: ignore[arg-type]


Seconds = dict[Way, dict[str, float]]  # a step's, by lease


@dataclass(frozen=True)
class Judged:
    """A workload on a kind of GPU: what the plan makes of it, and what was measured."""

    workload: Workload
    kind: str
    chosen: Way
    ways: dict[str, Way]  # of the workload's cases that fit, by their names
    planned: dict[Way, Candidate]
    seconds: Seconds  # measured

    @cached_property
    def beside(self) -> dict[Way, float]:
        """Other layouts' seconds over those of the choice, where both are of one lease; of several the least."""
        mine = self.seconds.get(self.chosen, {})
        found = {
            way: min(taken[lease] / mine[lease] for lease in taken.keys() & mine.keys())
            for way, taken in self.seconds.items()
            if way != self.chosen and taken.keys() & mine.keys()
        }
        return dict(sorted(found.items(), key=lambda pair: pair[1]))

    @property
    def behind(self) -> float | None:
        """How much longer the choice takes than the fastest; None where nothing can be compared."""
        return max(0.0, 1 / min(self.beside.values()) - 1) if self.beside else None

    @property
    def best(self) -> Way:
        return next((way for way, ratio in self.beside.items() if ratio < 1), self.chosen)

    @property
    def missing(self) -> list[Case]:
        """Cases that are still to be measured. The plan's choice is measured again beside those of another lease."""
        others = {way for way in self.ways.values() if way != self.chosen and way not in self.beside}
        found, seen = [], set()
        for case in self.workload.cases[1:]:
            if (way := self.ways.get(case.name)) in others and way not in seen:
                found.append(case)
                seen.add(way)
        return [self.workload.work, *found] if found else []


def plan_case(case: Case, kind: GpuKind | None) -> Plan:
    """On an idle machine with such GPUs; None: on this one."""
    row = case.as_row()
    config, facts = find_facts(folder_of(WORK, row), row, case.gpus, case.steps, [])
    if kind is not None:
        asked = AskedGpus(text=kind.name, kind=kind, num_nodes=1, num_per_node=case.gpus)
        facts = facts.model_copy(update={"host": describe_host(asked)})
    return plan(config, facts)


def sort_rows(files: Iterable[Path]) -> dict[tuple[str, str], Seconds]:
    """Medians of all rows that say what they are of, by work and kind of GPU."""
    taken: dict[tuple[str, str], dict[Way, dict[str, list[float]]]] = {}
    for row in (row for file in files for row in read(file)):
        work, lease = work_of_row(row), row.get("machine")
        if work and lease and (way := way_of_row(row)):
            kind = kind_of(row["device"])
            of_work = taken.setdefault((work, kind.name if kind else OTHER), {})
            of_work.setdefault(way, {}).setdefault(lease, []).append(row["step_s"])
    return {
        key: {
            way: {lease: statistics.median(some) for lease, some in by_lease.items()} for way, by_lease in ways.items()
        }
        for key, ways in taken.items()
    }


def judge(workload: Workload, kind: GpuKind | None, rows: dict[tuple[str, str], Seconds]) -> Judged | None:
    """None where nothing fits; ``kind``: None for this machine."""
    try:
        free = plan_case(workload.work, kind)
    except UserError:
        return None
    planned = {way_of_layout(candidate.layout): candidate for candidate in reversed(free.candidates)}
    ways = {}
    for case in workload.cases:
        try:
            made = free if case is workload.work else plan_case(case, kind)
        except UserError:
            continue  # does not fit
        ways[case.name] = way_of_layout(made.layout)
        planned |= {way_of_layout(candidate.layout): candidate for candidate in made.candidates if candidate.chosen}
    name, chosen = kind.name if kind is not None else OTHER, way_of_layout(free.layout)
    seconds: Seconds = {}
    for way, taken in rows.get((workload.name, name), {}).items():
        # machines of a kind differ by some MiB of free memory, and so by a layer
        is_near = way.lighter_layers > 0 and abs(way.lighter_layers - chosen.lighter_layers) <= 1
        is_chosen = is_near and replace(way, lighter_layers=chosen.lighter_layers) == chosen
        found = chosen if is_chosen else way
        seconds[found] = seconds.get(found, {}) | taken
    return Judged(workload, name, chosen, ways, planned, seconds)


def judge_all(files: Iterable[Path]) -> list[Judged]:
    """All workloads on the kind of GPU that constants were fitted to, and on others those that were measured there."""
    rows = sort_rows(files)
    kinds = [kind for kind in load_kinds() if kind.name == REFERENCE_KIND or any(kind.name == name for _, name in rows)]
    kinds.sort(key=lambda kind: kind.name != REFERENCE_KIND)
    found = (judge(workload, kind, rows) for kind in kinds for workload in WORKLOADS)
    return [one for one in found if one is not None and (one.kind == REFERENCE_KIND or one.seconds)]


def section(judged: Sequence[Judged]) -> str:
    """A table in Markdown, and what it amounts to."""
    compared = [found for found in judged if found.behind is not None]
    whole = [found for found in compared if not found.missing]
    within = [found for found in compared if found.behind is not None and found.behind <= BOUND]
    lines = [
        "The layout that today's plan chooses for a workload, all keys of the layout left free, and other layouts "
        "of it. Seconds a step are compared only within a lease (the same GPUs since the same start of their machine); "
        "a percentage says how much longer than the choice a layout took there, or is planned to take. A layout is "
        "named by how the model is held, activation checkpointing, and tokens of a micro-batch.",
        "",
        f"Of {len(judged)} workloads {len(compared)} have the choice and another layout measured in one lease, and in "
        f"{len(whole)} of these every listed layout that fits. The choice is within {BOUND:.0%} of the fastest in "
        f"{len(within)} of the {len(compared)}.",
        "",
        "| workload | GPUs | chosen: s planned, measured | others: planned; measured beside the choice | behind |",
        "|---|---|---|---|---|",
    ]
    lines += [describe(found) for found in judged]
    cases = [(found.kind, case) for found in judged for case in found.missing]
    if cases:
        lines += ["", f"Not measured yet (`python -m benchmarks.layouts measure`): {describe_cases(cases)}."]
    return "\n".join(lines) + "\n"


def describe(found: Judged) -> str:
    """A line of the table."""
    base, mine = found.planned[found.chosen], found.seconds.get(found.chosen, {})
    taken = ", ".join(f"{value:.4g}" for value in sorted(mine.values())) or "not measured"
    others = sorted({*found.ways.values(), *found.seconds} - {found.chosen}, key=lambda way: seconds_of(found, way))
    behind = "" if found.behind is None else f"{found.behind:.1%}"
    return (
        f"| {found.workload.name.replace(',', ', ')} | {found.workload.work.gpus} x {found.kind} | "
        f"{found.chosen}: {base.step_s or 0:.4g}, {taken} | "
        f"{'; '.join(describe_other(found, way) for way in others)} | "
        f"{behind}{f' ({found.best})' if found.best != found.chosen else ''} |"
    )


def seconds_of(found: Judged, way: Way) -> float:
    """Planned; of a layout that is no candidate now, those that come last."""
    return found.planned[way].step_s or 0.0 if way in found.planned else float("inf")


def describe_other(found: Judged, way: Way) -> str:
    base = seconds_of(found, found.chosen)
    planned = f"{seconds_of(found, way) / base - 1:+.1%}" if way in found.planned and base else "not planned"
    if way in found.beside:
        return f"{way}: {planned}; **{found.beside[way] - 1:+.1%}**"
    elsewhere = ", ".join(f"{value:.4g}" for value in sorted(found.seconds.get(way, {}).values()))
    return f"{way}: {planned}; {f'{elsewhere} s in other leases' if elsewhere else 'not measured'}"


def describe_cases(cases: Sequence[tuple[str, Case]]) -> str:
    """How many, and what they take one after the other, by kind and number of GPUs."""
    groups: dict[tuple[str, int], list[Case]] = {}
    for kind, case in cases:
        groups.setdefault((kind, case.gpus), []).append(case)
    return "; ".join(
        f"{len(some)} cases of {gpus} x {kind}, some {sum(case.cost_s for case in some):.0f} s"
        for (kind, gpus), some in sorted(groups.items())
    )


class LayoutSchedule(Schedule):
    """Only missing cases; those of one GPU keep to the GPU of their workload."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        device = read_host_facts().gpus[0].name if not self.on_cpu else ""
        kind = kind_of(device) if device else None
        rows = sort_rows([*options.have, options.output])
        self.pending, self.card = [], {}  # the GPU of each case of one
        self.since = dict.fromkeys(self.free, 0.0)  # when it was last taken
        busy = dict.fromkeys(self.free, 0.0)  # seconds that are spoken for
        for work in sorted(TRIED if self.on_cpu else WORKLOADS, key=lambda work: -work.work.gpus):
            num = work.work.gpus
            is_asked = (not options.only or num in options.only) and work.name in (options.workload or [work.name])
            found = judge(work, kind, rows) if is_asked and num <= len(self.free) else None
            if found is None or not found.missing:
                continue
            cards = sorted(busy, key=lambda card: busy[card])[:num]
            end = max(busy[card] for card in cards) + sum(case.cost_s for case in found.missing)
            if end > options.budget:  # layouts of another call may be of another lease
                print(f"not begun: {work.name}, all {len(found.missing)} cases")
                continue
            busy |= dict.fromkeys(cards, end)
            self.pending += found.missing
            self.card |= {case.name: cards[0] for case in found.missing}
        print(f"{describe_cases([(device or 'CPU', case) for case in self.pending]) or 'nothing'} to be measured")

    def next_case(self) -> Case | None:
        """Of one GPU the next one of that GPU which is free, or has been taken the longest ago."""
        found = super().next_case()
        if found is None or found.gpus > 1:
            return found
        fitting = [case for case in self.pending if case.gpus == 1 and case.cost_s <= self.left_s()]
        return min(fitting, key=lambda case: (self.card[case.name] not in self.free, self.since[self.card[case.name]]))

    def wait_for_gpu(self) -> list[int]:
        """Of the staged case: until its own GPU is free."""
        with self.changed:
            assert self.staged is not None
            card = self.card[self.staged.name]
            while card not in self.free or (self.options.alone and self.running):
                self.changed.wait(timeout=5)
            self.free.remove(card)
            self.since[card] = time.monotonic()
            self.running += 1
            self.staged = None
            self.changed.notify_all()
            return [card]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the workloads and their cases")
    judging = commands.add_parser("judge", help="the plan's choices beside what was measured")
    judging.add_argument("rows", type=Path, nargs="+")
    measure = commands.add_parser("measure", help="measure what is missing on this machine")
    measure.add_argument("--output", type=Path, required=True, help="JSONL file to append the rows to")
    measure.add_argument("--have", type=Path, nargs="*", default=[], help="files with rows of before")
    measure.add_argument("--budget", type=float, default=540, help="seconds in which all has ended")
    measure.add_argument("--gpus", type=int, help="use at most so many GPUs; 0 tries the command on a CPU")
    measure.add_argument("--only", type=int, nargs="+", help="workloads of these numbers of GPUs alone")
    names = [workload.name for workload in (*WORKLOADS, *TRIED)]
    measure.add_argument("--workload", nargs="+", choices=names, metavar="WORKLOAD", help="these alone")
    measure.add_argument("--alone", action="store_true", help="never two cases side by side")
    measure.set_defaults(case=None, calibrate=False, kept=False)
    return parser.parse_args()


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options = parse()
    if options.command == "measure":
        return LayoutSchedule(options).run()
    if options.command == "list":
        for workload in WORKLOADS:
            print(f"{workload.name}: {len(workload.layouts)} layouts beside the plan's")
        return 0
    print(section(judge_all(options.rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
