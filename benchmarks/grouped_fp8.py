"""A grouped product in fp8 that adds a low-rank product while the result is in registers: a candidate for
``kernels.experts.triton``, timed by ``benchmarks.grouped``. Needs Triton and a GPU with tensor memory accelerators.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from manyhands.kernels.experts.triton import MIN_RANK, _find_block


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
):
    tiles = tl.cdiv(width, COLUMNS)
    group, row, end = _find_block(ends_pointer, tl.program_id(0) // tiles, num_groups, GROUPS, ROWS)
    if group >= num_groups:
        return
    column = tl.program_id(0) % tiles * COLUMNS
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, inner, INNER, num_stages=4):
        x = x_tiles.load([row, start])
        total = tl.dot(x, weight_tiles.load([group * width + column, start]).T, total)
    rows, columns, ranks = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS), tl.arange(0, RANK)
    in_rows, in_columns, in_rank = rows < end, columns < width, ranks < rank
    group = group.to(tl.int64)
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
    values: torch.Tensor,
    scales: torch.Tensor,
    stack: torch.Tensor,
    stack_scales: torch.Tensor,
    low: torch.Tensor,
    wide: torch.Tensor,
    ends: torch.Tensor,
    tile: tuple[int, int, int],
) -> torch.Tensor:
    """The rows of each group, fp8 values (n, k) and scales (n, 1), times that group's stack, values (g, o, k) and
    scales (g, o), plus low (n, r) times wide (g, r, o): (n, o) in the dtype of ``low``. ``k`` is a multiple of 16.
    """
    num_rows, (num_groups, width, inner) = len(values), stack.shape
    rank, (rows, columns, inner_tile) = low.shape[1], tile
    y = low.new_empty(num_rows, width)
    _product_kernel[((triton.cdiv(num_rows, rows) + num_groups) * triton.cdiv(width, columns),)](
        TensorDescriptor.from_tensor(values, [rows, inner_tile]),
        TensorDescriptor.from_tensor(stack.flatten(0, 1), [columns, inner_tile]),
        *(scales, stack_scales, low, wide, y, ends, width, inner, rank, *wide.stride(), num_groups),
        GROUPS=triton.next_power_of_2(num_groups),
        ROWS=rows,
        COLUMNS=columns,
        INNER=inner_tile,
        RANK=max(MIN_RANK, triton.next_power_of_2(rank)),
        num_warps=8 if rows == 128 else 4,
    )
    return y
