"""Ways of one row of the speed table beside each other: recomputation and offloading, peak memory and tokens/s of one GPU.

    python bench/ways.py --output bench/results/ways.jsonl            # Llama-8B LoRA
    python bench/ways.py --row 1b-full --output bench/results/ways.jsonl

Each way is a process of its own (``manyhands.bench.case``). What to look at: ``selective`` must lie between ``none`` and
``block`` in both figures, compiled and eager; ``block`` with activations offloaded must need less than ``block`` at nearly its
speed; losses must agree.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

COMMON = {
    "none": ("parallel.recompute=none",),
    "selective": ("parallel.recompute=selective",),
    "selective, eager": ("parallel.recompute=selective", "parallel.compile=false"),
    "block": ("parallel.recompute=block",),
    "activations": ("parallel.recompute=none", "parallel.offload_activations=true"),
    "selective, activations": ("parallel.recompute=selective", "parallel.offload_activations=true"),
    "block, activations": ("parallel.recompute=block", "parallel.offload_activations=true"),
}
STATES = {
    "states": ("parallel.offload=optimizer",),
    "all": ("parallel.offload=all",),
    "all, block, activations": ("parallel.offload=all", "parallel.recompute=block", "parallel.offload_activations=true"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", default="8b-lora")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--only", nargs="+", choices=[*COMMON, *STATES], help="some of the ways")
    parser.add_argument("--output", type=Path)
    options, more = parser.parse_known_args()
    failed = []
    for label, keys in (COMMON | STATES).items():
        if options.only and label not in options.only:
            continue
        command = [sys.executable, "-m", "manyhands.bench.case", "--row", options.row, "--steps", str(options.steps), "--label", label]
        command += ["--output", str(options.output)] if options.output else []
        print(f"== {label}", flush=True)
        if subprocess.run([*command, *more, *keys], check=False).returncode:
            failed.append(label)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
