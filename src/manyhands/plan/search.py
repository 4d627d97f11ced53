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
from manyhands.plan.layout import DTYPE_BYTES, Layout, lay_out, mesh_of
from manyhands.plan.memory import GIB
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
    why_layout = _why_layout(config, facts, chosen, base, split, made, SAFE_SHARE, limits.why)
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


def _why_lost(candidate: Candidate, chosen: Candidate, share: float, ran_out: RanOut | None) -> str:
    layout, memory = candidate.layout, candidate.memory
    total, limit = memory.total, memory.limit
    if ran_out is not None and total <= limit:
        return f"not the next smaller one after plan {ran_out.number}, which ran out of memory"
    if total > limit:
        return f"needs {_gib(total)} of {_gib(limit)}"
    if not memory.fits_host:
        return f"needs {_gib(memory.host_total)} of {_gib(memory.host_limit or 0)} host memory"
    if total > share * limit:
        return f"needs {_gib(total)}, over {share:.0%} of {_gib(limit)}: too near the limit for an estimate"
    mine, best = slowness(candidate), slowness(chosen)
    reasons = (
        "micro-batches too small to fill the device",
        "slower: recomputes "
        + (
            "activations, about a third more compute"
            if layout.activation_checkpointing == "full"
            else "norms and activations"
        ),
        "slower: recomputes more blocks",
        "slower: gathers shards, though a copy " + ("a machine " if chosen.layout.strategy == "hsdp" else "") + "fits",
        "slower: gathers weights once more in the backward pass",
        "slower: smaller micro-batches",
    )
    return next(
        (reason for reason, a, b in zip(reasons, mine, best, strict=True) if a > b), "no faster than the chosen one"
    )


def _why_layout(
    config: RunConfig,
    facts: Facts,
    chosen: Candidate,
    base: EstimateInput,
    split: BatchSplit,
    made: Decisions,
    share: float,
    why_limit: str,
) -> list[str]:
    layout = chosen.layout
    asked, ranks = config.parallel.strategy, made.ranks
    freed = "freed after the forward pass"
    meaning = {
        "single": "one process holds everything"
        + (f", the bfloat16 copy {freed}" if layout.reshard_after_forward else ""),
        "ddp": f"a copy on each of {ranks}" + (f", in bfloat16 {freed}" if layout.reshard_after_forward else ""),
        "fsdp": f"shards over {ranks}, gathered weights " + (freed if layout.reshard_after_forward else "kept"),
        "hsdp": f"{layout.mesh.replicate} copies, each in shards over {layout.mesh.shard} of {ranks}, gathered weights "
        + (freed if layout.reshard_after_forward else "kept"),
    }[layout.strategy]
    memory = chosen.memory
    tight = f"; over {share:.0%} of it, so little is to spare" if memory.total > share * memory.limit else ""
    why = [
        f"strategy: {layout.strategy}, {meaning}" + (", as asked" if asked != "auto" else ""),
        _why_checkpointing(config, layout, base.model.num_layers),
        *_why_reduction(chosen),
        *_why_offload(config, chosen),
        f"memory: {_gib(memory.total)} of {_gib(memory.limit)} a rank ({why_limit}){tight}",
        _why_batch(config, facts, layout, split, made),
    ]
    longest, positions = facts.data.max_length, facts.model.max_positions
    if positions and longest > positions:
        why.append(
            f"note: the longest row has {longest:,} tokens, more than the {positions:,} positions the model was made for"
        )
    return why


def _why_checkpointing(config: RunConfig, layout: Layout, num_layers: int) -> str:
    what = {
        "none": "nothing",
        "selective": "norms, activations and sums; results of linear layers and attention are kept",
        "full": "each block in the backward pass",
    }[layout.activation_checkpointing]
    num_lighter = layout.lighter_layers
    if num_lighter:
        rest = {"selective": "only norms, activations and sums", "none": "nothing"}[layout.last_checkpointing]
        what += f"; of the last {num_lighter} of {num_layers} blocks {rest}"
    auto = ", as activations fit" if layout.activation_checkpointing == "none" else ", as more does not fit"
    return f"activation checkpointing: {what}" + (
        auto if config.parallel.activation_checkpointing == "auto" else ", as asked"
    )


def _why_reduction(chosen: Candidate) -> list[str]:
    if chosen.layout.mesh.shard == 1 or not chosen.layout.accumulates:
        return []
    if chosen.layout.reduce_every:
        return ["reduction: gradients after every micro-batch, as whole ones do not fit until the last"]
    return [
        f"reduction: gradients once a step, as whole ones fit until then ({_gib(chosen.memory.terms['unreduced'])})"
    ]


def _why_offload(config: RunConfig, chosen: Candidate) -> list[str]:
    parallel, memory = config.parallel, chosen.memory
    moved = {"none": [], "optimizer": ["optimizer states"], "all": ["weights", "gradients", "optimizer states"]}[
        parallel.offload
    ]
    moved = moved + (["activations"] if chosen.layout.offload_activations else [])
    if not moved:
        return []
    if memory.host_limit is None:
        return [f"offload: {', '.join(moved)} in host memory, where a CPU has them anyway"]
    hidden = (
        ", whose copies hide behind recomputed blocks"
        if parallel.offload_activations == "auto" and moved[-1] == "activations"
        else ""
    )
    return [
        f"offload: {', '.join(moved)} in host memory{hidden}, {_gib(memory.host_total)} of {_gib(memory.host_limit)} a rank"
    ]


def _why_start(facts: Facts) -> list[str]:
    """What a run starts from besides the model."""
    why, tokens, adapter = [], facts.new_tokens, facts.adapter
    if tokens is not None:
        known = len(tokens.ids) - len(tokens.fresh_ids)
        others = f" and {known} known before" if known else ""
        why.append(f"new tokens: {len(tokens.fresh_ids)}{others}; embeddings of {tokens.vocab_size:,} rows")
    if adapter is not None:
        method = adapter.method
        kind = "".join(f", {name}" for name in ("rslora", "dora") if getattr(method, name))
        why.append(f"adapter: goes on from {adapter.folder}, rank {method.rank}, alpha {method.alpha:g}{kind}")
    return why


def _why_samples(config: RunConfig, data: DataFacts) -> list[str]:
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
        validation = "none"
    elif config.data.validation is None:
        validation = f"{data.num_validation_samples:,} of {data.num_validation_samples + data.num_samples + data.num_dropped:,} samples held out"
    else:
        validation = f"{data.num_validation_samples:,} samples of data.validation"
    checked = f", {data.num_repeated:,} of them trained too" if data.num_repeated else ", none of them trained"
    unread = "; ".join(f"{', '.join(names)} ({source})" for source, names in data.unread.items())
    return [
        f"validation: {validation}{checked if data.num_validation_samples else ''}",
        *([f"not read: columns {unread}"] if unread else []),
    ]


def _why_batch(config: RunConfig, facts: Facts, layout: Layout, split: BatchSplit, made: Decisions) -> str:
    auto = config.batch.samples == "auto" and config.batch.loss_tokens is None
    if layout.micro_samples:
        text = f"batch: {split.batch_samples} rows = {layout.micro_samples} micro × {made.ranks} × {layout.accumulation} accumulation"
    elif split.batch_loss_tokens:
        text = f"batch: at least {split.batch_loss_tokens:,} trained tokens, in packs of {layout.micro_tokens:,} tokens over {made.ranks}"
    else:
        about = (split.batch_samples or 0) * facts.data.mean_length
        text = f"batch: {split.batch_samples} rows ≈ {about:,.0f} tokens, in packs of {layout.micro_tokens:,} over {made.ranks}"
        if (split.batch_samples or 0) < made.world_size:
            text += " (fewer rows than ranks: some idle)"
    return text + (" (auto)" if auto else "")


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
        f"the run does not fit: its smallest form needs {_gib(memory.total)} a rank, and there are {_gib(memory.limit)}",
        where=f"{made.ranks}: {how}",
        why=f"the limit is {limits.why}; the estimate by term:",
        fix=", or ".join(advice),
        details=[f"{name}: {_gib(size)}" for name, size in terms if size],
    )


def _host_does_not_fit(smallest: Candidate, made: Decisions) -> UserError:
    memory = smallest.memory
    return UserError(
        f"what is offloaded does not fit: {_gib(memory.host_total)} a rank, and there are {_gib(memory.host_limit or 0)} of host memory",
        where=f"{made.ranks}: parallel.offload, parallel.offload_activations",
        why="the limit is 90 % of the machine's free memory over its ranks; pinned memory takes about 1.4 times what it holds",
        fix="offload less, recompute blocks (parallel.activation_checkpointing=full), or use more machines with parallel.strategy=fsdp",
        details=[f"{name}: {_gib(size)}" for name, size in memory.host_terms.items() if size],
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
