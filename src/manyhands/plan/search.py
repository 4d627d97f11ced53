"""From a config and facts to a plan: every layout is estimated, all are kept, the fastest that fits is chosen.

``plan`` is a pure function: the same input gives the same plan, to the byte. Knows no torch, no files and no network.
The candidates and their order stand in ``candidates.py``.
"""

from __future__ import annotations

from dataclasses import replace

from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.facts.types import DataFacts, Facts
from manyhands.plan.batch import BatchSplit, ceil_div, has_one_length, possible_splits
from manyhands.plan.candidates import (
    Limits,
    choose_candidate,
    lighten,
    list_candidates,
    memory_limits,
    reduce_once,
    slowness,
)
from manyhands.plan.checks import check_disk, estimate_disk, warn_of_values
from manyhands.plan.choices import (
    Decisions,
    choose_environment,
    choose_packing,
    count_adapter_parameters,
    decide,
    fuses_optimizer,
    ranks_per_machine,
)
from manyhands.plan.converters import choose_converters
from manyhands.plan.efficiency import with_efficiency
from manyhands.plan.estimate_input import EstimateInput
from manyhands.plan.layout import DTYPE_BYTES, lay_out, mesh_of
from manyhands.plan.reasons import Reason, reason
from manyhands.plan.sentences import describe_limit, format_gib
from manyhands.plan.smaller import NothingSmaller as NothingSmaller
from manyhands.plan.smaller import choose_smaller, explain_smaller, find_ran_out, nothing_smaller
from manyhands.plan.steps import count_steps
from manyhands.plan.trained import count_trained
from manyhands.plan.types import Candidate, Cause, Plan, RanOut

USEFUL_TOKENS = {"cuda": 16_384, "cpu": 2_048}  # a larger micro-batch gains nothing
SAFE_SHARE = 0.92  # of the limit: what is planned for, as the estimate is one


def plan(
    config: RunConfig, facts: Facts, *, number: int = 1, cause: Cause = "first", before: Plan | None = None
) -> Plan:
    """Decide everything for one launch.

    ``number`` counts the launches of the run, ``before`` is the plan of the last one. ``cause="out_of_memory"``: that
    one ran out, and this one is smaller, with the same global batch. UserError where keys contradict the facts
    (processes, batch, dtypes) or where nothing fits; NothingSmaller where nothing is left to try.
    """
    digest = config.digest
    packing, why_packing = choose_packing(config, facts.model)
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"packing": packing})}
    )  # from here on no `auto`
    if facts.adapter is not None:
        config = config.model_copy(update={"method": facts.adapter.method})
    made = decide(config, facts)
    splits = possible_splits(config, facts.data, made.world_size, USEFUL_TOKENS[made.device])
    limits = memory_limits(config, facts, made)
    num_local = ranks_per_machine(facts, made.device, made.world_size)
    num_machines = ceil_div(made.world_size, num_local)
    base = _base_input(config, facts, made)
    candidates = list_candidates(config, base, splits, limits, made.shard_degree, num_machines)
    ran_out = find_ran_out(cause, before, facts, made, limits)
    candidates, chosen = _choose(config, candidates, base, made, limits, ran_out)
    split = splits[0]  # the batch is that of all
    steps = count_steps(config, facts.data, split.batch_samples)
    why_layout = _why_layout(config, facts, chosen, base, split, limits)
    disk = estimate_disk(config, facts, replace(base, layout=chosen.layout), steps, DTYPE_BYTES[made.output])
    why_disk, warnings = check_disk(config, disk), warn_of_values(config, facts.model, made.learning_rate)
    whole = Plan(
        number=number,
        cause=cause,
        config_digest=digest,
        data_digest=facts.data.digest,
        data_content=facts.data.content,
        data_folder=facts.data.folder,
        model_folder=facts.model.folder,
        model_files=facts.model.files,
        keeps_base=config.method.name != "full" or facts.model.num_tower_parameters > 0,
        new_tokens=facts.new_tokens,
        adapter=facts.adapter,
        layout=chosen.layout,
        attention=made.attention,
        packing=packing,
        batch_samples=split.batch_samples,
        batch_loss_tokens=split.batch_loss_tokens,
        converters=_converters(config, facts, made),
        fuse_optimizer=fuses_optimizer(config, made.device),
        steps_per_epoch=steps.per_epoch,
        num_steps=steps.total,
        warmup_steps=steps.warmup,
        learning_rate=made.learning_rate,
        evaluate_every=steps.evaluate_every,
        checkpoint_every=steps.checkpoint_every,
        output_dtype=made.output,
        memory=chosen.memory,
        disk=disk,
        ran_out=ran_out,
        environment=choose_environment(made.device, facts.host.num_cores, num_local),
        candidates=tuple(_with_reason(candidate, chosen, ran_out) for candidate in candidates),
        why=(
            *made.why_ranks,
            why_packing,
            *explain_smaller(chosen, ran_out),
            *why_layout,
            *made.why_numerics,
            *_why_start(facts),
            *_why_samples(config, facts.data),
            *steps.why,
            why_disk,
            *made.why_rate,
            *warnings,
        ),
    )
    return with_efficiency(whole, facts)


def _choose(
    config: RunConfig,
    candidates: list[Candidate],
    base: EstimateInput,
    made: Decisions,
    limits: Limits,
    ran_out: RanOut | None,
) -> tuple[list[Candidate], Candidate]:
    """The chosen candidate, and all candidates with it among them."""
    if ran_out is not None:
        smaller = choose_smaller(candidates, ran_out)
        if smaller is None and not any(candidate.memory.fits for candidate in candidates):
            raise _nothing_fits(config, candidates, made, limits)
        if smaller is None:
            raise nothing_smaller(config, ran_out, made)
        return candidates, smaller
    chosen = choose_candidate(candidates, SAFE_SHARE)
    if chosen is None:
        raise _nothing_fits(config, candidates, made, limits)
    once = reduce_once(chosen, base, limits, SAFE_SHARE)
    candidates = [once if candidate is chosen else candidate for candidate in candidates]
    lighter = lighten(config, once, candidates, base, limits, SAFE_SHARE)
    if lighter is not once:
        candidates.insert(next(i for i, candidate in enumerate(candidates) if candidate is once), lighter)
    return candidates, lighter


def _base_input(config: RunConfig, facts: Facts, made: Decisions) -> EstimateInput:
    """What all candidates share; the layout is a copy on each rank, without micro-batches."""
    converters = _converters(config, facts, made)
    rows_alone = has_one_length(facts.data) and facts.model.sliding_window is None
    num_adapter_parameters = count_adapter_parameters(config, facts.model, facts.new_tokens)
    partially_trained = count_trained(config.method, facts.model)
    layout = lay_out(
        device=made.device,
        mesh=mesh_of("single", made.world_size),
        strategy="single",
        reshard_after_forward=False,
        activation_checkpointing="none",
        compute_dtype=made.compute,
        master_dtype=made.master,
        frozen_dtype=made.compute,
        trains_everything=num_adapter_parameters == 0 and partially_trained is None,
        offload=config.parallel.offload,
        compile=made.compile,
        dynamic=not has_one_length(facts.data),
        data_workers=made.data_workers,
    )
    return EstimateInput(
        model=facts.model,
        layout=layout,
        num_adapter_parameters=num_adapter_parameters,
        adapter_rank=config.method.rank,
        adapter_dropout=config.method.dropout > 0,
        nf4_blocks=config.method.name == "qlora",
        fp8_blocks=config.kernels.linear == "fp8",
        builds_mask=made.attention == "sdpa" and config.data.packing is True,
        partially_trained=partially_trained,
        optimizer_name=config.optimizer.name,
        fuse_loss="fused_loss" in converters,
        fuse_optimizer=fuses_optimizer(config, made.device) and config.parallel.offload == "none",
        mixed_lengths=made.attention == "varlen" and not ("attention_kernels" in converters and rows_alone),
        adapter_dora=config.method.dora,
    )


def _converters(config: RunConfig, facts: Facts, made: Decisions) -> tuple[str, ...]:
    return choose_converters(
        config,
        device=made.device,
        attention=made.attention,
        has_towers=facts.model.num_tower_parameters > 0,
        has_new_tokens=facts.new_tokens is not None,
        continues_adapter=facts.adapter is not None,
    )


def _with_reason(candidate: Candidate, chosen: Candidate, ran_out: RanOut | None) -> Candidate:
    if candidate is chosen:
        return candidate.model_copy(update={"chosen": True})
    return candidate.model_copy(update={"reason": _why_lost(candidate, chosen, SAFE_SHARE, ran_out)})


def _why_lost(candidate: Candidate, chosen: Candidate, share: float, ran_out: RanOut | None) -> Reason:
    layout, memory = candidate.layout, candidate.memory
    total, limit = memory.total, memory.limit
    if ran_out is not None and total <= limit:
        return reason("not_next_smaller", plan=ran_out.number)
    if total > limit:
        return reason("exceeds_memory", bytes=total, limit=limit)
    if not memory.fits_host:
        return reason("exceeds_host_memory", bytes=memory.host_total, limit=memory.host_limit)
    if total > share * limit:
        return reason("near_limit", bytes=total, limit=limit, share=share)
    reasons = (
        reason("idle_device"),
        reason("computes_again", mode=layout.activation_checkpointing),
        reason("computes_more_again"),
        reason("shards_needlessly", chosen=chosen.layout.strategy),
        reason("gathers_again"),
        reason("smaller_micro_batch"),
    )
    pairs = zip(reasons, slowness(candidate), slowness(chosen), strict=True)
    return next((found for found, mine, best in pairs if mine > best), reason("no_faster"))


def _why_layout(
    config: RunConfig, facts: Facts, chosen: Candidate, base: EstimateInput, split: BatchSplit, limits: Limits
) -> list[Reason]:
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
            layers=base.model.num_layers,
            last=layout.last_checkpointing,
            asked=parallel.activation_checkpointing != "auto",
        ),
    ]
    if layout.mesh.shard > 1 and layout.accumulates:
        why.append(reason("reduction", every=layout.reduce_every, bytes=memory.terms["unreduced"]))
    moved = {"none": [], "optimizer": ["optimizer"], "all": ["weights", "gradients", "optimizer"]}[parallel.offload]
    if moved := moved + ["activations"] * layout.offload_activations:
        hidden = parallel.offload_activations == "auto" and moved[-1] == "activations"
        why.append(reason("offload", moved=moved, hidden=hidden, bytes=memory.host_total, limit=memory.host_limit))
    why += [
        reason(
            "memory",
            bytes=memory.total,
            limit=memory.limit,
            free=limits.free_bytes,
            local_ranks=limits.num_local,
            tight=SAFE_SHARE if memory.total > SAFE_SHARE * memory.limit else None,
            **ranks,
        ),
        reason(
            "batch",
            samples=split.batch_samples,
            loss_tokens=split.batch_loss_tokens,
            micro_samples=layout.micro_samples,
            micro_tokens=layout.micro_tokens,
            accumulation=layout.accumulation,
            mean_tokens=facts.data.mean_length,
            auto=config.batch.samples == "auto" and config.batch.loss_tokens is None,
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


def _why_samples(config: RunConfig, data: DataFacts) -> list[Reason]:
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
                why=f"of {data.num_samples:,} samples a tenth is less than one",
                fix="give data.validation, or a larger data.validation_fraction, or remove the key",
            )
    held_out = config.data.validation is None
    why = [
        reason(
            "validation",
            samples=data.num_validation_samples,
            of=data.num_validation_samples + data.num_samples + data.num_dropped if held_out else None,
            repeated=data.num_repeated,
        )
    ]
    return why + ([reason("unread", columns=data.unread)] if data.unread else [])


def _nothing_fits(config: RunConfig, candidates: list[Candidate], made: Decisions, limits: Limits) -> UserError:
    """The smallest candidate's bytes against the limit, its largest terms, and what would make it smaller."""
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
    freed = [f"{key}: auto" for key, value in explicit if value not in ("auto", "fsdp", "hsdp", "full", True)]
    if freed:
        advice.append("let the plan choose (" + ", ".join(freed) + ")")
    if "auto" not in (batch.micro_tokens if config.data.packing else batch.micro_samples,):
        advice.append("give a smaller micro-batch")
    if config.method.name != "qlora":
        advice.append("use method.name=lora" if config.method.name == "full" else "use method.name=qlora")
    if config.data.max_length > 512:
        advice.append("shorten the rows (data.max_length)")
    if made.device == "cuda" and parallel.offload != "all" and config.optimizer.name == "adamw":
        advice.append("keep states in host memory (parallel.offload)")
    advice.append(
        "use more GPUs or ones with more memory" if parallel.device != "cpu" else "use a machine with more memory"
    )
    layout = smallest.layout
    how = f"{layout.strategy}, activation checkpointing {layout.activation_checkpointing}, {layout.full_micro_tokens:,} tokens a micro-batch"
    terms = sorted(memory.terms.items(), key=lambda term: -term[1])
    return UserError(
        f"the run does not fit: its smallest form needs {format_gib(memory.total)} a rank, and there are {format_gib(memory.limit)}",
        where=f"{made.ranks}: {how}",
        why=f"the limit is {describe_limit(made.device, made.world_size, limits.free_bytes, limits.num_local)}; the estimate by term:",
        fix=", or ".join(advice),
        details=[f"{name}: {format_gib(size)}" for name, size in terms if size],
    )


def _host_does_not_fit(smallest: Candidate, made: Decisions) -> UserError:
    memory = smallest.memory
    return UserError(
        f"what is offloaded does not fit: {format_gib(memory.host_total)} a rank, and there are {format_gib(memory.host_limit or 0)} of host memory",
        where=f"{made.ranks}: parallel.offload, parallel.offload_activations",
        why="the limit is 90 % of the machine's free memory over its ranks; pinned memory takes about 1.4 times what it holds",
        fix="offload less, keep fewer activations (parallel.activation_checkpointing=full), or use more machines with parallel.strategy=fsdp",
        details=[f"{name}: {format_gib(size)}" for name, size in memory.host_terms.items() if size],
    )
