"""From (seed, epoch, step) to this rank's micro-batches: order, layout and collation, by a thread or by processes.

Nothing is stored: what a step trains follows from the plan and the order.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from manyhands.core import progress
from manyhands.core.seeds import named_seed
from manyhands.data.batches import Batch, Collate, MicroBatches, collate_here, iterate
from manyhands.data.collate import NOISE_KEY, BatchShape, BatchWorkers, open_store_samples
from manyhands.data.image_batch import ImageWork
from manyhands.data.image_files import PixelBounds
from manyhands.data.pack import StepLayout, lay_out_packed, lay_out_unpacked
from manyhands.data.store import SampleSet
from manyhands.planner.efficiency import cost_of_images, lay_out_step, pack_tile
from manyhands.training.step import StepWork, TermWeight
from manyhands.worker.context import RankContext

SetName = Literal["train", "validation"]


def open_workers(rank: RankContext) -> None:
    """Starts the processes that the plan names, once; they serve training and every evaluation until closed."""
    num_workers = rank.plan.layout.data_workers
    if num_workers:
        rank.workers = BatchWorkers(functools.partial(open_store_samples, rank.store.folder), num_workers)
        rank.print(
            f"batches: {num_workers} process{'es' * (num_workers != 1)} a rank collate{'s' * (num_workers == 1)} ahead"
        )


def close_workers(rank: RankContext) -> None:
    if rank.workers is not None:
        rank.workers.close()
        rank.workers = None


def collation(rank: RankContext, name: SetName) -> Collate:
    """How the batches of a set are made."""
    if rank.workers is not None:
        return functools.partial(rank.workers.collate, name, shape_of(rank, name))
    sample_set = rank.store.train if name == "train" else rank.store.validation
    return collate_here(sample_set, shape_of(rank, name))


def shape_of(rank: RankContext, name: SetName = "train") -> BatchShape:
    """Packs are padded to whole tiles on a GPU and where blocks are compiled; nothing is on a CPU otherwise.

    Compiled blocks get batches that differ in as little as possible: in the number of tokens, and not even in that
    where all samples have one length.
    """
    plan = rank.plan
    shape = BatchShape(plan.packing, images=images_of(rank), tells_documents=rank.loss_model.needs_documents)
    if not plan.packing:
        return shape
    tile = pack_tile(plan)
    pack_tokens = plan.layout.pack_tokens  # where all samples have one length
    if not plan.layout.compile and pack_tokens is None:
        return replace(shape, tile=tile)
    sets = (rank.store.train.lengths, rank.store.validation.lengths)
    longest = max(int(lengths.max()) for lengths in sets if len(lengths))
    if not plan.layout.compile:
        return replace(shape, tile=tile, row_length=longest)
    if pack_tokens is None:
        return replace(shape, tile=tile, longest=longest)
    documents = pack_tokens // longest
    return replace(shape, tokens=pack_tokens, longest=longest, documents=documents, row_length=longest)


def images_of(rank: RankContext) -> ImageWork | None:
    """How images become entries of a batch; None in a run without images."""
    outer = ("vision", "projector")  # left out where the training data turned out to have no image
    if rank.store.train.num_images is None or all(rank.plan.parts.get(part) == "left_out" for part in outer):
        return None
    data, sets = rank.config.data, (rank.store.train, rank.store.validation)
    return ImageWork(
        rank.plan.model_folder,
        PixelBounds.of(data),
        str(Path(data.cache).expanduser() / "images"),
        int(data.image_cache_gb * 1e9),
        int(data.image_memory_gb * 1e9),
        sum(int(each.image_units.sum()) for each in sets if each.image_units is not None),
        rank.features,
    )


def with_images(sample_set: SampleSet, samples: np.ndarray, layout: StepLayout) -> StepLayout:
    """The layout, which says in a run with images whether one of its samples has one."""
    if sample_set.num_images is None:
        return layout
    return replace(layout, has_images=bool(sample_set.num_images[samples].any()))


def lay_out_evaluation(rank: RankContext, sample_set: SampleSet, samples: np.ndarray) -> StepLayout:
    """Samples of an evaluation, however many micro-batches that takes."""
    plan, num_ranks = rank.plan, rank.plan.layout.data_parallel_degree
    if plan.layout.micro_tokens is not None:
        capacity = max(plan.layout.pack_tokens or plan.layout.micro_tokens, int(sample_set.lengths[samples].max()))
        return with_images(
            sample_set,
            samples,
            lay_out_packed(
                samples, sample_set.lengths, num_ranks, capacity, cost_of_images(plan, sample_set.image_units)
            ),
        )
    assert plan.layout.micro_samples is not None
    accumulation = -(-len(samples) // (plan.layout.micro_samples * num_ranks))
    layout = lay_out_unpacked(samples, num_ranks, plan.layout.micro_samples, accumulation)
    return with_images(sample_set, samples, layout)


def iterate_layouts(
    rank: RankContext, name: SetName, layouts: Iterable[StepLayout]
) -> Iterator[tuple[StepLayout, MicroBatches]]:
    """Each layout of the set's samples with this rank's micro-batches, prepared ahead."""
    return iterate(layouts, rank.plan.layout.mesh.data_rank(rank.world.rank), rank.world.device, collation(rank, name))


def iterate_steps(rank: RankContext) -> Iterator[StepWork]:
    """The remaining steps of the run, from ``rank.state.step`` on."""
    coming: deque[StepWork] = deque()  # laid out by the thread that reads ahead, not yet trained

    def lay_out_steps() -> Iterator[StepLayout]:
        for step in range(rank.state.step, rank.plan.num_steps):
            epoch, index = rank.order.locate(step)
            samples = rank.order.samples(epoch, index)
            train = rank.store.train
            layout = with_images(train, samples, lay_out_step(rank.plan, samples, train.lengths, train.image_units))
            coming.append(
                _describe(rank, step, epoch + (index + 1) / rank.order.steps_per_epoch(epoch), samples, layout)
            )
            yield layout

    for _, micro_batches in iterate_layouts(rank, "train", lay_out_steps()):
        work = coming.popleft()
        batches = _advance_by_batch(micro_batches, _tell_step(rank, work.step))
        yield replace(work, micro_batches=batches, waited_s=micro_batches.waited_s)


def _tell_step(rank: RankContext, step: int) -> Batch:
    """What each micro-batch of a step says of it."""
    if not rank.config.method.neftune_alpha:
        return {}
    return {NOISE_KEY: named_seed(rank.config.seed, f"noise of epoch {rank.order.locate(step)[0]}, step {step}")}


def _advance_by_batch(micro_batches: MicroBatches, told: Batch) -> Iterator[Batch]:
    """A step of many micro-batches is no standstill."""
    for batch in micro_batches:
        progress.advance()
        yield batch | told


def _describe(rank: RankContext, step: int, epoch: float, samples: np.ndarray, layout: StepLayout) -> StepWork:
    train, mine = rank.store.train, layout.samples_of_rank(rank.plan.layout.mesh.data_rank(rank.world.rank))
    return StepWork(
        step=step,
        epoch=epoch,
        num_samples=len(samples),
        num_tokens=int(train.lengths[samples].sum()),
        num_loss_tokens=int(train.num_loss_tokens[samples].sum()),
        num_micro_batches=layout.num_micro_batches,
        weights={
            term.name: TermWeight(float(term.weigh(train, samples).sum()), float(term.weigh(train, mine).sum()))
            for term in rank.loss_model.terms
        },
        micro_batches=(),
    )
