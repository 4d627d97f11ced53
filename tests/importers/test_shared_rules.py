"""What tools that train with transformers' Trainer have in common: each argument, its default, its special values."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
from manyhands.api.arguments import as_file, read_arguments
from manyhands.api.arguments import translate as translate_arguments
from manyhands.config.read import ParsedFile
from manyhands.importers import preferences, trl
from manyhands.importers import transformers as hf
from manyhands.importers.hints import hint
from manyhands.importers.load import config_from_mapping
from manyhands.importers.recognize import recognize, translate
from manyhands.importers.translation import ImportContext, Translation, flatten

TRL = {"model_name_or_path": "org/model", "dataset_name": "org/data", "use_peft": True, "output_dir": "out/run"}
LF = {
    "model_name_or_path": "org/model",
    "stage": "sft",
    "do_train": True,
    "dataset": "rows",
    "dataset_dir": {"rows": {"file_name": "rows.json"}},
    "template": "chatml",
    "val_size": 0.1,
    "output_dir": "out/run",
}
SFT_PLAY = {
    "model": {"name": "org/model"},
    "tuning": {"mode": "lora"},
    "data": {"train_path": "rows.jsonl", "val_path": "more.jsonl"},
    "train": {"batch_size": 1, "grad_accum": 2, "output_dir": "out/run"},
}
TRAINER = {
    "model_name": "org/model",
    "train_dataset": "rows.jsonl",
    "eval_dataset": "more.jsonl",
    "output_dir": "out/r",
}


def read(base: dict[str, Any], changes: dict[str, Any], **context: Any) -> Translation:
    """A file of the tool whose keys ``base`` has, with transformers' arguments under the tool's own names."""
    whole = ImportContext(**{"gpus": 2, **context})
    if base is TRAINER:
        return translate_arguments(as_file({**base, **changes}), whole, num_gpus=0)
    mapping = {**base, "train": {**base["train"], **changes}} if base is SFT_PLAY else {**base, **changes}
    importer = recognize(mapping)
    assert importer is not None
    return translate(ParsedFile(mapping, "theirs.yaml"), importer, whole)


def outcome(done: Translation, key: str) -> Any:
    return next(one for one in done.outcomes if one.key.rpartition(".")[2] == key)


def native(base: dict[str, Any], changes: dict[str, Any], **context: Any) -> dict[str, Any]:
    done = read(base, changes, **context)
    assert done.findings() == []
    config_from_mapping(json.loads(json.dumps(done.mapping)) | {"name": "run"})
    return flatten(done.mapping, {"optimizer.learning_rates"})


TOOLS = pytest.mark.parametrize("base", [TRL, LF, SFT_PLAY, TRAINER], ids=["trl", "lf", "sft-play", "trainer"])
EVALUATED = {"eval_strategy": "steps", "dataset_test_split": "test"}


@TOOLS
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"lr_scheduler_type": "constant", "warmup_ratio": 0.1}, {"schedule.warmup_steps": 0}),
        ({"lr_scheduler_type": "constant", "warmup_steps": 20}, {"schedule.warmup_steps": 0}),
        ({"lr_scheduler_type": "constant"}, {"schedule.warmup_steps": 0}),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 20}, {"schedule.warmup_steps": 20}),
        ({"save_strategy": "steps", "save_steps": 0}, {"checkpoint.every_steps": 0}),
        ({"save_strategy": "steps", "save_steps": 0.25}, {"checkpoint.every_steps": 0.25}),
        ({"save_strategy": "steps", "save_total_limit": 0}, {"checkpoint.keep_last": "all"}),
        ({"save_strategy": "no", "save_total_limit": 2}, {"checkpoint.every_steps": 0}),
        ({"save_total_limit": 3}, {"checkpoint.keep_last": 3}),
        ({"eval_strategy": "steps", "logging_steps": 7}, {"evaluate.every_steps": 7}),
        ({"eval_strategy": "steps", "eval_steps": 0, "logging_steps": 7}, {"evaluate.every_steps": 7}),
        ({"eval_strategy": "steps", "eval_steps": 0.1}, {"evaluate.every_steps": 0.1}),
        ({"evaluation_strategy": "epoch"}, {"evaluate.per_epoch": 1}),
        ({"max_grad_norm": None}, {"optimizer.max_grad_norm": 0}),
        ({"dataloader_num_workers": 4}, {"data.workers": 4}),
        ({"ddp_bucket_cap_mb": 25}, {"parallel.ddp_bucket_mb": 25}),
        ({"report_to": "wandb"}, {"log.wandb": "huggingface"}),
        ({"report_to": "tensorboard"}, {"log.tensorboard": True}),
    ],
    ids=str,
)
def test_a_rule_of_transformers_holds_for_each_tool(
    base: dict[str, Any], changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = native(base, changes)
    assert {key: found.get(key) for key in expected} == expected


@pytest.mark.parametrize("base", [TRL, LF], ids=["trl", "lf"])
def test_neftune_is_ours(base: dict[str, Any]) -> None:
    assert native(base, {"neftune_noise_alpha": 5})["method.neftune_alpha"] == 5
    assert "method.neftune_alpha" not in native(base, {"neftune_noise_alpha": None})


@pytest.mark.parametrize(("base", "logging"), [(TRL, 10), (LF, 500)], ids=["trl", "lf"])
def test_defaults_that_no_file_writes(base: dict[str, Any], logging: int) -> None:
    done = read(base, {"eval_strategy": "steps"})
    assert done.mapping["evaluate"]["every_steps"] == logging and "evaluate.every_steps" in done.tool_defaults
    assert done.mapping["checkpoint"] == {"every_steps": 500, "keep_last": "all"}
    assert "keeps every checkpoint" in done.tool_defaults["checkpoint.keep_last"]


def test_trl_evaluates_the_split_test_unless_another_is_named() -> None:
    held_out = native(TRL, {"eval_strategy": "steps"})["data.validation"]
    assert held_out == [{"path": "hub:org/data", "split": "test"}]
    named = native(TRL, {"evaluation_strategy": "steps", "dataset_test_split": "test_sft"})["data.validation"]
    assert named == [{"path": "hub:org/data", "split": "test_sft"}]
    assert "data.validation" not in native(TRL, {"dataset_test_split": "test_sft"})
    alone = {"dataset_name": None, "datasets": [{"path": "org/data"}], "eval_strategy": "steps"}
    assert "there is no validation data" in read(TRL, alone).findings()[0]


# What becomes of each value: the transformers argument, a value, and the outcome in a file of TRL.
VALUES: tuple[tuple[str, Any, str], ...] = (
    ("overwrite_output_dir", True, "ignored"),
    ("overwrite_output_dir", False, "no_op"),
    ("dataloader_pin_memory", False, "ignored"),
    ("dataloader_pin_memory", True, "no_op"),
    ("dataloader_num_workers", 4, "mapped"),
    ("dataloader_drop_last", True, "substituted"),
    ("data_seed", 7, "substituted"),
    ("data_seed", 42, "no_op"),
    ("use_cpu", True, "mapped"),
    ("save_only_model", True, "ignored"),
    ("save_safetensors", False, "ignored"),
    ("truncation_mode", "keep_end", "refused"),
    ("ddp_timeout", 1800, "mapped"),
    ("ddp_timeout", 0, "no_op"),
    ("hub_always_push", True, "no_op"),
    ("debug", "underflow_overflow", "ignored"),
    ("use_cache", True, "no_op"),
    ("tf32", True, "ignored"),
    ("past_index", 2, "ignored"),
    ("logging_steps", -1, "refused"),
    ("logging_steps", 2.5, "refused"),
    ("eval_steps", -1, "no_op"),
    ("num_train_epochs", 0, "refused"),
    ("warmup_steps", -1, "refused"),
    ("max_length", 0, "refused"),
    ("lora_r", 0, "refused"),
    ("max_steps", 0, "no_op"),
    ("per_gpu_train_batch_size", 4, "refused"),
    ("sharded_ddp", "simple", "refused"),
    ("evaluate_during_training", True, "refused"),
    ("split_batches", True, "refused"),
    ("hub_token", "hf_secret", "refused"),
    ("adafactor", True, "mapped"),
    ("bf16", False, "mapped"),
    ("torch_compile_mode", "max-autotune", "mapped"),
    ("torch_compile_backend", "eager", "substituted"),
    ("group_by_length", True, "substituted"),
    ("train_sampling_strategy", "sequential", "mapped"),
    ("push_to_hub", True, "substituted"),
    ("report_to", "comet_ml", "substituted"),
    ("report_to", "none", "no_op"),
    ("trackio_space_id", "org/space", "no_op"),
    ("metric_for_best_model", "eval_accuracy", "ignored"),
    ("save_strategy", "best", "refused"),
    ("lr_scheduler_type", "warmup_stable_decay", "refused"),
    ("lr_scheduler_kwargs", 3, "refused"),
    ("lr_scheduler_type", "polynomial", "refused"),
    ("lora_target_module", ["q_proj"], "refused"),
    ("lora_r", "eight", "refused"),
    ("lora_modules_to_save", [], "no_op"),
    ("loss_type", "dft", "refused"),
    ("average_tokens_across_devices", False, "refused"),
    ("load_in_8bit", True, "substituted"),
    ("fp16", True, "substituted"),
    ("optim", "adamw_torch_8bit", "substituted"),
    ("report_to", ["wandb"], "mapped"),
    ("report_to", [], "no_op"),
    ("report_to", "wandbb", "refused"),
    ("report_to", ["none", 3], "refused"),
    ("logging_steps", 0, "refused"),
    ("per_device_train_batch_size", 0, "refused"),
    ("gradient_accumulation_steps", 0, "refused"),
    ("ddp_find_unused_parameters", False, "no_op"),
    ("gradient_checkpointing", True, "no_op"),
    ("gradient_checkpointing", False, "mapped"),
    ("save_steps", 0.05, "mapped"),
    ("save_strategy", "epoch", "mapped"),
    ("max_steps", -1, "no_op"),
    ("brand_new_key", 1, "refused"),
)
CONTRADICTING: tuple[tuple[dict[str, Any], str], ...] = (
    ({"use_peft": False, "load_in_4bit": True}, "load_in_4bit"),
    ({"max_length": 512, "max_seq_length": 256}, "max_seq_length"),
    ({"datasets": [{"path": "org/b"}]}, "dataset_name"),
)


@pytest.mark.parametrize(("key", "value", "kind"), VALUES)
def test_each_value_has_its_fate(key: str, value: Any, kind: str) -> None:
    found = outcome(read(TRL, {key: value}), key)
    assert found.kind == kind
    assert found.why or kind in ("no_op", "mapped")


@pytest.mark.parametrize(("changes", "key"), CONTRADICTING)
def test_keys_of_trl_that_contradict_each_other(changes: dict[str, Any], key: str) -> None:
    assert outcome(read(TRL, changes), key).kind == "contradicts"


# What is ours by default, or says explicitly what is so.
OWN_DEFAULTS = {f"optimizer.{key}" for key in ("weight_decay", "beta1", "beta2", "eps", "name", "max_grad_norm")} | {
    "data.workers", "kernels.deterministic", "evaluate.at_start", "checkpoint.keep_best", "parallel.compile",
    "parallel.activation_checkpointing", "parallel.timeout_s",
}  # fmt: skip


def test_every_argument_of_the_installed_transformers_is_known() -> None:
    """With its default it changes nothing, or sets what the tool would do without it."""
    transformers = pytest.importorskip("transformers")
    for field in dataclasses.fields(transformers.TrainingArguments):
        if field.name not in hf.KEYS and field.name != "output_dir":
            pytest.fail(f"{field.name} of TrainingArguments is unknown")
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = getattr(default, "value", default)
        if field.name in ("output_dir", "logging_steps", "learning_rate", "bf16", "eval_steps") or default is None:
            continue
        written = read(TRL, {field.name: default})
        assert written.findings() == [], field.name
        found = flatten(written.mapping)
        changed = {key for key, value in found.items() if flatten(read(TRL, {}).mapping).get(key) != value}
        assert changed <= OWN_DEFAULTS, (field.name, changed)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"max_samples": -1}, "`max_samples`: got -1, allowed: a whole number above 0"),
        ({"max_samples": 0}, "`max_samples`: got 0, allowed"),
        ({"cutoff_len": 0}, "`cutoff_len`: got 0, allowed"),
        ({"lora_rank": 0}, "`lora_rank`: got 0, allowed"),
        ({"early_stopping_steps": 0}, "`early_stopping_steps`: got 0, allowed"),
        ({"do_eval": True, "val_size": -1}, "`do_eval`: it evaluates, and there is no validation data"),
        ({"image_max_pixels": 0, "dataset_dir": {"rows": {"file_name": "r.json", "columns": {
            "prompt": "q", "response": "a", "images": "i"}}}}, "`image_max_pixels`: got 0, allowed"),
    ],
)  # fmt: skip
def test_special_values_of_llamafactory_are_refused(changes: dict[str, Any], text: str) -> None:
    assert text in " | ".join(read(LF, changes).findings())


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"overwrite_cache": True}, "no_op"),
        ({"cache_dir": "models"}, "ignored"),
        ({"upcast_layernorm": True}, "ignored"),
        ({"quantization_type": "fp4"}, "no_op"),
        ({"pref_beta": 0.1}, "ignored"),
        ({"use_swanlab": True}, "substituted"),
        ({"report_to": "mlflow"}, "mapped"),
    ],
)
def test_keys_of_llamafactory_are_so_only_where_they_are(changes: dict[str, Any], kind: str) -> None:
    [key] = changes
    assert outcome(read(LF, changes), key).kind == kind


def test_trackers_have_their_project_from_the_file_the_environment_or_the_tool() -> None:
    wandb = {"report_to": ["wandb", "trackio", "tensorboard"]}
    found = native(TRL, {**wandb, "wandb_project": "mine", "project": "ours"})
    assert (found["log.wandb"], found["log.trackio"], found["log.tensorboard"]) == ("mine", "ours", True)
    assert native(TRL, wandb, variables={"WANDB_PROJECT": "shell"})["log.wandb"] == "shell"
    assert native(TRL, {**wandb, "env": {"WANDB_PROJECT": "file"}})["log.wandb"] == "file"
    assert "set environment variables" in read(TRL, {"env": {"PATH": "x"}}).findings()[0]
    assert outcome(read(TRL, {"wandb_project": "mine"}), "wandb_project").kind == "no_op"
    for strict, kind in ((False, "substituted"), (True, "refused")):
        assert outcome(read(TRL, {"report_to": ["wandb", "neptune"]}, strict=strict), "report_to").kind == kind
        assert outcome(read(LF, {"use_swanlab": True}, strict=strict), "use_swanlab").kind == kind
        told = {"report_to": "wandb", "wandb_entity": "us"}
        assert outcome(read(TRL, told, strict=strict), "wandb_entity").kind == kind
        assert outcome(read(TRL, told, variables={"WANDB_ENTITY": "us"}), "wandb_entity").kind == "no_op"
        assert outcome(read(TRL, told | {"report_to": "none"}, strict=strict), "wandb_entity").kind == "no_op"


def test_a_data_set_that_is_listed_twice_has_two_names() -> None:
    """They are the tool's, so nobody is told to rename one."""
    entries = {name: {"file_name": f"{name}.json"} for name in ("rows", "rows-2")}
    twice = {"dataset": "rows,rows-2,rows", "val_size": None, "eval_dataset": "rows", "dataset_dir": entries}
    found = native(LF, twice)
    assert [source["name"] for source in found["data.train"]] == ["rows", "rows-2", "rows-3"]
    assert [source["name"] for source in found["data.validation"]] == ["rows-4"]
    sets = [{"name": "a", "path": f"{name}.jsonl", "type": "cpt"} for name in ("x", "y")]
    mapping = {**SFT_PLAY, "task_mode": "cpt_mixed", "datasets": sets}
    assert [source["name"] for source in native(mapping, {})["data.train"]] == ["a", "a-2"]


PREFERENCES: tuple[dict[str, Any], ...] = (
    {"beta": 0.1},
    {"max_prompt_length": 512},
    {"loss_type": "exo_pair"},
    {"num_generations": 8},
    {"reward_funcs": ["accuracy"]},
    {"use_vllm": True},
    {"num_ppo_epochs": 4},
    {"center_rewards_coefficient": 0.01},
    {"teacher_model_name_or_path": "org/teacher"},
    {"dataset_name": None, "datasets": [{"path": "org/pairs", "columns": ["chosen", "rejected"]}]},
    {"dataset_name": None, "datasets": [{"path": "org/pairs", "columns": ["prompt", "completion", "label"]}]},
    {"dataset_name": None, "dataset_mixture": {"datasets": [{"id": "org/p", "columns": ["chosen", "rejected"]}]}},
    {"dataset_name": None, "dataset_mixture": {"datasets": [{"id": "org/p", "columns": ["prompt"]}]}},
)


@pytest.mark.parametrize("changes", PREFERENCES, ids=str)
def test_a_recipe_of_preferences_is_refused_as_that(changes: dict[str, Any]) -> None:
    """One reason, which does not advise to remove the key; without the keys that mark a file of TRL, too."""
    [found] = read(TRL, changes).findings()
    of_reward = "center_rewards_coefficient" in changes
    assert ("TRL's RewardTrainer" if of_reward else "training on preferences, rewards or a teacher") in found
    assert "remove" not in found
    assert ("add `loss_type: sigmoid` for DPO" in found) == (next(iter(changes)) in ("beta", "max_prompt_length")) or (
        "dataset_name" in changes
    )
    key = next(iter(changes))
    if key in preferences.KEYS:
        bare = {"model_name_or_path": "org/model", "learning_rate": 1e-6, **changes}
        why = preferences.REWARD if of_reward else preferences.NOT_HERE
        assert [why in text for text in read(bare, {}).findings()] == [True]
        assert "training on preferences" in hint(key, 1)


def test_rows_of_preferences_are_known_by_their_columns() -> None:
    pairs = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert "training on preferences" in read(TRL, {}, first_row=lambda _: pairs).findings()[0]
    assert read(TRL, {}, first_row=lambda _: pairs | {"messages": []}).findings() == []


def test_preferences_without_a_stage_are_not_supervised() -> None:
    unmarked = {key: value for key, value in LF.items() if key != "stage"}
    [found] = read(unmarked, {"pref_beta": 0.1, "pref_loss": "orpo"}).findings()
    assert found.startswith("`pref_beta`: training on preferences")
    assert not trl.KEYS & preferences.KEYS - preferences.TRL


def test_arguments_of_a_trainer_of_preferences_are_refused() -> None:
    @dataclasses.dataclass
    class DPOConfig:
        output_dir: str
        learning_rate: float = 1e-6
        beta: float = 0.1

        def to_dict(self) -> dict[str, Any]:
            return dataclasses.asdict(self)

    with pytest.raises(mh.UserError, match="DPOConfig, which has beta") as error:
        read_arguments(DPOConfig("out"))
    assert error.value.why == preferences.NOT_HERE
    with pytest.raises(mh.UserError, match="no training argument 'max_prompt_length'") as error:
        mh.TrainingArguments(max_prompt_length=5)
    assert error.value.why == preferences.NOT_HERE


def test_an_object_s_own_defaults_are_kept(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    given = read_arguments(transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True))
    assert given["learning_rate"] == 5e-5 and given["logging_steps"] == 500
