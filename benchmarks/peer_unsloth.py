"""The same work by Unsloth on one GPU: random weights of the same shape, all tokens trained. Prints one JSON line.

    python -m benchmarks.peer_unsloth --row 8b-lora --output rows.jsonl

Follows Unsloth's own notebooks: ``FastLanguageModel``, adapters on all linear layers, its trainer, 8-bit AdamW (fused
AdamW where all weights are trained). Blocks are recomputed its way (``use_gradient_checkpointing="unsloth"``) where the
row recomputes, else not at all, which is faster. Rows of mixed lengths are packed by it. Unsloth opens models from a
folder, so the random weights are first written to one, by a process of its own: Unsloth must be imported before
transformers. Needs unsloth, unsloth_zoo and a GPU, and no network.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.peer_trl import PACKS, Clock, add_common, count_tokens, read_row, row_lengths, summarise
from benchmarks.peers import peer_options
from manyhands.bench.rows import BenchRow, say
from manyhands.bench.shapes import SHAPES

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WRITE_LIMIT_S = 240
SPECIAL = {"unk_token": "t0", "pad_token": "t1", "eos_token": "t2", "bos_token": "t3"}
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "UNSLOTH_DISABLE_STATISTICS": "1",  # would fetch a file of the hub
    "UNSLOTH_COMPILE_LOCATION": "/tmp/manyhands-bench/unsloth-compiled",  # else into the current folder
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("/tmp/manyhands-bench"))
    parser.add_argument("--write", type=Path, help="only write a folder with random weights of the row's shape")
    add_common(parser)
    options = parser.parse_args()
    row = read_row(options)
    if options.write:
        write_weights(options.write, row.shape)
        return
    if not torch.cuda.is_available() and not options.shape:
        sys.exit("Unsloth is measured on a GPU, and torch sees none (--shape tiny tries this on a CPU)")
    if row.gpus > 1:
        sys.exit(f"{row.name} is a row of {row.gpus} GPUs; Unsloth is measured on one")
    os.environ.update(SETTINGS)
    folder = options.work / f"{row.shape}-unsloth"
    if not folder.exists():
        command = [
            sys.executable,
            "-m",
            "benchmarks.peer_unsloth",
            "--row",
            row.name,
            "--shape",
            row.shape,
            "--write",
            str(folder),
        ]
        subprocess.run(command, check=True, timeout=WRITE_LIMIT_S)
    clock, decided = measure(row, options, folder)
    say(summarise(row, options, clock, decided, ("unsloth", "unsloth_zoo", "trl", "peft")), options.output, "RESULT ")


def write_weights(folder: Path, shape: str) -> None:
    """A model folder with bfloat16 weights as transformers draws them, and a tokenizer of as many words as the model
    knows ids.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    model_type, fields = SHAPES[shape]
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields), dtype=torch.bfloat16)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    model.save_pretrained(unfinished, max_shard_size="8GB")
    words = {f"t{index}": index for index in range(fields["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=131072, **SPECIAL).save_pretrained(unfinished)
    unfinished.rename(folder)


def measure(row: BenchRow, options: argparse.Namespace, folder: Path) -> tuple[Clock, dict[str, Any]]:
    try:
        from unsloth import FastLanguageModel  # first: it changes what comes after it
    except Exception as error:  # it raises many kinds where a package does not fit
        sys.exit(f"Unsloth cannot be imported: {type(error).__name__}: {error}")
    from trl import SFTTrainer

    recompute = "unsloth" if peer_options(row.name).get("recompute") else False
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(folder),
        max_seq_length=row.length,
        dtype=torch.bfloat16,
        load_in_4bit=row.method == "qlora",
        full_finetuning=row.method == "full",
        use_gradient_checkpointing=recompute,
        local_files_only=True,
    )
    if row.method != "full":
        model = FastLanguageModel.get_peft_model(
            model,
            r=16,
            lora_alpha=32,
            lora_dropout=0,
            bias="none",
            target_modules=LINEAR,
            use_gradient_checkpointing=recompute,
            random_state=0,
        )
    clock = Clock(options.steps)

    class Counting(SFTTrainer):
        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
            clock.num_tokens += count_tokens(inputs, padded=row.data == "mix")
            return super().compute_loss(model, inputs, *arguments, **keywords)

    trainer = Counting(
        model=model,
        processing_class=tokenizer,
        args=make_arguments(row, options),
        train_dataset=make_rows(row, options),
        callbacks=[clock.callback(lambda: trainer)],
    )
    clock.run(trainer)
    decided = {
        "label": "unsloth",
        "gpus": 1,
        "micro": [trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps],
        "attention": str(getattr(model.config, "_attn_implementation", None)),
        "packing": bool(trainer.args.packing),  # as Unsloth has left it
        "padding_free": bool(getattr(trainer.args, "padding_free", False)),
    }
    return clock, decided


def make_arguments(row: BenchRow, options: argparse.Namespace) -> Any:
    from trl import SFTConfig

    mixed = row.data == "mix"
    return SFTConfig(
        output_dir=str(options.work / "unsloth-output"),
        per_device_train_batch_size=PACKS if mixed else row.rows,
        gradient_accumulation_steps=1,
        max_steps=options.steps + 1,  # see Clock
        learning_rate=1e-5,
        bf16=True,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        max_length=row.length,
        packing=mixed,
        dataset_num_proc=1,
        dataset_kwargs={"skip_prepare_dataset": not mixed},
        optim="adamw_torch_fused" if row.method == "full" else "adamw_8bit",
    )


def make_rows(row: BenchRow, options: argparse.Namespace) -> Any:
    """Token ids where all rows are full, texts where Unsloth is to pack them."""
    from datasets import Dataset

    options.packing, options.micro = row.data == "mix", None
    lengths = row_lengths(row, options, 1)
    draw = random.Random(1)
    num_words = SHAPES[row.shape][1]["vocab_size"]
    if options.packing:
        return Dataset.from_dict(
            {"text": [" ".join(f"t{draw.randrange(4, num_words)}" for _ in range(length)) for length in lengths]}
        )
    different = [[draw.randrange(4, num_words) for _ in range(row.length)] for _ in range(min(len(lengths), 64))]
    rows = [different[index % len(different)] for index in range(len(lengths))]
    return Dataset.from_dict({"input_ids": rows, "labels": rows, "attention_mask": [[1] * row.length] * len(rows)})


if __name__ == "__main__":
    main()
