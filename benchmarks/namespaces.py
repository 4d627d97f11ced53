"""Many nodes on one machine: how long they need until step 1, and what becomes of them when one is lost.

    python -m benchmarks.namespaces --nodes 2 4 8 16 --output rows.jsonl      # as root, on any Linux

Each node is a network namespace on a bridge (``tests/support/nodes.py``), in which one ``manyhands train`` starts one
CPU process of a tiny model. Two runs for each number of nodes, a row of JSON each:

- ``continue``: the last node is killed in training; the others continue (``launch.min_gpus``) until node 0 gets
  SIGTERM.
- ``end``: the last node is killed in training; the others save and end.

All nodes share this machine's cores, so seconds until step 1 are mostly imports: ``cpu_s`` says how many seconds of
processor time each node took by then, ``load`` what else the machine did (load average of a minute before the start).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

from manyhands.bench.shapes import write_model_folder, write_rows
from manyhands.core.files import read_rows
from tests.support.nodes import Bed, Launched, make_bed, why_no_nodes

PORT = 29400
TIMEOUT_S = 1200  # parallel.timeout_s: sixteen nodes import torch on the cores of one
LIMIT_S = 1800.0  # of each wait
LOOK_S = 0.05
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--parts", nargs="+", choices=["continue", "end"], default=["continue", "end"])
    parser.add_argument("--output", type=Path, help="file to which the rows are appended")
    options = parser.parse_args()
    if (why := why_no_nodes()) is not None:
        sys.exit(f"skipped: {why}")
    for num in options.nodes:
        for part in options.parts:
            with tempfile.TemporaryDirectory(prefix="namespaces-") as folder, make_bed(Path(folder), num) as bed:
                row = measure(bed, part)
            print(json.dumps(row, indent=2), flush=True)
            if options.output is not None:
                with options.output.open("a") as file:
                    file.write(json.dumps(row) + "\n")


def measure(bed: Bed, part: str) -> dict[str, Any]:
    write_run(bed.folder)
    row: dict[str, Any] = {
        "nodes": bed.num,
        "part": part,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
    }
    free, begin = psutil.virtual_memory().available, time.monotonic()
    nodes = start(bed, [f"launch.min_gpus={bed.num - 1}"] if part == "continue" else [])
    run = bed.folder / "runs" / "run"

    def until(done: Callable[[], bool]) -> float:
        """Seconds since ``begin`` when ``done`` is true for the first time."""
        while not done():
            if time.monotonic() - begin > LIMIT_S or nodes[0].process.poll() is not None:
                raise SystemExit(f"not reached in {LIMIT_S:.0f} s, or ended:\n{nodes[0].text}")
            time.sleep(LOOK_S)
        return round(time.monotonic() - begin, 1)

    row["met_s"] = until(lambda: f"{bed.num} nodes: " in nodes[0].text)
    row["planned_s"] = until((run / "plans" / "001.json").exists)
    row["step_1_s"] = until(lambda: last_step(run) >= 1)
    row["cpu_s"] = [round(sum(map(cpu_seconds, processes(node))), 1) for node in nodes]
    row["memory_gib"] = round((free - psutil.virtual_memory().available) / GIB, 1)

    step, begin = last_step(run), time.monotonic()
    for process in processes(nodes[-1]):
        with contextlib.suppress(psutil.Error):  # the first of them takes the others along
            process.kill()
    if part == "continue":
        until(lambda: "is lost; the run continues" in nodes[0].text)
        row["noticed_after_s"], noticed = round(time.monotonic() - begin, 1), time.time()
        row["next_step_after_s"] = until(lambda: last_step(run, noticed) > 0)
        begin = time.monotonic()
        nodes[0].command.send_signal(signal.SIGTERM)
    codes = [node.wait(LIMIT_S) for node in nodes[:-1]]
    row |= {"step": step, "ended_after_s": round(time.monotonic() - begin, 1), "codes": sorted(set(codes))}
    row["texts"] = sorted({report_of(node.text) for node in nodes[:-1]})
    return row


def write_run(folder: Path) -> None:
    write_model_folder(folder / "model", "tiny")
    write_rows(folder / "rows.jsonl", [32] * 512)
    fields = {
        "name": "run",
        "task": "cpt",
        "model": {"name": "model", "init": "random"},
        "method": {"name": "full"},
        "data": {"train": "rows.jsonl", "max_length": 32},
        "batch": {"samples": 48},
        "stop": {"epochs": 10**6, "max_steps": 10**6},
        "evaluate": {"every_steps": 0},
        "checkpoint": {"every_steps": 50, "keep_last": 1},
        "parallel": {"device": "cpu", "timeout_s": TIMEOUT_S},
        "launch": {"restarts": 3},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(fields))


def start(bed: Bed, keys: list[str]) -> list[Launched]:
    source = Path(__file__).parent.parent
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{source / 'src'}{os.pathsep}{source}"}
    command = [sys.executable, "-m", "manyhands", "train", "run.yaml", "--nodes", str(bed.num)]
    command += ["--rendezvous", f"{bed.address(0)}:{PORT}", *keys]
    return [bed.start(node, *command, "--node-rank", str(node), environment=environment) for node in range(bed.num)]


def processes(node: Launched) -> list[psutil.Process]:
    return psutil.Process(node.process.pid).children(recursive=True)


def cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system + times.children_user + times.children_system


def last_step(run: Path, since: float = 0.0) -> int:
    """The newest step that was done after ``since`` (seconds of the epoch), 0 if none was."""
    rows = read_rows(run / "metrics.jsonl", "step")
    return max((row["step"] for row in rows if row["time"] > since), default=0)


def report_of(text: str) -> str:
    """What a user reads: that a node is lost, or the error with which the run ends."""
    _, begin, error = text.partition("\nerror: ")
    return begin.strip() + " " + error.strip() if begin else "\n".join(re.findall(r".* is lost; .*", text))


if __name__ == "__main__":
    main()
