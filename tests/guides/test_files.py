"""The files that the guides name lie where they say, and the commands on them work as written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.core.errors import has_deepspeed
from tests.e2e.runs import free_port
from tests.guides.conftest import FAST, ROOT, call

FILES = (
    *(f"configs/run_{name}.yaml" for name in ("bnb", "dapt", "gemma27b_distributed", "llama70b")),
    *(f"configs/accelerate/{name}.yaml" for name in ("single_gpu", "multi_gpu_ddp", "multi_gpu_fsdp")),
    *("configs/deepspeed_custom.json", "multi_node_config.yaml", "scripts/train_hf.py"),
    *("configs/llava_pretrain_full.json", "configs/llava_pretrain_full_gradchkpt.json"),
    *("examples/multi_gpu_qlora_4xh100.toml", "examples/multi_gpu_fft_8xh100.toml"),
    *("run_nvidia_all.sh", "run_amd_all.sh", "run_hf_standalone.py", "run_fsdp_standalone.py"),
)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2")
ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch")


@pytest.mark.parametrize("path", FILES)
def test_every_file_that_a_guide_names_exists(path: str) -> None:
    assert (ROOT / path).is_file()


@pytest.mark.ci
@pytest.mark.parametrize("script", ["run_nvidia_all.sh", "run_amd_all.sh"])
def test_a_launcher_script_never_trains_on_the_cpu_instead(script: str, place: Path) -> None:
    done = call("bash", script, f"{place}/run.yaml", f"output.dir={place}/runs", "--dry-run")
    assert done.returncode == 2 and "parallel.device is cuda, but no GPU is visible" in done.stdout, done.stdout


@pytest.mark.ci
def test_a_launcher_script_trains_its_own_run_file_unless_it_is_given_one(place: Path) -> None:
    done = call("bash", "run_nvidia_all.sh", *replaced(place), "parallel.device=cpu", "parallel.gpus=2", "--dry-run")
    assert done.returncode == 0, done.stdout
    assert "[train] Batch size: 1 per process, gradient accumulation: 32" in done.stdout
    assert "[train] Effective batch size: 64" in done.stdout


@pytest.mark.ci
def test_make_takes_accelerates_and_deepspeeds_files(place: Path) -> None:
    """Both shard the run; without DeepSpeed its part is FSDP2's, which is said."""
    run = (f"CONFIG={place}/run.yaml", f"ARGS=--dry-run parallel.gpus=2 {' '.join(outputs(place, 'settings'))}")
    by_accelerate = call("make", "train-distributed", *run, "ACCELERATE_CONFIG=configs/accelerate/multi_gpu_fsdp.yaml")
    assert by_accelerate.returncode == 0 and "fsdp, sharded over 2 processes" in by_accelerate.stdout, (
        by_accelerate.stdout
    )
    by_deepspeed = call("make", "train-distributed", *run, "DEEPSPEED_CONFIG=configs/deepspeed_custom.json")
    strategy = "zero3, DeepSpeed's ZeRO" if has_deepspeed() else "fsdp, sharded over 2 processes"
    assert by_deepspeed.returncode == 0 and strategy in by_deepspeed.stdout, by_deepspeed.stdout
    assert ("DeepSpeed is not installed" in by_deepspeed.stdout) is not has_deepspeed()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("script", "strategy"),
    [("run_hf_standalone.py", "ddp"), pytest.param("run_fsdp_standalone.py", "fsdp", marks=pytest.mark.slow)],
)
def test_torchrun_starts_the_standalone_scripts(place: Path, script: str, strategy: str) -> None:
    done = call(*TORCHRUN, script, *replaced(place), "batch.samples=8", f"name={strategy}")
    check_trained(done, place / "runs" / strategy, strategy, 2)


@pytest.mark.slow
def test_plain_python_trains_on_one(place: Path) -> None:
    done = call(sys.executable, "scripts/train_hf.py", "--config", f"{place}/run.yaml", *outputs(place, "alone"))
    check_trained(done, place / "runs/alone", "single", 1)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "ranks", "strategy"),
    [
        pytest.param("single_gpu", 1, "single", marks=pytest.mark.slow),
        pytest.param("multi_gpu_ddp", 2, "ddp", marks=pytest.mark.slow),
        ("multi_gpu_fsdp", 2, "fsdp"),
    ],
)
def test_accelerate_launch_with_the_guides_file(place: Path, name: str, ranks: int, strategy: str) -> None:
    port = ("--main_process_port", str(free_port())) if ranks > 1 else ()
    command = (*ACCELERATE, "--config_file", f"configs/accelerate/{name}.yaml", *port, "scripts/train_hf.py")
    done = call(*command, "--config", f"{place}/run.yaml", *outputs(place, name))
    check_trained(done, place / "runs" / name, strategy, ranks)


@pytest.mark.ci
def test_accelerate_launch_on_cpus_does_not_train_one_process_in_place_of_two(place: Path) -> None:
    command = (*ACCELERATE, "--cpu", "--num_processes", "2", "scripts/train_hf.py", "--config", f"{place}/run.yaml")
    done = call(*command, *outputs(place, "cpus"))
    assert done.returncode != 0 and "accelerate launch has started one process of several" in done.stdout, done.stdout


def replaced(place: Path) -> list[str]:
    """Model and data of a run file, replaced by tiny ones."""
    return [f"model.name={place}/model", f"data.train={place}/rows.jsonl", *outputs(place, "standalone")]


def outputs(place: Path, name: str) -> list[str]:
    return [f"name={name}", f"output.dir={place}/runs", f"data.cache={place}/cache", *FAST.split()]


def check_trained(done: subprocess.CompletedProcess[str], run: Path, strategy: str, ranks: int) -> None:
    assert done.returncode == 0, done.stdout
    planned = json.loads((run / "report.json").read_text())["planned"]
    assert (planned["strategy"], planned["world_size"]) == (strategy, ranks)
    assert "[train] Starting new" in done.stdout and (run / "report.md").exists()
