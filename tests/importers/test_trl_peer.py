"""Three files trained by TRL itself and by us, on a CPU: the same token ids, loss tokens and losses.

A step holds all samples, so that the order, which differs, does not matter.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from manyhands.data.store.store import TokenStore
from manyhands.data.tokenize.prepare import prepare
from manyhands.launch.run.file import load_for_start
from tests.support.tiny import write_tiny_model
from tests.support.zygote import forking

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed"),
]
NUM_SAMPLES, NUM_STEPS = 8, 5
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": NUM_STEPS,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "bf16": False,
    "save_strategy": "no",
    "report_to": "none",
    "max_length": 64,
    "loss_type": "nll",
    "gradient_checkpointing": False,
}
WORDS = ("one", "two three", "four five six", "seven", "eight nine", "ten", "eleven twelve", "more")
FILES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "full on conversations": (
        {},
        [{"messages": [{"role": "user", "content": w}, {"role": "assistant", "content": w * 2}]} for w in WORDS],
    ),
    "LoRA on prompts with completions": (
        {"use_peft": True, "lora_r": 4, "lora_dropout": 0.0, "lora_target_modules": ["q_proj", "v_proj"]},
        [{"prompt": f"{w}? ", "completion": w[::-1]} for w in WORDS],
    ),
    "full on text, weight decay and clipping": (
        {"weight_decay": 0.1, "lr_scheduler_type": "cosine", "max_grad_norm": 0.5},
        [{"text": f"{w} and {w}"} for w in WORDS],
    ),
}
PEER = """
import json, sys
import torch
from datasets import load_dataset
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config
parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig))
script, args, model, mixture = parser.parse_args_and_config(["--config", sys.argv[1]])
args.use_cpu, args.dataloader_pin_memory = True, False
args.model_init_kwargs = {"dtype": "float32"}
data = load_dataset("json", data_files=sys.argv[2])["train"]
trainer = SFTTrainer(model=model.model_name_or_path, args=args, train_dataset=data, peft_config=get_peft_config(model))
rows = [trainer.train_dataset[i] for i in range(len(trainer.train_dataset))]
batch = [trainer.data_collator([row]) for row in rows]
trainer.train()
print(json.dumps({
    "ids": [one["input_ids"][0].tolist() for one in batch],
    "labels": [one["labels"][0].tolist() for one in batch],
    "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("peer") / "model", "llama")


@pytest.mark.parametrize("name", FILES)
def test_the_same_file_trains_the_same(name: str, model: Path, tmp_path: Path) -> None:
    values, rows = FILES[name]
    data, file = tmp_path / "train.jsonl", tmp_path / "sft.yaml"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = {"model_name_or_path": str(model), "datasets": [{"path": "json", "data_files": str(data)}]}
    asked |= {"output_dir": str(tmp_path / "out" / "sft")} | COMMON | values
    file.write_text(yaml.safe_dump(asked, sort_keys=False))
    theirs = run_peer(file, data)
    ours = [f"data.cache={tmp_path / 'cache'}", "model.dtype=float32", "parallel.gpus=1"]
    config = load_for_start(file, ours).config
    store = TokenStore.open(prepare(config, model).folder)
    samples = [store.train.sample(number) for number in range(NUM_SAMPLES)]
    assert [sample["tokens"].tolist() for sample in samples] == theirs["ids"]
    for sample, labels in zip(samples, theirs["labels"], strict=True):
        assert [label != -100 for label in labels] == sample["mask"].astype(bool).tolist()
    losses = train(file, ours, tmp_path)
    if config.method.trains_adapters:  # their A matrices are drawn otherwise; before the first update they do nothing
        assert losses[0] == pytest.approx(theirs["losses"][0], abs=2e-4)
    else:
        assert losses == pytest.approx(theirs["losses"], abs=2e-4)


def run_peer(file: Path, data: Path) -> dict[str, Any]:
    command = [sys.executable, "-c", PEER, str(file), str(data)]
    with forking():
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def train(file: Path, overrides: list[str], folder: Path) -> list[float]:
    command = [sys.executable, "-m", "manyhands", "train", str(file), *overrides]
    with forking():
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = (folder / "out" / "sft" / "metrics.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, lines) if row.get("kind") == "step" or "loss" in row]
