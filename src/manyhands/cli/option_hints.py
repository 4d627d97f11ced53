"""Options that a command does not have, as users of other tools type them: what to write here, by the hints that keys
of a run file get (``config/keys.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from manyhands.core.errors import UserError

HAVE_KEYS = ("train", "plan", "data", "submit", "prove", "init")  # commands on a run file
# Words that are no key of a run file: the key or the other tool's key that they stand for.
_STAND_FOR = {
    "model": "model.name",
    "m": "model.name",
    "d": "data.train",
    "data": "data.train",
    "data_dir": "data.train",
    "output": "output.dir",
    "o": "output.dir",
    "out": "output.dir",
    "batch": "batch.samples",
    "optimizer": "optimizer.name",
    "schedule": "schedule.name",
    "method": "method.name",
    "precision": "model.dtype",
    "mixed_precision": "model.dtype",
    "resume": "resume_from_checkpoint",
    "continue": "resume_from_checkpoint",
    "overwrite": "overwrite_output_dir",
    "force": "overwrite_output_dir",
    "tp": "tensor_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "n": "num_processes",
    "e": "stop.epochs",
    "b": "batch.samples",
    "c": "config",
    "f": "config",
    "random_state": "seed",
    "use_gradient_checkpointing": "parallel.activation_checkpointing",
    "fsdp_activation_checkpointing": "parallel.activation_checkpointing",
    "fsdp_reshard_after_forward": "parallel.reshard_after_forward",
    "save_path": "output.dir",
}
# Options that say how processes start (torchrun, accelerate, DeepSpeed, Axolotl), or what follows training (Unsloth).
_LOGS = "leave it out: what every rank prints is in the run's logs/"
_SHARDING = "write parallel.strategy=fsdp, without dashes; accelerate's own file goes to --accelerate-config FILE"
_ZERO = "write parallel.strategy=zero2 or zero3, without dashes, or give DeepSpeed's file: --deepspeed FILE"
_EXPORT = "once it is trained: manyhands export RUN --merge, or --gguf q8_0"
_PUSH = "once it is trained: manyhands push RUN --to OWNER/NAME, with the token in HF_TOKEN"
_COMPILE = "write parallel.compile=true or false, without dashes"
_NO_EFFECT = "leave it out: it has no effect here"
_BY_ITSELF = "leave it out: `manyhands train` starts one process per GPU by itself"
_PLACE = "on several machines start the run on each, with --nodes N --node-rank R --rendezvous HOST:PORT"
_LAUNCH = {
    **dict.fromkeys(("nnodes", "num_machines", "num_nodes", "machine_rank"), _PLACE),
    **dict.fromkeys(("master_addr", "master_port", "main_process_ip", "main_process_port", "rdzv_endpoint"), _PLACE),
    **dict.fromkeys(("rdzv_backend", "rdzv_id", "rdzv_conf", "hostfile", "same_network"), _PLACE),
    **dict.fromkeys(("standalone", "multi_gpu", "module", "no_python", "run_path", "start_method"), _BY_ITSELF),
    "local_ranks_filter": _BY_ITSELF,
    "max_restarts": "write launch.restarts=N, without dashes",
    "config_file": "write --config RUN.yaml, or --accelerate-config FILE for accelerate's own file",
    "config": "the run file comes first: manyhands {command} RUN.yaml",
    "config_path": "the run file comes first: manyhands {command} RUN.yaml",
    **dict.fromkeys(("use_deepspeed", "deepspeed_config_file", "zero3_init_flag", "zero3_save_16bit_model"), _ZERO),
    **dict.fromkeys(("offload_optimizer_device", "offload_param_device"), "write parallel.offload=..., without dashes"),
    "deepspeed_hostfile": _PLACE,
    **dict.fromkeys(("dynamo_backend", "dynamo_mode", "dynamo_use_fullgraph", "dynamo_use_dynamic"), _COMPILE),
    "use_megatron_lm": "leave it out: parallel.strategy is auto, single, ddp, fsdp, hsdp or zero1 to zero3",
    **dict.fromkeys(("tpu", "ipex", "use_cpu_ipex", "use_xpu"), "leave it out: runs train on GPUs, or on the CPU"),
    **dict.fromkeys(("num_cpu_threads_per_process", "enable_cpu_affinity", "role", "monitor_interval"), _BY_ITSELF),
    **dict.fromkeys(("launcher", "local_addr", "ddp_bucket_cap_mb"), _BY_ITSELF),
    **dict.fromkeys(("log_dir", "redirects", "tee", "logs_specs"), _LOGS),
    **dict.fromkeys(("save_model", "save_method", "save_gguf", "quantization", "quantization_method"), _EXPORT),
    **dict.fromkeys(("push_model", "push_gguf", "hub_path", "hub_token", "token"), _PUSH),
    "full_finetuning": "write method.name=full, without dashes",
    "loftq_config": "write method.name=qlora method.init=loftq, without dashes",
    "fast_inference": "once it is trained: manyhands serve RUN --engine vllm",
    **dict.fromkeys(("bias", "downcast_bf16", "prepared", "gradient_checkpointing_use_reentrant"), _NO_EFFECT),
    "cloud": "manyhands submit RUN.yaml --to slurm, kubernetes or skypilot",
    "sweep": "start one run for each value, with a name=... of its own",
    **dict.fromkeys(
        ("gpu_ids", "gpu", "devices_ids", "include"),
        "--gpus N takes N GPUs; which ones, CUDA_VISIBLE_DEVICES says",
    ),
    "cpu": "write parallel.device=cpu, without dashes",
    "device": "write parallel.device=cuda or cpu, without dashes",
    "verbose": "leave it out: everything is in the run's logs/",
    "quiet": "leave it out: everything is in the run's logs/",
    "cfg": "the run file comes first: manyhands {command} RUN.yaml",
}  # fmt: skip
LAUNCH = MappingProxyType(_LAUNCH)
STAND_FOR = MappingProxyType(_STAND_FOR)


def explain_option(command: str, option: str, words: Sequence[str], known: Sequence[str]) -> UserError:
    """``option`` of ``words``, which ``command`` does not have among those ``known``, with what to write here."""
    word = next((word for word in words if word.partition("=")[0] == option), None)
    word = word or next((word for word in words if option != "-" and word.startswith(option)), option)
    name, _, value = word.partition("=")
    following = words[words.index(word) + 1] if word in words and word != words[-1] else ""
    if not value and not following.startswith("-"):
        value = following
    return UserError(
        f"there is no option {name}",
        where=f"manyhands {command}",
        why="keys of the run file are set as section.key=value, without dashes",
        fix=_write(command, name.lstrip("-").replace("-", "_").lower(), value, known),
    )


def _write(command: str, name: str, value: str, known: Sequence[str]) -> str:
    from manyhands.config.keys import hint, nearest, nearest_name, table

    options = {option.lstrip("-").replace("-", "_"): option for option in known if option.startswith("--")}
    if name in options:  # --node_rank
        return f"write {options[name]}"
    if name.startswith(("fsdp_", "use_fsdp")) and name not in STAND_FOR:
        return _SHARDING
    if name in LAUNCH:
        return LAUNCH[name].format(command=command)
    path = STAND_FOR.get(name, name)
    key = path if path in table() else nearest(path)
    if key in table() and key.rpartition(".")[2] == path.rpartition(".")[2]:
        return f"write {key}={value or '...'}: {table()[key].sentence}"
    told = hint(path, _parse(value))
    if told.startswith((";", ": did you mean")) and (near := nearest_name(name, options)):
        return f"did you mean {options[near]}?"
    options_too = f", `manyhands {command} -h` all options" if told.startswith(";") else ""
    return told.removeprefix(": ").removeprefix("; ") + options_too


def _parse(value: str) -> Any:
    from manyhands.config.read import parse_yaml_value

    try:
        return parse_yaml_value(value) if value else True
    except ValueError:
        return value
