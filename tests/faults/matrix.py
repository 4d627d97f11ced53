"""The fault matrix: each fault at a moment of each stage, in real runs, with what it cost; docs/faults.md.

``python -m tests.faults.matrix --limit-s 3600 --at-once 2 --output docs/faults.md`` goes on with the cells of which
there is no row in benchmarks/results/faults.jsonl, in their order (``cells.py``); ``--only`` selects some by parts of
their names, and ``--again`` measures them again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from tests.e2e.runs import NO_VERIFY, Ended, Place, Run, at_step, pause, write_place
from tests.faults import forks
from tests.faults.audit import Audit
from tests.faults.cells import (
    DAMAGES,
    FOREIGN_LOCK,
    LAYOUTS,
    NEXT_START,
    OURS,
    PIECES,
    SECOND,
    TORCHRUN,
    TWO_NODES,
    Cell,
    cells,
)
from tests.faults.page import ROWS, Found, read_hostile, read_rows, read_soaked, write_page
from tests.faults.plants import SMALL_DISK, module_of
from tests.faults.starts import Outcome, Start, Starter, small_disk, two_nodes

TIMEOUT_S = 15  # parallel.timeout_s of these runs
BOUND_S = 30.0  # within which a fault is noticed, after TIMEOUT_S where nothing has ended
MAX_STARTS = 3


@dataclass
class Struck:
    """A cell's starts, and what is known of the fault's time."""

    outcomes: list[Outcome]
    detected_s: float | None = None
    again_s: float | None = None
    asides: list[str] = field(default_factory=list)  # what should have held and did not

    @property
    def ends(self) -> list[Ended]:
        return [outcome.ended for outcome in self.outcomes]


class Matrix:
    """A folder with runs left alone, one for each layout, and those of the cells."""

    def __init__(self, folder: Path) -> None:
        write_place(folder)
        self.place, self.folder = Place(folder), folder
        forks.prepare()
        self.starter = Starter(self.place)

    def audit(self, name: str) -> Path:
        return self.folder / f"{name}.audit"

    def mark(self, cell: Cell) -> Path:
        return self.folder / f"{cell.run_name}.mark"

    # How a run of a cell is started.

    def describe(
        self,
        name: str,
        cell: Cell,
        *,
        is_struck: bool = False,
        is_verified: bool = False,
        plants: dict[str, str] | None = None,
    ) -> Start:
        """The run ``name`` in the layout of a cell and under its launcher; with its fault, if ``is_struck``."""
        file, num_ranks, keys = LAYOUTS.get(cell.layout, ("run.yaml", 2, ()))
        code = "from tests.faults.audit import plant as audit\nimport pathlib\nimport sys\n"
        code += f"audit(sys.modules[__name__], pathlib.Path({str(self.audit(name))!r}))\n"
        planted = {"manyhands.worker.training": code} | ({} if is_verified else NO_VERIFY)
        if is_struck:
            plant = (cell.act, cell.moment, str(self.mark(cell)), num_ranks - 1, zlib.crc32(cell.name.encode()))
            module = module_of(cell.moment)
            code = f"from tests.faults.plants import Plant\nPlant{plant!r}(globals())\n"
            planted[module] = planted.get(module, "") + code
        for module, code in (plants or {}).items():
            planted[module] = planted.get(module, "") + code
        keys = (f"name={name}", f"parallel.timeout_s={TIMEOUT_S}", "log.tensorboard=false", *keys)
        keys += ("launch.restarts=3",) if cell.launcher == OURS else ()
        keys += ("data.workers=1",) if "data worker" in cell.fault else ()
        return Start(cell.launcher, num_ranks, file, keys, planted, is_forked=cell.moment != "start")

    def alone(self, layout: str) -> Run:
        """The run left alone."""
        layout = "LoRA, DDP x2" if layout == TWO_NODES else layout
        name = "alone-" + re.sub(r"\W+", "-", layout)
        if not (self.folder / "runs" / name / "report.json").exists():
            if "ZeRO" in layout:
                forks.prepare("deepspeed")
            outcome = self.starter.run(self.describe(name, Cell("", "", layout)))
            assert outcome.ended.code == 0, outcome.ended.output
        return self.place.run(name)

    # What is done to it.

    def measure(self, cell: Cell) -> Found:
        alone, begin = self.alone(cell.layout), time.monotonic()
        shutil.rmtree(self.folder / "runs" / cell.run_name, ignore_errors=True)
        for path in (self.audit(cell.run_name), self.mark(cell)):
            path.unlink(missing_ok=True)
        with contextlib.ExitStack() as stack:
            variables, output_dir = {}, self.folder / "runs"
            if cell.layout == TWO_NODES:
                stack.enter_context(two_nodes(self.starter))
            if cell.fault == "full disk":
                output_dir = self.folder / "disk"
                variables = stack.enter_context(small_disk(output_dir))
            if cell.moment == NEXT_START:
                struck = self.damage(cell)
            elif cell.fault == SECOND:
                struck = self.start_twice(cell)
            else:
                struck = self.strike(cell, variables, output_dir)
            wrong = struck.asides
            try:
                self.check(cell, alone, struck, Run(output_dir / cell.run_name))
            except (AssertionError, OSError) as error:
                wrong.append(" ".join(str(error).split())[:300])
        audit = self.audit(cell.run_name)
        lost = Audit.read(audit).num_lost() if audit.exists() else 0
        seconds = round(time.monotonic() - begin, 1)
        said = what_was_said(struck.ends)
        codes = [end.code for end in struck.ends]
        return Found(codes, lost, _round(struck.detected_s), _round(struck.again_s), said, "; ".join(wrong), seconds)

    def strike(self, cell: Cell, variables: dict[str, str], output_dir: Path) -> Struck:
        """Until the run has finished: what ends is started again, as a user would."""
        start = self.describe(cell.run_name, cell, is_struck=True, is_verified=cell.moment == "verification")
        if variables:
            keys = (f"output.dir={output_dir}", f"data.cache={output_dir}/cache")
            start = replace(start, arguments=(*start.arguments, *keys))
        struck = Struck([self.starter.run(start, variables)])
        assert self.mark(cell).exists(), f"the fault never happened: {struck.ends[0].output}"
        at = float(self.mark(cell).read_text())
        folder = output_dir / cell.run_name
        first, noticed_at = struck.ends[0], struck.outcomes[0].all_gone_at
        if (folder / "restarts.jsonl").exists():
            noticed_at = json.loads((folder / "restarts.jsonl").read_text().splitlines()[0])["time"]
        elif first.code == 0:
            noticed_at = at  # nothing that had to be noticed
        struck.detected_s = noticed_at - at if noticed_at > at else None
        if first.code == 0 and self.audit(cell.run_name).exists():
            again_at = Audit.read(self.audit(cell.run_name)).resumed_at(at)
            struck.again_s = again_at and again_at - at
        while struck.ends[-1].code != 0 and len(struck.ends) < MAX_STARTS:
            if variables:
                (Path(variables[SMALL_DISK]) / "filler").unlink(missing_ok=True)
            if self.starter.bed is not None:
                self.starter.bed.mend(1)
            struck.outcomes.append(self.starter.run(start, variables))
        bound_s = BOUND_S + TIMEOUT_S * cell.is_stop
        by_writing = cell.act == "fill_disk"  # which nobody notices before the next write
        if struck.detected_s is not None and struck.detected_s > bound_s and not by_writing:
            struck.asides.append(f"noticed after more than {bound_s:g} s")
        names = ("disk is full", "disk space", "No space left on device")
        if variables and first.code and not any(name in first.output for name in names):
            struck.asides.append("the full disk is not named")
        return struck

    def damage(self, cell: Cell) -> Struck:
        """A run that was killed after step 10, one of whose files is damaged before the next start."""
        base = self.folder / "runs" / ("base-" + re.sub(r"\W+", "-", cell.layout))
        if not base.exists():
            kill = "from tests.faults.plants import kill_everything\nkill_everything()"
            plants = at_step(10, kill, rank=LAYOUTS[cell.layout][1] - 1)
            self.starter.run(self.describe(base.name, cell, plants=plants))
            assert (base / "checkpoints/step-000008/manifest.json").exists()
        folder = self.folder / "runs" / cell.run_name
        shutil.copytree(base, folder)
        config = folder / "run.json"
        config.write_text(config.read_text().replace(base.name, cell.run_name))
        shutil.copy(self.audit(base.name), self.audit(cell.run_name))
        start = self.describe(cell.run_name, cell)
        if cell.fault == FOREIGN_LOCK:
            (folder / ".lock").write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
            return Struck([self.starter.run(start)])
        piece, _, how = cell.fault.rpartition(" ")
        path = sorted(folder.glob(PIECES[piece]))[0].resolve()
        kept = path.read_bytes()
        DAMAGES[how](path)
        try:
            return Struck([self.starter.run(start)])
        finally:
            if folder not in path.parents:  # of all runs
                path.write_bytes(kept)

    def start_twice(self, cell: Cell) -> Struck:
        """The same command while the run is in step 2; the first is let go on afterwards."""
        mark = self.folder / "running"
        go_on = at_step(2, pause(mark).replace("self.rank.process.stop()", f"pathlib.Path('{mark}-go').exists()"))
        start, output = self.describe(cell.run_name, cell, plants=go_on), self.place.output
        with self.starter.running(start) as first:
            while not mark.with_name("running-0").exists():
                assert first[0].poll() is None, output.read_text()
                time.sleep(0.02)
            begin = time.monotonic()
            command = ["-m", "manyhands", "train", start.file, *start.arguments]
            second = subprocess.run(
                [sys.executable, *command], cwd=self.folder, env=self.starter.variables, capture_output=True, text=True
            )
            seconds = time.monotonic() - begin
            mark.with_name("running-go").touch()
            ended = self.starter.end(first)
        text = second.stdout + second.stderr
        struck = Struck([ended], seconds)
        if second.returncode == 0 or "Traceback" in text or "error: " not in text:
            struck.asides.append(f"the second launch ended with {second.returncode}: {text[-100:]}")
        struck.outcomes[0] = replace(ended, ended=replace(ended.ended, output=text))
        return struck

    def check(self, cell: Cell, alone: Run, struck: Struck, run: Run) -> None:
        """AssertionError where the run did not end as one left alone."""
        last = struck.ends[-1]
        for outcome in struck.outcomes:
            assert not outcome.left_over, outcome.left_over
        # torchrun prints a rank's traceback itself, in its own table
        outputs = [end.output for end in struck.ends if cell.launcher != TORCHRUN]
        assert not any("Traceback" in output for output in outputs), "a traceback on the terminal"
        if cell.moment == NEXT_START and last.code in (1, 2):  # refused, in words, and nothing else
            assert "error: " in last.output, last.output[-200:]
            return
        assert last.code == 0, f"it did not finish: {last.output[-300:]}"
        outputs = [path.relative_to(alone.folder) for path in alone.folder.glob("*/*.safetensors")]
        outputs = [path for path in outputs if path.parts[0] in ("adapter", "model")]
        assert outputs, "the run left alone wrote nothing"
        for path in outputs:
            assert (run.folder / path).read_bytes() == (alone.folder / path).read_bytes(), f"{path} differs"
        reference, mine = (Audit.read(self.audit(name)) for name in (alone.folder.name, cell.run_name))
        mine.check(reference, alone.read("plans/001.json")["steps_per_epoch"])


def first_line(text: str) -> str:
    """What a user reads first, without folders."""
    lines = text.splitlines()
    for mark in ("restarting", "error:", "resumes", "starts it again", "warning:", "is damaged", "Signal 9"):
        for line in lines:
            if mark in line:
                return re.sub(r"/[^ ;,:']*/", "", line.strip())[:160]
    return ""


def what_was_said(ends: Sequence[Ended]) -> str:
    return next(filter(None, (first_line(end.output) for end in ends)), "")


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("tests.faults.matrix", description=__doc__)
    parser.add_argument("--output", type=Path, help="docs/faults.md")
    parser.add_argument("--limit-s", type=float, default=4 * 3600.0, help="begin no further cell after so long")
    parser.add_argument("--only", nargs="+", default=[""], help="cells whose name contains one of these")
    parser.add_argument("--again", action="store_true", help="also those of which there is a row")
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--at-once", type=int, default=1, help="cells at a time")
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), help=argparse.SUPPRESS)  # this one of so many
    return parser.parse_args(argv)


def measure_all(arguments: argparse.Namespace) -> None:
    begin, measured = time.monotonic(), read_rows(arguments.rows)
    wanted = [cell for cell in cells() if any(part in cell.name for part in arguments.only)]
    wanted = [cell for cell in wanted if arguments.again or cell not in measured]
    mine, num_all = arguments.share
    if not wanted or not arguments.limit_s:
        return
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        matrix = Matrix(Path(folder))
        for cell in wanted[mine::num_all]:
            if time.monotonic() - begin > arguments.limit_s:
                break
            try:
                found = matrix.measure(cell)
            except Exception as error:  # of the measurement: no row, and the next cell
                print(f"{cell.name}: not measured: {error!r}", flush=True)
                continue
            print(cell.name, json.dumps(asdict(found)), flush=True)
            row = asdict(cell) | asdict(found) | {"forked": cell.moment != "start", "when": time.strftime("%Y-%m-%d")}
            row |= {"torch": torch.__version__, "cores": os.cpu_count(), "load": round(os.getloadavg()[0])}
            with arguments.rows.open("a", encoding="utf-8") as file:  # in one write: others append too
                file.write(json.dumps(row) + "\n")


def main(argv: Sequence[str]) -> None:
    arguments = parse_arguments(argv)
    if arguments.at_once > 1:
        command = [sys.executable, "-m", "tests.faults.matrix", *argv, "--at-once", "1", "--share"]
        shares = [[*command, str(index), str(arguments.at_once)] for index in range(arguments.at_once)]
        for process in [subprocess.Popen(share) for share in shares]:
            process.wait()
    else:
        measure_all(arguments)
    if arguments.output is not None and arguments.share[1] == 1:
        page = write_page(read_rows(arguments.rows), read_soaked(), read_hostile())
        arguments.output.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
