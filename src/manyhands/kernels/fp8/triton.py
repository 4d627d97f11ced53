"""Triton kernels that write float8_e4m3fn: rows (``triton_rows``), rows of act(g) u and of its gradient, transposed
values; and one that adds a matmul of low rank. ``reference`` has the same
functions in plain torch, with equal fp8 values.

Importing this needs Triton; ``select`` does so only on a GPU, and compares before use. Knows nothing of layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from manyhands.kernels.fp8.triton_rows import (
    STEP_COLUMNS,
    cast,
    load_wide,
    new_rows,
    quantize_group_rows,
    quantize_rows,
    quantize_stacked,
    scale_of,
    side_by_side,
    warps,
)

__all__ = [
    "MAX_RANK",
    "add_low_rank",
    "dequantize_rows",
    "gated_rows",
    "gated_rows_backward",
    "quantize_group_rows",
    "quantize_rows",
    "quantize_stacked",
    "transpose",
    "transpose_stack",
]

TILE_ROWS, TILE_COLUMNS = 128, 64  # of what is transposed at once
STACK_ROWS, STACK_COLUMNS = 64, 64  # of a stack, in words of 4 values: 3.8 TB/s on an H200, of 32 x 32 3.4
DEQUANTIZED_COLUMNS = 2048  # of a program
MAX_RANK = 64  # of what is added by a kernel of its own: above, the product is worth its own pass
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}


# -- what has low rank


@triton.jit
def _add_kernel(  # type: ignore[no-untyped-def]
    y_pointer,
    y_stride,
    low_pointer,
    low_stride,
    wide_pointer,
    wide_stride,
    wide_step,
    num_rows,
    num_columns,
    rank,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
):
    rows = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, RANK)
    in_rows, in_columns, in_rank = rows < num_rows, columns < num_columns, inner < rank
    at = y_pointer + rows[:, None] * y_stride + columns[None, :]
    inside = in_rows[:, None] & in_columns[None, :]
    y = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    low = tl.load(
        low_pointer + rows[:, None] * low_stride + inner[None, :], mask=in_rows[:, None] & in_rank[None, :], other=0.0
    )
    wide = tl.load(
        wide_pointer + inner[:, None] * wide_step + columns[None, :] * wide_stride,
        mask=in_rank[:, None] & in_columns[None, :],
        other=0.0,
    )
    tl.store(at, (y + tl.dot(low, wide)).to(y_pointer.dtype.element_ty), mask=inside)


def add_low_rank(y: torch.Tensor, low: torch.Tensor, wide: torch.Tensor) -> None:
    """y += low wide^T in place, for y (n, o) and low (n, r), columns of each contiguous, wide (o, r) and r <=
    ``MAX_RANK``.
    """
    num_rows, num_columns = y.shape
    rank = low.shape[1]
    low = side_by_side(low)
    if num_rows and num_columns:
        _add_kernel[(triton.cdiv(num_columns, 128), triton.cdiv(num_rows, 64))](
            y,
            y.stride(0),
            low,
            low.stride(0),
            wide,
            wide.stride(0),
            wide.stride(1),
            num_rows,
            num_columns,
            rank,
            ROWS=64,
            COLUMNS=128,
            RANK=max(16, triton.next_power_of_2(rank)),
            num_warps=4,
        )


# -- transposed


@triton.jit
def _transpose_kernel(  # type: ignore[no-untyped-def]
    x_pointer,
    x_stride,
    factors_pointer,
    values_pointer,
    codes_stride,
    num_rows,
    num_written,
    num_columns,
    INVERT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    in_rows, in_columns = rows < num_rows, columns < num_columns
    factors = tl.load(factors_pointer + rows, mask=in_rows, other=1.0)
    if INVERT:  # a power of two
        factors = (0x7F000000 - factors.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    x = tl.load(
        x_pointer + rows[:, None] * x_stride + columns[None, :], mask=in_rows[:, None] & in_columns[None, :], other=0.0
    )
    values = tl.trans((x.to(tl.float32) * factors[:, None]).to(values_pointer.dtype.element_ty))
    written = in_columns[:, None] & (rows < num_written)[None, :]
    tl.store(values_pointer + columns[:, None] * codes_stride + rows[None, :], values, mask=written)


def transpose(parts: Sequence[torch.Tensor], factors: torch.Tensor, invert: bool) -> torch.Tensor:
    """As ``fp8.transpose``"""
    num_rows, num_columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
    padded = triton.cdiv(num_rows, 16) * 16
    values, _ = new_rows(num_columns, padded, parts[0].device)
    parts = [side_by_side(part) for part in parts if part.shape[0]]
    start = 0
    for number, x in enumerate(parts):
        written = padded - start if number == len(parts) - 1 else x.shape[0]  # the last one's padding too, as zeros
        _transpose_kernel[(triton.cdiv(written, TILE_ROWS), triton.cdiv(num_columns, TILE_COLUMNS))](
            x,
            x.stride(0),
            factors[start:],
            values[:, start:],
            padded,
            x.shape[0],
            written,
            num_columns,
            INVERT=invert,
            ROWS=TILE_ROWS,
            COLUMNS=TILE_COLUMNS,
            num_warps=4,
        )
        start += x.shape[0]
    return values


@triton.jit
def _transpose_stack_kernel(  # type: ignore[no-untyped-def]
    words_pointer, out_pointer, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Squares of 4 x 4 values are turned in registers, so that words travel, and not single bytes. Rows and columns are
    counted in words of 4 values.
    """
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    begin = tl.program_id(0).to(tl.int64) * (4 * num_rows * num_columns)
    at = words_pointer + begin + (4 * rows * num_columns)[:, None] + columns[None, :]
    a = tl.load(at, mask=inside, other=0).to(tl.uint32, bitcast=True)
    b = tl.load(at + num_columns, mask=inside, other=0).to(tl.uint32, bitcast=True)
    c = tl.load(at + 2 * num_columns, mask=inside, other=0).to(tl.uint32, bitcast=True)
    d = tl.load(at + 3 * num_columns, mask=inside, other=0).to(tl.uint32, bitcast=True)
    ab_even, ab_odd = (a & 0x00FF00FF) | ((b & 0x00FF00FF) << 8), ((a >> 8) & 0x00FF00FF) | (b & 0xFF00FF00)
    cd_even, cd_odd = (c & 0x00FF00FF) | ((d & 0x00FF00FF) << 8), ((c >> 8) & 0x00FF00FF) | (d & 0xFF00FF00)
    inside = (rows < num_rows)[None, :] & (columns < num_columns)[:, None]
    at = out_pointer + begin + (4 * columns * num_rows)[:, None] + rows[None, :]
    tl.store(at, tl.trans((ab_even & 0xFFFF) | (cd_even << 16)).to(tl.int32, bitcast=True), mask=inside)
    tl.store(at + num_rows, tl.trans((ab_odd & 0xFFFF) | (cd_odd << 16)).to(tl.int32, bitcast=True), mask=inside)
    third = tl.trans((ab_even >> 16) | (cd_even & 0xFFFF0000)).to(tl.int32, bitcast=True)
    tl.store(at + 2 * num_rows, third, mask=inside)
    fourth = tl.trans((ab_odd >> 16) | (cd_odd & 0xFFFF0000)).to(tl.int32, bitcast=True)
    tl.store(at + 3 * num_rows, fourth, mask=inside)


def transpose_stack(values: torch.Tensor) -> torch.Tensor:
    """As ``fp8.transpose_stack``"""
    num_groups, num_rows, num_columns = values.shape
    out = torch.empty(num_groups, num_columns, num_rows, dtype=values.dtype, device=values.device)
    num_rows, num_columns = num_rows // 4, num_columns // 4
    grid = (num_groups, triton.cdiv(num_rows, STACK_ROWS), triton.cdiv(num_columns, STACK_COLUMNS))
    words = (values.contiguous().view(torch.int32), out.view(torch.int32))
    _transpose_stack_kernel[grid](*words, num_rows, num_columns, ROWS=STACK_ROWS, COLUMNS=STACK_COLUMNS, num_warps=8)
    return out


# -- act(g) u


@triton.jit
def _dequantize_kernel(  # type: ignore[no-untyped-def]
    values_pointer, scales_pointer, out_pointer, width, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(values_pointer + row * width + at, mask=at < width, other=0.0).to(tl.float32)
    x *= tl.load(scales_pointer + row)
    tl.store(out_pointer + row * width + at, x.to(out_pointer.dtype.element_ty), mask=at < width)


def dequantize_rows(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    num_rows, width = values.shape
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    columns = min(DEQUANTIZED_COLUMNS, triton.next_power_of_2(width))
    _dequantize_kernel[(num_rows, triton.cdiv(width, columns))](
        values.contiguous(), scales.contiguous(), out, width, COLUMNS=columns
    )
    return out


@triton.jit
def _activate(g, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """act(g), and act'(g), in float32"""
    if ACTIVATION == 0:
        gate = tl.sigmoid(g)
        return g * gate, gate * (1.0 + g * (1.0 - gate))
    elif ACTIVATION == 1:
        inner = 1.5957691216057308 * (g + 0.044715 * g * g * g)  # 2 sqrt(2 / pi)
        gate = tl.sigmoid(inner)
        return g * gate, gate + g * gate * (1.0 - gate) * 1.5957691216057308 * (1.0 + 0.134145 * g * g)
    else:
        gate = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
        return g * gate, gate + g * 0.3989422804014327 * tl.exp(-0.5 * g * g)


@triton.jit
def _gated_kernel(  # type: ignore[no-untyped-def]
    g_pointer,
    g_stride,
    u_pointer,
    u_stride,
    h_pointer,
    values_pointer,
    scales_pointer,
    width,
    ACTIVATION: tl.constexpr,
    STEP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    g_pointer += row * g_stride
    u_pointer += row * u_stride
    h_pointer += row * width
    top = tl.zeros([STEP], tl.float32)
    for start in range(0, width, STEP):
        at = start + tl.arange(0, STEP)
        active, _ = _activate(load_wide(g_pointer, g_pointer, at, width, False), ACTIVATION)
        h = (active * load_wide(u_pointer, u_pointer, at, width, False)).to(h_pointer.dtype.element_ty)
        tl.store(h_pointer + at, h, mask=at < width)
        top = tl.maximum(top, tl.abs(h.to(tl.float32)))
    scale, inverse = scale_of(tl.max(top, 0))
    tl.store(scales_pointer + row, scale)
    tl.debug_barrier()  # what other threads wrote is read below
    cast(h_pointer, h_pointer, values_pointer + row * width, inverse, width, False, STEP)


@triton.jit
def _gated_backward_kernel(  # type: ignore[no-untyped-def]
    dh_pointer,
    g_pointer,
    g_stride,
    u_pointer,
    u_stride,
    factors_pointer,
    d_pointer,
    h_pointer,
    values_pointer,
    scales_pointer,
    width,
    ACTIVATION: tl.constexpr,
    WITH_H: tl.constexpr,
    STEP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dh_pointer += row * width
    g_pointer += row * g_stride
    u_pointer += row * u_stride
    h_pointer += row * width
    d_pointer += row * 2 * width
    top = tl.zeros([STEP], tl.float32)
    for start in range(0, width, STEP):
        at = start + tl.arange(0, STEP)
        inside = at < width
        dh = load_wide(dh_pointer, dh_pointer, at, width, False)
        u = load_wide(u_pointer, u_pointer, at, width, False)
        active, slope = _activate(load_wide(g_pointer, g_pointer, at, width, False), ACTIVATION)
        dg = (dh * u * slope).to(d_pointer.dtype.element_ty)
        du = (dh * active).to(d_pointer.dtype.element_ty)
        if WITH_H:
            tl.store(h_pointer + at, (active * u).to(h_pointer.dtype.element_ty), mask=inside)
        tl.store(d_pointer + at, dg, mask=inside)
        tl.store(d_pointer + width + at, du, mask=inside)
        top_g = tl.abs(dg.to(tl.float32) * tl.load(factors_pointer + at, mask=inside, other=0.0))
        top_u = tl.abs(du.to(tl.float32) * tl.load(factors_pointer + width + at, mask=inside, other=0.0))
        top = tl.maximum(top, tl.maximum(top_g, top_u))
    scale, inverse = scale_of(tl.max(top, 0))
    tl.store(scales_pointer + row, scale)
    tl.debug_barrier()
    cast(d_pointer, factors_pointer, values_pointer + row * 2 * width, inverse, 2 * width, True, STEP)


def gated_rows(g: torch.Tensor, u: torch.Tensor, activation: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``fp8.gated_rows``"""
    num_rows, width = g.shape
    g, u = side_by_side(g), side_by_side(u)
    h = torch.empty(num_rows, width, dtype=g.dtype, device=g.device)
    values, scales = new_rows(num_rows, width, g.device)
    step = min(STEP_COLUMNS, triton.next_power_of_2(width))
    if num_rows:
        _gated_kernel[(num_rows,)](
            g,
            g.stride(0),
            u,
            u.stride(0),
            h,
            values,
            scales,
            width,
            ACTIVATION=ACTIVATIONS[activation],
            STEP=step,
            num_warps=warps(step),
        )
    return h, values, scales


def gated_rows_backward(
    dh: torch.Tensor, g: torch.Tensor, u: torch.Tensor, factors: torch.Tensor, activation: str, with_h: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``fp8.gated_rows_backward``"""
    num_rows, width = g.shape
    dh, g, u = dh.contiguous(), side_by_side(g), side_by_side(u)
    d = torch.empty(num_rows, 2 * width, dtype=g.dtype, device=g.device)
    h = torch.empty(num_rows if with_h else 0, width, dtype=g.dtype, device=g.device)
    values, scales = new_rows(num_rows, 2 * width, g.device)
    step = min(STEP_COLUMNS // 2, triton.next_power_of_2(width))
    if num_rows:
        _gated_backward_kernel[(num_rows,)](
            dh,
            g,
            g.stride(0),
            u,
            u.stride(0),
            factors,
            d,
            h,
            values,
            scales,
            width,
            ACTIVATION=ACTIVATIONS[activation],
            WITH_H=with_h,
            STEP=step,
            num_warps=warps(2 * step),
        )
    return d, h, values, scales
