"""accelerate's YAML (``--accelerate-config``), and what ``accelerate launch`` hands to the processes that it starts.

Both are read alike: the environment's variables are given the names that they have in the file. The names are those of
accelerate 1.15 (commands/config/config_args.py, utils/launch.py).
"""

from collections.abc import Mapping
from typing import Any

from manyhands.config.read import ParsedFile
from manyhands.config.text import names, show
from manyhands.importers.deepspeed import map_deepspeed, map_stage, map_zero
from manyhands.importers.fsdp import OPTIONS, fsdp_keys, fsdp_options, map_fsdp
from manyhands.importers.shared import map_dtype
from manyhands.importers.translation import Translator

TOOL = "accelerate"
DEFAULT_PORT = 29500  # of accelerate
REFUSES_UNKNOWN = True
ENVIRONMENT = "accelerate launch (its options or its --config_file)"

ALREADY = names(
    """
    debug main_training_function rdzv_backend same_network enable_cpu_affinity machine_rank main_process_ip
    main_process_port dynamo_config.dynamo_mode dynamo_config.dynamo_use_dynamic dynamo_config.dynamo_use_fullgraph
    dynamo_config.dynamo_use_regional_compilation deepspeed_config.zero3_init_flag
    deepspeed_config.zero3_save_16bit_model deepspeed_config.deepspeed_multinode_launcher
    deepspeed_config.offload_optimizer_nvme_path deepspeed_config.offload_param_nvme_path
    deepspeed_config.deepspeed_hostfile deepspeed_config.deepspeed_exclusion_filter
    deepspeed_config.deepspeed_inclusion_filter tpu_use_sudo
    """
)
OFF: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "downcast_bf16": (("no", False), "TPUs are not available: write 'no'"),
    "tpu_use_cluster": ((False,), "TPUs are not available: write false"),
    **{key: ((None, [], {}), "TPUs are not available: remove it") for key in (
        "tpu_env", "tpu_name", "tpu_zone", "tpu_vm", "command_file", "commands")},
    "megatron_lm_config": ((None, {}), "Megatron-LM is not available: remove the section"),
    "mpirun_config": ((None, {}), "start with `manyhands train`, torchrun or accelerate: remove the section"),
    "deepspeed_config.deepspeed_moe_layer_cls_names": ((None,), "ZeRO-3's leaf modules cannot be set: remove it"),
}  # fmt: skip
PARALLEL = names("tp_size cp_size sp_size")
KEYS = ALREADY | frozenset(OFF) | fsdp_keys("fsdp_config") | names(
    """
    compute_environment distributed_type mixed_precision use_cpu num_processes num_machines gpu_ids fp8_config
    fsdp_config
    deepspeed_config dynamo_config parallelism_config dynamo_config.dynamo_backend dynamo_backend fp16
    deepspeed_config.zero_stage deepspeed_config.offload_optimizer_device deepspeed_config.offload_param_device
    deepspeed_config.gradient_accumulation_steps deepspeed_config.gradient_clipping
    deepspeed_config.deepspeed_config_file
    """
) | frozenset(f"parallelism_config.parallelism_config_{name}" for name in (
    "dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "cp_backend", "cp_comm_strategy", "sp_size",
    "sp_backend", "sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation"))  # fmt: skip
MARKS = frozenset({"distributed_type", "compute_environment"})
OPEN = frozenset({"megatron_lm_config", "mpirun_config", "fp8_config"})


def translate(t: Translator) -> None:
    """Every key of accelerate's file."""
    t.no_op(ALREADY & t.values.keys())
    for key, (allowed, why) in OFF.items():
        t.only(key, allowed, why)
    t.only("compute_environment", ("LOCAL_MACHINE",), "training runs on this machine: write LOCAL_MACHINE")
    _map_kind(t)
    _map_processes(t)
    _map_precision(t)
    if t.flag("use_cpu"):
        t.map("use_cpu", "parallel.device", "cpu")
    elif t.has("use_cpu"):
        t.no_op("use_cpu", "GPUs are used if there are any")
    backend = "dynamo_backend" if t.has("dynamo_backend") else "dynamo_config.dynamo_backend"
    asked = str(t.get(backend, "no")).lower()
    if asked == "no":
        t.no_op(backend)
    elif asked == "inductor":
        t.map(backend, "parallel.compile", True)
    else:
        t.substitute(backend, {"parallel.compile": True}, "the compiler is inductor")
    if backend == "dynamo_backend":
        t.no_op("dynamo_config.dynamo_backend", "`dynamo_backend` decides")
    _map_parallelism(t)
    for section in ("fsdp_config", "deepspeed_config", "dynamo_config", "parallelism_config"):
        t.only(section, (None, {}), "a section with keys")


def _map_kind(t: Translator) -> None:
    kind = str(t.get("distributed_type", "")).upper()
    options = fsdp_options(t, "fsdp_config")
    if kind == "FSDP":
        t.map("distributed_type", {})
        map_fsdp(t, options)
    elif kind == "DEEPSPEED":
        t.map("distributed_type", {})
        _map_deepspeed(t)
    elif kind in ("MULTI_GPU", "MULTI_CPU"):
        alone = t.integer("num_processes") == 1
        t.map("distributed_type", "parallel.strategy", "single" if alone else "ddp")
        if kind == "MULTI_CPU":
            t.map("distributed_type", "parallel.device", "cpu")
    elif kind == "NO":
        t.map("distributed_type", "parallel.gpus", 1, "one process")
    elif kind:
        allowed = "'NO', MULTI_GPU, MULTI_CPU, FSDP or DEEPSPEED"
        t.refuse("distributed_type", f"got {show(t.get('distributed_type'))}, allowed: {allowed}")
    for section, reader in (("fsdp_config.", "FSDP"), ("deepspeed_config.", "DEEPSPEED")):
        for key in t.values.keys() & KEYS if kind != reader else ():
            if key.startswith(section):
                t.ignore(key, f"accelerate reads it with `distributed_type: {reader}` only")


def _map_deepspeed(t: Translator) -> None:
    section = "deepspeed_config."
    file = section + "deepspeed_config_file"
    if t.has(file):
        map_deepspeed(t, file)
        for name in ("zero_stage", "offload_optimizer_device", "offload_param_device", "gradient_clipping",
                     "gradient_accumulation_steps"):  # fmt: skip
            t.ignore(section + name, "accelerate reads the file of `deepspeed_config_file`")
        return
    t.no_op(file)
    stage = section + "zero_stage"
    if not t.has(stage):
        map_stage(t, "distributed_type", 2, "accelerate's default is ZeRO stage 2")
    else:
        optimizer, weights = section + "offload_optimizer_device", section + "offload_param_device"
        map_zero(t, stage=stage, optimizer=(optimizer,), weights=(weights,))
    for name in ("offload_optimizer_device", "offload_param_device"):
        if str(t.get(section + name, "none")) == "none":
            t.no_op(section + name)
    clip = section + "gradient_clipping"
    if str(t.get(clip, "auto")) not in ("auto", "none", "None"):
        t.map(clip, "optimizer.max_grad_norm", t.number(clip))
    t.no_op(clip)
    steps, asked = section + "gradient_accumulation_steps", t.context.accumulation
    if str(t.get(steps, "auto")) != "auto" and asked is not None and t.integer(steps) not in (asked, 1):
        t.contradict(steps, f"{t.get(steps)}, but the run file's accumulation is {asked}: write auto")
    t.no_op(steps, "the global batch is the run file's; the plan divides it into micro-batches")


def read_place(values: Mapping[str, Any]) -> tuple[int | None, str | None]:
    """Which machine the file is for, and HOST:PORT of the first; None where the file does not say."""
    rank, host = values.get("machine_rank"), values.get("main_process_ip")
    port = values.get("main_process_port") or DEFAULT_PORT
    return rank if isinstance(rank, int) else None, f"{host}:{port}" if host else None


def _map_processes(t: Translator) -> None:
    number = t.integer("num_processes")
    if number is not None and number < 1:  # -1: to be given on accelerate's own command line
        t.no_op("num_processes", "as many as there are GPUs")
    elif number is not None:
        t.map("num_processes", "parallel.gpus", number)
    machines = t.integer("num_machines")
    if machines is not None and machines > 1:
        t.map("num_machines", "parallel.nodes", machines)
    else:
        t.no_op("num_machines", "this machine alone")
    ids = [part.strip() for part in str(t.get("gpu_ids", "all")).split(",")]
    if ids in (["all"], ["None"]) or ids == [str(index) for index in range(number or len(ids))]:
        t.no_op("gpu_ids", "the first GPUs")
    else:
        t.refuse("gpu_ids", f"set CUDA_VISIBLE_DEVICES={','.join(ids)} in its place, and write `gpu_ids: all`")


def _map_precision(t: Translator) -> None:
    asked = str(t.get("mixed_precision", "no")).lower()
    if t.has("fp16"):
        t.only("fp16", (False,), "float16 is not available: write `mixed_precision: bf16`")
    if asked in ("no", "none"):
        t.no_op("mixed_precision", "model.dtype decides")
    elif asked in ("bf16", "fp16"):
        map_dtype(t, "mixed_precision", asked)
    elif asked == "fp8":
        t.substitute("mixed_precision", {"model.dtype": "bfloat16", "kernels.linear": "fp8"},
                     "fp8 matmuls by row, another recipe than accelerate's")  # fmt: skip
    else:
        t.refuse("mixed_precision", f"got {show(t.get('mixed_precision'))}, allowed: 'no', bf16, fp16, fp8")
    t.ignore("fp8_config", "there is one recipe for fp8: `manyhands config kernels.linear`")


def _map_parallelism(t: Translator) -> None:
    """accelerate's mesh: replicas of shards."""
    prefix = "parallelism_config.parallelism_config_"
    for key in t.values:
        if key.startswith(prefix) and key in KEYS:
            name = key.removeprefix(prefix)
            if name in PARALLEL:
                why = "tensor, context and sequence parallelism are not read from this file: write 1"
                named = ", and `parallel.context_degree` in the run file" * (name == "cp_size")
                t.only(key, (1,), f"{why}{named}")
            elif not name.startswith("dp_"):
                t.no_op(key)
    replicas, shards = prefix + "dp_replicate_size", prefix + "dp_shard_size"
    num_replicas, num_shards = t.integer(replicas, 1) or 1, t.integer(shards, 1) or 1
    if num_replicas > 1 and num_shards > 1:
        t.map(replicas, "parallel.strategy", "hsdp")
        t.map(shards, {"parallel.strategy": "hsdp", "parallel.shard_degree": num_shards})
    else:
        for key, number in ((replicas, num_replicas), (shards, num_shards)):
            if number > 1:
                t.map(key, "parallel.strategy", "ddp" if key == replicas else "fsdp")
            t.no_op(key)


_FSDP_NAMES: Mapping[str, str] = {
    f"FSDP_{name.upper()}": f"fsdp_config.fsdp_{name}" for name in OPTIONS - {"xla", "cpu_offload"}
}
_DEEPSPEED_NAMES: Mapping[str, str] = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "zero_stage",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "offload_optimizer_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "offload_param_device",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "zero3_init_flag",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "zero3_save_16bit_model",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "deepspeed_config_file",
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "deepspeed_moe_layer_cls_names",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "ACCELERATE_GRADIENT_CLIPPING": "gradient_clipping",
}


def read_environment(environ: Mapping[str, str]) -> ParsedFile | None:
    """What ``accelerate launch`` was asked for, by its file's names, else None. DDP exports only its processes."""
    if "ACCELERATE_MIXED_PRECISION" not in environ:
        return None
    mapping: dict[str, Any] = {"mixed_precision": environ["ACCELERATE_MIXED_PRECISION"]}
    if environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1"):
        mapping["use_cpu"] = True
    if environ.get("ACCELERATE_DYNAMO_BACKEND"):
        mapping["dynamo_config"] = {"dynamo_backend": environ["ACCELERATE_DYNAMO_BACKEND"]}
    if environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        mapping["distributed_type"] = "FSDP"
        found = {key.partition(".")[2]: environ[name] for name, key in _FSDP_NAMES.items() if name in environ}
        if found:
            mapping["fsdp_config"] = found
    elif environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        mapping["distributed_type"] = "DEEPSPEED"
        mapping["deepspeed_config"] = {key: environ[name] for name, key in _DEEPSPEED_NAMES.items() if name in environ}
    elif environ.get("ACCELERATE_USE_MEGATRON_LM", "").lower() == "true":
        mapping["distributed_type"] = "MEGATRON_LM"
    if environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true":
        options = {name.lower(): value for name, value in environ.items() if name.startswith("PARALLELISM_CONFIG_")}
        mapping["parallelism_config"] = {k: int(v) if v.isdecimal() else v for k, v in options.items()}
    return ParsedFile(mapping, ENVIRONMENT)
