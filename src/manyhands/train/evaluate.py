"""A pass over validation samples: sums over all ranks first, then one division of each term by its own weight."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from manyhands.train.step import LM_ALONE, combine
from manyhands.train.types import METRICS, Batch, Engine, Evaluation, TrainState

MAX_EXPONENT = 700.0  # exp of more is beyond float64


def evaluate(
    engine: Engine,
    module: nn.Module,
    micro_batches: Iterable[Batch],
    state: TrainState,
    *,
    num_samples: int,
    num_tokens: int,
    device: torch.device,
    coefficients: Mapping[str, float] = LM_ALONE,
    sample: Callable[[], tuple[tuple[str, str], ...]] | None = None,
) -> Evaluation:
    """Each loss term by its weight and accuracy by tokens, over all ranks. Every rank must bring the same number of
    micro-batches.

    ``module`` is put into evaluation mode for the pass. Sums are kept in float64 on the device and read once.
    """
    start = time.monotonic()
    was_training = module.training
    module.eval()
    names: list[str] = []
    sums = torch.zeros(0, dtype=torch.float64, device=device)  # of each term its sum and its weight
    try:
        with torch.no_grad():
            for batch in micro_batches:
                terms = engine.forward(batch, metrics=True)
                names = sorted(terms)  # the same in every batch and on every rank
                found = torch.stack([number.double() for name in names for number in terms[name]])
                sums = found if len(sums) == 0 else sums + found
            engine.all_reduce_sum(sums)
            samples = sample() if sample is not None else ()
    finally:
        module.train(was_training)
    totals = sums.tolist()
    by_name = {name: (totals[2 * i], totals[2 * i + 1]) for i, name in enumerate(names)}
    num_correct, num_loss_tokens = by_name["correct"]
    losses = {name: total / weight for name, (total, weight) in by_name.items() if name not in METRICS and weight}
    return Evaluation(
        step=state.step,
        loss=combine(losses, coefficients),
        perplexity=math.exp(losses["lm"]) if losses["lm"] < MAX_EXPONENT else math.inf,
        accuracy=num_correct / num_loss_tokens,
        num_samples=num_samples,
        num_tokens=num_tokens,
        num_loss_tokens=int(num_loss_tokens),
        seconds=time.monotonic() - start,
        samples=samples,
        terms=losses if len(losses) > 1 else {},
    )
