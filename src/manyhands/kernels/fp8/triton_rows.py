"""Rows of one or several inputs to float8_e4m3fn, each in one kernel, and what other kernels that write rows need.

One program a row: what fits is held in registers and read once, longer rows are read again from cache. What is computed
stands in ``reference``, fp8 values bit for bit. Importing this needs Triton. Knows nothing of layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

HELD_COLUMNS = 16384  # of a row, in registers
STEP_COLUMNS = 4096  # at once where a row is longer, or is made from several inputs
SCALE_OF_MAX = tl.constexpr(1.0 / 448.0)
TINY = tl.constexpr(2.0**-100)


@triton.jit
def scale_of(top):  # type: ignore[no-untyped-def]
    """The power of two that values are multiplied by to be values, and its inverse."""
    share = tl.maximum(top, TINY) * SCALE_OF_MAX
    bits = (share.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def load_wide(pointer, factors_pointer, at, width, SCALED: tl.constexpr):  # type: ignore[no-untyped-def]
    x = tl.load(pointer + at, mask=at < width, other=0.0).to(tl.float32)
    if SCALED:
        x = x * tl.load(factors_pointer + at, mask=at < width, other=0.0)
    return x


@triton.jit
def _store_values(pointer, at, x, width):  # type: ignore[no-untyped-def]
    tl.store(pointer + at, x.to(pointer.dtype.element_ty), mask=at < width)


@triton.jit
def top_of(pointer, factors_pointer, width, SCALED: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest magnitude of a row that is read step by step."""
    top = tl.zeros([STEP], tl.float32)
    for start in range(0, width, STEP):
        top = tl.maximum(top, tl.abs(load_wide(pointer, factors_pointer, start + tl.arange(0, STEP), width, SCALED)))
    return tl.max(top, 0)


@triton.jit
def cast(  # type: ignore[no-untyped-def]
    pointer, factors_pointer, values_pointer, inverse, width, SCALED: tl.constexpr, STEP: tl.constexpr
):
    for start in range(0, width, STEP):
        at = start + tl.arange(0, STEP)
        _store_values(values_pointer, at, load_wide(pointer, factors_pointer, at, width, SCALED) * inverse, width)


@triton.jit
def _held_rows_kernel(  # type: ignore[no-untyped-def]
    x_pointer,
    x_stride,
    factors_pointer,
    values_pointer,
    scales_pointer,
    width,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = load_wide(x_pointer + row * x_stride, factors_pointer, at, width, SCALED)
    scale, inverse = scale_of(tl.max(tl.abs(x), 0))
    tl.store(scales_pointer + row, scale)
    _store_values(values_pointer + row * width, at, x * inverse, width)


@triton.jit
def _rows_kernel(  # type: ignore[no-untyped-def]
    x0,
    stride0,
    width0,
    x1,
    stride1,
    width1,
    x2,
    stride2,
    width2,
    factors,
    values,
    scales,
    SCALED: tl.constexpr,
    PARTS: tl.constexpr,
    HELD: tl.constexpr,
    STEP0: tl.constexpr,
    STEP1: tl.constexpr,
    STEP2: tl.constexpr,
):
    """Up to three inputs side by side are one row. ``HELD``: each fits into its step, and is read once."""
    row = tl.program_id(0).to(tl.int64)
    x0 += row * stride0
    x1 += row * stride1
    x2 += row * stride2
    values += row * (width0 + width1 + width2)
    if HELD:
        at0, at1, at2 = tl.arange(0, STEP0), tl.arange(0, STEP1), tl.arange(0, STEP2)
        wide0 = load_wide(x0, factors, at0, width0, SCALED)
        wide1 = load_wide(x1, factors + width0, at1, width1, SCALED)
        wide2 = load_wide(x2, factors + width0 + width1, at2, width2, SCALED)
        tops = tl.maximum(tl.max(tl.abs(wide0), 0), tl.max(tl.abs(wide1), 0))
        scale, inverse = scale_of(tl.maximum(tops, tl.max(tl.abs(wide2), 0)))
        _store_values(values, at0, wide0 * inverse, width0)
        _store_values(values + width0, at1, wide1 * inverse, width1)
        _store_values(values + width0 + width1, at2, wide2 * inverse, width2)
    else:
        top = top_of(x0, factors, width0, SCALED, STEP0)
        if PARTS > 1:
            top = tl.maximum(top, top_of(x1, factors + width0, width1, SCALED, STEP1))
        if PARTS > 2:
            top = tl.maximum(top, top_of(x2, factors + width0 + width1, width2, SCALED, STEP2))
        scale, inverse = scale_of(top)
        cast(x0, factors, values, inverse, width0, SCALED, STEP0)
        if PARTS > 1:
            cast(x1, factors + width0, values + width0, inverse, width1, SCALED, STEP1)
        if PARTS > 2:
            cast(x2, factors + width0 + width1, values + width0 + width1, inverse, width2, SCALED, STEP2)
    tl.store(scales + row, scale)


def quantize_rows(
    parts: Sequence[torch.Tensor], factors: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``fp8.quantize_rows``, of one to three parts."""
    num_rows, widths = parts[0].shape[0], [part.shape[1] for part in parts]
    values, scales = new_rows(num_rows, sum(widths), parts[0].device)
    if num_rows == 0:
        return values, scales
    if len(parts) == 1 and widths[0] <= HELD_COLUMNS:
        _held_rows(parts[0], factors, values, scales)
        return values, scales
    parts = [side_by_side(part) for part in parts]
    given = [value for part in parts for value in (part, part.stride(0), part.shape[1])]
    given += [parts[0], 0, 0] * (3 - len(parts))
    steps = [triton.next_power_of_2(width) for width in widths] + [16] * (3 - len(parts))
    held = sum(steps) <= HELD_COLUMNS
    steps = steps if held else [min(STEP_COLUMNS, step) for step in steps]
    _rows_kernel[(num_rows,)](
        *given,
        scales if factors is None else factors,
        values,
        scales,
        SCALED=factors is not None,
        PARTS=len(parts),
        HELD=held,
        STEP0=steps[0],
        STEP1=steps[1],
        STEP2=steps[2],
        num_warps=warps(max(steps)),
    )
    return values, scales


def quantize_stacked(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``fp8.quantize_stacked``"""
    num_rows, width = sum(part.shape[0] for part in parts), parts[0].shape[1]
    values, scales = new_rows(num_rows, width, parts[0].device)
    start = 0
    for part in parts:
        rows = slice(start, start + part.shape[0])
        start += part.shape[0]
        if width <= HELD_COLUMNS:
            _held_rows(part, None, values[rows], scales[rows])
        else:
            values[rows], scales[rows] = quantize_rows([part])
    return values, scales


def _held_rows(x: torch.Tensor, factors: torch.Tensor | None, values: torch.Tensor, scales: torch.Tensor) -> None:
    num_rows, width = x.shape
    x, block = side_by_side(x), triton.next_power_of_2(width)
    if num_rows:
        _held_rows_kernel[(num_rows,)](
            x,
            x.stride(0),
            scales if factors is None else factors,
            values,
            scales,
            width,
            SCALED=factors is not None,
            BLOCK=block,
            num_warps=warps(block),
        )


@triton.jit
def _group_rows_kernel(  # type: ignore[no-untyped-def]
    x_pointer,
    x_stride,
    factors_pointer,
    ends_pointer,
    values_pointer,
    scales_pointer,
    width,
    num_groups,
    GROUPS: tl.constexpr,
    HELD: tl.constexpr,
    STEP: tl.constexpr,
):
    """A row is multiplied by the factors of its group, which it finds from where groups end."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, GROUPS)
    ends = tl.load(ends_pointer + groups, mask=groups < num_groups, other=0x7FFFFFFF)
    group = tl.minimum(tl.sum((ends <= row).to(tl.int32), 0), num_groups - 1).to(tl.int64)
    x_pointer += row * x_stride
    factors_pointer += group * width
    values_pointer += row * width
    if HELD:
        at = tl.arange(0, STEP)
        x = load_wide(x_pointer, factors_pointer, at, width, True)
        scale, inverse = scale_of(tl.max(tl.abs(x), 0))
        _store_values(values_pointer, at, x * inverse, width)
    else:
        scale, inverse = scale_of(top_of(x_pointer, factors_pointer, width, True, STEP))
        cast(x_pointer, factors_pointer, values_pointer, inverse, width, True, STEP)
    tl.store(scales_pointer + row, scale)


def quantize_group_rows(
    x: torch.Tensor, factors: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``fp8.quantize_group_rows``"""
    num_rows, width = x.shape
    values, scales = new_rows(num_rows, width, x.device)
    x, held = side_by_side(x), width <= HELD_COLUMNS
    step = triton.next_power_of_2(width) if held else STEP_COLUMNS
    if num_rows:
        _group_rows_kernel[(num_rows,)](
            *(x, x.stride(0), factors.contiguous(), ends, values, scales, width, len(ends)),
            GROUPS=triton.next_power_of_2(len(ends)),
            HELD=held,
            STEP=step,
            num_warps=warps(step),
        )
    return values, scales


def warps(columns: int) -> int:
    return min(16, max(1, columns // 512))


def new_rows(num_rows: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=device)
    return values, torch.empty(num_rows, 1, dtype=torch.float32, device=device)


def side_by_side(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
