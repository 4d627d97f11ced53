"""The site's own client: what it knows of the cluster, whether it would take a job, and submitting it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.submit.job import ClusterJob, Target
from manyhands.submit.slurm import read_gres

CLIENTS: dict[Target, str] = {"slurm": "sbatch", "kubernetes": "kubectl", "skypilot": "sky"}
SHORT_S, LONG_S = 60.0, 1800.0  # SkyPilot uploads what the job reads


def list_gres_types() -> list[str]:
    """SLURM's names for this cluster's kinds of GPUs; none where it cannot be asked."""
    if shutil.which("sinfo") is None:
        return []
    try:
        answer = subprocess.run(
            ["sinfo", "--noheader", "--format=%G"], capture_output=True, text=True, timeout=SHORT_S, check=True
        )
    except (subprocess.SubprocessError, OSError):
        return []
    return read_gres(answer.stdout)


def submit_command(job: ClusterJob, target: Target, file: Path) -> list[str]:
    """What is run in a shell to submit the file."""
    asked = job.asked
    if target == "slurm":
        return ["sbatch", str(file)]
    if target == "kubernetes":
        return ["kubectl", "create", *asked.options, f"--filename={file}"]
    secrets = [f"--secret={name}" for name in asked.secrets]
    return ["sky", "jobs", "launch", "--yes", "--detach-run", *secrets, *asked.options, str(file)]


def check_file(target: Target, file: Path) -> str | None:
    """The client's answer to whether it would take the file, without submitting it. None where it cannot say that:
    without the client, and for the others, which would have to reach the cluster with the job itself.
    """
    if target != "slurm" or shutil.which("sbatch") is None:
        return None
    return _run(["sbatch", "--test-only", str(file)], SHORT_S, "sbatch would refuse this job")


def submit_file(job: ClusterJob, target: Target, file: Path) -> str:
    """Submits it; the client's answer. UserError without the client, or where it refuses."""
    command = submit_command(job, target, file)
    if shutil.which(command[0]) is None:
        raise UserError(
            f"the job was written, but not submitted: {command[0]} is not installed here",
            where=str(file),
            fix=f"where it is, run: {' '.join(command)}",
            exit_code=EXIT_FAILED,
        )
    unset = [name for name in job.asked.secrets if name not in os.environ]
    if target != "kubernetes" and unset:
        raise UserError(
            f"{unset[0]} is not set in this shell",
            where=f"submit.secrets.{unset[0]}",
            why=f"{command[0]} takes the value from here",
            fix=f"export {unset[0]}, or remove the key",
        )
    return _run(command, LONG_S, f"{command[0]} did not take the job")


def _run(command: Sequence[str], timeout_s: float, refused: str) -> str:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{command[0]} has not answered within {timeout_s:.0f} s: whether it took the job is not known",
            where=" ".join(command),
            fix="look at the queue before submitting again",
            exit_code=EXIT_FAILED,
        ) from None
    answer = "\n".join(part.strip() for part in (done.stdout, done.stderr) if part.strip())
    if done.returncode == 0:
        return answer
    raise UserError(
        refused,
        where=" ".join(command),
        why=f"exit code {done.returncode}",
        fix="correct the keys of `submit`; the answer is above",
        details=answer.splitlines()[-10:],
        exit_code=EXIT_FAILED,
    )
