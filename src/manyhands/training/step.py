"""One optimizer step, and the one place that divides a loss.

Contract: a forward pass returns loss terms by name, each a (sum, weight). With L_t,k the sum and n_t,k the weight of
term t in micro-batch k of a rank, the step's loss is ``sum_t c_t sum(L_t) / sum(n_t)`` over all ranks and
micro-batches: every term is divided by its own weight and then scaled by its coefficient c_t, both as it is declared
(``core/terms.py``). ``N_t = sum(n_t)`` is known before the first backward pass, so each micro-batch contributes
``(sum_t c_t L_t,k / N_t).backward()`` and ranks add their gradients up. No mean is ever taken of means. Evaluation
(``training/loop.py``) computes the same loss.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from manyhands.core.terms import IS_FOR_VALUE, LANGUAGE_MODEL, LossTerm
from manyhands.training.types import Batch, Engine


@dataclass(frozen=True)
class TermWeight:
    """What the sums of one loss term weigh in one step."""

    total: float  # over all ranks and micro-batches
    own: float  # of this rank's micro-batches; an equal part where ranks divide each


@dataclass(frozen=True)
class StepWork:
    """What this rank does in one step, and what all ranks together do in it."""

    step: int  # counted from 0
    epoch: float  # passes done when the step is done
    num_samples: int  # over all ranks, as are the next two
    num_tokens: int
    num_loss_tokens: int
    num_micro_batches: int  # of each rank
    weights: Mapping[str, TermWeight]  # of each declared loss term, by name
    micro_batches: Iterable[Batch]  # this rank's; before them those for values of terms (``with_values``)
    waited_s: Callable[[], float] = lambda: 0.0  # seconds this rank has waited for its micro-batches so far


@dataclass(frozen=True)
class StepSums:
    """Left on the device: nothing here has waited for the GPU."""

    terms: Mapping[str, torch.Tensor]  # this rank's sum of each loss term, 0-d float64
    grad_norm: torch.Tensor  # global, before clipping, 0-d float64
    worked_until: float = 0.0  # when this rank had nothing left to do but the last backward pass, by time.monotonic


def compute_gradients(
    engine: Engine, work: StepWork, *, seed: int, rank: int, terms: Sequence[LossTerm] = (LANGUAGE_MODEL,)
) -> StepSums:
    """Forward and backward over the rank's micro-batches; gradients are reduced once, and not clipped yet.

    ``terms`` are those declared; ValueError where the forward pass returns others.

    Dropout is keyed by (seed, step, micro-batch, rank), so a resumed run repeats it without any stored random state.
    """
    names = {term.name for term in terms}
    sums: dict[str, torch.Tensor] = {}
    worked_until = time.monotonic()
    torch.manual_seed(_key(seed, work.step, work.num_micro_batches, rank))  # of those for values of terms
    for index, batch in enumerate(with_values(engine, work.micro_batches)):
        torch.manual_seed(_key(seed, work.step, index, rank))
        found = engine.forward(batch)
        refuse_undeclared(found, names)
        shares = [_share(found[term.name][0], work.weights[term.name].total, term.coefficient) for term in terms]
        worked_until = time.monotonic()  # the last backward pass waits for other ranks' gradients
        engine.backward(reduce(torch.add, shares), last=index == work.num_micro_batches - 1)
        for name, (term_sum, _) in found.items():
            detached = term_sum.detach().double()
            sums[name] = sums[name] + detached if name in sums else detached
    if not sums:
        raise ValueError("a step needs at least one micro-batch")
    return StepSums(sums, engine.gradient_norm(), worked_until)


def with_values(engine: Engine, micro_batches: Iterable[Batch]) -> Iterator[Batch]:
    """Micro-batches of a step or evaluation, with terms' values (``StepValue``) from those that come first."""
    sums: dict[str, torch.Tensor] = {}  # (sum, weight) of each
    values: dict[str, torch.Tensor] | None = None
    for batch in micro_batches:
        if batch.get(IS_FOR_VALUE):
            with torch.no_grad():
                for name, pair in engine.forward(batch).items():
                    added = torch.stack([number.double() for number in pair])
                    sums[name] = sums[name] + added if name in sums else added
            continue
        if values is None:
            totals = {name: engine.all_reduce_sum(sums[name]) for name in sorted(sums)}
            values = {name: total[0] / total[1].clamp(min=1) for name, total in totals.items()}
        yield {**batch, **values}


def refuse_undeclared(found: Collection[str], wanted: Collection[str]) -> None:
    """ValueError unless a forward pass returns exactly the declared terms, with weights and coefficients."""
    if set(found) != set(wanted):
        raise ValueError(f"the forward pass returns {sorted(found)}, declared are {sorted(wanted)} (core/terms.py)")


def combine(means: Mapping[str, float], terms: Sequence[LossTerm]) -> float:
    """The loss: each term's mean by its coefficient. nan where there is no mean."""
    scaled = [term.coefficient * means[term.name] for term in terms if term.name in means]
    return sum(scaled) if scaled else math.nan


def _share(term_sum: torch.Tensor, weight: float, coefficient: float) -> torch.Tensor:
    """A micro-batch's part of the loss; terms without weight add a zero that depends on every parameter."""
    if not weight:
        return term_sum * 0
    share = term_sum / weight
    return share if coefficient == 1 else share * coefficient


def _key(seed: int, step: int, index: int, rank: int) -> int:
    """A 63-bit mix of four numbers (multiply, xor-shift, as SplitMix64): neighboring steps share nothing."""
    value = seed & (2**64 - 1)
    for part in (step, index, rank):
        value = ((value ^ (part + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        value ^= value >> 31
    return value >> 1
