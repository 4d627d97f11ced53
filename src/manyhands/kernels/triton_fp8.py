"""Passes that write float8_e4m3fn, each one kernel: rows of one or several inputs, rows of act(g) u and of its gradient, and
transposed codes; and the adding of a product of low rank. What they compute stands in ``fp8``, in plain torch, codes bit for bit.

One program a row: what fits is held in registers and read once, longer rows are read again from cache. Importing this needs
Triton; ``fp8`` does so only on a GPU, and compares before use. Knows nothing of layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

HELD_COLUMNS = 16384  # of a row, in registers
STEP_COLUMNS = 4096  # at once where a row is longer, or is made from several inputs
TILE_ROWS, TILE_COLUMNS = 128, 64  # of what is transposed at once
MAX_RANK = 64  # of what is added by a kernel of its own: above, the product is worth its own pass
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
SCALE_OF_MAX = tl.constexpr(1.0 / 448.0)
TINY = tl.constexpr(2.0**-100)


@triton.jit
def _scale(top):  # type: ignore[no-untyped-def]
    """The power of two that codes are multiplied by to be values, and its inverse."""
    share = tl.maximum(top, TINY) * SCALE_OF_MAX
    bits = (share.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def _load(pointer, factors_pointer, at, width, SCALED: tl.constexpr):  # type: ignore[no-untyped-def]
    x = tl.load(pointer + at, mask=at < width, other=0.0).to(tl.float32)
    if SCALED:
        x = x * tl.load(factors_pointer + at, mask=at < width, other=0.0)
    return x


@triton.jit
def _store_codes(pointer, at, x, width):  # type: ignore[no-untyped-def]
    tl.store(pointer + at, x.to(pointer.dtype.element_ty), mask=at < width)


@triton.jit
def _top(pointer, factors_pointer, width, SCALED: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest magnitude of a row that is read step by step."""
    top = tl.zeros([STEP], tl.float32)
    for start in range(0, width, STEP):
        top = tl.maximum(top, tl.abs(_load(pointer, factors_pointer, start + tl.arange(0, STEP), width, SCALED)))
    return tl.max(top, 0)


@triton.jit
def _cast(pointer, factors_pointer, codes_pointer, inverse, width, SCALED: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    for start in range(0, width, STEP):
        at = start + tl.arange(0, STEP)
        _store_codes(codes_pointer, at, _load(pointer, factors_pointer, at, width, SCALED) * inverse, width)


@triton.jit
def _held_rows_kernel(  # type: ignore[no-untyped-def]
    x_pointer, x_stride, factors_pointer, codes_pointer, scales_pointer, width, SCALED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = _load(x_pointer + row * x_stride, factors_pointer, at, width, SCALED)
    scale, inverse = _scale(tl.max(tl.abs(x), 0))
    tl.store(scales_pointer + row, scale)
    _store_codes(codes_pointer + row * width, at, x * inverse, width)


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
    codes,
    scales,
    SCALED: tl.constexpr,
    PARTS: tl.constexpr,
    STEP0: tl.constexpr,
    STEP1: tl.constexpr,
    STEP2: tl.constexpr,
):
    """Up to three inputs side by side are one row."""
    row = tl.program_id(0).to(tl.int64)
    x0 += row * stride0
    x1 += row * stride1
    x2 += row * stride2
    codes += row * (width0 + width1 + width2)
    top = _top(x0, factors, width0, SCALED, STEP0)
    if PARTS > 1:
        top = tl.maximum(top, _top(x1, factors + width0, width1, SCALED, STEP1))
    if PARTS > 2:
        top = tl.maximum(top, _top(x2, factors + width0 + width1, width2, SCALED, STEP2))
    scale, inverse = _scale(top)
    tl.store(scales + row, scale)
    _cast(x0, factors, codes, inverse, width0, SCALED, STEP0)
    if PARTS > 1:
        _cast(x1, factors + width0, codes + width0, inverse, width1, SCALED, STEP1)
    if PARTS > 2:
        _cast(x2, factors + width0 + width1, codes + width0 + width1, inverse, width2, SCALED, STEP2)


def quantise_rows(parts: Sequence[torch.Tensor], factors: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``fp8.quantise_rows``, of one to three parts."""
    num_rows, widths = parts[0].shape[0], [part.shape[1] for part in parts]
    codes, scales = _new_rows(num_rows, sum(widths), parts[0].device)
    if num_rows == 0:
        return codes, scales
    if len(parts) == 1 and widths[0] <= HELD_COLUMNS:
        _held_rows(parts[0], factors, codes, scales)
        return codes, scales
    parts = [_side_by_side(part) for part in parts]
    given = [value for part in parts for value in (part, part.stride(0), part.shape[1])]
    given += [parts[0], 0, 0] * (3 - len(parts))
    steps = [min(STEP_COLUMNS, triton.next_power_of_2(width)) for width in widths] + [16] * (3 - len(parts))
    _rows_kernel[(num_rows,)](
        *given,
        scales if factors is None else factors,
        codes,
        scales,
        SCALED=factors is not None,
        PARTS=len(parts),
        STEP0=steps[0],
        STEP1=steps[1],
        STEP2=steps[2],
        num_warps=_warps(max(steps)),
    )
    return codes, scales


def quantise_stacked(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``fp8.quantise_stacked``"""
    num_rows, width = sum(part.shape[0] for part in parts), parts[0].shape[1]
    codes, scales = _new_rows(num_rows, width, parts[0].device)
    start = 0
    for part in parts:
        rows = slice(start, start + part.shape[0])
        start += part.shape[0]
        if width <= HELD_COLUMNS:
            _held_rows(part, None, codes[rows], scales[rows])
        else:
            codes[rows], scales[rows] = quantise_rows([part])
    return codes, scales


def _held_rows(x: torch.Tensor, factors: torch.Tensor | None, codes: torch.Tensor, scales: torch.Tensor) -> None:
    num_rows, width = x.shape
    x, block = _side_by_side(x), triton.next_power_of_2(width)
    if num_rows:
        _held_rows_kernel[(num_rows,)](
            x,
            x.stride(0),
            scales if factors is None else factors,
            codes,
            scales,
            width,
            SCALED=factors is not None,
            BLOCK=block,
            num_warps=_warps(block),
        )


# -- what has low rank --------------------------------------------------------------------------------------------------------------


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
    low = tl.load(low_pointer + rows[:, None] * low_stride + inner[None, :], mask=in_rows[:, None] & in_rank[None, :], other=0.0)
    wide = tl.load(
        wide_pointer + inner[:, None] * wide_step + columns[None, :] * wide_stride, mask=in_rank[:, None] & in_columns[None, :], other=0.0
    )
    tl.store(at, (y + tl.dot(low, wide)).to(y_pointer.dtype.element_ty), mask=inside)


def add_low_rank(y: torch.Tensor, low: torch.Tensor, wide: torch.Tensor) -> None:
    """y += low wide^T in place, for y (n, o) and low (n, r), columns of each contiguous, wide (o, r) and r <= ``MAX_RANK``."""
    num_rows, num_columns = y.shape
    rank = low.shape[1]
    low = _side_by_side(low)
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


# -- transposed ------------------------------------------------------------------------------------------------------------------


@triton.jit
def _transpose_kernel(  # type: ignore[no-untyped-def]
    x_pointer,
    x_stride,
    factors_pointer,
    codes_pointer,
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
    x = tl.load(x_pointer + rows[:, None] * x_stride + columns[None, :], mask=in_rows[:, None] & in_columns[None, :], other=0.0)
    codes = tl.trans((x.to(tl.float32) * factors[:, None]).to(codes_pointer.dtype.element_ty))
    written = in_columns[:, None] & (rows < num_written)[None, :]
    tl.store(codes_pointer + columns[:, None] * codes_stride + rows[None, :], codes, mask=written)


def transpose(parts: Sequence[torch.Tensor], factors: torch.Tensor, invert: bool) -> torch.Tensor:
    """As ``fp8.transpose``"""
    num_rows, num_columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
    padded = triton.cdiv(num_rows, 16) * 16
    codes, _ = _new_rows(num_columns, padded, parts[0].device)
    parts = [_side_by_side(part) for part in parts if part.shape[0]]
    start = 0
    for number, x in enumerate(parts):
        written = padded - start if number == len(parts) - 1 else x.shape[0]  # the last one's padding too, as zeros
        _transpose_kernel[(triton.cdiv(written, TILE_ROWS), triton.cdiv(num_columns, TILE_COLUMNS))](
            x,
            x.stride(0),
            factors[start:],
            codes[:, start:],
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
    return codes


# -- act(g) u --------------------------------------------------------------------------------------------------------------------


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
    g_pointer, g_stride, u_pointer, u_stride, h_pointer, codes_pointer, scales_pointer, width, ACTIVATION: tl.constexpr, STEP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    g_pointer += row * g_stride
    u_pointer += row * u_stride
    h_pointer += row * width
    top = tl.zeros([STEP], tl.float32)
    for start in range(0, width, STEP):
        at = start + tl.arange(0, STEP)
        active, _ = _activate(_load(g_pointer, g_pointer, at, width, False), ACTIVATION)
        h = (active * _load(u_pointer, u_pointer, at, width, False)).to(h_pointer.dtype.element_ty)
        tl.store(h_pointer + at, h, mask=at < width)
        top = tl.maximum(top, tl.abs(h.to(tl.float32)))
    scale, inverse = _scale(tl.max(top, 0))
    tl.store(scales_pointer + row, scale)
    tl.debug_barrier()  # what other threads wrote is read below
    _cast(h_pointer, h_pointer, codes_pointer + row * width, inverse, width, False, STEP)


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
    codes_pointer,
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
        dh = _load(dh_pointer, dh_pointer, at, width, False)
        u = _load(u_pointer, u_pointer, at, width, False)
        active, slope = _activate(_load(g_pointer, g_pointer, at, width, False), ACTIVATION)
        dg = (dh * u * slope).to(d_pointer.dtype.element_ty)
        du = (dh * active).to(d_pointer.dtype.element_ty)
        if WITH_H:
            tl.store(h_pointer + at, (active * u).to(h_pointer.dtype.element_ty), mask=inside)
        tl.store(d_pointer + at, dg, mask=inside)
        tl.store(d_pointer + width + at, du, mask=inside)
        top_g = tl.abs(dg.to(tl.float32) * tl.load(factors_pointer + at, mask=inside, other=0.0))
        top_u = tl.abs(du.to(tl.float32) * tl.load(factors_pointer + width + at, mask=inside, other=0.0))
        top = tl.maximum(top, tl.maximum(top_g, top_u))
    scale, inverse = _scale(tl.max(top, 0))
    tl.store(scales_pointer + row, scale)
    tl.debug_barrier()
    _cast(d_pointer, factors_pointer, codes_pointer + row * 2 * width, inverse, 2 * width, True, STEP)


def gated_rows(g: torch.Tensor, u: torch.Tensor, activation: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``fp8.gated_rows``"""
    num_rows, width = g.shape
    g, u = _side_by_side(g), _side_by_side(u)
    h = torch.empty(num_rows, width, dtype=g.dtype, device=g.device)
    codes, scales = _new_rows(num_rows, width, g.device)
    step = min(STEP_COLUMNS, triton.next_power_of_2(width))
    if num_rows:
        _gated_kernel[(num_rows,)](
            g, g.stride(0), u, u.stride(0), h, codes, scales, width, ACTIVATION=ACTIVATIONS[activation], STEP=step, num_warps=_warps(step)
        )
    return h, codes, scales


def gated_rows_backward(
    dh: torch.Tensor, g: torch.Tensor, u: torch.Tensor, factors: torch.Tensor, activation: str, with_h: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``fp8.gated_rows_backward``"""
    num_rows, width = g.shape
    dh, g, u = dh.contiguous(), _side_by_side(g), _side_by_side(u)
    d = torch.empty(num_rows, 2 * width, dtype=g.dtype, device=g.device)
    h = torch.empty(num_rows if with_h else 0, width, dtype=g.dtype, device=g.device)
    codes, scales = _new_rows(num_rows, 2 * width, g.device)
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
            codes,
            scales,
            width,
            ACTIVATION=ACTIVATIONS[activation],
            WITH_H=with_h,
            STEP=step,
            num_warps=_warps(2 * step),
        )
    return d, h, codes, scales


def _warps(columns: int) -> int:
    return min(16, max(1, columns // 512))


def _new_rows(num_rows: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=device)
    return codes, torch.empty(num_rows, 1, dtype=torch.float32, device=device)


def _side_by_side(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
