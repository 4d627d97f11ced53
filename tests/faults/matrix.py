"""The fault matrix: each fault at a moment of each stage, in real runs, with what it cost; docs/faults.md.

``python -m tests.faults.matrix --limit-s 3600 --output docs/faults.md``. Cells that were measured before are kept in
measured.json beside this file, and are measured again with ``--again``; ``--only`` selects cells by a part of their
name. A cell that was not run is "-" in the table.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.conftest import ROOT
from tests.e2e.runs import NO_VERIFY, Ended, Place, Run, train_command, write_place
from tests.faults.audit import Audit
from tests.faults.plants import module_of

MEASURED = Path(__file__).parent / "measured.json"
TIMEOUT_S = 20  # parallel.timeout_s of these runs

LAYOUTS = {
    "LoRA, one process": ("run.yaml", 1, ()),
    "LoRA, DDP x2": ("run.yaml", 2, ()),
    "LoRA, FSDP2 x2": ("run.yaml", 2, ("parallel.strategy=fsdp",)),
    "full, one process": ("full.yaml", 1, ()),
    "full, DDP x2": ("full.yaml", 2, ()),
    "full, FSDP2 x2": ("full.yaml", 2, ("parallel.strategy=fsdp",)),
}
STAGES = ("start", "build", "step", "evaluation", "saving", "export", "verification")
FAULTS = {  # what is done, and in which stages
    "SIGKILL of one rank": ("kill_rank", STAGES),
    "SIGKILL of all ranks": ("kill_all", STAGES),
    "SIGKILL of the launcher": ("kill_launcher", ("preparation", *STAGES)),
    "SIGTERM to the launcher": ("terminate", ("preparation", *STAGES)),
    "SIGSTOP of one rank": ("stop_rank", ("build", "step", "evaluation", "saving", "export")),
    "SIGKILL of a data worker": ("kill_data_worker", ("step",)),
    "exception in one rank": ("fail", ("step", "evaluation")),
    "loss that is not a number": ("spoil_weights", ("step",)),
    "clock set back an hour": ("set_clock_back", ("step",)),
}
PIECES = {  # kinds of file of a run, by a pattern below its folder
    "checkpoint shard": "checkpoints/step-000008/*.safetensors",
    "checkpoint train_state.json": "checkpoints/step-000008/train_state.json",
    "checkpoint manifest.json": "checkpoints/step-000008/manifest.json",
    "plan": "plans/001.json",
    "run.json": "run.json",
    "status.json": "status.json",
    "metrics.jsonl": "metrics.jsonl",
    "heartbeat": ".ranks/beat-0.json",
    "lock": ".lock",
}
DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "flipped": lambda path: path.write_bytes(
        bytes([*path.read_bytes()[:-20], *(b ^ 8 for b in path.read_bytes()[-20:])])
    ),
    "missing": lambda path: path.unlink(),
}


@dataclass(frozen=True)
class Cell:
    fault: str
    moment: str
    layout: str

    @property
    def name(self) -> str:
        return f"{self.fault} | {self.moment} | {self.layout}"

    @property
    def run_name(self) -> str:
        return re.sub(r"\W+", "-", self.name)[:90]


@dataclass(frozen=True)
class Found:
    """What a fault cost. Times in seconds, None where there is none."""

    exits: list[int]  # of each start until the run was finished
    lost: int  # steps done again
    detected_s: float | None  # from the act until the launcher said so, or ended
    again_s: float | None  # from the act until a step was done again without anybody's help
    said: str
    wrong: str = ""  # what should have held and did not


def cells() -> Iterator[Cell]:
    """The most telling ones first."""
    layouts = [
        "LoRA, DDP x2",
        "full, FSDP2 x2",
        "LoRA, one process",
        "full, DDP x2",
        "LoRA, FSDP2 x2",
        "full, one process",
    ]
    for layout in layouts:
        for fault, (_, moments) in FAULTS.items():
            if layout.endswith("process") and fault == "SIGKILL of all ranks":
                continue
            yield from (Cell(fault, moment, layout) for moment in moments)
        if layout == layouts[0]:
            yield from (
                Cell(f"{piece} {how}", "at the next start", "LoRA, one process") for piece in PIECES for how in DAMAGES
            )
            yield Cell("second launch", "while it runs", "LoRA, one process")
            yield Cell("leftover lock of another host", "at the next start", "LoRA, one process")


class Matrix:
    """A folder with runs left alone, one for each layout, and those of the cells."""

    def __init__(self, folder: Path) -> None:
        write_place(folder)
        self.place, self.folder = Place(folder), folder
        os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))

    def audit(self, name: str) -> Path:
        return self.folder / f"{name}.audit"

    def start(self, name: str, layout: str, *keys: str, cell: Cell | None = None, verify: bool = False) -> Ended:
        file, num_ranks, more = LAYOUTS[layout]
        planted = "from tests.faults.audit import plant as audit\nimport pathlib\nimport sys\n"
        planted += f"audit(sys.modules[__name__], pathlib.Path({str(self.audit(name))!r}))\n"
        plant = {"manyhands.worker.training": planted} | ({} if verify else NO_VERIFY)
        if cell is not None:
            planted_act = (
                FAULTS[cell.fault][0],
                cell.moment,
                str(self.mark(cell)),
                num_ranks - 1,
                zlib.crc32(cell.name.encode()),
            )
            module = module_of(cell.moment)
            code = f"from tests.faults.plants import Plant\nPlant{planted_act!r}(globals())\n"
            plant[module] = plant.get(module, "") + code
        keys = (f"parallel.timeout_s={TIMEOUT_S}", "launch.restarts=3", "log.tensorboard=false", *keys)
        arguments = ("--gpus", str(num_ranks), *more, *keys)
        if cell is not None and "launcher" in cell.fault:
            return self.place.call(*train_command(name, *arguments, file=file), plant=plant)
        return self.place.train(name, *arguments, file=file, plant=plant)  # this process has imported torch already

    def mark(self, cell: Cell) -> Path:
        return self.folder / f"{cell.run_name}.mark"

    def alone(self, layout: str) -> Run:
        """The run left alone."""
        name = "alone-" + re.sub(r"\W+", "-", layout)
        if not (self.folder / "runs" / name / "report.json").exists():
            ended = self.start(name, layout)
            assert ended.code == 0, ended.output
        return self.place.run(name)

    def measure(self, cell: Cell) -> Found:
        name, alone = cell.run_name, self.alone(cell.layout)
        shutil.rmtree(self.folder / "runs" / name, ignore_errors=True)
        self.audit(name).unlink(missing_ok=True)
        if cell.moment == "at the next start":
            ends, detected_s, again_s = self.damage(cell), None, None
        elif cell.fault == "second launch":
            return self.second_launch(cell)
        else:
            ends, detected_s, again_s = self.strike(cell)
        wrong = ""
        try:
            self.check(cell, alone, ends)
        except AssertionError as error:
            wrong = " ".join(str(error).split())[:200]
        lost = lost_steps(Audit.read(self.audit(name)))
        return Found([end.code for end in ends], lost, detected_s, again_s, what_was_said(ends), wrong)

    def strike(self, cell: Cell) -> tuple[list[Ended], float | None, float | None]:
        verify = cell.moment == "verification"
        keys = ("data.workers=1",) if "data worker" in cell.fault else ()
        ends = [self.start(cell.run_name, cell.layout, *keys, cell=cell, verify=verify)]
        ended_at = time.time()
        assert self.mark(cell).exists(), f"the fault never happened: {ends[0].output}"
        struck_at = float(self.mark(cell).read_text())
        restarts = self.place.run(cell.run_name).folder / "restarts.jsonl"
        detected_at = json.loads(restarts.read_text().splitlines()[0])["time"] if restarts.exists() else ended_at
        again_at = None
        if ends[0].code == 0 and self.audit(cell.run_name).exists():
            again_at = Audit.read(self.audit(cell.run_name)).resumed_at(struck_at)
        while ends[-1].code != 0 and len(ends) < 3:
            ends.append(self.start(cell.run_name, cell.layout, *keys, verify=verify))
        has_cost = restarts.exists() or ends[0].code != 0
        return ends, detected_at - struck_at if has_cost else None, again_at and again_at - struck_at

    def damage(self, cell: Cell) -> list[Ended]:
        """A run that was killed after step 10, one of whose files is damaged before the next start."""
        base = self.folder / "runs" / "damage-base"
        if not base.exists():
            from tests.e2e.runs import at_step

            plant = NO_VERIFY | at_step(10, "os.kill(os.getppid(), 9); time.sleep(60)")
            plant["manyhands.worker.training"] += (
                "from tests.faults.audit import plant as audit\nimport sys\n"
                f"audit(sys.modules[__name__], pathlib.Path({str(self.audit('damage-base'))!r}))\n"
            )
            self.place.call(*train_command(base.name, "--gpus", "1", "log.tensorboard=false"), plant=plant)
            assert (base / "checkpoints/step-000008").exists()
        folder = self.folder / "runs" / cell.run_name
        shutil.copytree(base, folder)
        config = folder / "run.json"
        config.write_text(config.read_text().replace(base.name, cell.run_name))
        shutil.copy(self.audit(base.name), self.audit(cell.run_name))
        if cell.fault.startswith("leftover lock"):
            (folder / ".lock").write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
        else:
            piece, _, how = cell.fault.rpartition(" ")
            [path, *_] = sorted(folder.glob(PIECES[piece]))
            DAMAGES[how](path)
        return [self.start(cell.run_name, cell.layout)]

    def second_launch(self, cell: Cell) -> Found:
        from tests.e2e.runs import at_step, pause

        mark = self.folder / "running"
        with self.place.start(*train_command(cell.run_name), plant=NO_VERIFY | at_step(2, pause(mark))) as process:
            self.place.wait_for([mark.with_name("running-0")], process)
            begin = time.monotonic()
            second = subprocess.run(
                [sys.executable, *train_command(cell.run_name)],
                cwd=self.folder,
                capture_output=True,
                text=True,
                check=False,
            )
            seconds = time.monotonic() - begin
            wrong = "" if process.poll() is None else "the first launch ended"
        return Found([second.returncode], 0, seconds, None, first_line(second.stdout + second.stderr), wrong)

    def check(self, cell: Cell, alone: Run, ends: list[Ended]) -> None:
        """AssertionError where the run did not end as one left alone."""
        refused = cell.moment == "at the next start" and ends[-1].code in (1, 2)
        if refused:  # in words, and nothing else
            assert "Traceback" not in ends[-1].output and "error: " in ends[-1].output, ends[-1].output[-200:]
            return
        assert ends[-1].code == 0, f"it did not finish: {ends[-1].output[-300:]}"
        assert all("Traceback" not in end.output for end in ends), "a traceback on the terminal"
        run = self.place.run(cell.run_name)
        outputs = [path.relative_to(alone.folder) for path in alone.folder.glob("*/*.safetensors")]
        outputs = [path for path in outputs if path.parts[0] in ("adapter", "model")]
        assert outputs, "the run left alone wrote nothing"
        for path in outputs:
            assert (run.folder / path).read_bytes() == (alone.folder / path).read_bytes(), f"{path} differs"
        reference, mine = (Audit.read(self.audit(each.folder.name)) for each in (alone, run))
        mine.check(reference, alone.read("plans/001.json")["steps_per_epoch"])


def lost_steps(audit: Audit) -> int:
    """Steps that were done more than once, by rank 0."""
    done = [(line["step"], line["pid"]) for line in audit.lines if line["rank"] == 0]
    return len(set(done)) - len({step for step, _ in done})


def first_line(text: str) -> str:
    """What a user reads first, without folders."""
    lines = text.splitlines()
    for mark in ("restarting", "error:", "resumes", "note:", "warning:"):
        for line in lines:
            if mark in line:
                return re.sub(r"/tmp/[^ ;,]*/", "", line.strip())[:160]
    return ""


def what_was_said(ends: list[Ended]) -> str:
    return next(filter(None, (first_line(end.output) for end in ends)), "")


# -- the table


def write_table(measured: dict[str, Any], soaked: str) -> str:
    """docs/faults.md."""
    lines = [*INTRODUCTION.splitlines(), ""]
    when = f"{measured.get('when', '-')}, {measured.get('where', '-')}"
    num_run = sum(cell.name in measured for cell in cells())
    lines += [
        f"Measured: {num_run} of {sum(1 for _ in cells())} cells, {when}.",
        "",
    ]
    lines += [
        "| fault | at | layout | steps lost | detected | training again | exact | the terminal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells():
        row = measured.get(cell.name)
        if row is None:
            values = ["-"] * 5
        else:
            found = Found(**row)
            exact = f"**no: {found.wrong}**" if found.wrong else "refused" if found.exits[-1] else "yes"
            values = [str(found.lost), _seconds(found.detected_s), _seconds(found.again_s), exact, f"`{found.said}`"]
        lines.append(
            "| " + " | ".join([cell.fault, cell.moment, cell.layout, *(v.replace("|", "/") for v in values)]) + " |"
        )
    return "\n".join([*lines, "", *SOAK.splitlines(), "", soaked]) + "\n"


INTRODUCTION = """# Faults

What a fault costs, measured by `make faults`: real runs of a tiny model (12 steps, a checkpoint every 4) in real
processes on a CPU, into which one fault is planted once, at a drawn moment of the stage. *Steps lost* are steps done
again, the one in flight included. *Detected*: from the fault until the launcher said so (`parallel.timeout_s` is 20
here; a process that is stopped is found by it). *Training again*: until a step was done again, without anybody's help;
`-` where the same command has to be given again. *Exact*: in the end the weights are those of a run left alone, bit
for bit, and the audit of the batches that went into the model found the same samples in each step and each sample once
an epoch; *refused*: an error that names the file and what to do, and nothing was trained. A row of `-` was not run."""
SOAK = """## Soak

`python -m tests.faults.soak --cycles 1000` kills a run of two ranks by SIGKILL again and again, at drawn moments (while
it starts, in a step, between steps, while it saves), one rank or both, and compares losses, gradient norms, the audit
of samples and every bit of the adapter with a run left alone."""


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def read_measured() -> dict[str, Any]:
    return json.loads(MEASURED.read_text()) if MEASURED.exists() else {}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser("tests.faults.matrix", description=__doc__)
    parser.add_argument("--output", type=Path, help="docs/faults.md")
    parser.add_argument("--limit-s", type=float, default=4 * 3600.0, help="begin no further cell after so long")
    parser.add_argument("--only", nargs="+", default=[""], help="cells whose name contains one of these")
    parser.add_argument("--again", action="store_true", help="also those that were measured before")
    parser.add_argument("--measured", type=Path, default=MEASURED)
    arguments = parser.parse_args(argv)
    measured = json.loads(arguments.measured.read_text()) if arguments.measured.exists() else {}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        matrix = Matrix(Path(folder))
        for cell in cells():
            if not any(part in cell.name for part in arguments.only) or (cell.name in measured and not arguments.again):
                continue
            if time.monotonic() - begin > arguments.limit_s:
                break
            found = matrix.measure(cell)
            print(cell.name, json.dumps(asdict(found)), flush=True)
            measured[cell.name] = asdict(found)
            measured["when"] = time.strftime("%Y-%m-%d")
            measured["where"] = f"torch {torch.__version__}, {os.cpu_count()} cores"
            arguments.measured.write_text(json.dumps(measured, indent=1) + "\n")
    if arguments.output is not None:
        arguments.output.write_text(write_table(measured, measured.get("soak", "Not measured yet.")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
