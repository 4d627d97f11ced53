"""SkyPilot's task; its own loader is asked where it is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import yaml

from manyhands.core.errors import UserError
from manyhands.submit.skypilot import write_task
from tests.submit.test_job import describe

KEYS = {
    "model.name": "org/model",
    "output.dir": "/mnt/runs",
    "submit.volumes": {"/mnt/runs": "s3://bucket/runs"},
    "submit.setup": ("pip install -q manyhands",),
}
SHARED = {**KEYS, "submit.volumes": {"/mnt/runs": "runs-volume"}, "submit.image": "org/image:1", "submit.setup": ()}


def task(tmp_path, gpus="8xH100", **keys) -> dict:
    return yaml.safe_load(write_task(describe(tmp_path, gpus, **{**KEYS, **keys})))


def test_machines_files_and_command(tmp_path):
    made = task(tmp_path, **{"submit.time_limit": "10h"})
    assert (made["num_nodes"], made["resources"]) == (1, {"accelerators": "H100:8"})
    assert made["file_mounts"]["/mnt/runs"] == {"source": "s3://bucket/runs", "mode": "MOUNT_CACHED"}
    assert made["file_mounts"]["~/manyhands-run.json"] == str(tmp_path / "runs" / "demo" / "submit" / "run-1.json")
    rows = os.path.abspath("rows.jsonl")
    assert made["file_mounts"][rows] == rows, "what is on this machine is uploaded"
    setup, timed = (
        "set -e\npip install -q manyhands\n",
        "timeout --kill-after=60 36000 python3 -m torch.distributed.run",
    )
    assert made["run"].startswith(setup + timed) and "setup" not in made


def test_the_command_that_each_machine_runs(tmp_path):
    """A shell takes it, and each machine joins the first one."""
    (tmp_path / "python3").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOME": "/home/me",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    }
    command = task(tmp_path, "2x4xA100-80GB", **SHARED)["run"]
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        *("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=4", "--node-rank=1"),
        *("--master-addr=10.0.0.1", "--master-port=29500", "-m", "manyhands.worker", "/home/me/manyhands-run.json"),
    ]


def test_setup_reaches_the_run_and_a_failed_one_ends_it(tmp_path):
    """SkyPilot's own `setup` is another shell: a Python that it activates would not be the run's."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text('#!/bin/bash\necho "$FOUND"\n')
    (tmp_path / "bin" / "python3").chmod(0o755)

    def call(*setup):
        command = task(tmp_path, **{"submit.setup": setup})["run"]
        return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)

    done = call(f"PATH={tmp_path}/bin:$PATH", "export FOUND='a b'")
    assert (done.returncode, done.stdout) == (0, "a b\n"), done.stderr
    assert (call("false", f"PATH={tmp_path}/bin:$PATH").returncode) == 1


@pytest.mark.parametrize(
    ("gpus", "name"), [("4xA100-40GB", "A100:4"), ("4xA100-80GB", "A100-80GB:4"), ("RTX-A6000", "RTXA6000:1")]
)
def test_skypilot_s_names_for_gpus(tmp_path, gpus, name):
    assert task(tmp_path, gpus)["resources"]["accelerators"] == name


@pytest.mark.parametrize(
    ("gpus", "keys", "words"),
    [
        ("8xH100", {"submit.volumes": {}}, "would be lost"),
        ("8xH100", {"submit.setup": ()}, "nothing installs manyhands"),
        ("2x8xH100", {}, "cannot share a run's folder that is on a bucket"),
    ],
)
def test_what_a_rented_machine_would_not_have(tmp_path, gpus, keys, words):
    with pytest.raises(UserError, match=words):
        task(tmp_path, gpus, **keys)


LOAD = "import sys, sky; t = sky.Task.from_yaml(sys.argv[1]); print(t.num_nodes, *t.resources)"


@pytest.mark.parametrize("keys", [SHARED, {**SHARED, "submit.time_limit": "1h", "submit.secrets": {"HF_TOKEN": "x"}}])
def test_skypilot_s_own_loader_takes_it(tmp_path, keys):
    python = os.environ.get("MANYHANDS_SKYPILOT_PYTHON") or (importlib.util.find_spec("sky") and sys.executable)
    if not python:
        pytest.skip("MANYHANDS_SKYPILOT_PYTHON names no Python with SkyPilot")
    file = tmp_path / "task.yaml"
    file.write_text(write_task(describe(tmp_path, "2x4xA100-80GB", **keys)))
    environment = os.environ | {"PYTHONPATH": "", "HOME": str(tmp_path), "HF_TOKEN": "x"}
    done = subprocess.run([python, "-c", LOAD, file], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 ") and "'A100-80GB': 4" in done.stdout and "docker:org/image:1" in done.stdout
