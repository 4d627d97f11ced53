"""The headline rows of docs/results.md, measured in one call: has a change made any of them slower?

    python -m benchmarks.headline --output rows.jsonl                   # this checkout
    python -m benchmarks.headline --output rows.jsonl --base FOLDER     # and another one, in turn, on the same GPUs

Rows of one GPU run side by side where the machine has several, each with its base on one GPU; ``8b-full`` needs two.
The table at the end has tokens/s and peak memory with their ratios to the base, and the errors of the plan. Exits with
1 where a row is more than 1 % slower than its base, holds 0.5 % more memory, or fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

from manyhands.bench.rows import append, count_gpus, new_run, start_processes

ROOT = Path(__file__).resolve().parents[1]
SLOWER, LARGER = 0.99, 1.005  # bounds of the ratios to the base
TORCHRUN = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")  # the same launcher for both checkouts
CASE, VISION = "manyhands.bench.case", "benchmarks.vision"


@dataclass(frozen=True)
class Row:
    """One row: the module that measures it, and its arguments. ``gpus`` is 0 for all GPUs of the machine."""

    name: str
    module: str
    arguments: tuple[str, ...]
    gpus: int = 1


STEPS = ("--steps", "16", "--warm", "5")
ROWS = (
    Row("8b-full", CASE, ("--row", "8b-full", *STEPS), gpus=0),
    Row("8b-qlora", CASE, ("--row", "8b-qlora", *STEPS)),
    Row("images", VISION, ("--case", "qwen3vl4b-lora-images", *STEPS)),
    Row("8b-lora", CASE, ("--row", "8b-lora", *STEPS)),
    Row("8b-lora-fp8", CASE, ("--row", "8b-lora-fp8", *STEPS)),
    Row("1b-full", CASE, ("--row", "1b-full", *STEPS)),
)
TINY = (  # of the command itself, on a CPU
    Row("8b-lora", CASE, ("--row", "8b-lora", "--shape", "tiny", "--length", "64", "--steps", "3", "--warm", "1")),
    Row("8b-full", CASE, ("--row", "8b-full", "--shape", "tiny", "--length", "64", "--steps", "3", "--warm", "1"), 0),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSONL file to append the raw rows to")
    parser.add_argument("--base", type=Path, help="root of a checkout to compare with, such as a worktree")
    parser.add_argument("--rows", nargs="+", choices=[row.name for row in ROWS], help="these rows alone")
    parser.add_argument("--limit", type=float, default=120, help="seconds of one process group")
    options = parser.parse_args()
    num_gpus = count_gpus()
    rows = [row for row in (ROWS if num_gpus else TINY) if options.rows is None or row.name in options.rows]
    sides = {"base": options.base.resolve()} if options.base else {}
    sides["new"] = ROOT
    run, lock = new_run(), threading.Lock()
    measured: dict[str, dict[str, Any]] = {row.name: {} for row in rows}
    free: Queue[int] = Queue()
    for gpu in range(max(1, num_gpus)):
        free.put(gpu)

    def measure(row: Row, gpus: list[int]) -> None:
        for side, root in sides.items():
            variables = {"PYTHONPATH": path_of(root), "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
            # folders of their own, so that rows side by side share no file
            arguments = [*row.arguments, "--label", side, "--work", f"/tmp/headline/{row.name}-{side}"]
            module, size = row.module, max(1, len(gpus)) if num_gpus else 2 if row.gpus == 0 else 1
            if size > 1:
                module, arguments = (
                    "torch.distributed.run",
                    [*TORCHRUN, f"--nproc_per_node={size}", "-m", module, *arguments],
                )
            output, result = start_processes(module, arguments, 1, options.limit, variables, folder=root)
            with lock:
                append(
                    options.output,
                    {"headline": run, "name": row.name, "side": side, **(result or {"failure": output[-3000:]})},
                )
                measured[row.name][side] = result
                print(f"{row.name}, {side}: {brief(result) if result else 'failed: ' + last_line(output)}", flush=True)

    def measure_on_one(row: Row) -> None:
        gpu = free.get()
        try:
            measure(row, [gpu] if num_gpus else [])
        finally:
            free.put(gpu)

    for row in rows:
        if row.gpus == 0 and num_gpus != 1:
            measure(row, list(range(num_gpus)))
    with ThreadPoolExecutor(max_workers=max(1, num_gpus)) as pool:
        list(pool.map(measure_on_one, [row for row in rows if row.gpus == 1]))
    return print_table(measured, compared="base" in sides)


def path_of(root: Path) -> str:
    """PYTHONPATH of a checkout, with what this process has beyond its own."""
    others = [entry for entry in sys.path if "site" in Path(entry).name]
    return ":".join([str(root / "src"), str(root), *others])


def last_line(output: str) -> str:
    return next((line for line in reversed(output.splitlines()) if line.strip()), "no output")


def brief(result: dict[str, Any]) -> str:
    """Speed, memory and the plan's errors of a raw row."""
    samples = f", {result['samples_per_s_gpu']} samples/s" if "samples_per_s_gpu" in result else ""
    held = (result.get("peak_reserved_gib") or 0) + (result.get("outside_gib") or 0)
    planned = f", planned memory {result['planned_gib'] / held - 1:+.1%}" if held else ""
    return f"{result['tokens_per_s_gpu']} tokens/s{samples}, {result.get('peak_allocated_gib')} GiB{planned}"


def print_table(measured: dict[str, dict[str, Any]], *, compared: bool) -> int:
    """Print each row's ratios to its base. Returns 1 where one is out of bounds or missing."""
    worse = [name for name, sides in measured.items() if sides and None in sides.values()]
    for name, sides in measured.items():
        base, new = sides.get("base"), sides.get("new")
        if not new or (compared and not base):
            print(f"{name:12} not measured")
            continue
        ratios = ""
        if base:
            speed = new["tokens_per_s_gpu"] / base["tokens_per_s_gpu"]
            memory = (new.get("peak_allocated_gib") or 1) / (base.get("peak_allocated_gib") or 1)
            ratios = f"   speed x {speed:.4f}, memory x {memory:.4f}, losses {base['losses']} {new['losses']}"
            if speed < SLOWER or memory > LARGER:
                worse.append(name)
        print(f"{name:12} {brief(new)}{ratios}")
    print(json.dumps({"slower, larger or failed": worse}))
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
