"""After a launch that ran out of memory: which plan comes next, and what is left where none does. Pure."""

from __future__ import annotations

from manyhands.config.schema import RunConfig
from manyhands.core.errors import EXIT_FAILED, OUT_OF_MEMORY, UserError
from manyhands.facts.types import Facts
from manyhands.plan.choices import Decisions
from manyhands.plan.memory import GIB
from manyhands.plan.types import Cause, Plan, RanOut
from manyhands.plan.ways import Limits, Way

ROOM_FOR_MORE = 1.1  # times as much memory as when a plan ran out of it: larger ones may be tried again


class NothingSmaller(UserError):
    """Memory ran out, and no smaller plan is left."""


def find_ran_out(cause: Cause, before: Plan | None, facts: Facts, made: Decisions, limits: Limits) -> RanOut | None:
    """The plan that this one must be smaller than. None where another number of ranks, or more memory than by then,
    starts afresh.
    """
    if before is None or before.world_size != made.world_size or before.device != made.device:
        return None
    if cause != "out_of_memory":
        kept = before.ran_out
        return kept if kept is not None and limits.device <= ROOM_FOR_MORE * kept.limit else None
    return RanOut(
        number=before.number,
        world_size=before.world_size,
        strategy=before.strategy,
        reshard_after_forward=before.reshard_after_forward,
        activation_checkpointing=before.activation_checkpointing,
        micro_tokens=before.pack_tokens or before.micro_tokens or (before.micro_samples or 1) * facts.data.max_length,
        estimated_bytes=before.memory.total,
        limit=before.memory.limit,
    )


def choose_smaller(ways: list[Way], ran_out: RanOut) -> Way | None:
    """What follows a plan that ran out of memory: the same way with at most half the tokens a micro-batch, or the next
    fewer.

    Where there are no fewer, whatever is estimated to need the least, if that is less than before; else None. The
    estimate has been proved too low, so what only the estimate says to be smaller comes last, and nothing is spent on
    recomputing less.
    """
    fitting = [way for way in ways if way.memory.fits and way.memory.total < ran_out.estimated_bytes]
    same = (ran_out.strategy, ran_out.reshard_after_forward, ran_out.activation_checkpointing)
    alike = [way for way in fitting if (way.strategy, way.reshard_after_forward, way.activation_checkpointing) == same]
    for most in (ran_out.micro_tokens // 2, ran_out.micro_tokens - 1):
        fewer = [way for way in alike if way.split.full_micro_tokens <= most]
        if fewer:
            return max(fewer, key=lambda way: way.split.full_micro_tokens)
    rest = [way for way in fitting if way.split.full_micro_tokens <= ran_out.micro_tokens]
    return min(rest, key=lambda way: way.memory.total, default=None)


def explain_smaller(way: Way, ran_out: RanOut | None) -> list[str]:
    if ran_out is None:
        return []
    tokens = way.split.full_micro_tokens
    fewer = f"{tokens:,} tokens a micro-batch in place of {ran_out.micro_tokens:,}, the same global batch"
    if tokens >= ran_out.micro_tokens:
        fewer = f"{way.strategy}, recompute {way.activation_checkpointing} in place of {ran_out.strategy}, recompute {ran_out.activation_checkpointing}, the same batch"
    return [f"smaller: {fewer}, as plan {ran_out.number} ran out of memory"]


def nothing_smaller(config: RunConfig, ran_out: RanOut, made: Decisions) -> NothingSmaller:
    """What is left to a user where even the smallest plan ran out of memory."""
    parallel, batch = config.parallel, config.batch
    advice = [
        "end other programs that hold its memory (`manyhands gpu-info`)"
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
    shorter = "; a new run (--fresh) could also shorten the rows (data.max_length) or take "
    method = {"full": "method.name=lora", "patterns": "method.name=lora", "lora": "method.name=qlora"}.get(
        config.method.name
    )
    return NothingSmaller(
        f"out of memory, and no smaller plan is left than plan {ran_out.number}",
        where=f"{made.ranks}: {ran_out.strategy}, recompute {ran_out.activation_checkpointing}, {ran_out.micro_tokens:,} tokens a micro-batch, "
        f"{format_gib(ran_out.estimated_bytes)} of {format_gib(ran_out.limit)} estimated",
        why="more was needed than the estimate says, or something else holds memory",
        fix=", or ".join(advice) + (shorter + method if method else shorter.removesuffix(" or take ")),
        exit_code=EXIT_FAILED,
        kind=OUT_OF_MEMORY,
    )


def format_gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
