"""``python -m tests.golden [--device cuda]``: records the losses of this hardware in ``losses.json``.

An entry that is there is replaced only with ``--replace``; what would change is shown in any case.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from tests.golden import runs
from tests.support.equality import write_workspace
from tests.support.ranks import ranks


def main() -> int:
    parser = argparse.ArgumentParser("tests.golden", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--replace", action="store_true", help="replace the entry of this hardware")
    arguments = parser.parse_args()
    size = 2 if arguments.device == "cpu" else min(2, torch.cuda.device_count())
    names = [name for name, (_, case) in runs.RUNS.items() if case.world_size <= size]
    hardware, entries = runs.name_hardware(arguments.device), runs.read()
    with tempfile.TemporaryDirectory() as temporary, ranks(size, arguments.device) as world:
        write_workspace(Path(temporary))
        losses = {name: runs.run(world, Path(temporary), name) for name in names}
    for name, found in losses.items():
        compared = runs.compare(entries, hardware, name, found)
        with_what = f"deviates by {compared.deviation:.1e} from {compared.where}" if compared else "is new"
        print(f"{name}: {found[0]:.6f} to {found[-1]:.6f}, {with_what}")
    if hardware in entries and not arguments.replace:
        print(f"{hardware}: the entry stays as it is (--replace)", file=sys.stderr)
        return 1
    recorded = {name: runs.to_text(found) for name, found in losses.items()}
    runs.write(entries | {hardware: entries.get(hardware, {}) | recorded})
    print(f"{hardware}: recorded in {runs.FILE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
