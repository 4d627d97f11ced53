"""The plan's memory and time beside what runs take: cases measured on this machine, one row each.

    python -m benchmarks.foresight measure --output rows.jsonl --budget 540 [--have FILE ...]   # as many as fit in time
    python -m benchmarks.foresight fit ROWS ... [--check] [--write]     # today's estimates of them; refits constants
    python -m benchmarks.foresight report ROWS ...                      # docs/planner-accuracy.md
    python -m benchmarks.foresight list

Every case is a process group of its own with a time limit, so that one that hangs or runs out of memory costs itself;
its row is appended as it comes. Cases that a file of ``--have`` or the output holds, from GPUs of this kind, are not
measured again. The cases of most GPUs come first; those of fewer run side by side on GPUs of their own, and their rows
say how many ran beside them (``beside``). Cases of one GPU prepare all that needs none while others hold the GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.foresight_cases import BY_NAME, CASES, TRIALS, Case
from manyhands.bench.rows import append, count_gpus, new_run, read, start_processes
from manyhands.facts.host import read_host_facts

LIMIT_S = 200  # of one case
END_S = 8  # left for the processes of a case to end


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options = parse()
    if options.command == "list":
        for case in CASES:
            print(f"{'held out' if case.is_held_out else 'fitted':9} {case.gpus} GPU(s)  {case.name}")
        return 0
    if options.command == "fit":
        return fit_rows(options)
    if options.command == "report":
        return write_report(options)
    return Schedule(options).run()


def fit_rows(options: argparse.Namespace) -> int:
    from benchmarks.foresight_fit import by_group, describe_errors, errors_of, fit, print_rows, read_rows, write_fitted
    from manyhands.planner.time.rates import load_fitted

    rows = read_rows(options.rows)
    seen = [row for row in rows if row.group == "fitted"]
    fitted = fit(seen, load_fitted()) if seen and not options.check else load_fitted()
    print_rows(rows, fitted)
    for name, some in by_group(rows).items():
        memory, seconds = errors_of(some, fitted)
        print(f"{name}: memory {describe_errors(memory)}; seconds {describe_errors(seconds)}")
    print(fitted)
    if options.write:
        write_fitted(fitted)
    return 0


def write_report(options: argparse.Namespace) -> int:
    from benchmarks.foresight_fit import read_rows, report
    from manyhands.planner.time.rates import load_fitted

    written = options.page.read_text() if options.page.exists() else ""
    _, heading, on_cpus = written.partition("\n## On CPUs\n")  # by hand
    options.page.write_text(report(read_rows(options.rows), load_fitted()) + heading + on_cpus)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the cases")
    fitting = commands.add_parser(
        "fit", help="estimate measured cases again, and fit the constants of planner/time/fitted.toml"
    )
    fitting.add_argument("rows", type=Path, nargs="+")
    fitting.add_argument("--check", action="store_true", help="fit nothing: only say how good the estimates are")
    fitting.add_argument("--write", action="store_true", help="write the constants")
    reporting = commands.add_parser("report", help="write the page on accuracy")
    reporting.add_argument("rows", type=Path, nargs="+")
    reporting.add_argument("--page", type=Path, default=Path("docs/planner-accuracy.md"))
    measure = commands.add_parser("measure", help="measure cases on this machine")
    measure.add_argument("--output", type=Path, required=True, help="JSONL file to append the rows to")
    measure.add_argument("--have", type=Path, nargs="*", default=[], help="files whose cases are not measured again")
    measure.add_argument("--budget", type=float, default=540, help="seconds in which all has ended")
    measure.add_argument("--gpus", type=int, help="use at most so many GPUs; 0 tries the command on a CPU")
    measure.add_argument("--only", type=int, nargs="+", help="cases of these numbers of GPUs alone")
    measure.add_argument("--case", nargs="+", choices=sorted(BY_NAME), metavar="CASE", help="these cases alone")
    measure.add_argument("--calibrate", action="store_true", help="first, half a minute: what the GPUs sustain")
    measure.add_argument("--kept", action="store_true", help="also what is kept for the backward pass; compiles again")
    measure.add_argument("--alone", action="store_true", help="never two cases side by side")
    return parser.parse_args()


class Schedule:
    """Gives free GPUs to cases until the time is over."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.begin, self.run_name = options, time.monotonic(), new_run()
        on_cpu = options.gpus == 0
        num_gpus = count_gpus() if options.gpus is None else options.gpus
        gpus = read_host_facts().gpus
        gib = min((gpu.memory_bytes / 2**30 for gpu in gpus), default=0.0)
        device = gpus[0].name if gpus and not on_cpu else "cpu"
        self.free = list(range(num_gpus)) or [0, 0]  # on a CPU: no GPU, two processes
        self.on_cpu = on_cpu or num_gpus == 0
        self.lock, self.changed = threading.Lock(), threading.Condition()
        self.running = 0
        self.staged: Case | None = None  # started, and waiting for a GPU
        self.failed: list[str] = []
        done = {
            row["case"]
            for file in [*options.have, options.output]
            for row in read(file)
            if "case" in row and "failure" not in row and row.get("device", device) == device
        }
        asked = [BY_NAME[name] for name in options.case or []]
        cases = asked or (list(TRIALS) if self.on_cpu else list(CASES))
        self.pending = sorted(
            (
                case
                for case in cases
                if case.name not in done
                and case.gpus <= len(self.free)
                and (self.on_cpu or case.gib <= gib)
                and (not options.only or case.gpus in options.only)
            ),
            key=lambda case: -case.gpus,
        )

    def left_s(self) -> float:
        return float(self.options.budget) - (time.monotonic() - self.begin)

    def run(self) -> int:
        if not self.on_cpu and self.options.calibrate:
            self.calibrate()
        threads: list[threading.Thread] = []
        with self.changed:
            while True:
                if self.staged is None and (case := self.next_case()) is not None:
                    self.pending.remove(case)
                    self.staged = case if case.gpus == 1 else None
                    gpus = [] if case.gpus == 1 else self.take(case.gpus)
                    threads.append(threading.Thread(target=self.measure, args=(case, gpus), daemon=True))
                    threads[-1].start()
                elif self.running or self.staged is not None:
                    self.changed.wait(timeout=5)
                else:
                    break
        for thread in threads:
            thread.join()
        for case in self.pending:
            print(f"not begun: {case.name}", flush=True)
        return 1 if self.failed else 0

    def take(self, num_gpus: int) -> list[int]:
        self.running += 1
        return [self.free.pop(0) for _ in range(num_gpus)]

    def wait_for_gpu(self) -> list[int]:
        """Of the staged case: until a GPU is free."""
        with self.changed:
            while not self.free or (self.options.alone and self.running):
                self.changed.wait(timeout=5)
            self.staged = None
            self.changed.notify_all()
            return self.take(1)

    def variables(self, gpus: list[int]) -> dict[str, str]:
        """Of the processes of a case that has begun on ``gpus``."""
        visible = {} if self.on_cpu else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, visible_gpus(gpus)))}
        return visible | {"FORESIGHT_BESIDE": str(self.running - 1)}

    def calibrate(self) -> None:
        """What the GPUs sustain in this call, as ``manyhands doctor --calibrate`` has it: a row of its own."""
        output, found = start_processes("manyhands.bench.calibrate", [], 1, LIMIT_S)
        row = {"calibration": found} if found else {"failure": f"calibration: {failure_of(output)}"}
        append(self.options.output, row | {"run": self.run_name})
        print(f"{time.monotonic() - self.begin:5.0f} s  calibration: {found or row['failure']}", flush=True)

    def next_case(self) -> Case | None:
        """The first that fits into the free GPUs and the time, or of one GPU, which may wait for it; None: wait, or
        end."""
        if self.options.alone and self.running and self.pending and self.pending[0].gpus > 1:
            return None
        room, left = len(self.free), self.left_s()
        fitting = (case for case in self.pending if case.gpus <= max(room, 1) and case.cost_s <= left)
        found = next(fitting, None)
        # GPUs are kept free for larger cases as long as there are any that still fit in time
        larger = any(case.gpus > room and case.cost_s <= left and case.gpus > 1 for case in self.pending)
        return None if found is not None and larger and self.running and found.gpus < self.pending[0].gpus else found

    def measure(self, case: Case, gpus: list[int]) -> None:
        """``gpus``: those that it has; empty where it is staged and takes one when one is free."""
        start, is_staged = time.monotonic(), not gpus

        def begin() -> tuple[str, float]:
            nonlocal start, gpus
            gpus = gpus or self.wait_for_gpu()
            start = time.monotonic()
            print(f"{start - self.begin:5.0f} s  {case.name}: begins on {gpus}", flush=True)
            return f"{json.dumps(self.variables(gpus))}\n", max(1, min(LIMIT_S, self.left_s() - END_S))

        module, arguments = "benchmarks.foresight_case", ["--case", case.name]
        arguments += ["--kept"] if self.options.kept else []
        if is_staged:
            output, found = start_processes(module, [*arguments, "--staged"], 1, LIMIT_S, wait=begin)
        else:
            output, found = start_processes(module, arguments, case.gpus, begin()[1], self.variables(gpus))
        reason = failure_of(output)
        if found is None:
            log = self.options.output.with_name(f"failed-{sorted(BY_NAME).index(case.name)}.log")
            log.write_text(f"{case.name}\n{output[-20_000:]}")
        seconds = round(time.monotonic() - start)
        row: dict[str, Any] = found or {
            "case": case.name,
            "gpus": case.gpus,
            "failure": reason,
            "output": output[-3000:],
        }
        with self.lock:
            append(self.options.output, row | {"run": self.run_name, "seconds": seconds})
        print(
            f"{time.monotonic() - self.begin:5.0f} s  {case.name}: {describe(found, reason)}, {seconds} s", flush=True
        )
        with self.changed:
            self.free = sorted(self.free + gpus)
            self.running -= 1
            self.failed += [] if found else [case.name]
            self.changed.notify_all()


def visible_gpus(indices: list[int]) -> list[str]:
    """What CUDA_VISIBLE_DEVICES names at these places, where it is set."""
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return [named[index] if named else str(index) for index in indices]


def failure_of(output: str) -> str:
    lines = [line for line in output.strip().splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "error:" in line or "refused" in line]
    telling = [line for line in telling if "ChildFailedError" not in line] or telling
    return (telling or lines or ["it wrote nothing"])[-1][:400]


def describe(found: dict[str, Any] | None, reason: str) -> str:
    if found is None:
        return f"no result: {reason}"
    held = found["peak_reserved_gib"] and round(found["peak_reserved_gib"] + (found["outside_gib"] or 0), 2)
    planned_s = found.get("planned_step_s")
    return (
        f"{held} GiB held, {found['planned_gib']} planned; {found['step_s']} s a step, "
        f"{planned_s and round(planned_s, 4)} planned"
    )


if __name__ == "__main__":
    sys.exit(main())
