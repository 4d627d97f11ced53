"""What users of other tools type, and mistyped lines: each is answered, at once, by what to write here."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from transformers import TrainingArguments
from typer.testing import CliRunner

from manyhands.api.runs import _read_gpus
from manyhands.cli.main import app
from manyhands.cli.option_hints import explain_option
from manyhands.core.errors import EXIT_USAGE

OF_TORCHRUN = "nnodes nproc_per_node rdzv_backend rdzv_endpoint standalone max_restarts role log_dir tee master_port"
OF_ACCELERATE = (
    "config_file cpu multi_gpu mixed_precision num_processes num_machines machine_rank main_process_ip use_fsdp "
    "use_deepspeed dynamo_backend gpu_ids fsdp_version fsdp_sharding_strategy fsdp_offload_params deepspeed_config_file"
)
OF_UNSLOTH = (
    "model_name max_seq_length dtype load_in_4bit dataset r lora_alpha use_gradient_checkpointing random_state "
    "use_rslora loftq_config save_model save_method save_gguf push_model hub_path full_finetuning"
)
OF_TRL = "model_name_or_path use_peft lora_r lora_target_modules attn_implementation dataset_name packing padding_free"
OF_AXOLOTL = (
    "base_model adapter val_set_size sequence_len sample_packing micro_batch_size num_epochs launcher cloud sweep"
)
OF_LLAMA_FACTORY = "stage do_train finetuning_type template cutoff_len dataset val_size quantization_bit lora_target"
FIELDS = [field.name for field in dataclasses.fields(TrainingArguments)]


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
    # typed in error
    ("train run.yaml --resume", "starting the same run again resumes it"),
    ("train run.yaml -lr 1e-4", "write --lr"),
    ("train run.yaml --method.rank=8", "write method.rank=8"),
    ("train run.yaml --stop.epochs --dry-run", "write stop.epochs=..."),
    ("train run.yaml --node_rank 1", "write --node-rank"),
    ("train run.yaml --dryrun", "did you mean --dry-run?"),
    ("train run.yaml --zzzzzz", "`manyhands config` lists all keys, `manyhands train -h` all options"),
    ("submit run.yaml --nnodes 2", "--node-rank R"),
    ("train run.yaml --gpus 0,1", "CUDA_VISIBLE_DEVICES=0,1"),
    ("train run.yaml --gpus cpu", "parallel.device=cpu"),
    ("train model.name=X data.train=Y", "manyhands train RUN.yaml model.name=X; run files there: run.yaml"),
    ("plan rows.jsonl", "manyhands init --data rows.jsonl"),
    ("train rows", "manyhands init --data rows"),
    ("train model", "name it in model.name"),
    ("train runs/one", "runs/one/run.json"),
    ("train empty", "`manyhands init` writes one"),
    ("data nope", "the run file does not exist"),
    ("prove nope", "the run file does not exist"),
    ("train run.yaml stop.epochs 3", "write stop.epochs=VALUE"),
    ("eval runs/one --data nope", "--data nope"),
    ("generate runs/none --prompt x", "runs there: runs/one"),
    ("runs list sweep", "name the folder that holds the runs"),
    ("runs list runs/one", "manyhands runs show runs/one"),
    ("doctor --epochs 3", "it is an option of another command: manyhands train --epochs"),
    ("generate", "write manyhands generate RUN; RUN: A run's folder"),
    ("push runs/one", "write manyhands push RUN_OR_FOLDER --to OWNER/NAME; --to: The model's name on the hub"),
    ("runs compare one", "write manyhands runs compare RUN RUN"),
    ("data", "give RUN.yaml first, or --model"),
    ("generate runs/one --max_new_tokens 3", "write --max-new-tokens"),
    ("generate runs/one --max-tokens 3", "write --max-new-tokens 3"),
    ("generate --checkpoint runs/one --prompt x", "it comes first, without an option: manyhands generate runs/one"),
    ("generate runs/one --merge", "manyhands export --merge"),
    ("generate runs/one hello there", "write --prompt 'hello there'"),
    ("generate runs/one --zzzzzz", "`manyhands generate -h` lists its options"),
    ("chat runs/one --prompt hi", "manyhands generate --prompt"),
    ("plan run.yaml --fresh", "manyhands train --fresh"),
    ("eval runs/one rows.jsonl", "write --data rows.jsonl"),
    ("eval runs/one stop.epochs=3", "manyhands train RUN.yaml stop.epochs=3"),
    ("eval runs/one --limit 0", "write --limit N: Answer at most N samples"),
    ("eval runs/one --device-map foo", "'foo' is not one of 'auto', 'none', 'balanced', 'sequential'"),
    ("eval runs/one --limit", "--limit needs a value"),
    ("export runs/one out", "write --output out"),
    ("push runs/one --private --to a/b", "private unless --public"),
    ("serve runs/one --host 0.0.0.0", "on this machine only"),
    ("serve runs/one --port abc", "--port"),
    ("submit run.yaml --to nomad", "'slurm', 'kubernetes', 'skypilot'"),
    ("doctor runs/one", "write --run runs/one"),
    ("gpu-info runs/one", "`manyhands gpu-info -h` shows what it takes"),
    ("init rows.jsonl", "write --data rows.jsonl"),
    ("import run.yaml out.yaml", "write --output out.yaml"),
    ("import run.yaml", "`manyhands plan run.yaml` checks it"),
    ("config run.yaml", "`manyhands plan run.yaml` checks a run file's keys"),
    ("config nope", "where: manyhands config"),
    ("runs one", "manyhands runs show one"),
    ("runs listt", "did you mean list?"),
    ("run.yaml", "manyhands train run.yaml"),
    ("runs/one", "manyhands runs show runs/one"),
    ("trian run.yaml", "did you mean train?"),
    ("merge runs/one", "manyhands export RUN --merge"),
    ("finetune run.yaml", "manyhands train RUN.yaml"),
    ("model.name=x", "manyhands train RUN.yaml model.name=x"),
    ("qqqqqq", "choose one of train, plan"),
    ("--epochs 3 train", "it is an option of a command: manyhands train --epochs"),
    ("--merge runs/one", "manyhands export --merge"),
    ("memory-check model", "give a run's folder"),
    ("tensorboard model", "neither a run nor a curve"),
    ("tensorboard --logdir runs", "manyhands tensorboard runs"),
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("model: {name: org/model}\ndata: {train: rows.jsonl}\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    for name in ("model/config.json", "runs/one/run.json", "rows/a.jsonl", "empty/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    return tmp_path


@pytest.mark.parametrize("tool", [OF_TORCHRUN, OF_ACCELERATE, OF_UNSLOTH, OF_TRL, OF_AXOLOTL, OF_LLAMA_FACTORY, FIELDS])
def test_every_option_of_other_tools_has_an_answer(tool):
    for name in tool if isinstance(tool, list) else tool.split():
        fix = explain_option("train", f"--{name}", [f"--{name}", "1"], ["--gpus", "--dry-run"]).fix
        assert fix and "lists all keys" not in fix and "did you mean" not in fix, name


@pytest.mark.parametrize(("line", "said"), LINES, ids=[line for line, _ in LINES])
def test_a_line_typed_in_error_is_answered(line: str, said: str) -> None:
    result = CliRunner().invoke(app, line.split())
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == EXIT_USAGE and said in result.output, result.output
    assert result.output.startswith("error: ")
    assert not [word for word in ("rename it", "Usage:", "Traceback") if word in result.output]


def test_runs_are_listed_by_their_folder(folder):
    (folder / "runs" / "sweep").mkdir()
    for words in ("runs list runs/sweep", "runs list sweep", "runs list --dir runs/sweep"):
        result = CliRunner().invoke(app, words.split())
        assert (result.exit_code, result.output.strip()) == (0, "no run in runs/sweep/"), result.output


@pytest.mark.parametrize(
    "line",
    [
        "runs list --dir nothing",
        "runs list nothing",
        "runs show a --dir nothing",
        "runs compare a b --dir nothing",
        "runs delete a --dir nothing",
        "ui nothing",
        "plan --compare nothing",
        "import run.yaml -o nothing/run.yaml",
        "eval --model model --tasks gsm8k --include-path nothing",
    ],
)
def test_a_folder_that_is_not_there_is_named(folder, line):
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == EXIT_USAGE, result.output
    assert re.match(r"error: there is no such (file or )?folder\n  where: .*nothing\n", result.output), result.output
    assert not (folder / "nothing").exists()


def test_all_gpus_by_name():
    assert [_read_gpus(text)[0] for text in ("all", "auto", "8", "2xH100")] == ["auto", "auto", 8, 2]
