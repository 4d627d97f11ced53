"""sft-play's YAML: a run file that may include a base file, whose keys it replaces one by one.

Training options are transformers', below ``train``; names and defaults are those of its ``train_distributed.py``.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from manyhands.config.read import ParsedFile, read_run_file
from manyhands.config.text import names, show
from manyhands.core.errors import UserError
from manyhands.importers import preferences, shared
from manyhands.importers import transformers as hf
from manyhands.importers.deepspeed import find_file, map_deepspeed
from manyhands.importers.translation import ImportContext, Translator, split_output

TOOL = "sft-play"
REFUSES_UNKNOWN = False
ALIASES: Mapping[str, str] = {
    "num_train_epochs": "train.epochs",
    "max_steps": "train.steps",
    "per_device_train_batch_size": "train.batch_size",
    "gradient_accumulation_steps": "train.grad_accum",
    # sft-play names its own; other arguments of transformers' it does not read
    **{name: f"train.{name}" for name in (
        "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "optim",
        "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_ratio", "warmup_steps", "bf16", "fp16",
        "gradient_checkpointing", "logging_steps", "save_strategy", "save_steps", "save_total_limit", "eval_steps",
        "eval_strategy", "evaluation_strategy", "load_best_model_at_end", "metric_for_best_model", "greater_is_better",
        "per_device_eval_batch_size", "dataloader_num_workers", "dataloader_pin_memory", "ddp_bucket_cap_mb",
        "ddp_find_unused_parameters", "logging_dir", "report_to", "eval_accumulation_steps", "tf32",
        "remove_unused_columns", "group_by_length", "run_name",
    )},
}  # fmt: skip
ALREADY: Mapping[str, str] = {
    "model.local_dir": "models are kept in the hub's cache; a folder is `model.name`",
    "model.type": "",
    "data.format": "the rows' columns say it",
    "data.test_path": "training does not read it",
    "data.cache_dir": "`data.cache` is shared between runs",
    "data.split.train_ratio": "training does not read it",
    "data.split.val_ratio": "training does not read it",
    "data.split.test_ratio": "training does not read it",
    "train.final_eval": "validation data are evaluated at the end",
    "pack_factor": "samples are packed into blocks as they come",
}  # fmt: skip
KEYS = frozenset(ALREADY) | frozenset(ALIASES.values()) | names(
    """
    include seed run_name mode task_mode block_size datasets model.name model.revision model.trust_remote_code
    model.max_seq_len tuning.mode tuning.backend tuning.lora.r tuning.lora.alpha tuning.lora.dropout
    tuning.lora.target_modules train.lr train.max_steps train.output_dir train.run_name train.resume_from_checkpoint
    train.deepspeed train.predict_with_generate train.generation_max_new_tokens train.generation_num_beams
    train.target_tokens_per_device_step train.autoscale_alpha train.autoscale_lr data.train_path data.val_path
    data.template_path logging.log_interval logging.backend gen eval
    """
)  # fmt: skip
MARKS = names(
    """
    include task_mode tuning.mode tuning.backend train.batch_size train.grad_accum train.bf16 model.max_seq_len
    train.gradient_checkpointing block_size
    """
)
OPEN = names("gen eval train.lr_scheduler_kwargs train.deepspeed")
TASKS: Mapping[str, str] = {"sft": "sft", "cpt": "cpt", "cpt_mixed": "mixed"}
METHODS = {"qlora": "qlora", "lora": "lora", "full": "full"}


def expand(source: ParsedFile, context: ImportContext) -> ParsedFile:
    """The file on top of what it includes (relative to its folder, one above, or the current). UserError."""
    name = source.mapping.get("include")
    if not name:
        return source
    line = f", line {source.lines['include']}" if "include" in source.lines else ""
    file = find_file(context.folder, str(name))
    if file is None:
        raise UserError(
            f"the included file {name} does not exist",
            where=f"{source.where}{line}, `include`",
            why="it is looked for in the file's folder, in those above it, and in the current one",
            fix="correct the path",
        )
    if Path(source.where).resolve() == file.resolve():
        raise UserError("the file includes itself", where=f"{source.where}{line}, `include`", fix="remove `include`")
    base = read_run_file(file)
    keep = [key for key in base.lines if key not in source.lines]
    return replace(
        source,
        mapping=_merge(base.mapping, source.mapping),
        lines={key: base.lines[key] for key in keep} | source.lines,
        files=dict.fromkeys(keep, base.where),
    )


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def translate(t: Translator) -> None:
    """Every key of an sft-play file."""
    t.aliases = {**ALIASES, "max_steps": "train.steps" if t.has("train.steps") else "train.max_steps"}
    if not t.has("train.learning_rate") and t.has("train.lr"):
        t.aliases = {**t.aliases, "learning_rate": "train.lr"}
    for key, why in ALREADY.items():
        t.no_op(key, why)
    t.no_op("include", "read")
    t.only("model.type", ("causal",), "models that are not decoders (seq2seq) are not available: write causal")
    t.map("model.name", "model.name")
    if t.get("model.revision") == "main":
        t.no_op("model.revision")
    t.map("model.revision", "model.revision")
    t.map("model.trust_remote_code", "model.trust_remote_code", t.flag("model.trust_remote_code"))
    task = _map_task(t)
    _map_data(t, task)
    _map_method(t)
    hf.map_optimizer(t)
    t.no_op("train.lr", "`train.learning_rate` takes precedence")
    for name, value in (("optimizer.learning_rate", 2e-4), ("optimizer.weight_decay", 0.01)):
        t.set_tool_default(name, value, "sft-play's default")
    hf.map_schedule(t, default="linear", warmup=("warmup_ratio", 0.06))
    hf.map_length(t, epochs=1)
    for key in {"train.steps", "train.max_steps"} - set(t.aliases.values()):
        t.no_op(key)
    _map_batch(t)
    hf.map_precision(t)
    hf.map_sharding(t)
    hf.map_bystanders(t)
    _map_intervals(t, task)
    _map_rest(t)


def _map_task(t: Translator) -> str:
    asked = str(t.get("task_mode", "sft"))
    for key in ("task_mode", "mode"):
        if str(t.get(key)).lower() in preferences.METHODS:
            t.refuse(key, preferences.NOT_HERE)
    if asked not in TASKS:
        t.refuse("task_mode", f"got {show(asked)}, allowed: {', '.join(TASKS)}")
        t.no_op("mode", "`task_mode` decides")
        return "sft"
    if t.has("task_mode"):
        t.map("task_mode", "task", TASKS[asked])
    if t.has("task_mode") or t.get("mode", "sft") == "sft":
        t.no_op("mode", "`task_mode` decides")
    else:
        t.refuse("mode", f"sft-play trains by `task_mode`, which is sft by default: write `task_mode: {t.get('mode')}`")
    return TASKS[asked]


def _map_data(t: Translator, task: str) -> None:
    length = t.integer("model.max_seq_len")
    block = t.integer("block_size")
    if task == "sft":
        t.no_op("block_size", "text is cut into blocks only in cpt and cpt_mixed")
        t.no_op("datasets", "read in cpt and cpt_mixed only")
        if length is None:
            t.set_tool_default("data.max_length", 2048, "sft-play's default")
        else:
            t.map("model.max_seq_len", "data.max_length", length)
        t.set_tool_default("data.too_long", "truncate", "sft-play cuts the end off")
        _map_paths(t)
        return
    if block is None:
        t.set_tool_default("data.max_length", 2048, "sft-play's default for blocks")
    else:
        t.map("block_size", "data.max_length", block)
    t.no_op("model.max_seq_len", "in cpt `block_size` is the length")
    t.set_tool_default("data.too_long", "split", "sft-play cuts text into blocks")
    t.set_tool_default("data.validation_fraction", 0, "sft-play does not evaluate in cpt")
    t.no_op(("data.train_path", "data.val_path", "data.template_path"), "in cpt `datasets` are read")
    _map_datasets(t, task)


def _map_paths(t: Translator) -> None:
    if t.has("data.train_path"):
        path = str(t.get("data.train_path"))
        native: dict[str, Any] = {"data.train": path}
        columns = t.context.columns(path)
        for prompt, answer in (("input", "target"), ("user", "assistant")):
            if columns and prompt in columns and answer in columns:
                native |= {"data.format": "prompt", "data.fields": {"prompt": prompt, "completion": answer}}
        t.map("data.train_path", native)
    t.map("data.val_path", "data.validation")
    key = "data.template_path"
    if t.has(key):
        file = find_file(t.context.folder, str(t.get(key)))
        text = file.read_text(encoding="utf-8") if file is not None else ""
        if "messages" in text:
            t.map(key, "model.chat_template", text)
        elif "<|im_start|>" in text:
            t.substitute(key, {"model.chat_template": "chatml"}, "the same turns, with the end of each answer trained")
        else:
            t.substitute(key, {}, "conversations are rendered by the model's own chat template")


def _map_datasets(t: Translator, task: str) -> None:
    """``datasets``: name, path, type (cpt or chat), weight (a probability of the next sample)."""
    entries = t.get("datasets")
    if not isinstance(entries, list) or not all(isinstance(one, dict) and one.get("path") for one in entries or [0]):
        t.refuse("datasets", "write a list of data sets, each with `path` and `type`")
        return
    weights = [float(one.get("weight", 1.0)) for one in entries]
    sources = []
    for index, one in enumerate(entries):
        place = f"{t.place(f'datasets[{index}]')}: "
        unknown = sorted(one.keys() - {"name", "path", "type", "weight"})
        if unknown:
            t.refuse("datasets", f"{place}sft-play has no `{unknown[0]}` there: name, path, type or weight")
        if one.get("type") not in ("cpt", "chat") or (task == "cpt" and one.get("type") != "cpt"):
            t.refuse(
                "datasets", f"{place}`type` is {show(one.get('type'))}, allowed: cpt" + (", chat" * (task != "cpt"))
            )
        source = {"path": str(one["path"]), "format": "text" if one.get("type") == "cpt" else "auto"}
        sources.append(source | ({"name": str(one["name"])} if one.get("name") else {}))
    if task == "cpt":  # sft-play reads the first one
        t.map("datasets", "data.train", sources[:1], "the first one" if len(sources) > 1 else "")
    elif len(set(weights)) == 1:
        t.map("datasets", "data.train", sources)
    else:
        for source, weight in zip(sources, weights, strict=True):
            source["weight"] = round(weight / max(weights), 6)  # type: ignore[assignment]
        why = "weights are passes over a source per epoch, in proportion to sft-play's probabilities: the same mixture "
        t.substitute("datasets", {"data.train": sources}, why + "if the sources have one size")


def _map_method(t: Translator) -> None:
    mode = str(t.get("tuning.mode", "qlora"))
    if mode not in METHODS:
        t.refuse("tuning.mode", f"got {show(mode)}, allowed: {', '.join(METHODS)}")
    elif t.has("tuning.mode"):
        t.map("tuning.mode", "method.name", mode)
    else:
        t.set_tool_default("method.name", "qlora", "sft-play's base file")
    backend = t.get("tuning.backend", "bnb")
    t.only("tuning.backend", ("bnb", "unsloth"), "allowed: bnb, unsloth")
    if backend == "unsloth":
        t.no_op("tuning.backend", "the same 4-bit weights; fused kernels are chosen by themselves")
    lora = "tuning.lora."
    if mode == "full":
        for key in ("r", "alpha", "dropout", "target_modules"):
            t.no_op(lora + key, "without LoRA it is not read")
        return
    for key, native, default in (("r", "rank", 32), ("alpha", "alpha", 64), ("dropout", "dropout", 0.1)):
        number = t.number(lora + key)
        if number is None:
            t.set_tool_default(f"method.{native}", default, "sft-play's default")
        else:
            t.map(lora + key, f"method.{native}", number)
    if t.get(lora + "target_modules") in (None, "auto"):
        t.no_op(lora + "target_modules", "all linear layers")
    else:
        t.map(lora + "target_modules", "method.target_modules")


def _map_batch(t: Translator) -> None:
    """Per GPU; ``auto`` is the plan's. One number alone fixes the micro-batches, which packing would not have."""
    micro, steps = t.get("per_device_train_batch_size", 1), t.get("gradient_accumulation_steps", 8)
    if micro != "auto" and steps != "auto":
        hf.map_batch(t, per_device=1, accumulation=8)
        return
    for key, value, native in (
        ("per_device_train_batch_size", micro, "batch.micro_samples"),
        ("gradient_accumulation_steps", steps, "batch.accumulation"),
    ):
        if value == "auto":
            t.no_op(key, "the plan chooses the global batch and divides it")
        elif t.has(key):
            t.map(key, {"data.packing": False, native: t.integer(key)})
    t.no_op("per_device_eval_batch_size")


def _map_intervals(t: Translator, task: str) -> None:
    if task != "sft":
        for name in ("evaluation_strategy", "eval_strategy", "eval_steps", "load_best_model_at_end"):
            t.no_op(name, "sft-play does not evaluate in cpt")
        t.aliases = {**t.aliases, "eval_strategy": "-", "evaluation_strategy": "-", "load_best_model_at_end": "-"}
    hf.map_intervals(t, save_steps=200, logging_steps=10, save_strategy="epoch", limit=5)
    for name in ("eval_steps", "save_steps"):
        t.no_op(name)


def _map_rest(t: Translator) -> None:
    if t.has("logging.log_interval") and not t.has("logging_steps"):
        t.map("logging.log_interval", "log.every_steps", t.integer("logging.log_interval"))
    t.no_op("logging.log_interval", "`train.logging_steps` decides")
    t.ignore("run_name", "the run is named after `train.output_dir`")
    backend = t.get("logging.backend")
    shared.map_trackers(t, {"logging.backend": [] if backend in (None, "none") else [str(backend)]}, {})
    t.map("train.output_dir", split_output(t.get("train.output_dir")))
    t.only("train.resume_from_checkpoint", ("auto", True, False, "latest"), "a run resumes from its own checkpoint")
    map_deepspeed(t, "train.deepspeed")
    t.map("train.generation_max_new_tokens", "evaluate.max_new_tokens", t.integer("train.generation_max_new_tokens"))
    t.only("train.generation_num_beams", (1,), "answers are greedy: write 1")
    t.no_op("train.predict_with_generate", "answers are logged at each evaluation")
    for key in ("train.target_tokens_per_device_step", "train.autoscale_alpha", "train.autoscale_lr"):
        t.ignore(key, "the plan chooses batches; the learning rate stays as it is written")
    for key in ("gen", "eval"):
        t.ignore(key, "options of sft-play's inference: see `manyhands generate`")
