"""One optimizer step, and the one place that divides a loss.

Contract: a forward pass returns loss terms by name, each a (sum, weight). With L_t,k the sum and n_t,k the weight of
term t in micro-batch k of a rank (for "lm" the number of loss tokens, or the sum of their weights), the step's loss is
``sum_t c_t sum(L_t) / sum(n_t)`` over all ranks and micro-batches: every term is divided by its own weight and then
scaled by its coefficient c_t from the plan. ``N_t = sum(n_t)`` is known before the first backward pass, so each
micro-batch contributes ``(sum_t c_t L_t,k / N_t).backward()`` and ranks add their gradients up. No mean is ever taken
of means. Evaluation (``training/loop.py``) computes the same loss.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce

import torch

from manyhands.training.types import Batch, Engine

LM_ALONE: Mapping[str, float] = {"lm": 1.0}


@dataclass(frozen=True)
class TermWeight:
    """What the sums of one loss term weigh in one step."""

    total: float  # over all ranks and micro-batches
    own: float  # of this rank's micro-batches


@dataclass(frozen=True)
class StepWork:
    """What this rank does in one step, and what all ranks together do in it."""

    step: int  # counted from 0
    epoch: float  # passes done when the step is done
    num_samples: int  # over all ranks, as are the next two
    num_tokens: int
    num_loss_tokens: int
    num_micro_batches: int  # of each rank
    num_rank_loss_tokens: int  # loss tokens of this rank
    micro_batches: Iterable[Batch]  # this rank's
    loss_weight: float | None = None  # sum of the weights of all ranks' labels; none: each weighs 1
    rank_loss_weight: float | None = None  # of this rank's
    other_weights: Mapping[str, TermWeight] = field(default_factory=dict)  # of loss terms beside "lm", by name
    waited_s: Callable[[], float] = lambda: 0.0  # seconds this rank has waited for its micro-batches so far

    def weight_of(self, term: str) -> TermWeight:
        """What a term's sums are divided by. Of "lm" exact integers where every loss token weighs 1."""
        if term != "lm":
            if term not in self.other_weights:
                raise ValueError(f"loss term {term!r} has no weight in StepWork.other_weights: it cannot be divided")
            return self.other_weights[term]
        total = self.num_loss_tokens if self.loss_weight is None else self.loss_weight
        return TermWeight(total, self.num_rank_loss_tokens if self.rank_loss_weight is None else self.rank_loss_weight)


@dataclass(frozen=True)
class StepSums:
    """Left on the device: nothing here has waited for the GPU."""

    terms: Mapping[str, torch.Tensor]  # this rank's sum of each loss term, 0-d float64
    grad_norm: torch.Tensor  # global, before clipping, 0-d float64
    worked_until: float = 0.0  # when this rank had nothing left to do but the last backward pass, by time.monotonic


def compute_gradients(
    engine: Engine, work: StepWork, *, seed: int, rank: int, coefficients: Mapping[str, float] = LM_ALONE
) -> StepSums:
    """Forward and backward over the rank's micro-batches; gradients are reduced once, and not clipped yet.

    ``coefficients`` scale each loss term, by name; ValueError for a term that has none, or no weight.

    Dropout is keyed by (seed, step, micro-batch, rank), so a resumed run repeats it without any stored random state.
    """
    sums: dict[str, torch.Tensor] = {}
    worked_until = time.monotonic()
    for index, batch in enumerate(work.micro_batches):
        torch.manual_seed(_key(seed, work.step, index, rank))
        terms = engine.forward(batch)
        shares = [
            _share(term_sum, work.weight_of(name).total, coefficient_of(name, coefficients))
            for name, (term_sum, _) in terms.items()
        ]
        worked_until = time.monotonic()  # the last backward pass waits for other ranks' gradients
        engine.backward(reduce(torch.add, shares), last=index == work.num_micro_batches - 1)
        for name, (term_sum, _) in terms.items():
            detached = term_sum.detach().double()
            sums[name] = sums[name] + detached if name in sums else detached
    if not sums:
        raise ValueError("a step needs at least one micro-batch")
    return StepSums(sums, engine.gradient_norm(), worked_until)


def coefficient_of(term: str, coefficients: Mapping[str, float]) -> float:
    """What a term is scaled by. ValueError where the plan has none for it."""
    if term not in coefficients:
        raise ValueError(f"loss term {term!r} has no coefficient in Plan.loss_coefficients: {dict(coefficients)}")
    return coefficients[term]


def combine(means: Mapping[str, float], coefficients: Mapping[str, float]) -> float:
    """The loss: each term's mean by its coefficient. nan where there is no term."""
    scaled = [coefficient_of(name, coefficients) * mean for name, mean in means.items()]
    return sum(scaled) if scaled else math.nan


def _share(term_sum: torch.Tensor, weight: float, coefficient: float) -> torch.Tensor:
    """A micro-batch's part of the step's loss. A term that weighs nothing on any rank adds a zero that depends on every
    parameter, so that none leaves the reduction.
    """
    if not weight:
        return term_sum * 0
    share = term_sum / weight
    return share if coefficient == 1 else share * coefficient


def _key(seed: int, step: int, index: int, rank: int) -> int:
    """A 63-bit mix of the four numbers (multiply and xor-shift, as in SplitMix64), so that neighboring steps share
    nothing.
    """
    value = seed & (2**64 - 1)
    for part in (step, index, rank):
        value = ((value ^ (part + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        value ^= value >> 31
    return value >> 1
