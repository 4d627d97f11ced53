"""The importers of the guides: sft-play's YAML, synth-ai's TOML, TheWorld's JSON."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from manyhands.config.read import ParsedFile, read_run_file
from manyhands.core.errors import UserError
from manyhands.importers.load import config_from_mapping, load_run
from manyhands.importers.recognize import recognize, translate
from manyhands.importers.translation import ImportContext, Translation
from manyhands.launch.run import file as run_file

SFT_PLAY: dict[str, Any] = {
    "model": {"name": "google/gemma-3-27b-it", "max_seq_len": 2048},
    "tuning": {"mode": "qlora", "backend": "bnb"},
    "train": {"batch_size": "auto", "grad_accum": "auto", "bf16": True, "gradient_checkpointing": True},
}
SYNTH_AI: dict[str, Any] = {
    "job": {"model": "Qwen/Qwen3-32B", "data": "/abs/train.jsonl"},
    "compute": {"gpu_type": "H100", "gpu_count": 4, "nodes": 1, "variant": "H100-4x", "gpus_per_node": 4},
    "data": {"topology": {"container_count": 4, "gpus_per_node": 4, "total_gpus": 4, "nodes": 1, "variant": "H100-4x"}},
    "training": {
        "mode": "lora",
        "use_qlora": True,
        "validation": {
            "enabled": False,
            "evaluation_strategy": "steps",
            "eval_steps": 100,
            "save_best_model_at_end": False,
            "metric_for_best_model": "val.loss",
            "greater_is_better": False,
        },
    },
    "hyperparameters": {
        "n_epochs": 1,
        "train_kind": "peft",
        "per_device_batch": 1,
        "gradient_accumulation_steps": 16,
        "sequence_length": 4096,
        "learning_rate": 5e-6,
        "warmup_ratio": 0.03,
        "global_batch": 64,
        "parallelism": {
            "fsdp": False,
            "fsdp_sharding_strategy": "full_shard",
            "fsdp_auto_wrap_policy": "transformer_block",
            "fsdp_use_orig_params": True,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "bf16": True,
            "fp16": False,
            "use_deepspeed": True,
            "deepspeed_stage": 2,
            "activation_checkpointing": True,
        },
    },
}
THEWORLD: dict[str, Any] = {
    "model_name": "google/gemma-3-4b-it",
    "enable_world": False,
    "freeze_gemma_language": False,
    "train_dataset_path": "rows.jsonl",
    "batch_size": 2,
    "gradient_accumulation_steps": 8,
    "use_gradient_checkpointing": True,
    "num_workers": 4,
    "max_steps": 30,
}


def change(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``base`` with dotted keys set, or removed (None)."""
    changed: dict[str, Any] = json.loads(json.dumps(base))
    for key, value in changes.items():
        *sections, leaf = key.split(".")
        target = changed
        for section in sections:
            target = target.setdefault(section, {})
        if value is None:
            target.pop(leaf)
        else:
            target[leaf] = value
    return changed


def translated(base: dict[str, Any], changes: dict[str, Any] | None = None, **context: Any) -> Translation:
    mapping = change(base, changes or {})
    importer = recognize(mapping)
    assert importer is not None
    return translate(ParsedFile(mapping, "theirs"), importer, ImportContext(**{"count_gpus": lambda: 2} | context))


def native(base: dict[str, Any], changes: dict[str, Any] | None = None, **context: Any) -> dict[str, Any]:
    done = translated(base, changes, **context)
    assert done.findings() == []
    flat = {}
    for section, keys in done.mapping.items():
        flat |= (
            {f"{section}.{key}": value for key, value in keys.items()} if isinstance(keys, dict) else {section: keys}
        )
    return flat


def kinds(done: Translation) -> dict[str, str]:
    return {outcome.key: outcome.kind for outcome in done.outcomes}


@pytest.mark.parametrize(
    ("base", "tool"), [(SFT_PLAY, "sft-play"), (SYNTH_AI, "synth-ai"), (THEWORLD, "TheWorld")], ids=lambda x: str(x)[:8]
)
def test_each_file_is_recognized_and_every_key_has_an_outcome(base: dict[str, Any], tool: str) -> None:
    done = translated(base)
    assert done.tool == tool and done.findings() == [] and "not_set" not in kinds(done).values()


# sft-play


def test_sft_play_s_guide() -> None:
    found = native(SFT_PLAY)
    expected = {
        "model.name": "google/gemma-3-27b-it",
        "data.max_length": 2048,
        "method.name": "qlora",
        "model.dtype": "bfloat16",
        "schedule.warmup_ratio": 0.06,
        "optimizer.learning_rate": 2e-4,
    }
    assert {key: found[key] for key in expected} == expected
    assert not any(key.startswith("batch.") for key in found)  # auto: the plan's


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train.batch_size": 1, "train.grad_accum": 32}, {"batch.samples": 64}),
        ({"train.batch_size": 4}, {"batch.micro_samples": 4, "data.packing": False}),
        ({"train.grad_accum": 4}, {"batch.accumulation": 4, "data.packing": False}),
        ({"tuning.mode": "full"}, {"method.name": "full"}),
        ({"tuning.backend": "unsloth"}, {"method.name": "qlora"}),
        ({"tuning.lora.r": 8, "tuning.lora.target_modules": ["q_proj"]},
         {"method.rank": 8, "method.target_modules": ["q_proj"]}),
        ({"train.bf16": False, "train.fp16": True}, {"model.dtype": "bfloat16"}),
        ({"train.epochs": 3, "train.learning_rate": "1e-4"}, {"stop.epochs": 3, "optimizer.learning_rate": 1e-4}),
        ({"train.lr": 1e-3}, {"optimizer.learning_rate": 1e-3}),
        ({"train.steps": 10}, {"stop.max_steps": 10}),
        ({"train.warmup_ratio": 0.1, "train.lr_scheduler_type": "cosine"},
         {"schedule.warmup_ratio": 0.1, "schedule.name": "cosine"}),
        ({"train.evaluation_strategy": "steps", "train.eval_steps": 10}, {"evaluate.every_steps": 10}),
        ({"train.save_strategy": "steps", "train.save_steps": 7, "train.save_total_limit": 3},
         {"checkpoint.every_steps": 7, "checkpoint.keep_last": 3}),
        ({"train.output_dir": "outputs/run-01"}, {"output.dir": "outputs", "name": "run-01"}),
        ({"data.train_path": "t.jsonl", "data.val_path": "v.jsonl"}, {"data.train": "t.jsonl",
         "data.validation": "v.jsonl"}),
        ({"task_mode": "cpt_mixed", "block_size": 512, "datasets": [
            {"path": "a.jsonl", "type": "cpt"}, {"path": "b.jsonl", "type": "chat"}]},
         {"task": "mixed", "data.max_length": 512, "data.too_long": "split",
          "data.train": [{"path": "a.jsonl", "format": "text"}, {"path": "b.jsonl", "format": "auto"}]}),
    ],
)  # fmt: skip
def test_what_sft_play_s_keys_set(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    found = native(SFT_PLAY, changes)
    assert {key: found[key] for key in expected} == expected


def test_rows_of_sft_play_are_prompts_and_answers() -> None:
    found = native(
        SFT_PLAY, {"data.train_path": "t.jsonl"}, first_row=lambda path: {"system": "", "user": "u", "assistant": "a"}
    )
    assert found["data.format"] == "prompt"
    assert found["data.fields"] == {"prompt": "user", "completion": "assistant"}


def test_checkpoints_of_sft_play_without_a_strategy_are_of_epochs_and_its_best_is_of_the_loss() -> None:
    found = native(SFT_PLAY)
    assert (found["checkpoint.per_epoch"], found["checkpoint.keep_last"]) == (1, 5)
    assert "checkpoint.every_steps" not in found
    best = {"train.load_best_model_at_end": True, "train.metric_for_best_model": "rougeL",
            "train.greater_is_better": True, "train.eval_strategy": "epoch"}  # fmt: skip
    assert native(SFT_PLAY, best)["checkpoint.keep_best"] is True
    assert kinds(translated(SFT_PLAY, best))["train.metric_for_best_model"] == "substituted"
    unread = translated(SFT_PLAY, {"train.metric_for_best_model": "rougeL"})
    assert kinds(unread)["train.metric_for_best_model"] == "ignored"


def test_weights_of_sft_play_are_a_substitution() -> None:
    sets = [{"path": "a", "type": "cpt", "weight": 0.9}, {"path": "b", "type": "chat", "weight": 0.1}]
    done = translated(SFT_PLAY, {"task_mode": "cpt_mixed", "datasets": sets})
    assert kinds(done)["datasets"] == "substituted"
    assert [source["weight"] for source in done.mapping["data"]["train"]] == [1.0, 0.111111]
    strict = translated(SFT_PLAY, {"task_mode": "cpt_mixed", "datasets": sets}, strict=True)
    assert kinds(strict)["datasets"] == "refused"


def test_an_included_file_is_beneath_and_its_keys_are_named_with_it(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    base = change(SFT_PLAY, {"train.epochs": 3, "train.weight_decay": 0.1, "data.train_path": "t.jsonl"})
    (tmp_path / "configs/base.yaml").write_text(yaml.safe_dump(base))
    file = tmp_path / "configs/run.yaml"
    file.write_text("include: configs/base.yaml\ntrain:\n  epochs: 1\n  batch_size: 2\n  grad_accum: 2\n")
    config = load_run(file, ["parallel.gpus=2"]).config
    assert config.stop.epochs == 1 and config.optimizer.weight_decay == 0.1 and config.batch.samples == 8
    (tmp_path / "configs/base.yaml").write_text(yaml.safe_dump(base | {"tuning": {"mode": "qlra"}}))
    with pytest.raises(UserError, match=r"base.yaml, line \d+, `tuning.mode`: got qlra, allowed: qlora, lora, full"):
        load_run(file, ["parallel.gpus=2"])
    file.write_text("include: nowhere.yaml\ntask_mode: sft\n")
    with pytest.raises(UserError, match=r"the included file nowhere\.yaml does not exist") as error:
        load_run(file)
    assert "run.yaml, line 1, `include`" in str(error.value)
    file.write_text("include: run.yaml\ntask_mode: sft\n")
    with pytest.raises(UserError, match="includes itself"):
        load_run(file)


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"train.batch_sise": 4}, "`train.batch_sise`: sft-play has no such key: did you mean `train.batch_size`?"),
        ({"train.batch_size": "many", "train.grad_accum": 1}, "`train.batch_size`: got many, allowed: a number"),
        ({"tuning.mode": "dora"}, "`tuning.mode`: got dora, allowed: qlora, lora, full"),
        ({"tuning.backend": "mlx"}, "`tuning.backend`: `mlx`: allowed: bnb, unsloth"),
        ({"task_mode": "dapt"}, "`task_mode`: got dapt, allowed: sft, cpt, cpt_mixed"),
        ({"task_mode": "dpo"}, "`task_mode`: training on preferences, rewards or a teacher"),
        ({"dpo": {"max_prompt_length": 5}}, "`dpo.max_prompt_length`: training on preferences"),
        ({"mode": "cpt_mixed"}, "write `task_mode: cpt_mixed`"),
        ({"model.type": "seq2seq"}, "`model.type`: `seq2seq`: models that are not decoders"),
        ({"train.evaluation_strategy": "steps", "train.eval_strategy": "no"}, "keep one"),
        ({"task_mode": "cpt"}, "write a list of data sets"),
        ({"task_mode": "cpt_mixed", "datasets": [{"path": "a", "type": "text"}]}, "`type` is text, allowed: cpt, chat"),
        ({"use_peft": True}, "a key of TRL"),
    ],
)
def test_what_sft_play_s_file_may_not_ask(changes: dict[str, Any], finding: str) -> None:
    assert finding in " ".join(translated(SFT_PLAY, changes).findings())


# synth-ai


def test_synth_ai_s_guide() -> None:
    assert native(SYNTH_AI) == {
        "model.name": "Qwen/Qwen3-32B",
        "model.dtype": "bfloat16",
        "data.train": "/abs/train.jsonl",
        "data.max_length": 4096,
        "data.validation_fraction": 0,
        "parallel.gpus": 4,
        "submit.gpus": "4xH100",
        "parallel.strategy": "fsdp",
        "parallel.reshard_after_forward": False,
        "parallel.activation_checkpointing": "full",
        "batch.samples": 64,
        "method.name": "qlora",
        "stop.epochs": 1,
        "optimizer.learning_rate": 5e-6,
        "schedule.warmup_ratio": 0.03,
    }
    stage = "hyperparameters.parallelism.deepspeed_stage"
    assert kinds(translated(SYNTH_AI))[stage] == "substituted"
    assert kinds(translated(SYNTH_AI, strict=True))[stage] == "refused"


PARALLEL = "hyperparameters.parallelism."
GPUS = {"compute.gpu_count": 8, "compute.variant": "H100-8x", "compute.gpus_per_node": 8, "data": None}
FFT = GPUS | {
    "training.mode": "full_finetune",
    "training.use_qlora": False,
    "hyperparameters.train_kind": "fft",
    f"{PARALLEL}fsdp": True,
    f"{PARALLEL}use_deepspeed": False,
}

TWO_NODES = {"compute.nodes": 2, "data": None, "hyperparameters.global_batch": 128}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        *((TWO_NODES | {"compute.gpu_count": count},
           {"parallel.nodes": 2, "parallel.gpus": 8, "submit.gpus": "2x4xH100", "batch.samples": 128})
          for count in (4, 8)),
        (FFT | {"hyperparameters.global_batch": 128}, {"method.name": "full", "parallel.strategy": "fsdp",
                                                       "batch.samples": 128, "parallel.gpus": 8}),
        (FFT | {"hyperparameters.global_batch": 128, f"{PARALLEL}fsdp_sharding_strategy": "shard_grad_op"},
         {"parallel.reshard_after_forward": False}),
        ({f"{PARALLEL}bf16": False, f"{PARALLEL}fp16": True}, {"model.dtype": "bfloat16"}),
        ({f"{PARALLEL}activation_checkpointing": False}, {"parallel.activation_checkpointing": "none"}),
        ({"training.use_qlora": False}, {"method.name": "lora"}),
        ({"training.validation.enabled": True, "training.validation.save_best_model_at_end": True},
         {"evaluate.every_steps": 100, "checkpoint.keep_best": True}),
        ({"lora.r": 8, "lora.alpha": 16, "lora.dropout": 0.1, "lora.target_modules": ["all-linear"]},
         {"method.rank": 8, "method.alpha": 16, "method.dropout": 0.1, "method.target_modules": "all-linear"}),
    ],
)  # fmt: skip
def test_what_synth_ai_s_keys_set(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    found = native(SYNTH_AI, changes)
    assert {key: found[key] for key in expected} == expected


def test_synth_ai_s_kind_of_gpu_is_compared_with_the_machine_s() -> None:
    def found(**context: Any) -> tuple[str, str]:
        done = translated(SYNTH_AI, {}, **context)
        return next((outcome.kind, outcome.why) for outcome in done.outcomes if outcome.key == "compute.gpu_type")

    assert found(other_gpus=lambda name: None)[0] == found()[0] == "mapped"
    assert native(SYNTH_AI, {})["submit.gpus"] == "4xH100", "what a cluster is asked for"
    kind, why = found(other_gpus=lambda name: {"H100": "NVIDIA L4"}[name])
    assert kind == "substituted" and "this machine has NVIDIA L4" in why and "--gpus 4xH100" in why
    assert found(other_gpus=lambda name: "NVIDIA L4", strict=True)[0] == "refused"


@pytest.mark.parametrize(
    ("gpus", "named", "others"),
    [
        (["NVIDIA L4"], "H100", "NVIDIA L4"),
        (["NVIDIA L4", "NVIDIA H100 80GB HBM3"], "H100", None),
        (["NVIDIA A100-SXM4-40GB"], "a100", None),
        (["NVIDIA L4"], "H1000", None),  # a kind that nobody knows
        ([], "H100", None),
    ],
)
def test_gpus_of_another_kind_are_named(
    gpus: list[str], named: str, others: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = SimpleNamespace(gpus=tuple(SimpleNamespace(name=name) for name in gpus))
    monkeypatch.setattr(run_file, "read_host_facts", lambda: host)
    other_gpus = run_file.probe_host().other_gpus
    assert other_gpus is not None and other_gpus(named) == others


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        (FFT, "`hyperparameters.global_batch`: per_device_batch × GPUs × gradient_accumulation_steps is "
         "1 × 8 × 16 = 128, not 64: correct one of them"),
        ({"compute.variant": "H100-8x"}, "`compute.variant`: 8 GPUs, but `compute.gpu_count` is 4"),
        ({"compute.variant": "A100-4x"}, "`compute.variant`: A100, but `compute.gpu_type` is H100"),
        ({"compute.variant": "4xH100"}, "`compute.variant`: got 4xH100, allowed: kind and number of GPUs"),
        ({"data.topology.total_gpus": 8}, "`data.topology.total_gpus`: 8 GPUs, but `compute.gpu_count` is 4"),
        ({"data.topology.container_count": 2}, "`data.topology.container_count`: 2 GPUs"),
        ({"compute.nodes": 2, "data.topology.nodes": 1}, "`data.topology.nodes`: 1 machine, but `compute.nodes`"),
        ({"compute.nodes": 0}, "`compute.nodes`: got 0, allowed: 1 or more"),
        (TWO_NODES | {"compute.gpus_per_node": None}, "`compute.gpu_count`: GPUs of one of 2 machines, or of all"),
        (TWO_NODES | {"compute.gpu_count": 3}, "`compute.gpu_count`: 3 GPUs, but `compute.gpus_per_node` is 4 with"),
        ({"training.mode": "full_finetune"}, "`hyperparameters.train_kind`: peft, but `training.mode` is full_fine"),
        ({"training.mode": "full_finetune", "hyperparameters.train_kind": "fft"}, "`training.use_qlora`: true, but"),
        ({"algorithm.variety": "fft"}, "`algorithm.variety`: fft, but `training.mode` is lora"),
        ({f"{PARALLEL}fsdp": True}, f"`{PARALLEL}use_deepspeed`: true, but `{PARALLEL}fsdp` is true, too"),
        ({f"{PARALLEL}tensor_parallel_size": 2}, "tensor and pipeline parallelism are not available: write 1"),
        ({f"{PARALLEL}deepspeed_stage": 5}, "got 5, allowed: 0, 1, 2 or 3"),
        ({"hyperparameters.learnig_rate": 1}, "did you mean `hyperparameters.learning_rate`?"),
        ({"hyperparameters.n_epochs": "one"}, "`hyperparameters.n_epochs`: got one, allowed: a number"),
        ({"training.validation.greater_is_better": True}, "a lower loss is better"),
        ({"dataset_mixture": {}}, "a key of TRL"),
    ],
)  # fmt: skip
def test_what_synth_ai_s_file_may_not_ask(changes: dict[str, Any], finding: str) -> None:
    assert finding in " ".join(translated(SYNTH_AI, changes).findings())


def test_findings_in_toml_have_their_line(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        '[job]\nmodel = "m"\n[hyperparameters.parallelism]\n# c\ntensor_parallel_size = 2\n'
    )
    with pytest.raises(UserError, match=r"line 5, `hyperparameters.parallelism.tensor_parallel_size`"):
        load_run(tmp_path / "a.toml")
    (tmp_path / "a.toml").write_text("[hyperparameters]\nsequence_length = 2048*2\n")
    with pytest.raises(UserError, match="not valid TOML"):
        read_run_file(tmp_path / "a.toml")


# TheWorld


def test_theworld_on_text() -> None:
    assert native(THEWORLD) == {
        "model.name": "google/gemma-3-4b-it",
        "method.name": "full",
        "data.train": "rows.jsonl",
        "data.max_length": 2048,
        "data.too_long": "drop",
        "data.validation_fraction": 0,
        "batch.samples": 32,
        "parallel.activation_checkpointing": "full",
        "stop.max_steps": 30,
        "stop.epochs": 1_000_000,
        "seed": 42,
        "schedule.name": "linear",
        "schedule.warmup_steps": 100,
        "optimizer.learning_rate": 1e-4,
        "optimizer.weight_decay": 0.01,
        "checkpoint.every_steps": 500,
        "checkpoint.keep_last": 3,
        "log.every_steps": 10,
    }


@pytest.mark.parametrize(
    ("switches", "parts"),
    [
        ({"freeze_gemma_language": None, "freeze_gemma_vision": False}, ("trained", "frozen")),
        ({}, ("frozen", "full")),
        ({"freeze_gemma_vision": False}, ("trained", "full")),
    ],
)
def test_theworld_s_switches_are_parts(switches: dict[str, Any], parts: tuple[str, str]) -> None:
    """The tower's switch is its projector's, too; a file with images freezes what it does not name."""
    images = {"image_folder": "images", "dataset_name": "llava_pretrain"}
    found = native(THEWORLD, images | switches)
    assert found["method.parts"] == {"vision": parts[0], "projector": parts[0], "language": parts[1]}
    assert found["data.image_folder"] == "images" and "method.name" not in found


def test_theworld_s_tracker() -> None:
    found = translated(THEWORLD, {"log_to_wandb": True, "wandb_project": "mine", "wandb_run_name": "r"})
    assert found.mapping["log"]["wandb"] == "mine" and kinds(found)["wandb_run_name"] == "substituted"
    off = translated(THEWORLD, {"log_to_wandb": False, "wandb_project": "mine"})
    assert "wandb" not in off.mapping["log"] and kinds(off)["wandb_project"] == "no_op"


def test_theworld_s_comments_and_the_keys_of_a_world_model_that_is_off() -> None:
    """As in each of its published files."""
    world = {"cosmos_model_name": "nvidia/C", "num_world_steps": 0, "world_projection_mode": "channel"}
    done = translated(THEWORLD, {"_comment": "x", "_notes": ["y"], "freeze_cosmos_vae": True} | world)
    assert done.findings() == [] and done.mapping == translated(THEWORLD).mapping


LLAVA = {"dataset_name": "llava_pretrain", "train_dataset_path": None, "freeze_gemma_vision": False}


def test_llava_pretrain_is_the_published_set(tmp_path: Path) -> None:
    """Rows from the hub; images, too, unless the folder that TheWorld unpacks them into is there."""
    found = native(THEWORLD, LLAVA, folder=tmp_path)
    name = "hub:liuhaotian/LLaVA-CC3M-Pretrain-595K"
    assert found["data.train"] == [{"path": name, "files": ["chat.json"], "format": "sharegpt"}]
    assert (found["data.image_folder"], found["data.bad_images"]) == (f"{name}/images.zip", "skip")
    assert found["data.validation_fraction"] == 0
    (tmp_path / "data/llava-cc3m/images").mkdir(parents=True)
    found = native(THEWORLD, LLAVA | {"num_samples": 1000, "do_eval": True}, folder=tmp_path)
    assert found["data.train"][0]["split"] == "train[:1000]" and found["data.validation_fraction"] == 0.1
    assert found["data.image_folder"] == str(tmp_path / "data/llava-cc3m/images")
    config_from_mapping(translated(THEWORLD, LLAVA | {"max_steps": None, "output_dir": "a/b"}).mapping)


@pytest.mark.parametrize("fragment", [{"use_gradient_checkpointing": True}, {"batch_size": 1}])
def test_a_few_keys_of_theworld_are_a_file(fragment: dict[str, Any]) -> None:
    assert translated(fragment).tool == "TheWorld" and translated(fragment).findings() == []


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"enable_world": None}, "`enable_world`: left out it is true in TheWorld: the world model (a video VAE"),
        ({"image_folder": "i", "freeze_gemma_language": None}, "no part of Gemma would be trained"),
        ({"freeze_gemma_language": None}, "names no images (`image_folder`), and true freezes the language model"),
        (LLAVA | {"num_samples": 100, "do_eval": True}, "`num_samples`: 100: TheWorld holds out 100 of them"),
        ({"dataset_name": "spatial_set"}, "`dataset_name`: `spatial_set`: it is looked up in TheWorld's own code"),
        ({"freeze_gemma_vision": False}, "`freeze_gemma_vision`: the file names no images"),
        ({"enable_world": True}, "`enable_world`: the world model (a video VAE as a second tower"),
        ({"freeze_cosmos_vae": False}, "`freeze_cosmos_vae`: TheWorld itself refuses false without the world model"),
        ({"question_template": "Where?"}, "`question_template`: `Where?`: questions and boxes are drawn by TheWorld's"),
        ({"batchsize": 2}, "`batchsize`: TheWorld has no such key: did you mean `batch_size`?"),
        ({"batch_size": "two"}, "`batch_size`: got two, allowed: a number"),
        ({"mixed_precision": "fp8"}, "`mixed_precision`: got fp8, allowed: no, fp16, bf16"),
        ({"optimiser_kind": "x"}, "`optimiser_kind`: TheWorld has no such key and refuses it"),
        ({"use_peft": True}, "a key of TRL"),
    ],
)
def test_what_theworld_s_file_may_not_ask(changes: dict[str, Any], finding: str) -> None:
    assert finding in " ".join(translated(THEWORLD, changes).findings())
