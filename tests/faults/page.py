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

What a fault costs, measured by `make faults`: real runs of a tiny model on a CPU (12 steps, a checkpoint every 4),
into which one fault is planted once, at a drawn moment of the stage. *Steps lost* are steps done again, the one in
flight included. *Noticed*: from the fault until the launcher said so, or where the run ended until the last of its
processes was gone; `parallel.timeout_s` is 15 here, and it is what finds a process that is stopped. *Training again*:
until a step was done again without anybody's help; where there is none, the same command was given again. *Exact*: in
the end the weights are those of a run left alone, bit for bit, and the audit of the batches that went into the model
found the same samples in each step and each sample once an epoch; *refused*: an error that names the file and what to
do, and nothing was trained. Seconds are of machines with 2 cores, or 8 of 16, that other work kept busy (a load of up
to 25), so they are upper bounds. Launcher, ranks and what stands by for them are forks of one process, which has
imported torch and transformers already, except where *training again* is marked with a star: those also start Python
and import both, in 20 to 40 s of a busy core, as a user's do."""


def write_page(rows: Rows, soaked: Mapping[str, Any] | None = None, hostile: Sequence[Mapping[str, Any]] = ()) -> str:
    """docs/faults.md."""
    every = list(cells())
    measured = [cell for cell in every if cell in rows]
    lines = [*INTRODUCTION.splitlines(), "", _coverage(every, measured, rows), ""]
    lines += ["## By fault", "", "| fault | cells | exact | refused | most steps lost | noticed after at most |"]
    lines += ["|---|---|---|---|---|---|"]
    for fault in dict.fromkeys(_kind(cell) for cell in measured):
        found = [found_in(rows[cell]) for cell in measured if _kind(cell) == fault]
        num_all = sum(_kind(cell) == fault for cell in every)
        noticed = [one.detected_s for one in found if one.detected_s is not None]
        values = [fault, f"{len(found)} of {num_all}", str(sum(one.end == "yes" for one in found))]
        values += [str(sum(one.end == "refused" for one in found)), str(max(one.lost for one in found))]
        lines.append(_row([*values, _seconds(max(noticed, default=None))]))
    lines += ["", "## By cell", ""]
    lines += ["| fault | at | run | under | steps lost | noticed | training again | exact | the terminal |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for cell in measured:
        found = found_in(rows[cell])
        star = "" if rows[cell]["forked"] or found.again_s is None else " *"
        said = f"`{found.said}`" if found.said else ""
        values = [cell.fault, cell.moment, cell.layout, cell.launcher, str(found.lost), _seconds(found.detected_s)]
        lines.append(_row([*values, _seconds(found.again_s) + star, found.end, said]))
    lines += ["", *SOAK.splitlines(), "", _soaked(soaked), "", *HOSTILE_FILES.splitlines(), "", *_hostile(hostile)]
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

`python -m tests.hostile --count 1000000 --jobs 2` puts random faults into files that a run reads: bits, bytes and lines
that are changed, missing, moved or foreign, values and keys of JSON and YAML, statements of templates. A case holds if
it ends in a result or in an error that names what is wrong, within 10 s of CPU time and 3 GiB of memory, and writes
nothing outside of its folder. Each reader is tried on a valid file first. What did not hold was corrected, and
its kind of file run again. Rows of data are also made up by hypothesis (`MANYHANDS_EXAMPLES=100000 pytest
tests/data/test_broken.py`)."""


LOST_GPUS = """## A GPU that is lost

The launcher listens for errors that NVIDIA's driver reports of a run's GPUs (Xids); the cause of a rank's end names
it. After a fault the launcher asks the driver for each GPU, and tests the one that an error names. A GPU is lost by a
report that calls for a reset (Xid 48, 62, 64, 79, 95, 119, 120, 140); by 74 (NVLink), unless the GPU at the other end
is gone; by 94 (a memory error that was confined) twice without a newer checkpoint; never by 13, 31, 43, 45, which are
the program's. Reports need the run's own launcher (`manyhands train`) and NVIDIA's GPUs. With
`launch.min_gpus: N` the restart leaves a lost GPU out as long as N remain: a new plan (its cause is `resize`) with the
same samples in each step, from the newest checkpoint, or from a snapshot in memory where each rank has a copy. The next
start takes all GPUs that are there. Without the key, or with fewer left, the run ends with an error that names the GPU,
why it is taken for lost, and what allows the run to go on. `tests/e2e/test_restarts.py` takes a run from 2 processes to
1 and back to 2: each sample once an epoch, losses within 1e-5 of a run left alone. No GPU was broken for it: a device's
errors are planted, and the driver's answers are those of a stand-in. Of several machines a whole
one is left out ([nodes.md](nodes.md)): `tests/e2e/test_nodes.py` goes from 3 machines to 2 and to 1."""


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


def _hostile(hostile: Sequence[Mapping[str, Any]]) -> list[str]:
    """What benchmarks/results/hostile.jsonl says, by kind of file."""
    if not hostile:
        return ["It was not run."]
    days = sorted({row["when"] for row in hostile})
    cases, failed = (sum(row[name] for row in hostile) for name in ("cases", "failed"))
    lines = [f"Measured on {days[-1]}: {cases:,} cases, {failed:,} of them did not hold.", ""]
    lines += ["| file | cases | did not hold | ms a case |", "|---|---|---|---|"]
    for kind in dict.fromkeys(row["kind"] for row in hostile):
        own = [row for row in hostile if row["kind"] == kind]
        cases, failed, seconds = (sum(row[name] for row in own) for name in ("cases", "failed", "seconds"))
        lines.append(_row([kind, f"{cases:,}", str(failed), f"{1000 * seconds / cases:.1f}"]))
    return lines


def _row(values: list[str]) -> str:
    return "| " + " | ".join(value.replace("|", "/") for value in values) + " |"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"
