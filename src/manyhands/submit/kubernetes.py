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
    section, name, gpu = job.section, resource_name(job), job.gpu
    metadata = {"name": name} if section.namespace is None else {"name": name, "namespace": section.namespace}
    start = (
        f"{shlex.quote(section.python or 'python3')} -m torch.distributed.run -m manyhands.worker {RUN_FOLDER}/run.json"
    )
    env: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in section.environment.items()]
    env += [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": name}}}
        for name, secret in section.secrets.items()
    ]
    limits: dict[str, Any] = {} if gpu is None else {RESOURCES[gpu.vendor]: job.num_per_node}
    requests = {**limits, "cpu": job.cores * job.num_per_node}
    if job.host_bytes is not None:
        requests["memory"] = str(job.host_bytes)
    trainer = {
        "image": section.image,
        "command": ["/bin/sh", "-ec", "\n".join([*section.setup, f"exec {start}"])]
        if section.setup
        else shlex.split(start),
        "numNodes": job.num_nodes,
        "numProcPerNode": job.num_per_node,
        "env": env,
        "resourcesPerNode": _given({"requests": requests, "limits": limits}),
    }
    disks = {claim: f"volume-{index}" for index, claim in enumerate(dict.fromkeys(section.volumes.values()))}
    pod = {  # what the pods need beside the runtime's: the run, disks, shared memory for NCCL and data workers, GPUs
        "containers": [
            {
                "name": CONTAINER,
                "volumeMounts": [
                    {"name": "run", "mountPath": RUN_FOLDER},
                    {"name": "shared-memory", "mountPath": "/dev/shm"},
                    *({"name": disks[claim], "mountPath": path} for path, claim in section.volumes.items()),
                ],
            }
        ],
        "volumes": [
            {"name": "run", "configMap": {"name": name}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
            *({"name": disk, "persistentVolumeClaim": {"claimName": claim}} for claim, disk in disks.items()),
        ],
        "terminationGracePeriodSeconds": GRACE_S,
        **({} if gpu is None else _on_gpus(gpu, section.gpu_type)),
    }
    template: dict[str, Any] = {"spec": {"template": {"spec": pod}}}
    patch = {"template": {"spec": {"replicatedJobs": [{"name": CONTAINER, "template": template}]}}}
    spec = {
        "runtimeRef": {"name": section.runtime},
        "activeDeadlineSeconds": job.time_limit_s,
        "trainer": _given(trainer),
        "runtimePatches": [{"manager": MANAGER, "trainingRuntimeSpec": patch}],
    }
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"run.json": run}}
    train_job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": _given(spec),
    }
    return to_yaml(job, config_map, train_job)


def resource_name(job: ClusterJob) -> str:
    """A name by RFC 1035, short enough for the names that pods derive from it; another one for each submission."""
    plain = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"run-{plain}"
    return f"{plain[:40].rstrip('-')}-{job.number}"


def _check(job: ClusterJob) -> None:
    if job.section.image is None:
        raise UserError(
            "a pod needs an image in which manyhands is installed",
            where="submit.image",
            fix="write submit.image: REGISTRY/NAME:TAG",
        )
    for mount, claim in job.section.volumes.items():
        if "/" in claim:
            raise UserError(
                f"{claim} is no PersistentVolumeClaim",
                where=f"submit.volumes: {{{mount}: {claim}}}",
                fix="write the name of a claim of the namespace, which `kubectl get pvc` lists",
            )
    refuse_lost_folder(job.config, "a pod")
    for key, path in local_paths(job.config):
        if not under_volume(path, job.section):
            raise UserError(
                "a pod would not find this path",
                where=f"{key}: {path}",
                why="it is on this machine, not in one of submit.volumes",
                fix="put it on a volume, or name a model or data set of the hub",
            )


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value not in (None, [], {})}


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
