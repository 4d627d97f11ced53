"""The TrainJob, held against the schema of its CustomResourceDefinition, made strict."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import yaml

from manyhands.core.errors import UserError
from manyhands.submit.kubernetes import resource_name, write_manifest
from tests.submit.test_job import describe

KEYS = {
    "name": "Llama_8B.sft",
    "model.name": "org/model",
    "data.train": "hub:org/set",
    "output.dir": "/mnt/runs",
    "submit.image": "registry.example/manyhands:1",
    "submit.volumes": {"/mnt/runs": "runs-claim", "/mnt/data": "data-claim"},
    "submit.namespace": "ml",
    "submit.time_limit": "12h",
    "submit.environment": {"NCCL_SOCKET_IFNAME": "eth0"},
    "submit.secrets": {"HF_TOKEN": "hugging-face"},
}
RUN = '{\n  "name": "demo"\n}\n'


def manifest(tmp_path, gpus="2x4xH100", **keys) -> tuple[dict, dict]:
    """(ConfigMap, TrainJob)."""
    config_map, train_job = yaml.safe_load_all(write_manifest(describe(tmp_path, gpus, **{**KEYS, **keys}), RUN))
    return config_map, train_job


def test_text_that_looks_like_a_number_is_quoted(tmp_path):
    """kubectl reads YAML 1.2's numbers, PyYAML does not, and a value of env must be text."""
    environment = {"submit.environment": {"A": "1e3", "B": "08"}}
    text = write_manifest(describe(tmp_path, "2x4xH100", **{**KEYS, **environment}), RUN)
    assert "value: '1e3'" in text and "value: '08'" in text


def pod_of(train_job: dict) -> dict:
    patch = train_job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    return patch["template"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def validator():
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(__file__).parent / "trainjob.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"submit.setup": ("pip install -q .",), "submit.namespace": None, "submit.time_limit": None},
        {"submit.gpu_type": "NVIDIA-H100-80GB-HBM3-MIG-7g.80gb", "submit.secrets": {}, "submit.environment": {}},
    ],
    ids=["all", "few", "label"],
)
@pytest.mark.parametrize("gpus", ["2x4xH100", "8xMI300X"])
def test_the_api_server_knows_every_field(tmp_path, validator, gpus, keys):
    validator.validate(manifest(tmp_path, gpus, **keys)[1])


def plant(train_job: dict, fault: str) -> None:
    trainer, pod = train_job["spec"]["trainer"], pod_of(train_job)
    if fault == "misspelled":
        trainer["numNode"] = trainer.pop("numNodes")
    elif fault == "text for a number":
        trainer["numProcPerNode"] = "auto"
    elif fault == "no such size":
        trainer["resourcesPerNode"]["requests"]["memory"] = "64 GB"
    elif fault == "in the wrong place":
        pod["restartPolicy"] = "Never"
    elif fault == "missing":
        del train_job["spec"]["runtimeRef"]["name"]
    elif fault == "no name of a resource":
        train_job["metadata"]["name"] = "Llama_8B"


@pytest.mark.parametrize(
    "fault",
    ["misspelled", "text for a number", "no such size", "in the wrong place", "missing", "no name of a resource"],
)
def test_the_schema_notices_faults(tmp_path, validator, fault):
    train_job = copy.deepcopy(manifest(tmp_path)[1])
    plant(train_job, fault)
    assert not validator.is_valid(train_job)


def test_size_time_and_place(tmp_path):
    config_map, job = manifest(tmp_path)
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"], job["spec"]["activeDeadlineSeconds"]) == (2, 4, 43200)
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": 4}
    assert trainer["command"][-2:] == ["manyhands.worker", "/manyhands/run.json"]
    assert config_map["data"] == {"run.json": RUN} and {config_map["metadata"]["namespace"]} == {"ml"}
    pod = pod_of(job)
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts.keys() == {"/manyhands", "/dev/shm", "/mnt/runs", "/mnt/data"}
    assert {volume["name"] for volume in pod["volumes"]} == set(mounts.values())
    rule = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert rule[0]["matchExpressions"][0]["values"] == ["NVIDIA-H100-80GB-HBM3"]


def test_a_python_with_a_space_in_its_path(tmp_path):
    _, train_job = manifest(tmp_path, **{"submit.python": "/opt/my env/bin/python"})
    assert train_job["spec"]["trainer"]["command"][:2] == ["/opt/my env/bin/python", "-m"]


def test_a_second_submission_is_another_resource(tmp_path):
    names = set()
    for name in ("Llama_8B.sft", "8b", "x" * 90):
        job = describe(tmp_path, **{**KEYS, "name": name})
        names.add(resource_name(job))
    assert names == {"llama-8b-sft-1", "run-8b-1", "x" * 40 + "-1"}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"submit.image": None}, "needs an image"),
        ({"output.dir": "/home/me/runs"}, "would be lost"),
        ({"data.train": "/home/me/rows.jsonl"}, "would not find this path"),
        ({"submit.volumes": {"/mnt/runs": "s3://bucket"}}, "no PersistentVolumeClaim"),
    ],
)
def test_what_a_pod_would_not_have(tmp_path, keys, words):
    with pytest.raises(UserError, match=words):
        manifest(tmp_path, **keys)
