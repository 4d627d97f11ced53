"""Triton kernels around the grouped products of experts. ``reference`` has the same functions in plain torch.

Each touches a wide tensor once: rows are gathered, gated or summed where the low-rank products on them are made. A
block of rows lies within one group; a program finds its block from ``ends`` on the device, so that the host waits for
nothing. Importing this needs Triton; ``select`` does so only on a GPU, and compares before use.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from manyhands.kernels.backend import architecture_of
from manyhands.kernels.fp8.triton_rows import STEP_COLUMNS, new_rows, scale_of, top_of
from manyhands.kernels.grouped import ALIGNMENT, compute_groups

GATES = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "clamped": 3}
MIN_RANK = 16  # of tl.dot
ROWS, COLUMNS = 64, 128  # of a tile
FP8_COLUMNS = 64  # of a tile of rows gathered in fp8: 0.106 ms for 65,536 rows of 2,048, 0.117 with 128 (H200)
GATE_COLUMNS = 64  # of a tile of gate and up
GATE_ROWS, GATE_WARPS = 32, 2  # forward
CHUNK = 512  # rows of a group that one program adds up: some experts get many times the rows of others
WARPS = 4
COMBINED = 1024  # columns of a program that adds up the rows of one token
SUMMED = 1024  # values of a program that adds up what chunks gave
PRODUCT = (128, 256, 64)  # rows, columns and summed values of a tile of a grouped product
FP8_PRODUCT = (128, 256, 128)
LONGEST_SUM = 2048  # over a weight's columns; above, grouped_mm and ``add_low`` take less time (docs/lab/speed.md)


@triton.jit
def _find_block(ends, number, num_groups, GROUPS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The group of a block of rows, its first row, and where its group ends; past the last block, an empty one."""
    groups = tl.arange(0, GROUPS)
    inside = groups < num_groups
    end = tl.load(ends + groups, mask=inside, other=0)
    begin = tl.load(ends + groups - 1, mask=inside & (groups > 0), other=0)
    last = tl.cumsum(tl.where(inside, (end - begin + ROWS - 1) // ROWS, 0), 0)
    group = tl.sum((last <= number).to(tl.int32), 0)
    first = tl.max(tl.where(groups < group, last, 0), 0)
    own = groups == group
    row = tl.sum(tl.where(own, begin, 0), 0) + (number - first) * ROWS
    return group, row, tl.sum(tl.where(own, end, 0), 0)


@triton.jit
def _gate(g, u, GATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The gated value z, dz/dg and dz/du"""
    if GATE == 0:
        share = tl.sigmoid(g)
        active, slope = g * share, share * (1 + g * (1 - share))
    elif GATE == 1:
        inner = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        tanh = 2 * tl.sigmoid(2 * inner) - 1
        slope = 0.7978845608028654 * (1 + 3 * 0.044715 * g * g)
        active, slope = 0.5 * g * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * g * (1 - tanh * tanh) * slope
    elif GATE == 2:
        share = 0.5 * (1 + tl.erf(g * 0.7071067811865476))
        active, slope = g * share, share + g * 0.3989422804014327 * tl.exp(-0.5 * g * g)
    else:
        in_g, in_u = g <= 7.0, (u <= 7.0) & (u >= -7.0)
        g = tl.minimum(g, 7.0)
        share = tl.sigmoid(1.702 * g)
        active, slope = g * share, tl.where(in_g, share * (1 + 1.702 * g * (1 - share)), 0.0)
        u = tl.minimum(tl.maximum(u, -7.0), 7.0) + 1
        return active * u, u * slope, tl.where(in_u, active, 0.0)
    return active * u, u * slope, active


@triton.jit
def _load_gate(  # type: ignore[no-untyped-def]
    pointer, rows, start, end, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr
):
    """Gate and up of these rows from column ``start``. Where they take turns (``STEP`` 2) both are read at once."""
    at = pointer + rows.to(tl.int64)[:, None] * (2 * width)
    if STEP == 2:
        turns = 2 * start + tl.arange(0, 2 * COLUMNS)
        inside = (rows < end)[:, None] & (turns < 2 * width)[None, :]
        both = tl.load(at + turns[None, :], mask=inside, other=0.0)
        g, u = tl.split(tl.reshape(both, (ROWS, COLUMNS, 2)))
    else:
        columns = start + tl.arange(0, COLUMNS)
        inside = (rows < end)[:, None] & (columns < width)[None, :]
        g = tl.load(at + columns[None, :], mask=inside, other=0.0)
        u = tl.load(at + width + columns[None, :], mask=inside, other=0.0)
    return g.to(tl.float32), u.to(tl.float32)


@triton.jit
def _store_gate(  # type: ignore[no-untyped-def]
    pointer, g, u, rows, start, end, width, COLUMNS: tl.constexpr, STEP: tl.constexpr
):
    at = pointer + rows.to(tl.int64)[:, None] * (2 * width)
    if STEP == 2:
        turns = 2 * start + tl.arange(0, 2 * COLUMNS)
        inside = (rows < end)[:, None] & (turns < 2 * width)[None, :]
        tl.store(at + turns[None, :], tl.interleave(g, u), mask=inside)
    else:
        columns = start + tl.arange(0, COLUMNS)
        inside = (rows < end)[:, None] & (columns < width)[None, :]
        tl.store(at + columns[None, :], g, mask=inside)
        tl.store(at + width + columns[None, :], u, mask=inside)


@triton.jit
def _amax_kernel(x_pointer, tops_pointer, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    tl.store(tops_pointer + row, top_of(x_pointer + row * width, x_pointer, width, False, BLOCK))


def row_amax(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each row, (n, i) -> (n) float32."""
    out = x.new_empty(len(x), dtype=torch.float32)
    block = min(STEP_COLUMNS, triton.next_power_of_2(x.shape[1]))
    _amax_kernel[(len(x),)](x.contiguous(), out, x.shape[1], BLOCK=block)
    return out


@triton.jit
def _gather_kernel(  # type: ignore[no-untyped-def]
    x_pointer,
    tokens_pointer,
    ends_pointer,
    a_pointer,
    factors_pointer,
    tops_pointer,
    factor_tops_pointer,
    rows_pointer,
    scales_pointer,
    low_pointer,
    width,
    rank,
    a_group,
    a_rank,
    a_column,
    scale,
    num_groups,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    SCALED: tl.constexpr,
    FP8: tl.constexpr,
):
    """Rows for fp8 are read once, too: their scale follows from the token's largest value, times that of the group's
    factors, which is a bound. Scales are powers of two, so that a larger one costs digits of the smallest values alone.
    """
    group, row, end = _find_block(ends_pointer, tl.program_id(0), num_groups, GROUPS, ROWS)
    if group >= num_groups:
        return
    rows = row + tl.arange(0, ROWS)
    ranks = tl.arange(0, RANK)
    in_rows, in_rank = rows < end, ranks < rank
    tokens = tl.load(tokens_pointer + rows, mask=in_rows, other=0).to(tl.int64)
    group = group.to(tl.int64)
    low = tl.zeros((ROWS, RANK), tl.float32)
    if FP8:
        top = tl.load(tops_pointer + tokens, mask=in_rows, other=0.0)
        if SCALED:
            top *= tl.load(factor_tops_pointer + group)
        own, inverse = scale_of(top)
        tl.store(scales_pointer + rows, own, mask=in_rows)
    for start in range(0, width, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = in_rows[:, None] & (columns < width)[None, :]
        x = tl.load(x_pointer + tokens[:, None] * width + columns[None, :], mask=inside, other=0.0)
        a = tl.load(
            a_pointer + group * a_group + ranks[None, :] * a_rank + columns[:, None] * a_column,
            mask=in_rank[None, :] & (columns < width)[:, None],
            other=0.0,
        )
        low += tl.dot(x, a)
        if FP8:
            wide = x.to(tl.float32)
            if SCALED:
                wide *= tl.load(factors_pointer + group * width + columns, mask=columns < width, other=0.0)[None, :]
            x = (wide * inverse[:, None]).to(rows_pointer.dtype.element_ty)
        tl.store(rows_pointer + rows.to(tl.int64)[:, None] * width + columns[None, :], x, mask=inside)
    at = low_pointer + rows[:, None] * rank + ranks[None, :]
    tl.store(at, (low * scale).to(low_pointer.dtype.element_ty), mask=in_rows[:, None] & in_rank[None, :])


def _gather(
    x: torch.Tensor,
    tokens: torch.Tensor,
    ends: torch.Tensor,
    a: torch.Tensor,
    scale: float,
    factors: torch.Tensor | None,
    rows: torch.Tensor,
    scales: torch.Tensor | None,
) -> torch.Tensor:
    """Fill ``rows`` and the scales that they have in fp8; the low-rank product."""
    num_rows, (num_groups, rank, width) = len(tokens), a.shape
    low = x.new_empty(num_rows, rank)
    of_tokens = low if scales is None else row_amax(x)
    of_factors = low if factors is None else row_amax(factors)
    _gather_kernel[(triton.cdiv(num_rows, ROWS) + num_groups,)](
        *(x, tokens, ends, a, a if factors is None else factors, of_tokens, of_factors, rows),
        *(low if scales is None else scales, low, width, rank, *a.stride(), scale, num_groups),
        GROUPS=triton.next_power_of_2(num_groups),
        ROWS=ROWS,
        COLUMNS=COLUMNS if scales is None else FP8_COLUMNS,
        RANK=max(MIN_RANK, triton.next_power_of_2(rank)),
        SCALED=factors is not None,
        FP8=scales is not None,
        num_warps=WARPS,
    )
    return low


def gather_low(
    x: torch.Tensor, tokens: torch.Tensor, ends: torch.Tensor, a: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x.new_empty(len(tokens), x.shape[1])
    return rows, _gather(x, tokens, ends, a, scale, None, rows, None)


def gather_low_rows(
    x: torch.Tensor,
    tokens: torch.Tensor,
    ends: torch.Tensor,
    a: torch.Tensor,
    scale: float,
    factors: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values, scales = new_rows(len(tokens), x.shape[1], x.device)
    return values, scales, _gather(x, tokens, ends, a, scale, factors, values, scales)


@triton.jit
def _gated_tile(  # type: ignore[no-untyped-def]
    both_pointer,
    low,
    b_pointer,
    bias_pointer,
    group,
    rows,
    start,
    end,
    width,
    rank,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    GATE: tl.constexpr,
    BIASED: tl.constexpr,
    STEP: tl.constexpr,
):
    """z of these rows from column ``start``, in float32."""
    columns, ranks = start + tl.arange(0, COLUMNS), tl.arange(0, RANK)
    in_columns = columns < width
    factor = (ranks < rank)[:, None] & in_columns[None, :]
    up = 1 if STEP == 2 else width
    at_b = b_pointer + (group * (2 * width) + STEP * columns[None, :]) * rank + ranks[:, None]
    g, u = _load_gate(both_pointer, rows, start, end, width, ROWS, COLUMNS, STEP)
    g += tl.dot(low, tl.load(at_b, mask=factor, other=0.0))
    u += tl.dot(low, tl.load(at_b + up * rank, mask=factor, other=0.0))
    if BIASED:
        at_bias = bias_pointer + group * (2 * width) + STEP * columns
        g += tl.load(at_bias, mask=in_columns, other=0.0).to(tl.float32)[None, :]
        u += tl.load(at_bias + up, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    z, _, _ = _gate(g, u, GATE)
    return z


@triton.jit
def _gate_kernel(  # type: ignore[no-untyped-def]
    both_pointer,
    low_pointer,
    b_pointer,
    a_pointer,
    bias_pointer,
    ends_pointer,
    z_pointer,
    values_pointer,
    scales_pointer,
    next_pointer,
    width,
    rank,
    scale,
    num_groups,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    GATE: tl.constexpr,
    BIASED: tl.constexpr,
    STEP: tl.constexpr,
    FP8: tl.constexpr,
):
    """For fp8, z is read again, from cache, when its largest value is known."""
    group, row, end = _find_block(ends_pointer, tl.program_id(0), num_groups, GROUPS, ROWS)
    if group >= num_groups:
        return
    rows = row + tl.arange(0, ROWS)
    ranks = tl.arange(0, RANK)
    in_rows, in_rank = rows < end, ranks < rank
    narrow = in_rows[:, None] & in_rank[None, :]
    group = group.to(tl.int64)
    low = tl.load(low_pointer + rows[:, None] * rank + ranks[None, :], mask=narrow, other=0.0)
    sums = tl.zeros((ROWS, RANK), tl.float32)
    top = tl.zeros((ROWS,), tl.float32)
    kind = both_pointer.dtype.element_ty
    for start in range(0, width, COLUMNS):
        z = _gated_tile(
            both_pointer, low, b_pointer, bias_pointer, group, rows, start, end, width, rank,
            ROWS, COLUMNS, RANK, GATE, BIASED, STEP,
        )  # fmt: skip
        z = z.to(kind)
        columns = start + tl.arange(0, COLUMNS)
        inside = in_rows[:, None] & (columns < width)[None, :]
        tl.store(z_pointer + rows.to(tl.int64)[:, None] * width + columns[None, :], z, mask=inside)
        if FP8:
            top = tl.maximum(top, tl.max(tl.abs(z.to(tl.float32)), 1))
        a = tl.load(
            a_pointer + (group * rank + ranks[None, :]) * width + columns[:, None],
            mask=in_rank[None, :] & (columns < width)[:, None],
            other=0.0,
        )
        sums += tl.dot(z, a)
    at = next_pointer + rows[:, None] * rank + ranks[None, :]
    tl.store(at, (sums * scale).to(next_pointer.dtype.element_ty), mask=narrow)
    if FP8:
        own, inverse = scale_of(top)
        tl.store(scales_pointer + rows, own, mask=in_rows)
        tl.debug_barrier()  # what other threads have stored is read
        for start in range(0, width, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            places = rows.to(tl.int64)[:, None] * width + columns[None, :]
            inside = in_rows[:, None] & (columns < width)[None, :]
            z = tl.load(z_pointer + places, mask=inside, other=0.0).to(tl.float32)
            tl.store(values_pointer + places, (z * inverse[:, None]).to(values_pointer.dtype.element_ty), mask=inside)


def _gate_rows(
    values: torch.Tensor | None,
    scales: torch.Tensor | None,
    both: torch.Tensor,
    low: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    bias: torch.Tensor | None,
    ends: torch.Tensor,
    scale: float,
    gate: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """z and the next low-rank product; fills ``values`` and ``scales`` with its rows in fp8."""
    num_rows, (num_groups, rank, width) = len(both), a.shape
    z, following = both.new_empty(num_rows, width), both.new_empty(num_rows, rank)
    _gate_kernel[(triton.cdiv(num_rows, GATE_ROWS) + num_groups,)](
        *(both, low, b, a, b if bias is None else bias, ends, z),
        *(z if values is None else values, low if scales is None else scales, following),
        *(width, rank, scale, num_groups),
        GROUPS=triton.next_power_of_2(num_groups),
        ROWS=GATE_ROWS,
        COLUMNS=GATE_COLUMNS,
        RANK=max(MIN_RANK, triton.next_power_of_2(rank)),
        GATE=GATES[gate],
        BIASED=bias is not None,
        STEP=2 if gate == "clamped" else 1,
        FP8=scales is not None,
        num_warps=GATE_WARPS,
    )
    return z, following


def gate_low(both: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _gate_rows(None, None, both, *arguments)


def gate_low_rows(both: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values, scales = new_rows(len(both), both.shape[1] // 2, both.device)
    return values, scales, _gate_rows(values, scales, both, *arguments)[1]


@triton.jit
def _gate_backward_kernel(  # type: ignore[no-untyped-def]
    both_pointer,
    low_pointer,
    b_pointer,
    a_pointer,
    bias_pointer,
    v_pointer,
    following_pointer,
    weights_pointer,
    ends_pointer,
    for_both_pointer,
    for_weights_pointer,
    for_low_pointer,
    for_b_pointer,
    for_a_pointer,
    width,
    rank,
    num_rows,
    num_groups,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    GATE: tl.constexpr,
    BIASED: tl.constexpr,
    STEP: tl.constexpr,
):
    tile, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    group, begin, end = _find_block(ends_pointer, chunk, num_groups, GROUPS, CHUNK)
    if group >= num_groups:
        return
    end = tl.minimum(end, begin + CHUNK)
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    ranks = tl.arange(0, RANK)
    in_columns, in_rank = columns < width, ranks < rank
    group = group.to(tl.int64)
    factor = in_rank[:, None] & in_columns[None, :]
    up = 1 if STEP == 2 else width
    at_b = b_pointer + (group * (2 * width) + STEP * columns[None, :]) * rank + ranks[:, None]
    b_g = tl.load(at_b, mask=factor, other=0.0)  # (r, columns)
    b_u = tl.load(at_b + up * rank, mask=factor, other=0.0)
    bias_g = tl.zeros((COLUMNS,), tl.float32)
    bias_u = tl.zeros((COLUMNS,), tl.float32)
    if BIASED:
        at_bias = bias_pointer + group * (2 * width) + STEP * columns
        bias_g += tl.load(at_bias, mask=in_columns, other=0.0).to(tl.float32)
        bias_u += tl.load(at_bias + up, mask=in_columns, other=0.0).to(tl.float32)
    a = tl.load(a_pointer + (group * rank + ranks[:, None]) * width + columns[None, :], mask=factor, other=0.0)
    for_g = tl.zeros((COLUMNS, RANK), tl.float32)
    for_u = tl.zeros((COLUMNS, RANK), tl.float32)
    for_a = tl.zeros((COLUMNS, RANK), tl.float32)
    kind = both_pointer.dtype.element_ty
    for row in tl.range(begin, end, ROWS, num_stages=2):
        rows = row + tl.arange(0, ROWS)
        in_rows = rows < end
        wide = rows.to(tl.int64)[:, None]
        inside = in_rows[:, None] & in_columns[None, :]
        narrow = in_rows[:, None] & in_rank[None, :]
        low = tl.load(low_pointer + rows[:, None] * rank + ranks[None, :], mask=narrow, other=0.0)
        following = tl.load(following_pointer + rows[:, None] * rank + ranks[None, :], mask=narrow, other=0.0)
        weights = tl.load(weights_pointer + rows, mask=in_rows, other=0.0).to(tl.float32)
        g, u = _load_gate(both_pointer, rows, tile * COLUMNS, end, width, ROWS, COLUMNS, STEP)
        g += tl.dot(low, b_g) + bias_g[None, :]
        u += tl.dot(low, b_u) + bias_u[None, :]
        v = tl.load(v_pointer + wide * width + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        v += tl.dot(following, a)
        z, slope_g, slope_u = _gate(g, u, GATE)
        tl.store(for_weights_pointer + tile * num_rows + rows, tl.sum(z * v, 1), mask=in_rows)
        dz = v * weights[:, None]
        dg, du = (dz * slope_g).to(kind), (dz * slope_u).to(kind)
        _store_gate(for_both_pointer, dg, du, rows, tile * COLUMNS, end, width, COLUMNS, STEP)
        lows = tl.dot(dg, tl.trans(b_g)) + tl.dot(du, tl.trans(b_u))
        tl.store(for_low_pointer + (tile * num_rows + wide) * rank + ranks[None, :], lows, mask=narrow)
        weighted = (following.to(tl.float32) * weights[:, None]).to(kind)
        for_g += tl.dot(tl.trans(dg), low)
        for_u += tl.dot(tl.trans(du), low)
        for_a += tl.dot(tl.trans(z.to(kind)), weighted)
    narrow = in_columns[:, None] & in_rank[None, :]
    at = for_b_pointer + (chunk * (2 * width) + STEP * columns[:, None]) * rank + ranks[None, :]
    tl.store(at, for_g, mask=narrow)
    tl.store(at + up * rank, for_u, mask=narrow)
    tl.store(for_a_pointer + (chunk * rank + ranks[None, :]) * width + columns[:, None], for_a, mask=narrow)


def gate_low_backward(
    both: torch.Tensor,
    low: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    bias: torch.Tensor | None,
    v: torch.Tensor,
    following: torch.Tensor,
    weights: torch.Tensor,
    ends: torch.Tensor,
    scale: float,
    gate: str,
) -> tuple[torch.Tensor, ...]:
    num_rows, (num_groups, rank, width) = len(both), a.shape
    tiles, chunks = triton.cdiv(width, GATE_COLUMNS), triton.cdiv(num_rows, CHUNK) + num_groups
    make = partial(torch.empty, dtype=torch.float32, device=both.device)
    for_weights, for_low = make(tiles, num_rows), make(tiles, num_rows, rank)
    for_both = torch.empty_like(both)
    for_b, for_a = make(chunks, *b.shape[1:]), make(chunks, *a.shape[1:])
    _gate_backward_kernel[(tiles, chunks)](
        *(
            both,
            low,
            b,
            a,
            b if bias is None else bias,
            v,
            following,
            weights,
            ends,
            for_both,
            for_weights,
            for_low,
            for_b,
            for_a,
        ),
        *(width, rank, num_rows, num_groups),
        GROUPS=triton.next_power_of_2(num_groups),
        CHUNK=CHUNK,
        ROWS=ROWS,
        COLUMNS=GATE_COLUMNS,
        RANK=max(MIN_RANK, triton.next_power_of_2(rank)),
        GATE=GATES[gate],
        BIASED=bias is not None,
        STEP=2 if gate == "clamped" else 1,
        num_warps=WARPS,
    )
    for_low = (for_low.sum(0) * scale).to(both.dtype)
    return for_both, for_weights.sum(0), for_low, add_chunks(for_b, ends), add_chunks(for_a, ends)


@triton.jit
def _sum_kernel(  # type: ignore[no-untyped-def]
    chunks_pointer, ends_pointer, out_pointer, size, GROUPS: tl.constexpr, CHUNK: tl.constexpr, VALUES: tl.constexpr
):
    group = tl.program_id(1)
    groups = tl.arange(0, GROUPS)
    end = tl.load(ends_pointer + groups, mask=groups <= group, other=0)
    begin = tl.load(ends_pointer + groups - 1, mask=(groups <= group) & (groups > 0), other=0)
    counts = tl.where(groups <= group, (end - begin + CHUNK - 1) // CHUNK, 0)
    first = tl.sum(tl.where(groups < group, counts, 0), 0)
    last = tl.sum(counts, 0)
    values = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    inside = values < size
    total = tl.zeros((VALUES,), tl.float32)
    at = chunks_pointer + first.to(tl.int64) * size + values
    for _ in range(first, last):
        total += tl.load(at, mask=inside, other=0.0)
        at += size
    tl.store(out_pointer + group.to(tl.int64) * size + values, total, mask=inside)


def add_chunks(chunks: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The sums of each group's chunks (c, ...) of rows, in their order: (g, ...)."""
    num_groups = len(ends)
    out = chunks.new_empty(num_groups, *chunks.shape[1:])
    size = out[0].numel()
    _sum_kernel[(triton.cdiv(size, SUMMED), num_groups)](
        *(chunks, ends, out, size), GROUPS=triton.next_power_of_2(num_groups), CHUNK=CHUNK, VALUES=SUMMED
    )
    return out


@triton.jit
def _outer_kernel(  # type: ignore[no-untyped-def]
    x_pointer,
    tokens_pointer,
    low_pointer,
    ends_pointer,
    out_pointer,
    width,
    rank,
    out_group,
    out_rank,
    out_column,
    num_groups,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
):
    chunk = tl.program_id(1).to(tl.int64)
    group, begin, end = _find_block(ends_pointer, chunk, num_groups, GROUPS, CHUNK)
    if group >= num_groups:
        return
    end = tl.minimum(end, begin + CHUNK)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    ranks = tl.arange(0, RANK)
    in_columns, in_rank = columns < width, ranks < rank
    sums = tl.zeros((COLUMNS, RANK), tl.float32)
    for row in range(begin, end, ROWS):
        rows = row + tl.arange(0, ROWS)
        in_rows = rows < end
        tokens = tl.load(tokens_pointer + rows, mask=in_rows, other=0).to(tl.int64)
        at = x_pointer + tokens[:, None] * width + columns[None, :]
        x = tl.load(at, mask=in_rows[:, None] & in_columns[None, :], other=0.0)
        low = tl.load(
            low_pointer + rows[:, None] * rank + ranks[None, :], mask=in_rows[:, None] & in_rank[None, :], other=0.0
        )
        sums += tl.dot(tl.trans(x), low)
    at = out_pointer + chunk * out_group + ranks[None, :] * out_rank + columns[:, None] * out_column
    tl.store(at, sums, mask=in_columns[:, None] & in_rank[None, :])


def gathered_outer(
    x: torch.Tensor, tokens: torch.Tensor, low: torch.Tensor, ends: torch.Tensor, *, transposed: bool
) -> torch.Tensor:
    num_groups, rank, width = len(ends), low.shape[1], x.shape[1]
    chunks = triton.cdiv(len(tokens), CHUNK) + num_groups
    out = x.new_empty((chunks, width, rank) if transposed else (chunks, rank, width), dtype=torch.float32)
    strides = (out.stride(0), *((out.stride(2), out.stride(1)) if transposed else (out.stride(1), out.stride(2))))
    _outer_kernel[(triton.cdiv(width, COLUMNS), chunks)](
        *(x, tokens, low, ends, out, width, rank, *strides, num_groups),
        GROUPS=triton.next_power_of_2(num_groups),
        CHUNK=CHUNK,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        RANK=max(MIN_RANK, triton.next_power_of_2(rank)),
        num_warps=WARPS,
    )
    return add_chunks(out, ends)


@triton.jit
def _combine_kernel(  # type: ignore[no-untyped-def]
    y_pointer,
    places_pointer,
    weights_pointer,
    out_pointer,
    width,
    NUM_CHOSEN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    total = tl.zeros((COLUMNS,), tl.float32)
    for choice in tl.static_range(NUM_CHOSEN):
        place = tl.load(places_pointer + token * NUM_CHOSEN + choice).to(tl.int64)
        y = tl.load(y_pointer + place * width + columns, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            y *= tl.load(weights_pointer + token * NUM_CHOSEN + choice).to(tl.float32)
        total += y
    tl.store(out_pointer + token * width + columns, total.to(out_pointer.dtype.element_ty), mask=inside)


def combine(y: torch.Tensor, places: torch.Tensor, num_chosen: int, weights: torch.Tensor | None) -> torch.Tensor:
    num_tokens, width = len(places) // num_chosen, y.shape[1]
    out = y.new_empty(num_tokens, width)
    columns = min(COMBINED, triton.next_power_of_2(width))
    _combine_kernel[(num_tokens, triton.cdiv(width, columns))](
        *(y, places, y if weights is None else weights, out, width),
        NUM_CHOSEN=num_chosen,
        WEIGHTED=weights is not None,
        COLUMNS=columns,
    )
    return out


@triton.jit
def _add_kernel(  # type: ignore[no-untyped-def]
    y_pointer,
    low_pointer,
    wide_pointer,
    ends_pointer,
    width,
    rank,
    wide_group,
    wide_rank,
    wide_column,
    num_groups,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
):
    group, row, end = _find_block(ends_pointer, tl.program_id(1), num_groups, GROUPS, ROWS)
    if group >= num_groups:
        return
    rows = row + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    ranks = tl.arange(0, RANK)
    in_rows, in_columns, in_rank = rows < end, columns < width, ranks < rank
    at = y_pointer + rows.to(tl.int64)[:, None] * width + columns[None, :]
    inside = in_rows[:, None] & in_columns[None, :]
    y = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    low = tl.load(
        low_pointer + rows[:, None] * rank + ranks[None, :], mask=in_rows[:, None] & in_rank[None, :], other=0.0
    )
    wide = tl.load(
        wide_pointer + group.to(tl.int64) * wide_group + ranks[:, None] * wide_rank + columns[None, :] * wide_column,
        mask=in_rank[:, None] & in_columns[None, :],
        other=0.0,
    )
    tl.store(at, (y + tl.dot(low, wide)).to(y_pointer.dtype.element_ty), mask=inside)


def add_low(y: torch.Tensor, low: torch.Tensor, wide: torch.Tensor, ends: torch.Tensor) -> None:
    num_rows, width = y.shape
    num_groups, rank, _ = wide.shape
    _add_kernel[(triton.cdiv(width, COLUMNS), triton.cdiv(num_rows, ROWS) + num_groups)](
        *(y, low, wide, ends, width, rank, *wide.stride(), num_groups),
        GROUPS=triton.next_power_of_2(num_groups),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        RANK=max(MIN_RANK, triton.next_power_of_2(rank)),
        num_warps=WARPS,
    )


@triton.jit
def _product_kernel(  # type: ignore[no-untyped-def]
    x_tiles,
    weight_tiles,
    x_scales,
    weight_scales,
    low_pointer,
    wide_pointer,
    y_pointer,
    ends_pointer,
    width,
    inner,
    weight_rows,
    rank,
    wide_group,
    wide_rank,
    wide_column,
    num_groups,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    RANK: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SCALED: tl.constexpr,
):
    tiles = tl.cdiv(width, COLUMNS)
    group, row, end = _find_block(ends_pointer, tl.program_id(0) // tiles, num_groups, GROUPS, ROWS)
    if group >= num_groups:
        return
    column = tl.program_id(0) % tiles * COLUMNS
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    # Tiles may reach into the next group's rows: of x these are not stored; of a weight they meet zeros or are not.
    for start in tl.range(0, inner, INNER, num_stages=4):
        x = x_tiles.load([row, start])
        if TRANSPOSED:
            total = tl.dot(x, weight_tiles.load([group * weight_rows + start, column]), total)
        else:
            total = tl.dot(x, weight_tiles.load([group * weight_rows + column, start]).T, total)
    rows, columns, ranks = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS), tl.arange(0, RANK)
    in_rows, in_columns, in_rank = rows < end, columns < width, ranks < rank
    group = group.to(tl.int64)
    if SCALED:
        total *= tl.load(x_scales + rows, mask=in_rows, other=0.0)[:, None]
        total *= tl.load(weight_scales + group * width + columns, mask=in_columns, other=0.0)[None, :]
    low = tl.load(
        low_pointer + rows[:, None] * rank + ranks[None, :], mask=in_rows[:, None] & in_rank[None, :], other=0.0
    )
    wide = tl.load(
        wide_pointer + group * wide_group + ranks[:, None] * wide_rank + columns[None, :] * wide_column,
        mask=in_rank[:, None] & in_columns[None, :],
        other=0.0,
    )
    total = tl.dot(low, wide, total)
    at = y_pointer + rows.to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(at, total.to(y_pointer.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])


def multiply_and_add(
    x: torch.Tensor, weight: torch.Tensor, low: torch.Tensor, wide: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """On Hopper in one kernel, where that takes less time: its tiles come by the tensor memory accelerator."""
    transposed = weight.stride(-1) != 1
    stored = weight.mT if transposed else weight
    _, width, inner = weight.shape
    fits = width % ALIGNMENT == inner % ALIGNMENT == 0 and x.is_contiguous() and stored.is_contiguous()
    if fits and (transposed or inner <= LONGEST_SUM) and _is_hopper(x.device):
        return _multiply_in_one(x, stored, None, None, low, wide, ends, PRODUCT, transposed)
    y = compute_groups(x, weight, ends)
    add_low(y, low, wide, ends)
    return y


def multiply_rows_and_add(
    values: torch.Tensor,
    scales: torch.Tensor,
    stack: torch.Tensor,
    stack_scales: torch.Tensor,
    low: torch.Tensor,
    wide: torch.Tensor,
    ends: torch.Tensor,
    multiply: Callable[..., torch.Tensor],
) -> torch.Tensor:
    if stack.shape[2] <= LONGEST_SUM and _is_hopper(values.device):
        return _multiply_in_one(values, stack, scales, stack_scales, low, wide, ends, FP8_PRODUCT, False)
    y = multiply(values, scales, stack, stack_scales, ends, low.dtype)
    add_low(y, low, wide, ends)
    return y


def _multiply_in_one(
    x: torch.Tensor,
    stored: torch.Tensor,
    scales: torch.Tensor | None,
    stored_scales: torch.Tensor | None,
    low: torch.Tensor,
    wide: torch.Tensor,
    ends: torch.Tensor,
    tile: tuple[int, int, int],
    transposed: bool,
) -> torch.Tensor:
    rank, (num_rows, inner), (num_groups, *_), (rows, columns, values) = low.shape[1], x.shape, stored.shape, tile
    width = stored.shape[2 if transposed else 1]
    y = low.new_empty(num_rows, width)
    _product_kernel[((triton.cdiv(num_rows, rows) + num_groups) * triton.cdiv(width, columns),)](
        TensorDescriptor.from_tensor(x, [rows, values]),
        TensorDescriptor.from_tensor(stored.flatten(0, 1), [values, columns] if transposed else [columns, values]),
        *(low if scales is None else scales, low if stored_scales is None else stored_scales),
        *(low, wide, y, ends, width, inner, stored.shape[1], rank, *wide.stride(), num_groups),
        GROUPS=triton.next_power_of_2(num_groups),
        ROWS=rows,
        COLUMNS=columns,
        INNER=values,
        RANK=max(MIN_RANK, triton.next_power_of_2(rank)),
        TRANSPOSED=transposed,
        SCALED=scales is not None,
        num_warps=8,
    )
    return y


def _is_hopper(device: torch.device) -> bool:
    architecture = architecture_of(device)
    return architecture is None or architecture.is_hopper  # None: Triton's interpreter
