"""Runs the verification in a process of its own, so that nothing of this one's memory can hide a broken folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.core.progress import advance

POLL_S = 0.5
# A worker's environment would make the fresh process believe that it is a rank.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def verify_in_fresh_process(
    folder: Path,
    reference_path: Path,
    *,
    base: Path | None = None,
    probe_path: Path | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> str | None:
    """What was checked and how, in a line; None if ``stop()`` ended it. UserError (exit code 1) for a fault."""
    command = [sys.executable, "-m", "manyhands.export.verify", str(folder), "--reference", str(reference_path)]
    command += ["--base", str(base)] if base else []
    command += ["--logits", str(probe_path)] if probe_path else []
    environment = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES and not k.startswith("TORCHELASTIC_")}
    # A process group of its own: a terminal's Ctrl-C is for us to answer.
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )
    written = _wait(process, stop)
    if written is None:
        return None
    output, errors = written
    if process.returncode == 0:
        return output.strip().splitlines()[-1]
    lines = [line for line in errors.strip().splitlines() if line]
    begin = next((i for i, line in enumerate(lines) if line.startswith("error: ")), None)
    if begin is None:  # a crash: its last line is the exception
        raise UserError(
            "verification crashed",
            where=str(folder),
            why=lines[-1] if lines else f"exit code {process.returncode}",
            exit_code=EXIT_FAILED,
        )
    raise _parse_error(lines[begin:], folder)


def _wait(process: subprocess.Popen[str], stop: Callable[[], bool]) -> tuple[str, str] | None:
    """Its output and errors; None if it was stopped. Processor time and reading count as progress of this rank."""
    used: object = None
    try:
        while True:
            try:
                return process.communicate(timeout=POLL_S)
            except subprocess.TimeoutExpired:
                if stop():
                    return None
                before, used = used, _used(process.pid)
                if used != before:
                    advance()
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def _used(pid: int) -> object:
    """Processor time and bytes read so far."""
    try:
        process = psutil.Process(pid)
        times = process.cpu_times()
        return times.user, times.system, process.io_counters().read_bytes
    except psutil.Error:
        return None


def _parse_error(lines: list[str], folder: Path) -> UserError:
    named = {
        name: line.strip().removeprefix(f"{name}: ")
        for line in lines
        for name in ("where", "why", "fix")
        if line.startswith(f"  {name}: ")
    }
    return UserError(
        lines[0].removeprefix("error: "),
        where=named.get("where", str(folder)),
        why=named.get("why", ""),
        fix=named.get("fix", ""),
        details=[line.removeprefix("  - ") for line in lines if line.startswith("  - ")],
        exit_code=EXIT_FAILED,
    )
