"""What would make a run fit that does not, each change planned before it is proposed. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.facts.types import DataFacts, Facts, HostFacts
from manyhands.optim.registry import OPTIMIZERS
from manyhands.planner.text import NOTHING_FITS, describe_changes
from manyhands.planner.types import Plan

DOES_NOT_FIT = "does_not_fit"  # UserError.kind
MAX_FACTOR = 16  # times the GPUs that are there
GPUS_PER_MACHINE = 8
LENGTH_STEP, SHORTEST = 256, 512
KNOWN_LENGTHS = 2_048  # samples that a proposal is laid out from

MakePlan = Callable[[RunConfig, Facts], Plan]


@dataclass(frozen=True)
class Change:
    """One proposal: what it is called in ``text.CHANGES``, with which value, and what it is planned with. ``after``
    another, it is planned with that one too.
    """

    kind: str
    value: str | int
    config: RunConfig
    facts: Facts
    after: Change | None = None


def with_advice(error: UserError, config: RunConfig, facts: Facts, make_plan: MakePlan) -> UserError:
    """The error with every single change that the planner finds to fit, and with its seconds a step; where none does on
    the GPUs that are there, with two changes that do. On a CPU as it is.
    """
    if not facts.host.gpus or config.parallel.device == "cpu":
        return error
    facts = facts.model_copy(update={"data": _shorten_facts(facts.data)})
    found = _find_fitting(_proposals(config, facts), make_plan)
    if all(change.kind == "gpus" for change, _ in found):
        fewer = min((int(change.value) for change, _ in found), default=None)
        found = _find_fitting(_pairs(config, facts, fewer), make_plan) + found
    lines = []
    for change, made in found:
        both = (change,) if change.after is None else (change.after, change)
        changes = [(one.kind, one.value) for one in both]
        lines.append(describe_changes(changes, made.layout.strategy, made.step_s))
    return UserError(
        error.what,
        where=error.where,
        why=error.why,
        fix="one of these fits: " + "; ".join(lines) if lines else NOTHING_FITS.format(MAX_FACTOR),
        details=list(error.details),
        exit_code=error.exit_code,
        kind=error.kind,
    )


def _proposals(config: RunConfig, facts: Facts) -> Iterator[Iterator[Change]]:
    """Each yields changes of one kind, the smallest first: of these the first that fits is proposed."""
    yield _freed(config, facts)
    yield _kept(config, facts)
    yield _methods(config, facts)
    yield _shorter(config, facts)
    yield from (iter((change,)) for change in _offloads(config, facts))  # either may be the faster
    yield _one_gpu(config, facts)
    yield _more_gpus(config, facts)


def _pairs(config: RunConfig, facts: Facts, fewer: int | None) -> Iterator[Iterator[Change]]:
    """As ``_proposals``: another method and one more change, or states in host memory with shorter samples or another
    number of GPUs; ``fewer`` of them than are enough by themselves.
    """
    for first in _methods(config, facts):
        for kind in (_shorter, _offloads, _one_gpu, _more_gpus):
            yield _after(first, kind, fewer)
    for first in _offloads(config, facts):
        for kind in (_shorter, _one_gpu, _more_gpus):
            yield _after(first, kind, fewer)


def _after(first: Change, kind: Callable[[RunConfig, Facts], Iterator[Change]], fewer: int | None) -> Iterator[Change]:
    for change in kind(first.config, first.facts):
        if change.kind != "gpus" or fewer is None or int(change.value) < fewer:
            yield replace(change, after=first)


def _find_fitting(proposals: Iterator[Iterator[Change]], make_plan: MakePlan) -> list[tuple[Change, Plan]]:
    """Of each kind of change the first that fits, with its plan."""
    return [fitting for changes in proposals if (fitting := _first_that_fits(changes, make_plan)) is not None]


def _first_that_fits(changes: Iterator[Change], make_plan: MakePlan) -> tuple[Change, Plan] | None:
    for change in changes:
        with contextlib.suppress(UserError):
            return change, make_plan(change.config, change.facts)
    return None


def _with(config: RunConfig, section: str, **values: Any) -> RunConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def _freed(config: RunConfig, facts: Facts) -> Iterator[Change]:
    """Keys that fix what the plan would choose: parallel's together, then the micro-batch's."""
    parallel, batch = config.parallel, config.batch
    names = ("strategy", "activation_checkpointing", "reshard_after_forward", "context_degree", "expert_degree")
    fixed = {name: "auto" for name in names if getattr(parallel, name) != "auto"}
    if fixed:
        keys = ", ".join(f"parallel.{name}=auto" for name in fixed)
        yield Change("layout", keys, _with(config, "parallel", **fixed), facts)
    micro = {name: "auto" for name in ("micro_tokens", "micro_samples") if getattr(batch, name) != "auto"}
    if micro:
        keys = ", ".join(f"batch.{name}=auto" for name in micro)
        yield Change("micro", keys, _with(config, "batch", **micro), facts)


def _kept(config: RunConfig, facts: Facts) -> Iterator[Change]:
    """Less in host memory, where that is what is short."""
    parallel = config.parallel
    if parallel.offload_activations is True:
        kept = _with(config, "parallel", offload_activations="auto")
        yield Change("kept", "parallel.offload_activations=auto", kept, facts)
    for kind in {"all": ("optimizer", "none"), "optimizer": ("none",)}.get(parallel.offload, ()):
        yield Change("kept", f"parallel.offload={kind}", _with(config, "parallel", offload=kind), facts)


def _methods(config: RunConfig, facts: Facts) -> Iterator[Change]:
    later = {"full": ("lora", "qlora"), "patterns": ("lora", "qlora"), "lora": ("qlora",)}
    for name in later.get(config.method.name, ()) if facts.adapter is None else ():
        yield Change("method", name, _with(config, "method", name=name), facts)


def _shorter(config: RunConfig, facts: Facts) -> Iterator[Change]:
    """The longest samples first; halves of what is left, so that a few plans find a length."""
    longest = facts.data.max_length
    lengths: list[int] = []
    size = longest // LENGTH_STEP * LENGTH_STEP
    while size >= SHORTEST and len(lengths) < 6:
        if size < longest:
            lengths.append(size)
        size = (size * 3 // 4) // LENGTH_STEP * LENGTH_STEP
    for length in lengths if config.batch.micro_tokens == "auto" else ():
        shorter = facts.model_copy(update={"data": _cut(facts.data, length)})
        yield Change("length", length, _with(config, "data", max_length=min(length, config.data.max_length)), shorter)


def _offloads(config: RunConfig, facts: Facts) -> Iterator[Change]:
    kinds = {"none": ("optimizer", "all"), "optimizer": ("all",)}
    for kind in kinds.get(config.parallel.offload, ()) if OPTIMIZERS[config.optimizer.name].streams_states else ():
        yield Change("offload", kind, _with(config, "parallel", offload=kind), facts)


def _one_gpu(config: RunConfig, facts: Facts) -> Iterator[Change]:
    """Several hold what they gather beside their shards, which one that fetches weights from host memory does not."""
    if len(facts.host.gpus) * facts.host.num_nodes > 1 and config.parallel.gpus != 1 and facts.world_size is None:
        yield Change("fewer", 1, _with(config, "parallel", gpus=1), facts)


def _more_gpus(config: RunConfig, facts: Facts) -> Iterator[Change]:
    host = facts.host
    here = len(host.gpus) * host.num_nodes
    now = config.parallel.gpus if config.parallel.gpus != "auto" else facts.world_size or here
    for count in sorted({now + 1, now + 2, *(now * factor for factor in (2, 4, 8, MAX_FACTOR))}):
        if count > GPUS_PER_MACHINE and count % GPUS_PER_MACHINE:
            continue
        more = facts.model_copy(update={"host": _grown(host, count), "world_size": None, "local_world_size": None})
        yield Change("gpus", count, _with(config, "parallel", gpus="auto"), more)


def _grown(host: HostFacts, count: int) -> HostFacts:
    """A host like this one with so many GPUs; more than eight on machines of eight."""
    local = min(count, GPUS_PER_MACHINE)
    least = min(host.gpus, key=lambda gpu: gpu.free_bytes)
    gpus = tuple(least.model_copy(update={"index": index}) for index in range(local))
    share = max(1, local // len(host.gpus))
    return host.model_copy(
        update={
            "gpus": gpus,
            "num_nodes": count // local,
            "num_cores": host.num_cores * share,
            "free_memory_bytes": host.free_memory_bytes * share,
        }
    )


def _shorten_facts(data: DataFacts) -> DataFacts:
    """Fewer known samples: a proposal needs no more."""
    first: dict[str, Any] = {
        "first_lengths": data.first_lengths[:KNOWN_LENGTHS],
        "first_labels": data.first_labels[:KNOWN_LENGTHS],
    }
    if data.shared is not None:
        lengths = data.shared.first_lengths[:KNOWN_LENGTHS]
        first["shared"] = data.shared.model_copy(update={"first_lengths": lengths})
    return data.model_copy(update=first)


def _cut(data: DataFacts, length: int) -> DataFacts:
    """The data with every sample cut to ``length`` tokens."""
    lengths = tuple(min(known, length) for known in data.first_lengths)
    share = sum(lengths) / sum(data.first_lengths) if lengths else min(1.0, length / data.max_length)
    mean = min(data.mean_length * share, float(length))
    return data.model_copy(
        update={
            "shared": None,
            "max_length": length,
            "mean_length": mean,
            "num_tokens": min(int(data.num_tokens * share), data.num_samples * length),
            "num_validation_tokens": min(int(data.num_validation_tokens * share), data.num_validation_samples * length),
            "first_lengths": lengths,
        }
    )
