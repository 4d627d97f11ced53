"""How the steps of a plan are carried out, and how much of what they compute is useful. Pure numpy; knows no files.

Where less than 90 % is useful, the plan says why, and what would be better: each proposal is laid out before it is
made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from manyhands.core.terms import LossTerm
from manyhands.data.batch.pack import (
    StepLayout,
    lay_out_packed,
    lay_out_unpacked,
    packing_efficiency,
    padded_tokens,
)
from manyhands.data.store.store import SampleSet
from manyhands.facts.types import DataFacts, Facts
from manyhands.planner.batch import ceil_div, constant_pack_tokens, has_one_length
from manyhands.planner.layout import Layout, change, mesh_of
from manyhands.planner.time.clock import lay_out, pack_tile
from manyhands.planner.time.work import sample_steps
from manyhands.planner.types import Plan, reason

MAX_STEPS, MAX_SAMPLES = 20, 16_384  # laid out, spread over the epoch; one step in any case
GOOD_SHARE = 0.9
MAX_FACTOR = 64  # times the batch, in a proposal
MIN_GAIN = 0.02  # less is not worth a proposal


def lay_out_step(
    plan: Plan, samples: np.ndarray, lengths: np.ndarray, image_units: np.ndarray | None = None
) -> StepLayout:
    """The samples of one training step as micro-batches of all data-parallel ranks; ``lengths`` and ``image_units`` by
    sample id.
    """
    return lay_out(plan.layout, samples, lengths, cost_of_images(plan, image_units))


def lay_out_training(plan: Plan, sample_set: SampleSet, samples: np.ndarray) -> StepLayout:
    """The same of samples of a set; in a run with images it says whether one of them has one."""
    return _with_images(sample_set, samples, lay_out_step(plan, samples, sample_set.lengths, sample_set.image_units))


def lay_out_evaluation(plan: Plan, sample_set: SampleSet, samples: np.ndarray) -> StepLayout:
    """Samples of an evaluation, however many micro-batches that takes."""
    layout, num_ranks = plan.layout, plan.layout.data_parallel_degree
    if layout.micro_tokens is not None:
        capacity = max(layout.pack_tokens or layout.micro_tokens, int(sample_set.lengths[samples].max()))
        cost = cost_of_images(plan, sample_set.image_units)
        found = lay_out_packed(samples, sample_set.lengths, num_ranks, capacity, cost)
    else:
        assert layout.micro_samples is not None
        accumulation = -(-len(samples) // (layout.micro_samples * num_ranks))
        found = lay_out_unpacked(samples, num_ranks, layout.micro_samples, accumulation)
    return _with_images(sample_set, samples, found)


def lay_out_values(
    plan: Plan, sample_set: SampleSet, samples: np.ndarray, terms: Sequence[LossTerm]
) -> tuple[tuple[np.ndarray, ...], ...]:
    """Micro-batches, by rank, of what ``terms`` need first of a step or an evaluation of these samples."""
    chosen = [term.value.choose(sample_set, samples) for term in terms if term.value is not None]
    if not chosen:
        return ()
    numbers = np.concatenate(chosen)
    places = np.arange(len(numbers))
    made = replace(sample_set, lengths=sample_set.lengths_of(numbers), num_images=None, image_units=None)
    layout = lay_out_evaluation(plan, made, places)
    return tuple(tuple(numbers[part] for part in micro) for micro in layout.micro_batches)


def _with_images(sample_set: SampleSet, samples: np.ndarray, layout: StepLayout) -> StepLayout:
    if sample_set.num_images is None:
        return layout
    return replace(layout, has_images=bool(sample_set.num_images[samples].any()))


def cost_of_images(plan: Plan, image_units: np.ndarray | None) -> np.ndarray | None:
    """What the images of each sample cost, in tokens; None where nothing passes through a tower."""
    return image_units * plan.image_unit_cost if image_units is not None and plan.image_unit_cost else None


def largest_samples(layout: Layout, sample_set: SampleSet) -> list[np.ndarray]:
    """Sample ids of the micro-batch with the longest samples; with images also of the one with most units (patches or
    squares). What is left in a pack of those that have the most for their length is filled with others, so that it is
    as full of tokens as well: no micro-batch takes more of both.
    """
    lengths, units = sample_set.lengths, sample_set.image_units
    order = np.argsort(-lengths, kind="stable")
    chosen = [_fill(order, lengths, layout)]
    if units is not None and units.any():
        most = units if layout.micro_tokens is None else units / np.maximum(lengths, 1)
        densest = _fill(np.lexsort((-lengths, -most)), lengths, layout)
        if set(densest.tolist()) != set(chosen[0].tolist()):
            chosen.append(densest)
    return chosen


def _fill(order: np.ndarray, lengths: np.ndarray, layout: Layout) -> np.ndarray:
    """The first of ``order``; of a pack those that still fit, one sample at least."""
    if layout.micro_tokens is None:
        return order[: layout.micro_samples or 1]
    left, chosen, shortest = layout.pack_tokens or layout.micro_tokens, [], int(lengths.min())
    for sample in order.tolist():
        if lengths[sample] <= left:
            chosen.append(sample)
            left -= int(lengths[sample])
        if left < shortest:
            break
    return np.array(chosen or [int(order[0])], dtype=np.int64)


def measure_efficiency(plan: Plan, data: DataFacts) -> tuple[float, int] | None:
    """(tokens of samples over tokens that are computed, steps laid out); None where the facts hold no whole step.

    Computed is what the longest micro-batch of any rank has, padding included, times the ranks: the others wait for it.
    What fills up packs for CUDA graphs is left out: they are chosen where the step is shorter with it.
    """
    steps = list(_sample_steps(plan, data))
    if not steps:
        return None
    lengths = np.array(data.first_lengths, dtype=np.int64)
    layouts = [lay_out_step(plan, samples, lengths) for samples in steps]
    if plan.layout.micro_tokens is not None:
        fixed = plan.layout.compile and (has_one_length(data) or not plan.layout.cuda_graphs)
        pack_tokens = plan.layout.pack_tokens if fixed else None
        return packing_efficiency(layouts, lengths, pack_tile(plan.layout), pack_tokens), len(steps)
    useful = paid = 0
    for micro in (micro for layout in layouts for micro in layout.micro_batches):
        useful += sum(int(lengths[samples].sum()) for samples in micro)
        paid += len(micro) * max(len(samples) * int(lengths[samples].max(initial=0)) for samples in micro)
    return useful / paid, len(steps)


def _sample_steps(plan: Plan, data: DataFacts) -> Iterator[np.ndarray]:
    """Samples of steps spread over what the facts have of the first epoch, at most ``MAX_STEPS``."""
    return sample_steps(data, **plan.step_size, max_steps=MAX_STEPS, max_samples=MAX_SAMPLES, num_steps=plan.num_steps)


def with_efficiency(plan: Plan, facts: Facts) -> Plan:
    """The plan with the share of its computed tokens that is useful, and the reason behind that of the batch."""
    measured = measure_efficiency(plan, facts.data)
    if measured is None:
        return plan
    share, num_steps = measured
    layout = plan.layout
    values: dict[str, Any] = {
        "share": share,
        "steps": num_steps,
        "packed": layout.micro_tokens is not None,
        "padded": pack_tile(plan.layout) > 1 or layout.pack_tokens is not None,
        "ranks": layout.data_parallel_degree,
    }
    if share < GOOD_SHARE:
        sizes = sorted(map(len, _sample_steps(plan, facts.data)))
        values |= {"samples": sizes[len(sizes) // 2], **_propose(plan, facts, share)}
    place = next((at for at, found in enumerate(plan.why, start=1) if found.code == "batch"), len(plan.why))
    why = (*plan.why[:place], reason("efficiency", **values), *plan.why[place:])
    return plan.model_copy(update={"efficiency": share, "why": why})


def _propose(plan: Plan, facts: Facts, share: float) -> dict[str, Any]:
    """The first change that reaches 90 %, or else the best, with its share; empty where nothing known gains enough."""
    tried: list[tuple[float, str]] = []
    for proposal, other in _changes(plan, facts):
        measured = measure_efficiency(other, facts.data)
        if measured is not None:
            tried.append((measured[0], proposal))
            if measured[0] >= GOOD_SHARE:
                break
    best, proposal = max(tried, default=(0.0, ""))
    return {"proposal": proposal, "reaches": best} if best > share + MIN_GAIN else {}


def _changes(plan: Plan, facts: Facts) -> Iterator[tuple[str, Plan]]:
    """What could be set otherwise, and the plan with it; the pack's size, which the memory was estimated for, stays."""
    data = facts.data
    if plan.layout.micro_tokens is None:
        assert plan.layout.micro_samples is not None
        if facts.model.packs:
            tokens = padded_tokens(plan.layout.micro_samples * data.max_length)
            yield "data.packing=true", _with_layout(plan, micro_samples=None, micro_tokens=tokens)
        if plan.layout.micro_samples > 1:
            ranks = plan.layout.data_parallel_degree
            accumulation = plan.batch_samples // ranks if plan.batch_samples is not None else None
            yield "batch.micro_samples=1", _with_layout(plan, micro_samples=1, accumulation=accumulation)
        return
    factor, step_samples = 1, max(map(len, _sample_steps(plan, data)))
    while factor <= MAX_FACTOR and factor * step_samples <= MAX_SAMPLES:
        if plan.batch_packs is not None:
            packs = factor * plan.batch_packs
            yield f"batch.packs={packs}", plan.model_copy(update={"batch_packs": packs})
        elif plan.batch_loss_tokens is not None:
            tokens = factor * plan.batch_loss_tokens
            yield f"batch.loss_tokens={tokens}", plan.model_copy(update={"batch_loss_tokens": tokens})
        else:
            assert plan.batch_samples is not None
            ranks = plan.layout.data_parallel_degree
            samples = ceil_div(factor * plan.batch_samples, ranks) * ranks
            if samples > data.samples_per_epoch:
                break
            yield f"batch.samples={samples}", _with_samples(plan, samples, ranks, data)
        factor *= 2
    ranks = plan.layout.data_parallel_degree // 2
    while ranks:
        yield f"parallel.gpus={ranks * plan.layout.mesh.context}", _with_samples(plan, plan.batch_samples, ranks, data)
        ranks //= 2


def _with_samples(plan: Plan, samples: int | None, num_ranks: int, data: DataFacts) -> Plan:
    context = plan.layout.mesh.context
    mesh = mesh_of("ddp", num_ranks * context, context=context)
    pack_tokens = constant_pack_tokens(samples, plan.layout.micro_tokens, data, num_ranks)
    changed = _with_layout(plan, strategy="ddp", mesh=mesh, pack_tokens=pack_tokens)
    return changed.model_copy(update={"batch_samples": samples})


def _with_layout(plan: Plan, **changes: Any) -> Plan:
    return plan.model_copy(update={"layout": change(plan.layout, **changes)})
