"""Effects of ``submit.*``: what stands in the job's file for each kind of cluster."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from manyhands.cli.submit import _host
from manyhands.submit.job import ClusterJob, Target, describe_job
from manyhands.submit.kubernetes import write_manifest
from manyhands.submit.prepare import submit_command
from manyhands.submit.skypilot import write_task
from manyhands.submit.slurm import write_script
from tests.keys.lab import Lab

VOLUME = {"/mnt/runs": "claim"}
HUB = {"model.name": "org/model", "data.train": "hub:org/set", "output.dir": "/mnt/runs"}


def job(lab: Lab, keys: Mapping[str, Any] = {}) -> ClusterJob:
    asked = {"submit.gpus": "2x4xH100", "submit.image": "image:1", "submit.volumes": VOLUME, **HUB, **keys}
    config = lab.config({"parallel.device": "auto", **asked})
    return describe_job(config, None, _host(config, None), Path("/files"))


def script(lab: Lab, keys: Mapping[str, Any] = {}) -> str:
    return write_script(job(lab, keys))


def train_job(lab: Lab, keys: Mapping[str, Any] = {}) -> dict[str, Any]:
    return list(yaml.safe_load_all(write_manifest(job(lab, keys), "{}")))[1]


def task(lab: Lab, keys: Mapping[str, Any] = {}) -> dict[str, Any]:
    return yaml.safe_load(write_task(job(lab, keys)))


def option(key: str, value: Any, line: str) -> Callable[[Lab], None]:
    """A #SBATCH line that is there with the key and not without it."""

    def check(lab: Lab) -> None:
        assert f"#SBATCH {line}\n" in script(lab, {key: value}) and f"#SBATCH {line}\n" not in script(lab)

    return check


def gpus(lab: Lab) -> None:
    made = job(lab, {"submit.gpus": "3x2xH200"})
    assert (made.num_nodes, made.num_per_node, made.gpu and made.gpu.name) == (3, 2, "H200")


def gpu_type(lab: Lab) -> None:
    keys = {"submit.gpu_type": "hopper"}
    assert "--gres=gpu:hopper:4" in script(lab, keys) and task(lab, keys)["resources"]["accelerators"] == "hopper:4"
    assert "hopper" in str(train_job(lab, keys)["spec"]["runtimePatches"])


def time_limit(lab: Lab) -> None:
    keys = {"submit.time_limit": "2h"}
    assert "--time=02:00:00" in script(lab, keys) and train_job(lab, keys)["spec"]["activeDeadlineSeconds"] == 7200
    assert task(lab, keys)["run"].startswith("timeout --kill-after=60 7200 ")


def save_before(lab: Lab) -> None:
    assert "--signal=USR1@77" in script(lab, {"submit.time_limit": "2h", "submit.save_before_s": 77})


def cpus_per_gpu(lab: Lab) -> None:
    keys = {"submit.cpus_per_gpu": 11}
    assert "--cpus-per-task=44" in script(lab, keys)
    assert train_job(lab, keys)["spec"]["trainer"]["resourcesPerNode"]["requests"]["cpu"] == 44


def options(lab: Lab) -> None:
    made = job(lab, {"submit.options": ("--qos=high",)})
    assert "#SBATCH --qos=high\n" in write_script(made)
    targets: tuple[Target, ...] = ("kubernetes", "skypilot")
    assert all("--qos=high" in submit_command(made, target, Path("/files/f")) for target in targets)


def namespace(lab: Lab) -> None:
    assert train_job(lab, {"submit.namespace": "ml"})["metadata"].get("namespace") == "ml"


def runtime(lab: Lab) -> None:
    assert train_job(lab, {"submit.runtime": "torch-rdma"})["spec"]["runtimeRef"] == {"name": "torch-rdma"}


def image(lab: Lab) -> None:
    keys = {"submit.image": "org/other:2"}
    assert train_job(lab, keys)["spec"]["trainer"]["image"] == "org/other:2"
    assert task(lab, keys)["resources"]["image_id"] == "docker:org/other:2"
    assert "--container-image=org/other:2" in script(lab, keys)


def volumes(lab: Lab) -> None:
    keys = {"submit.volumes": {**VOLUME, "/mnt/data": "data"}}
    assert "persistentVolumeClaim': {'claimName': 'data'}" in str(train_job(lab, keys))
    assert task(lab, keys)["volumes"]["/mnt/data"] == "data" and "data:/mnt/data" in script(lab, keys)


def python(lab: Lab) -> None:
    keys = {"submit.python": "/opt/env/bin/python"}
    assert "/opt/env/bin/python -u -m manyhands train" in script(lab, keys)
    assert train_job(lab, keys)["spec"]["trainer"]["command"][0] == "/opt/env/bin/python"
    assert "/opt/env/bin/python -m torch.distributed.run" in task(lab, keys)["run"]
    assert f"{sys.executable} -u -m" in script(lab, {"submit.image": None}), "by default this one, on a shared disk"


def setup(lab: Lab) -> None:
    keys = {"submit.setup": ("module load cuda",)}
    assert "\nmodule load cuda\n" in script(lab, keys) and "\nmodule load cuda\n" in task(lab, keys)["run"]
    assert "module load cuda\nexec " in train_job(lab, keys)["spec"]["trainer"]["command"][-1]


def environment(lab: Lab) -> None:
    keys = {"submit.environment": {"NCCL_DEBUG": "INFO"}}
    assert "\nexport NCCL_DEBUG=INFO\n" in script(lab, keys) and task(lab, keys)["envs"] == {"NCCL_DEBUG": "INFO"}
    assert train_job(lab, keys)["spec"]["trainer"]["env"] == [{"name": "NCCL_DEBUG", "value": "INFO"}]


def secrets(lab: Lab) -> None:
    keys = {"submit.secrets": {"HF_TOKEN": "hugging-face"}}
    assert "'secretKeyRef': {'name': 'hugging-face', 'key': 'HF_TOKEN'}" in str(train_job(lab, keys))
    assert task(lab, keys)["secrets"] == {"HF_TOKEN": None}


EFFECTS: dict[str, Callable[[Lab], None]] = {
    "submit.gpus": gpus,
    "submit.gpu_type": gpu_type,
    "submit.time_limit": time_limit,
    "submit.save_before_s": save_before,
    "submit.cpus_per_gpu": cpus_per_gpu,
    "submit.partition": option("submit.partition", "gpu", "--partition=gpu"),
    "submit.account": option("submit.account", "lab", "--account=lab"),
    "submit.options": options,
    "submit.namespace": namespace,
    "submit.runtime": runtime,
    "submit.image": image,
    "submit.volumes": volumes,
    "submit.python": python,
    "submit.setup": setup,
    "submit.environment": environment,
    "submit.secrets": secrets,
}
