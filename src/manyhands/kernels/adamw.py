"""AdamW in one pass: gradient, moments and weight are read once, and what computes the next step is written beside
them.

A kernel a parameter reads weight, moments and gradient, scales the gradient by the factor that clips it, and writes
weight, moments and, where float32 weights have one, the bfloat16 copy that computes. In float32 with a gradient in
bfloat16 that moves 28 bytes a weight, where clipping, AdamW and a cast apart move 42. Knows no model, no ranks and no
run.

Weights in bfloat16 are rounded stochastically: an update of less than half the distance of two neighbours, as most are,
would vanish otherwise. So is the second moment, which moves by a thousandth a step. The random bits follow from (seed,
parameter, step, index of the element) alone, so they are the same in every layout of ranks, and on CPU and GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from manyhands.core.holding import local
from manyhands.kernels.backend import Backend, beyond_bound, triton_or

EAGER_ELEMENTS = 2**24  # that plain torch widens at once: 64 MiB in float32
BACKENDS = ("triton", "eager")
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
class Part:
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


Update = Callable[[Part, Rates, torch.Tensor | None], None]


class FusedAdamW(torch.optim.AdamW):
    """torch's AdamW with another kernel: the same groups, the same states under the same names, the same arithmetic in
    float32.

    ``gradient_factor``, 0-d float32 on the device, is what the next step multiplies gradients by while it reads them;
    it is forgotten afterwards. ``copies`` maps a weight to its copy for computing, ``written`` is told when all are.
    Gradients may be narrower than their weights (``grad_dtype``). Weights in bfloat16 have states in bfloat16; ``seed``
    is that of their rounding and ``first_index`` says where this rank's part begins in the whole, counted in elements.
    """

    def __init__(
        self,
        groups: Any,
        *,
        backend: str,
        copies: Mapping[torch.Tensor, torch.Tensor] | None = None,
        written: Callable[[], None] = lambda: None,
        seed: int = 0,
        first_index: Callable[[torch.Tensor], int] = lambda _: 0,
        **options: Any,
    ) -> None:
        super().__init__(groups, fused=True, **options)
        self.gradient_factor: torch.Tensor | None = None
        self._copies, self._written = copies or {}, written
        self._update = find_update(backend)
        self._keys: dict[torch.Tensor, torch.Tensor] = {}
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            if parameter.dtype == torch.bfloat16:
                key = make_key(seed, index, first_index(parameter))
                self._keys[parameter] = torch.tensor(key, dtype=torch.int32, device=parameter.device)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient. Waits for nothing."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._step_group(group, parameters)
        self.gradient_factor = None
        self._written()

    def _step_group(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        # Rounded first, as torch's kernel does: what a moment keeps and what it takes up then add up to 1 in float32
        # too.
        (beta1, beta2), lr = torch.tensor(group["betas"], dtype=torch.float32).tolist(), group["lr"]
        states = [self._state_of(parameter) for parameter in parameters]
        counts = [state["step"] for state in states]
        torch._foreach_add_(counts, 1)
        rates = Rates(beta1, beta2, group["eps"], lr * group["weight_decay"])
        rows = make_rows(torch.stack(counts), lr, beta1, beta2).unbind(0)
        for parameter, state, row in zip(parameters, states, rows, strict=True):
            assert parameter.grad is not None
            copy = self._copies.get(parameter)
            part = Part(
                weight=_flat(parameter),
                gradient=local(parameter.grad).reshape(-1),
                exp_avg=_flat(state["exp_avg"]),
                exp_avg_sq=_flat(state["exp_avg_sq"]),
                row=row,
                copy=None if copy is None else _flat(copy),
                key=self._keys.get(parameter),
            )
            if part.weight.numel():
                self._update(part, rates, self.gradient_factor)

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return state


@lru_cache
def choose_backend(device: torch.device) -> Backend:
    """Triton where it can be imported and passes a comparison with plain torch on ``device``, else plain torch, with
    the reason.
    """
    return triton_or(
        "eager", device, "triton_adamw", lambda kernels: beyond_bound(kernels.compare(device, update_eager))
    )


def find_update(backend: str) -> Update:
    """The function that updates a part, by one of ``BACKENDS``."""
    if backend == "triton":
        from manyhands.kernels.triton_adamw import update_triton

        return update_triton
    return update_eager


def make_rows(counts: torch.Tensor, lr: float, beta1: float, beta2: float) -> torch.Tensor:
    """``Part.row`` of each parameter, from the steps that it has taken (n) -> (n, 4); in float64 until the end."""
    wide = counts.double()
    size = lr / (1 - beta1**wide)
    root = (1 - beta2**wide).sqrt()
    return torch.stack([size, root, wide, torch.zeros_like(wide)], 1).float()


def update_eager(part: Part, rates: Rates, factor: torch.Tensor | None) -> None:
    """The plain reference (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101, algorithm 2): in float32, in
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
    """``Part.key`` as four signed words: 64 bits that differ for every (seed, parameter), and the first element's
    index.
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
    """float32 values to one of their two neighbours in bfloat16, to the nearer more often: 16 random ``bits`` are added
    to the 16 that bfloat16 lacks. The mean is the value itself. Returns float32; what is no finite number stays.
    """
    rounded = ((values.view(torch.int32).long() + bits) & 0xFFFF0000).to(torch.int32).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements as one row that shares their memory; RuntimeError where they do not lie side by side."""
    return local(tensor).view(-1)
