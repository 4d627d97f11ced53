"""fp8 values and their matmuls in torch operations: what the kernels are compared with, and what runs without."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from manyhands.kernels.grouped import rows_of_groups
from manyhands.kernels.lora import activate, activate_back

Tensor = torch.Tensor
E4M3 = torch.float8_e4m3fn
SCALE_OF_MAX = 1.0 / 448.0
TINY = 2.0**-100  # the scale of a row of zeros is finite, and so is its inverse
ALIGNMENT = 16  # of k and o, in elements: what matmuls on GPUs take


def _scale(top: Tensor) -> tuple[Tensor, Tensor]:
    """The power of two that values are multiplied by to be values, and its inverse, from the largest magnitude."""
    bits = (top.clamp(min=TINY) * SCALE_OF_MAX).view(torch.int32) + 0x7FFFFF & 0x7F800000
    return bits.view(torch.float32), (0x7F000000 - bits).view(torch.float32)


def rows_reference(parts: list[Tensor], factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    x = torch.cat(parts, 1).float()
    x = x if factors is None else x * factors
    scales, inverse = _scale(x.abs().amax(1, keepdim=True))
    return (x * inverse).to(E4M3), scales


def stacked_reference(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    return rows_reference([torch.cat(parts)])


def transpose_reference(parts: list[Tensor], factors: Tensor, invert: bool) -> Tensor:
    x = torch.cat([part.float() for part in parts])
    values = (x / factors if invert else x * factors).t().contiguous().to(E4M3)
    return F.pad(values.view(torch.uint8), (0, -x.shape[0] % ALIGNMENT)).view(E4M3)


def group_rows_reference(x: Tensor, factors: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    groups = torch.searchsorted(ends, torch.arange(len(x), device=ends.device, dtype=ends.dtype), right=True)
    return rows_reference([x.float() * factors[groups]])


def transpose_stack_reference(values: Tensor) -> Tensor:
    return values.view(torch.uint8).mT.contiguous().view(E4M3)


def gated_reference(g: Tensor, u: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    h = (activate(g.float(), activation) * u.float()).to(g.dtype)
    return h, *rows_reference([h])


def gated_backward_reference(
    dh: Tensor, g: Tensor, u: Tensor, factors: Tensor, activation: str, with_h: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide, gate, up = dh.float(), g.float(), u.float()
    active = activate(gate, activation)
    d = torch.cat([activate_back(wide * up, gate, activation), wide * active], 1).to(g.dtype)
    h = (active * up).to(g.dtype) if with_h else g.new_empty((0, g.shape[1]))
    return d, h, *rows_reference([d], factors)


def matmul_reference(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    y = (a.float() @ b.float().t()) * a_scales * b_scales.t()
    return (y if bias is None else y + bias.float()).to(dtype)


def group_matmul_reference(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    y = torch.cat([a[rows].float() @ values.float().t() for rows, values in zip(rows_of_groups(ends), b, strict=True)])
    counts = ends.diff(prepend=ends.new_zeros(1))
    return (y * a_scales * b_scales.repeat_interleave(counts, 0)).to(dtype)
