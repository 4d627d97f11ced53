"""The ways to carry out a run: which there are, what each needs, which is chosen. Pure; explains nothing.

The order of speed, simple and stated: micro-batches too small to fill the device come last; keeping activations beats
repeating cheap operations, which beats recomputing blocks (a third more compute); a copy a GPU beats a copy a machine,
which beats shards over all; shards whose gathered weights are kept beat ones that are gathered twice; then the larger
micro-batch wins. At last the chosen way spends what memory is left on blocks that are recomputed less (``lighten``).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from manyhands.config.schema import RunConfig
from manyhands.facts.types import Facts
from manyhands.plan.batch import Split
from manyhands.plan.choices import Decisions, Device, ranks_per_machine
from manyhands.plan.host import estimate_host_terms, keep_on_device
from manyhands.plan.memory import GIB, estimate_terms
from manyhands.plan.setup import Setup
from manyhands.plan.types import Checkpointing, MemoryEstimate, Strategy

ENOUGH_TOKENS = {"cuda": 2_048, "cpu": 256}  # a smaller micro-batch leaves the device idle
FULL_SPEED_TOKENS = 4_096  # no smaller micro-batch is chosen to recompute fewer blocks; a guess, not measured
USABLE_SHARE = {"cuda": 0.97, "cpu": 0.9}  # of the free memory: the limit
RECOMPUTES: tuple[Checkpointing, ...] = ("none", "selective", "full")  # the fastest first
SHARDING: dict[Strategy, int] = {"single": 0, "ddp": 0, "hsdp": 1, "fsdp": 2}  # how far gathered weights travel


@dataclass(frozen=True)
class Limits:
    """Bytes that a rank may use on its device, and, where that is a GPU, of its machine's memory for what is
    offloaded.
    """

    device: int
    host: int | None
    why: str

    def estimate(self, setup: Setup) -> MemoryEstimate:
        terms = estimate_terms(setup)
        if self.host is None or not setup.offloads:
            return MemoryEstimate(terms=terms, limit=self.device)
        host = estimate_host_terms(setup, terms)
        return MemoryEstimate(
            terms=keep_on_device(setup, terms), limit=self.device, host_terms=host, host_limit=self.host
        )


@dataclass(frozen=True)
class Way:
    """One candidate before it is judged."""

    setup: Setup
    split: Split
    memory: MemoryEstimate

    @property
    def strategy(self) -> Strategy:
        return self.setup.strategy

    @property
    def activation_checkpointing(self) -> Checkpointing:
        return self.setup.activation_checkpointing

    @property
    def reshard_after_forward(self) -> bool:
        return self.setup.reshard_after_forward

    def slowness(self, device: Device) -> tuple[bool, int, int, int, bool, int]:
        """Smaller is faster; compared from left to right."""
        too_small = self.split.full_micro_tokens < ENOUGH_TOKENS[device]
        recomputed = RECOMPUTES.index(self.activation_checkpointing), -self.setup.lighter_layers
        return (
            too_small,
            *recomputed,
            SHARDING[self.strategy],
            self.reshard_after_forward,
            -self.split.full_micro_tokens,
        )

    def is_safe(self, share: float) -> bool:
        return self.memory.total <= share * self.memory.limit and self.memory.fits_host


def memory_limits(config: RunConfig, facts: Facts, made: Decisions) -> Limits:
    """97 % of what is free on the fullest GPU, or 90 % of the free host memory shared out; the latter for what is
    offloaded too.
    """
    free_host = facts.host.free_memory_bytes
    usable_host, num_local = (
        int(USABLE_SHARE["cpu"] * free_host),
        ranks_per_machine(facts, made.device, made.world_size),
    )
    if made.device == "cuda":
        free = min(gpu.free_bytes for gpu in made.gpus)
        return Limits(
            int(USABLE_SHARE["cuda"] * free), usable_host // num_local, f"97 % of {free / GIB:.1f} GiB free on the GPU"
        )
    shared = (
        ""
        if num_local == 1
        else f" / {made.ranks}"
        if num_local == made.world_size
        else f" / {num_local} of {made.ranks}"
    )
    return Limits(
        int(USABLE_SHARE["cpu"] * free_host / num_local), None, f"90 % of {free_host / GIB:.1f} GiB free{shared}"
    )


def list_ways(config: RunConfig, base: Setup, splits: list[Split], limits: Limits, num_machines: int = 1) -> list[Way]:
    """Every way that the explicit keys leave, in a fixed order. An explicit ``reshard`` implies fsdp.

    Left to auto, one process and ddp may free what they gather too: in mixed precision that is the bfloat16 copy.
    """
    parallel = config.parallel
    recomputes = RECOMPUTES if parallel.activation_checkpointing == "auto" else (parallel.activation_checkpointing,)
    reshards = (False, True) if parallel.reshard_after_forward == "auto" else (parallel.reshard_after_forward,)
    ways = []
    for strategy, recompute, reshard, split in itertools.product(
        _strategies(config, base, num_machines), recomputes, reshards, splits
    ):
        whole = strategy in ("single", "ddp")
        if whole and reshard and (parallel.reshard_after_forward != "auto" or not base.gathers_whole):
            continue  # nothing is gathered that could be freed
        setup = replace(
            base,
            strategy=strategy,
            reshard_after_forward=reshard,
            activation_checkpointing=recompute,
            micro_tokens=split.full_micro_tokens,
            accumulates=not split.is_single,
            offload_activations=parallel.offload_activations is True,
        )
        way = Way(setup, split, limits.estimate(setup))
        ways.append(_move_activations(way, limits) if parallel.offload_activations == "auto" else way)
    return ways


def _move_activations(way: Way, limits: Limits) -> Way:
    """The same way with activations in host memory, where blocks are recomputed anyway, it frees memory and the host
    has room.

    Then only the blocks' inputs travel, each while a block computes: 64 MiB in some 20 ms for 8B and 8,192 tokens.
    Measured on one H200, 8B LoRA: 18.8 to 17.5 GiB at 0.7 % less speed, each beside the plain row of its lease
    (docs/speed-log.md).
    """
    if way.activation_checkpointing != "full" or limits.host is None:
        return way
    setup = replace(way.setup, offload_activations=True)
    moved = replace(way, setup=setup, memory=limits.estimate(setup))
    return moved if moved.memory.fits_host and moved.memory.total < way.memory.total else way


def _strategies(config: RunConfig, base: Setup, num_machines: int) -> tuple[Strategy, ...]:
    parallel = config.parallel
    if parallel.strategy != "auto":
        return (parallel.strategy,)
    if parallel.reshard_after_forward != "auto":
        return ("fsdp",)
    if base.world_size == 1:
        return ("single",)
    whole: tuple[Strategy, ...] = () if parallel.offload == "all" else ("ddp",)
    a_copy_a_machine: tuple[Strategy, ...] = (
        ("hsdp",) if num_machines > 1 and 1 < base.shard_degree < base.world_size else ()
    )
    return (*whole, *a_copy_a_machine, "fsdp")


def choose_way(ways: list[Way], device: Device, share: float) -> Way | None:
    """The fastest within ``share`` of the limit; if there is none, the smallest one within the limit; else None.

    So explicit keys that leave one way are obeyed as long as the estimate is not over the limit itself.
    """
    safe = [way for way in ways if way.is_safe(share)]
    if safe:
        return min(safe, key=lambda way: way.slowness(device))
    fitting = [way for way in ways if way.memory.fits]
    return min(fitting, key=lambda way: (way.memory.total, way.slowness(device))) if fitting else None


def reduce_once(way: Way, limits: Limits, share: float) -> Way:
    """The same way with sharded gradients reduced once a step, where whole ones fit on every rank until then; else
    itself.

    Nothing changes for copies, and where a step is one micro-batch.
    """
    if way.setup.num_shards == 1 or way.split.is_single:
        return way
    setup = replace(way.setup, reduce_every=False)
    once = replace(way, setup=setup, memory=limits.estimate(setup))
    return once if once.is_safe(share) else way


def lighten(config: RunConfig, chosen: Way, ways: list[Way], limits: Limits, share: float) -> Way:
    """The chosen way with as many of the last blocks as fit recomputed the next lighter way, if these are an eighth at
    least; else itself, and so where keys say how blocks are recomputed or that activations leave the device.

    A block that is not recomputed whole saves a quarter of its compute, so where nothing travels with a micro-batch
    smaller ones that leave room for more such blocks are preferred, down to 4,096 tokens. Activations then stay on the
    device.
    """
    if (
        chosen.activation_checkpointing == "none"
        or config.parallel.activation_checkpointing != "auto"
        or config.parallel.offload_activations is True
    ):
        return chosen
    rivals = [chosen]
    if chosen.activation_checkpointing == "full" and chosen.setup.num_shards == 1:
        alike = [
            way
            for way in ways
            if (way.strategy, way.activation_checkpointing, way.reshard_after_forward)
            == (chosen.strategy, "full", chosen.reshard_after_forward)
        ]
        rivals += [
            way for way in alike if FULL_SPEED_TOKENS <= way.split.full_micro_tokens < chosen.split.full_micro_tokens
        ]
    lightest = max((_lighten(way, limits, share) for way in rivals), key=lambda way: way.setup.lighter_layers)
    return lightest if lightest.setup.lighter_layers >= lightest.setup.model.num_layers / 8 else chosen


def _lighten(way: Way, limits: Limits, share: float) -> Way:
    for count in range(way.setup.model.num_layers - 1, 0, -1):
        setup = replace(way.setup, lighter_layers=count, offload_activations=False)
        lighter = replace(way, setup=setup, memory=limits.estimate(setup))
        if lighter.is_safe(share):
            return lighter
    return way
