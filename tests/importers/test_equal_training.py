"""The same LoRA run in Axolotl's keys, LLaMA-Factory's, TRL's and ours: the same samples, plan and losses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from manyhands.launch.run.file import load_for_start
from manyhands.launch.run.prepare import gather_facts
from manyhands.planner.search import plan as make_plan
from tests.support.tiny import write_tiny_model
from tests.support.zygote import forking

NUM_ROWS = 24
NATIVE: dict[str, Any] = {
    "seed": 7,
    "model": {"dtype": "float32"},
    "method": {"name": "lora", "rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "data": {"validation_fraction": 0, "max_length": 64, "too_long": "error"},
    "batch": {"samples": 8},
    "optimizer": {"learning_rate": 1e-2},
    "schedule": {"name": "cosine", "warmup_ratio": 0.1},
    "stop": {"epochs": 1},
}
HUGGING_FACE = {  # what TRL and LLaMA-Factory share
    "learning_rate": 1e-2,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "num_train_epochs": 1,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "seed": 7,
    "lora_alpha": 8,
}
TRL = HUGGING_FACE | {
    "use_peft": True,
    "lora_r": 4,
    "lora_dropout": 0.0,
    "lora_target_modules": ["q_proj", "v_proj"],
    "max_length": 64,
    "assistant_only_loss": True,
}
LLAMA_FACTORY = HUGGING_FACE | {
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 4,
    "lora_target": "q_proj,v_proj",
    "dataset": "turns",
    "cutoff_len": 64,
}
AXOLOTL = {
    "adapter": "lora",
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "lora_target_modules": ["q_proj", "v_proj"],
    "sequence_len": 64,
    "micro_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_epochs": 1,
    "learning_rate": 1e-2,
    "lr_scheduler": "cosine",
    "warmup_ratio": 0.1,
    "optimizer": "adamw_torch",
    "seed": 7,
    "val_set_size": 0,
}


def write_files(folder: Path) -> dict[str, Path]:
    """One run file a tool, beside the same rows and model."""
    model, data = write_tiny_model(folder / "model"), folder / "turns.jsonl"
    turns = [[("user", f"What is {i}?"), ("assistant", f"It is {i}, or {i * i}.")] for i in range(NUM_ROWS)]
    rows = [{"messages": [{"role": role, "content": text} for role, text in pair]} for pair in turns]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    info = {
        "turns": {
            "file_name": str(data),
            "formatting": "sharegpt",
            "columns": {"messages": "messages"},
            "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
        }
    }
    (folder / "dataset_info.json").write_text(json.dumps(info))
    files = {
        "native": NATIVE
        | {"model": NATIVE["model"] | {"name": str(model)}, "data": NATIVE["data"] | {"train": str(data)}},
        "trl": TRL | {"model_name_or_path": str(model), "datasets": [{"path": "json", "data_files": str(data)}]},
        "llamafactory": LLAMA_FACTORY | {"model_name_or_path": str(model), "dataset_dir": str(folder)},
        "axolotl": AXOLOTL | {"base_model": str(model), "datasets": [{"path": str(data), "type": "chat_template"}]},
    }
    paths = {}
    for name, values in files.items():
        paths[name] = folder / f"{name}.yaml"
        paths[name].write_text(yaml.safe_dump(values, sort_keys=False))
    return paths


def overrides(folder: Path, name: str) -> list[str]:
    """What a CPU needs, where the result goes, and no checkpoints but the last."""
    ours = [f"name={name}", f"output.dir={folder / 'runs'}", f"data.cache={folder / 'cache'}", "model.dtype=float32"]
    return [*ours, "parallel.gpus=1", "evaluate.every_steps=0", "checkpoint.every_steps=0", "log.tensorboard=false"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_files(tmp_path_factory.mktemp("equal"))


def test_four_files_of_one_run_have_one_plan(files: dict[str, Path]) -> None:
    """All but the names of files and cache entries; host and disk are those of the first look."""
    plans, first = {}, None
    for name, file in files.items():
        config = load_for_start(file, overrides(file.parent, "run")).config
        facts = gather_facts(config, report=lambda _: None)
        first = first or facts
        facts = facts.model_copy(update={"host": first.host, "free_disk_bytes": first.free_disk_bytes})
        plans[name] = make_plan(config, facts).model_dump(exclude={"config_digest", "data_digest", "data_folder"})
    native = plans.pop("native")
    for name, plan in plans.items():
        assert {key: (plan[key], native[key]) for key in native if plan[key] != native[key]} == {}, name


@pytest.mark.slow
@pytest.mark.timeout(900)  # four whole runs
def test_four_files_of_one_run_have_the_same_losses(files: dict[str, Path]) -> None:
    losses = {}
    for name, file in files.items():
        command = [sys.executable, "-m", "manyhands", "train", str(file), *overrides(file.parent, name)]
        with forking():
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        lines = (file.parent / "runs" / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [row["loss"] for row in map(json.loads, lines) if "loss" in row]
    assert len(losses["native"]) >= 3
    for name in ("trl", "llamafactory", "axolotl"):
        assert losses[name] == losses["native"], name
