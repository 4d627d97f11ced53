"""The table of speed: rows not measured yet, the most valuable first, ours beside the peer's in one run; then the table.

    python -m manyhands.bench --results bench/results/speed.jsonl [ROW ...]

Each side of a row is a process group of its own with a limit of ten minutes, so that one that hangs costs only itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from manyhands.bench.rows import BY_NAME, TABLE, Row

LIMIT_S = 600
FLOOR = 1.05  # of the peer in the same run
TOLERANCE = 0.05  # a ratio may fall by this share before the check fails


def main() -> int:
    options = parse()
    results: Path = options.results
    rows = [BY_NAME[name] for name in options.rows] or list(TABLE)
    if options.list:
        print_table(read(results), rows)
        return 0
    num_gpus = count_gpus()
    results.parent.mkdir(parents=True, exist_ok=True)
    run = time.strftime("%Y%m%dT%H%M%S")
    for row in rows:
        world_size = min(row.gpus, options.gpus or row.gpus)
        if world_size > num_gpus and not options.shape:
            print(f"{row.name}: needs {world_size} GPUs, {num_gpus} here (--gpus N measures it on fewer)")
            continue
        for side in sides(row, options):
            if not options.again and is_measured(read(results), row, side, world_size):
                print(f"{row.name} {side}: measured already")
                continue
            measure(row, side, world_size, results, options, run)
    print_table(read(results), rows)
    return check(read(results), read(options.check), rows) if options.check else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="manyhands bench", description="Measure the speed table's rows, ours beside a peer's.")
    parser.add_argument("rows", nargs="*", metavar="ROW", choices=[[], *BY_NAME], help=", ".join(BY_NAME))
    parser.add_argument(
        "--results", type=Path, default=Path("bench/results/speed.jsonl"), help="raw rows; what is there is not measured again"
    )
    parser.add_argument("--list", action="store_true", help="show the table and what is open, measure nothing")
    parser.add_argument("--gpus", type=int, help="measure on at most so many GPUs; the row says so")
    parser.add_argument("--again", action="store_true", help="measure what is there already, too")
    parser.add_argument(
        "--peer", choices=["auto", "no"], default="auto", help="auto measures TRL where trl, peft and liger-kernel are installed"
    )
    parser.add_argument(
        "--check", type=Path, help="compare the ratios to the peer with those of this file; exit code 1 where one fell by 5 %%"
    )
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--shape", help="another shape, such as tiny to try the command on a CPU; such rows count for nothing")
    return parser.parse_args()


def sides(row: Row, options: argparse.Namespace) -> list[str]:
    installed = all(importlib.util.find_spec(name) for name in ("trl", "peft", "liger_kernel"))
    if options.peer == "no" or options.shape or not installed:
        return ["manyhands"]
    return ["manyhands", "trl"] + (["trl-packing"] if row.data == "mix" else [])


def measure(row: Row, side: str, world_size: int, results: Path, options: argparse.Namespace, run: str) -> None:
    """One side of one row in its own processes; its result is appended with the run it belongs to."""
    module = "manyhands.bench.case" if side == "manyhands" else "manyhands.bench.peer"
    arguments = ["--row", row.name, "--steps", str(options.steps), "--warm", str(min(5, options.steps - 1))]
    if side == "trl-packing":
        arguments.append("--packing")
    if options.shape:
        arguments += ["--shape", options.shape, "--length", "128"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}", "-m", module, *arguments]
    print(f"{row.name} {side}: on {world_size} GPU(s) ...", flush=True)
    start = time.monotonic()
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
        output, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired:
        output, code = "", None
    found = [json.loads(line.removeprefix("RESULT ")) for line in output.splitlines() if line.startswith("RESULT ")]
    if not found:
        log = results.parent / f"{row.name}-{side}.failed.log"
        log.write_text(output)
        print(f"{row.name} {side}: {'no result in ten minutes' if code is None else f'exit code {code}'}; see {log}")
        return
    with results.open("a") as file:
        file.write(json.dumps({"run": run, "seconds": round(time.monotonic() - start), **found[-1]}) + "\n")


def is_measured(stored: list[dict[str, Any]], row: Row, side: str, world_size: int) -> bool:
    return any(r["row"] == row.name and r["label"] == side and r["gpus"] == world_size and not r.get("failure") for r in stored)


def newest(stored: list[dict[str, Any]], row: Row, label: str) -> dict[str, Any] | None:
    found = [r for r in stored if r["row"] == row.name and r["label"] == label and r.get("tokens_per_s_gpu")]
    return found[-1] if found else None


def ratio(stored: list[dict[str, Any]], row: Row) -> float | None:
    """Ours by the peer's best, where both were measured in one run on as many GPUs."""
    ours = newest(stored, row, "manyhands")
    if ours is None:
        return None
    peers = [p for p in (newest(stored, row, "trl"), newest(stored, row, "trl-packing")) if p]
    rates = [p["tokens_per_s_gpu"] for p in peers if p.get("run") == ours.get("run") and p["gpus"] == ours["gpus"]]
    return ours["tokens_per_s_gpu"] / max(rates) if rates else None


def print_table(stored: list[dict[str, Any]], rows: list[Row]) -> None:
    print("\n| row | GPUs | ours, tokens/s a GPU | peer, same run | ratio | goal | peak GiB |\n|---|---|---|---|---|---|---|")
    for row in rows:
        ours, peer, against = newest(stored, row, "manyhands"), newest(stored, row, "trl"), ratio(stored, row)
        if ours is None:
            print(f"| {row.what} | {row.gpus} | open | | | {row.goal:,} | |")
            continue
        hand = " (keys by hand)" if ours.get("by_hand") else ""
        theirs = f"{peer['tokens_per_s_gpu']:,}" if peer and against else "open"
        print(
            f"| {row.what} | {ours['gpus']} | {ours['tokens_per_s_gpu']:,}{hand} | {theirs} | "
            f"{show_ratio(against)} | {row.goal:,} | {ours.get('peak_allocated_gib')} |"
        )


def show_ratio(against: float | None) -> str:
    if against is None:
        return ""
    return f"{against:.2f}" + (f", below {FLOOR}" if against < FLOOR else "")


def check(stored: list[dict[str, Any]], before: list[dict[str, Any]], rows: list[Row]) -> int:
    """Exit code 1 where a ratio to the peer fell: machines differ, ratios within one run hardly do."""
    fallen = 0
    for row in rows:
        now, then = ratio(stored, row), ratio(before, row)
        if now is None or then is None:
            continue
        if now < then * (1 - TOLERANCE):
            fallen += 1
            print(f"{row.name}: {now:.2f} of the peer, was {then:.2f}")
    return 1 if fallen else 0


def read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def count_gpus() -> int:
    from manyhands.facts.host import read_host_facts

    return len(read_host_facts().gpus)


if __name__ == "__main__":
    sys.exit(main())
