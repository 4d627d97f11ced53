"""What a job asks of any cluster: its size, its limits, and what is refused before anything is written."""

from __future__ import annotations

import pytest

from manyhands.core.errors import UserError
from manyhands.core.limits import GIB
from manyhands.facts.gpu_kinds import describe_host, kinds_named, parse_gpus
from manyhands.planner.types import DiskEstimate, MemoryEstimate
from manyhands.submit.job import ClusterJob, describe_job, local_paths, parse_duration, unread_keys
from tests.launch.builders import make_config, make_plan


def describe(tmp_path, gpus="2x4xH100", plan=None, **keys) -> ClusterJob:
    config = make_config(**{"output.dir": str(tmp_path / "runs"), **keys})
    host = describe_host(parse_gpus(gpus))
    plan = plan or make_plan(len(host.gpus) * host.num_nodes, device="cuda")
    return describe_job(config, plan, host, tmp_path / "runs" / "demo" / "submit")


def test_size_of_a_job(tmp_path):
    job = describe(tmp_path)
    assert (job.num_nodes, job.num_per_node, job.gpu.name, job.cores) == (2, 4, "H100-80GB", 8)
    assert describe(tmp_path, "1xT4").cores == 4, "as a small machine has"
    assert describe(tmp_path, **{"submit.cpus_per_gpu": 14}).cores == 14


def test_without_a_plan_the_size_is_what_is_asked_for(tmp_path):
    host = describe_host(parse_gpus("2x8xH200"))
    job = describe_job(make_config(), None, host, tmp_path)
    assert (job.num_nodes, job.num_per_node, job.host_bytes) == (2, 8, None)


def test_gpus_that_would_be_idle(tmp_path):
    with pytest.raises(UserError, match="takes 4 of 8 GPUs"):
        describe(tmp_path, plan=make_plan(4, device="cuda"))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("24:00:00", 86400), ("1-12:00:30", 129630), ("36h", 129600), ("1d12h30m", 131400), ("90m", 5400), (600, 600)],
)
def test_durations(text, seconds):
    assert parse_duration(make_config(**{"submit.time_limit": text}).submit.time_limit) == seconds


@pytest.mark.parametrize("text", ["24:00", "1.5h", "tomorrow", "", "h", 0])
def test_what_is_no_duration(text):
    with pytest.raises(ValueError, match="time_limit"):
        make_config(**{"submit.time_limit": text})


def test_the_larger_a_checkpoint_the_earlier_it_is_saved(tmp_path):
    def with_checkpoint(size: int) -> ClusterJob:
        disk = DiskEstimate(checkpoint_bytes=size, num_checkpoints=2, result_bytes=0, free_bytes=None)
        return describe(tmp_path, plan=make_plan(8, device="cuda", disk=disk), **{"submit.time_limit": "4h"})

    assert with_checkpoint(1).save_before_s == 121
    assert with_checkpoint(100 * GIB).save_before_s == 320
    with pytest.raises(UserError, match="told to save 900 s before a limit of 600 s"):
        describe(tmp_path, **{"submit.time_limit": 600, "submit.save_before_s": 900})


def test_what_is_offloaded_must_fit_into_the_machine(tmp_path):
    memory = MemoryEstimate(terms={"weights": 1}, limit=2, host_terms={"optimizer": 60 * GIB}, host_limit=100 * GIB)
    assert describe(tmp_path, plan=make_plan(8, device="cuda", memory=memory)).host_bytes == 4 * 64 * GIB
    assert describe(tmp_path).host_bytes is None


def test_no_secret_is_written_down(tmp_path):
    with pytest.raises(UserError, match="HF_TOKEN looks like a secret"):
        describe(tmp_path, **{"submit.environment": {"HF_TOKEN": "hf_x"}})
    for key, text in (("setup", "export HF_TOKEN='hf_x'"), ("options", "--export=ALL,HF_TOKEN=hf_x")):
        with pytest.raises(UserError, match="HF_TOKEN looks like a secret"):
            describe(tmp_path, **{f"submit.{key}": (text,)})
    secret = "hf_" + "aB3dE5gH7jK9mN1pQ2rS4tU6"
    for key, value in (
        ("submit.setup", (f"hf auth login --token {secret}",)),
        ("submit.setup", ("pip install --index-url https://me:hunter2@pypi.example.com/simple x",)),
        ("submit.environment", {"EXTRA_INDEX": "https://me:hunter2@pypi.example.com/simple"}),
        ("submit.environment", {"LOGIN": secret}),
        ("submit.options", (f"--export=A={secret}",)),
        ("submit.image", "docker://me:hunter2@registry.example.com/image"),
        ("submit.volumes", {"/mnt": "s3://key:hunter2@bucket"}),
        ("model.chat_template", "{{ '" + secret + "' }}"),
    ):
        with pytest.raises(UserError, match="would be written into the job's files") as caught:
            describe(tmp_path, **{key: value})
        assert caught.value.where.startswith(key) and not any(word in str(caught.value) for word in (secret, "hunter2"))
    describe(tmp_path, **{"submit.setup": ('export HF_TOKEN="$(cat ~/token)" MODE=fast',)})
    describe(tmp_path, **{"submit.environment": {"NCCL_SOCKET_IFNAME": "eth0", "TOKENIZERS_PARALLELISM": "false"}})


def test_local_paths_are_those_that_are_not_on_the_hub(tmp_path):
    rows = tmp_path / "rows.jsonl"
    config = make_config(
        **{
            "model.name": "org/model",
            "data.train": (str(rows), {"path": "hub:org/set"}),
            "method.adapter": "/adapters/a",
        }
    )
    assert list(local_paths(config)) == [("method.adapter", "/adapters/a"), ("data.train[0]", str(rows))]


def test_keys_of_other_clusters_are_named():
    submit = make_config(**{"submit.partition": "gpu", "submit.namespace": "ml", "submit.image": "i"}).submit
    assert unread_keys(submit, "slurm") == ["submit.namespace"]
    submit = make_config(**{"submit.partition": "gpu", "submit.namespace": "ml", "submit.volumes": {"/a": "b"}}).submit
    assert unread_keys(submit, "slurm") == ["submit.namespace", "submit.volumes"], "without an image"
    assert unread_keys(submit, "kubernetes") == ["submit.partition"]
    assert unread_keys(submit, "skypilot") == ["submit.partition", "submit.namespace"]


def test_names_that_clusters_have_for_gpus():
    assert kinds_named("a100") == {"A100-80GB", "A100-40GB"}
    assert kinds_named("nvidia_h100_80gb_hbm3") == {"H100-80GB"}
    assert kinds_named("H200") == {"H200"} and kinds_named("gpu") == set()
