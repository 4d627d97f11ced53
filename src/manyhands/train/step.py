"""One optimizer step, and the one place that divides a loss.

Contract: with L_k the loss sum and n_k the weight (the number of trained tokens, or the sum of their weights) of
micro-batch k on rank r, the step's loss is ``sum(L) / sum(n)`` over all ranks and micro-batches. ``N = sum(n)`` is known
before the first backward pass, so each micro-batch contributes ``(L_k / N).backward()`` and ranks add their gradients up.
No mean is ever taken of means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from manyhands.train.types import Batch, ParallelModel


@dataclass(frozen=True)
class StepWork:
    """What this rank does in one step, and what all ranks together do in it."""

    step: int  # counted from 0
    epoch: float  # passes done when the step is done
    num_rows: int  # over all ranks, as are the next two
    num_tokens: int
    num_targets: int
    num_micro_batches: int  # of each rank
    num_rank_targets: int  # trained tokens of this rank
    micro_batches: Iterable[Batch]  # this rank's
    target_weight: float | None = None  # sum of the weights of all ranks' targets; none: each weighs 1
    rank_target_weight: float | None = None  # of this rank's
    waited_s: Callable[[], float] = lambda: 0.0  # seconds this rank has waited for its micro-batches so far

    @property
    def divisor(self) -> float:
        """What every loss sum of the step is divided by. An exact integer without weights."""
        return self.num_targets if self.target_weight is None else self.target_weight

    @property
    def rank_divisor(self) -> float:
        """The same over this rank's own targets, for its own mean."""
        return self.num_rank_targets if self.rank_target_weight is None else self.rank_target_weight


@dataclass(frozen=True)
class StepSums:
    """Left on the device: nothing here has waited for the GPU."""

    loss_sum: torch.Tensor  # this rank's, 0-d float64
    grad_norm: torch.Tensor  # global, before clipping, 0-d float64


def compute_gradients(parallel: ParallelModel, work: StepWork, *, seed: int, rank: int) -> StepSums:
    """Forward and backward over the rank's micro-batches; gradients are reduced once, and not clipped yet.

    Dropout is keyed by (seed, step, micro-batch, rank), so a resumed run repeats it without any stored random state.
    """
    loss_sum: torch.Tensor | None = None
    for index, batch in enumerate(work.micro_batches):
        torch.manual_seed(_key(seed, work.step, index, rank))
        parallel.set_gradient_sync(index == work.num_micro_batches - 1)
        terms = parallel(batch)
        (torch.stack([term_sum for term_sum, _ in terms.values()]).sum() / work.divisor).backward()
        detached = terms["lm"][0].detach().double()
        loss_sum = detached if loss_sum is None else loss_sum + detached
    if loss_sum is None:
        raise ValueError("a step needs at least one micro-batch")
    return StepSums(loss_sum, parallel.gradient_norm())


def update_weights(optimizer: torch.optim.Optimizer, sums: StepSums, *, max_grad_norm: float) -> None:
    """Clips (0: does not), steps, and lets the gradients go."""
    if max_grad_norm > 0:
        clip_gradients(optimizer, sums.grad_norm, max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@runtime_checkable
class ScalesGradients(Protocol):
    """An optimizer that multiplies gradients by a factor while its next step reads them: clipping needs no pass of its own."""

    gradient_factor: torch.Tensor | None  # 0-d float32, on the gradients' device


def clip_gradients(optimizer: torch.optim.Optimizer, grad_norm: torch.Tensor, max_norm: float) -> None:
    """Scales all gradients by min(1, max_norm / (norm + 1e-6)), in place, without a host synchronisation.

    The factor comes from a norm summed in float64: float32 norms differ in the last digit between layouts, and through
    the factor that digit reaches every weight. An optimizer that scales by itself gets the factor, and gradients stay.
    """
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    local = [g.to_local() if hasattr(g, "to_local") else g for g in grads]
    if not local:
        return
    factor = (max_norm / (grad_norm + 1e-6)).clamp(max=1.0)
    if isinstance(optimizer, ScalesGradients):
        optimizer.gradient_factor = factor.to(local[0].device, torch.float32)
    else:
        torch._foreach_mul_(local, factor.to(local[0]))  # which may lie in host memory


def _key(seed: int, step: int, index: int, rank: int) -> int:
    """A 63-bit mix of the four numbers (multiply and xor-shift, as in SplitMix64), so that neighbouring steps share nothing."""
    value = seed & (2**64 - 1)
    for part in (step, index, rank):
        value = ((value ^ (part + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        value ^= value >> 31
    return value >> 1
