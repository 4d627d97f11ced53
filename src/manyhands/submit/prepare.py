"""From a run file's config to a job's files in the run's folder: the plan for the GPUs requested, and what follows; and
the site's own client: what it knows of the cluster, whether it would take a job, and submitting it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from manyhands.config.schema import RunConfig, Section
from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.core.files import write_atomically
from manyhands.facts.types import HostFacts
from manyhands.launch.run.folder import RunFolder, refuse_unusable
from manyhands.launch.run.prepare import gather_facts
from manyhands.launch.run.rehearsal import rehearse
from manyhands.launch.run.resume import find_run, folder_of
from manyhands.planner.search import plan as make_plan
from manyhands.planner.types import Plan
from manyhands.submit.job import ClusterJob, Target, describe_job, under_volume
from manyhands.submit.kubernetes import write_manifest
from manyhands.submit.skypilot import write_task
from manyhands.submit.slurm import read_gres, write_script

FILES: dict[Target, str] = {"slurm": "slurm.sh", "kubernetes": "trainjob.yaml", "skypilot": "skypilot.yaml"}
CLIENTS: dict[Target, str] = {"slurm": "sbatch", "kubernetes": "kubectl", "skypilot": "sky"}
LOG = "jobs.jsonl"  # in ``submit/``: what clients have answered
SHORT_S, LONG_S = 60.0, 1800.0  # SkyPilot uploads what the job reads


@dataclass(frozen=True)
class JobFiles:
    """A job whose files are written. ``plan``: None where it was left out."""

    job: ClusterJob
    file: Path
    text: str
    plan: Plan | None


def write_job(
    config: RunConfig, target: Target, host: HostFacts, *, with_plan: bool = True, report: Callable[[str], None]
) -> JobFiles:
    """Plans for ``host`` and writes job and run into ``submit/``. UserError for what run or cluster would refuse."""
    config = _for_job(config, target)
    if find_run(folder_of(config), config) == "finished":
        raise UserError("this run is finished: there is nothing to submit", where=str(folder_of(config).path))
    plan = None
    if with_plan:
        plan = make_plan(config, gather_facts(config, host=host, identify=False, report=report))
        rehearse(config, plan)
    files = _files_of(config)
    names = (re.fullmatch(r"run-(\d+)\.json", path.name) for path in files.glob("run-*.json"))
    number = 1 + max((int(name[1]) for name in names if name), default=0)
    job = describe_job(config, plan, host, files, number=number)
    run = config.model_dump_json(indent=2, exclude_unset=True) + "\n"
    text = {
        "slurm": lambda: write_script(job, list_gres_types()),
        "kubernetes": lambda: write_manifest(job, run),
        "skypilot": lambda: write_task(job),
    }[target]()
    file = files / FILES[target]
    with refuse_unusable(folder_of(config)):
        files.mkdir(parents=True, exist_ok=True)
        write_atomically(job.run_json, run)
        write_atomically(file, text)
    return JobFiles(job, file, text, plan)


def log_submission(written: JobFiles, target: Target, answer: str) -> None:
    """Remembers what the client has answered."""
    entry = {"time": time.time(), "to": target, "number": written.job.number, "answer": answer}
    with open(written.job.files / LOG, "a", encoding="utf-8") as log:
        log.write(json.dumps(entry) + "\n")


def _for_job(config: RunConfig, target: Target) -> RunConfig:
    """The run as the job reads it, from any folder. Machines without a shared home have the token cache beside runs."""
    folder = Path(config.output.dir).expanduser().absolute()
    changes: dict[str, Section] = {"output": config.output.model_copy(update={"dir": str(folder)})}
    if target != "slurm" and "cache" not in config.data.model_fields_set:
        changes["data"] = config.data.model_copy(update={"cache": str(folder / "cache")})
    return config.model_copy(update=changes)


def _files_of(config: RunConfig) -> Path:
    """``submit/`` of the run's folder, or of one below ``runs`` where that is on a volume that is not mounted here."""
    folder = folder_of(config)
    if under_volume(config.output.dir, config.submit) and not Path(config.output.dir).exists():
        folder = RunFolder(Path("runs").absolute() / config.name)
    return folder.submit


def list_gres_types() -> list[str]:
    """SLURM's names for this cluster's kinds of GPUs; none where sinfo does not answer."""
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
    section = job.section
    if target == "slurm":
        return ["sbatch", str(file)]
    if target == "kubernetes":
        return ["kubectl", "create", *section.options, f"--filename={file}"]
    secrets = [f"--secret={name}" for name in section.secrets]
    return ["sky", "jobs", "launch", "--yes", "--detach-run", *secrets, *section.options, str(file)]


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
            fix=f"where it is, run: {shlex.join(command)}",
            exit_code=EXIT_FAILED,
        )
    unset = [name for name in job.section.secrets if name not in os.environ]
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
            where=shlex.join(command),
            fix="look at the queue before submitting again",
            exit_code=EXIT_FAILED,
        ) from None
    answer = "\n".join(part.strip() for part in (done.stdout, done.stderr) if part.strip())
    if done.returncode == 0:
        return answer
    raise UserError(
        refused,
        where=shlex.join(command),
        why=f"exit code {done.returncode}",
        fix="correct the keys of `submit`; the answer is above",
        details=answer.splitlines()[-10:],
        exit_code=EXIT_FAILED,
    )
