"""From (seed, epoch, step) to this rank's micro-batches: order, layout and collation joined. Nothing is stored."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from manyhands.core import progress
from manyhands.data.batches import Batch, MicroBatches, iterate
from manyhands.data.pack import StepLayout, lay_out_packed, lay_out_rows
from manyhands.data.store import SampleSet
from manyhands.plan.efficiency import lay_out_step
from manyhands.train.step import StepWork
from manyhands.worker.loading import SetName, collation
from manyhands.worker.rank import Rank


def lay_out_evaluation(rank: Rank, sample_set: SampleSet, rows: np.ndarray) -> StepLayout:
    """Rows of an evaluation, however many micro-batches that takes."""
    plan, world_size = rank.plan, rank.world.world_size
    if plan.layout.micro_tokens is not None:
        capacity = max(plan.layout.pack_tokens or plan.layout.micro_tokens, int(sample_set.lengths[rows].max()))
        return lay_out_packed(rows, sample_set.lengths, world_size, capacity)
    assert plan.layout.micro_samples is not None
    return lay_out_rows(
        rows, world_size, plan.layout.micro_samples, -(-len(rows) // (plan.layout.micro_samples * world_size))
    )


def iterate_layouts(
    rank: Rank, name: SetName, layouts: Iterable[StepLayout]
) -> Iterator[tuple[StepLayout, MicroBatches]]:
    """Each layout of the set's rows with this rank's micro-batches, prepared ahead."""
    return iterate(layouts, rank.world.rank, rank.world.device, collation(rank, name))


def iterate_steps(rank: Rank) -> Iterator[StepWork]:
    """The remaining steps of the run, from ``rank.state.step`` on."""
    coming: deque[StepWork] = deque()  # laid out by the thread that reads ahead, not yet trained

    def lay_out_steps() -> Iterator[StepLayout]:
        for step in range(rank.state.step, rank.plan.num_steps):
            epoch, index = rank.order.locate(step)
            rows = rank.order.rows(epoch, index)
            layout = lay_out_step(rank.plan, rows, rank.store.train.lengths)
            coming.append(_describe(rank, step, epoch + (index + 1) / rank.order.steps_per_epoch(epoch), rows, layout))
            yield layout

    for _, micro_batches in iterate_layouts(rank, "train", lay_out_steps()):
        yield replace(coming.popleft(), micro_batches=_advance_by_batch(micro_batches), waited_s=micro_batches.waited_s)


def _advance_by_batch(micro_batches: MicroBatches) -> Iterator[Batch]:
    """A step of many micro-batches is no standstill."""
    for batch in micro_batches:
        progress.advance()
        yield batch


def _describe(rank: Rank, step: int, epoch: float, rows: np.ndarray, layout: StepLayout) -> StepWork:
    train, mine = rank.store.train, layout.rows_of_rank(rank.world.rank)
    return StepWork(
        step=step,
        epoch=epoch,
        num_samples=len(rows),
        num_tokens=int(train.lengths[rows].sum()),
        num_loss_tokens=int(train.num_loss_tokens[rows].sum()),
        num_micro_batches=layout.num_micro_batches,
        num_rank_loss_tokens=int(train.num_loss_tokens[mine].sum()),
        micro_batches=(),
        loss_weight=float(train.loss_weights[rows].sum()) if train.has_weights else None,
        rank_loss_weight=float(train.loss_weights[mine].sum()) if train.has_weights else None,
    )
