"""The layouts that could carry out a run: which there are, what each needs and takes, which is chosen, why others
were not. Pure.

The fastest by the estimated seconds of a step is chosen (``time/clock.py``); of those as fast within 0.5 % the one that
needs the least memory, if that spares a twentieth. Each first uses the memory that is left: unsharded gradients wait
for the last micro-batch (``defer_reduction``), and as many of the last layers as fit have lighter activation
checkpointing (``relax_checkpointing``). What the chosen one leaves then goes to transposed values of frozen experts
(``keep_transposed``).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.core.limits import MAX_EXPERT_RANK, MLP_TILE_TOKENS
from manyhands.facts.types import Facts
from manyhands.planner.batch import BatchSplit, ceil_div
from manyhands.planner.choices import Decisions
from manyhands.planner.hardware import ranks_per_machine
from manyhands.planner.layout import (
    LIGHTER,
    WHOLE_BLOCKS,
    ZERO_STAGES,
    Checkpointing,
    Layout,
    Strategy,
    change,
    mesh_of,
)
from manyhands.planner.memory.activations import can_tile
from manyhands.planner.memory.host import estimate_host_terms, keep_on_device
from manyhands.planner.memory.input import EstimateInput
from manyhands.planner.memory.terms import estimate_terms
from manyhands.planner.time.clock import Clock, pack_tile
from manyhands.planner.types import Candidate, MemoryEstimate, OutOfMemory, Reason, reason

SAME_SPEED = 0.005  # share of a step that the estimate cannot tell apart: of pairs of layouts it is off by 0.8 %
GRAPHS_GAIN = 0.05  # share of a step for which blocks are launched as CUDA graphs
GAIN = 0.002  # share of a step for which memory that is left is spent
MIN_MEMORY_SAVING = 0.05  # share of memory for which one as fast takes the place of the fastest
USABLE_SHARE = {"cuda": 0.97, "cpu": 0.9}  # of the free memory: the limit
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "except_attention", "full")  # the fastest first
RECOMPUTED: dict[Checkpointing, int] = {"none": 0, "selective": 1, "except_attention": 2, "full": 2}
# Share of the limit that a plan leaves free, by how far measured runs came to lie above their estimates
# (docs/planner-accuracy.md): where a rank holds whole weights, where shards, and where modules or dtypes of a kind
# that few rows cover are trained.
MARGINS = {"whole": 0.02, "shards": 0.03, "few_rows": 0.05, "cpu": 0.08}
SHARDING: dict[Strategy, int] = {"single": 0, "ddp": 0, "hsdp": 1, "fsdp": 2, "zero1": 3, "zero2": 3, "zero3": 3}
# how far gathered weights travel; ZeRO is a candidate where it was asked for, and then alone


@dataclass(frozen=True)
class Limits:
    """Bytes that a rank may use on its device, and, where that is a GPU, of its machine's memory for what is
    offloaded.
    """

    device: int
    host: int | None
    free_bytes: int
    num_local: int  # ranks that share the host's memory
    clock: Clock | None = None  # None: seconds are not estimated

    def evaluate(self, base: EstimateInput, layout: Layout) -> Candidate:
        """The layout with what it needs; ``base`` is the estimate input of any layout of the run."""
        asked = replace(base, layout=layout)
        terms = estimate_terms(asked)
        margin = margin_of(asked)
        memory = MemoryEstimate(terms=terms, limit=self.device, margin=margin)
        if self.host is not None and asked.offloads:
            host, kept = estimate_host_terms(asked, terms), keep_on_device(asked, terms)
            memory = MemoryEstimate(terms=kept, limit=self.device, margin=margin, host_terms=host, host_limit=self.host)
        step_s = sum(self.clock.terms(asked).values()) if self.clock is not None else None
        return Candidate(layout=layout, memory=memory, step_s=step_s and float(f"{step_s:.6g}"))

    def evaluate_memory(self, base: EstimateInput, layout: Layout) -> Candidate:
        """The same without its seconds, which take five times as long to estimate where lengths are mixed."""
        return replace(self, clock=None).evaluate(base, layout)


def margin_of(s: EstimateInput) -> float:
    """``MARGINS``, of the limit."""
    if s.layout.device == "cpu":
        return MARGINS["cpu"]
    rare = s.fp8_blocks or s.offloads or s.layout.mlp_tile_tokens or s.partially_trained is not None
    if rare or not s.layout.compile:
        return MARGINS["few_rows"]
    return MARGINS["shards" if s.num_shards > 1 else "whole"]


def differences(candidate: Candidate) -> tuple[int, int, int, bool, int, bool]:
    """What makes a layout slow, each the more the slower: what is computed again, how many layers so, how far weights
    travel and how often, the size of micro-batches, attention.
    """
    layout = candidate.layout
    return (
        RECOMPUTED[layout.activation_checkpointing],
        -layout.lighter_layers,
        SHARDING[layout.strategy],
        layout.reshard_after_forward,
        -layout.full_micro_tokens,
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
    *,
    tiles: bool = False,
) -> list[Candidate]:
    """Every layout that the explicit keys leave, in a fixed order; without seconds where none fits. An explicit
    ``reshard_after_forward`` implies fsdp. Where none leaves its margin free, or with ``tiles``, those whose MLPs are
    computed by tiles of the sequence follow.

    Left to auto, one process and ddp may free what they gather too: in mixed precision that is the bfloat16 copy.
    """
    parallel, world_size, context = config.parallel, base.layout.world_size, config.parallel.context_ranks
    modes = CHECKPOINTING if parallel.activation_checkpointing == "auto" else (parallel.activation_checkpointing,)
    reshards = (False, True) if parallel.reshard_after_forward == "auto" else (parallel.reshard_after_forward,)
    strategies = _strategies(config, world_size, shard_degree, num_machines)
    if parallel.strategy in ZERO_STAGES:
        reshards = (parallel.strategy == "zero3",)
    divided = base.layout.expert_degree > 1
    if parallel.strategy == "zero3" or (divided and parallel.compile is True):
        modes = tuple(mode for mode in modes if mode in WHOLE_BLOCKS)
    layouts = []
    for strategy, mode, reshard, split in itertools.product(strategies, modes, reshards, splits):
        unsharded = strategy in ("single", "ddp")
        if unsharded and reshard and (parallel.reshard_after_forward != "auto" or not base.gathers_whole):
            continue  # nothing is gathered that could be freed
        layout = change(
            base.layout,
            mesh=mesh_of(strategy, world_size, shard_degree, context),
            strategy=strategy,
            reshard_after_forward=reshard,
            activation_checkpointing=mode,
            compile=base.layout.compile and (not divided or mode in WHOLE_BLOCKS),
            reduce_every=strategy != "zero1",
            offload_activations=parallel.offload_activations is True,
            micro_samples=split.micro_samples,
            micro_tokens=split.micro_tokens,
            pack_tokens=split.pack_tokens,
            accumulation=split.accumulation,
            full_micro_tokens=ceil_div(split.full_micro_tokens, context),
            accumulates=split.accumulates,
        )
        if context > 1 and split.pack_tokens is not None:
            tile = pack_tile(layout)
            packed = ceil_div(split.pack_tokens, tile) * tile
            layout = change(layout, pack_tokens=packed, full_micro_tokens=packed // context)
        layouts.append(layout)
    candidates = [_evaluate(config, layout, base, limits) for layout in layouts]
    if tiles or not any(candidate.memory.is_safe for candidate in candidates):
        tileable = [layout for layout in layouts if can_tile(replace(base, layout=layout))]
        tiled = (change(layout, mlp_tile_tokens=MLP_TILE_TOKENS) for layout in tileable)
        candidates += [_evaluate(config, layout, base, limits) for layout in tiled]
    if any(candidate.memory.fits for candidate in candidates):
        return [limits.evaluate(base, candidate.layout) for candidate in candidates]
    return candidates


def _evaluate(config: RunConfig, layout: Layout, base: EstimateInput, limits: Limits) -> Candidate:
    """The layout, with activations in host memory where that is left to the plan, frees memory and the host has room;
    with those of some blocks where not even its own memory would do.
    """
    candidate = limits.evaluate_memory(base, layout)
    moved = move_activations(layout, base, limits) if config.parallel.offload_activations == "auto" else None
    if moved is None or not moved.memory.fits_host or (moved.layout.layers_on_device and candidate.memory.is_safe):
        return candidate
    return moved if moved.memory.total < candidate.memory.total else candidate


def move_activations(layout: Layout, base: EstimateInput, limits: Limits) -> Candidate | None:
    """The same with activations in host memory, where blocks are computed again anyway and there is a host beside the
    device. Where the host has no room for all, those of as many of the last blocks stay as the device holds with its
    margin free: the fewest move. Where these are still too many, and MLPs are computed by tiles already, the fewest
    inputs that do are computed again, each for a block's forward pass.

    Then only the blocks' inputs travel, each while a block computes: 64 MiB in some 20 ms for 8B and 8,192 tokens.
    Measured on one H200, 8B LoRA: 18.8 to 17.5 GiB at 0.7 % less speed, each against the same run without it on the
    same machine (docs/lab/speed.md).
    """
    if layout.activation_checkpointing not in ("except_attention", "full") or limits.host is None:
        return None
    num_layers = base.model.num_layers

    def move_fewest(repeated: int) -> Candidate:
        changes = {"offload_activations": True, "repeated_inputs": repeated}
        moved = limits.evaluate_memory(base, change(layout, **changes))
        fits, fails = 0, num_layers * (not moved.memory.fits_host)
        while fits + 1 < fails:
            staying = (fits + fails) // 2
            tried = limits.evaluate_memory(base, change(layout, **changes, layers_on_device=staying))
            if tried.memory.leaves_margin:
                moved, fits = tried, staying
            else:
                fails = staying
        return moved

    moved = move_fewest(0)
    if moved.memory.fits_host or not layout.mlp_tile_tokens or layout.wrapper not in ("none", "ddp"):
        return moved
    too_few, enough = 0, num_layers // 2
    most = move_fewest(enough)
    if not most.memory.is_safe:
        return most if most.memory.leaves_margin else moved
    while too_few + 1 < enough:
        tried = move_fewest((too_few + enough) // 2)
        if tried.memory.is_safe:
            most, enough = tried, tried.layout.repeated_inputs
        else:
            too_few = tried.layout.repeated_inputs
    return most


def _strategies(config: RunConfig, world_size: int, shard_degree: int, num_machines: int) -> tuple[Strategy, ...]:
    parallel = config.parallel
    if parallel.strategy != "auto":
        return (parallel.strategy,)
    if parallel.reshard_after_forward != "auto":
        return ("fsdp",)
    if world_size == 1:
        return ("single",)
    copies: tuple[Strategy, ...] = () if parallel.offload == "all" else ("ddp",)
    if config.model.frozen_dtype == "fp8":
        return copies
    several = num_machines > 1 and shard_degree % parallel.context_ranks == 0
    a_copy_a_machine: tuple[Strategy, ...] = ("hsdp",) if several and 1 < shard_degree < world_size else ()
    return (*copies, *a_copy_a_machine, "fsdp")


def choose_candidate(
    config: RunConfig, candidates: list[Candidate], base: EstimateInput, limits: Limits
) -> tuple[Candidate, Candidate] | None:
    """The fastest that leaves its margin free, as listed and with what memory it leaves spent; if there is none, the
    smallest one within the limit; else None.

    So explicit keys that leave one layout are obeyed as long as the estimate is not over the limit itself.
    """
    spent = [(c, use_spare_memory(config, c, base, limits)) for c in candidates if c.memory.is_safe]
    if config.parallel.cuda_graphs is True:
        spent = [pair for pair in spent if pair[1].layout.cuda_graphs] or spent
    if spent:
        fastest = min(spent, key=lambda pair: (seconds_of(pair[1]), pair[1].memory.total))
        as_fast = [pair for pair in spent if not is_faster(fastest[1], pair[1], SAME_SPEED)]
        smallest = min(as_fast, key=lambda pair: (pair[1].memory.total, seconds_of(pair[1])))
        spares = smallest[1].memory.total < (1 - MIN_MEMORY_SAVING) * fastest[1].memory.total
        listed, spent_on = smallest if spares else fastest
        return listed, keep_transposed(spent_on, base, limits)
    fitting = [candidate for candidate in candidates if candidate.memory.fits]
    least = min(fitting, key=lambda c: (c.memory.total, seconds_of(c)), default=None)
    return None if least is None else (least, least)


def seconds_of(candidate: Candidate) -> float:
    assert candidate.step_s is not None
    return candidate.step_s


def use_spare_memory(config: RunConfig, candidate: Candidate, base: EstimateInput, limits: Limits) -> Candidate:
    """The candidate with what memory it leaves spent on speed: first on unsharded gradients, or on lighter layers
    alone where these gain more by what the gradients would take.
    """
    once = defer_reduction(candidate, base, limits)
    spent = relax_checkpointing(config, once, base, limits)
    if once is not candidate:
        spent = min(spent, relax_checkpointing(config, candidate, base, limits), key=seconds_of)
    return use_graphs(config, spent, base, limits)


def use_graphs(config: RunConfig, candidate: Candidate, base: EstimateInput, limits: Limits) -> Candidate:
    """The candidate with its blocks launched as CUDA graphs and packs padded to one size, where that is possible and
    asked for, or faster by ``GRAPHS_GAIN``; else itself. Mixtures of experts have them only if asked for:
    none was measured.
    """
    layout, asked = candidate.layout, config.parallel.cuda_graphs
    if (
        not asked
        or (asked == "auto" and base.model.has_groups)
        or refuse_graphs(config, replace(base, layout=layout)) is not None
    ):
        return candidate
    tokens = layout.pack_tokens or layout.micro_tokens
    found = limits.evaluate(base, change(layout, cuda_graphs=True, dynamic=False, pack_tokens=tokens))
    wanted = asked is True or is_faster(found, candidate, GRAPHS_GAIN)
    return found if wanted and found.memory.is_safe else candidate


def refuse_graphs(config: RunConfig, s: EstimateInput, *, fits: bool = True) -> UserError | None:
    """The error of ``parallel.cuda_graphs: true`` where the layout of ``s`` cannot have them, or where they do not fit
    in memory; None where it can.

    Graphs need one shape, memory that stays where it is, kernels that no host code interrupts, and weights that are
    not gathered. Gradients that the next micro-batch would overwrite are copied out of a graph's memory.
    """
    layout = s.layout
    waits = s.model.has_groups and (layout.compute_dtype != "bfloat16" or s.adapter_rank > MAX_EXPERT_RANK)
    obstacles = {
        "there is no GPU": layout.device != "cuda",
        "blocks are not compiled": not layout.compile,
        "batches of preference tasks vary in shape": config.task == "preference",
        "weights that patterns select are trained": config.method.name == "patterns",
        "weights are sharded and gathered for each block": layout.wrapper not in ("none", "ddp"),
        "context parallelism communicates inside blocks": layout.mesh.context > 1,
        "adapters have dropout": s.adapter_dropout,
        "images pass through the model": s.images is not None,
        f"experts compute in {layout.compute_dtype}, or have adapters of a rank above {MAX_EXPERT_RANK}": waits,
        "experts are trained in full": s.model.has_groups and layout.trains_everything,
        "ranks exchange tokens inside blocks": layout.expert_degree > 1,
        "the model has recurrent layers (linear attention, state space or convolution)": s.model.num_mixer_layers > 0,
        "attention is computed in plain PyTorch or with a mask": s.attends_blockwise or s.builds_mask,
        "the loss needs additional forward passes": s.num_more_passes > 0,
        "samples differ in length and are not packed": layout.micro_tokens is None and layout.dynamic,
        "activations are recomputed": layout.activation_checkpointing != "none" or layout.mlp_tile_tokens > 0,
        "activations are kept in host memory": layout.offload_activations,
        "packs padded to one size would not fit in memory": not fits,
    }
    why = next((why for why, holds in obstacles.items() if holds), None)
    if why is None:
        return None
    return UserError(
        "blocks cannot be launched as CUDA graphs",
        where="parallel.cuda_graphs",
        why=why,
        fix="remove parallel.cuda_graphs, or set it to auto",
    )


def keep_transposed(candidate: Candidate, base: EstimateInput, limits: Limits) -> Candidate:
    """The candidate with frozen experts in fp8 kept transposed too, where it leaves the memory and is faster for it;
    else itself, and so where activations move off the device: there memory is wanted for something else.
    """
    layout = candidate.layout
    if layout.device != "cuda" or layout.offload_activations or not base.transposed_bytes:
        return candidate
    found = limits.evaluate(base, change(layout, keeps_transposed=True))
    return found if found.memory.is_safe and is_faster(found, candidate) else candidate


def defer_reduction(candidate: Candidate, base: EstimateInput, limits: Limits) -> Candidate:
    """The same with sharded gradients reduced once a step, where unsharded ones fit on every rank until then; else
    itself.

    Nothing changes for copies, and where a step is one micro-batch.
    """
    if candidate.layout.num_shards == 1 or not candidate.layout.accumulates or candidate.layout.zero_stage:
        return candidate
    once = limits.evaluate(base, change(candidate.layout, reduce_every=False))
    return once if once.memory.is_safe and not is_faster(candidate, once) else candidate


def relax_checkpointing(config: RunConfig, chosen: Candidate, base: EstimateInput, limits: Limits) -> Candidate:
    """The candidate with the next lighter activation checkpointing in as many of the last layers as fit, if these are
    an eighth at least, not all, and it is faster for it; else itself, and so where keys give the mode or move
    activations off the device. Activations then stay on the device; or where so few layers do not fit, and those of all
    were moved, those of the lighter layers alone.
    """
    asked = config.parallel
    if (
        chosen.layout.activation_checkpointing == "none"
        or asked.activation_checkpointing != "auto"
        or asked.offload_activations is True
        or chosen.layout.zero_stage == 3  # which does not compute selectively
        or chosen.layout.mlp_tile_tokens  # which nothing else fits than
        or (chosen.layout.compile and chosen.layout.expert_degree > 1)  # lighter layers would not be compiled
    ):
        return chosen
    uniform = change(
        chosen.layout,
        activation_checkpointing=LIGHTER[chosen.layout.activation_checkpointing],
        offload_activations=False,
        layers_on_device=0,
    )
    if limits.evaluate_memory(base, uniform).memory.is_safe:
        return chosen  # a candidate itself

    def lighten(count: int, *, moves: bool) -> Layout:
        staying = {"offload_activations": moves, "layers_on_device": count * moves}
        return change(chosen.layout, lighter_layers=count, **staying)

    eighth = max(1, -(-base.model.num_layers // 8))
    for moves in (False, True)[: 1 + chosen.layout.offload_activations]:
        fewest, most, found = eighth, base.model.num_layers - 1, None
        while fewest <= most:  # what a layer keeps only grows, so the largest number that fits is found by halves
            count = (fewest + most) // 2
            layout = lighten(count, moves=moves)
            if limits.evaluate_memory(base, layout).memory.is_safe:
                found, fewest = layout, count + 1
            else:
                most = count - 1
        if found is not None:
            lighter = limits.evaluate(base, found)
            return lighter if is_faster(lighter, chosen) else chosen
    return chosen


def is_faster(one: Candidate, other: Candidate, by: float = GAIN) -> bool:
    return seconds_of(one) < (1 - by) * seconds_of(other)


def is_alike(one: Layout, other: Layout) -> bool:
    """The same but for the sizes of micro-batches and what follows from them."""
    names = ("strategy", "activation_checkpointing", "mlp_tile_tokens", "reshard_after_forward")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def keeps_less_by_choice(chosen: Candidate, candidates: list[Candidate]) -> bool:
    """Whether lighter activation checkpointing fits too, in a layout that is otherwise the chosen one: it was no
    faster, and takes more memory.
    """
    best, names = chosen.layout, ("strategy", "reshard_after_forward", "full_micro_tokens", "micro_samples")
    return not best.lighter_layers and any(
        RECOMPUTED[other.layout.activation_checkpointing] < RECOMPUTED[best.activation_checkpointing]
        and all(getattr(other.layout, name) == getattr(best, name) for name in names)
        and other.memory.is_safe
        for other in candidates
    )


def with_reason(candidate: Candidate, chosen: Candidate, ran_out: OutOfMemory | None) -> Candidate:
    """The candidate marked as chosen, or with the reason why it was not. ``ran_out``: a plan that did, which all that
    are compared are smaller than.
    """
    if candidate is chosen:
        return candidate.model_copy(update={"chosen": True})
    return candidate.model_copy(update={"reason": _why_lost(candidate, chosen, ran_out)})


def _why_lost(candidate: Candidate, chosen: Candidate, ran_out: OutOfMemory | None) -> Reason:
    layout, memory = candidate.layout, candidate.memory
    total, limit = memory.total, memory.limit
    if ran_out is not None and total <= limit:
        return reason("not_next_smaller", plan=ran_out.number)
    if total > limit:
        return reason("exceeds_memory", bytes=total, limit=limit)
    if not memory.fits_host:
        return reason("exceeds_host_memory", bytes=memory.host_total, limit=memory.host_limit)
    if not memory.is_safe:
        return reason("near_limit", bytes=total, limit=limit, share=1 - memory.margin)
    slower = seconds_of(candidate) / seconds_of(chosen) - 1
    if slower <= SAME_SPEED:
        return reason("more_memory" if total > chosen.memory.total else "no_faster")
    reasons = (
        reason("computes_again", mode=layout.activation_checkpointing, slower=slower),
        reason("computes_more_again", slower=slower),
        reason("shards_needlessly", chosen=chosen.layout.strategy, slower=slower),
        reason("gathers_again", slower=slower),
        reason("smaller_micro_batch", slower=slower),
        reason("computes_attention_again", slower=slower),
    )
    pairs = zip(reasons, differences(candidate), differences(chosen), strict=True)
    found = next((found for found, mine, best in pairs if mine > best), None)
    if found is not None:
        return found
    if layout.offload_activations and chosen.layout.offload_activations:
        return reason("moves_more_activations", slower=slower)
    if layout.holds_copies and not chosen.layout.holds_copies:
        return reason("updates_copies", slower=slower)
    return reason("no_faster", slower=slower)
