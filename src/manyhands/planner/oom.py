"""After a launch that ran out of memory: which plan comes next, and what is left where none does. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from manyhands.config.schema import RunConfig
from manyhands.core.errors import EXIT_FAILED, OUT_OF_MEMORY, UserError
from manyhands.core.units import format_gib
from manyhands.planner.candidates import USABLE_SHARE, Limits, choose_candidate, is_alike
from manyhands.planner.checkpoints import STAGING
from manyhands.planner.choices import Decisions
from manyhands.planner.layout import Layout
from manyhands.planner.memory.input import EstimateInput
from manyhands.planner.text import describe_layout
from manyhands.planner.types import Candidate, Cause, MemoryFound, OutOfMemory, Plan, Reason, reason

STEP = 0.9  # of the estimate that was too low, at most, if what was measured does not say less
ROOM_FOR_MORE = 1.1  # times as much memory as when a plan ran out of it: larger ones may be tried again
LAYOUT_FIELDS = (  # that decide what memory a layout needs, as ``describe_layout`` reads them
    "strategy",
    "activation_checkpointing",
    "lighter_layers",
    "mlp_tile_tokens",
    "reshard_after_forward",
    "reduce_every",
    "offload",
    "offload_activations",
    "layers_on_device",
    "repeated_inputs",
    "keeps_transposed",
    "full_micro_tokens",
)


class NothingSmaller(UserError):
    """Memory ran out, and no smaller plan is left."""


def find_ran_out(
    cause: Cause, before: Plan | None, made: Decisions, limits: Limits, found: MemoryFound | None
) -> OutOfMemory | None:
    """The plan that this one must be smaller than. None where another number of ranks, or more memory than by then,
    starts afresh.
    """
    if before is None or before.layout.world_size != made.world_size or before.layout.device != made.device:
        return None
    if cause != "out_of_memory":
        kept = before.ran_out
        return kept if kept is not None and limits.device <= ROOM_FOR_MORE * kept.limit else None
    estimated = before.memory.total - before.memory.terms.get(STAGING, 0)  # which candidates do not have
    return OutOfMemory(
        number=before.number,
        layout=before.layout,
        estimated_bytes=estimated,
        limit=before.memory.limit,
        found=found,
        again=before.ran_out is not None,
    )


def bytes_within(limits: Limits, ran_out: OutOfMemory) -> int | None:
    """What the next plan may be estimated to need: the memory that was really there, less the share by which the need
    exceeded its estimate, and a step below that estimate, as memory ran out before all of the need was seen. None where
    nothing was measured, or a plan made so ran out as well.
    """
    found = ran_out.found
    if found is None or ran_out.again:
        return None
    there = min(limits.device, int(USABLE_SHARE["cuda"] * found.available))
    return int(min(there / max(1.0, found.needed / ran_out.estimated_bytes), STEP * ran_out.estimated_bytes))


def choose_within(
    config: RunConfig, candidates: list[Candidate], base: EstimateInput, limits: Limits, ran_out: OutOfMemory
) -> Candidate | None:
    """The fastest of the candidates within ``bytes_within``; one of them, or one with what memory it leaves spent."""
    most = bytes_within(limits, ran_out)
    if most is None:
        return None
    within = replace(limits, device=most)
    layouts = [c.layout for c in candidates if c.layout.full_micro_tokens <= ran_out.layout.full_micro_tokens]
    chosen = choose_candidate(config, [within.evaluate(base, layout) for layout in layouts], base, within)
    if chosen is None:
        return None
    smaller = limits.evaluate(base, chosen[1].layout)
    same = next((c for c in candidates if c.layout == smaller.layout), None)
    if same is None:
        candidates.append(smaller)
    return same or smaller


def choose_smaller(candidates: list[Candidate], ran_out: OutOfMemory) -> Candidate | None:
    """What follows a plan that ran out of memory: the same layout with at most half the tokens per micro-batch, or the
    next fewer. Where transposed values were kept, the same without them comes first.

    Where there are no fewer, whatever is estimated to need the least, if that is less than before; else None. The
    estimate has been proved too low, so what only the estimate says to be smaller comes last, and nothing is spent on
    computing less again.
    """
    fitting = [c for c in candidates if c.memory.fits and c.memory.total < ran_out.estimated_bytes]
    alike = [c for c in fitting if is_alike(c.layout, ran_out.layout)]
    before = ran_out.layout.full_micro_tokens
    for most in (before,) * ran_out.layout.keeps_transposed + (before // 2, before - 1):
        fewer = [c for c in alike if c.layout.full_micro_tokens <= most]
        if fewer:
            return max(fewer, key=lambda c: c.layout.full_micro_tokens)
    rest = [c for c in fitting if c.layout.full_micro_tokens <= before]
    return min(rest, key=lambda c: c.memory.total, default=None)


def explain_smaller(chosen: Candidate, ran_out: OutOfMemory | None) -> tuple[Reason, ...]:
    if ran_out is None:
        return ()
    found = ran_out.found
    measured = {} if found is None else {"needed": found.needed, "available": found.available}
    return (
        reason(
            "smaller",
            plan=ran_out.number,
            now=_values(chosen.layout),
            before=_values(ran_out.layout),
            estimated=ran_out.estimated_bytes,
            now_estimated=chosen.memory.total,
            **measured,
        ),
    )


def _values(layout: Layout) -> dict[str, Any]:
    return {name: getattr(layout, name) for name in LAYOUT_FIELDS}


def nothing_smaller(config: RunConfig, ran_out: OutOfMemory, made: Decisions) -> NothingSmaller:
    """What is left to a user where even the smallest plan ran out of memory."""
    parallel, batch = config.parallel, config.batch
    advice = [
        "stop other programs that use its memory (`manyhands gpu-info`)"
        if made.device == "cuda"
        else "end other programs"
    ]
    fixed = [key for key in ("micro_samples", "micro_tokens", "accumulation") if getattr(batch, key) != "auto"]
    if fixed:
        advice.append("leave " + " and ".join(f"batch.{key}" for key in fixed) + " to auto")
    if parallel.activation_checkpointing not in ("auto", "full"):
        advice.append("set parallel.activation_checkpointing=auto")
    if parallel.offload == "none" and made.device == "cuda":
        advice.append("set parallel.offload=optimizer or all")
    advice.append("use more GPUs" if made.device == "cuda" else "use a machine with more memory")
    shorter = "; a new run (--fresh) could also shorten the samples (data.max_length) or take "
    method = {"full": "method.name=lora", "patterns": "method.name=lora", "lora": "method.name=qlora"}.get(
        config.method.name
    )
    return NothingSmaller(
        f"out of memory, and no smaller plan is left than plan {ran_out.number}",
        where=f"{made.ranks}: {describe_layout(_values(ran_out.layout))}, "
        f"{ran_out.layout.full_micro_tokens:,} tokens per micro-batch, "
        f"{format_gib(ran_out.estimated_bytes)} of {format_gib(ran_out.limit)} estimated",
        why="the run needed more than estimated, or another program uses the memory",
        fix=", or ".join(advice) + (shorter + method if method else shorter.removesuffix(" or take ")),
        exit_code=EXIT_FAILED,
        kind=OUT_OF_MEMORY,
    )
