"""The largest micro-batch before the first step: where memory is too small, that shows in the first seconds.

One that is as large as any of the run, of the longest samples, goes forward and backward while everything else that a
step holds is there, and one of the evaluation forward; where samples have images, also one with as many patches as any.
Nothing is trained: the loss is multiplied by zero, and its gradients are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from manyhands.data.batches import collate
from manyhands.data.store import SampleSet
from manyhands.planner.layout import Layout
from manyhands.worker.batches import shape_of
from manyhands.worker.context import RankContext


def try_largest(rank: RankContext) -> None:
    """On GPUs, by torch's own engine; every rank takes part."""
    if rank.world.device.type == "cuda" and not rank.plan.layout.zero_stage:
        run_largest(rank)


def run_largest(rank: RankContext) -> None:
    """Forward and backward, twice where a step holds gradients of earlier micro-batches; then the evaluation's forward
    pass.
    """
    engine, layout, device = rank.engine, rank.plan.layout, rank.world.device
    states, sizes = reserve_states(rank), []
    rank.loss_model.train()
    for batch in largest_batches(rank, "train"):
        for last in (False, True) if layout.accumulates else (True,):
            terms = engine.forward(batch)
            engine.backward(torch.stack([term_sum for term_sum, _ in terms.values()]).sum() * 0, last=last)
            del terms
        engine.gradient_norm()
        engine.drop_gradients()
        sizes.append(describe(batch))
    if len(rank.store.validation.lengths):
        rank.loss_model.eval()
        with torch.no_grad():
            for batch in largest_batches(rank, "validation"):
                engine.forward(batch)
        rank.loss_model.train()
    del states
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    rank.print(f"largest micro-batch: {' and '.join(sizes)}, forward and backward, fits")


def reserve_states(rank: RankContext) -> torch.Tensor | None:
    """As many bytes as optimizer states will take, where these are only made in the first update."""
    layout = rank.plan.layout
    if rank.engine.optimizer.state or layout.offload != "none" or layout.device == "cpu":
        return None
    return torch.empty(rank.plan.memory.terms.get("optimizer", 0), dtype=torch.uint8, device=rank.world.device)


def largest_batches(rank: RankContext, name: Any) -> Iterator[dict[str, Any]]:
    """The longest samples of a set, as many as a micro-batch holds; then those with the most patches, if others."""
    samples: SampleSet = rank.store.train if name == "train" else rank.store.validation
    shape, device = shape_of(rank, name), rank.world.device
    for chosen in largest_samples(samples.lengths, samples.image_units, rank.plan.layout):
        batch = collate(samples, chosen, shape)
        yield {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def largest_samples(lengths: np.ndarray, units: np.ndarray | None, layout: Layout) -> list[np.ndarray]:
    """Sample ids of the micro-batch with the longest samples; with images also of the one with most ``units`` (patches
    or squares, by sample id). What is left in a pack of those that have the most for their length is filled with
    others, so that it is as full of tokens as well: no micro-batch takes more of both.
    """
    order = np.argsort(-lengths, kind="stable")
    chosen = [_fill(order, lengths, layout)]
    if units is not None and units.any():
        most = units if layout.micro_tokens is None else units / np.maximum(lengths, 1)
        densest = _fill(np.lexsort((-lengths, -most)), lengths, layout)
        if set(densest.tolist()) != set(chosen[0].tolist()):
            chosen.append(densest)
    return chosen


def _fill(order: np.ndarray, lengths: np.ndarray, layout: Layout) -> np.ndarray:
    """The first of ``order``; of a pack those that still find room, one sample at least."""
    if layout.micro_tokens is None:
        return order[: layout.micro_samples or 1]
    room, chosen, shortest = layout.pack_tokens or layout.micro_tokens, [], int(lengths.min())
    for sample in order.tolist():
        if lengths[sample] <= room:
            chosen.append(sample)
            room -= int(lengths[sample])
        if room < shortest:
            break
    return np.array(chosen or [int(order[0])], dtype=np.int64)


def describe(batch: dict[str, Any]) -> str:
    shape, images = tuple(batch["input_ids"].shape), batch.get("pixel_values")
    patches = f" with {len(images):,} patches or squares of images" if images is not None and len(images) else ""
    return f"{shape[0]} x {shape[1]:,} tokens{patches}"
