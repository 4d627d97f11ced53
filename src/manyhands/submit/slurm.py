"""The batch script for SLURM: ``srun`` starts `manyhands train` on each node, which starts a worker for each GPU.

Before the time limit SLURM sends SIGUSR1 to the run, which saves and ends with exit code 138; the script then queues
its job again, which resumes. A start that has saved nothing is not queued again, so that no job goes round for ever.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from manyhands.core.errors import EXIT_SAVED, UserError
from manyhands.core.limits import GIB
from manyhands.facts.gpu_kinds import kinds_named
from manyhands.submit.job import ClusterJob, local_paths, under_volume

TEMPLATE = Path(__file__).with_name("slurm.sh.jinja")


def write_script(job: ClusterJob, known_types: Sequence[str] = ()) -> str:
    """``known_types``: GRES types of the cluster's GPUs, as ``sinfo`` lists them; none where it is not known."""
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["quote"] = shlex.quote
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        job=job,
        options=_options(job, known_types),
        checkpoints=str(_on_host(job.folder / "checkpoints", job)),
        step=_step(job),
        saved=EXIT_SAVED,
    )


def _options(job: ClusterJob, known_types: Sequence[str]) -> list[str]:
    section = job.section
    options = [
        f"--job-name={job.name}",
        f"--nodes={job.num_nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={job.cores * job.num_per_node}",
        "--requeue",
        "--open-mode=append",
        # in the pattern of a file name % begins a replacement
        "--output=" + shlex.quote(str(job.files).replace("%", "%%") + "/slurm-%j.log"),
    ]
    if job.gpu is not None:
        name = section.gpu_type or gres_type(job.gpu.name, known_types)
        options.append(f"--gres=gpu:{name}:{job.num_per_node}")
    if job.host_bytes is not None:
        options.append(f"--mem={-(-job.host_bytes // GIB)}G")
    if job.time_limit_s is not None:
        options += [f"--time={_clock(job.time_limit_s)}", f"--signal=USR1@{job.save_before_s}"]
    for name in ("partition", "account"):
        if (value := getattr(section, name)) is not None:
            options.append(f"--{name}={shlex.quote(value)}")
    for option in options:  # a comment to the shell: no quote holds a line together there
        if re.search(r"[\x00-\x1f\x7f]", option):
            raise UserError(
                "a path with a line break or another control character cannot stand in a job script",
                where=f"#SBATCH {option!r}",
                fix="set output.dir to another folder",
            )
    return options + list(section.options)


def _step(job: ClusterJob) -> list[str]:
    """``srun``'s arguments. Its --cpus-per-task is not inherited from the job (SLURM 22.05 and later)."""
    step = [f"--cpus-per-task={job.cores * job.num_per_node}"]
    if job.section.image is not None:
        outside = {str(job.files): str(job.files), str(job.folder.parent): str(job.folder.parent)}
        outside |= {path: path for _, path in local_paths(job.config) if not under_volume(path, job.section)}
        outside |= job.section.volumes
        mounts = ",".join(f"{source}:{mount}" for mount, source in outside.items())
        step += [f"--container-image={shlex.quote(job.section.image)}", f"--container-mounts={shlex.quote(mounts)}"]
    chosen_by_job = job.section.image is not None or job.section.setup
    python = job.section.python or ("python3" if chosen_by_job else sys.executable)
    return [*step, f"{shlex.quote(python)} -u -m manyhands train {shlex.quote(str(job.run_json))}"]


def _on_host(path: Path, job: ClusterJob) -> Path:
    """Where the script, which is in no container, finds a path of the run."""
    for mount, source in job.section.volumes.items():
        if job.section.image is not None and path.is_relative_to(mount):
            return Path(source) / path.relative_to(mount)
    return path


def gres_type(kind: str, known_types: Sequence[str] = ()) -> str:
    """What this cluster calls GPUs of the kind: the type that means it, or the kind without its memory, in lower case.

    Sites name the types themselves; ``h100`` and ``nvidia_h100_80gb_hbm3`` are common.
    """
    for name in known_types:
        if kind in kinds_named(name):
            return name
    return re.sub(r"-\d+gb$", "", kind.lower()).replace("-", "_")


def read_gres(text: str) -> list[str]:
    """Types of GPUs in the output of ``sinfo --noheader --format=%G``: ``gpu:h100:8(S:0-1),gpu:a100:2`` and so on."""
    names = (entry.split(":") for line in text.splitlines() for entry in line.strip().split(","))
    found = (parts[1] for parts in names if parts[0] == "gpu" and len(parts) > 2)
    return list(dict.fromkeys(found))


def _clock(seconds: int) -> str:
    """SLURM's ``D-HH:MM:SS``."""
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{f'{days}-' if days else ''}{hour:02}:{minute:02}:{second:02}"
