"""From a config and facts to a plan: every way to run is estimated, all are kept, the fastest that fits is chosen.

``plan`` is a pure function: the same input gives the same plan, to the byte. Knows no torch, no files and no network.

The order of speed, simple and stated: micro-batches too small to fill the device come last; keeping activations beats
recomputing them (a third more compute); a copy a GPU beats shards, and shards whose gathered weights are kept beat ones
that are gathered twice; then the larger micro-batch wins.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Literal

from manyhands.config.schema import RunConfig
from manyhands.errors import UserError
from manyhands.facts.types import Facts
from manyhands.plan.batch import Split, possible_splits
from manyhands.plan.choices import DTYPE_BYTES, Decisions, Device, choose_environment, count_adapter_parameters, decide
from manyhands.plan.memory import GIB, Setup, estimate_terms
from manyhands.plan.steps import count_steps
from manyhands.plan.types import Candidate, Cause, MemoryEstimate, Plan

USEFUL_TOKENS = {"cuda": 16_384, "cpu": 2_048}  # a larger micro-batch gains nothing
ENOUGH_TOKENS = {"cuda": 2_048, "cpu": 256}  # a smaller one leaves the device idle
USABLE_SHARE = {"cuda": 0.97, "cpu": 0.9}  # of the free memory: the limit
SAFE_SHARE = 0.92  # of the limit: what is planned for, as the estimate is one
SAFE_SHARE_AFTER_OOM = 0.70  # the estimate has just been proved too low

Strategy = Literal["one", "ddp", "fsdp"]
Recompute = Literal["none", "block"]


@dataclass(frozen=True)
class Way:
    """One candidate before it is judged."""

    strategy: Strategy
    reshard: bool
    recompute: Recompute
    split: Split
    memory: MemoryEstimate

    def slowness(self, device: Device) -> tuple[bool, bool, bool, bool, int]:
        """Smaller is faster; compared from left to right."""
        too_small = self.split.full_micro_tokens < ENOUGH_TOKENS[device]
        return too_small, self.recompute == "block", self.strategy == "fsdp", self.reshard, -self.split.full_micro_tokens


def plan(config: RunConfig, facts: Facts, *, number: int = 1, cause: Cause = "first") -> Plan:
    """Decide everything for one launch.

    ``number`` counts the launches of the run; ``cause="out_of_memory"`` leaves more memory free than the estimate asks.
    UserError where keys contradict the facts (processes, batch, dtypes) or where nothing fits.
    """
    made = decide(config, facts)
    splits = possible_splits(config, facts.data, made.world_size, USEFUL_TOKENS[made.device])
    limit, why_limit = memory_limit(facts, made)
    ways = list_ways(config, _base_setup(config, facts, made), splits, limit)
    share = SAFE_SHARE_AFTER_OOM if cause == "out_of_memory" else SAFE_SHARE
    chosen = choose_way(ways, made.device, share)
    if chosen is None:
        raise _nothing_fits(config, ways, made, why_limit)
    split = chosen.split
    steps = count_steps(config, facts.data, split.batch_rows)
    why_way = _why_way(config, facts, chosen, made, share, why_limit)
    return Plan(
        number=number,
        cause=cause,
        config_digest=config.digest,
        data_digest=facts.data.digest,
        data_folder=facts.data.folder,
        model_folder=facts.model.folder,
        device=made.device,
        world_size=made.world_size,
        strategy=chosen.strategy,
        reshard=chosen.reshard,
        recompute=chosen.recompute,
        compile=made.compile,
        compute_dtype=made.compute,
        master_dtype=made.master,
        frozen_dtype=made.compute,
        attention=made.attention,
        packing=config.data.packing,
        batch_rows=split.batch_rows,
        batch_tokens=split.batch_tokens,
        micro_rows=split.micro_rows,
        micro_tokens=split.micro_tokens,
        accumulation=split.accumulation,
        steps_per_epoch=steps.per_epoch,
        num_steps=steps.total,
        warmup_steps=steps.warmup,
        learning_rate=made.learning_rate,
        evaluate_every=steps.evaluate_every,
        checkpoint_every=steps.checkpoint_every,
        output_dtype=made.output,
        memory=chosen.memory,
        environment=choose_environment(made.device, facts.host.num_cores, made.world_size),
        candidates=tuple(_candidate(way, chosen, made.device, share) for way in ways),
        why=(*made.why_ranks, *why_way, *made.why_numerics, *steps.why, *made.why_rate),
    )


def memory_limit(facts: Facts, made: Decisions) -> tuple[int, str]:
    """Bytes a rank may use: 97 % of what is free on the fullest GPU, or 90 % of the free host memory shared out; and why."""
    usable = USABLE_SHARE[made.device]
    if made.device == "cuda":
        free = min(gpu.free_bytes for gpu in made.gpus)
        return int(usable * free), f"97 % of {_gib(free)} free on the GPU"
    free = facts.host.free_memory_bytes
    shared = f" / {made.ranks}" if made.world_size > 1 else ""
    return int(usable * free / made.world_size), f"90 % of {_gib(free)} free{shared}"


def list_ways(config: RunConfig, base: Setup, splits: list[Split], limit: int) -> list[Way]:
    """Every way that the explicit keys leave, in a fixed order. An explicit ``reshard`` implies fsdp.

    Left to auto, one process and ddp may free what they gather too: in mixed precision that is the bfloat16 copy.
    """
    parallel = config.parallel
    strategies: tuple[Strategy, ...]
    if parallel.strategy != "auto":
        strategies = (parallel.strategy,)
    elif parallel.reshard != "auto":
        strategies = ("fsdp",)
    else:
        strategies = ("one",) if base.world_size == 1 else ("ddp", "fsdp")
    recomputes: tuple[Recompute, ...] = ("none", "block") if parallel.recompute == "auto" else (parallel.recompute,)
    reshards = (False, True) if parallel.reshard == "auto" else (parallel.reshard,)
    ways = []
    for strategy, recompute, reshard, split in itertools.product(strategies, recomputes, reshards, splits):
        if strategy != "fsdp" and reshard and (parallel.reshard != "auto" or not base.is_mixed):
            continue  # nothing is gathered that could be freed
        setup = replace(base, strategy=strategy, reshard=reshard, recompute=recompute, micro_tokens=split.full_micro_tokens)
        ways.append(Way(strategy, reshard, recompute, split, MemoryEstimate(terms=estimate_terms(setup), limit=limit)))
    return ways


def choose_way(ways: list[Way], device: Device, share: float) -> Way | None:
    """The fastest within ``share`` of the limit; if there is none, the smallest one within the limit; else None.

    So explicit keys that leave one way are obeyed as long as the estimate is not over the limit itself.
    """
    safe = [way for way in ways if way.memory.total <= share * way.memory.limit]
    if safe:
        return min(safe, key=lambda way: way.slowness(device))
    smallest = min(ways, key=lambda way: (way.memory.total, way.slowness(device)))
    return smallest if smallest.memory.fits else None


def _base_setup(config: RunConfig, facts: Facts, made: Decisions) -> Setup:
    """What all ways share; the rest is put in for each."""
    return Setup(
        model=facts.model,
        num_adapter_parameters=count_adapter_parameters(config, facts.model),
        adapter_rank=config.method.rank,
        adapter_dropout=config.method.dropout > 0,
        device=made.device,
        world_size=made.world_size,
        strategy="one",
        reshard=False,
        recompute="none",
        compile=made.compile,
        compute_bytes=DTYPE_BYTES[made.compute],
        master_bytes=DTYPE_BYTES[made.master],
        frozen_bytes=DTYPE_BYTES[made.compute],
        micro_tokens=1,
        builds_mask=made.attention == "sdpa" and config.data.packing,
    )


def _candidate(way: Way, chosen: Way, device: Device, share: float) -> Candidate:
    return Candidate(
        strategy=way.strategy,
        recompute=way.recompute,
        reshard=way.reshard,
        micro=way.split.micro,
        memory=way.memory,
        chosen=way is chosen,
        reason="" if way is chosen else _why_lost(way, chosen, device, share),
    )


def _why_lost(way: Way, chosen: Way, device: Device, share: float) -> str:
    total, limit = way.memory.total, way.memory.limit
    if total > limit:
        return f"needs {_gib(total)} of {_gib(limit)}"
    if total > share * limit:
        return f"needs {_gib(total)}, over {share:.0%} of {_gib(limit)}: too near the limit for an estimate"
    mine, best = way.slowness(device), chosen.slowness(device)
    reasons = (
        "micro-batches too small to fill the device",
        "slower: recomputes activations, about a third more compute",
        "slower: gathers shards, though a copy fits",
        "slower: gathers weights once more in the backward pass",
        "slower: smaller micro-batches",
    )
    return next((reason for reason, a, b in zip(reasons, mine, best, strict=True) if a > b), "no faster than the chosen one")


def _why_way(config: RunConfig, facts: Facts, way: Way, made: Decisions, share: float, why_limit: str) -> list[str]:
    asked, ranks = config.parallel.strategy, made.ranks
    freed = "freed after the forward pass"
    meaning = {
        "one": "one process holds everything" + (f", the bfloat16 copy {freed}" if way.reshard else ""),
        "ddp": f"a copy on each of {ranks}" + (f", in bfloat16 {freed}" if way.reshard else ""),
        "fsdp": f"shards over {ranks}, gathered weights " + (freed if way.reshard else "kept"),
    }[way.strategy]
    memory = way.memory
    tight = f"; over {share:.0%} of it, so little is to spare" if memory.total > share * memory.limit else ""
    why = [
        f"strategy: {way.strategy}, {meaning}" + (", as asked" if asked != "auto" else ""),
        f"recompute: {'each block in the backward pass' if way.recompute == 'block' else 'nothing'}"
        + (
            ", as asked"
            if config.parallel.recompute != "auto"
            else ", as activations fit"
            if way.recompute == "none"
            else ", as they do not fit"
        ),
        f"memory: {_gib(memory.total)} of {_gib(memory.limit)} a rank ({why_limit}){tight}",
        _why_batch(config, facts, way.split, made),
    ]
    longest, positions = facts.data.max_length, facts.model.max_positions
    if positions and longest > positions:
        why.append(f"note: the longest row has {longest:,} tokens, more than the {positions:,} positions the model was made for")
    return why


def _why_batch(config: RunConfig, facts: Facts, split: Split, made: Decisions) -> str:
    auto = config.batch.rows == "auto" and config.batch.tokens is None
    if split.micro_rows:
        text = f"batch: {split.batch_rows} rows = {split.micro_rows} micro × {made.ranks} × {split.accumulation} accumulation"
    elif split.batch_tokens:
        text = f"batch: at least {split.batch_tokens:,} trained tokens, in packs of {split.micro_tokens:,} tokens over {made.ranks}"
    else:
        about = (split.batch_rows or 0) * facts.data.mean_length
        text = f"batch: {split.batch_rows} rows ≈ {about:,.0f} tokens, in packs of {split.micro_tokens:,} over {made.ranks}"
        if (split.batch_rows or 0) < made.world_size:
            text += " (fewer rows than ranks: some idle)"
    return text + (" (auto)" if auto else "")


def _nothing_fits(config: RunConfig, ways: list[Way], made: Decisions, why_limit: str) -> UserError:
    """The smallest way's bytes against the limit, its largest terms, and what would make it smaller."""
    smallest = min(ways, key=lambda way: way.memory.total)
    memory, parallel, batch = smallest.memory, config.parallel, config.batch
    advice = []
    explicit = (
        ("parallel.strategy", parallel.strategy),
        ("parallel.recompute", parallel.recompute),
        ("parallel.reshard", parallel.reshard),
    )
    freed = [f"{key}: auto" for key, value in explicit if value not in ("auto", "fsdp", "block", True)]
    if freed:
        advice.append("let the plan choose (" + ", ".join(freed) + ")")
    if "auto" not in (batch.micro_tokens if config.data.packing else batch.micro_rows,):
        advice.append("give a smaller micro-batch")
    if config.method.name == "full":
        advice.append("use method.name=lora")
    if config.data.max_length > 512:
        advice.append("shorten the rows (data.max_length)")
    advice.append("use more GPUs or ones with more memory" if parallel.device != "cpu" else "use a machine with more memory")
    how = f"{smallest.strategy}, recompute {smallest.recompute}, {smallest.split.full_micro_tokens:,} tokens a micro-batch"
    terms = sorted(memory.terms.items(), key=lambda term: -term[1])
    return UserError(
        f"the run does not fit: its smallest form needs {_gib(memory.total)} a rank, and there are {_gib(memory.limit)}",
        where=f"{made.ranks}: {how}",
        why=f"the limit is {why_limit}; the estimate by term:",
        fix=", or ".join(advice),
        details=[f"{name}: {_gib(size)}" for name, size in terms if size],
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
