"""The task for SkyPilot: a managed job, which is started again on other machines when its own are taken away.

The run's folder is on a bucket or volume, so that it resumes there. Local model and data are uploaded with the task.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from manyhands.core.errors import UserError
from manyhands.submit.job import ClusterJob, local_paths, refuse_lost_folder, to_yaml, under_volume

RUN_JSON = "~/manyhands-run.json"
PORT = 29500
GRACE_S = 60  # torchrun waits 30 s for its workers, which save within 20
# Where SkyPilot's name is not ours.
NAMES = {
    "H100-80GB": "H100",
    "H100-PCIe": "H100",
    "A100-40GB": "A100",
    "A100-PCIe-80GB": "A100-80GB",
    "V100-16GB": "V100",
    "RTX-A6000": "RTXA6000",
    "RTX-6000-Ada": "RTX6000-Ada",
}


def write_task(job: ClusterJob) -> str:
    """UserError for what a rented machine would not find, or would lose."""
    section = job.section
    refuse_lost_folder(job.config, "a rented machine")
    if section.image is None and not section.setup:
        raise UserError(
            "nothing installs manyhands on the machines",
            where="submit.setup, submit.image",
            fix="write submit.setup: ['pip install ...'], or submit.image with an image that has it",
        )
    resources: dict[str, Any] = {}
    if job.gpu is not None:
        resources["accelerators"] = f"{section.gpu_type or NAMES.get(job.gpu.name, job.gpu.name)}:{job.num_per_node}"
    if job.host_bytes is not None:
        resources["memory"] = f"{-(-job.host_bytes // 10**9)}+"
    if section.image is not None:
        resources["image_id"] = section.image if ":" in section.image.split("/")[0] else f"docker:{section.image}"
    buckets = {path: source for path, source in section.volumes.items() if "://" in source}
    if job.num_nodes > 1 and any(Path(job.config.output.dir).is_relative_to(path) for path in buckets):
        raise UserError(  # none would see the others' checkpoints in time
            "several machines cannot share a run's folder that is on a bucket",
            where=f"output.dir: {job.config.output.dir}",
            why="each writes to the bucket through a cache of its own",
            fix="write output.dir on a volume (`sky volumes`), or take the GPUs of one machine",
        )
    disks = {path: source for path, source in section.volumes.items() if path not in buckets}
    mounts: dict[str, Any] = {RUN_JSON: str(job.run_json)}
    mounts |= {path: path for _, path in local_paths(job.config) if not under_volume(path, section)}
    # MOUNT alone cannot rename, by which a checkpoint is completed.
    mounts |= {path: {"source": source, "mode": "MOUNT_CACHED"} for path, source in buckets.items()}
    task: dict[str, Any] = {
        "name": job.name,
        "num_nodes": job.num_nodes,
        "resources": resources,
        "envs": section.environment,
        "secrets": dict.fromkeys(section.secrets),
        "volumes": disks,
        "file_mounts": mounts,
        # Not as SkyPilot's `setup`, whose shell is another one: what it activates or exports would not reach the run.
        "run": "\n".join((*(("set -e", *section.setup) if section.setup else ()), _command(job))),
    }
    task = {key: value for key, value in task.items() if value}
    return to_yaml(job, task)


def _command(job: ClusterJob) -> str:
    """torchrun on every machine. The limit is of one start: a restarted job gets the full limit again."""
    limit = "" if job.time_limit_s is None else f"timeout --kill-after={GRACE_S} {job.time_limit_s} "
    return " \\\n  ".join(
        (
            f"{limit}{shlex.quote(job.section.python or 'python3')} -m torch.distributed.run",
            f'--nnodes="$SKYPILOT_NUM_NODES" --nproc-per-node={job.num_per_node} --node-rank="$SKYPILOT_NODE_RANK"',
            f'--master-addr="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)" --master-port={PORT}',
            f"-m manyhands.worker {RUN_JSON}\n",
        )
    )
