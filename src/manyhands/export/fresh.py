"""Runs the verification in a process of its own, so that nothing in this one can help a broken folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from manyhands.errors import EXIT_FAILED, UserError

# A worker's environment would make the fresh process believe that it is a rank.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def verify_in_fresh_process(folder: Path, reference_path: Path, *, base: Path | None = None, probe_path: Path | None = None) -> str:
    """One line that says what was checked and how. UserError (exit code 1) if anything is wrong with ``folder``."""
    command = [sys.executable, "-m", "manyhands.export.verify", str(folder), "--reference", str(reference_path)]
    command += ["--base", str(base)] if base else []
    command += ["--logits", str(probe_path)] if probe_path else []
    environment = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES and not k.startswith("TORCHELASTIC_")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout.strip().splitlines()[-1]
    lines = [line for line in done.stderr.strip().splitlines() if line]
    begin = next((i for i, line in enumerate(lines) if line.startswith("error: ")), None)
    if begin is None:  # a crash: its last line is the exception
        raise UserError(
            "verification crashed", where=str(folder), why=lines[-1] if lines else f"exit code {done.returncode}", exit_code=EXIT_FAILED
        )
    raise _parse_error(lines[begin:], folder)


def _parse_error(lines: list[str], folder: Path) -> UserError:
    named = {
        name: line.strip().removeprefix(f"{name}: ") for line in lines for name in ("where", "why", "do") if line.startswith(f"  {name}: ")
    }
    return UserError(
        lines[0].removeprefix("error: "),
        where=named.get("where", str(folder)),
        why=named.get("why", ""),
        fix=named.get("do", ""),
        details=[line.removeprefix("  - ") for line in lines if line.startswith("  - ")],
        exit_code=EXIT_FAILED,
    )
