"""Which kernels run around the grouped products of experts: Triton's for bfloat16 on a GPU where they pass a comparison
with the reference, else the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

import torch

from manyhands.core.limits import MAX_EXPERT_RANK
from manyhands.kernels.backend import Backend, architecture_of, beyond_bound, triton_or
from manyhands.kernels.experts import reference
from manyhands.kernels.fp8.ops import multiply_groups, quantize_rows

BOUND = 0.02  # of a result's largest value: bfloat16 products added in another order
ROUNDED = 2**-4 + BOUND  # of rows in fp8, as they are compared with rows that are not

# What ``use`` chose for the process: the operators are opaque to torch.compile and run inside activation checkpoints,
# where nothing but tensors arrives.
_kernels: ModuleType | None = None


def kernels_for(x: torch.Tensor, rank: int) -> ModuleType:
    """The module that computes with ``x`` and factors of ``rank``."""
    fits = _kernels is not None and x.is_cuda and x.dtype == torch.bfloat16 and rank <= MAX_EXPERT_RANK
    return _kernels if fits and _kernels is not None else reference


def use(backend: Backend) -> None:
    """From now on experts compute by ``backend`` on GPUs; without this, by the reference."""
    global _kernels
    _kernels = None
    if backend.name == "triton":
        from manyhands.kernels.experts import triton

        _kernels = triton


@cache
def choose_backend(device: torch.device) -> Backend:
    """Triton where it can be imported and agrees with the reference on ``device``, else the reference, with the
    reason.
    """
    return triton_or("plain torch", device, "experts.triton", lambda kernels: find_fault(kernels, device))


def describe(backend: Backend) -> str:
    """One line for the log."""
    return "gate and low-rank updates by Triton" if backend.name == "triton" else f"in plain torch ({backend.reason})"


def find_fault(kernels: ModuleType, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> str:
    """What is wrong with the results of ``kernels``; nothing where they are the reference's."""
    architecture = architecture_of(device)
    in_fp8 = architecture is not None and architecture.multiplies_fp8_groups
    pairs = [(found, wanted, BOUND) for found, wanted in _compare(kernels, device, dtype)]
    pairs += [(found, wanted, ROUNDED) for found, wanted in (_compare_rows(kernels, device, dtype) if in_fp8 else ())]
    worst = 0.0
    for found, wanted, bound in pairs:
        largest = wanted.float().abs().max().clamp(min=1e-6)
        worst = max(worst, ((found.float() - wanted.float()).abs().max() / largest).item() / bound)
    return beyond_bound(worst)


def _compare_rows(
    kernels: ModuleType, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Rows in fp8, as numbers, beside those that they are made from; products and low-rank values beside the
    reference's.
    """
    draw = torch.Generator(device).manual_seed(0)
    counts = torch.tensor([0, 70, 1, 29], device=device)
    ends, num_rows, width, rank = counts.cumsum(0).int(), int(counts.sum()), 208, 16
    x, low, both = (
        torch.randn(num_rows, size, device=device, generator=draw).to(dtype) for size in (width, rank, 2 * width)
    )
    a, b = (
        torch.randn(4, *shape, device=device, generator=draw).to(dtype) / 4
        for shape in ((rank, width), (2 * width, rank))
    )
    tokens = torch.randint(num_rows, (num_rows,), device=device, generator=draw)
    factors = torch.arange(4 * width, device=device).view(4, width) % 3 + 0.5
    for of_rows in (None, factors):
        rows, following = reference.gather_low(x, tokens, ends, a, 0.5)
        values, scales, found = kernels.gather_low_rows(x, tokens, ends, a, 0.5, of_rows)
        yield values.float() * scales, rows if of_rows is None else rows * of_rows.repeat_interleave(counts, 0)
        yield found, following
    for gate in ("silu", "clamped"):
        z, following = reference.gate_low(both, low, b, a, None, ends, 0.5, gate)
        values, scales, found = kernels.gate_low_rows(both, low, b, a, None, ends, 0.5, gate)
        yield values.float() * scales, z
        yield found, following
    stack = torch.randn(4, 2 * width, width, device=device, generator=draw) / width**0.5
    operands = (*quantize_rows([x]), *quantize_rows([stack.flatten(0, 1)]))
    values, scales, stack, stack_scales = operands[0], operands[1], operands[2].view_as(stack), operands[3].view(4, -1)
    arguments = (values, scales, stack, stack_scales, low, b.mT, ends, multiply_groups)
    yield kernels.multiply_rows_and_add(*arguments), reference.multiply_rows_and_add(*arguments)


def _compare(
    kernels: ModuleType, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each result beside that of the reference: groups with no row, with one, and with more than a tile."""
    generator = torch.Generator(device).manual_seed(0)
    counts = torch.tensor([0, 70, 1, 0, 1029, 3, 17], device=device)
    ends = counts.cumsum(0).int()
    num_rows, groups, width, inner = int(counts.sum()), len(counts), 200, 136

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    places = torch.randperm(num_rows, device=device, generator=generator)
    x, tokens = draw(90, width), torch.randint(90, (num_rows,), device=device, generator=generator)
    both, v, weights = draw(num_rows, 2 * inner), draw(num_rows, inner), draw(num_rows).float()
    for chosen in (None, weights.view(-1, 4)):
        yield kernels.combine(both, places, 4, chosen), reference.combine(both, places, 4, chosen)
    for rank, gate in ((16, "silu"), (8, "gelu_tanh"), (40, "gelu"), (16, "clamped")):
        a1, b1 = draw(groups, rank, width) / width**0.5, draw(groups, 2 * inner, rank) / rank**0.5
        a2, low, following = draw(groups, rank, inner) / inner**0.5, draw(num_rows, rank), draw(num_rows, rank)
        bias = draw(groups, 2 * inner) if gate == "clamped" else None
        calls: tuple[tuple[str, tuple[Any, ...], dict[str, Any]], ...] = (
            ("gather_low", (x, tokens, ends, a1, 0.5), {}),
            ("gate_low", (both, low, b1, a2, bias, ends, 0.5, gate), {}),
            ("gate_low_backward", (both, low, b1, a2, bias, v, following, weights, ends, 0.5, gate), {}),
            ("gathered_outer", (x, tokens, low, ends), {"transposed": True}),
            ("gathered_outer", (x, tokens, low, ends), {"transposed": False}),
        )
        for name, arguments, options in calls:
            found, wanted = (getattr(module, name)(*arguments, **options) for module in (kernels, reference))
            yield from zip(*((out if isinstance(out, tuple) else (out,)) for out in (found, wanted)), strict=True)
        weight = draw(groups, 2 * inner, width) / width**0.5
        for arguments in (
            (x[tokens], weight, low, b1.mT, ends),
            (both, weight.mT, low, a1, ends),
            (x[tokens, 4:], weight[..., 4:], low, b1.mT, ends),  # rows of no multiple of 16 bytes, not contiguous
        ):
            yield kernels.multiply_and_add(*arguments), reference.multiply_and_add(*arguments)
