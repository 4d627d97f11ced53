"""What quantizes and multiplies on a device: Triton and ``torch._scaled_mm`` where they pass their tests."""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType

import torch

from manyhands.kernels.backend import architecture_of, triton_or
from manyhands.kernels.fp8.reference import (
    Tensor,
    gated_backward_reference,
    gated_reference,
    group_matmul_reference,
    group_rows_reference,
    matmul_reference,
    rows_reference,
    stacked_reference,
    transpose_reference,
    transpose_stack_reference,
)


def describe(device: torch.device) -> str:
    """How values are quantized and multiplied on ``device``, and why not faster; one line for the log."""
    matmuls = "torch._scaled_mm" if has_scaled_mm(device) else "float32 ones of the same values (emulated)"
    kernels, why = load_triton(device)
    return f"matmuls by {matmuls}, quantized by {'Triton' if kernels else f'torch ({why})'}"


def describe_groups(device: torch.device) -> str:
    """What multiplies rows of groups on ``device``; of a line for the log."""
    return (
        "by float32 products of the same values (emulated)"
        if why_no_group_mm(device)
        else "by torch._scaled_grouped_mm"
    )


@lru_cache
def has_scaled_mm(device: torch.device) -> bool:
    """Whether ``torch._scaled_mm`` takes a scale a row on ``device``, tried on 17 x 32 numbers."""
    architecture = architecture_of(device)
    if architecture is None or not architecture.multiplies_fp8:
        return False
    draw = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, 32, generator=draw).to(device, torch.bfloat16) for rows in (17, 48))
    given = (*rows_reference([x]), *rows_reference([w]), torch.bfloat16, w[:, 0].contiguous())
    expected = matmul_reference(*given)
    try:
        found = scaled_mm(*given)
    except (RuntimeError, TypeError, NotImplementedError, ValueError):
        return False
    return bool((found - expected).abs().max() <= 2**-6 * expected.abs().max())


@lru_cache
def why_no_group_mm(device: torch.device) -> str:
    """What keeps products of groups on ``device`` from ``torch._scaled_grouped_mm``, tried on 40 x 64 numbers; nothing
    where nothing does.
    """
    architecture = architecture_of(device)
    if architecture is None:
        return f"the device is {device.type}"
    if not architecture.multiplies_fp8_groups:
        return f"torch has none for {architecture}"
    draw = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, 64, generator=draw).to(device, torch.bfloat16) for rows in (40, 4 * 48))
    values, scales = rows_reference([w])
    ends = torch.tensor([17, 17, 18, 40], dtype=torch.int32, device=device)
    given = (*rows_reference([x]), values.unflatten(0, (4, 48)), scales.view(4, 48), ends, torch.bfloat16)
    expected = group_matmul_reference(*given)
    try:
        found = scaled_group_mm(*given)
    except (AttributeError, RuntimeError, TypeError, NotImplementedError, ValueError) as error:
        return f"torch._scaled_grouped_mm failed: {type(error).__name__}: {str(error)[:200]}"
    agrees = bool((found - expected).abs().max() <= 2**-6 * expected.abs().max())
    return "" if agrees else "torch._scaled_grouped_mm gave other numbers in its test"


@lru_cache
def load_triton(device: torch.device) -> tuple[ModuleType | None, str]:
    """The Triton kernels if they give on ``device`` what the reference gives; else None and why not."""
    architecture = architecture_of(device)
    if architecture is not None and not architecture.multiplies_fp8:
        return None, f"{architecture} has no fp8 of this format"
    backend = triton_or(
        "reference",
        device,
        "fp8.triton",
        lambda kernels: "" if _agrees(kernels, device) else "gave other numbers in its test",
    )
    if backend.name != "triton":
        return None, backend.reason
    from manyhands.kernels.fp8 import triton

    return triton, ""


def _agrees(kernels: ModuleType, device: torch.device) -> bool:
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(37, 272, generator=draw).to(device, torch.bfloat16) for _ in range(2))
    factors = torch.arange(2 * 272, device=device) % 7 + 0.5
    scales = rows_reference([torch.cat([x, y])])[1]
    values = rows_reference([x])
    whole = values[0].to(x.dtype) * values[1].to(x.dtype)
    stack, ends = values[0][:32].unflatten(0, (2, 16)), torch.tensor([0, 20, 21, 37], device=device).int()
    of_groups = torch.stack([factors[:272], factors[272:], 1 / factors[:272], factors[:272]])
    pairs = [
        ([kernels.dequantize_rows(*values, x.dtype)], [whole]),
        (kernels.quantize_rows([x]), rows_reference([x])),
        (kernels.quantize_rows([x, y], factors), rows_reference([x, y], factors)),
        (kernels.quantize_stacked([x, y]), stacked_reference([x, y])),
        ([kernels.transpose([x, y], scales, True)], [transpose_reference([x, y], scales, True)]),
        ([kernels.transpose_stack(stack)], [transpose_stack_reference(stack)]),
        (kernels.quantize_group_rows(x, of_groups, ends), group_rows_reference(x, of_groups, ends)),
    ]
    if not all(
        torch.equal(a.float(), b.float()) for found, expected in pairs for a, b in zip(found, expected, strict=True)
    ):
        return False
    near = [(kernels.gated_rows(x, y, "silu")[0], gated_reference(x, y, "silu")[0])]
    added = torch.cat([x, y], 1)
    kernels.add_low_rank(added[:, 5:272], x[:, :20], y[:20, :267].t())
    near.append(
        (added[:, 5:272], torch.addmm(torch.cat([x, y], 1)[:, 5:272].float(), x[:, :20].float(), y[:20, :267].float()))
    )
    back = (x, x, y, factors, "silu", True)
    near += zip(kernels.gated_rows_backward(*back)[:2], gated_backward_reference(*back)[:2], strict=True)
    return all(bool(((a - b).abs() <= 2**-7 * b.abs() + 2**-12).all()) for a, b in near)


def scaled_group_mm(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    return torch._scaled_grouped_mm(
        a, b.mT, a_scales.view(-1), b_scales, offs=ends, out_dtype=dtype, use_fast_accum=True
    )


def scaled_mm(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    return torch._scaled_mm(a, b.t(), a_scales, b_scales.t(), bias=bias, out_dtype=dtype, use_fast_accum=True)
