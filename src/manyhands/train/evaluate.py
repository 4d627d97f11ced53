"""A pass over validation rows: sums over all ranks first, one division at the end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

import torch
from torch import nn

from manyhands.train.types import Batch, Evaluation, ParallelModel, TrainState


def evaluate(
    parallel: ParallelModel,
    module: nn.Module,
    micro_batches: Iterable[Batch],
    state: TrainState,
    *,
    num_rows: int,
    num_tokens: int,
    device: torch.device,
    sample: Callable[[], tuple[tuple[str, str], ...]] | None = None,
) -> Evaluation:
    """Loss by weight and accuracy by tokens, over all ranks. Every rank must bring the same number of micro-batches.

    ``module`` is put into evaluation mode for the pass. Sums are kept in float64 on the device and read once.
    """
    start = time.monotonic()
    was_training = module.training
    module.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=device)  # loss sum, its weight, correct, trained tokens
    try:
        with torch.no_grad():
            for batch in micro_batches:
                terms = parallel(batch, metrics=True)
                sums += torch.stack([number.double() for term in ("lm", "correct") for number in terms[term]])
            parallel.all_reduce_sum(sums)
            samples = sample() if sample is not None else ()
    finally:
        module.train(was_training)
    loss_sum, weight, num_correct, num_targets = sums.tolist()
    loss = loss_sum / weight
    return Evaluation(
        step=state.step,
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)),
        accuracy=num_correct / num_targets,
        num_rows=num_rows,
        num_tokens=num_tokens,
        num_targets=int(num_targets),
        seconds=time.monotonic() - start,
        samples=samples,
    )
