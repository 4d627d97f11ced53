"""``manyhands bench``: rows of the speed table measured on this machine's GPUs, beside what H200s did.

    python -m manyhands.bench [ROW ...] [--gpus N] [--output rows.jsonl]

Each row is a process group of its own with a limit of ten minutes.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from manyhands.bench.rows import BY_NAME, TABLE, BenchRow, append, count_gpus, new_run, start_processes
from manyhands.core.errors import EXIT_USAGE, UserError
from manyhands.core.text import print_safely
from manyhands.core.units import count_of

LIMIT_S = 600


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the processes of a row, too
    options = parse()
    if unknown := [name for name in options.rows if name not in BY_NAME]:
        error = UserError(f"there is no row called {unknown[0]!r}", fix=f"the rows are {', '.join(BY_NAME)}")
        print(error, file=sys.stderr)
        return EXIT_USAGE
    rows = [BY_NAME[name] for name in options.rows]
    if options.list or not rows:
        print_rows(rows or list(TABLE), {})
        return 0
    num_gpus, run = count_gpus(), new_run()
    measured: dict[str, dict[str, Any]] = {}
    failed = False
    for row in rows:
        world_size = min(row.gpus, options.gpus or row.gpus)
        if world_size > num_gpus and not options.shape:
            print(f"{row.name}: needs {world_size} GPUs, {num_gpus} here (--gpus N measures it on fewer)")
            failed = True
            continue
        print(f"{row.name}: on {count_of(world_size, 'GPU')} ...", flush=True)
        found = measure(row, world_size, options, run)
        failed = failed or found is None
        if found is not None:
            measured[row.name] = found
    print_rows([row for row in rows if row.name in measured], measured)
    return 1 if failed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="manyhands bench", description="Measure rows of the speed table on this machine, beside H200s."
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(BY_NAME))
    parser.add_argument("--list", action="store_true", help="show the rows and the recorded figures, measure nothing")
    parser.add_argument("--gpus", type=int, help="measure on at most so many GPUs")
    parser.add_argument("--output", type=Path, help="JSONL file to append the raw rows to")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--shape", help="another shape, such as tiny to try the command on a CPU")
    return parser.parse_args()


def measure(row: BenchRow, world_size: int, options: argparse.Namespace, run: str) -> dict[str, Any] | None:
    """The raw row; None and the reason on the terminal where there is none."""
    arguments = ["--row", row.name, "--run-name", run]
    arguments += ["--steps", str(options.steps), "--warm", str(min(5, options.steps - 1))]
    arguments += ["--shape", options.shape, "--length", "128"] if options.shape else []
    output, found = start_processes("manyhands.bench.case", arguments, world_size, LIMIT_S)
    if found is None:
        with tempfile.NamedTemporaryFile(
            "w", prefix=f"manyhands-bench-{row.name}-", suffix=".log", delete=False
        ) as log:
            log.write(output)
        reason = (output.strip().splitlines() or ["it wrote nothing"])[-1]
        print(f"{row.name}: no result: {reason}; see {log.name}")
    elif options.output is not None:
        append(options.output, found)
    return found


def print_rows(rows: list[BenchRow], measured: dict[str, dict[str, Any]]) -> None:
    """One line a row: what was measured here, and the record on as many H200s (else on the fewest it was made on)."""
    if not rows:
        return
    print("\n| row | work | GPUs | tokens/s a GPU | peak GiB | recorded on H200s: GPUs, tokens/s a GPU, peak GiB |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        here = measured.get(row.name)
        own = f"{here['gpus']} | {here['tokens_per_s_gpu']:,} | {here['peak_allocated_gib']}" if here else "| |"
        print(f"| {row.name} | {row.what} | {own} | {recorded(row, here['gpus'] if here else None)} |")


def recorded(row: BenchRow, num_gpus: int | None) -> str:
    if not row.recorded:
        return "none"
    num = num_gpus if num_gpus in row.recorded else min(row.recorded)
    tokens_per_s, gib = row.recorded[num]
    return f"{num}, {tokens_per_s:,}, {gib}"


if __name__ == "__main__":
    print_safely()
    sys.exit(main())
