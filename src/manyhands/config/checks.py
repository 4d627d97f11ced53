"""Keys that contradict each other. Pure: a config in, sentences out; what needs the model, the data or the GPUs is the
plan's.

A key counts as asked for when its value is not the default: a ``run.json``, which spells out every key, loads again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import date as Date
from typing import Any

from manyhands.config.keys import show, table
from manyhands.config.schema import RunConfig
from manyhands.config.sources import check_formats, check_sources

Findings = Iterator[str]

LORA_KEYS = (
    *(
        f"method.{name}"
        for name in ("rank", "alpha", "dropout", "target_modules", "rslora", "dora", "modules_to_save", "adapter")
    ),
    "output.merge",
)

# What the row, the tokenizer or rendering itself decides: parameters of apply_chat_template, and names it gives every
# template.
RESERVED = frozenset({
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
    "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "self",
    "strftime_now", "raise_exception", "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
})  # fmt: skip


def check(config: RunConfig) -> list[str]:
    """All contradictions of a config: one sentence each, naming both keys and what to do."""
    return [finding for rule in RULES for finding in rule(config)]


def _asked(config: RunConfig, path: str) -> bool:
    return _value(config, path) != table()[path].default


def _value(config: RunConfig, path: str) -> object:
    section, _, leaf = path.rpartition(".")
    return getattr(getattr(config, section) if section else config, leaf)


def _idle(config: RunConfig, paths: tuple[str, ...], because: str, fix: str) -> Findings:
    """Keys that were asked for but would do nothing."""
    for path in paths:
        if _asked(config, path):
            yield f"`{path}` does nothing with `{because}: {show(_value(config, because))}`: remove it, or {fix}"


def _check_batch(config: RunConfig) -> Findings:
    batch, data = config.batch, config.data
    if batch.samples != "auto" and batch.loss_tokens is not None:
        yield "`batch.samples` and `batch.loss_tokens` both set the global batch: keep one"
    if data.packing:  # true or auto: what is said for rows laid side by side
        yield from _idle(
            config, ("batch.micro_samples", "batch.accumulation"), "data.packing", "set data.packing: false"
        )
    else:
        yield from _idle(config, ("batch.micro_tokens",), "data.packing", "set data.packing: true")
        yield from _idle(
            config,
            ("batch.loss_tokens",),
            "data.packing",
            "set data.packing: true; without packing give batch.samples",
        )
        yield from _check_rows_divide(config)
    if batch.micro_tokens != "auto" and data.packing and batch.micro_tokens < data.max_length:
        yield (
            f"`batch.micro_tokens: {batch.micro_tokens}` is less than `data.max_length: {data.max_length}`, so that "
            f"the longest row does not fit: give at least {data.max_length}, or a smaller data.max_length"
        )


def _check_rows_divide(config: RunConfig) -> Findings:
    """rows = micro_samples * accumulation * processes; the number of processes is known to the plan only."""
    batch = config.batch
    given = {
        f"batch.{name}": value
        for name, value in (("micro_samples", batch.micro_samples), ("accumulation", batch.accumulation))
        if value != "auto"
    }
    if batch.samples == "auto" or not given:
        return
    unit = 1
    for value in given.values():
        unit *= int(value)
    if batch.samples % unit:
        below, above = batch.samples // unit * unit, (batch.samples // unit + 1) * unit
        names = " × ".join(f"`{name}: {value}`" for name, value in given.items()) + (
            f" = {unit}" if len(given) > 1 else ""
        )
        near = f"{below} or {above}" if below else str(above)
        yield (
            f"`batch.samples: {batch.samples}` is not a multiple of {names}: the nearest batches that work are {near}"
        )


def _check_schedule(config: RunConfig) -> Findings:
    schedule = config.schedule
    if schedule.warmup_ratio is not None and schedule.warmup_steps is not None:
        yield "`schedule.warmup_ratio` and `schedule.warmup_steps` both set the warm-up: keep one"
    if schedule.name != "wsd":
        yield from _idle(config, ("schedule.decay_ratio",), "schedule.name", "set schedule.name: wsd")
    elif schedule.warmup_ratio is not None and schedule.warmup_ratio + schedule.decay_ratio > 1:
        yield (
            "`schedule.warmup_ratio` and `schedule.decay_ratio` are more than the whole run together: make one smaller"
        )
    if schedule.name == "constant":
        yield from _idle(config, ("schedule.min_ratio",), "schedule.name", "choose a schedule that falls")
    if (
        schedule.warmup_steps is not None
        and config.stop.max_steps is not None
        and schedule.warmup_steps > config.stop.max_steps
    ):
        yield (
            "`schedule.warmup_steps` is more than `stop.max_steps`, so that the peak is never reached: make it smaller"
        )


def _check_evaluation(config: RunConfig) -> Findings:
    data, evaluate = config.data, config.evaluate
    wanted = [path for path in ("checkpoint.keep_best", "stop.patience") if _asked(config, path)]
    if data.validation is None and data.validation_fraction == 0:
        measures = ("evaluate.every_steps", "evaluate.max_tokens", "evaluate.prompts", "evaluate.max_new_tokens")
        asking = [*wanted, *(path for path in measures if _asked(config, path) and _value(config, path) != 0)]
        for path in asking:
            yield (
                f"`{path}` needs validation rows, but there is no `data.validation` file and "
                "`data.validation_fraction` is 0: give a file, or hold out a fraction"
            )
    elif evaluate.every_steps == 0:
        for path in wanted:
            yield (
                f"`{path}` needs evaluations during the run, but `evaluate.every_steps` is 0: set it to auto or a "
                "number of steps"
            )
    if data.validation is not None and data.validation_fraction != 0:
        yield from _idle(
            config,
            ("data.validation_fraction",),
            "data.validation",
            "remove the validation file to hold out a fraction",
        )
    if evaluate.prompts == 0:
        yield from _idle(config, ("evaluate.max_new_tokens",), "evaluate.prompts", "ask for samples")


def _check_checkpoint(config: RunConfig) -> Findings:
    if config.checkpoint.every_steps == 0 and not config.checkpoint.keep_best:
        yield from _idle(config, ("checkpoint.keep_last",), "checkpoint.every_steps", "save more than the last step")


def _check_method(config: RunConfig) -> Findings:
    if not config.method.trains_adapters:
        yield from _idle(config, LORA_KEYS, "method.name", "set method.name: lora")
    if config.method.name != "qlora":
        yield from _idle(config, ("method.init",), "method.name", "set method.name: qlora")
    elif config.method.init == "loftq":
        yield from _check_loftq(config)
    if config.method.name != "patterns":
        yield from _idle(config, ("method.train", "method.freeze"), "method.name", "set method.name: patterns")


def _check_loftq(config: RunConfig) -> Findings:
    if config.method.dora:
        yield "`method.init: loftq` and `method.dora` both say how long the weights' rows are at first: keep one"
    if config.method.adapter is not None:
        yield (
            "`method.init: loftq` would replace the factors of `method.adapter`, from which the run goes on: keep one"
        )


def _check_optimizer(config: RunConfig) -> Findings:
    name = config.optimizer.name
    if name == "adafactor":
        moments = ("optimizer.beta1", "optimizer.beta2", "optimizer.eps")
        yield from _idle(config, moments, "optimizer.name", "choose an optimizer that has such moments: adamw")
    if name not in ("adamw", "adafactor", "muon"):
        if config.parallel.device == "cpu":
            yield (
                f"`optimizer.name: {name}` is of bitsandbytes, which has it on GPUs only, and `parallel.device` is "
                "cpu: use adamw"
            )
        if config.model.dtype == "float64":
            yield (
                f"`optimizer.name: {name}` has no 64-bit weights, and `model.dtype` is float64: use adamw or another "
                "dtype"
            )


def _check_task(config: RunConfig) -> Findings:
    if config.task == "sft" and config.data.too_long == "split":
        yield (
            "`data.too_long: split` cuts text, but `task: sft` trains conversations: use error or truncate, or task: "
            "cpt or mixed"
        )
    if config.task == "cpt":
        chat_only = ("model.chat_template", "data.train_on", "data.chat_template_kwargs", "data.date")
        yield from _idle(config, chat_only, "task", "set task: sft or mixed")


def _check_template(config: RunConfig) -> Findings:
    yield from check_template_kwargs(config.data.chat_template_kwargs, config.data.date)
    if "date_string" in config.data.chat_template_kwargs and _asked(config, "data.date"):
        yield "`data.chat_template_kwargs.date_string` and `data.date` both say today's date: keep one"


def check_template_kwargs(kwargs: Mapping[str, Any], date: str) -> Findings:
    """What ``data.chat_template_kwargs`` may not hold, and a ``data.date`` that is not a date."""
    for name in kwargs:
        if name in RESERVED:
            yield f"`data.chat_template_kwargs.{name}` is decided by the row and the tokenizer: remove it"
        elif not name.isidentifier():
            yield f"`data.chat_template_kwargs` has {name!r}, which no template can name: use letters, digits and _"
    try:
        Date.fromisoformat(date)
    except ValueError:
        yield f"`data.date: {date}` is no day of the calendar: give one as year-month-day, such as 2026-01-31"


def _check_parallel(config: RunConfig) -> Findings:
    parallel = config.parallel
    if parallel.strategy == "single" and parallel.gpus != "auto" and parallel.gpus > 1:
        yield (
            f"`parallel.strategy: single` is one process, but `parallel.gpus` is {parallel.gpus}: use strategy auto, "
            "ddp or fsdp, or gpus: 1"
        )
    if parallel.strategy in ("single", "ddp") and parallel.offload != "all":
        yield from _idle(
            config, ("parallel.reshard_after_forward",), "parallel.strategy", "set parallel.strategy: fsdp"
        )
    if parallel.strategy != "hsdp":
        yield from _idle(config, ("parallel.shard_degree",), "parallel.strategy", "set parallel.strategy: hsdp")
    elif parallel.shard_degree != "auto" and parallel.gpus != "auto" and parallel.gpus % parallel.shard_degree:
        yield (
            f"`parallel.shard_degree: {parallel.shard_degree}` does not divide `parallel.gpus: {parallel.gpus}`: give "
            "a divisor"
        )
    if parallel.offload == "all" and parallel.strategy == "ddp":
        yield (
            "`parallel.offload: all` keeps shards in host memory, and `parallel.strategy: ddp` has none: use fsdp, "
            "hsdp or single"
        )
    if parallel.offload != "none" and config.optimizer.name != "adamw":
        paged = (
            "optimizer.name: paged_adamw_8bit, whose states move by themselves, and no parallel.offload, or "
            "optimizer.name: adamw"
        )
        yield (
            f"`parallel.offload: {parallel.offload}` is for `optimizer.name: adamw`, not `{config.optimizer.name}`: "
            f"use {paged}"
        )


def _check_kernels(config: RunConfig) -> Findings:
    if config.kernels.linear != "fp8":
        return
    reasons = {
        "qlora": "whose weights are held in NF4: use method.name: lora",
        "patterns": "whose trained weights are cast at each use: use method.name: full or lora",
    }
    if config.method.name in reasons:
        yield (
            f"`kernels.linear: fp8` does not go with `method.name: {config.method.name}`, "
            f"{reasons[config.method.name]}, or kernels.linear: compute_dtype"
        )
    if config.model.dtype in ("float32", "float64") and config.parallel.device != "cpu":
        yield (
            f"`kernels.linear: fp8` computes beside bfloat16, and `model.dtype` is {config.model.dtype}: use bfloat16, "
            "or linear: compute_dtype"
        )
    elif config.model.dtype == "float64":
        yield (
            "`kernels.linear: fp8` sums in float32, and `model.dtype` is float64: use another dtype, or linear: "
            "compute_dtype"
        )


RULES: tuple[Callable[[RunConfig], Findings], ...] = (
    _check_batch,
    _check_schedule,
    _check_evaluation,
    _check_checkpoint,
    _check_method,
    _check_optimizer,
    _check_task,
    check_formats,
    check_sources,
    _check_template,
    _check_parallel,
    _check_kernels,
)
