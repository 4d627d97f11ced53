"""The learning rate of each step. Imports no torch: a plan shows it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

Schedule = Callable[[int], float]


def make_schedule(
    name: Literal["cosine", "linear", "constant", "wsd"],
    *,
    peak: float,
    num_steps: int,
    warmup_steps: int,
    decay_ratio: float = 0.2,
    min_ratio: float = 0.0,
) -> Schedule:
    """Returns ``rate(step)`` for steps counted from 0.

    Warm-up: step i of ``warmup_steps`` gets ``peak * (i + 1) / warmup_steps``, so that no step has rate 0 and the first
    step after the warm-up has the peak. After it, with t in [0, 1) the share of the remaining steps that is done and
    m = ``min_ratio``: cosine ``m + (1 - m) (1 + cos(pi t)) / 2`` (Loshchilov and Hutter 2017), linear
    ``1 - (1 - m) t``, constant 1, wsd constant until the last ``decay_ratio`` of all steps, then linear to m; where the
    warm-up reaches into them the decay begins at its end. A warm-up longer than the run ends below the peak.
    """

    def after_warmup(step: int) -> float:
        done = (step - warmup_steps) / max(1, num_steps - warmup_steps)
        done = min(1.0, max(0.0, done))
        if name == "cosine":
            return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * done))
        if name == "linear":
            return 1 - (1 - min_ratio) * done
        if name == "wsd":
            start = max(warmup_steps, num_steps - max(1, round(num_steps * decay_ratio)))
            into_decay = (step - start) / max(1, num_steps - start)
            return 1 - (1 - min_ratio) * min(1.0, max(0.0, into_decay))
        return 1.0

    def rate(step: int) -> float:
        if step < warmup_steps:
            return peak * (step + 1) / warmup_steps
        return peak * after_warmup(step)

    return rate
