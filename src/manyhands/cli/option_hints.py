"""Command lines that cannot be read: unknown options, as users of other tools type them, commands, arguments and
values; and what to write here, by the hints that keys of a run file get (``importers/hints.py``).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
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
# Of commands on a trained model. What their first argument is to other tools:
_FIRST = (
    "model", "m", "model_name", "model_name_or_path", "model_path", "pretrained", "checkpoint", "checkpoint_path",
    "ckpt", "ckpt_path", "path", "adapter", "adapter_name_or_path", "adapter_path", "lora_path", "lora_model_dir",
    "peft", "run", "run_dir", "output_dir", "logdir", "log_dir", "folder", "file", "config",
)  # fmt: skip
# Other names of options; where a command has none of them, the next rule answers.
_SAME = {
    **dict.fromkeys(("max_tokens", "max_length", "max_new_token", "n_predict", "length"), "--max-new-tokens"),
    **dict.fromkeys(("dataset", "data_path", "eval_file", "eval_dataset", "test_file", "data_files"), "--data"),
    **dict.fromkeys(("input_file", "prompts", "prompts_file"), "--input"),
    **dict.fromkeys(("output_file", "outfile", "out", "save_dir", "save_path", "o", "output_path"), "--output"),
    **dict.fromkeys(("repo", "repo_id", "hub_model_id", "hub", "hub_name"), "--to"),
    **dict.fromkeys(("base_model", "base_model_name_or_path"), "--base"),
    **dict.fromkeys(("quantize", "quantization", "quantization_bit", "outtype"), "--gguf"),
    **dict.fromkeys(("stop_words", "stop_sequences", "stop_token"), "--stop"),
    **dict.fromkeys(("system_prompt", "system_message", "default_system"), "--system"),
    **dict.fromkeys(("images", "image_path"), "--image"),
    **dict.fromkeys(("num_gpus", "n_gpus", "ngpus", "tensor_parallel_size", "tp"), "--gpus"),
    **dict.fromkeys(("max_samples", "max_examples", "num_samples"), "--limit"),
    **dict.fromkeys(("few_shot", "fewshot", "num_few_shot"), "--num-fewshot"),
    **dict.fromkeys(("served_model_name", "model_id"), "--name"),
    **dict.fromkeys(("text", "question", "message", "query", "p"), "--prompt"),
    **dict.fromkeys(("temp", "t"), "--temperature"),
    **dict.fromkeys(("backend", "infer_backend"), "--engine"),
    **dict.fromkeys(("force", "f", "overwrite_output"), "--overwrite"),
}
_OF_COMMAND = {
    ("serve", "host"): "leave it out: it listens on this machine only; for others, put a proxy with a login before it",
    (
        "serve",
        "api_key",
    ): "leave it out: it listens on this machine only; for others, put a proxy with a login before it",
    ("push", "token"): "set HF_TOKEN in the environment",
    ("push", "private"): "leave it out: a repository is private unless --public is given",
    ("tensorboard", "host"): "leave it out: it listens on this machine only (ssh -L forwards its port)",
    ("tensorboard", "bind_all"): "leave it out: it listens on this machine only (ssh -L forwards its port)",
}
# An argument too many: how it is given.
_EXTRA = {
    "generate": "--prompt {word}",
    "eval": "--data {word}",
    "export": "--output {word}",
    "import": "--output {word}",
    "push": "--to {word}",
    "doctor": "--run {word}",
    "init": "--data {word} or --model {word}",
}
_OTHER_COMMANDS = {
    **dict.fromkeys(
        ("finetune", "fine-tune", "sft", "cpt", "fit", "run", "start", "launch", "resume"), "train RUN.yaml"
    ),
    **dict.fromkeys(("dry-run", "estimate", "explain"), "plan RUN.yaml"),
    **dict.fromkeys(("preprocess", "tokenize", "preview", "dataset"), "data RUN.yaml"),
    **dict.fromkeys(("infer", "inference", "predict", "ask"), 'generate RUN --prompt "..."'),
    **dict.fromkeys(("evaluate", "test", "score"), "eval RUN"),
    **dict.fromkeys(("merge", "merge-lora", "merge_lora"), "export RUN --merge"),
    **dict.fromkeys(("quantize", "gguf"), "export RUN --gguf q8_0"),
    **dict.fromkeys(("upload", "publish"), "push RUN --to OWNER/NAME"),
    **dict.fromkeys(("api", "server", "vllm-serve"), "serve RUN"),
    **dict.fromkeys(("webchat", "cli"), "chat RUN"),
    **dict.fromkeys(("convert", "translate", "migrate"), "import FILE"),
    **dict.fromkeys(("ls", "list", "status", "ps"), "runs list"),
    **dict.fromkeys(("show", "report"), "runs show RUN"),
    **dict.fromkeys(("compare", "diff"), "runs compare RUN RUN"),
    **dict.fromkeys(("delete", "rm", "remove"), "runs delete RUN"),
    **dict.fromkeys(("new", "create", "wizard"), "init"),
    **dict.fromkeys(("env", "check", "info"), "doctor"),
    **dict.fromkeys(("keys", "schema", "options"), "config"),
    **dict.fromkeys(("tb", "logs", "webui", "studio"), "tensorboard"),
    "version": "--version",
    "help": "-h",
}


def explain_usage(error: Any, words: Sequence[str], ctx: Any = None) -> UserError | None:
    """What typer refuses on a command line, in our words; None for any other error, and where help is to be shown.

    ``words`` follow the command's name; ``ctx`` is the context that invoked it. Kinds are told by their names, as some
    versions of typer bring click's classes and others import them.
    """
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "UsageError" not in kinds or "NoArgsIsHelpError" in kinds:
        return None
    at: Any = getattr(error, "ctx", None)
    path = at.command_path.split()[1:] if at else [getattr(ctx, "invoked_subcommand", None) or ""]
    command = " ".join(path).strip()
    place = f"manyhands {command}".strip()
    help_of = f"`{place} -h`"
    message = str(error.message).removeprefix("Value error, ").rstrip(".")
    message = message[:1].lower() + message[1:]
    if "NoSuchOption" in kinds:
        known = [name for parameter in at.command.params for name in parameter.opts] if at else []
        return explain_option(command, error.option_name, words, known, _commands_by_option(at))
    if "MissingParameter" in kinds:
        needed = " ".join(_usage(parameter) for parameter in at.command.params if parameter.required)
        about = f"; {_name(error.param)}: {_about(error.param)}"
        return UserError(f"{_name(error.param)} is missing", where=place, fix=f"write {place} {needed}{about}")
    if "BadParameter" in kinds and error.param is not None:
        fix = f"write {_usage(error.param)}: {_about(error.param)}"
        return UserError(f"{_name(error.param)}: {message}", where=place, fix=fix)
    if named := re.match(r"no such command '(.*?)'", message):
        return UserError(f"there is no command {named[1]}", where=place, fix=_other_command(named[1], at))
    if extra := re.fullmatch(r"got unexpected extra arguments?(?:\(s\))? \((.*)\)", message, re.DOTALL):
        return UserError(
            f"{place} takes no argument {extra[1]}", where=place, fix=_place_extra(command, extra[1], help_of)
        )
    option = getattr(error, "option_name", None)
    if option is not None and "requires" in message:
        return UserError(f"{option} needs a value", where=place, fix=f"write {option} VALUE; {help_of} explains it")
    return UserError(message, where=place, fix=f"{help_of} shows what it takes")


def _name(parameter: Any) -> str:
    """As a user writes it: an option's longest form, an argument's metavar."""
    is_option = str(parameter.opts[0]).startswith("-")
    return str(max(parameter.opts, key=len) if is_option else parameter.metavar or parameter.name.upper())


def _usage(parameter: Any) -> str:
    """``--to OWNER/NAME``."""
    name = _name(parameter)
    return f"{name} {parameter.metavar or 'VALUE'}" if name.startswith("-") else name


def _about(parameter: Any) -> str:
    return str(parameter.help or f"see `-h` for {_name(parameter)}").removesuffix(".")


def _commands_by_option(ctx: Any) -> dict[str, str]:
    """``merge`` to ``export --merge``: every option of our commands, and the first that has it."""
    found: dict[str, str] = {}
    root = ctx.find_root().command if ctx is not None else None
    for name, command in getattr(root, "commands", {}).items():
        for parameter in command.params:
            for option in (opt for opt in parameter.opts if opt.startswith("--")):
                found.setdefault(option.lstrip("-").replace("-", "_"), f"manyhands {name} {option}")
    return found


def _other_command(word: str, ctx: Any) -> str:
    from manyhands.config.text import nearest_name

    if ctx is not None and ctx.parent is not None:  # runs
        if (Path(word) / "run.json").is_file() or (Path("runs") / word / "run.json").is_file():
            return f"manyhands runs show {word}"
        if Path(word).is_dir():
            return f"manyhands runs list {word}"
    elif Path(word).is_dir():
        return (
            f"name a command: `manyhands runs show {word}` for a run, `manyhands runs list {word}` for a folder of runs"
        )
    elif Path(word).suffix in (".yaml", ".yml", ".toml", ".json") or "=" in word:
        return f"manyhands train {word if '=' not in word else f'RUN.yaml {word}'}"
    elif other := _OTHER_COMMANDS.get(word.lower()):
        return f"manyhands {other}"
    known = getattr(ctx.command, "commands", {}) if ctx is not None else {}
    if near := nearest_name(word, known):
        return f"did you mean {near}?"
    return f"choose one of {', '.join(known)}"


def _place_extra(command: str, extra: str, help_of: str) -> str:
    from manyhands.config.keys import table

    if extra.partition("=")[0] in table():
        return f"keys are set where a run starts: manyhands train RUN.yaml {extra}"
    if command in _EXTRA:
        return f"write {_EXTRA[command].format(word=shlex.quote(extra))}, or leave it out"
    return f"leave it out, or quote a name that contains spaces; {help_of} shows what it takes"


def explain_option(
    command: str,
    option: str,
    words: Sequence[str],
    known: Sequence[str],
    others: Mapping[str, str] = MappingProxyType({}),
) -> UserError:
    """``option`` of ``words``, which ``command`` does not have among those ``known``, with what to write here;
    ``others``: the commands that have it, by its name.
    """
    word = next((word for word in words if word.partition("=")[0] == option), None)
    word = word or next((word for word in words if option != "-" and word.startswith(option)), option)
    name, _, value = word.partition("=")
    following = words[words.index(word) + 1] if word in words and word != words[-1] else ""
    if not value and not following.startswith("-"):
        value = following
    on_file = command in HAVE_KEYS
    answer = _write if on_file else _write_without_keys
    return UserError(
        f"there is no option {name}",
        where=f"manyhands {command}".strip(),
        why="keys of the run file are set as section.key=value, without dashes" if on_file else "",
        fix=answer(command, name.lstrip("-").replace("-", "_").lower(), value, known, others),
    )


def _write(command: str, name: str, value: str, known: Sequence[str], others: Mapping[str, str]) -> str:
    from manyhands.config.keys import table
    from manyhands.config.text import nearest_name
    from manyhands.importers.hints import hint, nearest

    options = _by_name(known)
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
    if told.startswith((";", ": did you mean")):
        if name in others:
            return f"it is an option of another command: {others[name]}"
        if near := nearest_name(name, options):
            return f"did you mean {options[near]}?"
    options_too = f", `manyhands {command} -h` all options" if told.startswith(";") else ""
    return told.removeprefix(": ").removeprefix("; ") + options_too


def _write_without_keys(command: str, name: str, value: str, known: Sequence[str], others: Mapping[str, str]) -> str:
    """For a command that starts no run: its own options, those of other commands, keys of a run file."""
    from manyhands.config.keys import table
    from manyhands.config.text import nearest_name
    from manyhands.importers.hints import nearest

    if not command:
        where = others.get(name)
        return f"it is an option of a command: {where}" if where else "name a command first: `manyhands -h` lists them"
    options = _by_name(known)
    if name in options:
        return f"write {options[name]}"
    if told := _OF_COMMAND.get((command, name)):
        return told
    if (same := _SAME.get(name)) in known:
        return f"write {same} {value}".rstrip()
    if name in _FIRST and command in ("generate", "chat", "serve", "eval", "export", "push", "import", "tensorboard"):
        return f"it comes first, without an option: manyhands {command} {value or 'RUN'}"
    if name in others:
        return f"it is an option of another command: {others[name]}"
    if near := nearest_name(name, options):
        return f"did you mean {options[near]}?"
    if (key := nearest(STAND_FOR.get(name, name))) in table():
        return f"{key} is a key of the run file, for training: manyhands train RUN.yaml {key}={value or '...'}"
    return f"`manyhands {command} -h` lists its options"


def _by_name(options: Sequence[str]) -> dict[str, str]:
    return {option.lstrip("-").replace("-", "_"): option for option in options if option.startswith("--")}


def _parse(value: str) -> Any:
    from manyhands.config.read import parse_yaml_value

    try:
        return parse_yaml_value(value) if value else True
    except ValueError:
        return value
