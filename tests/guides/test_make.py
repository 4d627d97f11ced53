"""The make targets of the guides, as they are written there, on a tiny run."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path

import pytest

from manyhands.core.errors import has_deepspeed
from tests.e2e.runs import free_port
from tests.guides.conftest import FAST, make

TARGETS = (
    *("setup-accelerate", "gpu-info", "memory-check", "tensorboard", "ui-demo", "eval", "infer", "merge"),
    *("train", "train-tb", "train-distributed", "train-distributed-tb", "train-deepspeed", "train-deepspeed-tb"),
)


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_of_a_guide_exists(target: str) -> None:
    assert (
        make(
            "-n", target, "-s" if target in ("setup-accelerate", "gpu-info", "ui-demo") else "CONFIG=run.yaml"
        ).returncode
        == 0
    )


@pytest.mark.parametrize("target", ["train-deepspeed", "train-deepspeed-tb"])
def test_deepspeed_is_zero_2_or_the_files(target: str) -> None:
    plain = make("-n", target, "CONFIG=a.yaml").stdout
    assert "train 'a.yaml' parallel.gpus=auto parallel.strategy=zero2" in plain
    assert ("--tensorboard" in plain) == target.endswith("-tb")
    by_file = make("-n", target, "CONFIG=a.yaml", "DEEPSPEED_CONFIG=d.json").stdout
    assert "--deepspeed 'd.json'" in by_file and "zero2" not in by_file
    if not has_deepspeed():
        done = make(target, "CONFIG=a.yaml")
        assert done.returncode == 2 and f"make {target} needs DeepSpeed" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("train-distributed", "CONFIG=run.yaml", "NPROC=2"), "does not read NPROC: ARGS='parallel.gpus=N'"),
        (("train-distributed", "CONFG=run.yaml"), "does not read CONFG; it reads: ACCELERATE_CONFIG ARGS CONFIG"),
        (("gpu-info", "DEEPSPEED_CONFIG=ds.json"), "does not read DEEPSPEED_CONFIG; it reads: nothing"),
        (("gpu-info", "NPROC=2"), "does not read NPROC; it reads: nothing"),
        (("train", "ACCELERATE_CONFIG=a.yaml"), "does not read ACCELERATE_CONFIG"),
    ],
)
def test_no_variable_is_ignored(arguments: tuple[str, ...], text: str) -> None:
    done = make(*arguments)
    assert done.returncode == 2 and text in done.stdout


@pytest.mark.parametrize("number", ["parallel.gpus=2", "--gpus 2"])
@pytest.mark.parametrize("target", ["train", "train-distributed", "train-deepspeed"])
def test_the_number_of_gpus_in_args_is_the_only_one(target: str, number: str) -> None:
    """Two spellings of it are an error of the command line."""
    said = make("-n", target, "CONFIG=a.yaml", f"ARGS={number}", HF_HOME="/nonexistent")
    assert number in said.stdout and ("--gpus" in said.stdout) != ("parallel.gpus" in said.stdout), said.stdout


@pytest.mark.parametrize("target", ["train-distributed", "train-distributed-tb", "train-deepspeed", "eval", "infer"])
def test_a_target_without_its_run_says_how_to_name_it(target: str) -> None:
    done = make(target)
    assert done.returncode == 2 and f"which run? make {target} CONFIG=run.yaml" in done.stdout


def test_settings_of_launchers_are_handed_on(tmp_path: Path) -> None:
    """By name or as accelerate's default configuration, which `none` leaves out."""
    named = make(
        "-n", "train-distributed", "CONFIG=a.yaml", "DEEPSPEED_CONFIG=d.json", "ACCELERATE_CONFIG=f.yaml"
    ).stdout
    assert "train 'a.yaml' --accelerate-config 'f.yaml' --deepspeed 'd.json'" in named
    default = tmp_path / "accelerate" / "default_config.yaml"
    default.parent.mkdir()
    default.write_text("num_processes: 2\n")
    found = make("-n", "train-distributed", "CONFIG=a.yaml", HF_HOME=str(tmp_path)).stdout
    assert f"--accelerate-config '{default}'" in found and "parallel.gpus" not in found
    left_out = make("-n", "train-distributed", "CONFIG=a.yaml", "ACCELERATE_CONFIG=none", HF_HOME=str(tmp_path)).stdout
    assert "accelerate" not in left_out and "parallel.gpus=auto" in left_out


def test_setup_accelerate_asks_nothing_and_says_what_was_found(tmp_path: Path) -> None:
    done = make("setup-accelerate", HF_HOME=str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert "nothing needs to be configured" in done.stdout and "has no default configuration" in done.stdout
    for answer in (
        "compute environment: this machine",
        "number of processes: 1",
        "GPU ids: none",
        "mixed precision: no",
    ):
        assert answer in done.stdout


@pytest.fixture(scope="module")
def trained(place: Path) -> tuple[subprocess.CompletedProcess[str], int]:
    """Two CPU processes with TensorBoard beside them."""
    port = free_port()
    arguments = f"output.dir={place}/runs parallel.gpus=2 data.packing=false batch.micro_samples=auto {FAST}"
    arguments += " batch.micro_tokens=auto"
    return make("train-distributed-tb", f"CONFIG={place}/run.yaml", f"PORT={port}", f"ARGS={arguments}"), port


@pytest.mark.slow
def test_training_shows_what_the_guide_expects(trained: tuple[subprocess.CompletedProcess[str], int]) -> None:
    done, port = trained
    assert done.returncode == 0, done.stdout
    assert (
        "[train] Detected 0 GPUs\n[train] Auto-calculated batch size: 4 per process, gradient accumulation: 1\n"
        in done.stdout
    )
    assert "[train] Effective batch size: 8\n" in done.stdout
    assert "[train] Starting new lora ddp run with fp32 precision on 2 CPU processes\n" in done.stdout
    assert f"TensorBoard: http://127.0.0.1:{port}/ until the run ends" in done.stdout
    assert "TensorBoard ended before" not in done.stdout
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "it has ended with the run"


@pytest.mark.slow
def test_a_finished_run_is_measured_again_asked_merged_and_compared(trained: object, place: Path) -> None:
    run = f"CONFIG={place}/runs/run"
    measured = make("eval", run, "ARGS=--json")
    assert measured.returncode == 0, measured.stdout
    figures = json.loads(measured.stdout.splitlines()[-1])
    assert figures["step"] == 2 and figures["loss"] == pytest.approx(figures["recorded_loss"], abs=1e-5)
    assert figures["num_loss_tokens"] > 0
    answer = make("infer", run, "PROMPT=one 'two' $$three", "ARGS=--max-new-tokens 3")
    assert answer.returncode == 0, answer.stdout
    merged = make("merge", run)
    assert merged.returncode == 0 and (place / "runs/run/merged/model.safetensors").exists(), merged.stdout
    memory = make("memory-check", run)
    assert memory.returncode == 0 and "run run: finished, step 2 of 2" in memory.stdout, memory.stdout
    assert "rank 1, CPU process: planned" in memory.stdout and "at the peak" in memory.stdout
