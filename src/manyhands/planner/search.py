"""From a config and facts to a plan: every layout is estimated, all are kept, the fastest that fits is chosen.

``plan`` is a pure function: the same input gives the same plan, to the byte. Knows no torch, no files and no network.
The candidates and their order stand in ``candidates.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from manyhands import families
from manyhands.config.schema import RunConfig
from manyhands.config.tasks import TASKS
from manyhands.core.errors import UserError
from manyhands.facts.types import Facts
from manyhands.planner.advice import DOES_NOT_FIT, with_advice
from manyhands.planner.batch import BatchSplit, ceil_div, has_one_length, useful_splits
from manyhands.planner.candidates import (
    Limits,
    choose_candidate,
    keeps_less_by_choice,
    list_candidates,
    memory_limits,
    refuse_graphs,
    seconds_of,
    with_reason,
)
from manyhands.planner.checkpoints import Saving, choose_saving, space_checkpoints, staging
from manyhands.planner.checks import check_disk, estimate_disk, explain_samples, nothing_fits, warn_of_values
from manyhands.planner.choices import Decisions, decide, dequantize_experts, fuses_optimizer, resolve_auto
from manyhands.planner.context import choose_degree, list_degrees, with_degree
from manyhands.planner.converters import Case, choose_converters
from manyhands.planner.efficiency import with_efficiency
from manyhands.planner.experts import choose_expert_degree, fuses_experts
from manyhands.planner.features import Features, choose_features, explain_features, why_not_kept, with_features
from manyhands.planner.hardware import choose_environment, count_nodes, ranks_per_machine
from manyhands.planner.layout import DTYPE_BYTES, change, lay_out, mesh_of
from manyhands.planner.longest import LongestSample, find_longest
from manyhands.planner.memory.input import (
    LARGEST_LOAD,
    EstimateInput,
    count_adapter_parameters,
    count_expert_adapters,
    count_text,
    describe_images,
    with_towers,
)
from manyhands.planner.oom import choose_smaller, choose_within, explain_smaller, find_ran_out, nothing_smaller
from manyhands.planner.parts import explain_images, price_images, rate_parts
from manyhands.planner.prompts import choose_prompts
from manyhands.planner.reference import Reference, choose_reference
from manyhands.planner.steps import Steps, count_steps
from manyhands.planner.time.clock import estimate_time, explain_flash4, explain_links, make_clock
from manyhands.planner.types import (
    Candidate,
    Cause,
    DiskEstimate,
    MemoryFound,
    OutOfMemory,
    Plan,
    PlannedData,
    Reason,
    TimeEstimate,
    reason,
)


@dataclass(frozen=True)
class LaunchRequest:
    """Which launch of the run is planned, as in ``plan``."""

    number: int
    cause: Cause = "first"
    before: Plan | None = None
    found: MemoryFound | None = None


@dataclass(frozen=True)
class SearchResult:
    """What was compared and what was chosen. ``base`` is what all candidates share, ``split`` has their batch."""

    base: EstimateInput
    split: BatchSplit
    steps: Steps
    features: Features
    limits: Limits
    ran_out: OutOfMemory | None
    candidates: list[Candidate]
    chosen: Candidate
    reference: Reference
    why_reference: tuple[Reason, ...]

    @property
    def estimate_input(self) -> EstimateInput:
        return replace(self.base, layout=self.chosen.layout)


def plan(
    config: RunConfig,
    facts: Facts,
    *,
    number: int = 1,
    cause: Cause = "first",
    before: Plan | None = None,
    found: MemoryFound | None = None,
) -> Plan:
    """Decide everything for one launch.

    ``number`` counts the launches of the run, ``before`` is the plan of the last one. ``cause="out_of_memory"``: that
    one ran out, ``found`` is what was measured then, and this one is smaller, with the same global batch. UserError
    where keys contradict the facts (processes, batch, dtypes) or where nothing fits, then with changes that would;
    NothingSmaller where nothing is left to try.
    """
    try:
        return _plan(config, facts, LaunchRequest(number, cause, before, found))
    except UserError as error:
        if error.kind != DOES_NOT_FIT:
            raise
        raise with_advice(error, config, facts, lambda c, f: _plan(c, f, LaunchRequest(number))) from None


def plan_longest(config: RunConfig, facts: Facts) -> LongestSample:
    """The longest sample that fits, and its plan. UserError where no length does."""
    degrees = list_degrees(config, facts)
    return find_longest(config, facts, degrees, lambda c, f: _plan_divided(c, f, LaunchRequest(1), config.digest))


def _plan(config: RunConfig, facts: Facts, launch: LaunchRequest) -> Plan:
    def make_plan(experts: int) -> Plan:
        given = with_degree(config, experts, "expert_degree")

        def divide_packs(degree: int) -> Plan:
            return _plan_divided(with_degree(given, degree), facts, launch, config.digest)

        return choose_degree(given, facts, launch.cause, launch.before, divide_packs)

    return choose_expert_degree(resolve_auto(config, facts)[0], facts, launch.cause, make_plan)


def _plan_divided(config: RunConfig, facts: Facts, launch: LaunchRequest, digest: str) -> Plan:
    """The plan with a given degree of context parallelism; ``digest`` is that of the run's own config."""
    config, why_resolved = resolve_auto(config, facts)  # from here on no `auto`
    decisions = decide(config, facts)
    facts = dequantize_experts(config, facts)
    facts, shares_prompts, why_prompts = choose_prompts(config, facts, decisions.attention)
    result = _search(config, facts, decisions, launch)
    estimate_input = result.estimate_input

    def price(steps: Steps) -> tuple[DiskEstimate, Saving, TimeEstimate | None]:
        disk = estimate_disk(config, facts, estimate_input, steps, DTYPE_BYTES[decisions.output], result.features)
        saving = choose_saving(config, estimate_input, result.chosen.memory, disk, steps, result.limits.host)
        return (
            disk,
            saving,
            estimate_time(result.limits.clock, estimate_input, facts, steps, disk, beside=saving.is_async),
        )

    disk, saving, time = price(result.steps)
    staged = staging(estimate_input, disk.checkpoint_bytes) if saving.is_async else None
    steps = space_checkpoints(config, result.steps, time, staged, count_nodes(facts) or 1)
    disk, saving, time = price(steps)
    result = replace(result, steps=steps)
    zero = result.chosen.layout.zero_stage > 0
    environment = choose_environment(
        decisions.device, facts.host, result.limits.num_local, zero=zero, deterministic=config.kernels.deterministic
    )
    made = Plan(
        number=launch.number,
        cause=launch.cause,
        config_digest=digest,
        data_digest=facts.data.digest,
        data_content=facts.data.content,
        data_folder=facts.data.folder,
        model_folder=facts.model.folder,
        model_files=facts.model.files,
        keeps_base=config.method.name != "full" or facts.model.num_tower_parameters > 0,
        new_tokens=facts.new_tokens,
        adapter=facts.adapter,
        stored_nf4=facts.model.stored_nf4,
        parts=decisions.parts,
        keeps_features=result.features.kept,
        image_unit_cost=price_images(facts.model, decisions.parts),
        rated_parts=rate_parts(config, facts.model, decisions.parts),
        target_modules=None if config.method.target_modules == "all-linear" else config.method.target_modules,
        layout=result.chosen.layout,
        attention=decisions.attention,
        num_parameters=estimate_input.num_parameters,
        num_trained=estimate_input.num_trained,
        num_active=facts.model.num_active_parameters if facts.model.has_groups else 0,
        data=PlannedData(
            samples=facts.data.num_samples,
            tokens=facts.data.num_tokens,
            held_out=facts.data.num_validation_samples,
            truncated=facts.data.num_truncated,
            dropped=facts.data.num_dropped,
            split=facts.data.num_split,
            images=facts.data.num_images,
        ),
        reference=result.reference,
        packing=config.data.packing is True,
        shares_prompts=shares_prompts,
        batch_samples=result.split.batch_samples,
        batch_loss_tokens=result.split.batch_loss_tokens,
        batch_packs=result.split.batch_packs,
        batch_pack_tokens=config.data.max_length if result.split.batch_packs is not None else None,
        converters=_converters(config, facts, decisions),
        fuse_optimizer=fuses_optimizer(config, decisions.device),
        steps_per_epoch=steps.per_epoch,
        num_steps=steps.total,
        warmup_steps=steps.warmup,
        learning_rate=decisions.learning_rate,
        evaluate_every=steps.evaluate_every,
        checkpoint_every=steps.checkpoint_every,
        evaluate_per_epoch=steps.evaluate_per_epoch,
        checkpoint_per_epoch=steps.checkpoint_per_epoch,
        async_checkpoints=saving.is_async,
        output_dtype=decisions.output,
        memory=saving.memory,
        disk=disk,
        ran_out=result.ran_out,
        step_s=time.step_s if time is not None else None,
        time=time,
        environment=environment,
        candidates=tuple(with_reason(candidate, result.chosen, result.ran_out) for candidate in result.candidates),
        why=_explain(
            *(config, facts, decisions, result, disk, saving, why_resolved, why_prompts),
            reason("environment", **environment),
        ),
    )
    return with_efficiency(made, facts)


def _search(
    config: RunConfig, facts: Facts, decisions: Decisions, launch: LaunchRequest, obstacle: str = ""
) -> SearchResult:
    """Estimate every layout and choose one. ``obstacle``: why features of images are not kept, where something is known
    that stands against it.
    """
    num_ranks = decisions.world_size // config.parallel.context_ranks
    splits = useful_splits(config, facts.data, num_ranks, decisions.device)
    split = splits[0]
    batch = {  # which samples form a step; the same for every split
        "batch_samples": split.batch_samples,
        "batch_loss_tokens": split.batch_loss_tokens,
        "batch_packs": split.batch_packs,
        "pack_tokens": config.data.max_length if split.batch_packs is not None else None,
    }
    steps = count_steps(config, facts.data, split.batch_samples)
    limits = memory_limits(config, facts, decisions)
    clock = make_clock(config, facts, decisions, limits.num_local, batch | {"num_steps": steps.total})
    limits = replace(limits, clock=clock)
    passes, (reference, why_reference) = steps.total / steps.per_epoch, choose_reference(config, facts, steps)
    features = choose_features(config, facts, decisions.parts, DTYPE_BYTES[decisions.compute], passes, obstacle)
    terms, base = TASKS[config.task].make_terms(config), with_features(features, _base_input(config, facts, decisions))
    # answers' losses weigh what is known after them, so those of a trained head are not fused (``LossModel.answers``)
    fuses = base.fuse_loss and not (base.num_trained_in_head and any(term.compute is not None for term in terms))
    num_values = sum(term.value is not None for term in terms)
    base = replace(base, reference=reference, num_values=num_values, fuse_loss=fuses)
    num_machines = ceil_div(decisions.world_size, ranks_per_machine(facts, decisions.device, decisions.world_size))
    ran_out = find_ran_out(launch.cause, launch.before, decisions, limits, launch.found)
    degree, again = decisions.shard_degree, ran_out is not None
    candidates = list_candidates(config, base, splits, limits, degree, num_machines, tiles=again)
    chosen: Candidate | None
    if ran_out is not None:
        chosen = choose_within(config, candidates, base, limits, ran_out) or choose_smaller(candidates, ran_out)
        if chosen is None and any(candidate.memory.fits for candidate in candidates):
            raise nothing_smaller(config, ran_out, decisions)
    else:
        listed, chosen = choose_candidate(config, candidates, base, limits) or (None, None)
        if chosen is not None:
            at = next(i for i, candidate in enumerate(candidates) if candidate is listed)
            lighter = chosen.layout.lighter_layers > 0
            candidates[at : at + (not lighter)] = [chosen]  # lighter layers are listed before what they were made of
    if chosen is None:
        raise nothing_fits(config, candidates, base, decisions, limits)
    if config.parallel.cuda_graphs is True and not chosen.layout.cuda_graphs:
        refused = refuse_graphs(config, replace(base, layout=chosen.layout), fits=False)
        assert refused is not None
        raise refused
    found = (base, split, steps, features, limits, ran_out, candidates, chosen)
    result = SearchResult(*found, reference, why_reference)
    disk = estimate_disk(config, facts, result.estimate_input, steps, DTYPE_BYTES[decisions.output], features)
    against = why_not_kept(features, result.estimate_input, limits.clock, disk)
    return _search(config, facts, decisions, launch, against) if against else result


def base_input(config: RunConfig, facts: Facts) -> EstimateInput:
    """What the estimates of all candidates share; the layout is a copy on each rank, without micro-batches."""
    config, _ = resolve_auto(config, facts)
    return _base_input(config, dequantize_experts(config, facts), decide(config, facts))


def _base_input(config: RunConfig, facts: Facts, decisions: Decisions) -> EstimateInput:
    """What all candidates share; the layout is a copy on each rank, without micro-batches."""
    converters = _converters(config, facts, decisions)
    rows_alone = has_one_length(facts.data) and facts.model.sliding_window is None
    family = families.find(facts.model.model_type)
    fits = not family.merged or {"fp8", "nf4"}.isdisjoint(converters)  # merged layers in fp8 or 4 bits stay as they are
    num_adapter_parameters = count_adapter_parameters(config, facts.model, facts.new_tokens)
    partially_trained = count_text(config, facts.model, decisions.parts)
    layout = lay_out(
        device=decisions.device,
        mesh=mesh_of("single", decisions.world_size, context=config.parallel.context_ranks),
        strategy="single",
        reshard_after_forward=False,
        activation_checkpointing="none",
        compute_dtype=decisions.compute,
        master_dtype=decisions.master,
        frozen_dtype=decisions.compute,
        trains_everything=num_adapter_parameters == 0 and partially_trained is None,
        offload=config.parallel.offload,
        compile=decisions.compile,
        embeddings_apart=not facts.model.tied_embeddings,
        exchanges_heads=decisions.exchanges_heads,
        expert_degree=config.parallel.expert_ranks,
        dynamic=not has_one_length(facts.data),
        data_workers=decisions.data_workers,
        ddp_bucket_mb=None if config.parallel.ddp_bucket_mb == "auto" else config.parallel.ddp_bucket_mb,
    )
    fp8_groups = (
        config.model.frozen_dtype == "fp8"
        and decisions.compute == "bfloat16"
        and all(gpu.architecture.multiplies_fp8_groups for gpu in decisions.gpus)
    )
    return EstimateInput(
        model=with_towers(facts.model, decisions.parts) if layout.trains_everything else facts.model,
        layout=layout,
        num_adapter_parameters=num_adapter_parameters,
        adapter_rank=config.method.rank,
        adapter_dropout=config.method.dropout > 0,
        nf4_blocks=config.method.name == "qlora",
        nf4_double=config.method.double_quant,
        fp8_blocks=config.kernels.linear == "fp8",
        fp8_weights=config.model.frozen_dtype == "fp8",
        fp8_groups=fp8_groups,
        sums_in_products=decisions.compute == "bfloat16" and all(gpu.architecture.is_hopper for gpu in decisions.gpus),
        builds_mask=decisions.attention == "sdpa" and config.data.packing is True,
        attends_blockwise=decisions.attention == "blockwise",
        partially_trained=partially_trained,
        optimizer_name=config.optimizer.name,
        fuse_loss="fused_loss" in converters,
        fuse_optimizer=fuses_optimizer(config, decisions.device) and config.parallel.offload == "none",
        mixed_lengths=decisions.attention == "varlen" and not ("attention_kernels" in converters and rows_alone),
        row_length=facts.data.max_length if has_one_length(facts.data) else None,
        adapter_dora=config.method.dora,
        images=describe_images(decisions.parts, facts.model, facts.data),
        needs_all_gradients=config.optimizer.max_grad_norm > 0
        or "skip" in (config.guards.nonfinite, config.guards.spike),
        fuses_modules="fused_modules" in converters and bool(family.known_modules) and fits,
        fuses_experts=fuses_experts(config, facts.model),
        num_expert_adapters=count_expert_adapters(config, facts.model),
    )


def _converters(config: RunConfig, facts: Facts, decisions: Decisions) -> tuple[str, ...]:
    case = Case(
        config,
        decisions.device,
        decisions.attention,
        has_towers=facts.model.is_multimodal,
        has_groups=facts.model.has_groups,
        has_mxfp4=bool(facts.model.stored_mxfp4),
        has_new_tokens=facts.new_tokens is not None,
        continues_adapter=facts.adapter is not None,
    )
    return choose_converters(case)


def _explain(
    config: RunConfig,
    facts: Facts,
    decisions: Decisions,
    result: SearchResult,
    disk: DiskEstimate,
    saving: Saving,
    why_resolved: tuple[Reason, ...],
    why_prompts: tuple[Reason, ...],
    why_environment: Reason,
) -> tuple[Reason, ...]:
    """All reasons, in the order in which they are shown. UserError where the disk or validation samples are lacking."""
    why_disk = check_disk(config, disk)
    layout, why_numerics = result.chosen.layout, decisions.why_numerics
    if decisions.compile and not layout.compile:
        uncompiled = reason("compile", compile=False, source="experts", mode=layout.activation_checkpointing)
        why_numerics = tuple(uncompiled if why.code == "compile" else why for why in why_numerics)
    return (
        *decisions.why_ranks,
        *why_resolved,
        *explain_smaller(result.chosen, result.ran_out),
        *_why_layout(config, facts, result, saving.memory.total),
        *why_numerics,
        *_why_start(facts),
        *result.why_reference,
        *why_prompts,
        *explain_samples(config, facts.data),
        *result.steps.why,
        *saving.why,
        why_disk,
        *decisions.why_rate,
        why_environment,
        *warn_of_values(config, facts.model, decisions.learning_rate, result.steps),
    )


def _why_layout(config: RunConfig, facts: Facts, result: SearchResult, total_memory: int) -> list[Reason]:
    chosen, split, limits = result.chosen, result.split, result.limits
    parallel, layout, memory = config.parallel, chosen.layout, chosen.memory
    ranks = {"device": layout.device, "ranks": layout.world_size}
    why = [
        reason(
            "strategy",
            strategy=layout.strategy,
            replicate=layout.mesh.replicate,
            shard=layout.mesh.shard,
            reshard=layout.reshard_after_forward,
            asked=parallel.strategy != "auto",
            **ranks,
        ),
        reason(
            "activation_checkpointing",
            mode=layout.activation_checkpointing,
            lighter_layers=layout.lighter_layers,
            layers=result.base.model.num_layers,
            last=layout.last_checkpointing,
            tile=layout.mlp_tile_tokens,
            repeated=layout.repeated_inputs,
            no_faster=result.ran_out is None and keeps_less_by_choice(chosen, result.candidates),
            asked=parallel.activation_checkpointing != "auto",
        ),
    ]
    if layout.cuda_graphs:
        asked, tokens = parallel.cuda_graphs is True, layout.pack_tokens
        why.append(reason("cuda_graphs", asked=asked, tokens=tokens, one_length=has_one_length(facts.data)))
    if layout.keeps_transposed:
        without = limits.evaluate(result.base, change(layout, keeps_transposed=False))
        ms = 1e3 * (seconds_of(without) - seconds_of(chosen))
        known = limits.clock is not None and limits.clock.rates.source != "assumed"
        why.append(reason("transposed", bytes=result.base.transposed_bytes, ms=ms if known else None))
    if layout.expert_degree > 1:
        groups = layout.world_size // layout.expert_degree
        why.append(reason("expert_degree", degree=layout.expert_degree, groups=groups, load=LARGEST_LOAD))
    if limits.clock is not None:
        why += explain_flash4(limits.clock, result.estimate_input)
        why += explain_links(facts, limits.clock, result.base, result.candidates)
    if layout.num_shards > 1 and layout.accumulates and not layout.zero_stage:
        why.append(reason("reduction", every=layout.reduce_every, bytes=memory.terms["unreduced"]))
    moved = {"none": [], "optimizer": ["optimizer"], "all": ["weights", "gradients", "optimizer"]}[parallel.offload]
    if moved := moved + ["activations"] * layout.offload_activations:
        hidden = parallel.offload_activations == "auto" and moved[-1] == "activations"
        why.append(
            reason(
                "offload",
                moved=moved,
                hidden=hidden,
                bytes=memory.host_total,
                limit=memory.host_limit,
                staying=layout.layers_on_device,
            )
        )
    why += [
        reason(
            "memory",
            bytes=total_memory,
            limit=memory.limit,
            free=limits.free_bytes,
            local_ranks=limits.num_local,
            tight=None if memory.is_safe else 1 - memory.margin,
            **ranks,
        ),
        *explain_images(result.estimate_input),
        *explain_features(result.features, config, result.estimate_input, limits.clock, result.steps.total),
        reason(
            "batch",
            samples=split.batch_samples,
            loss_tokens=split.batch_loss_tokens,
            packs=split.batch_packs,
            pack_tokens=config.data.max_length,
            micro_samples=layout.micro_samples,
            micro_tokens=layout.micro_tokens,
            accumulation=layout.accumulation,
            mean_tokens=facts.data.mean_length,
            auto=split.batch_samples is not None and config.batch.samples == "auto",
            **ranks,
        ),
    ]
    longest, positions = facts.data.max_length, facts.model.max_positions
    if positions and longest > positions:
        why.append(reason("long_samples", tokens=longest, positions=positions))
    return why


def _why_start(facts: Facts) -> list[Reason]:
    """What a run starts from besides the model."""
    why, tokens, adapter = [], facts.new_tokens, facts.adapter
    if tokens is not None:
        known = len(tokens.ids) - len(tokens.fresh_ids)
        why.append(reason("new_tokens", new=len(tokens.fresh_ids), known=known, vocabulary=tokens.vocab_size))
    if adapter is not None:
        method = adapter.method
        kinds = [name for name in ("rslora", "dora") if getattr(method, name)]
        why.append(reason("adapter", folder=adapter.folder, rank=method.rank, alpha=method.alpha, kinds=kinds))
    return why
