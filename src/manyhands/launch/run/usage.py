"""The memory of a run, live or finished: what its plan estimated beside what each rank has used. Imports no torch.

A finished run is read from report.json, a live one from the last line of metrics.jsonl; of live ranks on this machine
the driver is asked too, which counts the context and the caches that the plan estimates and torch does not count.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from manyhands.core.files import read_json
from manyhands.facts.visible import open_nvml
from manyhands.launch.local.heartbeat import lives, read_beats, was_killed
from manyhands.launch.run.folder import RunFolder

Verdict = Literal["unmeasured", "within the plan", "above the plan", "above the limit"]
TAIL_BYTES = 2**20  # of metrics.jsonl: many times its longest line


@dataclass(frozen=True)
class RankUsage:
    """Bytes of one rank. ``planned`` is the plan's estimate of the peak, ``limit`` what a rank may use."""

    rank: int
    planned: int
    limit: int
    now: int | None = None
    peak: int | None = None
    driver: int | None = None  # held by the rank's process now, as the GPU's driver counts it
    gpu: int | None = None  # the GPU's index on this machine, where the driver knows the process

    @property
    def most(self) -> int | None:
        """The largest figure that is known of it."""
        return max((size for size in (self.now, self.peak, self.driver) if size is not None), default=None)

    @property
    def verdict(self) -> Verdict:
        if self.most is None:
            return "unmeasured"
        if self.most > self.limit:
            return "above the limit"
        return "above the plan" if self.most > self.planned else "within the plan"


@dataclass(frozen=True)
class RunUsage:
    """``state`` as in status.json; ``killed`` where it says running but no rank lives, or no launcher."""

    name: str
    device: str
    state: str
    step: int | None
    num_steps: int
    ranks: tuple[RankUsage, ...]


def read_usage(folder: RunFolder, by_process: Mapping[int, tuple[int, int]] | None = None) -> RunUsage:
    """UserError where there is no run or plan. ``by_process``: (GPU, bytes) by process id, else the driver's."""
    config, plan, status = folder.read_config(), folder.read_plan(), folder.read_status()
    beats = read_beats(folder)
    state = str(status.get("state", "not started"))
    if was_killed(folder, status, beats):
        state = "killed"
    is_live = state == "running" and any(lives(folder, beat) for beat in beats.values())
    if by_process is None:
        by_process = memory_by_process() if is_live and plan.layout.device == "cuda" else {}
    row = last_row(folder.metrics)
    devices = _list_of(row.get("devices"))
    report = read_json(folder.report_json) if state == "finished" else None
    measured = report.get("measured") if isinstance(report, dict) else None
    peaks = _list_of(measured.get("peak_memory_bytes_by_rank")) if isinstance(measured, dict) else []
    ranks = []
    for rank in range(plan.layout.world_size):
        device = devices[rank] if rank < len(devices) and isinstance(devices[rank], dict) else {}
        beat = beats.get(rank)
        gpu, driver = by_process.get(beat.pid, (None, None)) if beat is not None and is_live else (None, None)
        ranks.append(
            RankUsage(
                rank=rank,
                planned=plan.memory.total,
                limit=plan.memory.limit,
                now=_bytes(device.get("memory_allocated_bytes")) if is_live else None,
                peak=max(
                    (size for size in map(_bytes, (device.get("peak_bytes"), *peaks[rank : rank + 1])) if size),
                    default=None,
                ),
                driver=driver,
                gpu=gpu,
            )
        )
    return RunUsage(config.name, plan.layout.device, state, row.get("step"), plan.num_steps, tuple(ranks))


def find_live_runs(runs: Path) -> list[RunFolder]:
    """The runs in a folder of runs that are running; between two attempts they have no living rank."""
    return [
        folder
        for folder in map(RunFolder, sorted(path.parent for path in runs.glob("*/status.json")))
        if (status := folder.read_status()).get("state") == "running"
        and not was_killed(folder, status, read_beats(folder))
    ]


def last_row(metrics: Path) -> dict[str, Any]:
    """The last complete line of a step in metrics.jsonl; ``{}`` before the first."""
    try:
        with open(metrics, "rb") as file:
            file.seek(max(0, os.path.getsize(metrics) - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # cut off, by a kill or by where the tail begins; or damaged
            continue
        if isinstance(row, dict) and row.get("kind") == "step":
            return row
    return {}


def memory_by_process() -> dict[int, tuple[int, int]]:
    """Process id to (GPU index, bytes) as the driver counts; in a container it may know none of its processes."""
    import pynvml

    found: dict[int, tuple[int, int]] = {}
    with contextlib.suppress(pynvml.NVMLError), open_nvml():
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.usedGpuMemory:
                    found[int(process.pid)] = (index, int(process.usedGpuMemory))
    return found


def _bytes(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) else None


def _list_of(value: Any) -> list[Any]:
    """A list of a damaged file may be anything."""
    return value if isinstance(value, list) else []
