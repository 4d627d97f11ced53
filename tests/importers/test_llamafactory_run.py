"""A LLaMA-Factory file with its data sets, trained as it is on the CPU: files, settings and losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.tiny import write_tiny_model
from tests.support.zygote import forking

FILE = {
    "model_name_or_path": "model",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 4,
    "dataset": "sums,talks",
    "template": "qwen3_nothink",
    "cutoff_len": 256,
    "max_samples": 20,
    "preprocessing_num_workers": 16,
    "output_dir": "saves/tiny/sft",
    "overwrite_output_dir": True,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1.0e-3,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "max_steps": 3,
    "ddp_timeout": 180000000,
    "resume_from_checkpoint": None,
}
INFO = {
    "sums": {"file_name": "sums.json"},
    "talks": {
        "file_name": "talks.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "talk"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
}


def write_data(folder: Path) -> None:
    folder.mkdir()
    (folder / "dataset_info.json").write_text(json.dumps(INFO))
    sums = [{"instruction": f"{i} + {i}", "input": "Be brief.", "output": str(2 * i)} for i in range(30)]
    (folder / "sums.json").write_text(json.dumps(sums))
    turns = [[("user", f"Say {i}"), ("assistant", f"{i}"), ("user", "More"), ("assistant", "No")] for i in range(30)]
    talks = [{"talk": [{"role": role, "content": text} for role, text in talk], "system": "unread"} for talk in turns]
    (folder / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))


@pytest.mark.slow  # a whole run
def test_a_file_and_its_data_sets_are_trained_as_they_are(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", "llama")
    write_data(tmp_path / "data")
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(FILE, sort_keys=False))
    with forking():
        done = subprocess.run(
            [sys.executable, "-m", "manyhands", "train", "sft.yaml", "data.cache=cache", "parallel.device=cpu"],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "saves/tiny/sft"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3]
    config = json.loads((run / "run.json").read_text())
    assert config["batch"]["samples"] == 4 and config["seed"] == 42
    adapter = json.loads((run / "adapter/adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"]) == (4, 8)
    sums, talks = config["data"]["train"]
    assert (sums["split"], talks["split"], talks["ignore"]) == ("train[:20]", "train[:20]", ["system"])
