"""The layouts that could carry out a run: which there are, what each needs, which is chosen. Pure; explains nothing.

The order of speed, simple and stated: micro-batches too small to fill the device come last; keeping activations beats
computing cheap operations again, which beats computing blocks again (a third more compute); a copy a GPU beats a copy a
machine, which beats shards over all; shards whose gathered weights are kept beat ones that are gathered twice; then the
larger micro-batch wins, and then results of attention that are kept. At last the chosen one spends what memory is left
on lighter activation checkpointing (``lighten``).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from manyhands.config.schema import RunConfig
from manyhands.facts.types import Facts
from manyhands.plan.batch import BatchSplit
from manyhands.plan.choices import Decisions
from manyhands.plan.clock import Clock
from manyhands.plan.estimate_input import EstimateInput
from manyhands.plan.hardware import ranks_per_machine
from manyhands.plan.layout import Checkpointing, Layout, Strategy, change, mesh_of
from manyhands.plan.memory import estimate_host_terms, estimate_terms, keep_on_device
from manyhands.plan.types import Candidate, MemoryEstimate

ENOUGH_TOKENS = {"cuda": 2_048, "cpu": 256}  # a smaller micro-batch leaves the device idle
FULL_SPEED_TOKENS = (
    4_096  # no smaller micro-batch is chosen so that fewer blocks are computed again; a guess, not measured
)
USABLE_SHARE = {"cuda": 0.97, "cpu": 0.9}  # of the free memory: the limit
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "except_attention", "full")  # the fastest first
RECOMPUTED: dict[Checkpointing, int] = {"none": 0, "selective": 1, "except_attention": 2, "full": 2}
SHARDING: dict[Strategy, int] = {"single": 0, "ddp": 0, "hsdp": 1, "fsdp": 2}  # how far gathered weights travel


@dataclass(frozen=True)
class Limits:
    """Bytes that a rank may use on its device, and, where that is a GPU, of its machine's memory for what is
    offloaded.
    """

    device: int
    host: int | None
    free_bytes: int
    num_local: int  # ranks that share the host's memory
    clock: Clock | None = None  # None: nothing is said of time

    def judge(self, base: EstimateInput, layout: Layout) -> Candidate:
        """The layout with what it needs; ``base`` is the estimate input of any layout of the run."""
        asked = replace(base, layout=layout)
        terms = estimate_terms(asked)
        memory = MemoryEstimate(terms=terms, limit=self.device)
        if self.host is not None and asked.offloads:
            host, kept = estimate_host_terms(asked, terms), keep_on_device(asked, terms)
            memory = MemoryEstimate(terms=kept, limit=self.device, host_terms=host, host_limit=self.host)
        step_s = sum(self.clock.terms(asked).values()) if self.clock is not None else None
        return Candidate(layout=layout, memory=memory, step_s=step_s and float(f"{step_s:.6g}"))


def slowness(candidate: Candidate) -> tuple[bool, int, int, int, bool, int, bool]:
    """Smaller is faster; compared from left to right."""
    layout = candidate.layout
    return (
        layout.full_micro_tokens < ENOUGH_TOKENS[layout.device],
        RECOMPUTED[layout.activation_checkpointing],
        -layout.lighter_layers,
        SHARDING[layout.strategy],
        layout.reshard_after_forward,
        -layout.full_micro_tokens,
        # Last: attention's share of a block is small unless samples are long, and then one fills a micro-batch anyway.
        layout.activation_checkpointing == "full",
    )


def memory_limits(config: RunConfig, facts: Facts, made: Decisions) -> Limits:
    """97 % of what is free on the fullest GPU, or 90 % of the free host memory shared out; the latter for what is
    offloaded too.
    """
    free_host = facts.host.free_memory_bytes
    num_local = ranks_per_machine(facts, made.device, made.world_size)
    if made.device == "cuda":
        free = min(gpu.free_bytes for gpu in made.gpus)
        usable_host = int(USABLE_SHARE["cpu"] * free_host) // num_local
        return Limits(int(USABLE_SHARE["cuda"] * free), usable_host, free, num_local)
    return Limits(int(USABLE_SHARE["cpu"] * free_host / num_local), None, free_host, num_local)


def list_candidates(
    config: RunConfig,
    base: EstimateInput,
    splits: list[BatchSplit],
    limits: Limits,
    shard_degree: int,
    num_machines: int,
) -> list[Candidate]:
    """Every layout that the explicit keys leave, in a fixed order. An explicit ``reshard_after_forward`` implies fsdp.

    Left to auto, one process and ddp may free what they gather too: in mixed precision that is the bfloat16 copy.
    """
    parallel, world_size = config.parallel, base.layout.world_size
    modes = CHECKPOINTING if parallel.activation_checkpointing == "auto" else (parallel.activation_checkpointing,)
    reshards = (False, True) if parallel.reshard_after_forward == "auto" else (parallel.reshard_after_forward,)
    strategies = _strategies(config, world_size, shard_degree, num_machines)
    candidates = []
    for strategy, mode, reshard, split in itertools.product(strategies, modes, reshards, splits):
        unsharded = strategy in ("single", "ddp")
        if unsharded and reshard and (parallel.reshard_after_forward != "auto" or not base.gathers_whole):
            continue  # nothing is gathered that could be freed
        layout = change(
            base.layout,
            mesh=mesh_of(strategy, world_size, shard_degree),
            strategy=strategy,
            reshard_after_forward=reshard,
            activation_checkpointing=mode,
            offload_activations=parallel.offload_activations is True,
            micro_samples=split.micro_samples,
            micro_tokens=split.micro_tokens,
            pack_tokens=split.pack_tokens,
            accumulation=split.accumulation,
            full_micro_tokens=split.full_micro_tokens,
            accumulates=split.accumulates,
        )
        candidate = limits.judge(base, layout)
        if parallel.offload_activations == "auto":
            candidate = _move_activations(candidate, base, limits)
        candidates.append(candidate)
    return candidates


def _move_activations(candidate: Candidate, base: EstimateInput, limits: Limits) -> Candidate:
    """The same with activations in host memory, where blocks are computed again anyway, it frees memory and the host
    has room.

    Then only the blocks' inputs travel, each while a block computes: 64 MiB in some 20 ms for 8B and 8,192 tokens.
    Measured on one H200, 8B LoRA: 18.8 to 17.5 GiB at 0.7 % less speed, each against the same run without it on the
    same machine (docs/speed-log.md).
    """
    if candidate.layout.activation_checkpointing not in ("except_attention", "full") or limits.host is None:
        return candidate
    moved = limits.judge(base, change(candidate.layout, offload_activations=True))
    return moved if moved.memory.fits_host and moved.memory.total < candidate.memory.total else candidate


def _strategies(config: RunConfig, world_size: int, shard_degree: int, num_machines: int) -> tuple[Strategy, ...]:
    parallel = config.parallel
    if parallel.strategy != "auto":
        return (parallel.strategy,)
    if parallel.reshard_after_forward != "auto":
        return ("fsdp",)
    if world_size == 1:
        return ("single",)
    copies: tuple[Strategy, ...] = () if parallel.offload == "all" else ("ddp",)
    a_copy_a_machine: tuple[Strategy, ...] = ("hsdp",) if num_machines > 1 and 1 < shard_degree < world_size else ()
    return (*copies, *a_copy_a_machine, "fsdp")


def choose_candidate(candidates: list[Candidate], share: float) -> Candidate | None:
    """The fastest within ``share`` of the limit; if there is none, the smallest one within the limit; else None.

    So explicit keys that leave one layout are obeyed as long as the estimate is not over the limit itself.
    """
    safe = [candidate for candidate in candidates if candidate.is_safe(share)]
    if safe:
        return min(safe, key=slowness)
    fitting = [candidate for candidate in candidates if candidate.memory.fits]
    return min(fitting, key=lambda c: (c.memory.total, slowness(c))) if fitting else None


def reduce_once(candidate: Candidate, base: EstimateInput, limits: Limits, share: float) -> Candidate:
    """The same with sharded gradients reduced once a step, where unsharded ones fit on every rank until then; else
    itself.

    Nothing changes for copies, and where a step is one micro-batch.
    """
    if candidate.layout.mesh.shard == 1 or not candidate.layout.accumulates:
        return candidate
    once = limits.judge(base, change(candidate.layout, reduce_every=False))
    return once if once.is_safe(share) else candidate


def lighten(
    config: RunConfig, chosen: Candidate, candidates: list[Candidate], base: EstimateInput, limits: Limits, share: float
) -> Candidate:
    """The chosen candidate with the next lighter activation checkpointing in as many of the last layers as fit, if
    these are an eighth at least; else itself, and so where keys give the mode or move activations off the device.

    A block that is not computed again saves a quarter of its compute, so where nothing travels with a micro-batch
    smaller ones that leave room for more such blocks are preferred, down to 4,096 tokens. Activations then stay on the
    device.
    """
    mode = chosen.layout.activation_checkpointing
    if (
        mode == "none"
        or config.parallel.activation_checkpointing != "auto"
        or config.parallel.offload_activations is True
    ):
        return chosen
    rivals = [chosen]
    if mode in ("except_attention", "full") and chosen.layout.mesh.shard == 1:
        most = chosen.layout.full_micro_tokens
        rivals += [
            candidate
            for candidate in candidates
            if is_alike(candidate.layout, chosen.layout)
            and FULL_SPEED_TOKENS <= candidate.layout.full_micro_tokens < most
        ]
    lightest = max((_lighten(rival, base, limits, share) for rival in rivals), key=lambda c: c.layout.lighter_layers)
    return lightest if lightest.layout.lighter_layers >= base.model.num_layers / 8 else chosen


def is_alike(one: Layout, other: Layout) -> bool:
    """The same but for the sizes of micro-batches and what follows from them."""
    names = ("strategy", "activation_checkpointing", "reshard_after_forward")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def _lighten(candidate: Candidate, base: EstimateInput, limits: Limits, share: float) -> Candidate:
    for count in range(base.model.num_layers - 1, 0, -1):
        lighter = limits.judge(base, change(candidate.layout, lighter_layers=count, offload_activations=False))
        if lighter.is_safe(share):
            return lighter
    return candidate
