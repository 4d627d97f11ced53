"""What saving and faults cost a run: checkpoints, SIGKILL of ranks, and other numbers of GPUs on the way.

    python -m benchmarks.survive --shape llama1b --gpus 1 --output rows.jsonl
    python -m benchmarks.survive --shape tiny --gpus 2 --length 64 --steps 60 --every 20 --seconds 40      # on a CPU

Each part is a real ``manyhands train`` in processes of its own, on the same random weights and rows, so that losses at
equal steps compare bit for bit. It is ended by SIGKILL when enough is measured, and its row of JSON is written:

- ``undisturbed``: saves nothing while it trains. The others are compared with it.
- ``checkpoint``: saves every ``--save-every`` steps, as ``checkpoint.asynchronous`` does by default.
- ``kills``: a rank that is drawn is killed early in each ``--every`` seconds, for ``--seconds``, once the first of the
  checkpoints each ``--save-every`` steps is there. How many steps are lost, how long it takes until another step is
  done, where the seconds go, and the rate beside the undisturbed one.
- ``resize``: from all GPUs to half of them and back, each time stopped by the file STOP.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.survive_figures import (
    Course,
    Entered,
    Kill,
    choose_kills,
    compare,
    course_of,
    medians,
    rate_after,
    recoveries,
    speed,
    stalls,
    step_rows,
)
from manyhands.bench.case import folder_of, make_config, row_lengths
from manyhands.bench.rows import BenchRow, new_run, say
from manyhands.bench.shapes import SHAPES, write_model_folder, write_rows
from manyhands.bench.summary import lease
from manyhands.core.files import read_rows, write_json
from manyhands.core.machine import end_with
from manyhands.launch.local.heartbeat import Beat, read_beats
from manyhands.launch.restart.restarts import TRAINING
from manyhands.launch.run.folder import RunFolder

LOOK_S = 0.02  # between two looks at the ranks
TAIL_LINES = 12  # of what a failed run wrote, for its row
BETWEEN_KILLS = 3  # steps
SETTLE_S = 60.0  # for processes to be gone after SIGKILL: those of large models take seconds
END_S = 30.0  # of --budget, for the last run to end and its row to be written
MANY_STEPS = 10**6  # no part ends by itself
KEEP_LAST = "checkpoint.keep_last=1"  # of large models few find room on a disk


class RunFailed(Exception):
    """A run has ended that was not to end, or does not go on."""


@dataclass
class LiveRun:
    """A run that ``manyhands train`` carries out in processes of its own, and what is seen of its ranks meanwhile."""

    folder: RunFolder
    process: subprocess.Popen[bytes]
    output: Path
    num_ranks: int
    limit_s: float  # without a step, after which it is given up
    deadline: float = float("inf")  # on the monotonic clock, of all parts together
    beats: dict[int, Beat] = field(default_factory=dict)
    entered: list[Entered] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    old: set[int] = field(default_factory=set)  # processes of attempts that have ended
    next_kill: int = 0  # the step that is to be written before it

    def __post_init__(self) -> None:
        self.old |= {beat.pid for beat in read_beats(self.folder).values()}  # of a start that was stopped

    def look(self) -> None:
        self.beats = read_beats(self.folder)
        first, last = self.beats.get(0), self.entered[-1:]
        if first is not None and [(first.pid, first.stage)] != [(one.pid, one.stage) for one in last]:
            self.entered.append(Entered(first.pid, first.stage, time.time()))
        if self.kills and self.kills[-1].gone is None and not any(is_alive(pid) for pid in self.old):
            self.kills[-1].gone = time.time()

    @property
    def step(self) -> int | None:
        """The last step that all ranks of this attempt have done; None before its first."""
        beats = [beat for beat in self.beats.values() if beat.pid not in self.old and beat.stage in TRAINING]
        steps = [beat.step for beat in beats if beat.step is not None]
        return min(steps) if len(steps) == self.num_ranks else None

    def follow(self, until: Callable[[], bool]) -> None:
        """Looks at the ranks again and again, until something is the case. RunFailed where the run ends before."""
        step, since = self.step, time.monotonic()
        while not until():
            if self.process.poll() is not None:
                raise RunFailed(f"exit code {self.process.returncode}: {self.tail()}")
            if time.monotonic() > self.deadline:
                raise RunFailed(f"the time of --budget is over, at step {step}")
            if time.monotonic() - since > self.limit_s:
                raise RunFailed(f"no further step after step {step} in {self.limit_s:g} s: {self.tail()}")
            time.sleep(LOOK_S)
            self.look()
            if self.step != step:
                step, since = self.step, time.monotonic()

    def reach(self, step: int) -> None:
        self.follow(lambda: (self.step or 0) >= step)

    def train_until(self, at: float) -> None:
        """Until this time, in seconds since 1970, and until ``BETWEEN_KILLS`` steps after that of the last kill are in
        metrics.jsonl: a launcher that sees the same end at the same step twice takes it for a fault of the run, and
        rows that are not written yet die with their rank.
        """
        self.follow(lambda: time.time() >= at and self.step is not None and self.has_recovered)

    @property
    def has_recovered(self) -> bool:
        """Whether ``BETWEEN_KILLS`` steps after that of the last kill are in metrics.jsonl."""
        return self.last_written() >= self.next_kill

    def last_written(self) -> int:
        """The newest step in metrics.jsonl."""
        return max((row["step"] for row in step_rows(self.rows())), default=0)

    def kill(self, rank: int) -> None:
        """SIGKILL to one rank that trains."""
        self.look()
        self.next_kill = self.last_written() + BETWEEN_KILLS
        pids = {beat.pid for beat in self.beats.values()}
        self.kills.append(Kill(rank, time.time()))
        os.kill(self.beats[rank].pid, signal.SIGKILL)
        self.old |= pids

    def stop(self) -> float:
        """By the file STOP; the run is saved. Seconds that it took."""
        begin = time.monotonic()
        self.folder.stop_file.touch()
        try:
            self.process.wait(self.limit_s)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"not stopped after {self.limit_s:g} s: {self.tail()}") from None
        return time.monotonic() - begin

    def end(self) -> None:
        """SIGKILL to the launcher and all that it has started; nothing is saved."""
        if self.process.poll() is None:
            launcher = psutil.Process(self.process.pid)
            family = [launcher, *launcher.children(recursive=True)]  # psutil kills none that has got another's number
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(family[1:], SETTLE_S)
        self.process.wait()

    def tail(self) -> str:
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-TAIL_LINES:])

    def rows(self) -> list[dict[str, Any]]:
        return read_rows(self.folder.metrics)


def is_alive(pid: int) -> bool:
    """Also where its first thread has ended: the last one of a process gives its memory back, which takes seconds."""
    return psutil.pid_exists(pid)


class Survival:
    """The parts of one call, in order. Each ends with a row."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.deadline = time.monotonic() + options.budget - END_S
        self.work = BenchRow("survive", "", options.shape, options.method, options.gpus, length=options.length)
        self.file, self.runs = write_place(options, self.work)
        with ProcessPoolExecutor(1) as other:  # CUDA starts in no process that lasts
            self.shared: dict[str, Any] = {
                "run": options.run,
                **other.submit(lease).result(),
                "torch": torch.__version__,
            }
        self.shared |= {name: getattr(options, name) for name in ("shape", "layers", "method", "gpus", "length")}
        self.shared |= {"samples": options.samples, "by_hand": options.keys, "seed": options.seed}
        self.course: Course = {}  # of the parts so far: the first one to do a step counts
        self.undisturbed_speed: dict[str, Any] = {}

    def run_all(self) -> None:
        for part in self.options.parts:
            begin = time.monotonic()
            try:
                row = getattr(self, part)()
            except (RunFailed, ValueError) as error:
                row = {"failed": str(error)}
            shutil.rmtree(self.runs / part / "checkpoints", ignore_errors=True)
            took_s = round(time.monotonic() - begin, 1)
            say({**self.shared, "part": part, **row, "took_s": took_s}, self.options.output)

    # The parts. Each returns the fields of its row.

    def undisturbed(self) -> dict[str, Any]:
        run = self.train("undisturbed", num_steps=max(self.options.steps, self.options.undisturbed_steps))
        self.undisturbed_speed = speed(run.rows(), self.options.warm)
        return self.undisturbed_speed | self.about(run)

    def checkpoint(self) -> dict[str, Any]:
        every = self.options.save_every
        run = self.start("checkpoint", f"checkpoint.every_steps={every}", KEEP_LAST)
        try:
            run.reach(self.options.steps)
            run.follow(lambda: any(self.options.steps - every < step for step in saved_steps(run)))
        finally:
            run.end()
        return {"save_every": every, **stalls(run.rows(), self.options.warm, every), **self.about(run)}

    def kills(self) -> dict[str, Any]:
        options = self.options
        keys = (f"checkpoint.every_steps={options.save_every}", KEEP_LAST, "launch.restarts=1000")
        run, failed = self.start("kills", *keys), {}
        try:
            run.reach(options.warm)
            run.follow(lambda: bool(saved_steps(run)))
            begin, left = time.time(), self.deadline - time.monotonic()  # a row is written whatever the budget
            seconds = min(options.seconds, left - 1.0)
            for offset, rank in choose_kills(options.gpus, options.every, seconds, options.seed):
                run.train_until(begin + offset)
                if time.time() < begin + seconds:
                    run.kill(rank)
            run.follow(lambda: time.time() >= begin + seconds)
            last = self.deadline - 1.0  # the last kill has its recovery too, where the call has time for it
            run.follow(lambda: run.has_recovered or time.monotonic() > last)
        except RunFailed as error:
            if not run.kills:
                raise
            failed = {"failed": str(error)}
        finally:
            run.end()
        found = recoveries(run.kills, read_rows(run.folder.restarts), run.entered, run.rows())
        rate, before = rate_after(run.rows(), begin), self.undisturbed_speed.get("tokens_per_s")
        known = max(self.course, default=0)
        return failed | {
            "every_s": options.every,
            "seconds": round(run.rows()[-1]["time"] - begin, 1),
            "num_kills": len(run.kills),
            "num_recovered": len(found),
            "num_compared": sum((one.from_step or 0) < known for one in found),  # with losses of a part before
            "lost_steps": [one.lost_steps for one in found],
            "recovery_s": [one.seconds for one in found],
            "median_recovery_s": round(statistics.median(one.seconds for one in found), 2) if found else None,
            "stages_s": medians(one.stages for one in found),
            "tokens_per_s": round(rate, 1),
            "rate_percent": round(100 * rate / before, 2) if before else None,
            "recoveries": [asdict(one) for one in found],
            **self.about(run),
        }

    def resize(self) -> dict[str, Any]:
        options, stops, resized_at = self.options, [], []
        sizes, run = (options.gpus, max(1, options.gpus // 2), options.gpus), None
        for number, num_ranks in enumerate(sizes):
            run = self.start("resize", num_ranks=num_ranks, resumes=number > 0)
            try:
                run.reach(options.steps * (number + 1) // len(sizes))
                if number + 1 < len(sizes):
                    stops.append(round(run.stop(), 1))
                    resized_at.append(run.folder.newest_step())
            finally:
                run.end()
        assert run is not None
        return {"sizes": sizes, "stop_s": stops, "resized_at": resized_at, **self.about(run)}

    # What they have in common.

    def train(self, name: str, *keys: str, num_steps: int = 0) -> LiveRun:
        """Starts a run and ends it after ``num_steps``, else ``--steps``."""
        run = self.start(name, *keys)
        try:
            run.reach(num_steps or self.options.steps)
        finally:
            run.end()
        return run

    def start(self, name: str, *keys: str, num_ranks: int | None = None, resumes: bool = False) -> LiveRun:
        """Starts a run with further keys, in a new folder unless it ``resumes``."""
        num_ranks = num_ranks or self.options.gpus
        output, folder = self.runs / f"{name}.log", RunFolder(self.runs / name)
        if not resumes:
            shutil.rmtree(folder.path, ignore_errors=True)
            output.unlink(missing_ok=True)
        command = [sys.executable, "-m", "manyhands", "train", str(self.file), f"name={name}"]
        parent = os.getpid()
        with output.open("ab") as file:
            process = subprocess.Popen(
                [*command, f"parallel.gpus={num_ranks}", *keys],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: end_with(parent, signal.SIGTERM),
            )
        return LiveRun(folder, process, output, num_ranks, self.options.limit_s, self.deadline)

    def about(self, run: LiveRun) -> dict[str, Any]:
        """Losses beside those of the parts before, and what the plan of the run has decided."""
        course, plan = course_of(run.rows()), run.folder.read_plan()
        compared = compare(self.course, course) if self.course else {}
        self.course = course | self.course
        of_layout = ("strategy", "activation_checkpointing", "offload", "compile", "micro_tokens", "micro_samples")
        decided = {name: getattr(plan.layout, name) for name in of_layout}
        last = max(course, default=None)
        return {"last_step": last, **compared, **decided, "async_checkpoints": plan.async_checkpoints}


def saved_steps(run: LiveRun) -> list[int]:
    return [row["step"] for row in run.rows() if row["kind"] == "checkpoint"]


def write_place(options: argparse.Namespace, work: BenchRow) -> tuple[Path, Path]:
    """The model's folder, rows and the run file, written where they are missing; and the folder of the runs."""
    folder = folder_of(options.folder, work, options.layers)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        write_model_folder(folder / "model", work.shape, options.layers)
    rows = folder / f"{work.data}-{work.length}.jsonl"
    write_rows(rows, row_lengths(work, None, options.samples))
    keys = [f"batch.samples={options.samples}", f"stop.epochs={MANY_STEPS}", "checkpoint.every_steps=0"]
    config = make_config(folder, work, options.gpus, MANY_STEPS, [*keys, *options.keys])
    file = folder / "run.json"
    write_json(file, config.model_dump(mode="json", exclude_unset=True) | {"seed": options.seed})
    runs = Path(config.output.dir)
    runs.mkdir(parents=True, exist_ok=True)
    return file, runs


PARTS = ("undisturbed", "checkpoint", "kills", "resize")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama1b")
    parser.add_argument("--layers", type=int, help="only so many blocks")
    parser.add_argument("--method", choices=["full", "lora", "qlora"], default="full")
    parser.add_argument("--gpus", type=int, default=1, help="on a CPU: processes")
    parser.add_argument("--length", type=int, default=4096, help="tokens a sample")
    parser.add_argument("--samples", type=int, default=8, help="samples a step, of all GPUs together")
    parser.add_argument("--parts", default=",".join(PARTS[:-1]), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--steps", type=int, default=60, help="of each part but kills")
    parser.add_argument(
        "--undisturbed-steps", type=int, default=0, help="of undisturbed, if more: as far as kills are to be compared"
    )
    parser.add_argument("--warm", type=int, default=5, help="first steps that no figure contains")
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints of the parts that save")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two kills")
    parser.add_argument("--seconds", type=float, default=600.0, help="of the part kills, from its first steps on")
    parser.add_argument("--limit-s", type=float, default=400.0, help="without a step, after which a run is given up")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds of the call")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and kills")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "manyhands-survive")
    parser.add_argument("--output", type=Path, help="JSONL file to append the rows to")
    parser.add_argument("--run-name", dest="run", default=new_run(), help="name of the call that the rows belong to")
    parser.add_argument("keys", nargs="*", metavar="section.key=value", help="further keys of the run file")
    options = parser.parse_args(arguments)
    options.parts = options.parts.split(",")
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))} are none of {', '.join(PARTS)}")
    return options


if __name__ == "__main__":
    Survival(parse()).run_all()
