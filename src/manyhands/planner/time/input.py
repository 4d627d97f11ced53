"""What the terms of the time estimate are functions of. Plain values; no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from manyhands.planner.memory.input import EstimateInput
from manyhands.planner.time.rates import Fitted, GpuRates
from manyhands.planner.time.work import MeanStep


@dataclass(frozen=True)
class TimeInput:
    """One layout of one run, as far as time is concerned."""

    estimate: EstimateInput
    work: MeanStep
    rates: GpuRates
    fitted: Fitted
    attention: Literal["varlen", "sdpa", "blockwise"]
    num_local: int  # ranks of one machine
    has_flash4: bool = False  # FlashAttention 4 computes attention, packs as fast as samples of one length
    collate_tokens_s: float = math.inf  # tokens/s that the rank's thread or processes collate
