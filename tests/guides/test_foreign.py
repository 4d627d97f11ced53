"""The guides' own files by the guides' own commands, with model, data and length replaced."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from PIL import Image

from manyhands.core.errors import has_deepspeed
from tests.e2e.runs import free_port
from tests.guides.conftest import FAST, call, make
from tests.support.vision import write_tiny_vision


def replaced(place: Path, name: str) -> str:
    keys = f"model.name={place}/model data.train={place}/rows.jsonl data.max_length=256 data.validation=null"
    return f"{keys} data.cache={place}/cache output.dir={place}/runs name={name}"


def test_the_sum_of_the_fft_example_is_refused(place: Path) -> None:
    example = "examples/multi_gpu_fft_8xh100.toml"
    done = call(
        "bash", "-c", f"$MANYHANDS_PYTHON -m manyhands train --type sft --config {example} --dataset {place}/rows.jsonl"
    )
    assert done.returncode == 2 and "1 × 8 × 16 = 128, not 64" in done.stdout, done.stdout


def draw_rows(folder: Path) -> Path:
    """40 rows in LLaVA's format; their images are in drawn.zip."""
    with zipfile.ZipFile(folder / "drawn.zip", "w") as archive:
        for number in range(4):
            Image.new("RGB", (30, 30), (60 * number, 9, 9)).save(folder / "a.png")
            archive.write(folder / "a.png", f"{number}.png")
    turns = [("human", "Describe it.\n<image>"), ("gpt", "a square")]
    conversation = [{"from": who, "value": text} for who, text in turns]
    rows = [{"id": str(n), "image": f"{n % 4}.png", "conversations": conversation} for n in range(40)]
    (folder / "chat.json").write_text(json.dumps(rows))
    return folder / "chat.json"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llava_pretrain_full", "llava_pretrain_full_gradchkpt"])
def test_theworlds_first_command_asks_the_hub_and_trains_rows_that_are_given(
    name: str, place: Path, tmp_path: Path
) -> None:
    model = write_tiny_vision(tmp_path / "model", "gemma3")
    command = f"HF_HUB_OFFLINE=1 $MANYHANDS_PYTHON scripts/train_hf.py --config configs/{name}.json model.name={model} "
    command += f"data.cache={tmp_path}/cache output.dir={tmp_path}/runs"
    done = call("bash", "-c", command)
    assert done.returncode == 2 and "liuhaotian/LLaVA-CC3M-Pretrain-595K" in done.stdout, done.stdout
    rows = draw_rows(tmp_path)
    done = call(
        "bash",
        "-c",
        f"{command} data.train={rows} data.image_folder={tmp_path}/drawn.zip stop.max_steps=2 schedule.warmup_steps=1",
    )
    assert done.returncode == 0, done.stdout
    assert "finished" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run_dapt", "run_gemma27b_distributed", "run_llama70b"])
def test_sft_plays_files_are_planned(place: Path, name: str) -> None:
    done = make("train-distributed", f"CONFIG=configs/{name}.yaml", f"ARGS={replaced(place, name)} --dry-run")
    assert done.returncode == 0 and f"configs/{name}.yaml: read as sft-play's" in done.stdout, done.stdout
    assert "[train] Auto-calculated batch size" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not has_deepspeed(), reason="needs DeepSpeed")
def test_sft_plays_pair_of_qlora_and_stage_3_is_sharded_by_fsdp(place: Path) -> None:
    files = ("CONFIG=configs/run_bnb.yaml", "DEEPSPEED_CONFIG=configs/deepspeed_custom.json")
    done = make("train-deepspeed", *files, f"ARGS={replaced(place, 'pair')} parallel.gpus=2 --dry-run")
    assert done.returncode == 0, done.stdout
    assert "DeepSpeed's stages are not available with `method.name: qlora`" in done.stdout
    assert "fsdp, sharded over 2 processes" in done.stdout


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
