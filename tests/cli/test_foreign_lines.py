"""Whole command lines of TRL, Axolotl, LLaMA-Factory and Unsloth, and mistyped ones: each ends with a hint, at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from manyhands.cli.main import app
from manyhands.core.errors import EXIT_USAGE

TRL = "train --model_name_or_path org/m --dataset_name rows.jsonl"
LINES = (
    # TRL
    (f"{TRL} --use_peft --lora_r 16", "method.name"),
    (f"{TRL} --lora_target_modules all-linear", "method.target_modules"),
    (f"{TRL} --per_device_train_batch_size 4", "batch.samples"),
    (f"{TRL} --gradient_accumulation_steps 8", "batch.accumulation"),
    (f"{TRL} --gradient_checkpointing", "parallel.activation_checkpointing"),
    (f"{TRL} --packing", "write data.packing=..."),
    (f"{TRL} --eos_token <|im_end|>", 'model.special_tokens: {"eos": "<|im_end|>"}'),
    (f"{TRL} --eval_strategy steps --eval_steps 100", "evaluate.every_steps"),
    (f"{TRL} --push_to_hub", "manyhands push RUN"),
    (f"{TRL} --report_to wandb", "log.wandb"),
    (f"{TRL} --attn_implementation flash_attention_2", "kernels.attention"),
    (f"{TRL} --fp16 true", "float16 is not supported"),
    (f"{TRL} --deepspeed none.json", "--deepspeed none.json"),
    (f"{TRL} --warmup_ratio 0.1", "write schedule.warmup_ratio=0.1"),
    (f"{TRL} --lr_scheduler_type cosine", "schedule.name"),
    (f"{TRL} --assistant_only_loss", "data.train_on"),
    ("trl sft --config run.yaml", "manyhands train FILE"),
    ("sft --model_name_or_path org/m", "manyhands train RUN.yaml"),
    ("dpo --model_name_or_path org/m", "task: preference"),
    # Axolotl
    ("train --base_model org/m --datasets rows.jsonl", "data.train"),
    ("train run.yaml --adapter qlora", "method.name: lora"),
    ("train run.yaml --sample_packing true", "data.packing"),
    ("train run.yaml --micro_batch_size 2", "batch.samples"),
    ("train run.yaml --val_set_size 0.05", "data.validation_fraction"),
    ("train run.yaml --lora-model-dir out", "method.adapter"),
    ("train run.yaml --launcher accelerate -- --num_processes 4", "one process per GPU by itself"),
    ("axolotl train run.yaml", "manyhands train FILE"),
    ("preprocess run.yaml", "manyhands data RUN.yaml"),
    ("merge-lora run.yaml", "manyhands export RUN --merge"),
    ("inference run.yaml --lora-model-dir out", "manyhands generate RUN"),
    ("fetch examples", "manyhands init"),
    # LLaMA-Factory
    ("llamafactory-cli train run.yaml", "manyhands train FILE"),
    ("train run.yaml --stage sft --do_train", "`task`"),
    ("train run.yaml --finetuning_type lora", "method.name"),
    ("train run.yaml --template llama3", "model.chat_template"),
    ("train run.yaml --lora_target all", "method.target_modules"),
    ("train run.yaml --quantization_bit 4", "method.name: qlora"),
    ("webui", "manyhands ui"),
    ("export --model_name_or_path org/m --export_dir out", "manyhands export org/m"),
    # Unsloth
    ("train run.yaml --max_seq_length 2048 --dtype bfloat16", "write model.dtype=bfloat16"),
    ("train run.yaml --load_in_4bit", "method.name: qlora"),
    ("train run.yaml --save_method merged_16bit", "manyhands export RUN --merge"),
    ("train run.yaml --random_state 3407", "write seed=3407"),
    ("train run.yaml --use_gradient_checkpointing unsloth", "write parallel.activation_checkpointing=...:"),
    # mistyped
    ("train --model org/m --data rows.jsonl --epoch 3", "did you mean --epochs?"),
    ("train --model org/m --data rows.jsonl --lerning_rate 1e-4", "optimizer.learning_rate"),
    ("train --mdoel org/m --data rows.jsonl", "did you mean --model?"),
    ("train --model org/m --data", "--data needs a value"),
    ("train --model org/m --data rows.jsonl --epochs three", "--epochs: input should be a valid number"),
    ("train --model org/m --data rows.jsonl --lr=", "a number > 0 or `auto`"),
    ("train --model org/m rows.jsonl", "write --data rows.jsonl"),
    ("train org/m rows.jsonl", "--model org/m --data FILE"),
    ("train run.yaml lr=1e-4", "optimizer.learning_rate"),
    ("train run.yaml method=qlora", "write method.key=value"),
    ("train run.yaml --method dpo", "task: preference"),
    ("train runs.yaml", "run files there: run.yaml"),
    ("plan run.yaml --gpu 8", "--gpus N takes N GPUs"),
    ("plan run.yaml --gpus 8xH300", "write H200"),
    ("plan run.yaml --num_gpus 8", "parallel.gpus"),
    ("plan --model org/m", "--data rows.jsonl"),
    ("data run.yaml --num_samples 3", "data.max_samples"),
    ("data --dataset_name rows.jsonl", "--model OWNER/NAME"),
    ("data rows.jsonl", "with --model OWNER/NAME"),
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("model: {name: org/model}\ndata: {train: rows.jsonl}\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')


@pytest.mark.parametrize(("line", "said"), LINES)
def test_a_foreign_or_mistyped_line_is_answered(line: str, said: str) -> None:
    result = CliRunner().invoke(app, line.split())
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == EXIT_USAGE and said in result.output, result.output
    assert result.output.startswith("error: ") and "Traceback" not in result.output
