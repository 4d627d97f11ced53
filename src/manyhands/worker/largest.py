"""The largest micro-batch before the first step: where memory is too small, that shows in the first seconds.

One that is as large as any of the run, of the longest samples, goes forward and backward while everything else that a
step holds is there, and one of the evaluation forward. Nothing is trained: the loss is multiplied by zero, and its
gradients are dropped.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from manyhands.data.batches import collate
from manyhands.data.store import SampleSet
from manyhands.plan.layout import Layout
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
    states = reserve_states(rank)
    batch = largest_batch(rank, "train")
    rank.loss_model.train()
    for last in (False, True) if layout.accumulates else (True,):
        terms = engine.forward(batch)
        engine.backward(torch.stack([term_sum for term_sum, _ in terms.values()]).sum() * 0, last=last)
        del terms
    engine.gradient_norm()
    engine.drop_gradients()
    if len(rank.store.validation.lengths):
        rank.loss_model.eval()
        with torch.no_grad():
            engine.forward(largest_batch(rank, "validation"))
        rank.loss_model.train()
    del states
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    rank.print(f"largest micro-batch: {describe(batch)}, forward and backward, fits")


def reserve_states(rank: RankContext) -> torch.Tensor | None:
    """As many bytes as optimizer states will take, where these are only made in the first update."""
    layout = rank.plan.layout
    if rank.engine.optimizer.state or layout.offload != "none" or layout.device == "cpu":
        return None
    return torch.empty(rank.plan.memory.terms.get("optimizer", 0), dtype=torch.uint8, device=rank.world.device)


def largest_batch(rank: RankContext, name: Any) -> dict[str, Any]:
    """The longest samples of a set, as many as a micro-batch holds."""
    samples: SampleSet = rank.store.train if name == "train" else rank.store.validation
    chosen = longest_samples(samples.lengths, rank.plan.layout)
    batch = collate(samples, chosen, shape_of(rank, name))
    device = rank.world.device
    return {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def longest_samples(lengths: np.ndarray, layout: Layout) -> np.ndarray:
    """Sample ids, the longest first; of a pack those that still find room, one sample at least."""
    order = np.argsort(-lengths, kind="stable")
    if layout.micro_tokens is None:
        return order[: layout.micro_samples or 1]
    room, chosen = layout.pack_tokens or layout.micro_tokens, []
    for sample in order.tolist():
        if lengths[sample] <= room:
            chosen.append(sample)
            room -= int(lengths[sample])
        if room < int(lengths[order[-1]]):
            break
    return np.array(chosen or [int(order[0])], dtype=np.int64)


def describe(batch: dict[str, Any]) -> str:
    shape = tuple(batch["input_ids"].shape)
    return f"{shape[0]} x {shape[1]:,} tokens"
