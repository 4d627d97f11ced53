"""The largest micro-batch before the first step: where memory is too small, that shows in the first seconds.

One that is as large as any of the run, of the longest samples, goes forward and backward while everything else that a
step holds is there, and one of the evaluation forward; and another one where that needs more memory for its length.
Nothing is trained: the loss is multiplied by zero, and its gradients are dropped.
"""

from __future__ import annotations

import torch

from manyhands.model.inputs import describe_batch
from manyhands.worker.batches import largest_batches
from manyhands.worker.rank import BuiltModel, Data, Rank


def try_largest(rank: Rank, data: Data, built: BuiltModel) -> None:
    """On GPUs, by torch's own engine; every rank takes part."""
    if rank.world.device.type == "cuda" and not rank.plan.layout.zero_stage:
        run_largest(rank, data, built)


def run_largest(rank: Rank, data: Data, built: BuiltModel) -> None:
    """Forward and backward (twice if gradients accumulate), then the evaluation's forward pass."""
    engine, loss_model, layout, device = built.engine, built.loss_model, rank.plan.layout, rank.world.device
    states = None
    if not engine.optimizer.state and layout.offload == "none" and layout.device != "cpu":
        # As many bytes as optimizer states will take, where these are only made in the first update.
        states = torch.empty(rank.plan.memory.terms.get("optimizer", 0), dtype=torch.uint8, device=device)
    sizes = []
    loss_model.train()
    for batch in largest_batches(rank, data, loss_model, "train"):
        for last in (False, True) if layout.accumulates else (True,):
            terms = engine.forward(batch)
            engine.backward(torch.stack([term_sum for term_sum, _ in terms.values()]).sum() * 0, last=last)
            del terms
        engine.gradient_norm()
        engine.drop_gradients()
        sizes.append(describe_batch(batch))
    if len(data.store.validation.lengths):
        loss_model.eval()
        with torch.no_grad():
            for batch in largest_batches(rank, data, loss_model, "validation"):
                engine.forward(batch)
        loss_model.train()
    del states
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    rank.process.print(f"largest micro-batch: {' and '.join(sizes)}, forward and backward, fits")
