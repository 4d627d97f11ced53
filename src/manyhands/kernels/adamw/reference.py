"""AdamW's update of one parameter in torch operations, what the Triton kernel is compared with, and what both share:
the step's numbers, and the random bits of stochastic rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

EAGER_ELEMENTS = 2**24  # widened at once: 64 MiB in float32
WORD = 2**32 - 1
GOLDEN = 0x9E3779B9  # 2**32 over the golden ratio: consecutive multiples are spread evenly (Knuth, vol. 3, 6.4)


@dataclass(frozen=True)
class Rates:
    """What all parameters of a group share in one step: betas that are float32 numbers, the learning rate times the
    weight decay.
    """

    beta1: float
    beta2: float
    eps: float
    decay: float


@dataclass(frozen=True)
class AdamWTensors:
    """One parameter, or this rank's part of it: n elements each, side by side in memory.

    ``weight``, ``exp_avg`` and ``exp_avg_sq`` have one dtype, float32 or bfloat16, and are written; ``gradient`` is in
    either. ``row`` (4) float32: step size lr / (1 - beta1^t), sqrt(1 - beta2^t), t. ``key`` (4) int32, where rounding
    is stochastic: 64 random bits, and the index of the first element in the whole parameter (low and high word).
    ``copy`` takes the new weights.
    """

    weight: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    row: torch.Tensor
    copy: torch.Tensor | None = None
    key: torch.Tensor | None = None


Update = Callable[[AdamWTensors, Rates, torch.Tensor | None], None]
UpdateAll = Callable[[Sequence[AdamWTensors], Rates, torch.Tensor | None], None]


def one_by_one(update: Update) -> UpdateAll:
    def update_all(parts: Sequence[AdamWTensors], rates: Rates, factor: torch.Tensor | None) -> None:
        for part in parts:
            update(part, rates, factor)

    return update_all


def make_rows(counts: torch.Tensor, lr: float, beta1: float, beta2: float) -> torch.Tensor:
    """``AdamWTensors.row`` of each parameter, from the steps it has taken (n) -> (n, 4); in float64 until the end."""
    wide = counts.double()
    size = lr / (1 - beta1**wide)
    root = (1 - beta2**wide).sqrt()
    return torch.stack([size, root, wide, torch.zeros_like(wide)], 1).float()


def update_reference(part: AdamWTensors, rates: Rates, factor: torch.Tensor | None) -> None:
    """The reference (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101, algorithm 2): in float32, in
    place.
    """
    size, root, _, _ = part.row.unbind(0)
    for start in range(0, part.weight.numel(), EAGER_ELEMENTS):
        some = slice(start, start + EAGER_ELEMENTS)
        weight, gradient = part.weight[some].float(), part.gradient[some].float()
        if factor is not None:
            gradient = gradient * factor
        weight = weight - rates.decay * weight
        exp_avg = rates.beta1 * part.exp_avg[some].float() + (1 - rates.beta1) * gradient
        exp_avg_sq = rates.beta2 * part.exp_avg_sq[some].float() + (1 - rates.beta2) * gradient * gradient
        weight = weight - size * exp_avg / (exp_avg_sq.sqrt() / root + rates.eps)
        if part.key is not None:
            bits = random_bits(part.key, part.row[2], start, weight.numel())
            weight, exp_avg_sq = round_to_bfloat16(weight, bits & 0xFFFF), round_to_bfloat16(exp_avg_sq, bits >> 16)
        part.weight[some], part.exp_avg[some], part.exp_avg_sq[some] = weight, exp_avg, exp_avg_sq
        if part.copy is not None:
            part.copy[some] = weight


def make_key(seed: int, parameter: int, first: int) -> tuple[int, int, int, int]:
    """``AdamWTensors.key`` as four signed words: 64 bits that differ for every (seed, parameter), and the index of the
    first element.
    """
    state = mix(mix(seed & WORD) ^ (seed >> 32 & WORD))
    words = (mix(state + parameter * GOLDEN & WORD), mix(~state + parameter * GOLDEN & WORD), first & WORD, first >> 32)
    return tuple(word - 2**32 if word >= 2**31 else word for word in words)  # type: ignore[return-value]


def random_bits(key: torch.Tensor, count: torch.Tensor, start: int, num: int) -> torch.Tensor:
    """32 random bits for each of ``num`` elements from ``start`` of the part on, as int64; ``count`` is the step."""
    low, high, first_low, first_high = (key.long() & WORD).unbind(0)
    step = count.long()
    index = first_low + (first_high << 32) + torch.arange(start, start + num, device=key.device)
    first, second = mix(low ^ (step * GOLDEN & WORD)), mix(high + step & WORD)
    return mix(mix(index & WORD ^ first) ^ second ^ (index >> 32) * GOLDEN & WORD)


def mix(word: Any) -> Any:
    """A bijection of 32 bits in which every bit of the result depends on every bit of ``word``: MurmurHash3's last
    step.
    """
    word = (word ^ word >> 16) * 0x85EBCA6B & WORD
    word = (word ^ word >> 13) * 0xC2B2AE35 & WORD
    return word ^ word >> 16


def round_to_bfloat16(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """float32 values to one of their two neighbors in bfloat16, to the nearer more often: 16 random ``bits`` are added
    to the 16 that bfloat16 lacks. The mean is the value itself. Returns float32; what is no finite number stays.
    """
    rounded = ((values.view(torch.int32).long() + bits) & 0xFFFF0000).to(torch.int32).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values)
