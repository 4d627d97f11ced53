"""Every reason's sentence. All text about plans, except errors, is defined here; nothing parses it."""

from __future__ import annotations

from collections.abc import Callable

from manyhands.core.units import count_of, describe_counts, describe_ranks, format_gib, format_share, format_size
from manyhands.planner.fact_sentences import IMAGE_SENTENCES, MACHINE_SENTENCES
from manyhands.planner.phrases import (
    Values,
    describe_checkpoints,
    describe_disk,
    describe_layout,
    describe_limit,
    describe_ran_out,
    describe_saving,
    describe_spacing,
)
from manyhands.planner.types import Code, Reason


def explain(reason: Reason) -> str:
    """``topic: sentence``; of a rejected candidate the sentence alone."""
    topic = SENTENCES[reason.code][0]
    return f"{topic}: {sentence_of(reason)}" if topic else sentence_of(reason)


def sentence_of(reason: Reason) -> str:
    """Without the topic."""
    return SENTENCES[reason.code][1](reason.values)


def _asked(v: Values, otherwise: str = "") -> str:
    return ", as configured" if v["asked"] else otherwise


def _packing(v: Values) -> str:
    if not v["packed"]:
        return "no, as configured" if v["asked"] else f"no, one sample per batch row: {v['known']}"
    return "several samples per batch row" + _asked(v) + (f": {v['known']}" if v["known"] else "")


def _smaller(v: Values) -> str:
    now, before = v["now"], v["before"]
    changes = []
    if now["full_micro_tokens"] < before["full_micro_tokens"]:
        changes.append(
            f"{now['full_micro_tokens']:,} tokens per micro-batch instead of {before['full_micro_tokens']:,}"
        )
    if (new := describe_layout(now)) != (old := describe_layout(before)):
        changes.append(f"{new} instead of {old}")
    return f"{', and '.join(changes)}, the same global batch, as plan {v['plan']} {describe_ran_out(v)}"


def _strategy(v: Values) -> str:
    ranks, freed = describe_ranks(v["device"], v["ranks"]), "freed after the forward pass"
    gathered = "gathered weights " + (freed if v["reshard"] else "kept")
    meaning = {
        "single": "one process, nothing sharded" + (f", the bfloat16 copy {freed}" if v["reshard"] else ""),
        "ddp": f"a copy on each of {ranks}" + (f", in bfloat16 {freed}" if v["reshard"] else ""),
        "fsdp": f"sharded over {ranks}, {gathered}",
        "hsdp": f"a copy on each of {ranks}, nothing sharded, which is what ddp does"
        if v["shard"] == 1
        else f"{v['replicate']} copies, each sharded over {v['shard']} of {ranks}, {gathered}"
        if v["replicate"] != 1
        else f"one copy, sharded over {ranks}, which is what fsdp does, {gathered}",
        "zero1": f"DeepSpeed's ZeRO: weights on each of {ranks}, masters and optimizer states sharded",
        "zero2": f"DeepSpeed's ZeRO: weights on each of {ranks}, gradients, masters and optimizer states sharded",
        "zero3": f"DeepSpeed's ZeRO: weights, gradients and optimizer states sharded over {ranks}",
    }[v["strategy"]]
    return f"{v['strategy']}, {meaning}{_asked(v)}"


def _checkpointing(v: Values) -> str:
    what = {
        "none": "none, all activations are kept",
        "selective": "selective, norms, activation functions and sums are recomputed; "
        "results of linear layers and attention are kept",
        "except_attention": "except_attention, each block but its attention is recomputed in the backward pass",
        "full": "full, each block is recomputed in the backward pass",
    }[v["mode"]]
    if v["lighter_layers"]:
        last = {"selective": "only norms, activation functions and sums", "none": "nothing"}[v["last"]]
        what += f"; of the last {v['lighter_layers']} of {v['layers']} blocks {last}"
    if v["mode"] == "none":
        return what + _asked(v, ", as they fit")
    return what + _asked(
        v, ", because keeping more is no faster" if v.get("no_faster") else ", because more does not fit"
    )


def _reduction(v: Values) -> str:
    if v["every"]:
        return "gradients after every micro-batch, as unsharded ones do not fit until the last"
    return f"gradients once per step, as unsharded ones fit until then ({format_gib(v['bytes'])})"


def _offload(v: Values) -> str:
    moved = ", ".join("optimizer states" if name == "optimizer" else name for name in v["moved"])
    if v["limit"] is None:
        return f"{moved} in host memory, as always on a CPU"
    hidden = ", copied while blocks are recomputed" if v["hidden"] else ""
    return f"{moved} in host memory{hidden}, {format_gib(v['bytes'])} of {format_gib(v['limit'])} per rank"


def _memory_total(v: Values) -> str:
    why = describe_limit(v["device"], v["ranks"], v["free"], v["local_ranks"])
    tight = f"; over {v['tight']:.0%} of it, which leaves little headroom" if v["tight"] else ""
    return f"{format_gib(v['bytes'])} of {format_gib(v['limit'])} per rank ({why}){tight}"


def _batch(v: Values) -> str:
    ranks = describe_ranks(v["device"], v["ranks"])
    if v.get("packs"):
        packs = "1 pack" if v["packs"] == 1 else f"{v['packs']:,} packs"
        text = f"samples of {packs} of {v['pack_tokens']:,} tokens over {ranks}, in micro-batches of "
        text += count_of(v["micro_samples"], "sample") if v["micro_samples"] else f"{v['micro_tokens']:,} tokens"
    elif v["micro_samples"]:
        factors = f"{v['micro_samples']} micro × {ranks} × {v['accumulation']} accumulation"
        text = f"{count_of(v['samples'], 'sample')} = {factors}"
    elif v["loss_tokens"]:
        text = f"at least {v['loss_tokens']:,} loss tokens, in packs of {v['micro_tokens']:,} tokens over {ranks}"
    else:
        about = v["samples"] * v["mean_tokens"]
        text = (
            f"{count_of(v['samples'], 'sample')} ≈ {about:,.0f} tokens, in packs of {v['micro_tokens']:,} over {ranks}"
        )
        if v["samples"] < v["ranks"]:
            text += " (fewer samples than ranks: some are idle)"
    return text + (" (auto)" if v["auto"] else "")


def _efficiency(v: Values) -> str:
    steps = "1 step" if v["steps"] == 1 else f"{v['steps']} steps of the first epoch"
    text = f"{format_share(v['share'])} of the computed tokens are useful (measured on {steps})"
    if v["share"] < 1:
        waiting = ["waiting for the fullest pack"] * (v["ranks"] > 1)
        padding = "padding up to the longest sample of a micro-batch" + (" of any rank" if v["ranks"] > 1 else "")
        text += f"; the rest is {' and '.join(['padding'] * v['padded'] + waiting) if v['packed'] else padding}"
    if "samples" not in v:
        return text
    better = "samples of similar length would help (data.max_length with data.too_long=truncate)"
    if "proposal" in v:
        better = f"{v['proposal']} would reach {format_share(v['reaches'])}"
    return f"{text}, as {_why_inefficient(v)}; {better}"


def _why_inefficient(v: Values) -> str:
    samples = f"{v['samples']} {'sample' if v['samples'] == 1 else 'samples'}"
    if not v["packed"]:
        return "samples differ in length"
    if v["samples"] < v["ranks"]:
        return f"a step has {samples} for {v['ranks']} ranks"
    if v["ranks"] > 1:
        return f"the {v['samples']} samples of a step cannot be divided evenly among {v['ranks']} ranks"
    return f"a step of {samples} leaves much of its packs empty"


def _compute(v: Values) -> str:
    if v["source"] == "auto":
        masters = "" if v["narrow_masters"] else "float32 masters, "
        return f"bfloat16, {masters}reduced as float32 sums"
    sources = {"asked": "as configured", "cpu": "as on every CPU", "gpu": f"as {v.get('gpu')} has no bfloat16"}
    return f"{v['dtype']}, {sources[v['source']]}"


def _attention(v: Values) -> str:
    if v["kind"] == "blockwise":
        return f"blockwise in PyTorch, as scores are soft-capped at {v['softcap']:g}"
    if v["kind"] == "varlen":
        what = "each packed sample on its own" if v["packed"] else "as images are read in both directions"
        return f"varlen, {what}, without a mask"
    obstacles = {
        "not_packed": "samples are not packed",
        "no_gpu": "there is no GPU",
        "dtype": f"{v['dtype']} is not a half precision",
        "head_dim": f"a head has {v['head_dim']} dimensions",
        "amd": f"varlen is untested on {v['gpu']}",
        "old_gpu": f"{v['gpu']} is too old",
    }
    return f"sdpa, as {obstacles[v['obstacle']]}"


def _compile(v: Values) -> str:
    why = {
        "asked": "as configured",
        "cpu": "on a CPU it costs more than it saves",
        "zero3": "as DeepSpeed gathers weights in hooks of every module",
        "one_length": f"one shape, as all samples have {v.get('tokens', 0):,} tokens",
        "packs": "one graph for packs of any length",
        "lengths": "dynamic shapes, as samples differ in length",
    }[v["source"]]
    return f"{'each block' if v['compile'] else 'no'}, {why}"


def _linear(v: Values) -> str:
    emulated = ", emulated in float32, as requested by parallel.device: cpu" if v["emulated"] else ""
    if v["weights"]:
        return (
            f"matmuls of the blocks in fp8 during training{emulated}; their frozen weights are kept in fp8 alone, and "
            "evaluation multiplies with these in the compute dtype"
        )
    return f"matmuls of the blocks in fp8 during training{emulated}; evaluation and saved weights do not use fp8"


def _new_tokens(v: Values) -> str:
    known = f" and {v['known']} already in the vocabulary" if v["known"] else ""
    return f"{v['new']}{known}; embeddings of {v['vocabulary']:,} rows"


def _adapter(v: Values) -> str:
    kinds = "".join(f", {name}" for name in v["kinds"])
    return f"continues {v['folder']}, rank {v['rank']}, alpha {v['alpha']:g}{kinds}"


def _validation(v: Values) -> str:
    if not v["samples"]:
        return "none"
    sets = f", those of evaluate.data ({', '.join(v['sets'])}) included" if v.get("sets") else " of data.validation"
    given = count_of(v["samples"], "sample") + sets
    text = given if v["of"] is None else f"{v['samples']:,} of {count_of(v['of'], 'sample')} held out"
    checked = f"{v['repeated']:,} of them also" if v["repeated"] else "none of them"
    return f"{text}, {checked} in the training set"


def _steps(v: Values) -> str:
    if v.get("batch_packs"):
        packs = "1 pack" if v["batch_packs"] == 1 else f"{v['batch_packs']:,} packs"
        first = f"{v['per_epoch']:,} {{}}, of {packs} of {v['pack_tokens']:,} tokens each"
    elif v["batch_samples"] is None:
        first = f"{v['per_epoch']:,} {{}}, of at least {v['batch_loss_tokens']:,} loss tokens each"
    else:
        first = f"ceil({count_of(v['samples_per_epoch'], 'sample')} / {v['batch_samples']}) = {v['per_epoch']:,} {{}}"
        if v["num_samples"] is not None:
            first += f", drawn from {v['num_samples']:,} by source weight"
    epochs = f"{v['epochs']:g} {'epoch' if v['epochs'] == 1 else 'epochs'}"
    if v["of_epochs"] is None:
        return f"{first.format('an epoch')}; ended by stop.max_steps: {v['total']:,}"
    if v["differ"]:
        text = f"{first.format('in the first epoch')}; {v['of_epochs']:,} in {epochs}, which differ by a few steps"
        if v.get("counted"):
            text += f" (as many as the first {v['counted']} have on average)"
    else:
        text = f"{first.format('an epoch')}; × {epochs} = {v['of_epochs']:,}"
    if v["max_steps"] is not None and v["max_steps"] > v["of_epochs"]:
        text += f", before stop.max_steps: {v['max_steps']:,} (raise stop.epochs to reach it)"
    return text


def _warmup(v: Values) -> str:
    if v["source"] == "ratio":
        return f"{v['ratio']:g} × {count_of(v['total'], 'step')} = {v['steps']:,}"
    return (
        f"{count_of(v['steps'], 'step')}, {'as configured' if v['source'] == 'asked' else 'all steps before the decay'}"
    )


def _longer(v: Values) -> str:
    text = f"{'; '.join(v['limits'])}: {count_of(v['total'], 'step')}, of which {v['done']:,} are done"
    text += f". The {v['schedule']} schedule spans all {v['total']:,}: step {v['done'] + 1:,} has a learning rate of "
    text += f"{v['next_rate']:.3g}, step {v['done']:,} had {v['last_rate']:.3g}. "
    if v["differing"] is None:
        return text + "All steps have the rates of a run that was this long from the start"
    first, last = v["differing"]
    steps = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
    return text + f"In a run that was this long from the start, {steps} would have had other rates"


def _evaluation(v: Values) -> str:
    return describe_spacing(v) + ("" if v["has_samples"] else " (there are no validation samples)")


def _disk(v: Values) -> str:
    free = "" if v["free_bytes"] is None else f" of {format_size(v['free_bytes'])} free"
    return f"{format_size(v['total'])}{free}, {describe_disk(v)}"


def _output_dtype(v: Values) -> str:
    if v["source"] == "model":
        rounded = f"; frozen ones rounded to {v['rounded']}, in which they are kept" if v["rounded"] else ""
        return f"{v['dtype']}, as the source's{rounded}"
    what = "the adapter " if v["source"] == "adapter" else ""
    return f"{what}{v['dtype']}, {'as configured' if v['source'] == 'asked' else 'as trained'}"


def _high_rank(v: Values) -> str:
    layers = ", ".join(f"{name} ({width})" for name, width in v["layers"])
    return f"method.rank: {v['rank']} is not below the width of {layers}: LoRA A and B are larger than necessary"


# By code: the topic, which precedes the sentence, and the sentence.
def _slower(v: Values, cause: str) -> str:
    return f"{v['slower']:.1%} slower: {cause}"


SENTENCES: dict[Code, tuple[str, Callable[[Values], str]]] = {
    **MACHINE_SENTENCES,
    **IMAGE_SENTENCES,
    "packing": ("packing", _packing),
    "targets": (
        "target modules",
        lambda v: f"{', '.join(v['names'])}, which PEFT adapts in models of type {v['kind']} by default",
    ),
    "smaller": ("smaller", _smaller),
    "strategy": ("strategy", _strategy),
    "activation_checkpointing": ("activation checkpointing", _checkpointing),
    "reduction": ("reduction", _reduction),
    "offload": ("offload", _offload),
    "memory": ("memory", _memory_total),
    "batch": ("batch", _batch),
    "efficiency": ("efficiency", _efficiency),
    "compute": ("compute", _compute),
    "masters": (
        "masters",
        lambda v: (
            "bfloat16, as configured: weights rounded stochastically, states in bfloat16; sums of gradients in float32"
        ),
    ),
    "frozen": (
        "frozen",
        lambda v: (
            f"linear layers of the blocks in NF4{', as they are stored' if v['stored'] else ''}, "
            f"{'4.13' if v['double'] else '4.5'} bits per weight, dequantized to "
            f"{v['compute']} for each matmul; the rest {v['compute']}"
        ),
    ),
    "linear": ("linear", _linear),
    "attention": ("attention", _attention),
    "compile": ("compile", _compile),
    "new_tokens": ("new tokens", _new_tokens),
    "adapter": ("adapter", _adapter),
    "validation": ("validation", _validation),
    "left_out": ("left out", lambda v: f"{describe_counts(v['by_source'])}, by {v['key']}"),
    "unread": (
        "not read",
        lambda v: "columns " + "; ".join(f"{', '.join(names)} ({source})" for source, names in v["columns"].items()),
    ),
    "steps": ("steps", _steps),
    "warmup": ("warm-up", _warmup),
    "longer": ("longer", _longer),
    "evaluation": ("evaluation", _evaluation),
    "checkpoints": ("checkpoints", describe_checkpoints),
    "saving": ("checkpoint writing", describe_saving),
    "early_end": (
        "end",
        lambda v: (
            f"{', '.join(v['keys'])} may end the run before its last step; the schedule spans all {v['total']:,} steps"
        ),
    ),
    "disk": ("disk", _disk),
    "learning_rate": (
        "learning rate",
        lambda v: f"{v['rate']:g}, " + (f"the usual one for {v['method']}" if v["method"] else "as configured"),
    ),
    "output_dtype": ("saved weights", _output_dtype),
    "long_samples": (
        "note",
        lambda v: (
            f"the longest sample has {v['tokens']:,} tokens, more than the {v['positions']:,} positions "
            "the model supports"
        ),
    ),
    "large_batch": (
        "note",
        lambda v: (
            f"batch.samples is {v['batch']:,}, but there are {v['samples']:,} training samples per epoch: "
            "each step uses all of them"
        ),
    ),
    "high_learning_rate": (
        "warning",
        lambda v: (
            f"{v['key']}: {v['rate']:g} changes a weight by about that much per step, "
            "more than the size of most weights; 1e-5 to 1e-3 is usual"
        ),
    ),
    "long_warmup": (
        "warning",
        lambda v: (
            f"schedule.warmup_steps: {v['steps']:,} is more than the run's {count_of(v['total'], 'step')}: the "
            f"learning rate reaches {v['total'] / v['steps']:.2%} of its peak"
        ),
    ),
    "high_rank": ("warning", _high_rank),
    "not_next_smaller": ("", lambda v: f"not the next smaller layout after plan {v['plan']}, which ran out of memory"),
    "exceeds_memory": ("", lambda v: f"needs {format_gib(v['bytes'])} of {format_gib(v['limit'])}"),
    "exceeds_host_memory": ("", lambda v: f"needs {format_gib(v['bytes'])} of {format_gib(v['limit'])} host memory"),
    "near_limit": (
        "",
        lambda v: (
            f"needs {format_gib(v['bytes'])}, over {v['share']:.0%} of {format_gib(v['limit'])}: "
            "too close to the limit for an estimate"
        ),
    ),
    "computes_again": (
        "",
        lambda v: _slower(
            v,
            "recomputes blocks, about a third more compute"
            if v["mode"] in ("full", "except_attention")
            else "recomputes norms and activation functions",
        ),
    ),
    "computes_more_again": ("", lambda v: _slower(v, "recomputes more blocks")),
    "computes_attention_again": ("", lambda v: _slower(v, "recomputes attention too, and its results fit")),
    "shards_needlessly": (
        "",
        lambda v: _slower(v, f"gathers shards, although a full copy {'per machine ' * (v['chosen'] == 'hsdp')}fits"),
    ),
    "gathers_again": ("", lambda v: _slower(v, "gathers weights again in the backward pass")),
    "smaller_micro_batch": ("", lambda v: _slower(v, "smaller micro-batches")),
    "more_memory": ("", lambda _: "same speed, more memory"),
    "moves_more_activations": ("", lambda v: _slower(v, "moves more activations to host memory")),
    "updates_copies": ("", lambda v: _slower(v, "every rank reduces and updates all that is trained")),
    "no_faster": ("", lambda v: f"{v['slower']:.1%} slower" if "slower" in v else "no faster than the chosen one"),
}
