"""Effects of ``submit.*``: what stands in the job's file for each kind of cluster."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from manyhands.cli.submit import _host
from manyhands.submit.job import ClusterJob, describe_job
from manyhands.submit.kubernetes import write_manifest
from manyhands.submit.prepare import submit_command
from manyhands.submit.skypilot import write_task
from manyhands.submit.slurm import write_script
from tests.keys.lab import Lab

BASE = {
    "parallel.device": "auto", "model.name": "org/model", "data.train": "hub:org/set", "output.dir": "/mnt/runs",
    "submit.gpus": "2x4xH100", "submit.image": "image:1", "submit.volumes": {"/mnt/runs": "claim"},
}  # fmt: skip
WRITERS: dict[str, Callable[[ClusterJob], str]] = {
    "slurm": write_script,
    "kubernetes": lambda job: str(list(yaml.safe_load_all(write_manifest(job, "{}")))[1]),
    "skypilot": lambda job: str(yaml.safe_load(write_task(job))),
}
# Of each key a value, and by the kind of cluster what stands in its file for that alone.
SHOWN: dict[str, tuple[Any, dict[str, str]]] = {
    "gpus": ("3x2xH200", {"slurm": "--nodes=3\n", "kubernetes": "'numNodes': 3", "skypilot": "'H200:2'"}),
    "gpu_type": ("hopper", {"slurm": "--gres=gpu:hopper:4", "kubernetes": "hopper", "skypilot": "'hopper:4'"}),
    "time_limit": ("2h", {"slurm": "--time=02:00:00", "kubernetes": "'activeDeadlineSeconds': 7200",
                          "skypilot": "'run': 'timeout --kill-after=60 7200 "}),
    "cpus_per_gpu": (11, {"slurm": "--cpus-per-task=44", "kubernetes": "'cpu': 44"}),
    "partition": ("gpu", {"slurm": "#SBATCH --partition=gpu\n"}),
    "account": ("lab", {"slurm": "#SBATCH --account=lab\n"}),
    "namespace": ("ml", {"kubernetes": "'namespace': 'ml'"}),
    "runtime": ("torch-rdma", {"kubernetes": "'runtimeRef': {'name': 'torch-rdma'}"}),
    "image": ("org/other:2", {"slurm": "--container-image=org/other:2", "kubernetes": "'image': 'org/other:2'",
                              "skypilot": "'image_id': 'docker:org/other:2'"}),
    "volumes": ({"/mnt/runs": "claim", "/mnt/data": "data"}, {
        "slurm": "data:/mnt/data", "kubernetes": "'claimName': 'data'", "skypilot": "'/mnt/data': 'data'"}),
    "python": ("/opt/env/bin/python", {"slurm": "/opt/env/bin/python -u -m manyhands train",
                                       "kubernetes": "'command': ['/opt/env/bin/python'",
                                       "skypilot": "/opt/env/bin/python -m torch.distributed.run"}),
    "setup": (("module load cuda",), {"slurm": "\nmodule load cuda\n", "kubernetes": "module load cuda\\nexec ",
                                      "skypilot": "\\nmodule load cuda\\n"}),
    "environment": ({"NCCL_DEBUG": "INFO"}, {"slurm": "\nexport NCCL_DEBUG=INFO\n",
                                             "kubernetes": "'env': [{'name': 'NCCL_DEBUG', 'value': 'INFO'}]",
                                             "skypilot": "'envs': {'NCCL_DEBUG': 'INFO'}"}),
    "secrets": ({"HF_TOKEN": "hugging-face"}, {
        "kubernetes": "'secretKeyRef': {'name': 'hugging-face', 'key': 'HF_TOKEN'}",
        "skypilot": "'secrets': {'HF_TOKEN': None}"}),
}  # fmt: skip


def job(lab: Lab, keys: Mapping[str, Any] = {}) -> ClusterJob:
    config = lab.config({**BASE, **keys})
    return describe_job(config, None, _host(config, None), Path("/files"))


def check_shown(lab: Lab, key: str) -> None:
    """It is there with the key, and not without it."""
    value, shown = SHOWN[key]
    for kind, text in shown.items():
        made, base = (WRITERS[kind](job(lab, keys)) for keys in ({f"submit.{key}": value}, {}))
        assert text in made and text not in base, kind


def python(lab: Lab) -> None:
    check_shown(lab, "python")
    assert f"{sys.executable} -u -m" in write_script(job(lab, {"submit.image": None})), "this one, on a shared disk"


def save_before(lab: Lab) -> None:
    keys = {"submit.time_limit": "2h", "submit.save_before_s": 77}
    assert "--signal=USR1@77" in write_script(job(lab, keys))


def options(lab: Lab) -> None:
    made = job(lab, {"submit.options": ("--qos=high",)})
    assert "#SBATCH --qos=high\n" in write_script(made)
    assert "--qos=high" in submit_command(made, "kubernetes", Path("/files/f"))
    assert "--qos=high" in submit_command(made, "skypilot", Path("/files/f"))


EFFECTS: dict[str, Callable[[Lab], None]] = {
    **{f"submit.{key}": functools.partial(check_shown, key=key) for key in SHOWN},
    "submit.python": python,
    "submit.save_before_s": save_before,
    "submit.options": options,
}
