"""All text about plans, except errors: a sentence for each reason, and tables for the terminal. Nothing parses it."""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from manyhands.core.limits import GIB
from manyhands.core.units import (
    count_of,
    describe_counts,
    describe_ranks,
    format_duration,
    format_gib,
    format_share,
    format_size,
)

if TYPE_CHECKING:
    from manyhands.config.schema import MethodSection, RunConfig
    from manyhands.facts.types import Facts
    from manyhands.planner.layout import Layout
    from manyhands.planner.longest import LongestSample
    from manyhands.planner.types import Candidate, Code, Plan, Reason, TimeEstimate

Values = Mapping[str, Any]
Template = str | Callable[[Values], str]
Row = tuple[str, str, str, str]  # what, planned, measured, error

MIB = 2**20
METHODS = {"lora": "LoRA", "qlora": "QLoRA", "full": "full fine-tuning", "patterns": "weights by pattern"}
NOTED = (
    "left_out",
    "unread",
    "smaller",
    "longer",
    "new_tokens",
    "adapter",
    "offload",
)  # reasons that the first lines show beside notes and warnings
MIN_SHARE = 0.002  # of a step: smaller terms are not shown
UNITS: dict[str, Callable[[Any], str]] = {
    "gib": format_gib,
    "size": format_size,
    "duration": format_duration,
    "share": format_share,
    "counts": describe_counts,
    "list": ", ".join,
    "moved": lambda names: ", ".join("optimizer states" if name == "optimizer" else name for name in names),
    "recomputed": lambda mode: {"selective": "only norms, activation functions and sums", "none": "nothing"}[mode],
    "passes": lambda passes: "epochs" if passes > 1 else "runs",
}


def fill(template: Template, v: Values) -> str:
    """The template with its values, which are never read as templates themselves.

    ``{bytes:gib}``, ``{names:list}``: a value in one of ``UNITS``; any other format is Python's. ``{steps:n step}``: "1
    step" or "2 steps"; ``{ranks:n {device}}``: "2 GPUs" or "2 processes". ``{asked:?, as configured|, as it fits}``:
    the first text where the value is true, else the second, or nothing; both may have fields.
    """
    if not isinstance(template, str):
        return template(v)
    text = ""
    for literal, name, form, _ in string.Formatter().parse(template):
        text += literal
        if name is None or form is None:
            continue
        if form.startswith("?"):
            when_true, _, when_false = form[1:].partition("|")
            text += fill(when_true if v.get(name) else when_false, v)
        elif form.startswith("n "):
            noun = fill(form[2:], v)
            text += describe_ranks(noun, v[name]) if noun in ("cuda", "cpu") else count_of(v[name], noun)
        else:
            text += UNITS[form](v[name]) if form in UNITS else format(v[name], form)
    return text


def _by(key: str, before: str = "", after: str = "", **templates: Template) -> Template:
    """The template that a value names."""
    return lambda v: fill(before, v) + fill(templates[v[key]], v) + fill(after, v)


def _if(key: str, template: Template, otherwise: Template) -> Template:
    return lambda v: fill(template if v.get(key) else otherwise, v)


def explain(reason: Reason) -> str:
    """``topic: sentence``; of a rejected candidate the sentence alone."""
    topic = topic_of(reason.code)
    return f"{topic}: {sentence_of(reason)}" if topic else sentence_of(reason)


def sentence_of(reason: Reason) -> str:
    """Without the topic."""
    return fill((SENTENCES | REJECTIONS)[reason.code], reason.values)


def topic_of(code: Code) -> str:
    return "" if code in REJECTIONS else TOPICS.get(code, code.replace("_", " "))


def _hardware(v: Values) -> str:
    (memory, of_memory), (usable, of_usable) = v["memory_mib"], v["usable_mib"]
    sizes = {"memory": int(memory * MIB), "usable": int(usable * MIB), "by": of_memory, "usable_by": of_usable}
    counts = {"several": v["num_nodes"] > 1, "each": v["num_nodes"] * v["num_per_node"] > 1}
    return fill(
        "{several:?{num_nodes} machines with }{num_per_node} × {kind} (not on this machine): {memory:gib}{each:? each} "
        "({by}), usable {usable:gib} ({usable_by}){note:?; a GPU is {note}}",
        {**v, **sizes, **counts},
    )


def _figures(v: Values) -> str:
    named = {
        "bf16_tflops": "TFLOP/s in bfloat16",
        "fp8_tflops": "in fp8",
        "memory_gb_s": "GB/s of memory",
        "link_gb_s": "GB/s to other GPUs of the machine",
    }
    parts = [(f"{v[name][0]:,.0f} {unit}", v[name][1]) for name, unit in named.items() if name in v]
    grouped = itertools.groupby(parts, key=lambda part: part[1])
    return f"{v['kind']}: " + ", ".join(f"{', '.join(text for text, _ in group)} ({who})" for who, group in grouped)


def _device(v: Values) -> str:
    gpus = describe_ranks("cuda", v["num_gpus"])
    if v["asked"] or not v.get("is_here", True):
        return f"{v['device']}, as configured" if v["asked"] else gpus
    if not v["num_gpus"]:
        return "CPU, as no GPU is visible"
    return f"GPU, as {gpus} {'is' if v['num_gpus'] == 1 else 'are'} visible"


def _nodes(v: Values) -> str:
    each = [f"{n['name']} ({n['ranks']}{' × ' * bool(n['gpus'])}{'/'.join(n['gpus'])})" for n in v["nodes"]]
    text = f"{len(each)}: {', '.join(each)}"
    return text + fill("{mixed:?; planned for the smallest GPU, {least_bytes:gib}}", v)


def _node_links(v: Values) -> str:
    ways = sorted(v["ways"].items(), key=lambda item: float(item[1]["seconds"]))
    sent = ", ".join(f"{format_gib(way['bytes'])} in {way['seconds']:.2g} s by {name}" for name, way in ways)
    source = v["source"] or "assumed: InfiniBand of 400 Gbit/s per rank"
    return f"{v['gb_s']:.3g} GB/s ({source}); a step sends {sent}"


def _data_workers(v: Values) -> str:
    workers = f"{v['workers']} process{'es' * (v['workers'] != 1)} per rank" if v["workers"] else "a thread"
    if v["asked"] or v["source"] == "cpu":
        return workers + (", as configured" if v["asked"] else ", as processes would take cores from training")
    if v["source"] == "images":
        return f"{workers} prepare the images of about {v['samples_per_s']:,} samples/s, at a megapixel each"
    text = f"{workers}; one thread collates about {v['tokens_per_s']:,} tokens/s of samples this long"
    scarce = ": {wanted} processes would be faster, but no {workers:?more }cores are free ({cores} in total)"
    return text + (fill(scarce, v) if v["workers"] < v["wanted"] else "")


def _smaller(v: Values) -> str:
    now, before = v["now"], v["before"]
    changes = []
    if now["full_micro_tokens"] < before["full_micro_tokens"]:
        changes.append(
            f"{now['full_micro_tokens']:,} tokens per micro-batch instead of {before['full_micro_tokens']:,}"
        )
    if (new := describe_layout(now)) != (old := describe_layout(before)):
        changes.append(f"{new} instead of {old}")
    measured = "{needed:?: {needed:gib} or more needed, {estimated:gib} estimated, {available:gib} there"
    measured += "; now {now_estimated:gib} estimated}"
    text = f"{', and '.join(changes)}, the same global batch, as plan {v['plan']} ran out of memory"
    return text + fill(measured, v)


ACTIVATIONS = "activations{layers_on_device:? but for the last {layers_on_device:n layer}}"


def describe_layout(v: Values) -> str:
    """Whatever of a layout takes or saves memory, but for the size of a micro-batch; ``v`` has its fields by name."""
    moved = {"none": [], "optimizer": ["optimizer states"], "all": ["weights, gradients and optimizer states"]}
    activations = fill(ACTIVATIONS, v)
    offloaded = " and ".join(moved[v["offload"]] + [activations] * v["offload_activations"])
    reduces = v["reduce_every"] and v["strategy"] in ("fsdp", "hsdp")
    return fill(
        "{strategy}, activation checkpointing {activation_checkpointing}"
        "{lighter_layers:? (lighter in the last {lighter_layers:n layer})}"
        "{mlp_tile_tokens:?, MLPs by tiles of {mlp_tile_tokens:,} tokens}"
        "{repeated_inputs:?, {repeated_inputs:n block} recomputed twice}"
        "{keeps_transposed:?, frozen experts kept transposed too}"
        "{reshard_after_forward:?, weights freed after the forward pass}"
        "{reduces:?, gradients reduced after every micro-batch}{offloaded:?, {offloaded} in host memory}",
        {**v, "reduces": reduces, "offloaded": offloaded},
    )


def _hsdp(v: Values) -> str:
    ranks, gathered = describe_ranks(v["device"], v["ranks"]), fill(GATHERED, v)
    if v["shard"] == 1:
        return f"a copy on each of {ranks}, nothing sharded, which is what ddp does"
    if v["replicate"] == 1:
        return f"one copy, sharded over {ranks}, which is what fsdp does{gathered}"
    return f"{v['replicate']} copies, each sharded over {v['shard']} of {ranks}{gathered}"


def describe_checkpointing(layout: Layout) -> str:
    """``full``, or ``full, the last 63 layers selective``, or ``full, MLPs by tiles, 16 layers twice``."""
    last = f", the last {count_of(layout.lighter_layers, 'layer')} {layout.last_checkpointing}"
    return (
        layout.activation_checkpointing
        + last * bool(layout.lighter_layers)
        + ", MLPs by tiles" * bool(layout.mlp_tile_tokens)
        + f", {count_of(layout.repeated_inputs, 'layer')} twice" * bool(layout.repeated_inputs)
    )


def describe_degrees(layout: Layout) -> str:
    """``, CP 2`` of context parallelism, or ``, EP 4`` of expert parallelism; empty where there is neither."""
    degrees = {"CP": layout.mesh.context, "EP": layout.expert_degree}
    return "".join(f", {name} {degree}" for name, degree in degrees.items() if degree > 1)


def describe_limit(device: str, world_size: int, free_bytes: int, num_local: int) -> str:
    """Where the limit of a rank comes from."""
    if device == "cuda":
        return f"97 % of {format_gib(free_bytes)} free on the GPU"
    of = "" if num_local == world_size else f"{num_local} of "
    shared = f" / {of}{describe_ranks(device, world_size)}" if num_local > 1 else ""
    return f"90 % of {format_gib(free_bytes)} free{shared}"


def _memory(v: Values) -> str:
    limit = describe_limit(v["device"], v["ranks"], v["free"], v["local_ranks"])
    text = "{bytes:gib} of {limit:gib} per rank ({why}){tight:?; over {tight:.0%} of it, which leaves little headroom}"
    return fill(text, {**v, "why": limit})


def _images(v: Values) -> str:
    units = f" ({v['patches'] // v['squares']:,} squares of {v['squares']:,})" if v["squares"] > 1 else ""
    terms = (
        f"{part} {', '.join(f'{name} {format_gib(size)}' for name, size in sizes.items())}"
        for part, sizes in v["parts"].items()
    )
    return f"up to {v['patches']:,} patches{units} per micro-batch; {'; '.join(terms)}"


def _batch(v: Values) -> str:
    if v.get("packs"):
        text = "samples of {packs:n pack} of {pack_tokens:,} tokens over {ranks:n {device}}, in micro-batches of "
        text += "{micro_samples:?{micro_samples:n sample}|{micro_tokens:,} tokens}"
    elif v["micro_samples"]:
        text = "{samples:n sample} = {micro_samples} micro × {ranks:n {device}} × {accumulation} accumulation"
    elif v["loss_tokens"]:
        text = "at least {loss_tokens:,} loss tokens, in packs of {micro_tokens:,} tokens over {ranks:n {device}}"
    else:
        text = "{samples:n sample} ≈ {about:,.0f} tokens, in packs of {micro_tokens:,} over {ranks:n {device}}"
        text += " (fewer samples than ranks: some are idle)" * (v["samples"] < v["ranks"])
    return fill(text + "{auto:? (auto)}", {**v, "about": (v["samples"] or 0) * v["mean_tokens"]})


def _efficiency(v: Values) -> str:
    steps = "1 step" if v["steps"] == 1 else f"{v['steps']} steps of the first epoch"
    text = f"{format_share(v['share'])} of the computed tokens are useful (measured on {steps})"
    if v["share"] < 1:
        waiting = ["waiting for the fullest pack"] * (v["ranks"] > 1)
        padding = "padding up to the longest sample of a micro-batch" + (" of any rank" if v["ranks"] > 1 else "")
        text += f"; the rest is {' and '.join(['padding'] * v['padded'] + waiting) if v['packed'] else padding}"
    if "samples" not in v:
        return text
    if not v["packed"]:
        why = "samples differ in length"
    elif v["samples"] < v["ranks"]:
        why = "a step has {samples:n sample} for {ranks} ranks"
    elif v["ranks"] > 1:
        why = "the {samples} samples of a step cannot be divided evenly among {ranks} ranks"
    else:
        why = "a step of {samples:n sample} leaves much of its packs empty"
    better = "{proposal:?{proposal} would reach {reaches:share}|samples of similar length would help "
    return fill(f"{text}, as {why}; {better}(data.max_length with data.too_long=truncate)}}", v)


def _validation(v: Values) -> str:
    if not v["samples"]:
        return "none"
    sets = f", those of evaluate.data ({', '.join(v['sets'])}) included" if v.get("sets") else " of data.validation"
    text = (
        count_of(v["samples"], "sample") + sets if v["of"] is None else fill("{samples:,} of {of:n sample} held out", v)
    )
    return text + fill(", {repeated:?{repeated:,} of them also|none of them} in the training set", v)


def _steps(v: Values) -> str:
    if v.get("batch_packs"):
        first = "{per_epoch:,} {epoch}, of {batch_packs:n pack} of {pack_tokens:,} tokens each"
    elif v["batch_samples"] is None:
        first = "{per_epoch:,} {epoch}, of at least {batch_loss_tokens:,} loss tokens each"
    else:
        first = "ceil({samples_per_epoch:n sample} / {batch_samples}) = {per_epoch:,} {epoch}"
        first += "{num_samples:?, drawn from {num_samples:,} by source weight}"
    epochs = f"{v['epochs']:g} {'epoch' if v['epochs'] == 1 else 'epochs'}"
    if v["of_epochs"] is None:
        text = "; ended by stop.max_steps: {total:,}"
    elif v["differ"]:
        text = "; {of_epochs:,} in {all}, which differ by a few steps"
        text += "{counted:? (as many as the first {counted} have on average)}"
    else:
        text = "; × {all} = {of_epochs:,}"
    if v["of_epochs"] is not None and (v["max_steps"] or 0) > v["of_epochs"]:
        text += ", before stop.max_steps: {max_steps:,} (raise stop.epochs to reach it)"
    epoch = "in the first epoch" if v["of_epochs"] is not None and v["differ"] else "an epoch"
    return fill(first + text, {**v, "epoch": epoch, "all": epochs})


def _longer(v: Values) -> str:
    text = fill(
        "{all_limits}: {total:n step}, of which {done:,} are done. The {schedule} schedule spans all {total:,}: step "
        "{next:,} has a learning rate of {next_rate:.3g}, step {done:,} had {last_rate:.3g}. ",
        {**v, "all_limits": "; ".join(v["limits"]), "next": v["done"] + 1},
    )
    if v["differing"] is None:
        return text + "All steps have the rates of a run that was this long from the start"
    first, last = v["differing"]
    steps = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
    return text + f"In a run that was this long from the start, {steps} would have had other rates"


def _spacing(v: Values) -> str:
    """Of evaluations or checkpoints."""
    steps, per_epoch = v["every"], v["per_epoch"]
    if per_epoch:
        return f"{per_epoch:,} in each epoch, the last at its end" if per_epoch > 1 else "at the end of each epoch"
    if not steps:
        return "none between the first and the last step"
    return "after every step" if steps == 1 else f"every {steps:,} steps"


def _checkpoints(v: Values) -> str:
    """How far apart they are, what they cost and what a fault costs."""
    spacing = _spacing(v)
    if "seconds" not in v:
        return spacing + fill("{auto:?, ten a run: the seconds of a step are not known}", v)
    fault = "{lost_s:duration} of work and {restart_s:duration} to restart"
    if not v["every"] and not v["per_epoch"]:
        return spacing + fill(f"; a fault costs {fault} on average", v)
    text = (
        ", {seconds:duration}; each takes {cost_s:.2g} s, {share:.2%} of the time; a fault, assumed each {hours:.3g} h"
    )
    text += f", costs {fault}: {{goodput:.2%}} of the time is kept"
    return spacing + fill(text, {**v, "share": v["cost_s"] / (v["seconds"] + v["cost_s"])})


GATHERED = ", gathered weights {reshard:?freed after the forward pass|kept}"
LESS_KEPT = (
    "{lighter_layers:?; of the last {lighter_layers} of {layers} blocks {last:recomputed}}{asked:?, as configured|"
    "{no_faster:?, because keeping more is no faster|, because more does not fit}}"
)
DISK = (
    "{num_checkpoints:n checkpoint} of {checkpoint_bytes:size} at once and a result of {result_bytes:size}"
    "{feature_bytes:?, {feature_bytes:size} of features of images}"
)
WAITING = {  # why checkpoints are not written while training continues
    "asked": "asked",
    "zero": "DeepSpeed's partitions are gathered for it",
    "memory": "staging needs {bytes:gib} of host memory per rank and {free:gib} are left",
}
FEATURES = "{bytes:size} of {images:n image}"

# Decisions, notes and warnings by code.
_NO_VARLEN = _by(
    "obstacle",
    not_packed="samples are not packed",
    no_gpu="there is no GPU",
    dtype="{dtype} is not a half precision",
    head_dim="a head has {head_dim} dimensions",
    amd="varlen is untested on {gpu}",
    old_gpu="{gpu} is too old",
    sinks="varlen has none for packs that ranks divide",
)
SENTENCES: dict[Code, Template] = {
    "hardware": _hardware,
    "figures": _figures,
    "assumed": lambda v: fill(
        "{cores} cores and {host_bytes:gib} of host memory per GPU"
        "{several:?; links between machines are slower than within one: prefers one copy per machine}; disk unknown",
        {**v, "several": v["num_nodes"] > 1},
    ),
    "untried": "untested on AMD GPUs: memory is estimated as on NVIDIA GPUs",
    "device": _device,
    "processes": _by(
        "source",
        "{size}, ",
        launched="as launched",
        asked="as configured",
        gpus="one per GPU",
        cpu="auto uses one on a CPU",
        fewer="of {asked} asked for: launch.min_gpus allows as few",
        left="those that are left after a fault",
    ),
    "nodes": _nodes,
    "node_links": _node_links,
    "context": "{degree} ranks divide each pack{asked:?, as configured}, in {groups:n group}, and {heads:?exchange "
    "heads for tokens in attention|gather each other's keys and values in attention (not measured on GPUs)}"
    "{undivided:?; undivided {undivided}}{tight:?; with fewer too little memory would be left}"
    "{slower:?; with {fewer} a step is {slower:.0%} slower}",
    "packing": _if(
        "packed",
        "several samples per batch row{asked:?, as configured}{known:?: {known}}",
        "no, {asked:?as configured|one sample per batch row: {known}}",
    ),
    "stacks": "{names:list}: gate and up of each expert are one matrix",
    "targets": "{names:list}, which PEFT adapts in models of type {kind} by default",
    "smaller": _smaller,
    "strategy": _by(
        "strategy",
        "{strategy}, ",
        "{asked:?, as configured}",
        single="one process, nothing sharded{reshard:?, the bfloat16 copy freed after the forward pass}",
        ddp="a copy on each of {ranks:n {device}}{reshard:?, in bfloat16 freed after the forward pass}",
        fsdp="sharded over {ranks:n {device}}" + GATHERED,
        hsdp=_hsdp,
        zero1="DeepSpeed's ZeRO: weights on each of {ranks:n {device}}, masters and optimizer states sharded",
        zero2="DeepSpeed's ZeRO: weights on each of {ranks:n {device}}, gradients, masters and optimizer states "
        "sharded",
        zero3="DeepSpeed's ZeRO: weights, gradients and optimizer states sharded over {ranks:n {device}}",
    ),
    "cuda_graphs": "each block, {asked:?as configured|as launching kernels one by one takes longer than running them}"
    "{one_length:?|; packs are padded to {tokens:,} tokens}",
    "flash4": "FlashAttention 4 is not installed; with it a step is some {saved:.0%} shorter "
    "(pip install 'manyhands[flash4]')",
    "transposed": "their fp8 values are also kept transposed for the backward pass, in {bytes:gib} that would be left "
    "free{ms:?; saves {ms:.1f} ms a step}",
    "expert_degree": "divided over {degree} ranks, to which tokens are sent, in {groups:n group}"
    "{asked:?, as configured}; estimated for a rank with {load} times its share of the tokens"
    "{undivided:?; undivided {undivided}}{tight:?; on fewer ranks too little memory would be left}"
    "{slower:?; on {fewer:n rank} a step is {slower:.0%} slower}",
    "activation_checkpointing": _by(
        "mode",
        "{mode}, ",
        none="all activations are kept{asked:?, as configured|, as they fit}",
        selective="norms, activation functions and sums are recomputed; results of linear layers and attention are kept"
        + LESS_KEPT,
        except_attention="each block but its attention is recomputed in the backward pass" + LESS_KEPT,
        full="each block is recomputed in the backward pass{tile:?, its MLP by tiles of {tile:,} tokens}"
        "{repeated:?, and {repeated:n block} a second time, as their results are not kept}" + LESS_KEPT,
    ),
    "reduction": _if(
        "every",
        "gradients after every micro-batch, as unsharded ones do not fit until the last",
        "gradients once per step, as unsharded ones fit until then ({bytes:gib})",
    ),
    "offload": "{moved:moved} in host memory{staying:?, but for those of the last {staying:n block}}"
    "{limit:?{hidden:?, copied while blocks are recomputed}, {bytes:gib} of "
    "{limit:gib} per rank|, as always on a CPU}",
    "memory": _memory,
    "images": _images,
    "features": _if(
        "obstacle",
        _by(
            "obstacle",
            configured="computed in every epoch, as configured",
            trained="computed in every epoch, as the vision tower is trained",
            unknown="computed in every epoch, as where they leave the tower of this model is not described",
            one_pass="computed once, as there is one epoch; they are not kept for later runs",
            bound=f"computed in every epoch, as {FEATURES} do not fit into data.feature_cache_gb ({{bound_gb:g}} GB)",
            disk=f"computed in every epoch, as {FEATURES} do not fit on the disk of data.cache",
            slower=f"computed in every epoch, as reading {FEATURES} would take longer",
        ),
        f"computed once and kept in data.cache, {FEATURES}, read by later {{passes:passes}}{{saved_s:?, which saves "
        "about {saved_s:duration} on each rank}{asked:?, as configured}; the vision tower stays in memory",
    ),
    "batch": _batch,
    "efficiency": _efficiency,
    "compute": _by(
        "source",
        auto="bfloat16, {narrow_masters:?|float32 masters, }reduced as float32 sums",
        asked="{dtype}, as configured",
        cpu="{dtype}, as on every CPU",
        gpu="{dtype}, as {gpu} has no bfloat16",
    ),
    "masters": "bfloat16, as configured: weights rounded stochastically, states in bfloat16; sums of gradients in "
    "float32",
    "frozen": "linear layers of the blocks in NF4{stored:?, as they are stored}, {double:?4.13|4.5} bits per weight, "
    "dequantized to {compute} for each matmul; the rest {compute}",
    "frozen_experts": _if(
        "kept",
        "experts in MXFP4, as they are stored, 4.25 bits per weight, dequantized to {compute} for each product",
        "experts are dequantized from MXFP4 as they are read, and saved without quantization",
    ),
    "linear": "matmuls of the blocks in fp8 during training{emulated:?, emulated in float32, as requested by "
    "parallel.device: cpu}; {weights:?their frozen weights are kept in fp8 alone, and evaluation multiplies with these "
    "in the compute dtype|evaluation and saved weights do not use fp8}",
    "towers": "{parameters:,} parameters are not loaded, as training is on text only",
    "parts": lambda v: ", ".join(f"{part} {state}" for part, state in v["parts"].items()),
    "attention": _by(
        "kind",
        blockwise="blockwise in PyTorch, as scores are soft-capped at {softcap:g}",
        varlen="varlen, {packed:?each packed sample on its own|as images are read in both directions}, without a mask",
        sdpa=lambda v: fill("sdpa, as ", v) + fill(_NO_VARLEN, v),
        divided=lambda v: fill("blockwise in PyTorch, as ranks divide packs and ", v) + fill(_NO_VARLEN, v),
        images=lambda v: (
            fill("blockwise in PyTorch, as the tokens of an image see each other and ", v) + fill(_NO_VARLEN, v)
        ),
        sinks=lambda v: fill("blockwise in PyTorch, with the heads' sinks, as ", v) + fill(_NO_VARLEN, v),
    ),
    "compile": _by(
        "source",
        "{compile:?each block|no}, ",
        asked="as configured",
        cpu="on a CPU it costs more than it saves",
        zero3="as DeepSpeed gathers weights in hooks of every module",
        experts="as ranks exchange tokens inside of what {mode} checkpointing traces",
        one_length="one shape, as all samples have {tokens:,} tokens",
        packs="one graph for packs of any length",
        lengths="dynamic shapes, as samples differ in length",
    ),
    "data_workers": _data_workers,
    "new_tokens": "{new}{known:? and {known} already in the vocabulary}; embeddings of {vocabulary:,} rows",
    "adapter": "continues {folder}, rank {rank}, alpha {alpha:g}{kinds:?, {kinds:list}}",
    "reference": _if(
        "stored",
        "computed once before the first step and kept in data.cache, {bytes:size}, as "
        "{asked:?configured|{key:?{key} changes more than adapters|there are {epochs:g} epochs}}",
        "computed at each step with the adapters switched off, as {asked:?configured|there is one epoch}",
    ),
    "prompts": _if(
        "shared",
        "that of a pair is computed once for both answers{asked:?, as configured}: {tokens:,} tokens an epoch in place "
        "of {copied:,}",
        _if(
            "asked",
            "computed for each answer of a pair, as configured",
            _by(
                "why",
                "computed for each answer of a pair, as ",
                short="no prompt is longer than one token",
                few="sharing would save less than an eighth of the tokens (preference.share_prompts=true shares)",
                window="layers have a sliding window",
                state="layers carry a state along a row",
                sinks="heads have attention sinks",
                blockwise="attention is computed blockwise",
                rope="rotary frequencies depend on the length of each answer",
                images="the model has parts for images",
                noise="noise on embeddings depends on the length of each answer",
                balance="the balance loss is one of each answer with its prompt",
            ),
        ),
    ),
    "validation": _validation,
    "left_out": "{by_source:counts}, by {key}",
    "unread": lambda v: (
        "columns " + "; ".join(f"{', '.join(each)} ({source})" for source, each in v["columns"].items())
    ),
    "steps": _steps,
    "warmup": _by(
        "source",
        asked="{steps:n step}, as configured",
        decay="{steps:n step}, all steps before the decay",
        ratio="{ratio:g} × {total:n step} = {steps:,}",
    ),
    "longer": _longer,
    "evaluation": lambda v: _spacing(v) + fill("{has_samples:?| (there are no validation samples)}", v),
    "checkpoints": _checkpoints,
    "saving": _by(
        "how",
        beside="by another process while training continues, through {bytes:gib} of host memory per rank",
        **{how: f"while training waits, as {why}" for how, why in WAITING.items()},
    ),
    "early_end": "{keys:list} may end the run before its last step; the schedule spans all {total:,} steps",
    "disk": "{total:size}{free_bytes:? of {free_bytes:size} free}, " + DISK,
    "learning_rate": "{rate:g}, {method:?the usual one for {method}|as configured}",
    "output_dtype": _by(
        "source",
        asked="{dtype}, as configured",
        model="{dtype}, as the source's{rounded:?; frozen ones rounded to {rounded}, in which they are kept}",
        masters="{dtype}, as trained",
        adapter="the adapter {dtype}, as trained",
    ),
    "environment": lambda v: " ".join(f"{name}={value}" for name, value in v.items()) + ", unless already set",
    "long_samples": "the longest sample has {tokens:,} tokens, more than the {positions:,} positions the model "
    "supports",
    "large_batch": "batch.samples is {batch:,}, but there are {samples:,} training samples per epoch: each step uses "
    "all of them",
    "high_learning_rate": "{key}: {rate:g} changes a weight by about that much per step, more than the size of most "
    "weights; 1e-5 to 1e-3 is usual",
    "long_warmup": lambda v: fill(
        "schedule.warmup_steps: {steps:,} is more than the run's {total:n step}: the learning rate reaches {share:.2%} "
        "of its peak",
        {**v, "share": v["total"] / v["steps"]},
    ),
    "high_rank": lambda v: (
        f"method.rank: {v['rank']} is not below the width of "
        + ", ".join(f"{name} ({width})" for name, width in v["layers"])
        + ": LoRA A and B are larger than necessary"
    ),
}
# Why a candidate was not chosen.
REJECTIONS: dict[Code, Template] = {
    "not_next_smaller": "not the next smaller layout after plan {plan}, which ran out of memory",
    "exceeds_memory": "needs {bytes:gib} of {limit:gib}",
    "exceeds_host_memory": "needs {bytes:gib} of {limit:gib} host memory",
    "near_limit": "needs {bytes:gib}, over {share:.0%} of {limit:gib}: too close to the limit for an estimate",
    "computes_again": _by(
        "mode",
        "{slower:.1%} slower: recomputes ",
        selective="norms and activation functions",
        except_attention="blocks, about a third more compute",
        full="blocks, about a third more compute",
    ),
    "computes_more_again": "{slower:.1%} slower: recomputes more blocks",
    "computes_attention_again": "{slower:.1%} slower: recomputes attention too, and its results fit",
    "shards_needlessly": lambda v: fill(
        "{slower:.1%} slower: gathers shards, although a full copy {per_machine:?per machine }fits",
        {**v, "per_machine": v["chosen"] == "hsdp"},
    ),
    "gathers_again": "{slower:.1%} slower: gathers weights again in the backward pass",
    "smaller_micro_batch": "{slower:.1%} slower: smaller micro-batches",
    "moves_more_activations": "{slower:.1%} slower: moves more activations to host memory",
    "updates_copies": "{slower:.1%} slower: every rank reduces and updates all that is trained",
    "more_memory": "same speed, more memory",
    "no_faster": "{slower:?{slower:.1%} slower|no faster than the chosen one}",
}
# What precedes a sentence, where it is not its code; nothing precedes a rejection.
TOPICS: dict[Code, str] = {
    "untried": "note",
    "node_links": "between nodes",
    "stacks": "target modules",
    "expert_degree": "experts",
    "cuda_graphs": "CUDA graphs",
    "flash4": "note",
    "transposed": "frozen experts",
    "targets": "target modules",
    "unread": "not read",
    "warmup": "warm-up",
    "saving": "checkpoint writing",
    "early_end": "end",
    "output_dtype": "saved weights",
    "long_samples": "note",
    "large_batch": "note",
    "high_learning_rate": "warning",
    "long_warmup": "warning",
    "high_rank": "warning",
}

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


def describe_cost(time: TimeEstimate | None, price: float) -> str:
    """What the run costs at ``price`` a GPU-hour."""
    if time is None:
        return "cost: not known, as the rates of a CPU or of a GPU of an unknown kind are not"
    return f"cost: {time.gpu_hours * price:,.2f} at {price:,.2f} a GPU-hour"


def describe_briefly(config: RunConfig, method: MethodSection, plan: Plan, price: float | None = None) -> list[str]:
    """Model, data, layout, memory and time, in lines of at most 80 columns, then the plan's notes and warnings.

    ``method``: as ``method_of`` has it. ``price``: of a GPU-hour, in any currency; the last line then ends with what
    the run costs.
    """
    lines = {
        "model": _brief_model(config, method, plan),
        "data": _brief_data(config, plan),
        "layout": _brief_layout(plan),
        "memory": _brief_memory(plan),
        "time": _brief_time(plan, price),
    }
    notes = [
        f"{topic}: {sentence_of(reason)}"
        for reason in plan.why
        if (topic := topic_of(reason.code)) in ("note", "warning") or reason.code in NOTED
    ]
    return [f"{name:8}{text}" for name, text in lines.items()] + notes


def _brief_model(config: RunConfig, method: MethodSection, plan: Plan) -> str:
    text = f"{PurePath(config.model.name).name}, {METHODS[method.name]}"
    if method.name in ("lora", "qlora"):
        text += f" rank {method.rank}"
    active = f" ({_short(plan.num_active)} active)" if plan.num_active else ""
    if plan.num_trained == plan.num_parameters:
        return f"{text}, all {_short(plan.num_parameters)} parameters{active} trained"
    share = plan.num_trained / max(1, plan.num_parameters)
    return f"{text}, {_short(plan.num_trained)} of {_short(plan.num_parameters)}{active} trained ({share:.2%})"


def _short(number: int) -> str:
    """``4.9 M``, ``8.03 B``."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _brief_data(config: RunConfig, plan: Plan) -> str:
    data = plan.data
    parts = [count_of(data.samples, "sample"), f"{data.tokens:,} tokens"]
    if data.images:
        parts.append(count_of(data.images, "image"))
    changes = [
        f"{number:,} {what}"
        for number, what in (
            (data.truncated, f"cut at {config.data.max_length:,}"),
            (data.dropped, "left out"),
            (data.split, "split"),
        )
        if number
    ]
    held_out = f"{data.held_out:,} held out" if data.held_out else "none held out"
    return f"{', '.join(parts + (changes or ['none cut']))}; {held_out}"


def _brief_layout(plan: Plan) -> str:
    layout = plan.layout
    gpus = next((reason.values["gpus"] for reason in plan.why if reason.code == "device"), ())
    if layout.device == "cuda" and gpus:
        name = re.sub(r"[ -]\d+GB.*", "", gpus[0]["name"].removeprefix("NVIDIA ").removeprefix("GeForce "))
        ranks = f"{layout.world_size} x {name}"
    else:
        ranks = describe_ranks(layout.device, layout.world_size).replace(" ", " CPU ", 1)
    if plan.batch_packs:
        step = count_of(plan.batch_packs, "pack")
    elif plan.batch_loss_tokens:
        step = f"{plan.batch_loss_tokens:,} loss tokens"
    else:
        step = count_of(plan.batch_samples or 0, "sample")
    micro = f"packs of {layout.micro:,} tokens" if plan.packing else f"{layout.micro:,} a micro-batch"
    return f"{layout.strategy}, {ranks}{describe_degrees(layout)}, {layout.compute_dtype}; {step}/step, {micro}"


def _brief_memory(plan: Plan) -> str:
    memory, layout = plan.memory, plan.layout
    per = "GPU" if layout.device == "cuda" else "process"
    text = f"{memory.total / GIB:.1f} of {memory.limit / GIB:.1f} GiB per {per} "
    text += f"({format_share(memory.total / memory.limit)})"
    if layout.activation_checkpointing != "none":
        text += f", {layout.activation_checkpointing} checkpointing"
    if layout.offload != "none" or layout.offload_activations:
        text += ", part in host memory"
    return text


def _brief_time(plan: Plan, price: float | None) -> str:
    epochs = plan.num_steps / plan.steps_per_epoch if plan.steps_per_epoch else 0
    of = f"{epochs:.3g} epoch{'' if epochs == 1 else 's'}"
    text = f"{count_of(plan.num_steps, 'step')}, {of}"
    if plan.time is None:
        return f"{text}; time to the end after the first steps"
    time = plan.time
    text += f": {format_duration(time.total_s)}, {time.gpu_hours:.2f} GPU-hours, {time.tokens_per_s:,.0f} tokens/s"
    return text if price is None else f"{text}, costs {time.gpu_hours * price:,.2f}"


def describe_longest(found: LongestSample, facts: Facts) -> str:
    """One sentence on the answer, one on what stands against more, and one where the model knows fewer positions."""
    layout, memory = found.plan.layout, found.plan.memory
    checkpointing = describe_checkpointing(layout).replace("_", " ")
    ranks = count_of(layout.world_size, "GPU" if layout.device == "cuda" else "process")
    how = f"{layout.strategy}, activation checkpointing: {checkpointing}"
    if layout.offload_activations:
        how += f", {fill(ACTIVATIONS, vars(layout))} in host memory"
    seconds = "" if found.plan.step_s is None else f", {found.plan.step_s:,.1f} s a step"
    lines = [
        f"longest sample: {found.length:,} tokens on {ranks} ({how}; {format_gib(memory.total)} of "
        f"{format_gib(memory.limit)} per rank{seconds})"
    ]
    positions = facts.model.max_positions
    if positions and found.length > positions:
        lines.append(f"the limit is the model's: it was made for {positions:,} positions, and memory holds more")
    if found.refusal is None:
        lines.append("nothing longer was tried")
    else:
        lines.append(f"{found.next_length:,} tokens do not fit: {found.refusal.what}")
    return "\n".join(lines)


def explain_plan(plan: Plan) -> RenderableType:
    """Compact tables for ``rich``: decisions, memory per rank, time of a step, and the candidates with their
    reasons.
    """
    cause = "" if plan.cause == "first" else f" ({plan.cause.replace('_', ' ')})"
    title = Text(f"Plan {plan.number}{cause}  {plan.digest}", style="bold")
    decisions = _table()
    for reason in plan.why:
        topic = topic_of(reason.code)
        style = "bold yellow" if topic == "warning" else "cyan"
        decisions.add_row(Text(topic, style=style), Text(sentence_of(reason)))
    memory, time, limit = plan.memory, plan.time, plan.memory.limit
    sizes = {name: (f"{size / GIB:.2f}", f"{size / limit:.0%}") for name, size in memory.terms.items() if size}
    total = (f"{memory.total / GIB:.2f}", f"{memory.total / limit:.0%}")
    of_memory = _terms("memory per rank", "GiB", sizes, total)
    of_memory.add_row(Text("  limit"), f"{limit / GIB:.2f}", "")
    costs = Table.grid(padding=(0, 6, 0, 0))
    if time is None:
        costs.add_row(of_memory)
        return Group(title, decisions, Text(), costs, Text(), *_candidates(plan))
    step_s = time.step_s
    seconds = {name: (f"{s:.3f}", f"{s / step_s:.0%}") for name, s in time.terms.items() if s >= MIN_SHARE * step_s}
    costs.add_row(of_memory, _terms("step time", "s", seconds, (f"{step_s:.3f}", "")))
    mfu = "" if time.mfu is None else f", MFU {time.mfu:.0%}"
    evaluations = f", {count_of(time.num_evaluations, 'evaluation')} of {time.evaluation_s:.1f} s"
    run = (
        f"{time.tokens_per_s:,.0f} tokens/s{mfu}; the run: {format_duration(time.total_s)}, {time.gpu_hours:.2f} "
        f"GPU-hours (start {time.start_s:.0f} s{evaluations * (time.num_evaluations > 0)}, checkpoints of "
        f"{time.checkpoint_s:.1f} s); rates of the GPUs: {time.source}"
    )
    return Group(title, decisions, Text(), costs, Text(run), Text(), *_candidates(plan))


def _terms(title: str, unit: str, terms: Mapping[str, tuple[str, str]], total: tuple[str, str]) -> Table:
    """A row for each term: its name, its size, its share."""
    table = _table()
    for justify in ("left", "right", "right"):
        table.add_column(justify=justify)  # type: ignore[arg-type]
    table.add_row(Text(title, style="bold"), unit, "share")
    for name, figures in terms.items():
        table.add_row(Text(f"  {name}", style="cyan"), *figures)
    table.add_row(Text("  total", style="bold"), *total)
    return table


def _candidates(plan: Plan) -> list[RenderableType]:
    """The chosen one first; of every other strategy and checkpointing mode the largest that leaves its margin free, or
    else the largest that fits, or else the smallest.
    """
    table = _table()
    numbers = (f"micro {'tokens' if plan.packing else 'samples'}", "GiB", "s/step")
    for title in ("strategy", "activation checkpointing", *numbers, ""):
        table.add_column(title, justify="right" if title in numbers else "left")
    table.show_header = True
    groups: dict[tuple[str, bool, str, int], list[Candidate]] = {}
    for candidate in plan.candidates:
        layout = candidate.layout
        how = (layout.activation_checkpointing, layout.mlp_tile_tokens)
        kind = (layout.strategy, layout.reshard_after_forward, *how)
        groups.setdefault(kind, []).append(candidate)
    shown = sorted((max(group, key=_shown_first) for group in groups.values()), key=lambda c: not c.chosen)
    for candidate in shown:
        layout = candidate.layout
        table.add_row(
            layout.strategy + ", resharded" * layout.reshard_after_forward,
            describe_checkpointing(layout),
            f"{layout.micro:,}",
            f"{candidate.memory.total / GIB:.1f}",
            "-" if plan.time is None or candidate.step_s is None else f"{candidate.step_s:.3f}",
            explain(candidate.reason) if candidate.reason else "chosen",
            style="bold green" if candidate.chosen else "dim",
        )
    more = len(plan.candidates) - len(shown)
    return [table, Text(f"and {more} more (--json)", style="dim")] if more else [table]


def _shown_first(candidate: Candidate) -> tuple[bool, bool, bool, int]:
    memory, micro = candidate.memory, candidate.layout.micro
    return candidate.chosen, memory.is_safe, memory.fits, micro if memory.fits else -micro


def _table() -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), show_header=False, pad_edge=False)


def compare(plan: Plan, report: Mapping[str, Any]) -> list[Row]:
    """Memory of the rank that held most, seconds of a step and tokens/s; then what was planned by term, which a run
    measures only as a sum. ``report`` is what report.json holds.
    """
    found = report.get("measured")
    found = found if isinstance(found, dict) else {}  # a file may be damaged
    measured = {name: value for name, value in found.items() if isinstance(value, int | float)}
    listed = found.get("peak_memory_bytes_by_rank")
    peaks = [peak for peak in listed if isinstance(peak, int | float)] if isinstance(listed, list) else []
    rows = []
    if peaks:
        held, of = plan.memory.total, "memory, GiB"
        if plan.layout.device == "cuda":  # what tensors held: neither pools nor what is outside of the allocator
            held -= plan.memory.outside_bytes + plan.memory.terms.get("pools", 0)
            of = "tensors' memory, GiB"
        rows.append(_row(of, held / GIB, max(peaks) / GIB, ".2f"))
    time = plan.time
    for name, what, planned, how in (
        ("step_s", "seconds a step", plan.step_s, ".4g"),
        ("tokens_per_s", "tokens/s", time.tokens_per_s if time else None, ",.0f"),
        ("training_s", "seconds of training", time.total_s - time.start_s if time else None, ",.0f"),
    ):
        if name in measured:
            rows.append(_row(what, planned, measured[name], how))
    rows += [(f"  rank {rank}, GiB", "", f"{peak / GIB:.2f}", "") for rank, peak in enumerate(peaks)]
    rows += [(f"  {name}, GiB", f"{size / GIB:.2f}", "", "") for name, size in plan.memory.terms.items() if size]
    rows += [(f"  {name}, s", f"{seconds:.4g}", "", "") for name, seconds in (time.terms if time else {}).items()]
    return rows


def _row(what: str, planned: float | None, measured: float, how: str) -> Row:
    if planned is None:
        return what, "-", format(measured, how), ""
    return what, format(planned, how), format(measured, how), f"{planned / measured - 1:+.1%}" if measured else ""
