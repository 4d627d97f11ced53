"""The guides' own files by the guides' own commands, with model, data and length replaced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manyhands.core.errors import has_deepspeed
from tests.e2e.runs import free_port
from tests.guides.conftest import FAST, call, make


def replaced(place: Path, name: str) -> str:
    keys = f"model.name={place}/model data.train={place}/rows.jsonl data.max_length=256 data.validation=null"
    return f"{keys} data.cache={place}/cache output.dir={place}/runs name={name}"


def test_the_sum_of_the_fft_example_is_refused(place: Path) -> None:
    example = "examples/multi_gpu_fft_8xh100.toml"
    done = call(
        "bash", "-c", f"$MANYHANDS_PYTHON -m manyhands train --type sft --config {example} --dataset {place}/rows.jsonl"
    )
    assert done.returncode == 2 and "1 × 8 × 16 = 128, not 64" in done.stdout, done.stdout


@pytest.mark.parametrize("name", ["llava_pretrain_full", "llava_pretrain_full_gradchkpt"])
def test_a_data_set_of_the_tools_own_code_is_refused_by_name(name: str) -> None:
    done = call("bash", "-c", f"$MANYHANDS_PYTHON scripts/train_hf.py --config configs/{name}.json")
    assert done.returncode == 2 and "`llava_pretrain`: it is looked up in TheWorld's own code" in done.stdout, (
        done.stdout
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run_dapt", "run_gemma27b_distributed", "run_llama70b"])
def test_sft_plays_files_are_planned(place: Path, name: str) -> None:
    done = make("train-distributed", f"CONFIG=configs/{name}.yaml", f"ARGS={replaced(place, name)} --dry-run")
    assert done.returncode == 0 and f"configs/{name}.yaml: read as sft-play's" in done.stdout, done.stdout
    assert "[train] Auto-calculated batch size" in done.stdout


@pytest.mark.slow
def test_sft_plays_quick_start_trains(place: Path) -> None:
    run = (f"ARGS={replaced(place, 'bnb')} parallel.gpus=2 {FAST}", f"PORT={free_port()}")
    done = make("train-distributed-tb", "CONFIG=configs/run_bnb.yaml", *run)
    assert done.returncode == 0, done.stdout
    assert "[train] Starting new qlora ddp run with bf16 precision on 2 CPU processes" in done.stdout
    folder = place / "runs/bnb"
    assert json.loads((folder / "run.json").read_text())["method"]["name"] == "qlora"
    assert (folder / "adapter/adapter_model.safetensors").exists() and (folder / "origin/run_bnb.yaml").exists()
    assert make("memory-check", f"CONFIG={folder}").returncode == 0


@pytest.mark.slow
def test_synth_ais_qlora_example_is_planned(place: Path) -> None:
    example = "--type sft --config examples/multi_gpu_qlora_4xh100.toml"
    keys = replaced(place, "synth").replace(f"data.train={place}/rows.jsonl ", "")
    command = (
        f"$MANYHANDS_PYTHON -m manyhands train {example} --dataset {place}/rows.jsonl --examples 70 --dry-run {keys}"
    )
    done = call("bash", "-c", command)
    assert (
        done.returncode == 0
        and ("zero2, DeepSpeed" if has_deepspeed() else "DeepSpeed is not installed") in done.stdout
    ), done.stdout
    assert "[train] Effective batch size: 64" in done.stdout
