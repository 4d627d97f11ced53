"""The manifest for Kubernetes: a TrainJob of Kubeflow Trainer (v2.2 and later), and a ConfigMap with its run.

The runtime ``torch-distributed`` sets what torchrun reads (PET_*), and starts a container again that has failed, so
that the run resumes. At the job's deadline and before an eviction its pods get SIGTERM, on which the run saves.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

from manyhands.core.errors import UserError
from manyhands.facts.types import GpuKind
from manyhands.submit.job import ClusterJob, local_paths, refuse_lost_folder, to_yaml, under_volume

RUN_FOLDER = "/manyhands"  # where the ConfigMap is mounted
MANAGER = "manyhands/submit"
CONTAINER = "node"  # of the runtime, and the name of its replicated job
GRACE_S = 60  # torchrun waits 30 s for its workers, which save within 20
RESOURCES = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu"}
LABELS = {"nvidia": "nvidia.com/gpu.product", "amd": "amd.com/gpu.product-name"}


def write_manifest(job: ClusterJob, run: str) -> str:
    """``run``: the content of run.json. UserError for what a pod would not find, or would lose."""
    _check(job)
    name = resource_name(job)
    namespace = {} if job.asked.namespace is None else {"namespace": job.asked.namespace}
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, **namespace},
        "data": {"run.json": run},
    }
    train_job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name, **namespace},
        "spec": {
            "runtimeRef": {"name": job.asked.runtime},
            **({} if job.time_limit_s is None else {"activeDeadlineSeconds": job.time_limit_s}),
            "trainer": _trainer(job),
            "runtimePatches": [
                {
                    "manager": MANAGER,
                    "trainingRuntimeSpec": {
                        "template": {
                            "spec": {
                                "replicatedJobs": [
                                    {"name": CONTAINER, "template": {"spec": {"template": {"spec": _pod(job, name)}}}}
                                ]
                            }
                        }
                    },
                }
            ],
        },
    }
    return to_yaml(job, config_map, train_job)


def resource_name(job: ClusterJob) -> str:
    """A name by RFC 1035, short enough for the names that pods derive from it; another one for each submission."""
    plain = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"run-{plain}"
    return f"{plain[:40].rstrip('-')}-{job.number}"


def _check(job: ClusterJob) -> None:
    if job.asked.image is None:
        raise UserError(
            "a pod needs an image in which manyhands is installed",
            where="submit.image",
            fix="write submit.image: REGISTRY/NAME:TAG",
        )
    for mount, claim in job.asked.volumes.items():
        if "/" in claim:
            raise UserError(
                f"{claim} is no PersistentVolumeClaim",
                where=f"submit.volumes: {{{mount}: {claim}}}",
                fix="write the name of a claim of the namespace, which `kubectl get pvc` lists",
            )
    refuse_lost_folder(job.config, "a pod")
    for key, path in local_paths(job.config):
        if not under_volume(path, job.asked):
            raise UserError(
                "a pod would not find this path",
                where=f"{key}: {path}",
                why="it is on this machine, not in one of submit.volumes",
                fix="put it on a volume, or name a model or data set of the hub",
            )


def _trainer(job: ClusterJob) -> dict[str, Any]:
    python = shlex.quote(job.asked.python or "python3")
    start = f"{python} -m torch.distributed.run -m manyhands.worker {RUN_FOLDER}/run.json"
    command = (
        ["/bin/sh", "-ec", "\n".join([*job.asked.setup, f"exec {start}"])] if job.asked.setup else shlex.split(start)
    )
    env: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in job.asked.environment.items()]
    env += [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": name}}}
        for name, secret in job.asked.secrets.items()
    ]
    limits: dict[str, Any] = {} if job.gpu is None else {RESOURCES[job.gpu.vendor]: job.num_per_node}
    requests: dict[str, Any] = {**limits, "cpu": job.cores * job.num_per_node}
    if job.host_bytes is not None:
        requests["memory"] = str(job.host_bytes)
    return {
        "image": job.asked.image,
        "command": command,
        "numNodes": job.num_nodes,
        "numProcPerNode": job.num_per_node,
        **({"env": env} if env else {}),
        "resourcesPerNode": {"requests": requests, **({"limits": limits} if limits else {})},
    }


def _pod(job: ClusterJob, name: str) -> dict[str, Any]:
    """What the pods need beside the runtime's: the run, disks, shared memory for NCCL and data workers, GPUs."""
    volumes: list[dict[str, Any]] = [
        {"name": "run", "configMap": {"name": name}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    mounts = [{"name": "run", "mountPath": RUN_FOLDER}, {"name": "shared-memory", "mountPath": "/dev/shm"}]
    claims = {claim: f"volume-{index}" for index, claim in enumerate(dict.fromkeys(job.asked.volumes.values()))}
    volumes += [{"name": disk, "persistentVolumeClaim": {"claimName": claim}} for claim, disk in claims.items()]
    mounts += [{"name": claims[claim], "mountPath": path} for path, claim in job.asked.volumes.items()]
    pod = {
        "containers": [{"name": CONTAINER, "volumeMounts": mounts}],
        "volumes": volumes,
        "terminationGracePeriodSeconds": GRACE_S,
    }
    return pod if job.gpu is None else pod | _on_gpus(job.gpu, job.asked.gpu_type)


def _on_gpus(kind: GpuKind, named: str | None) -> dict[str, Any]:
    """Only nodes with this kind of GPU, by the labels of the vendor's GPU feature discovery; their usual taint."""
    toleration = {"key": RESOURCES[kind.vendor], "operator": "Exists", "effect": "NoSchedule"}
    found: dict[str, Any] = {"tolerations": [toleration]}
    if named is None and kind.vendor != "nvidia":
        return found
    driver_names = [name.replace(" ", "-") for name in kind.driver_names]
    names = [name if name.startswith("Tesla") else f"NVIDIA-{name}" for name in driver_names]
    rule = {"key": LABELS[kind.vendor], "operator": "In", "values": [named] if named else names}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [rule]}]}
    return found | {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}}
