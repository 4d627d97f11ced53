"""Files that only say how a run is distributed: accelerate's YAML and environment, DeepSpeed's JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from manyhands.config.read import ParsedFile
from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.importers.accelerate import read_environment
from manyhands.importers.deepspeed import KEYS, OPEN, translate
from manyhands.importers.load import LoadedRun, load_run
from manyhands.importers.translation import ImportContext, Translator
from manyhands.launch.environment import accelerate_settings

RUN = {"model": {"name": "org/model"}, "data": {"train": "rows.jsonl"}}
FSDP = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_backward_prefetch_policy": "BACKWARD_PRE",
        "fsdp_offload_params": False,
        "fsdp_sharding_strategy": "FULL_SHARD",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    },
    "mixed_precision": "bf16",
    "num_processes": 2,
    "use_cpu": False,
}
TRL = {"model_name_or_path": "m", "dataset_name": "o/d", "gradient_accumulation_steps": 8}
FSDP_ENVIRONMENT = {  # what `accelerate launch` exports for the file above
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "FSDP_VERSION": "1",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
}


def load(
    folder: Path, kind: str, said: dict[str, Any], run: dict[str, Any] | None = None, *overrides: str, **context: Any
) -> LoadedRun:
    """The run of a run file (a native one unless given) and of one settings file."""
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN if run is None else run))
    suffix = {"accelerate": "yaml", "deepspeed": "json"}[kind]
    file = folder / f"{kind}.{suffix}"
    file.write_text("// a comment\n" + json.dumps(said, indent=1) if kind == "deepspeed" else yaml.safe_dump(said))
    return load_run(folder / "run.yaml", overrides, context=ImportContext(**context), settings={kind: file})


def launched(folder: Path, environ: dict[str, str], **keys: Any) -> RunConfig:
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN | keys))
    return load_run(folder / "run.yaml", settings=accelerate_settings(environ)).config


def kinds(loaded: LoadedRun) -> dict[str, str]:
    return {outcome.key: outcome.kind for outcome in loaded.settings[0].outcomes}


# accelerate


def test_an_fsdp_file_shards(tmp_path: Path) -> None:
    config = load(tmp_path, "accelerate", FSDP).config
    assert config.parallel.strategy == "fsdp" and config.parallel.gpus == 2 and config.model.dtype == "bfloat16"


def test_accelerate_launch_s_environment_is_its_file(tmp_path: Path) -> None:
    config = launched(tmp_path, FSDP_ENVIRONMENT)
    assert config.parallel.strategy == "fsdp" and config.model.dtype == "bfloat16"
    assert config.parallel.reshard_after_forward == "auto"  # version 1 goes by its strategy
    two = launched(tmp_path, FSDP_ENVIRONMENT | {"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"})
    assert two.parallel.strategy == "fsdp" and two.parallel.reshard_after_forward is False
    zero = {
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
    }
    sharded = launched(tmp_path, zero).parallel
    assert sharded.strategy == "fsdp" and sharded.offload == "all"


def test_without_accelerate_there_is_nothing_to_merge() -> None:
    assert read_environment({"RANK": "0", "FSDP_VERSION": "1"}) is None and accelerate_settings({}) == {}


def test_a_launcher_and_a_run_file_that_disagree_are_both_named(tmp_path: Path) -> None:
    expected = r"`fsdp_config.fsdp_sharding_strategy` asks for `parallel.strategy: fsdp`, the run file for ddp"
    with pytest.raises(UserError, match=expected) as error:
        launched(tmp_path, FSDP_ENVIRONMENT, parallel={"strategy": "ddp"})
    assert "accelerate launch" in str(error.value) and "line 6" in str(error.value)
    with pytest.raises(UserError, match=r"`model.dtype: bfloat16`, the run file for float32"):
        launched(tmp_path, {"ACCELERATE_MIXED_PRECISION": "bf16"}, model={"name": "m", "dtype": "float32"})


def test_overrides_take_precedence_over_settings(tmp_path: Path) -> None:
    config = load(tmp_path, "accelerate", FSDP, None, "parallel.strategy=ddp", "parallel.gpus=4").config
    assert config.parallel.strategy == "ddp" and config.parallel.gpus == 4


def test_per_gpu_batches_are_multiplied_by_accelerate_s_processes(tmp_path: Path) -> None:
    run = {"model_name_or_path": "m", "dataset_name": "o/d", "per_device_train_batch_size": 3}
    assert load(tmp_path, "accelerate", FSDP, run, count_gpus=lambda: 8).config.batch.samples == 6


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"distributed_type": "MULTI_GPU", "num_processes": 2}, {"parallel.strategy": "ddp", "parallel.gpus": 2}),
        ({"distributed_type": "NO", "use_cpu": True}, {"parallel.gpus": 1, "parallel.device": "cpu"}),
        ({"distributed_type": "MULTI_CPU", "num_processes": 2}, {"parallel.device": "cpu"}),
        ({"distributed_type": "NO", "dynamo_config": {"dynamo_backend": "INDUCTOR"}}, {"parallel.compile": True}),
        ({"distributed_type": "NO", "dynamo_backend": "NO", "dynamo_config": {"dynamo_backend": "INDUCTOR"}},
         {"parallel.compile": "auto"}),
        ({"distributed_type": "DEEPSPEED"}, {"parallel.reshard_after_forward": False}),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3, "gradient_clipping": 0.5}},
         {"parallel.strategy": "fsdp", "optimizer.max_grad_norm": 0.5}),
        ({"distributed_type": "NO", "mixed_precision": "fp16"}, {"model.dtype": "bfloat16"}),
        ({"distributed_type": "NO", "mixed_precision": "fp8"}, {"kernels.linear": "fp8"}),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}, "parallelism_config": {
            "parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4}},
         {"parallel.shard_degree": 4, "parallel.strategy": "hsdp"}),
    ],
)  # fmt: skip
def test_what_accelerate_s_keys_set(tmp_path: Path, said: dict[str, Any], expected: dict[str, Any]) -> None:
    config = load(tmp_path, "accelerate", said).config.model_dump()
    for key, value in expected.items():
        section, _, leaf = key.partition(".")
        assert config[section][leaf] == value


@pytest.mark.parametrize(
    ("said", "finding"),
    [
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_shard_strategy": 1}}, "did you mean `fsdp_config.fsdp_sh"),
        ({"distributed_type": "FSPD"}, "got FSPD, allowed: 'NO', MULTI_GPU"),
        ({"distributed_type": "TPU"}, "got TPU, allowed"),
        ({"distributed_type": "MULTI_GPU", "num_processes": "two"}, "`num_processes`: got two, allowed: a number"),
        ({"distributed_type": "MULTI_GPU", "num_machines": "two"}, "`num_machines`: got two, allowed: a number"),
        ({"distributed_type": "MULTI_GPU", "gpu_ids": "2,3"}, "set CUDA_VISIBLE_DEVICES=2,3"),
        ({"distributed_type": "MULTI_GPU", "mixed_precision": "bf61"}, "got bf61, allowed: 'no', bf16"),
        ({"distributed_type": "NO", "colour": "red"}, "`colour`: accelerate has no such key and refuses it"),
        ({"distributed_type": "MULTI_GPU", "num_processes": 2, "parallelism_config": {
            "parallelism_config_tp_size": 2}}, "tensor, context and sequence parallelism"),
    ],
)  # fmt: skip
def test_what_accelerate_s_file_may_not_ask(tmp_path: Path, said: dict[str, Any], finding: str) -> None:
    with pytest.raises(UserError) as error:
        load(tmp_path, "accelerate", said)
    assert finding in str(error.value) and "accelerate.yaml" in str(error.value) and "line " in str(error.value)


def test_sections_of_another_kind_are_said_to_be_ignored(tmp_path: Path) -> None:
    said = FSDP | {"distributed_type": "MULTI_GPU"}
    assert kinds(load(tmp_path, "accelerate", said))["fsdp_config.fsdp_sharding_strategy"] == "ignored"


# DeepSpeed


ZERO = "zero_optimization"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({ZERO: {"stage": 0}}, {"strategy": "ddp"}),
        ({ZERO: {"stage": 1}}, {"strategy": "fsdp", "reshard_after_forward": False}),
        ({ZERO: {"stage": 2}}, {"strategy": "fsdp", "reshard_after_forward": False}),
        ({ZERO: {"stage": 3}}, {"strategy": "fsdp", "reshard_after_forward": "auto"}),
        ({"steps_per_print": 5}, {"strategy": "ddp"}),
        ({ZERO: {"stage": 3, "cpu_offload": True}}, {"offload": "optimizer"}),
        ({ZERO: {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}}}, {"offload": "optimizer"}),
        ({ZERO: {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}},
         {"offload": "all"}),
        ({ZERO: {"stage": 3, "offload_param": {"device": "none"}}}, {"offload": "none"}),
    ],
)  # fmt: skip
def test_zero_s_stages_and_offloading(tmp_path: Path, said: dict[str, Any], expected: dict[str, Any]) -> None:
    parallel = load(tmp_path, "deepspeed", said).config.parallel.model_dump()
    assert {key: parallel[key] for key in expected} == expected


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stages_are_deepspeed_s_own_where_it_is_installed(tmp_path: Path, stage: int) -> None:
    loaded = load(tmp_path, "deepspeed", {ZERO: {"stage": stage, "cpu_offload": True}}, deepspeed=True, strict=True)
    assert loaded.config.parallel.strategy == f"zero{stage}" and loaded.config.parallel.offload == "optimizer"
    assert kinds(loaded)[f"{ZERO}.stage"] == "mapped"
    by_accelerate = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": stage}}
    parallel = load(tmp_path, "accelerate", by_accelerate, deepspeed=True).config.parallel
    assert (parallel.strategy, parallel.reshard_after_forward) == (f"zero{stage}", "auto")
    default = load(tmp_path, "accelerate", {"distributed_type": "DEEPSPEED"}, deepspeed=True).config
    assert default.parallel.strategy == "zero2"


def test_without_it_stages_are_a_substitution_that_strict_refuses(tmp_path: Path) -> None:
    assert kinds(load(tmp_path, "deepspeed", {ZERO: {"stage": 2}}))[f"{ZERO}.stage"] == "substituted"
    with pytest.raises(UserError, match=r"DeepSpeed is not installed.*refused under --strict"):
        load(tmp_path, "deepspeed", {ZERO: {"stage": 2}}, strict=True)


@pytest.mark.parametrize(
    ("stage", "keys", "named"),
    [
        (2, {"optim": "adamw_bnb_8bit"}, "`optimizer.name: adamw_8bit`"),
        (3, {"torch_compile": True}, "`parallel.compile: true`"),
        (3, {"load_in_4bit": True, "use_peft": True}, "`method.name: qlora`"),
    ],
)
def test_what_a_stage_cannot_carry_out_is_sharded_by_fsdp(
    tmp_path: Path, stage: int, keys: dict[str, Any], named: str
) -> None:
    (tmp_path / "z.json").write_text(json.dumps({ZERO: {"stage": stage}}))
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(TRL | keys | {"deepspeed": "z.json"}))
    loaded = load_run(tmp_path / "sft.yaml", context=ImportContext(gpus=1, deepspeed=True))
    assert loaded.config.parallel.strategy == "fsdp" and loaded.translation is not None
    (outcome,) = (one for one in loaded.translation.outcomes if one.key == f"deepspeed > {ZERO}.stage")
    assert outcome.kind == "substituted" and named in outcome.why and outcome.native["parallel.strategy"] == "fsdp"
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(TRL | {"deepspeed": "z.json"}))
    assert (
        load_run(tmp_path / "sft.yaml", context=ImportContext(gpus=1, deepspeed=True)).config.parallel.strategy
        == f"zero{stage}"
    )


def test_what_a_stage_cannot_carry_out_of_the_run_file_is_sharded_by_fsdp(tmp_path: Path) -> None:
    """DeepSpeed's file and accelerate's, beside a native file, another tool's, or an override."""
    qlora = RUN | {"method": {"name": "qlora"}}
    sft_play = {"model": {"name": "org/model"}, "tuning": {"mode": "qlora"}, "data": {"train_path": "rows.jsonl"}}
    stage3 = {ZERO: {"stage": 3, "cpu_offload": True}, "bf16": {"enabled": True}}
    by_accelerate = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}
    for kind, said, run, overrides in (
        ("deepspeed", stage3, qlora, ()),
        ("deepspeed", stage3, sft_play, ()),
        ("accelerate", by_accelerate, qlora, ()),
        ("deepspeed", stage3, RUN, ("method.name=qlora",)),
    ):
        loaded = load(tmp_path, kind, said, run, *overrides, deepspeed=True, gpus=2)
        assert loaded.config.parallel.strategy == "fsdp" and loaded.config.method.name == "qlora"
        (outcome,) = (one for one in loaded.settings[0].outcomes if one.kind == "substituted")
        assert "DeepSpeed's stages are not available with `method.name: qlora`; FSDP2 shards weights" in outcome.why
    own = load(tmp_path, "deepspeed", stage3, qlora, "method.name=lora", deepspeed=True)
    assert own.config.parallel.strategy == "zero3"
    with pytest.raises(UserError, match=r"method.name: qlora.*refused under --strict"):
        load(tmp_path, "deepspeed", stage3, qlora, deepspeed=True, strict=True)


EIGHT_BIT = RUN | {"optimizer": {"name": "adamw_8bit"}}
OFFLOADS: list[tuple[str, dict[str, Any], str]] = [
    ("accelerate", {**FSDP, "fsdp_config": {"fsdp_offload_params": True}}, "all"),
    (
        "accelerate",
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "cpu"}},
        "optimizer",
    ),
    ("deepspeed", {ZERO: {"stage": 3, "offload_optimizer": {"device": "cpu"}}}, "optimizer"),
]


@pytest.mark.parametrize(
    "run",
    [
        EIGHT_BIT,
        RUN | {"optimizer": {"name": "paged_adamw_8bit"}},
        TRL | {"optim": "adamw_bnb_8bit", "completion_only_loss": True},
    ],
)
@pytest.mark.parametrize(("kind", "said", "offload"), OFFLOADS)
def test_states_that_a_settings_file_offloads_have_32_bits(
    tmp_path: Path, kind: str, said: dict[str, Any], offload: str, run: dict[str, Any]
) -> None:
    loaded = load(tmp_path, kind, said, run, deepspeed=True, gpus=2)
    assert (loaded.config.optimizer.name, loaded.config.parallel.offload) == ("adamw", offload)
    (outcome,) = (one for one in loaded.settings[0].outcomes if one.kind == "substituted")
    assert outcome.native == {"parallel.offload": offload, "optimizer.name": "adamw"}
    assert outcome.why == f"optimizer states in host memory have 32 bits (parallel.offload: {offload})"
    by_pipe = TypeAdapter(LoadedRun)  # how a launcher that Python starts gets it
    assert by_pipe.validate_python(json.loads(json.dumps(by_pipe.dump_python(loaded, mode="json")))) == loaded
    with pytest.raises(UserError, match=r"have 32 bits.*refused under --strict"):
        load(tmp_path, kind, said, run, deepspeed=True, gpus=2, strict=True)


def test_overrides_decide_of_states_in_host_memory(tmp_path: Path) -> None:
    kind, said, _ = OFFLOADS[0]
    for override in ("optimizer.name=adafactor", "optimizer.name=adamw_8bit"):
        with pytest.raises(UserError, match=r"`parallel.offload: all` does not support"):
            load(tmp_path, kind, said, EIGHT_BIT, override)
    on_gpu = load(tmp_path, kind, said, EIGHT_BIT, "parallel.offload=none", strict=True).config
    assert (on_gpu.optimizer.name, on_gpu.parallel.offload) == ("adamw_8bit", "none")
    assert load(tmp_path, kind, said, EIGHT_BIT, "optimizer.name=adamw", strict=True).config.optimizer.name == "adamw"


def test_deepspeed_s_samples_per_gpu_are_the_batch_where_nothing_else_says_one(tmp_path: Path) -> None:
    said = {ZERO: {"stage": 2}, "train_micro_batch_size_per_gpu": 4}
    assert load(tmp_path, "deepspeed", said, gpus=2).config.batch.samples == 8
    assert load(tmp_path, "deepspeed", said | {"gradient_accumulation_steps": 3}, gpus=2).config.batch.samples == 24
    for batch in ({"samples": 64}, {"packs": 2}, {"loss_tokens": 500}):
        config = load(tmp_path, "deepspeed", said, RUN | {"batch": batch}, gpus=2).config
        assert config.batch.model_dump(exclude_unset=True) == batch


@pytest.mark.parametrize(
    ("name", "stage", "offload"),
    [
        ("deepspeed_configs/zero1.json", 1, "none"),
        ("deepspeed_configs/zero1_torch_compile.json", 1, "none"),
        ("deepspeed/zero2.json", 2, "none"),
        ("zero3_bf16_cpuoffload_params.json", 3, "all"),
        ("examples/deepspeed/ds_z2_offload_config.json", 2, "optimizer"),
        ("examples/deepspeed/ds_z3_config.json", 3, "none"),
        ("ds_config_zero3.json", 3, "none"),
        ("scripts/zero3_offload.json", 3, "all"),
        ("stage2.json", 2, "none"),
        ("zero_stage3_offload_optimizer.json", 3, "optimizer"),
        ("zero4.json", None, ""),
        ("zero3_mine.json", None, ""),
        ("ds_z3_fp8_config.json", None, ""),
    ],
)
def test_a_deepspeed_file_of_a_well_known_name_says_what_it_holds(
    tmp_path: Path, name: str, stage: int | None, offload: str
) -> None:
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(TRL | {"deepspeed": name}))
    if stage is None:
        with pytest.raises(UserError, match="there is no file"):
            load_run(tmp_path / "sft.yaml", context=ImportContext(gpus=1, deepspeed=True))
        return
    loaded = load_run(tmp_path / "sft.yaml", context=ImportContext(gpus=2, deepspeed="compile" not in name))
    assert loaded.translation is not None
    (outcome,) = (one for one in loaded.translation.outcomes if one.key == f"deepspeed > {ZERO}.stage")
    assert f"{Path(name).name} (not here: read by its name)" in outcome.place
    parallel = loaded.config.parallel
    if "compile" in name:  # which DeepSpeed's stages do not carry out
        assert parallel.strategy == "fsdp" and parallel.compile is True
        return
    assert parallel.strategy == f"zero{stage}" and parallel.offload in (offload, "auto" if offload == "none" else "")


def test_other_sections_of_deepspeed(tmp_path: Path) -> None:
    said = {
        ZERO: {"stage": 2, "overlap_comm": True, "reduce_bucket_size": "auto"},
        "bf16": {"enabled": True},
        "gradient_clipping": 0.25,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.99], "eps": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 7, "warmup_type": "linear"}},
        "train_batch_size": "auto",
    }
    config = load(tmp_path, "deepspeed", said).config
    assert config.model.dtype == "bfloat16" and config.optimizer.max_grad_norm == 0.25
    assert (config.optimizer.learning_rate, config.optimizer.beta1, config.optimizer.beta2) == (3e-5, 0.8, 0.99)
    assert config.schedule.name == "linear" and config.schedule.warmup_steps == 7


def test_batches_of_deepspeed_are_checked_with_their_sum(tmp_path: Path) -> None:
    numbers = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    assert load(tmp_path, "deepspeed", numbers, count_gpus=lambda: 2).config.batch.samples == 16
    with pytest.raises(UserError, match="2 × 2 × 4 = 16, not 64"):
        load(tmp_path, "deepspeed", numbers | {"train_batch_size": 64}, count_gpus=lambda: 2)
    with pytest.raises(UserError, match=r"`batch.samples: 32`, the run file for 8"):
        load(tmp_path, "deepspeed", {"train_batch_size": 32}, RUN | {"batch": {"samples": 8}})


def test_a_file_of_another_tool_and_deepspeed_s_have_one_accumulation(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="`gradient_accumulation_steps`: 4, but the run file's accumulation is 8"):
        load(tmp_path, "deepspeed", {"gradient_accumulation_steps": 4}, TRL, gpus=1)
    assert load(tmp_path, "deepspeed", {"gradient_accumulation_steps": "auto"}, TRL, gpus=1).config.batch.samples == 64


def test_a_key_that_names_a_deepspeed_file_reads_it(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "z3.json").write_text('{"zero_optimization": {"stage": 3} // more\n}')
    (tmp_path / "configs" / "sft.yaml").write_text(yaml.safe_dump(TRL | {"deepspeed": "z3.json"}))
    loaded = load_run(tmp_path / "configs" / "sft.yaml", context=ImportContext(gpus=1))
    assert loaded.config.parallel.strategy == "fsdp" and loaded.translation is not None
    outcomes = {outcome.key: outcome.kind for outcome in loaded.translation.outcomes}
    assert outcomes["deepspeed > zero_optimization.stage"] == "substituted"
    (tmp_path / "configs" / "sft.yaml").write_text(yaml.safe_dump(TRL | {"deepspeed": "z4.json"}))
    with pytest.raises(UserError, match=r"`deepspeed`: there is no file z4.json"):
        load_run(tmp_path / "configs" / "sft.yaml", context=ImportContext(gpus=1))


@pytest.mark.parametrize(
    ("said", "finding"),
    [
        ({ZERO: {"stag": 3}}, "did you mean `zero_optimization.stage`"),
        ({ZERO: {"stage": 4}}, "got 4, allowed: 0, 1, 2 or 3"),
        ({ZERO: {"stage": "three"}}, "got three, allowed: a number"),
        ({ZERO: {"stage": 3, "offload_param": {"device": "nvme"}}}, "got nvme, allowed: cpu or none"),
        ({"optimizer": {"type": "OneBitAdam"}}, "OneBitAdam is not available"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor parallelism is not available"),
        ({"scheduler": {"type": "OneCycle"}}, "OneCycle is not available"),
        ({"elasticity": {"enabled": True}}, "the global batch does not change with the GPUs"),
        ({ZERO: {"stage": 1}, "use_peft": True}, "a key of TRL"),
    ],
)
def test_what_deepspeed_s_file_may_not_ask(tmp_path: Path, said: dict[str, Any], finding: str) -> None:
    with pytest.raises(UserError) as error:
        load(tmp_path, "deepspeed", said)
    assert finding in str(error.value) and "deepspeed.json" in str(error.value) and "line " in str(error.value)


@pytest.mark.parametrize(
    ("said", "key", "kind", "log"),
    [
        # sums in fewer bits are not told as already so
        ({"communication_data_type": "bf16"}, "communication_data_type", "substituted", {}),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types", "substituted", {}),
        ({"fp16": {"enabled": False, "fp16_master_weights_and_grads": True}}, "fp16.fp16_master_weights_and_grads",
         "substituted", {}),
        # trackers
        ({"wandb": {"enabled": True, "project": "mine"}}, "wandb", "mapped", {"wandb": "mine"}),
        ({"wandb": {"enabled": True}}, "wandb", "mapped", {"wandb": "deepspeed"}),
        ({"wandb": {"enabled": False, "project": "mine"}}, "wandb", "no_op", {}),
        ({"tensorboard": {"enabled": True}}, "tensorboard", "mapped", {"tensorboard": True}),
        ({"comet": {"enabled": True}}, "comet", "substituted", {}),
        ({"csv_monitor": {"enabled": True}}, "csv_monitor", "substituted", {}),
    ],
)  # fmt: skip
def test_what_becomes_of_a_key_of_deepspeed(said: dict[str, Any], key: str, kind: str, log: dict[str, Any]) -> None:
    for strict in (False, True):
        context = ImportContext(gpus=2, strict=strict)
        t = Translator(
            ParsedFile({ZERO: {"stage": 2}} | said, "ds.json"), context, tool="DeepSpeed", known=KEYS, open=OPEN
        )
        translate(t)
        done, wanted = t.finish(), "refused" if strict and kind == "substituted" else kind
        assert {outcome.key: outcome.kind for outcome in done.outcomes}[key] == wanted
        assert done.mapping.get("log", {}) == log


@pytest.mark.parametrize(
    ("name", "text", "option"),
    [
        ("f.yaml", "distributed_type: FSDP\nnum_processes: 2\n", "--accelerate-config"),
        ("z.json", '{"zero_optimization": {"stage": 3}}', "--deepspeed"),
    ],
)
def test_a_settings_file_is_no_run_file(tmp_path: Path, name: str, text: str, option: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=f"manyhands train RUN.yaml {option}"):
        load_run(tmp_path / name)


def test_a_file_without_any_key_of_the_tool_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no DeepSpeed file"):
        load(tmp_path, "deepspeed", {"base_model": "x"})


def test_blocks_that_are_partly_recomputed_are_sharded_by_fsdp(tmp_path: Path) -> None:
    keys = {"gradient_checkpointing": True, "selective_checkpointing": True, "deepspeed": {ZERO: {"stage": 3}}}
    file = {
        "base_model": "m",
        "datasets": [{"path": "rows.jsonl", "type": "alpaca"}],
        "micro_batch_size": 1,
        "learning_rate": 1e-4,
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(file | {"gradient_accumulation_steps": 1} | keys))
    parallel = load_run(tmp_path / "run.yaml", context=ImportContext(gpus=1, deepspeed=True)).config.parallel
    assert (parallel.strategy, parallel.activation_checkpointing) == ("fsdp", "selective")
