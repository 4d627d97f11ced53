"""Ways of one row of the speed table beside each other: recomputation and offloading, peak memory and tokens/s of one
GPU.

    python benchmarks/layouts.py --output benchmarks/results/ways.jsonl            # Llama-8B LoRA
    python benchmarks/layouts.py --row 1b-full --output benchmarks/results/ways.jsonl

Each way is a process of its own (``manyhands.bench.case``) and prints one JSON line, its row or how it failed. Ways
that the output holds already are not measured again, and none is begun after ``--budget`` seconds, so that a second
call goes on. What to look at:
``selective`` must lie between ``none`` and ``block`` in both figures, compiled and eager; ``block`` with activations
offloaded must need less than ``block`` at nearly its speed; losses must agree.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from manyhands.bench.rows import read, say, start_processes

# By what they tell first. The rest of the plan is its own.
WAYS = {
    "none": ("parallel.activation_checkpointing=none",),
    "selective": ("parallel.activation_checkpointing=selective",),
    "full": ("parallel.activation_checkpointing=full", "parallel.offload_activations=false"),
    "block, activations": ("parallel.activation_checkpointing=full", "parallel.offload_activations=true"),
    "selective, activations": ("parallel.activation_checkpointing=selective", "parallel.offload_activations=true"),
    "activations": ("parallel.activation_checkpointing=none", "parallel.offload_activations=true"),
    "all, block, activations": (
        "parallel.offload=all",
        "parallel.activation_checkpointing=full",
        "parallel.offload_activations=true",
    ),
    "states": ("parallel.offload=optimizer",),
    "selective, eager": ("parallel.activation_checkpointing=selective", "parallel.compile=false"),
    "all": ("parallel.offload=all",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", default="8b-lora")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=WAYS, help="some of the ways")
    parser.add_argument("--budget", type=float, default=225, help="seconds after which no other way is begun")
    parser.add_argument("--limit", type=float, default=90, help="seconds for one way")
    parser.add_argument("--output", type=Path, required=True, help="JSONL file to append the rows to")
    options, more = parser.parse_known_args()
    begin, failed = time.monotonic(), []
    measured = {row["label"] for row in read(options.output) if row["row"] == options.row and "failure" not in row}
    for label in options.only or WAYS:
        if label in measured:
            continue
        if time.monotonic() - begin > options.budget:
            print(f"{label}: not begun, {options.budget:.0f} s are over", file=sys.stderr)
            continue
        row = measure(label, options, more)
        failed += [label] if "failure" in row else []
        say(row, options.output)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def measure(label: str, options: argparse.Namespace, more: list[str]) -> dict[str, Any]:
    """The raw row of one way, or the last line of what it wrote."""
    start = time.monotonic()
    arguments = [
        "--row",
        options.row,
        "--steps",
        str(options.steps),
        "--warm",
        str(options.warm),
        "--label",
        label,
        *more,
        *WAYS[label],
    ]
    output, row = start_processes("manyhands.bench.case", arguments, 1, options.limit)
    seconds = {"seconds": round(time.monotonic() - start)}
    if row is None:
        return seconds | {
            "row": options.row,
            "label": label,
            "failure": next(iter(output.strip().splitlines()[-1:]), "no word"),
        }
    return seconds | row


if __name__ == "__main__":
    main()
