"""The speed table: rows not measured yet, the most valuable first, ours beside the peers' in one run; then the table.

    python -m benchmarks --results benchmarks/results/speed.jsonl [ROW ...]
    python -m benchmarks ROW --smallest                       # the smallest memory instead, see ``smallest.py``

Each side of a row (ours, TRL, Unsloth) is a process group of its own with a limit of ten minutes, so that one that
hangs costs only itself. A row is measured when one run has all its sides: what is missing is measured again together
with the others.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.smallest import Attempt, describe, judge, planned_smallest, search, smallest
from benchmarks.table import OURS, check, is_measured, print_table
from manyhands.bench.rows import BY_NAME, TABLE, BenchRow, append, count_gpus, new_run, read, start_processes

LIMIT_S = 600
SMALLEST_STEPS, SMALLEST_LIMIT_S = 4, 150
MODULES = {
    OURS: "benchmarks.case",
    "trl": "benchmarks.peer_trl",
    "trl-packing": "benchmarks.peer_trl",
    "unsloth": "benchmarks.peer_unsloth",
}


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what was started is ended, too
    options = parse()
    results: Path = options.results
    rows = [BY_NAME[name] for name in options.rows] or list(TABLE)
    if options.list:
        print_table(read(results), rows)
        return 0
    num_gpus = count_gpus()
    results.parent.mkdir(parents=True, exist_ok=True)
    run = new_run()
    for row in rows:
        world_size = min(row.gpus, options.gpus or row.gpus)
        if world_size > num_gpus and not options.shape:
            print(f"{row.name}: needs {world_size} GPUs, {num_gpus} here (--gpus N measures it on fewer)")
            continue
        if options.smallest:
            find_smallest(row, world_size, results, options, run)
            continue
        chosen = sides(row, options, world_size)
        if not options.again and is_measured(read(results), row, chosen, world_size):
            print(f"{row.name}: measured already ({', '.join(chosen)})")
            continue
        for side in chosen:
            measure(row, side, world_size, results, options, run)
    if options.smallest:
        return 0
    print_table(read(results), rows)
    return check(read(results), read(options.check), rows) if options.check else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure the speed table's rows, ours beside the peers'."
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", choices=[[], *BY_NAME], help=", ".join(BY_NAME))
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("benchmarks/results/speed.jsonl"),
        help="raw rows; what is there is not measured again",
    )
    parser.add_argument("--list", action="store_true", help="show the table and what is open, measure nothing")
    parser.add_argument("--gpus", type=int, help="measure on at most so many GPUs; the row says so")
    parser.add_argument("--again", action="store_true", help="measure what is there already, too")
    parser.add_argument(
        "--peer",
        choices=["auto", "no"],
        default="auto",
        help="auto measures TRL where trl, peft and liger-kernel are installed, and Unsloth where it is",
    )
    parser.add_argument(
        "--check",
        type=Path,
        help="compare the ratios to the best peer with those of this file; exit code 1 where one fell by 5 %%",
    )
    parser.add_argument(
        "--smallest", action="store_true", help="find the smallest GPU memory in which the rows still run"
    )
    parser.add_argument("--max-runs", type=int, default=5, help="of one row with --smallest")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument(
        "--shape", help="another shape, such as tiny to try the command on a CPU; such rows count for nothing"
    )
    return parser.parse_args()


def sides(
    row: BenchRow,
    options: argparse.Namespace,
    world_size: int,
    is_installed: Callable[[str], Any] = importlib.util.find_spec,
) -> list[str]:
    """Who is measured: ours, TRL, and Unsloth with rows of one GPU."""
    chosen = [OURS]
    if options.peer == "no" or options.shape or row.data == "pairs":  # the peers' scripts train single answers
        return chosen
    if all(is_installed(name) for name in ("trl", "peft", "liger_kernel")):
        chosen += ["trl"] + (["trl-packing"] if row.data == "mix" else [])
    if row.gpus == world_size == 1 and all(is_installed(name) for name in ("unsloth", "unsloth_zoo")):
        chosen.append("unsloth")
    return chosen


def measure(row: BenchRow, side: str, world_size: int, results: Path, options: argparse.Namespace, run: str) -> None:
    """One side of one row in its own processes; its result, or that it had none, is appended under the name of the
    run.
    """
    arguments = [
        "--row",
        row.name,
        "--run-name",
        run,
        "--steps",
        str(options.steps),
        "--warm",
        str(min(5, options.steps - 1)),
    ]
    if side == "trl-packing":
        arguments.append("--packing")
    arguments += shape_arguments(options)
    print(f"{row.name} {side}: on {world_size} GPU(s) ...", flush=True)
    start = time.monotonic()
    output, found = start_processes(MODULES[side], arguments, world_size, LIMIT_S)
    seconds = round(time.monotonic() - start)
    if found is None:
        log = results.parent / f"{row.name}-{side}.failed.log"
        log.write_text(output)
        reason = (output.strip().splitlines() or ["it wrote nothing"])[-1]
        print(f"{row.name} {side}: no result: {reason}; see {log}")
        found = {"run": run, "row": row.name, "label": side, "gpus": world_size, "failure": reason}
    append(results, found | {"seconds": seconds})


def find_smallest(row: BenchRow, world_size: int, results: Path, options: argparse.Namespace, run: str) -> None:
    """Every attempt becomes a raw row with its limit and outcome."""
    from manyhands.bench.case import find_facts, folder_of, with_memory

    own = replace(row, shape=options.shape, length=128) if options.shape else row
    with tempfile.TemporaryDirectory() as work:
        config, facts = find_facts(folder_of(Path(work), own), own, world_size, SMALLEST_STEPS, [])
        planned = planned_smallest(config, facts, with_memory)
    if planned is None:
        print(f"{row.name}: the plan finds no way on {world_size} GPU(s) of any size")
        return
    print(f"{row.name}: the plan's smallest GPU has {planned:.2f} GiB", flush=True)

    def attempt(limit: float) -> Attempt:
        start = time.monotonic()
        arguments = [
            "--row",
            row.name,
            "--run-name",
            run,
            "--label",
            "smallest",
            "--steps",
            str(SMALLEST_STEPS),
            "--warm",
            "1",
        ]
        arguments += ["--limit", str(limit), "--plan-limit", str(planned), *shape_arguments(options)]
        output, found = start_processes("benchmarks.case", arguments, world_size, SMALLEST_LIMIT_S)
        made = judge(limit, output, found)
        if made.outcome == "failed":
            results.with_suffix(f".{row.name}-{limit}.failed.log").write_text(output)
        known = found or {"run": run, "row": row.name, "label": "smallest", "gpus": world_size}
        limits = {"limit_gib": limit, "plan_limit_gib": planned}
        append(results, known | limits | {"seconds": round(time.monotonic() - start), "outcome": made.outcome})
        print(f"{row.name}: {describe(made)}", flush=True)
        return made

    best = smallest(search(planned, attempt, max_runs=options.max_runs))
    print(f"{row.name}: smallest {best.limit_gib:.2f} GiB" if best else f"{row.name}: ran in none of these", flush=True)


def shape_arguments(options: argparse.Namespace) -> list[str]:
    return ["--shape", options.shape, "--length", "128"] if options.shape else []


if __name__ == "__main__":
    sys.exit(main())
