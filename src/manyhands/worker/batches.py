"""From (seed, epoch, step) to this rank's micro-batches: order, layout and collation, by a thread or by processes.

Nothing is stored: what a step trains follows from the plan and the order.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from manyhands.core import progress
from manyhands.core.seeds import named_seed
from manyhands.core.terms import IS_FOR_VALUE
from manyhands.data.batch.batches import Batch, Collate, MicroBatches, collate, collate_here, iterate, to_device
from manyhands.data.batch.collate import NOISE_KEY, BatchShape, BatchWorkers, open_store_samples
from manyhands.data.batch.pack import StepLayout
from manyhands.data.store.store import SampleSet
from manyhands.data.store.streams import Sample, cut_to_loss
from manyhands.model.inputs import batch_shape
from manyhands.model.loss import LossModel
from manyhands.planner.efficiency import largest_samples, lay_out_training, lay_out_values
from manyhands.training.step import StepWork, TermWeight
from manyhands.worker.rank import Data, Rank

SetName = Literal["train", "validation"]
PROBE_TOKENS = 2048  # of the micro-batch for self-tests, which run uncompiled and keep every activation


def open_workers(rank: Rank, data: Data) -> BatchWorkers | None:
    """Starts the processes that the plan names; they serve training and every evaluation until closed."""
    num_workers = rank.plan.layout.data_workers
    if not num_workers:
        return None
    workers = BatchWorkers(functools.partial(open_store_samples, data.store.folder, data.store.attached), num_workers)
    rank.process.print(
        f"batches: {num_workers} process{'es' * (num_workers != 1)} a rank collate{'s' * (num_workers == 1)} ahead"
    )
    return workers


def iterate_layouts(
    rank: Rank,
    data: Data,
    loss_model: LossModel,
    name: SetName,
    layouts: Iterable[StepLayout],
    workers: BatchWorkers | None = None,
) -> Iterator[tuple[StepLayout, MicroBatches]]:
    """Each layout of the set's samples with this rank's micro-batches, prepared ahead."""
    shape = _shape(rank, data, loss_model)
    make: Collate = collate_here(getattr(data.store, name), shape)
    if workers is not None:
        make = functools.partial(workers.collate, name, shape)
    return iterate(layouts, rank.plan.layout.mesh.data_rank(rank.world.rank), rank.world.device, make)


def iterate_steps(
    rank: Rank, data: Data, loss_model: LossModel, first_step: int = 0, workers: BatchWorkers | None = None
) -> Iterator[StepWork]:
    """The steps of the run from ``first_step`` on, counted from 0."""
    coming: deque[tuple[StepWork, int]] = deque()  # laid out by the thread that reads ahead, not yet trained
    order, train = data.order, data.store.train
    data_rank = rank.plan.layout.mesh.data_rank(rank.world.rank)
    num_parts = rank.plan.layout.mesh.context

    def lay_out_steps() -> Iterator[StepLayout]:
        for step in range(first_step, rank.plan.num_steps):
            epoch, index = order.locate(step)
            samples = order.samples(epoch, index)
            layout = lay_out_training(rank.plan, train, samples)
            mine = layout.samples_of_rank(data_rank)
            for_values = lay_out_values(rank.plan, train, samples, loss_model.terms)
            weights = {
                term.name: TermWeight(
                    float(term.weigh(train, samples).sum()), float(term.weigh(train, mine).sum()) / num_parts
                )
                for term in loss_model.terms
            }
            work = StepWork(
                step=step,
                epoch=epoch + (index + 1) / order.steps_per_epoch(epoch),
                num_samples=len(samples),
                num_tokens=int(train.lengths[samples].sum()),
                num_loss_tokens=int(train.num_loss_tokens[samples].sum()),
                num_micro_batches=layout.num_micro_batches,
                weights=weights,
                micro_batches=(),
            )
            coming.append((work, len(for_values)))
            yield replace(layout, micro_batches=(*for_values, *layout.micro_batches))

    def enter(micro_batches: Iterable[Batch], step: int) -> Iterator[Batch]:
        """What each micro-batch says of its step. A step of many micro-batches is no standstill."""
        entries: Batch = {}
        if rank.config.method.neftune_alpha:
            key = f"noise of epoch {order.locate(step)[0]}, step {step}"
            entries = {NOISE_KEY: named_seed(rank.config.seed, key)}
        for batch in micro_batches:
            progress.advance()
            yield batch | entries

    for _, micro_batches in iterate_layouts(rank, data, loss_model, "train", lay_out_steps(), workers):
        work, num_for_values = coming.popleft()
        entered = enter(mark_values(micro_batches, num_for_values), work.step)
        yield replace(work, micro_batches=entered, waited_s=micro_batches.waited_s)


def mark_values(micro_batches: Iterable[Batch], num_for_values: int) -> Iterator[Batch]:
    """Yields the same, the first ones marked as those for values of terms."""
    for index, batch in enumerate(micro_batches):
        yield batch | {IS_FOR_VALUE: True} if index < num_for_values else batch


def _shape(rank: Rank, data: Data, loss_model: LossModel) -> BatchShape:
    own = rank.plan.layout.mesh.coordinates(rank.world.rank)["context"]
    return batch_shape(rank.config, rank.plan, data.store, loss_model, own)


class ProbeSamples:
    """Samples of which a longer one is cut to ``PROBE_TOKENS``, its last loss token among them."""

    def __init__(self, samples: SampleSet) -> None:
        self.samples, self.streams = samples, samples.streams

    def sample(self, index: int) -> Sample:
        return cut_to_loss(self.samples.sample(index), self.streams, PROBE_TOKENS)


def probe_batch(rank: Rank, data: Data, loss_model: LossModel) -> dict[str, Any]:
    """This rank's samples of the first step up to ``PROBE_TOKENS``, shortest first, one at least (cut or shared)."""
    samples, world, train = data.order.samples(0, 0), rank.world, data.store.train
    mine = samples[world.rank % len(samples) :: world.world_size]
    mine = mine[np.argsort(train.lengths[mine], kind="stable")]
    count = int(np.searchsorted(np.cumsum(train.lengths[mine]), PROBE_TOKENS, side="right"))
    shape = _shape(rank, data, loss_model)
    shape = replace(shape, tokens=None, longest=None, documents=0, row_length=None, context=1)
    batch = collate(ProbeSamples(train) if shape.can_cut else train, mine[: max(1, count)], shape)
    return to_device(batch, world.device)


def largest_batches(rank: Rank, data: Data, loss_model: LossModel, name: SetName) -> Iterator[dict[str, Any]]:
    """The longest samples of a set, as many as a micro-batch holds; then another one that needs more memory, if any."""
    samples: SampleSet = getattr(data.store, name)
    shape = _shape(rank, data, loss_model)
    for chosen in largest_samples(rank.plan.layout, samples):
        yield to_device(collate(samples, chosen, shape), rank.world.device)
