"""What a plan warns of although it can be carried out, and what is refused as disk or memory are too small. Pure."""

from __future__ import annotations

from manyhands.config.patterns import matches
from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.core.units import compare_gib, format_gib, format_size
from manyhands.facts.types import DataFacts, Facts, ModelFacts
from manyhands.optim.registry import OPTIMIZERS
from manyhands.planner.advice import DOES_NOT_FIT
from manyhands.planner.candidates import Limits, move_activations
from manyhands.planner.choices import Decisions
from manyhands.planner.features import Features
from manyhands.planner.memory.input import EstimateInput
from manyhands.planner.memory.terms import state_bytes
from manyhands.planner.steps import Steps
from manyhands.planner.text import DISK, describe_limit, fill
from manyhands.planner.types import LOG_BYTES, Candidate, DiskEstimate, MemoryEstimate, Reason, reason

ABSURD_RATE = (
    1.0  # an update of Adam, Adafactor or Muon has about the size of the learning rate, weights are mostly far below 1
)


def warn_of_values(config: RunConfig, model: ModelFacts, learning_rate: float, steps: Steps) -> tuple[Reason, ...]:
    """A warning for each learning rate, warm-up and LoRA rank that is hardly meant."""
    rates = {"optimizer.learning_rate": learning_rate}
    rates |= {f"optimizer.learning_rates, {pattern}": rate for pattern, rate in config.optimizer.learning_rates.items()}
    rates |= {f"optimizer.part_learning_rates, {part}": r for part, r in config.optimizer.part_learning_rates.items()}
    absurd = [reason("high_learning_rate", key=key, rate=rate) for key, rate in rates.items() if rate >= ABSURD_RATE]
    if steps.warmup > steps.total:
        absurd.append(reason("long_warmup", steps=steps.warmup, total=steps.total))
    return (*absurd, *_warn_of_rank(config, model))


def _warn_of_rank(config: RunConfig, model: ModelFacts) -> tuple[Reason, ...]:
    """LoRA factors of rank r hold ``r (in + out)`` values; from the layer's smaller width on they add nothing that it
    has not itself.
    """
    method = config.method
    if not method.trains_adapters:
        return ()
    patterns = ("*",) if method.target_modules == "all-linear" else method.target_modules
    narrow = [
        [name.rpartition(".")[2], min(shape.out, shape.into)]
        for name, shape in model.block_linear_shapes.items()
        if method.rank >= min(shape.out, shape.into)
        and any(matches(f"{model.decoder}.layers.0.{name}", pattern) for pattern in patterns)
    ]
    return (reason("high_rank", rank=method.rank, layers=narrow),) if narrow else ()


def estimate_disk(
    config: RunConfig, facts: Facts, setup: EstimateInput, steps: Steps, output_bytes: int, features: Features
) -> DiskEstimate:
    """A checkpoint holds masters and optimizer states of what is trained; ``keep_last`` of them stay (all: each of the
    plan), one more while it is written, and the best if asked. The result is the model, towers included, or the
    adapter, and the merged model too if asked. Features of images count where they are on the same disk.
    """
    keep_last, saved = config.checkpoint.keep_last, steps.num_checkpoints
    kept = saved if keep_last == "all" else keep_last + 1 + config.checkpoint.keep_best
    model, adapters = facts.model, config.method.trains_adapters
    result = setup.num_adapter_parameters * output_bytes
    if not adapters or config.output.merge:
        width = output_bytes if not adapters or config.output.dtype != "auto" else setup.frozen_bytes
        result += (model.num_parameters + model.num_tower_parameters) * width
    return DiskEstimate(
        checkpoint_bytes=setup.num_trained * setup.master_bytes + state_bytes(setup),
        num_checkpoints=kept if config.checkpoint.every_minutes is not None else min(saved, kept),
        result_bytes=result,
        feature_bytes=features.num_bytes if features.kept and facts.shares_disk else 0,
        free_bytes=facts.free_disk_bytes,
    )


def check_disk(config: RunConfig, disk: DiskEstimate) -> Reason:
    """The reason for the plan. UserError where checkpoints and result do not fit on the disk."""
    if disk.fits:
        return reason("disk", **disk.model_dump(), total=disk.total)
    advice = ["free some space", "choose an output.dir on a larger disk"]
    if disk.num_checkpoints > 1 + config.checkpoint.keep_best:
        advice.append("keep fewer checkpoints (checkpoint.keep_last=1, or checkpoint.every_steps=0 for one at the end)")
    if disk.feature_bytes:
        advice.append("do not keep features of images (data.cache_features=false)")
    needed, free = format_size(disk.total + LOG_BYTES), format_size(disk.free_bytes or 0)
    raise UserError(
        f"not enough disk space for this run: it needs {needed}, and {free} are free",
        where=f"output.dir: {config.output.dir}",
        why=f"{fill(DISK, disk.model_dump())}, and {format_size(LOG_BYTES)} for logs",
        fix=", or ".join(advice),
    )


def nothing_fits(
    config: RunConfig, candidates: list[Candidate], base: EstimateInput, made: Decisions, limits: Limits
) -> UserError:
    """The smallest candidate's bytes against the limit that binds, its largest terms, and what would make it smaller.

    That is host memory where a layout would fit the device with activations there, and the host has no room for them.
    """
    smallest = min(candidates, key=lambda candidate: candidate.memory.total)
    if smallest.memory.total <= smallest.memory.limit:
        return _host_does_not_fit(min(candidates, key=lambda candidate: candidate.memory.host_total), made)
    memory, parallel, batch = smallest.memory, config.parallel, config.batch
    advice = []
    explicit = (
        ("parallel.strategy", parallel.strategy),
        ("parallel.activation_checkpointing", parallel.activation_checkpointing),
        ("parallel.reshard_after_forward", parallel.reshard_after_forward),
    )
    freed = [f"{key}: auto" for key, value in explicit if value not in ("auto", "fsdp", "hsdp", "zero3", "full", True)]
    if freed:
        advice.append("let the plan choose (" + ", ".join(freed) + ")")
    if "auto" not in (batch.micro_tokens if config.data.packing else batch.micro_samples,):
        advice.append("give a smaller micro-batch")
    if config.method.name != "qlora":
        advice.append("use method.name=lora" if config.method.name == "full" else "use method.name=qlora")
    if config.data.max_length > 512:
        advice.append("shorten the samples (data.max_length)")
    if made.device == "cuda" and parallel.offload != "all" and OPTIMIZERS[config.optimizer.name].streams_states:
        advice.append("keep states in host memory (parallel.offload)")
    advice.append(
        "use more GPUs or ones with more memory" if parallel.device != "cpu" else "use a machine with more memory"
    )
    layout = smallest.layout
    if moved := _short_of_host(config, candidates, base, limits):
        advice[-1] = "use a machine with more memory"
        needed, there = compare_gib(moved.host_total, moved.host_limit or 0)
        what = f"activations in host memory would take {needed} per rank, and there are {there} of it;"
        what += " without that the smallest layout"
        why = "the limit is 90 % of the machine's free memory over its ranks; what would lie there is listed above"
        terms = moved.host_terms
    else:
        what, terms = "its smallest layout", memory.terms
        limit = describe_limit(made.device, made.world_size, limits.free_bytes, limits.num_local)
        why = f"the limit is {limit}; the terms of the estimate are listed above"
    how = f"{layout.strategy}, activation checkpointing {layout.activation_checkpointing}"
    needed, there = compare_gib(memory.total, memory.limit)
    return UserError(
        f"the run does not fit: {what} needs {needed} per rank, and there are {there}",
        where=f"{made.ranks}: {how}, {layout.full_micro_tokens:,} tokens per micro-batch",
        why=why,
        fix=", or ".join(advice),
        details=[f"{name}: {format_gib(size)}" for name, size in sorted(terms.items(), key=lambda t: -t[1]) if size],
        kind=DOES_NOT_FIT,
    )


def _short_of_host(
    config: RunConfig, candidates: list[Candidate], base: EstimateInput, limits: Limits
) -> MemoryEstimate | None:
    """The least that host memory would have to hold for a layout to fit the device; None where none would."""
    if config.parallel.offload_activations != "auto":
        return None
    moved = [moved.memory for c in candidates if (moved := move_activations(c.layout, base, limits)) is not None]
    on_device = [memory for memory in moved if memory.total <= memory.limit]
    return min(on_device, key=lambda memory: memory.host_total, default=None)


def _host_does_not_fit(smallest: Candidate, made: Decisions) -> UserError:
    memory = smallest.memory
    fewer = "keep fewer activations (parallel.activation_checkpointing=full), " * ("activations" in memory.host_terms)
    needed, there = compare_gib(memory.host_total, memory.host_limit or 0)
    return UserError(
        f"what is kept in host memory does not fit: {needed} per rank, and there are {there} of host memory",
        where=f"{made.ranks}: parallel.offload, parallel.offload_activations",
        why="the limit is 90 % of the machine's free memory over its ranks;"
        " pinned memory, except that of activations, takes about 1.4 times what it holds"
        + (", and DeepSpeed's checkpoints pass through it" if smallest.layout.zero_stage else ""),
        fix=f"offload less, {fewer}or use more machines with parallel.strategy=fsdp",
        details=[f"{name}: {format_gib(size)}" for name, size in memory.host_terms.items() if size],
        kind=DOES_NOT_FIT,
    )


def explain_samples(config: RunConfig, data: DataFacts) -> list[Reason]:
    """What becomes of samples that are not trained. UserError where keys need validation samples and there are none."""
    if not data.num_validation_samples:
        asking = {
            "checkpoint.keep_best": config.checkpoint.keep_best,
            "stop.patience": config.stop.patience is not None,
        }
        if needing := [key for key, asks in asking.items() if asks]:
            raise UserError(
                f"{needing[0]} needs validation samples, and there are none",
                where=needing[0],
                why=f"a tenth of {data.num_samples:,} samples is less than one",
                fix="give data.validation, or a larger data.validation_fraction, or remove the key",
            )
    held_out = config.data.validation is None and not config.evaluate.data
    why = [
        reason(
            "validation",
            samples=data.num_validation_samples,
            of=data.num_validation_samples + data.num_samples + data.num_dropped if held_out else None,
            repeated=data.num_repeated,
            sets=list(config.evaluate.data),
        )
    ]
    why += [reason("left_out", key=key, by_source=counts) for key, counts in data.left_out.items()]
    return why + ([reason("unread", columns=data.unread)] if data.unread else [])
