"""Keys that contradict each other. Pure: a config in, sentences out. Checks that need facts are in the plan.

A key counts as set if its value is not the default, so that a ``run.json``, which has every key, loads again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from datetime import date as Date
from math import prod
from typing import Any

from manyhands.config.keys import table
from manyhands.config.schema import MOST_PIXELS, RunConfig, Source
from manyhands.config.sources import check_formats, check_sources, list_sources
from manyhands.config.tasks import READY, TASKS, name_tasks
from manyhands.config.text import show
from manyhands.optim.registry import OPTIMIZERS, name_those

Findings = Iterator[str]

MAY_BE_BLANK = ("data.chat_template_kwargs", "submit.setup", "submit.environment")
SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")  # it becomes part of a curve's name
_OF_LORA = ("rank", "alpha", "dropout", "target_modules", "rslora", "dora", "modules_to_save", "adapter")
LORA_KEYS = (*(f"method.{name}" for name in _OF_LORA), "output.merge")

# Set from the row, from the tokenizer or by rendering: parameters of apply_chat_template, and names it passes to every
# template.
RESERVED = frozenset({
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize", "self",
    "continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "strftime_now", "raise_exception", "bos_token", "eos_token",
    "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
})  # fmt: skip


def check(config: RunConfig) -> list[str]:
    """All contradictions in a config: one sentence each, with both keys and what to do."""
    return [finding for rule in RULES for finding in rule(config)]


def _is_set(config: RunConfig, path: str) -> bool:
    return _value(config, path) != table()[path].default


def _value(config: RunConfig, path: str) -> object:
    section, _, leaf = path.rpartition(".")
    return getattr(getattr(config, section) if section else config, leaf)


def _unused(config: RunConfig, paths: tuple[str, ...], because: str, fix: str) -> Findings:
    """Keys that are set and have no effect because of the value of another key."""
    for path in paths:
        if _is_set(config, path):
            yield f"`{path}` has no effect with `{because}: {show(_value(config, because))}`: remove it, or {fix}"


def _check_blank(config: RunConfig) -> Findings:
    """Text without a character, where that names nothing."""
    for path in table():
        if path not in MAY_BE_BLANK:
            for place, text in _list_texts(_value(config, path), path):
                if not (text if path == "model.new_tokens" else text.strip()):
                    yield f"`{place}` is empty: give a value, or remove it"


def _list_texts(value: object, place: str) -> Iterator[tuple[str, str]]:
    """(place, text) of a key's value and all that it holds."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _list_texts(item, f"{place}[{index}]")
    elif isinstance(value, (Mapping, Source)):
        for name, item in value.items() if isinstance(value, Mapping) else value:
            yield from _list_texts(item, f"{place}.{name}")


def _check_batch(config: RunConfig) -> Findings:
    batch, data = config.batch, config.data
    sizes = [f"`batch.{name}`" for name in ("samples", "loss_tokens", "packs") if _is_set(config, f"batch.{name}")]
    if len(sizes) > 1:
        several = "both" if len(sizes) == 2 else "all"
        yield f"{' and '.join(sizes)} {several} set the global batch: keep one"
    if data.packing:  # true or auto
        unpacked = ("batch.micro_samples", "batch.accumulation")
        yield from _unused(config, unpacked, "data.packing", "set data.packing: false")
    else:
        yield from _unused(config, ("batch.micro_tokens",), "data.packing", "set data.packing: true")
        fix = "set data.packing: true; without packing use batch.samples or batch.packs"
        yield from _unused(config, ("batch.loss_tokens",), "data.packing", fix)
        if batch.packs is not None:
            fix = "set batch.samples instead of batch.packs, whose steps have different numbers of samples"
            yield from _unused(config, ("batch.accumulation",), "batch.packs", fix)
        yield from _check_divisibility(config)
    if batch.micro_tokens != "auto" and data.packing and batch.micro_tokens < data.max_length:
        yield (
            f"`batch.micro_tokens: {batch.micro_tokens}` is less than `data.max_length: {data.max_length}`, so the "
            f"longest samples do not fit: use at least {data.max_length}, or a smaller data.max_length"
        )


def _check_divisibility(config: RunConfig) -> Findings:
    """samples = micro_samples * accumulation * processes; only the plan knows the number of processes."""
    batch = config.batch
    given = {
        f"batch.{name}": value
        for name, value in (("micro_samples", batch.micro_samples), ("accumulation", batch.accumulation))
        if value != "auto"
    }
    if batch.samples == "auto" or not given:
        return
    unit = prod(map(int, given.values()))
    if batch.samples % unit:
        below, above = batch.samples // unit * unit, (batch.samples // unit + 1) * unit
        product = " × ".join(f"`{name}: {value}`" for name, value in given.items())
        product += f" = {unit}" if len(given) > 1 else ""
        near = f"{below} or {above}" if below else str(above)
        yield (
            f"`batch.samples: {batch.samples}` is not a multiple of {product}: the nearest batches that work are {near}"
        )


def _check_schedule(config: RunConfig) -> Findings:
    schedule = config.schedule
    if schedule.warmup_ratio is not None and schedule.warmup_steps is not None:
        yield "`schedule.warmup_ratio` and `schedule.warmup_steps` both set the warmup: remove one"
    if schedule.name != "wsd":
        yield from _unused(config, ("schedule.decay_ratio",), "schedule.name", "set schedule.name: wsd")
    elif schedule.warmup_ratio is not None and schedule.warmup_ratio + schedule.decay_ratio > 1:
        yield "`schedule.warmup_ratio` and `schedule.decay_ratio` add up to more than 1: reduce one"
    if schedule.name == "constant":
        yield from _unused(config, ("schedule.min_ratio",), "schedule.name", "choose a schedule that decays")


def _check_stop(config: RunConfig) -> Findings:
    if config.stop.loss_above is None:
        yield from _unused(config, ("stop.loss_above_steps",), "stop.loss_above", "set stop.loss_above")
    guards = config.guards
    if guards.spike == "off":
        yield from _unused(config, ("guards.spike_mads", "guards.spike_window"), "guards.spike", "set guards.spike")
    if "rollback" not in (guards.nonfinite, guards.spike):
        idle = ("guards.leave_out", "guards.max_in_a_row")[: 1 if "skip" in (guards.nonfinite, guards.spike) else 2]
        yield from _unused(config, idle, "guards.nonfinite", "set guards.nonfinite or guards.spike to rollback")


def _check_evaluation(config: RunConfig) -> Findings:
    data, evaluate = config.data, config.evaluate
    yield from _check_spacing(config, "evaluate", "evaluations")
    need_loss = [path for path in ("checkpoint.keep_best", "stop.patience") if _is_set(config, path)]
    if unfit := next((name for name in evaluate.data if not SET_NAME.fullmatch(name)), None):
        yield f"`evaluate.data` names a set {show(unfit)}: letters, digits, dots, dashes and underscores, at most 40"
    if data.validation is None and data.validation_fraction == 0 and not evaluate.data:
        keys = tuple(
            f"evaluate.{key}" for key in ("every_steps", "per_epoch", "max_tokens", "prompts", "max_new_tokens")
        )
        for path in [*need_loss, *(path for path in keys if _is_set(config, path) and _value(config, path) != 0)]:
            yield (
                f"`{path}` needs validation data, but `data.validation` is not set and `data.validation_fraction` "
                "is 0: set one of them, or `evaluate.data`"
            )
    elif evaluate.every_steps == 0 and evaluate.per_epoch is None:
        for path in need_loss:
            yield (
                f"`{path}` needs evaluations during the run, but `evaluate.every_steps` is 0: set it to auto or a "
                "number of steps"
            )
    if data.validation is not None and data.validation_fraction != 0:
        fix = "remove data.validation to hold out a fraction"
        yield from _unused(config, ("data.validation_fraction",), "data.validation", fix)
    if evaluate.prompts == 0:
        yield from _unused(config, ("evaluate.max_new_tokens",), "evaluate.prompts", "set evaluate.prompts")


def _check_spacing(config: RunConfig, section: str, what: str) -> Findings:
    if all(_is_set(config, f"{section}.{key}") for key in ("every_steps", "per_epoch")):
        yield f"`{section}.every_steps` and `{section}.per_epoch` both set the steps between {what}: remove one"


def _check_checkpoint(config: RunConfig) -> Findings:
    yield from _check_spacing(config, "checkpoint", "checkpoints")
    section = config.checkpoint
    if section.every_steps == 0 and section.every_minutes is None and not section.keep_best:
        fix = "save more than the last step"
        yield from _unused(config, ("checkpoint.keep_last", "checkpoint.asynchronous"), "checkpoint.every_steps", fix)


def _check_method(config: RunConfig) -> Findings:
    if not config.method.trains_adapters:
        yield from _unused(config, LORA_KEYS, "method.name", "set method.name: lora")
    if config.method.name != "qlora":
        yield from _unused(config, ("method.init", "method.double_quant"), "method.name", "set method.name: qlora")
    elif config.method.init == "loftq":
        if config.method.dora:
            yield "`method.init: loftq` and `method.dora` both change the initial magnitudes of the weights: remove one"
        if config.method.adapter is not None:
            yield "`method.init: loftq` would overwrite the LoRA matrices of `method.adapter`: remove one"
    if config.method.name != "patterns":
        yield from _unused(config, ("method.train", "method.freeze"), "method.name", "set method.name: patterns")


def _check_parts(config: RunConfig) -> Findings:
    """What no model and no data could make right; the rest is ``planner/parts.py``'s."""
    method, parts = config.method, config.method.parts
    for part, state in parts.items():
        allowed = ("frozen", "full", "lora", "qlora") if part == "language" else ("left_out", "frozen", "trained")
        if state not in ("auto", *allowed):
            whole = part == "language" and state == "trained"
            fix = "use full, lora or qlora" if whole else f"use auto, {', '.join(allowed[:-1])} or {allowed[-1]}"
            yield f"`method.parts.{part}` cannot be {state}: {fix}"
    language = parts.get("language", "auto")
    if language == "frozen" and method.name != "full":
        yield (
            f"`method.parts.language: frozen` trains nothing of the language model, and `method.name: {method.name}` "
            "does: remove method.name, or set method.parts.language: auto"
        )
    elif language in ("full", "lora", "qlora") and language != method.name:
        yield f"`method.parts.language: {language}` contradicts `method.name: {method.name}`: keep one"


def _check_optimizer(config: RunConfig) -> Findings:
    name, spec = config.optimizer.name, OPTIMIZERS[config.optimizer.name]
    if not config.optimizer.weight_decay:
        yield from _unused(config, ("optimizer.decay_embeddings",), "optimizer.weight_decay", "set a weight decay")
    keys = tuple(f"optimizer.{key}" for key in spec.unused_keys)
    others = name_those(lambda other: not other.unused_keys)
    yield from _unused(config, keys, "optimizer.name", f"choose {others}")
    if spec.library:
        others = name_those(lambda other: not other.library)
        if config.parallel.device == "cpu":
            yield (
                f"`optimizer.name: {name}` ({spec.library}) runs on GPUs only, and `parallel.device` is cpu: use "
                f"{others}"
            )
        if config.model.dtype == "float64":
            yield (
                f"`optimizer.name: {name}` does not support float64, and `model.dtype` is float64: use {others}, or "
                "another dtype"
            )


def _check_task(config: RunConfig) -> Findings:
    if not TASKS[config.task].takes_chats:
        chat_only = ("model.chat_template", "data.train_on", "data.chat_template_kwargs", "data.date")
        yield from _unused(config, chat_only, "task", f"set task: {name_tasks(lambda task: task.takes_chats)}")
    for section, name in {task.section: task.name for task in reversed(TASKS.values())}.items():
        if section and section != TASKS[config.task].section:
            keys = tuple(path for path in table() if path.startswith(f"{section}."))
            yield from _unused(config, keys, "task", f"set task: {name}")
    if TASKS[config.task].num_documents > 1:
        refused = {
            "data.train_on": (config.data.train_on == "all", "the prompt is the same for both answers"),
            "data.packing": (not config.data.packing, "the documents of a sample are laid into packs"),
            "batch.packs": (config.batch.packs is not None, "a sample may be longer than data.max_length"),
        }
        for path, (given, why) in refused.items():
            if given:
                yield f"`{path}: {show(_value(config, path))}` does not fit `task: {config.task}` ({why}): remove it"


def keys_beside_adapters(config: RunConfig) -> list[str]:
    """Keys that make the model before training another than the trained one with its adapters switched off."""
    method = config.method
    changes = {
        "method.name": not method.trains_adapters,
        "method.modules_to_save": bool(method.modules_to_save),
        "method.adapter": method.adapter is not None,
        "method.init": method.init == "loftq",
        "model.new_tokens": bool(config.model.new_tokens),
    }
    return [path for path, changed in changes.items() if changed]


def _check_preference(config: RunConfig) -> Findings:
    settings = config.preference
    if TASKS[config.task].section != "preference":
        return
    of_kto = ("preference.desirable_weight", "preference.undesirable_weight")
    if config.task == "kto":
        acting = ("preference.beta", "preference.reference", *of_kto)
        others = tuple(path for path in table() if path.startswith("preference.") and path not in acting)
        yield from _unused(config, others, "task", "set task: preference")
        for path in keys_beside_adapters(config):
            yield (
                f"`{path}: {show(_value(config, path))}` does not fit `task: kto`: the model before training is "
                "computed with the adapters switched off, as its KL is of other answers in each step, so nothing else "
                "may differ. Use method.name: lora or qlora alone"
            )
        if settings.reference == "stored":
            yield "`preference.reference: stored` does not fit `task: kto`, whose KL is of other answers in each step"
        if config.batch.samples == 1:
            yield "`batch.samples: 1` does not fit `task: kto`: its KL takes the answers of other samples of the step"
        return
    yield from _unused(config, of_kto, "task", "set task: kto")
    smoothed = settings.loss not in ("hinge", "ipo", "orpo")
    unused = [*["preference.label_smoothing"] * (not smoothed), *["preference.margin"] * (settings.loss != "simpo")]
    unused += ["preference.reference"] * (not settings.needs_reference)
    yield from _unused(config, tuple(unused), "preference.loss", "choose another loss")
    for path in keys_beside_adapters(config) if settings.reference == "adapters" else ():
        yield (
            f"`{path}: {show(_value(config, path))}` does not fit `preference.reference: adapters`: the model before "
            "training is computed with the adapters switched off, so nothing else may differ. Set "
            "preference.reference: stored"
        )


def _check_ready_rows(config: RunConfig) -> Findings:
    """Rows of ids or segments state their own loss tokens, and no template makes them."""
    if not TASKS[config.task].takes_chats or not {rules.format for rules in list_sources(config)} <= set(READY):
        return
    for path in ("data.train_on", "data.chat_template_kwargs", "data.date"):
        if _is_set(config, path):
            yield (
                f"`{path}` has no effect with `data.format: {READY[0]}` or `{READY[1]}`, whose rows state their own "
                "loss tokens: remove it"
            )


SPECIAL_TOKENS = ("bos", "eos", "pad", "unk")


def _check_special_tokens(config: RunConfig) -> Findings:
    for name in config.model.special_tokens:
        if name not in SPECIAL_TOKENS:
            yield f"`model.special_tokens` has {name!r}: name one of {', '.join(SPECIAL_TOKENS)}"


def _check_lengths(config: RunConfig) -> Findings:
    data = config.data
    if (data.enlarge_images_below or 0) > (data.shrink_images_above or MOST_PIXELS):
        yield "`data.enlarge_images_below` exceeds `data.shrink_images_above`: lower it"
    if data.min_length > data.max_length:
        yield (
            f"`data.min_length: {data.min_length}` is more than `data.max_length: {data.max_length}`, so that no "
            "sample is left: lower one or raise the other"
        )


def _check_template(config: RunConfig) -> Findings:
    yield from check_template_kwargs(config.data.chat_template_kwargs, config.data.date)
    if "date_string" in config.data.chat_template_kwargs and _is_set(config, "data.date"):
        yield "`data.chat_template_kwargs.date_string` and `data.date` both set today's date: remove one"


def check_template_kwargs(kwargs: Mapping[str, Any], date: str) -> Findings:
    """What ``data.chat_template_kwargs`` may not contain, and a ``data.date`` that is not a date."""
    for name, value in kwargs.items():
        if isinstance(value, str) and value.strip().casefold() in ("true", "false"):
            yield (
                f"`data.chat_template_kwargs.{name}` is the text {value!r}, which a template takes for true: write "
                f"{value.strip().casefold()} without quotes"
            )
        if name in RESERVED:
            yield f"`data.chat_template_kwargs.{name}` is set from the row or the tokenizer: remove it"
        elif not name.isidentifier():
            yield f"`data.chat_template_kwargs` has {name!r}, which is not a variable name: use letters, digits and _"
    try:
        Date.fromisoformat(date)
    except ValueError:
        yield f"`data.date: {date}` is not a date: write year-month-day, such as 2026-01-31"


def _check_parallel(config: RunConfig) -> Findings:
    parallel, least = config.parallel, config.launch.min_gpus
    if least is not None and parallel.gpus != "auto" and least > parallel.gpus:
        yield f"`launch.min_gpus: {least}` is more than `parallel.gpus: {parallel.gpus}`: use at most as many"
    if parallel.strategy == "single" and parallel.gpus != "auto" and parallel.gpus > 1:
        alone = "`parallel.strategy: single` is one process"
        yield f"{alone}, but `parallel.gpus` is {parallel.gpus}: use strategy auto, ddp or fsdp, or gpus: 1"
    if parallel.strategy.startswith("zero"):
        yield from _check_zero(config)
    elif parallel.strategy in ("single", "ddp") and parallel.offload != "all":
        keys = ("parallel.reshard_after_forward",)
        yield from _unused(config, keys, "parallel.strategy", "set parallel.strategy: fsdp")
    if parallel.strategy not in ("auto", "ddp"):
        yield from _unused(config, ("parallel.ddp_bucket_mb",), "parallel.strategy", "set parallel.strategy: ddp")
    if parallel.strategy != "hsdp":
        yield from _unused(config, ("parallel.shard_degree",), "parallel.strategy", "set parallel.strategy: hsdp")
    elif parallel.shard_degree != "auto" and parallel.gpus != "auto" and parallel.gpus % parallel.shard_degree:
        yield (
            f"`parallel.shard_degree: {parallel.shard_degree}` does not divide `parallel.gpus: {parallel.gpus}`: use "
            "a divisor"
        )
    yield from check_context(config)
    if parallel.offload == "all" and parallel.strategy == "ddp":
        yield (
            "`parallel.offload: all` offloads sharded weights, and `parallel.strategy: ddp` has none: use fsdp, hsdp "
            "or single"
        )
    if parallel.offload != "none" and not OPTIMIZERS[config.optimizer.name].streams_states:
        yield (
            f"`parallel.offload: {parallel.offload}` does not support `optimizer.name: {config.optimizer.name}`: use "
            f"{name_those(lambda spec: spec.streams_states)}, or, without parallel.offload, "
            f"{name_those(lambda spec: spec.is_paged)}"
        )


def check_context(config: RunConfig) -> Findings:
    """What ranks that divide each pack cannot do (``planner/context.py`` has what follows from model and machine)."""
    parallel, degree = config.parallel, config.parallel.context_degree
    if degree in (1, "auto"):
        return
    named = f"`parallel.context_degree: {degree}`"
    if parallel.gpus != "auto" and degree != "auto" and parallel.gpus % degree:
        yield f"{named} does not divide `parallel.gpus: {parallel.gpus}`: use a divisor"
    if parallel.strategy == "single" or parallel.strategy.startswith("zero"):
        yield f"{named} is not supported with `parallel.strategy: {parallel.strategy}`: use ddp, fsdp or hsdp"
    if not config.data.packing:
        yield f"{named} divides packs, and `data.packing` is false: remove one"
    if any(term.compute is not None for term in TASKS[config.task].make_terms(config)):
        yield (
            f"{named} is not supported with `task: {config.task}`, whose loss compares whole answers, of which a rank "
            "has a part: remove it"
        )
    if config.moe.balance > 0:
        yield (
            f"{named} is not supported with `moe.balance: {config.moe.balance:g}`, which counts the experts of whole "
            "documents, of which a rank has a part: remove one"
        )


def _check_zero(config: RunConfig) -> Findings:
    """What DeepSpeed's flat partitions cannot hold."""
    strategy, method, kernels = config.parallel.strategy, config.method, config.kernels
    yield from _unused(config, ("parallel.reshard_after_forward",), "parallel.strategy", "set parallel.strategy: fsdp")
    named = f"`parallel.strategy: {strategy}`"
    if not OPTIMIZERS[config.optimizer.name].takes_partitions:
        yield (
            f"{named} partitions weights without regard to rows, which `optimizer.name: {config.optimizer.name}` "
            f"cannot update: use {name_those(lambda spec: spec.takes_partitions)}, or parallel.strategy: fsdp"
        )
    if config.model.dtype == "float64":
        yield f"{named} keeps master weights in float32, and `model.dtype` is float64: use fsdp or ddp"
    if config.model.master_dtype != "float32":
        yield f"{named} keeps master weights in float32: remove `model.master_dtype`, or use parallel.strategy: fsdp"
    if kernels.linear == "fp8":
        yield f"`kernels.linear: fp8` is not supported with {named}: use parallel.strategy: fsdp"
    if strategy != "zero3":
        if config.parallel.offload == "all":
            yield (
                f"`parallel.offload: all` offloads sharded weights, and {named} has whole ones on every rank: use "
                "offload: optimizer, or parallel.strategy: zero3"
            )
        return
    reasons = {
        "`method.name: qlora`: zero3 gathers weights in the dtype of training, and packed 4-bit values with their "
        "scales are no such weights": method.name == "qlora",
        "`method.dora`": method.dora,
        "`model.frozen_dtype: fp8`": config.model.frozen_dtype == "fp8",
        "`model.new_tokens`": bool(config.model.new_tokens),
        "`kernels.lora: fused`": kernels.lora == "fused",
        "`kernels.loss: fused`": kernels.loss == "fused",
        "`parallel.compile: true`": config.parallel.compile is True,
        f"`parallel.activation_checkpointing: {config.parallel.activation_checkpointing}`, which would repeat "
        "DeepSpeed's gathering": config.parallel.activation_checkpointing in ("selective", "except_attention"),
    }
    for what, applies in reasons.items():
        if applies:
            yield f"`parallel.strategy: zero3` does not support {what}; use zero2, or parallel.strategy: fsdp"


def _check_kernels(config: RunConfig) -> Findings:
    if config.kernels.linear != "fp8":
        return
    reasons = {
        "qlora": "whose weights are stored in NF4: use method.name: lora",
        "patterns": "which casts trained weights at each use: use method.name: full or lora",
    }
    if config.method.name in reasons:
        yield (
            f"`kernels.linear: fp8` is not supported with `method.name: {config.method.name}`, "
            f"{reasons[config.method.name]}, or kernels.linear: compute_dtype"
        )
    if config.model.dtype in ("float32", "float64") and config.parallel.device != "cpu":
        yield (
            f"`kernels.linear: fp8` requires bfloat16, and `model.dtype` is {config.model.dtype}: use bfloat16, or "
            "kernels.linear: compute_dtype"
        )
    elif config.model.dtype == "float64":
        yield (
            "`kernels.linear: fp8` accumulates in float32, and `model.dtype` is float64: use another dtype, or "
            "kernels.linear: compute_dtype"
        )


RULES: tuple[Callable[[RunConfig], Findings], ...] = (
    _check_blank,
    _check_batch,
    _check_schedule,
    _check_stop,
    _check_evaluation,
    _check_checkpoint,
    _check_method,
    _check_parts,
    _check_optimizer,
    _check_task,
    _check_preference,
    _check_ready_rows,
    check_formats,
    check_sources,
    _check_special_tokens,
    _check_lengths,
    _check_template,
    _check_parallel,
    _check_kernels,
)
