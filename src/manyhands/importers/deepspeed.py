"""DeepSpeed's JSON (``--deepspeed``, ``DEEPSPEED_CONFIG=``, the key ``deepspeed`` of other tools' files).

ZeRO's stages are strategies of ours, carried out by DeepSpeed itself. Where the package is not installed, or cannot do
what else the file asks for, they are replaced by what FSDP2 shards alike, with a note. Values ``auto`` are filled
from the run file.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from manyhands.config.read import ParsedFile, read_run_file
from manyhands.config.text import names, show
from manyhands.core.units import count_of
from manyhands.importers.shared import map_fp16, map_trackers
from manyhands.importers.translation import UNKNOWN_GPUS, Translator, check_product
from manyhands.optim.registry import OPTIMIZERS, names_in

TOOL = "DeepSpeed"
REFUSES_UNKNOWN = False
NOT_INSTALLED = "DeepSpeed is not installed (pip install 'manyhands[deepspeed]')"
STAGES: Mapping[int, tuple[Mapping[str, Any], str]] = {
    0: ({"parallel.strategy": "ddp"}, "nothing is sharded: DDP"),
    1: ({"parallel.strategy": "fsdp", "parallel.reshard_after_forward": False}, "FSDP2 shards optimizer states, too"),
    2: ({"parallel.strategy": "fsdp", "parallel.reshard_after_forward": False},
        "FSDP2 shards gradients and optimizer states, too"),
    3: ({"parallel.strategy": "fsdp"}, "FSDP2 shards weights, gradients and optimizer states, too"),
}  # fmt: skip

MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet")  # its own trackers
ALREADY = names(
    """
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer steps_per_print wall_clock_breakdown dump_state
    memory_breakdown prescale_gradients gradient_predivide_factor sparse_gradients
    disable_allgather flops_profiler monitor_config comms_logger comms_config
    checkpoint nebula aio activation_checkpointing dataloader_drop_last use_node_local_storage
    autotuning timers gradient_allreduce_coalescing graph_harvesting
    zero_optimization.overlap_comm zero_optimization.contiguous_gradients zero_optimization.reduce_scatter
    zero_optimization.reduce_bucket_size zero_optimization.allgather_partitions zero_optimization.allgather_bucket_size
    zero_optimization.sub_group_size zero_optimization.stage3_prefetch_bucket_size
    zero_optimization.prefetch_bucket_size
    zero_optimization.stage3_param_persistence_threshold zero_optimization.param_persistence_threshold
    zero_optimization.stage3_model_persistence_threshold zero_optimization.model_persistence_threshold
    zero_optimization.stage3_max_live_parameters zero_optimization.max_live_parameters
    zero_optimization.stage3_max_reuse_distance zero_optimization.max_reuse_distance
    zero_optimization.stage3_gather_16bit_weights_on_model_save zero_optimization.gather_16bit_weights_on_model_save
    zero_optimization.stage3_gather_fp16_weights_on_model_save zero_optimization.stage3_module_granularity_threshold
    zero_optimization.round_robin_gradients zero_optimization.load_from_fp32_weights
    zero_optimization.elastic_checkpoint zero_optimization.ignore_unused_parameters
    zero_optimization.use_multi_rank_bucket_allreduce zero_optimization.memory_efficient_linear
    zero_optimization.zero_hpz_partition_size zero_optimization.use_all_reduce_for_fetch_params
    zero_optimization.log_trace_cache_warnings zero_optimization.pipeline_loading_checkpoint
    zero_optimization.offload_optimizer.pin_memory zero_optimization.offload_optimizer.buffer_count
    zero_optimization.offload_optimizer.fast_init zero_optimization.offload_optimizer.pipeline_read
    zero_optimization.offload_optimizer.pipeline_write zero_optimization.offload_optimizer.nvme_path
    zero_optimization.offload_optimizer.ratio zero_optimization.offload_param.pin_memory
    zero_optimization.offload_param.buffer_count zero_optimization.offload_param.buffer_size
    zero_optimization.offload_param.max_in_cpu zero_optimization.offload_param.nvme_path
    zero_optimization.cpu_offload_use_pin_memory
    fp16.loss_scale fp16.loss_scale_window fp16.initial_scale_power fp16.hysteresis fp16.consecutive_hysteresis
    fp16.min_loss_scale fp16.auto_cast bf16.immediate_grad_update
    bf16.check_grad_overflow compile.backend compile.kwargs compile.offload_parameters
    """
)
"""Buckets, prefetching, communication, profiling, loss scaling: without effect on what is trained."""

OFF: Mapping[str, tuple[tuple[Any, ...], str]] = {
    # allowed values, and why no other
    "tensor_parallel.autotp_size": ((0, 1), "tensor parallelism is not available: set it to 1"),
    "sequence_parallel_size": ((1,), "sequence parallelism is not available: set it to 1"),
    "amp.enabled": ((False, "auto"), "apex's amp is not available: use bf16"),
    "zero_optimization.zero_quantized_weights": ((False,), "quantized communication is not available"),
    "zero_optimization.zero_quantized_nontrainable_weights": ((False,), "quantized communication is not available"),
    "zero_optimization.zero_quantized_gradients": ((False,), "quantized communication is not available"),
    "zero_optimization.legacy_stage1": ((False,), "not available: remove it"),
    "zero_optimization.mics_shard_size": ((-1,), "write `parallel.strategy: hsdp` with `parallel.shard_degree`"),
    "zero_optimization.mics_hierarchical_params_gather": ((False,), "not available: remove it"),
    **{name: ((None, {}), "not available: remove the section") for name in (
        "sparse_attention", "data_efficiency", "curriculum_learning", "progressive_layer_drop", "eigenvalue",
        "compression_training", "hybrid_engine", "pipeline", "quantize_training", "zero_optimization.super_offload",
    )},
}  # fmt: skip

KEYS = ALREADY | frozenset(MONITORS) | frozenset(OFF) | names(
    """
    communication_data_type data_types elasticity fp16.fp16_master_weights_and_grads
    zero_optimization zero_optimization.stage zero_optimization.cpu_offload zero_optimization.cpu_offload_params
    zero_optimization.cpu_offload_param zero_optimization.offload_optimizer zero_optimization.offload_optimizer.device
    zero_optimization.offload_param zero_optimization.offload_param.device bf16.enabled bfloat16.enabled fp16.enabled
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping compile.disable
    compile.enabled compile.deepcompile optimizer.type optimizer.params.lr optimizer.params.betas optimizer.params.eps
    optimizer.params.weight_decay optimizer.params.adam_w_mode optimizer.params.torch_adam
    optimizer.params.bias_correction scheduler.type scheduler.params.warmup_min_lr scheduler.params.warmup_max_lr
    scheduler.params.warmup_num_steps scheduler.params.warmup_type scheduler.params.total_num_steps
    scheduler.params.cos_min_ratio scheduler.params.warmup_min_ratio
    """
)  # fmt: skip
MARKS = frozenset({"zero_optimization.stage", "train_micro_batch_size_per_gpu"})
OPEN = names(
    """
    data_types flops_profiler monitor_config comms_logger comms_config tensorboard wandb csv_monitor comet checkpoint
    nebula aio activation_checkpointing elasticity autotuning timers sparse_attention data_efficiency
    curriculum_learning progressive_layer_drop eigenvalue compression_training hybrid_engine pipeline quantize_training
    zero_optimization.super_offload compile.kwargs
    """
)
SCHEDULES: Mapping[str, str] = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def translate(t: Translator) -> None:
    """Every key of a DeepSpeed file."""
    t.no_op(ALREADY & t.values.keys())
    for key in MONITORS:  # its project is called deepspeed unless the file names another
        options = t.get(key)
        if isinstance(options, Mapping) and options.get("enabled"):
            map_trackers(t, {key: [key]}, {}, {"wandb": options.get("project") or "deepspeed"})
        t.no_op(key)
    for key, (allowed, why) in OFF.items():
        t.only(key, allowed, why)
    _map_sums(t)
    zero = "zero_optimization."
    map_zero(
        t,
        stage=zero + "stage",
        optimizer=(zero + "offload_optimizer.device", zero + "cpu_offload"),
        weights=(zero + "offload_param.device", zero + "cpu_offload_params", zero + "cpu_offload_param"),
    )
    for key in ("zero_optimization", zero + "offload_optimizer", zero + "offload_param"):
        t.only(key, (None, {}), "write its options below it")
    _map_precision(t)
    map_batch(t)
    if _is_set(t, "gradient_clipping"):
        t.map("gradient_clipping", "optimizer.max_grad_norm", t.number("gradient_clipping"))
    t.map("compile.disable", "parallel.compile", not t.flag("compile.disable"))
    t.only("compile.deepcompile", (False,), "DeepCompile is not available: set it to false")
    t.map("compile.enabled", "parallel.compile", t.flag("compile.enabled"))
    _map_optimizer(t)
    _map_schedule(t)


def _map_sums(t: Translator) -> None:
    """Keys by which DeepSpeed sums gradients or holds masters in fewer bits, or chooses the batch by the GPUs."""
    types = t.get("data_types", {})
    summed = types.get("grad_accum_dtype") if isinstance(types, Mapping) else types
    for key, narrow, what in (
        ("communication_data_type", t.get("communication_data_type"), "gradients of all ranks are summed in float32"),
        ("data_types", summed, "gradients are accumulated in float32"),
        ("fp16.fp16_master_weights_and_grads", t.flag("fp16.fp16_master_weights_and_grads"),
         "master weights and gradients are float32"),
    ):  # fmt: skip
        if narrow in (None, "", False, "auto", "fp32", "float32"):
            t.no_op(key)
        else:
            t.substitute(key, {}, what)
    elastic = t.get("elasticity", {})
    if isinstance(elastic, Mapping) and elastic.get("enabled") in (None, False):
        t.no_op("elasticity")
    else:
        t.refuse("elasticity", "the global batch does not change with the GPUs: set enabled to false")


def map_deepspeed(t: Translator, key: str) -> None:
    """A key of another tool that holds DeepSpeed's options or names their file. Gives the key its outcome."""
    value = t.get(key)
    if value is None:
        t.no_op(key)
        return
    if isinstance(value, Mapping):
        source = ParsedFile(dict(value), t.source.where)
    elif file := find_file(t.context.folder, str(value)):
        source = read_run_file(file)
    elif named := read_name(str(value)):
        source = ParsedFile(named, f"{value} (not here: read by its name)")
    else:
        t.refuse(key, f"there is no file {value} in the file's folder, in those above it, or here: correct the path")
        return
    inner = Translator(
        source,
        replace(t.context, micro=t.micro, accumulation=t.accumulation, gpus=t.context.gpus or t.gpus),
        tool=TOOL,
        known=KEYS,
        open=OPEN,
    )
    translate(inner)
    t.map(key, {}, why=f"read: {source.where}" if source.where != t.source.where else "")
    t.merge(inner.finish(), key)


# Names of the files that tools bring along and that are most often named without being at hand: Axolotl's
# zero3_bf16_cpuoffload_all.json, LLaMA-Factory's ds_z3_offload_config.json, ds_config_zero3.json of transformers, ...
_STAGE = re.compile(r"(?:zero|stage|z)_?([0123])")
_WORDS = names(
    "ds deepspeed config configs zero stage auto bf16 bfloat16 torch compile offload opt optimizer param params all"
)


def read_name(path: str) -> dict[str, Any] | None:
    """What a file of a well-known name holds, as far as it changes the run; None for any other name."""
    stem = re.split(r"[/\\]", path)[-1].lower().replace("-", "_")
    stage = _STAGE.search(stem)
    if not stem.endswith(".json") or stage is None:
        return None
    rest = _STAGE.sub("_", stem.removesuffix(".json"), count=1).replace("cpuoffload", "offload").replace("cpu_", "")
    words = [word for word in rest.split("_") if word]
    if not set(words) <= _WORDS:
        return None
    number, text = int(stage[1]), "_".join(words)
    zero: dict[str, Any] = {"stage": number}
    if "offload" in words:
        if number == 3 and not text.endswith(("offload_opt", "offload_optimizer")):
            zero["offload_param"] = {"device": "cpu"}
        if not text.endswith(("offload_param", "offload_params")):
            zero["offload_optimizer"] = {"device": "cpu"}
    options: dict[str, Any] = {"zero_optimization": zero}
    if {"bf16", "bfloat16"} & set(words):
        options["bf16"] = {"enabled": True}
    if "torch_compile" in text:
        options["compile"] = {"disable": False}
    return options


def find_file(folder: Path, name: str) -> Path | None:
    """A file that another tool's file names: relative to its folder, to one above it, or to the current one."""
    for start in (folder, *folder.parents, Path()):
        path = start / os.path.expanduser(name)
        if os.path.isfile(path):
            return path
    return None


def map_zero(t: Translator, *, stage: str, optimizer: tuple[str, ...], weights: tuple[str, ...]) -> None:
    """ZeRO's stage and what it offloads. ``optimizer``, ``weights``: keys with a device, or true and false."""
    if t.has(stage):
        map_stage(t, stage, t.integer(stage, 0) or 0)
    else:
        t.set_tool_default("parallel.strategy", "ddp", "DeepSpeed's default is ZeRO stage 0")
    offloads = {key: _offloads(t, key) for key in (*optimizer, *weights) if t.has(key)}
    whole = any(offloads.get(key) for key in weights)
    for key, asked in offloads.items():
        if asked:
            t.map(key, "parallel.offload", "all" if whole else "optimizer")
        elif asked is False:
            t.no_op(key)


def map_stage(t: Translator, key: str, number: int, why: str = "") -> None:
    """A stage as a strategy. ``why``: where the number comes from, if the file does not say it."""
    if number not in STAGES:
        t.refuse(key, f"got {number}, allowed: 0, 1, 2 or 3")
        return
    native, alike = STAGES[number]
    if number == 0:
        t.map(key, native, why=alike)
    elif t.context.deepspeed:
        t.map(key, "parallel.strategy", f"zero{number}", why)
    else:
        t.substitute(key, native, "; ".join(part for part in (why, NOT_INSTALLED, alike) if part))


def fall_back_to_fsdp(t: Translator, run: Mapping[str, Any]) -> None:
    """Replaces a stage by FSDP2 where DeepSpeed cannot carry out the rest of the file or of ``run``."""
    asked = str(t.mapping.get("parallel", {}).get("strategy"))
    if not asked.startswith("zero"):
        return
    merged = dict(t.mapping)
    for section, values in run.items():
        if isinstance(values, Mapping):
            merged[section] = {**values, **merged.get(section, {})}
    if obstacle := find_obstacle(merged, int(asked[-1])):
        native, alike = STAGES[int(asked[-1])]
        t.replace("parallel.strategy", native, f"DeepSpeed's stages are not available with {obstacle}; {alike}")


def find_obstacle(mapping: Mapping[str, Any], stage: int) -> str:
    """A native key with its value that no stage (or not this one) supports, or ""; see ``config/checks.py``."""

    def value(section: str, key: str) -> Any:
        return mapping.get(section, {}).get(key)

    optimizer = OPTIMIZERS.get(value("optimizer", "name"))
    obstacles = {
        "optimizer.name": optimizer is not None and not optimizer.takes_partitions,
        "model.dtype": value("model", "dtype") == "float64",
        "model.master_dtype": value("model", "master_dtype") == "bfloat16",
        "kernels.linear": value("kernels", "linear") == "fp8",
        "model.frozen_dtype": stage == 3 and value("model", "frozen_dtype") == "fp8",
        "parallel.offload": stage < 3 and value("parallel", "offload") == "all",
        "method.name": stage == 3 and value("method", "name") == "qlora",
        "method.dora": stage == 3 and value("method", "dora") is True,
        "model.new_tokens": stage == 3 and bool(value("model", "new_tokens")),
        "parallel.activation_checkpointing": stage == 3
        and value("parallel", "activation_checkpointing") in ("selective", "except_attention"),
        "parallel.compile": stage == 3 and value("parallel", "compile") is True,
    }
    found = next((key for key, applies in obstacles.items() if applies), "")
    return f"`{found}: {show(value(*found.split('.')))}`" if found else ""


def _offloads(t: Translator, key: str) -> bool | None:
    """Whether a key asks for host memory; None if it was refused."""
    value = str(t.get(key)).lower()
    if value in ("none", "false", "auto"):
        return False
    if value in ("cpu", "true"):
        return True
    t.refuse(key, f"got {show(t.get(key))}, allowed: cpu or none (states on disk are not available)")
    return None


def _is_set(t: Translator, key: str) -> bool:
    """Whether the key has a value of its own; ``auto`` is the run file's."""
    if t.get(key) == "auto":
        t.no_op(key, "auto: the run file's")
        return False
    return t.has(key)


def _map_precision(t: Translator) -> None:
    for key in ("bf16.enabled", "bfloat16.enabled"):
        if _is_set(t, key):
            t.switch(key, "model.dtype", "bfloat16")
    if _is_set(t, "fp16.enabled"):
        map_fp16(t, "fp16.enabled")


def map_batch(t: Translator) -> None:
    """The three numbers of a batch, against each other and against the run file's."""
    total, micro, steps = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    given = {key: t.integer(key) for key in (total, micro, steps) if _is_set(t, key)}
    for key, name, asked in (
        (micro, "samples per GPU", t.context.micro),
        (steps, "accumulation", t.context.accumulation),
    ):
        number = given.get(key)
        if number is not None and asked is not None and number != asked:
            t.contradict(key, f"{number}, but the run file's {name} is {asked}: write auto")
    t.no_op(given, "the global batch is that of the run; the plan divides it into micro-batches")
    sizes = [("samples per GPU", given.get(micro) or t.context.micro), ("GPUs", 0),
             ("accumulation", given.get(steps) or t.context.accumulation)]  # fmt: skip
    if None in (sizes[0][1], sizes[2][1]) or not (micro in given or steps in given or total in given):
        if given.get(total):
            t.map(total, "batch.samples", given[total])
        elif (number := given.get(micro)) and (gpus := t.num_gpus()):
            sum_ = f"{number} samples per GPU × {count_of(gpus, 'GPU')}, where nothing else says a batch"
            t.no_op(micro, sum_)
            t.set_tool_default("batch.samples", number * gpus, f"`{micro}`: {sum_}")
        return
    gpus = t.num_gpus()
    if gpus is None:
        t.refuse(next(iter(given)), UNKNOWN_GPUS)
        return
    parts = [(name, gpus if name == "GPUs" else int(size or 1)) for name, size in sizes]
    if total in given:
        check_product(t, total, parts)
    product = parts[0][1] * gpus * parts[2][1]
    for key in given:
        t.map(key, "batch.samples", product, " × ".join(f"{size} {name}" for name, size in parts))


def _map_optimizer(t: Translator) -> None:
    kind = t.get("optimizer.type")
    if kind is not None:
        ours, _ = names_in("deepspeed").get(str(kind).lower(), ("", ""))
        if not ours:
            t.refuse("optimizer.type", f"{show(kind)} is not available: write AdamW, or remove the section")
        else:
            t.map("optimizer.type", "optimizer.name", ours)
    for key, native in (("lr", "learning_rate"), ("eps", "eps"), ("weight_decay", "weight_decay")):
        if _is_set(t, f"optimizer.params.{key}"):
            t.map(f"optimizer.params.{key}", f"optimizer.{native}", t.number(f"optimizer.params.{key}"))
    betas = "optimizer.params.betas"
    if _is_set(t, betas):
        pair = t.get(betas)
        if isinstance(pair, list) and len(pair) == 2:
            t.map(betas, {"optimizer.beta1": pair[0], "optimizer.beta2": pair[1]})
        else:
            t.refuse(betas, f"got {show(pair)}, allowed: two numbers, or auto")
    t.only("optimizer.params.adam_w_mode", (True, "auto"), "decay is decoupled (AdamW): set it to true")
    t.only("optimizer.params.bias_correction", (True, "auto"), "Adam corrects its bias: set it to true")
    t.no_op("optimizer.params.torch_adam")


def _map_schedule(t: Translator) -> None:
    kind = t.get("scheduler.type")
    params = "scheduler.params."
    if kind is not None:
        if str(kind) not in SCHEDULES:
            t.refuse("scheduler.type", f"{show(kind)} is not available: write one of {', '.join(SCHEDULES)}")
        else:
            t.map("scheduler.type", "schedule.name", SCHEDULES[str(kind)])
    for key, native in (
        ("warmup_max_lr", "optimizer.learning_rate"),
        ("warmup_num_steps", "schedule.warmup_steps"),
        ("cos_min_ratio", "schedule.min_ratio"),
    ):
        if _is_set(t, params + key):
            t.map(params + key, native, t.number(params + key))
    for key in ("warmup_min_lr", "warmup_min_ratio"):
        t.only(params + key, (0, 0.0, "auto"), "the learning rate starts at 0: write 0")
    t.only(params + "total_num_steps", ("auto",), "the schedule ends with the run: write auto")
    kind_of_warmup = t.get(params + "warmup_type")
    if kind_of_warmup in ("linear", "auto"):
        t.no_op(params + "warmup_type")
    elif kind_of_warmup is not None:
        t.substitute(params + "warmup_type", {}, "the warmup is linear")
    elif kind is not None and str(kind) != "WarmupCosineLR":
        t.substitute("scheduler.type", {}, "DeepSpeed's warmup is logarithmic by default, here it is linear")
