"""docs/faults.md, from the rows of what was measured and from nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.faults.cells import FAULTS, NEXT_START, NODE_FAULTS, Cell, cells

ROWS = ROOT / "benchmarks/results/faults.jsonl"
SOAKED = ROOT / "benchmarks/results/soak.json"
HOSTILE = ROOT / "benchmarks/results/hostile.jsonl"


@dataclass(frozen=True)
class Found:
    """What a fault cost. Times in seconds, None where there is none."""

    exits: list[int]  # of each start until the run was finished
    lost: int  # steps done again
    detected_s: float | None  # from the act until the launcher said so, or all had ended
    again_s: float | None  # from the act until a step was done again without anybody's help
    said: str
    wrong: str = ""  # what should have held and did not
    seconds: float = 0.0  # of the measurement

    @property
    def end(self) -> str:
        return f"**no: {self.wrong}**" if self.wrong else "refused" if self.exits[-1] else "yes"


Rows = Mapping[Cell, dict[str, Any]]


def read_rows(path: Path) -> Rows:
    """The newest row of each cell."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return {Cell(row["fault"], row["moment"], row["layout"], row["launcher"]): row for row in rows}


def read_soaked(path: Path = SOAKED) -> Mapping[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def read_hostile(path: Path = HOSTILE) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def found_in(row: Mapping[str, Any]) -> Found:
    return Found(**{name: row[name] for name in Found.__dataclass_fields__ if name in row})


INTRODUCTION = """# Faults

What a fault costs, measured by `make faults`: real runs of a tiny model on a CPU (12 steps, a checkpoint every 4), each
with one fault at a drawn moment of one stage: start, preparation, build, step, evaluation, checkpoint, export. They
train LoRA and all weights, in one process, by DDP, FSDP2 and ZeRO-2, under `manyhands train`, `torchrun` and `srun`, on
one machine and on two. A run *holds* in one of two ways. *Exact*: its final weights are those of an undisturbed run,
bit for bit, and the audit of its batches found the same samples in each step and each sample once an epoch. *Refused*:
an error named the damaged file and the fix, and nothing was trained. *Steps lost* are steps that were computed again,
including the one in flight. *Noticed*: seconds from the fault until the launcher reported it; `parallel.timeout_s` is
15 here, and it is what finds a stopped process. The machines had 2 or 16 cores, kept busy by other work, so seconds
are upper bounds. Each run is a row of `benchmarks/results/faults.jsonl`, with the first message
on its terminal."""


def write_page(rows: Rows, soaked: Mapping[str, Any] | None = None, hostile: Sequence[Mapping[str, Any]] = ()) -> str:
    """docs/faults.md."""
    every = list(cells())
    measured = [cell for cell in every if cell in rows]
    lines = [*INTRODUCTION.splitlines(), "", _coverage(every, measured, rows), ""]
    lines += ["| fault | runs | exact | refused | most steps lost | noticed within |", "|---|---|---|---|---|---|"]
    for fault in dict.fromkeys(_kind(cell) for cell in measured):
        found = [found_in(rows[cell]) for cell in measured if _kind(cell) == fault]
        noticed = [one.detected_s for one in found if one.detected_s is not None]
        values = [fault, str(len(found)), str(sum(one.end == "yes" for one in found))]
        values += [str(sum(one.end == "refused" for one in found)), str(max(one.lost for one in found))]
        lines.append("| " + " | ".join([*values, f"{max(noticed):.1f} s" if noticed else ""]) + " |")
    lines += [f"\n**{cell.name}: {wrong}**" for cell in measured if (wrong := found_in(rows[cell]).wrong)]
    lines += ["", *SOAK.splitlines(), "", _soaked(soaked), "", *HOSTILE_FILES.splitlines(), "", _hostile(hostile)]
    return "\n".join([*lines, "", *LOST_GPUS.splitlines()]) + "\n"


def _kind(cell: Cell) -> str:
    if cell.moment == NEXT_START and cell.fault.endswith(("truncated", "flipped", "missing")):
        return f"a file of the run {cell.fault.rpartition(' ')[2]}"
    return cell.fault


def _coverage(every: list[Cell], measured: list[Cell], rows: Rows) -> str:
    """How many cells were measured, and which kinds were not."""
    days = sorted(rows[cell]["when"] for cell in measured)
    text = f"Measured: {len(measured)} of {len(every)} cells"
    text += f", {days[0]} to {days[-1]}" if days and days[0] != days[-1] else f", {days[0]}" if days else ""
    wrong = sum(bool(found_in(rows[cell]).wrong) for cell in measured)
    text += f"; {wrong} of them did not hold (**no**)." if wrong else "; all of them held."
    groups: dict[tuple[str, str], list[bool]] = {}
    for cell in every:
        groups.setdefault((cell.launcher, cell.layout), []).append(cell in rows)
    for launcher in dict.fromkeys(launcher for launcher, _ in groups):
        parts = [
            layout + ("" if not any(found) else f" ({found.count(False)} of {len(found)} cells)")
            for (under, layout), found in groups.items()
            if under == launcher and not all(found)
        ]
        text += f" Not measured under {launcher}: {'; '.join(parts)}." if parts else ""
    kinds = {*FAULTS, *NODE_FAULTS} - {cell.fault for cell in measured}
    return text + (f" Faults without a cell so far: {', '.join(sorted(kinds))}." if kinds else "")


SOAK = """## Soak

`python -m tests.faults.soak FOLDER --cycles 1000` kills a run of two ranks by SIGKILL again and again, at drawn moments
(while it starts, in a step, between steps, while it saves), one rank or both, and compares losses, gradient norms, the
audit of samples and every bit of the adapter with a run left alone."""


HOSTILE_FILES = """## Hostile files

`python -m tests.hostile --count 1000000 --jobs 2` plants random faults in every kind of file that a run reads: bits,
bytes and lines that are changed, missing, moved or foreign, values and keys of JSON and YAML, statements of templates.
A case holds if it ends in a result or in an error that names what is wrong, within 10 s of CPU time and 3 GiB of
memory, and writes nothing outside its folder. What did not hold was fixed and measured again."""


LOST_GPUS = """## A GPU that is lost

The launcher listens for errors of a run's GPUs that NVIDIA's driver reports (Xids), and names them in the cause of a
rank's end. After a fault it queries the driver for each GPU and tests the one that an error names. A GPU counts as lost
after a report that calls for a reset (Xid 48, 62, 64, 79, 95, 119, 120, 140), after 74 (NVLink) unless the GPU at the
other end is gone, and after 94 (a contained memory error) twice without a newer checkpoint; never after 13, 31, 43 or
45, which are the program's errors. This needs `manyhands train` as the launcher and NVIDIA GPUs.

With `launch.min_gpus: N` the restart leaves a lost GPU out as long as N remain: a new plan (cause `resize`) trains the
same samples in each step, from the newest checkpoint. The next start takes all GPUs that are there. Without the key, or
with fewer GPUs left, the run ends with an error that names the GPU, the evidence, and the key. A lost machine is left
out in the same way ([several machines](nodes.md)). No GPU was broken to test this: errors of devices and answers of the
driver are simulated (`tests/e2e/test_restarts.py`, `tests/e2e/test_nodes.py`)."""


def _soaked(soaked: Mapping[str, Any] | None) -> str:
    """What benchmarks/results/soak.json says: the soak's progress."""
    if soaked is None:
        return "It was not run."
    text = f"Measured on {soaked['when']}: {soaked['cycles']} of {soaked['num_cycles']} cycles"
    text += f" ({soaked['in_training']} killed in training, {soaked['while_starting']} while they started)"
    text += f", {soaked['seconds'] / max(1, soaked['cycles']):.1f} s each on 2 busy cores"
    text += f"; {soaked['steps_trained']} steps were trained for the {soaked['num_steps']} of the run."
    if soaked["is_same"]:
        return f"{text} Losses, gradient norms, samples and the adapter are those of the run left alone."
    return f"{text} The run was not finished, and so not compared."


def _hostile(hostile: Sequence[Mapping[str, Any]]) -> str:
    """The sums of benchmarks/results/hostile.jsonl."""
    if not hostile:
        return "It was not run."
    cases, failed = (sum(row[name] for row in hostile) for name in ("cases", "failed"))
    day, num_kinds = max(row["when"] for row in hostile), len({row["kind"] for row in hostile})
    text = f"Measured on {day}: {cases:,} cases of {num_kinds} kinds of files; {failed:,} of them did not hold."
    return f"{text} Rows: `benchmarks/results/hostile.jsonl`."
