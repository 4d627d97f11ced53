"""The same work with images by TRL with Liger kernels: random weights of the same shape. Prints one JSON line.

    python -m benchmarks.peer_trl_vision --case qwen3vl4b-lora-images --output rows.jsonl

Rows, model folder and number of samples a step are those of ``benchmarks.vision``; LoRA on the language model alone.
TRL does not pack rows with images: they are padded, ``--micro`` of them at a time, and all tokens are trained.
``--recompute`` is gradient checkpointing. Needs trl, peft, datasets, liger-kernel and torchvision.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.peer_trl import Clock, summarise
from benchmarks.vision import CASES, Case, write_case
from manyhands.bench.rows import BenchRow, new_run, say

TARGETS = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"


def main() -> None:
    options = parse()
    case = CASES[options.case]
    folder = options.work / f"{case.shape}-{options.layers or 'all'}"
    write_case(folder, case, options, 1)
    row = BenchRow(options.case, options.case, case.shape, "lora", 1, rows=case.samples, length=case.length, data="mix")
    clock, tokens = measure(folder, case, options)
    decided = {"label": "trl", "gpus": 1, "micro": options.micro, "recompute": options.recompute, "attention": "sdpa"}
    result = summarise(row, options, clock, decided, ("trl", "peft", "liger_kernel", "torchvision"))
    if not clock.failure:
        seconds = sum(seconds for seconds, _ in clock.steps()[options.warm :])
        num_steps = options.steps - options.warm
        result |= {"samples_per_s_gpu": round(case.samples * num_steps / seconds, 2), "image_share": case.share}
        result |= {"pixels": case.pixels, "words": case.words, "num_tokens": tokens}
    say(result, options.output, "RESULT ")


def measure(folder: Path, case: Case, options: argparse.Namespace) -> tuple[Clock, int]:
    """The clock after training, and the tokens of all steps that are no padding."""
    from peft import LoraConfig
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor
    from trl import SFTConfig, SFTTrainer

    cuda = torch.cuda.is_available()
    config = AutoConfig.from_pretrained(folder / "model")
    with torch.device("cuda" if cuda else "cpu"):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    clock = Clock(options.steps)

    class Counting(SFTTrainer):
        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
            clock.num_tokens += int(inputs["attention_mask"].sum())
            return super().compute_loss(model, inputs, *arguments, **keywords)

    arguments = SFTConfig(
        output_dir=str(Path(tempfile.gettempdir()) / "manyhands-bench-peer"),
        per_device_train_batch_size=options.micro,
        gradient_accumulation_steps=max(1, case.samples // options.micro),
        max_steps=options.steps + 1,  # see Clock
        learning_rate=1e-5,
        bf16=cuda,
        use_cpu=not cuda,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        max_length=None,
        gradient_checkpointing=options.recompute,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        use_liger_kernel=cuda,
        optim="adamw_torch_fused",
        dataloader_num_workers=options.workers,
        remove_unused_columns=False,
    )
    trainer = Counting(
        model=model,
        args=arguments,
        train_dataset=rows_of(folder / f"images-{case.length}.jsonl"),
        processing_class=AutoProcessor.from_pretrained(folder / "model"),
        peft_config=LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=TARGETS, task_type="CAUSAL_LM"),
        callbacks=[clock.callback(lambda: trainer)],
    )
    clock.run(trainer)
    return clock, clock.num_tokens


def rows_of(file: Path) -> Any:
    """Rows as TRL takes them: messages, and a column of images that are decoded when they are read."""
    from datasets import Dataset, Image, List

    found: dict[str, list[Any]] = {"messages": [], "images": []}
    for line in file.read_text().splitlines():
        user, assistant = json.loads(line)["messages"]
        parts = user["content"]
        found["images"].append([part["image"] for part in parts if part["type"] == "image"])
        text = " ".join(part["text"] for part in parts if part["type"] == "text")
        found["messages"].append(
            [{"role": "user", "content": text}, {"role": "assistant", "content": assistant["content"]}]
        )
    return Dataset.from_dict(found).cast_column("images", List(Image()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--case", choices=[name for name, case in CASES.items() if case.method == "lora"], required=True
    )
    parser.add_argument("--layers", type=int, help="only so many blocks, of text and of the tower")
    parser.add_argument("--micro", type=int, default=8, help="rows at a time")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="processes that prepare rows")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "manyhands-vision")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    options.run = new_run()
    return options


if __name__ == "__main__":
    main()
