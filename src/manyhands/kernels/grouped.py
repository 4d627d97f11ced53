"""Products of the rows of each group with that group's matrix, such as those of tokens with their expert's weights.

Shapes: x (n, i), its rows sorted by group; weight (g, o, i); ends (g) int32, where the rows of each group end. On GPUs
bfloat16 goes through ``torch.nn.functional.grouped_mm``, which does not wait for ``ends``; all else is a loop of plain
products. Both are operators of our own, opaque to torch.compile: a trace of ``grouped_mm`` refuses other dtypes, and a
loop would break the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from manyhands.kernels.operators import operator

ALIGNMENT = 8  # values of bfloat16 in the 16 bytes of which ``grouped_mm`` takes rows to be multiples


def grouped_matmul(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x_k W_k^T of the rows of each group, (n, i), (g, o, i) -> (n, o)."""
    out: torch.Tensor = _GroupedMatmul.apply(x, weight, ends)
    return out


class _GroupedMatmul(torch.autograd.Function):
    """A frozen weight costs no gradient, and its input is not kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, ends)
        out: torch.Tensor = multiply_groups(x, weight, ends)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        for_x = multiply_groups(gradient, weight.mT, ends) if ctx.needs_input_grad[0] else None
        return for_x, None if x is None else group_gradients(gradient, x, ends), None


def rows_of_groups(ends: torch.Tensor) -> Iterator[slice]:
    """The rows of each group. Waits for a GPU."""
    begin = 0
    for end in ends.tolist():
        yield slice(begin, end)
        begin = end


def compute_groups(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if x.is_cuda and x.dtype == torch.bfloat16:
        return multiply_in_one_launch(x, weight, ends)
    out = x.new_empty(len(x), weight.shape[1])
    for rows, matrix in zip(rows_of_groups(ends), weight, strict=True):
        torch.mm(x[rows], matrix.T, out=out[rows])
    return out


def pad(x: torch.Tensor, columns: int, rows: int = 0) -> torch.Tensor:
    """x with columns and rows of zeros at its end; x itself if there are none, where ``F.pad`` makes a copy."""
    return F.pad(x, (0, columns, 0, rows)) if columns or rows else x


def multiply_in_one_launch(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The same by ``grouped_mm``; sides that are no multiples of 16 bytes are padded with zeros."""
    size, inner = weight.shape[1:]
    weight, x = pad(weight, -inner % ALIGNMENT, -size % ALIGNMENT), pad(x, -inner % ALIGNMENT)
    out = F.grouped_mm(x.contiguous(), weight.mT, offs=ends)
    return out if out.shape[1] == size else out[:, :size].contiguous()


def compute_group_gradients(gradient: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if x.is_cuda and x.dtype == torch.bfloat16:
        return gradients_in_one_launch(gradient, x, ends)
    out = x.new_zeros(len(ends), gradient.shape[1], x.shape[1])
    for rows, matrix in zip(rows_of_groups(ends), out, strict=True):
        torch.mm(gradient[rows].T, x[rows], out=matrix)
    return out


def gradients_in_one_launch(gradient: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The weights' gradients by ``grouped_mm``, padded as there."""
    size, inner = gradient.shape[1], x.shape[1]
    gradient, x = pad(gradient, -size % ALIGNMENT), pad(x, -inner % ALIGNMENT)
    out = F.grouped_mm(gradient.contiguous().mT, x.contiguous(), offs=ends)
    return out if out.shape[1:] == (size, inner) else out[:, :size, :inner].contiguous()


multiply_groups = operator(
    "multiply_groups",
    "(Tensor x, Tensor weight, Tensor ends) -> Tensor",
    compute_groups,
    lambda x, weight, ends: x.new_empty(x.shape[0], weight.shape[1]),
)
group_gradients = operator(
    "group_gradients",
    "(Tensor gradient, Tensor x, Tensor ends) -> Tensor",
    compute_group_gradients,
    lambda gradient, x, ends: x.new_empty(ends.shape[0], gradient.shape[1], x.shape[1]),
)
