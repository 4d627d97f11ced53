"""Parts of sentences that reasons, errors and candidates share. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from manyhands.core.units import count_of, describe_ranks, format_duration, format_gib, format_size
from manyhands.planner.types import TimeEstimate

Values = Mapping[str, Any]


def describe_limit(device: str, world_size: int, free_bytes: int, num_local: int) -> str:
    """Where the limit of a rank comes from."""
    if device == "cuda":
        return f"97 % of {format_gib(free_bytes)} free on the GPU"
    of = "" if num_local == world_size else f"{num_local} of "
    shared = f" / {of}{describe_ranks(device, world_size)}" if num_local > 1 else ""
    return f"90 % of {format_gib(free_bytes)} free{shared}"


def describe_layout(v: Values) -> str:
    """Whatever of a layout takes or saves memory, but for the size of a micro-batch; ``v`` has its fields by name."""
    text = f"{v['strategy']}, activation checkpointing {v['activation_checkpointing']}"
    if v["lighter_layers"]:
        text += f" (lighter in the last {count_of(v['lighter_layers'], 'layer')})"
    if v["reshard_after_forward"]:
        text += ", weights freed after the forward pass"
    if v["reduce_every"] and v["strategy"] in ("fsdp", "hsdp"):
        text += ", gradients reduced after every micro-batch"
    moved = {"none": [], "optimizer": ["optimizer states"], "all": ["weights, gradients and optimizer states"]}
    offloaded = moved[v["offload"]] + ["activations"] * v["offload_activations"]
    return text + (f", {' and '.join(offloaded)} in host memory" if offloaded else "")


def describe_disk(v: Values) -> str:
    number = v["num_checkpoints"]
    one, result = format_size(v["checkpoint_bytes"]), format_size(v["result_bytes"])
    features = f", {format_size(v['feature_bytes'])} of features of images" if v.get("feature_bytes") else ""
    return f"{number} checkpoint{'s' * (number != 1)} of {one} at once and a result of {result}{features}"


def describe_spacing(v: Values) -> str:
    """Of evaluations or checkpoints."""
    steps, per_epoch = v["every"], v["per_epoch"]
    if per_epoch:
        return f"{per_epoch:,} in each epoch, the last at its end" if per_epoch > 1 else "at the end of each epoch"
    if not steps:
        return "none between the first and the last step"
    return "after every step" if steps == 1 else f"every {steps:,} steps"


def describe_checkpoints(v: Values) -> str:
    """How far apart they are, what they cost and what a fault costs."""
    spacing = describe_spacing(v)
    if "seconds" not in v:
        return f"{spacing}, ten a run: the seconds of a step are not known" if v.get("auto") else spacing
    fault = f"{format_duration(v['lost_s'])} of work and {format_duration(v['restart_s'])} to restart"
    if not v["every"] and not v["per_epoch"]:
        return f"{spacing}; a fault costs {fault} on average"
    share = v["cost_s"] / (v["seconds"] + v["cost_s"])
    return (
        f"{spacing}, {format_duration(v['seconds'])}; each takes {v['cost_s']:.2g} s, {share:.2%} of the time; a "
        f"fault, assumed each {v['hours']:.3g} h, costs {fault}: {v['goodput']:.2%} of the time is kept"
    )


def describe_saving(v: Values) -> str:
    if v["how"] == "beside":
        return f"by another process while training continues, through {format_gib(v['bytes'])} of host memory per rank"
    return f"while training waits, as {describe_waiting(v)}"


def describe_waiting(v: Values) -> str:
    """Why checkpoints are not written beside the training."""
    if v["how"] == "memory":
        return f"staging needs {format_gib(v['bytes'])} of host memory per rank and {format_gib(v['free'])} are left"
    return {"asked": "asked", "zero": "DeepSpeed's partitions are gathered for it"}[v["how"]]


def describe_run(time: TimeEstimate) -> str:
    """Speed, and what the run takes."""
    evaluations = f", {count_of(time.num_evaluations, 'evaluation')} of {time.evaluation_s:.1f} s" * (
        time.num_evaluations > 0
    )
    mfu = "" if time.mfu is None else f", MFU {time.mfu:.0%}"
    return (
        f"{time.tokens_per_s:,.0f} tokens/s{mfu}; the run: {format_duration(time.total_s)}, "
        f"{time.gpu_hours:.2f} GPU-hours (start {time.start_s:.0f} s{evaluations}, checkpoints of "
        f"{time.checkpoint_s:.1f} s); rates of the GPUs: {time.source}"
    )


def describe_cost(time: TimeEstimate | None, price: float) -> str:
    """What the run costs at ``price`` a GPU-hour."""
    if time is None:
        return "cost: not known, as the rates of a CPU or of a GPU of an unknown kind are not"
    return f"cost: {time.gpu_hours * price:,.2f} at {price:,.2f} a GPU-hour"


CHANGES = {
    "layout": "let the plan choose: {}",
    "micro": "give a smaller micro-batch: {}",
    "kept": "keep more on the GPUs: {}",
    "method": "use method.name={}",
    "length": "shorten the samples: data.max_length={}",
    "offload": "keep states in host memory: parallel.offload={}",
    "fewer": "use fewer GPUs: parallel.gpus={}",
    "gpus": "use more GPUs: {}",
}


NOTHING_FITS = (
    "use a smaller model or GPUs with more memory: it does not fit with adapters, shorter samples, states in host"
    " memory or up to {} times the GPUs, nor with the combinations of two of these that were tried"
)


def describe_changes(changes: Iterable[tuple[str, str | int]], strategy: str, step_s: float | None) -> str:
    """Changes, as (kind, value), that together make a run fit, and what it then takes."""
    seconds = "" if step_s is None else f", {step_s:.3g} s a step"
    return f"{' and '.join(CHANGES[kind].format(value) for kind, value in changes)} ({strategy}{seconds})"


def describe_ran_out(v: Values) -> str:
    """What was measured when memory ran out beside the estimate, if it was."""
    if "needed" not in v:
        return "ran out of memory"
    needed, estimated, there, now = (format_gib(v[k]) for k in ("needed", "estimated", "available", "now_estimated"))
    return f"ran out of memory: {needed} or more needed, {estimated} estimated, {there} there; now {now} estimated"
