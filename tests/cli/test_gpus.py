"""``--gpus`` on the command line: a number, or GPUs that need not be here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manyhands.core.errors import EXIT_USAGE
from manyhands.facts import host
from manyhands.facts.gpu_kinds import MIB
from manyhands.facts.types import GpuFacts, HostFacts, UnusableGpus
from manyhands.launch.nodes.info import join_hosts
from tests.cli.conftest import call
from tests.support.tiny import write_tiny_model

GIB = 2**30


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch):
    monkeypatch.delenv("SYNTH_GPU_TYPE", raising=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def run_file(tmp_path, model) -> Path:
    rows = [{"prompt": f"question {i}", "completion": f"answer {i}"} for i in range(64)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "run.yaml"
    path.write_text(
        f"name: planned\nmodel: {{name: {model}}}\nmethod: {{name: lora}}\n"
        f"data: {{train: {tmp_path / 'rows.jsonl'}, cache: {tmp_path / 'cache'}, max_length: 64}}\n"
        f"batch: {{samples: 32}}\noutput: {{dir: {tmp_path / 'runs'}}}\n"
    )
    return path


@pytest.fixture
def never_looks(monkeypatch):
    """A plan for another machine asks nothing of this one."""

    def look(*given):
        raise AssertionError("this machine's GPUs were asked")

    monkeypatch.setattr("manyhands.launch.run.prepare.read_host_facts", look)


def planned(result) -> dict:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("gpus", "ranks", "usable_mib"), [("8xH200", 8, 143073), ("2x4xH100-80GB", 8, 81039), ("MI300X", 1, 196290)]
)
def test_a_laptop_plans_for_gpus_that_it_does_not_have(run_file, never_looks, gpus, ranks, usable_mib):
    plan = planned(call("plan", run_file, "--gpus", gpus, "--json"))
    mesh = plan["layout"]["mesh"]
    assert plan["layout"]["device"] == "cuda" and mesh["replicate"] * mesh["shard"] == ranks
    assert plan["memory"]["limit"] == int(0.97 * usable_mib * MIB)
    assert plan["why"][0]["code"] == "hardware"
    assert plan["disk"]["free_bytes"] is None  # of this machine it would say nothing


def test_the_longest_sample_is_planned_for_gpus_that_are_not_there(run_file, never_looks):
    result = call("plan", run_file, "--gpus", "2xL4", "--longest", COLUMNS="200")
    assert result.exit_code == 0 and "longest sample: " in result.stdout and "on 2 GPUs" in result.stdout


def test_the_plan_says_so_in_words(run_file, never_looks):
    text = call("plan", run_file, "--gpus", "8xH200", COLUMNS="200").stdout
    assert "8 × H200 (not on this machine)" in text and "assumed" in text and "measured: docs/results.md" in text


def test_the_variable_of_another_tool_is_read_where_gpus_is_not_given(run_file, never_looks):
    plan = planned(call("plan", run_file, "--json", SYNTH_GPU_TYPE="H100-4x"))
    assert plan["why"][0]["values"]["num_per_node"] == 4
    plan = planned(call("plan", run_file, "--json", "--gpus", "2xL4", SYNTH_GPU_TYPE="H100-4x"))
    assert plan["why"][0]["values"]["kind"] == "L4"


def test_the_variable_against_the_run_file_is_an_error(run_file):
    result = call("plan", run_file, "parallel.gpus=8", SYNTH_GPU_TYPE="H100-4x")
    assert result.exit_code == EXIT_USAGE
    assert "parallel.gpus is 8, but SYNTH_GPU_TYPE names 4 × H100-80GB" in result.stderr
    assert "SYNTH_GPU_TYPE 4xX100" in call("plan", run_file, SYNTH_GPU_TYPE="4xX100").stderr


def test_a_kind_that_nobody_knows_is_refused_with_the_nearest(run_file):
    result = call("plan", run_file, "--gpus", "8xH300")
    assert result.exit_code == EXIT_USAGE and "unknown kind of GPU: H300" in result.stderr and "H200" in result.stderr


def test_a_number_is_short_for_the_key(run_file, started):
    assert call("train", run_file, "--gpus", "4").exit_code == 0
    ((config, options),) = started
    assert config.parallel.gpus == 4 and "host" not in options
    assert "`parallel.gpus`: got 0" in call("train", run_file, "--gpus", "0").stderr
    for command, gpus in (("plan", "2xH200"), ("train", "2")):
        refused = call(command, run_file, "--gpus", gpus, "parallel.gpus=2")
        assert refused.exit_code == EXIT_USAGE and "--gpus and parallel.gpus are both given" in refused.stderr
    assert len(started) == 1


def test_a_dry_run_may_be_for_other_gpus(run_file, started):
    assert call("train", run_file, "--gpus", "4xH100-80GB", "--dry-run").exit_code == 0
    assert call("train", run_file, "--dry-run", SYNTH_GPU_TYPE="2xH200").exit_code == 0
    (config, options), (_, others) = started
    assert config.parallel.gpus == 4
    assert len(options["host"].gpus) == 4 and not options["host"].is_here
    assert others["host"].kind.name == "H200"


def here(monkeypatch, *names: str, unusable: UnusableGpus | None = None) -> None:
    gpus = tuple(GpuFacts(index=i, name=name, memory_bytes=1, free_bytes=1) for i, name in enumerate(names))
    facts = HostFacts(gpus=gpus, num_cores=1, memory_bytes=8 * GIB, free_memory_bytes=8 * GIB, unusable_gpus=unusable)
    monkeypatch.setattr(host, "read_host_facts", lambda: facts)


@pytest.mark.parametrize(
    ("names", "gpus", "why"),
    [
        ((), "8xH200", "its GPUs: none"),
        (("NVIDIA H200",) * 4, "8xH200", "its GPUs: NVIDIA H200, NVIDIA H200"),
        (("NVIDIA L4",) * 8, "8xH200", "NVIDIA L4"),
        (("NVIDIA H200",) * 8, "2x4xH200", "on several machines"),
    ],
)
def test_a_run_does_not_start_on_gpus_that_are_not_here(run_file, started, monkeypatch, names, gpus, why):
    here(monkeypatch, *names)
    result = call("train", run_file, "--gpus", gpus)
    assert result.exit_code == EXIT_USAGE and not started
    assert "this machine does not have them" in result.stderr and why in result.stderr and "--dry-run" in result.stderr


def test_a_run_starts_where_they_are(run_file, started, monkeypatch):
    here(monkeypatch, *("NVIDIA H200",) * 8)
    assert call("train", run_file, "--gpus", "4xH200").exit_code == 0
    ((config, options),) = started
    assert config.parallel.gpus == 4 and "host" not in options


def test_a_run_says_that_the_variable_is_for_plans(run_file, started):
    result = call("train", run_file, SYNTH_GPU_TYPE="H100-4x")
    assert result.exit_code == 0 and "SYNTH_GPU_TYPE is for `plan` and `--dry-run`" in result.stderr
    assert started[0][0].parallel.gpus == "auto"


def test_a_dry_run_for_elsewhere_writes_its_plan_unless_the_run_was_started(
    run_file, tmp_path, monkeypatch, never_looks
):
    monkeypatch.setattr("manyhands.launch.run.prepare.rehearse", lambda config, plan: None)
    result = call("train", run_file, "--gpus", "4xH100-80GB", "--dry-run")
    assert result.exit_code == 0, result.output
    plan = json.loads((tmp_path / "runs/planned/plans/001.json").read_text())
    assert plan["why"][0]["code"] == "hardware"
    monkeypatch.setattr("manyhands.launch.run.folder.RunFolder.was_started", lambda folder: True)
    result = call("train", run_file, "--gpus", "4xH100-80GB", "--dry-run")
    assert result.exit_code == EXIT_USAGE and "manyhands plan" in result.stderr


def test_gpus_that_cannot_be_used_are_shown_and_refused(run_file, monkeypatch):
    broken = UnusableGpus(found="2 NVIDIA GPUs (/dev/nvidia0 to /dev/nvidia1)", why="NVML: no library", fix="get it")
    here(monkeypatch, unusable=broken)
    monkeypatch.setattr("manyhands.launch.run.prepare.read_host_facts", host.read_host_facts)
    result = call("plan", run_file)
    assert result.exit_code == EXIT_USAGE and "none can be used" in result.stderr and "get it" in result.stderr
    assert planned(call("plan", run_file, "parallel.device=cpu", "--json"))["layout"]["device"] == "cpu"
    shown = call("gpu-info").stdout
    assert "Number of GPUs: 0" in shown and "NVML: no library" in shown and "CPU processes" not in shown
    shown = call("memory-check").stdout
    assert "Number of GPUs: 0" in shown and "NVML: no library" in shown
    asked = call("setup-accelerate")  # a start would be refused
    assert "NVML: no library" in asked.output and "get it" in asked.output
    assert "nothing needs to be configured" not in asked.output and "CPU processes" not in asked.output


def test_without_a_terminal_nothing_is_asked():
    refused = call("setup-accelerate", "--ask")
    assert refused.exit_code == EXIT_USAGE and "standard input is not a terminal" in refused.stderr


def test_a_gpu_that_does_not_answer_is_shown_and_refused(run_file, monkeypatch):
    lost = "GPU 1 does not answer (NVML: GPU is lost)"
    here(monkeypatch, "NVIDIA H200")
    facts = host.read_host_facts().model_copy(update={"lost_gpus": (lost,)})
    monkeypatch.setattr(host, "read_host_facts", lambda: facts)
    for command in ("gpu-info", "memory-check"):
        assert lost in call(command).stdout
    monkeypatch.setattr("manyhands.launch.run.prepare.read_host_facts", host.read_host_facts)
    result = call("plan", run_file)
    assert result.exit_code == EXIT_USAGE and lost in result.stderr and "launch.min_gpus=1" in result.stderr
    nodes = join_hosts([facts.model_copy(update={"name": name}) for name in ("gpu1", "gpu2")])
    assert nodes.lost_gpus == (f"gpu1: {lost}", f"gpu2: {lost}")
