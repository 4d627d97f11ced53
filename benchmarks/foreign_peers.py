"""Published run files trained beside the tool that they are for: token ids, loss tokens and losses of five steps.

    python -m benchmarks.foreign_peers {axolotl,llamafactory,trl} --python VENV/bin/python FILE...

Of each file model, data, lengths of the run and what needs a GPU are replaced (``REPLACED``), by a tiny model and
eight rows on a CPU; every other key stays. A step holds all rows, so that their order does not matter. ``--python`` is
that of an environment with the tool.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from benchmarks.foreign_files import TEMPLATE, TOKENS

NUM_STEPS = 5
WORDS = ("one", "two three", "four five six", "seven", "eight nine", "ten", "eleven twelve", "more")
ALPACA = [{"instruction": f"Say {word}.", "input": "", "output": f"It is {word[::-1]}."} for word in WORDS]
CHATS = [
    {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": f"{word}, {word}."}]}
    for word in WORDS
]
TEXTS = [{"text": f"{word} and {word} are there."} for word in WORDS]
BATCH = {"gradient_accumulation_steps": 2, "max_steps": NUM_STEPS, "logging_steps": 1, "learning_rate": 1e-3}
TRAINER = BATCH | {"per_device_train_batch_size": 4, "bf16": False, "save_strategy": "no", "report_to": "none",
                   "gradient_checkpointing": False, "eval_strategy": "no"}  # fmt: skip
REPLACED: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "axolotl": BATCH
        | {"micro_batch_size": 4, "sample_packing": False, "pad_to_sequence_len": None, "bf16": False, "tf32": False,
           "attn_implementation": "sdpa", "gradient_checkpointing": False, "val_set_size": 0, "saves_per_epoch": None,
           "evals_per_epoch": None, "save_steps": None, "eval_sample_packing": None, "load_in_8bit": False,
           "load_in_4bit": False, "optimizer": "adamw_torch", "lora_mlp_kernel": False, "lora_qkv_kernel": False,
           "lora_o_kernel": False, "plugins": None, "num_epochs": 50, "deepspeed": None, "resume_from_checkpoint": None,
           "test_datasets": None, "use_tensorboard": False},
        "llamafactory": TRAINER
        | {"preprocessing_num_workers": 1, "dataloader_num_workers": 0, "flash_attn": "sdpa", "deepspeed": None,
           "ddp_timeout": None, "plot_loss": False, "overwrite_cache": True, "trust_remote_code": False},
        "trl": TRAINER
        | {"dataset_mixture": None, "dataset_name": None, "dataset_config": None, "dataset_train_split": None,
           "dataset_test_split": None, "load_in_4bit": None, "attn_implementation": None, "packing": None,
           "max_steps": NUM_STEPS, "push_to_hub": None, "hub_model_id": None, "hub_strategy": None,
           "test_split_size": None, "trust_remote_code": None, "use_liger_kernel": None, "model_revision": None,
           "gradient_checkpointing_kwargs": None, "chat_template": None, "save_steps": None, "loss_type": "nll",
           "dataset_num_proc": None, "num_train_epochs": None, "torch_dtype": None, "dtype": None},
    }
)  # fmt: skip
# Names that the tool's present version refuses, and what it calls them.
RENAMED = MappingProxyType({"trl": {"max_seq_length": "max_length"}, "axolotl": {}, "llamafactory": {}})
PEERS = MappingProxyType(
    {
        "trl": """
import json, sys, torch
from datasets import load_dataset
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config
parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig))
script, args, model, mixture = parser.parse_args_and_config(["--config", sys.argv[1]])
args.use_cpu, args.dataloader_pin_memory, args.model_init_kwargs = True, False, {"dtype": "float32"}
data = load_dataset("json", data_files=sys.argv[2])["train"]
trainer = SFTTrainer(model=model.model_name_or_path, args=args, train_dataset=data, peft_config=get_peft_config(model))
batches = [trainer.data_collator([trainer.train_dataset[i]]) for i in range(len(trainer.train_dataset))]
rows = [(batch["input_ids"][0].tolist(), batch["labels"][0].tolist()) for batch in batches]
trainer.train()
history = trainer.state.log_history
""",
        "axolotl": """
import json, sys
from pathlib import Path
from axolotl.cli.config import load_cfg
from axolotl.cli.args import TrainerCliArgs
from axolotl.common.datasets import load_datasets
from axolotl.train import train
cfg = load_cfg(sys.argv[1])
meta = load_datasets(cfg=cfg, cli_args=TrainerCliArgs())
rows = [(row["input_ids"], row["labels"]) for row in meta.train_dataset]
_, _, trainer = train(cfg=cfg, dataset_meta=meta)
history = trainer.state.log_history
""",
        "llamafactory": """
import importlib.machinery, json, sys, types, yaml
from pathlib import Path
sound = types.ModuleType("torchaudio")  # which may have been built for another CUDA than torch; nothing here has sound
sound.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
sys.modules["torchaudio"] = sound
from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
from llamafactory.hparams import get_train_args
from llamafactory.model import load_tokenizer
from llamafactory.train.tuner import run_exp
asked = yaml.safe_load(Path(sys.argv[1]).read_text())
model_args, data_args, training_args, _, _ = get_train_args(dict(asked))
module = load_tokenizer(model_args)
template = get_template_and_fix_tokenizer(module["tokenizer"], data_args)
data = get_dataset(template, model_args, data_args, training_args, stage=asked["stage"], **module)["train_dataset"]
rows = [(row["input_ids"], row.get("labels") or row["input_ids"]) for row in data]
run_exp(dict(asked))
log = Path(asked["output_dir"]) / "trainer_log.jsonl"
history = [json.loads(line) for line in log.read_text().splitlines()]
""",
    }
)
END = """
losses = [entry["loss"] for entry in history if "loss" in entry]
print("\\nFOUND " + json.dumps({"ids": [r[0] for r in rows], "labels": [r[1] for r in rows], "losses": losses}))
"""


COLUMNS = ("file", "same ids", "same loss tokens", "more loss tokens there", "first loss there", "ours on those labels",
           "first loss here", "steps compared", "widest difference")  # fmt: skip


def compare(tool: str, file: Path, python: str, work: Path) -> str:
    """One row of the table. Raises RuntimeError with what failed."""
    given = yaml.safe_load(file.read_text(encoding="utf-8"))
    for old, new in RENAMED[tool].items():
        if old in given:
            given[new] = given.pop(old)
    asked = {key: value for key, value in (given | REPLACED[tool]).items() if value is not None}
    model = write_model(work / "model", given.get("special_tokens") or {})
    data = write_data(tool, asked, work)
    asked |= {"output_dir": str(work / "out" / "run")}
    asked |= {"base_model" if tool == "axolotl" else "model_name_or_path": str(model)}
    run = work / "run.yaml"
    run.write_text(yaml.safe_dump(asked, sort_keys=False), encoding="utf-8")
    theirs = train_theirs(tool, python, run, data, work)
    ours = train_ours(run, model, work)
    return describe(file, theirs, ours, mean_loss(model, theirs["ids"], theirs["labels"]))


def write_model(folder: Path, special: Mapping[str, Any]) -> Path:
    from tests.support.tiny import tiny_model, tiny_tokenizer

    named = [token for value in special.values() for token in ([value] if isinstance(value, str) else value or ())]
    tokenizer = tiny_tokenizer((*TOKENS, *(token for token in dict.fromkeys(named) if token not in TOKENS)))
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template = "<|im_end|>", "<|pad|>", TEMPLATE
    eos = tokenizer.convert_tokens_to_ids("<|im_end|>")
    tiny_model("llama", "float32", 0, vocab_size=len(tokenizer), eos_token_id=eos).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_data(tool: str, asked: dict[str, Any], work: Path) -> Path:
    """Writes eight rows of the format that the file reads, and puts their place into the file."""
    data = work / "rows.json" if tool == "llamafactory" else work / "rows.jsonl"
    if tool == "axolotl":
        (entry, *_) = asked["datasets"]
        kept = {key: value for key, value in entry.items() if key not in ("path", "name", "split", "revision")}
        rows = ALPACA if str(entry["type"]).startswith("alpaca") else TEXTS if entry["type"] == "completion" else CHATS
        if entry.get("field_messages") or entry.get("message_property_mappings"):
            names = entry.get("message_property_mappings") or {}
            rows = [{entry.get("field_messages", "messages"): [
                {names.get(key, key): value for key, value in turn.items()} for turn in row["messages"]]}
                for row in CHATS]  # fmt: skip
        asked["datasets"] = [kept | {"path": str(data), "ds_type": "json"}]
        asked["dataset_prepared_path"] = str(work / "prepared")
    elif tool == "llamafactory":
        rows = TEXTS if asked["stage"] == "pt" else ALPACA
        entry = {"file_name": data.name} | ({"columns": {"prompt": "text"}} if asked["stage"] == "pt" else {})
        (work / "dataset_info.json").write_text(json.dumps({"mine": entry}), encoding="utf-8")
        asked |= {"dataset": "mine", "dataset_dir": str(work)}
        asked.pop("eval_dataset", None)
    else:
        rows = CHATS
        asked["datasets"] = [{"path": "json", "data_files": str(data)}]
    text = json.dumps(rows) if data.suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows)
    data.write_text(text, encoding="utf-8")
    return data


def train_theirs(tool: str, python: str, run: Path, data: Path, work: Path) -> dict[str, Any]:
    command = [python, "-c", PEERS[tool] + END, str(run), str(data)]
    around = os.environ | {"HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1", "WANDB_MODE": "disabled"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200, cwd=work, env=around)
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    if not found:
        raise RuntimeError(f"{tool} failed:\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
    return json.loads(found[-1].removeprefix("FOUND "))


def train_ours(run: Path, model: Path, work: Path) -> dict[str, Any]:
    from manyhands.data.store.store import TokenStore
    from manyhands.data.tokenize.prepare import prepare
    from manyhands.launch.run.file import load_for_start

    overrides = [f"data.cache={work / 'cache'}", "model.dtype=float32", "parallel.gpus=1"]
    overrides += [f"output.dir={work / 'ours'}", "name=run", "stop.divergence=warn"]
    config = load_for_start(run, overrides).config
    store = TokenStore.open(prepare(config, model).folder)
    samples = [store.train.sample(number) for number in range(len(WORDS))]
    command = [sys.executable, "-m", "manyhands", "train", str(run), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    if done.returncode:
        raise RuntimeError(f"manyhands failed:\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
    lines = map(json.loads, (work / "ours" / "run" / "metrics.jsonl").read_text().splitlines())
    return {
        "ids": [sample["tokens"].tolist() for sample in samples],
        "mask": [sample["mask"].astype(bool).tolist() for sample in samples],
        "losses": [line["loss"] for line in lines if "loss" in line],
        "lora": config.method.trains_adapters,
    }


def mean_loss(folder: Path, ids: list[list[int]], labels: list[list[int]]) -> float:
    """Of the model before training, over all loss tokens: what the first step of both must have on equal labels."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for sample, asked in zip(ids, labels, strict=True):
            logits = model(torch.tensor([sample])).logits[0, :-1]
            goal = torch.tensor(asked[1:])
            total += float(torch.nn.functional.cross_entropy(logits, goal, ignore_index=-100, reduction="sum"))
            count += int((goal != -100).sum())
    return total / count


def describe(file: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any], on_theirs: float) -> str:
    """File, samples with the same ids, with the same loss tokens, loss tokens that one of both has, losses: theirs,
    what our loss is on their labels, ours.
    """
    masks = {tuple(ids): [label != -100 for label in labels] for ids, labels in
             zip(theirs["ids"], theirs["labels"], strict=True)}  # fmt: skip
    pairs = [(mask, masks.get(tuple(ids))) for ids, mask in zip(ours["ids"], ours["mask"], strict=True)]
    same_ids = sum(found is not None for _, found in pairs)
    # the first token has nothing to be predicted from
    same = sum(found is not None and mask[1:] == found[1:] for mask, found in pairs)
    more = sum(sum(found[1:]) - sum(mask[1:]) for mask, found in pairs if found is not None)
    steps = 1 if ours["lora"] else min(len(ours["losses"]), len(theirs["losses"]))
    losses = list(zip(theirs["losses"][:steps], ours["losses"][:steps], strict=True))
    widest = max(abs(one - other) for one, other in losses)
    first = f"{losses[0][0]:.4f} | {on_theirs:.4f} | {losses[0][1]:.4f}"
    cells = (file.name, f"{same_ids} of {len(pairs)}", f"{same} of {len(pairs)}", more, first, steps, f"{widest:.1e}")
    return f"| {' | '.join(map(str, cells))} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=sorted(PEERS))
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--python", default=sys.executable, help="of an environment that has the tool")
    options = parser.parse_args()
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---" * len(COLUMNS) + "|")
    failed = 0
    for file in options.files:
        with tempfile.TemporaryDirectory() as work:
            try:
                print(compare(options.tool, file, options.python, Path(work)), flush=True)
            except RuntimeError as error:
                failed += 1
                print(f"| {file.name} | failed |\n{error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
