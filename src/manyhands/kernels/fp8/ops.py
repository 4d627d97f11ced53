"""Matmuls of float8_e4m3fn values with a scale a row, and the kernels that quantize. Knows no layers or modules.

A row x of an operand is held as fp8 values x / s, rounded to 3 mantissa bits; s is the smallest power of two with max
|x| / s <= 448, the largest value. A rounding errs by at most 2**-4 of the number, 2.6 % in root mean square over all
numbers, so a product of two of them by 3.7 %, and so does a sum of products of random signs, whatever its length.
Numbers below 2**-15 of their row's largest lose more, below 2**-19 all. Scales are powers of two, so that one
operand's fp8 values serve several matmuls without another rounding: scales over what is summed are multiplied into
the other operand before it is quantized, or into both as they are transposed.

On a GPU of compute capability 8.9 or newer matmuls run by ``torch._scaled_mm`` and quantization by Triton, each tried
on small numbers first (``select``); elsewhere all of it runs in torch operations, the matmul in float32 of the very
same values (``describe`` says which). Accumulation is the fast one: at 4,096 columns it moves the error from 3.769 to
3.771 % (``benchmarks/fp8.py``). Values in e5m2 err by 5.9 %. Operators are opaque to torch.compile and have no
gradients: use them inside autograd functions.

Shapes: n rows (tokens), k columns summed over, o columns of a result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from manyhands.kernels.fp8.reference import (
    ALIGNMENT,
    E4M3,
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
from manyhands.kernels.fp8.select import has_scaled_mm, load_triton, scaled_group_mm, scaled_mm, why_no_group_mm
from manyhands.kernels.operators import operator

MAX_PARTS = 3


def quantize_rows(parts: Sequence[Tensor], factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """fp8 values (n, k) and scales (n, 1), float32, of one to three inputs (n, k_j) side by side: a row of all has one
    scale.

    Columns are multiplied by ``factors`` (k) before, which are float32.
    """
    return (_rows_op if torch.compiler.is_compiling() else _rows)(list(parts), factors)


def quantize_stacked(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """fp8 values (n, k) and scales (n, 1) of inputs (n_j, k) one above the other."""
    return (_stacked_op if torch.compiler.is_compiling() else _stacked)(list(parts))


def transpose(parts: Sequence[Tensor], factors: Tensor, *, invert: bool) -> Tensor:
    """fp8 values (k, n') of X^T, for X (n, k) in parts (n_j, k) one above the other, in fp8 or not, whose rows are
    multiplied by powers of two (n, 1), or divided by them (``invert``). n' is n rounded up to a multiple of 16 by
    zeros, which add nothing to a sum.
    """
    return (_transpose_op if torch.compiler.is_compiling() else _transpose)(list(parts), factors, invert)


def quantize_group_rows(x: Tensor, factors: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 values (n, k) and scales (n, 1) of rows x (n, k) sorted by group, multiplied before by the float32 factors
    (g, k) of their group; ``ends`` (g) int32 is where the rows of each group end.
    """
    found: tuple[Tensor, Tensor] = _group_rows_op(x, factors, ends)
    return found


def gated_rows(g: Tensor, u: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """h = act(g) u (n, k), rounded once, with its values (n, k) and scales (n, 1)."""
    return (_gated_op if torch.compiler.is_compiling() else _gated)(g, u, activation)


def gated_rows_backward(
    dh: Tensor, g: Tensor, u: Tensor, factors: Tensor, activation: str, *, with_h: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From dh (n, k): dg and du side by side (n, 2k), h again (n, k) or nothing (0, k), and values (n, 2k) and scales
    (n, 1) of the former, whose columns are multiplied by ``factors`` (2k) before.
    """
    return (_gated_backward_op if torch.compiler.is_compiling() else _gated_backward)(
        dh, g, u, factors, activation, with_h
    )


def scaled_matmul(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor | None,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    left: Sequence[Tensor] = (),
    right: Sequence[Tensor] = (),
) -> Tensor:
    """A B^T + bias (n, o) in ``dtype``, from values (n, k) and (o, k) and their scales (n, 1) and (o, 1), or 1 for b.

    ``left`` (n, r_j) and ``right`` (o_j, r_j), in ``dtype``: left_j right_j^T is added to the j-th part of the columns,
    o_j wide. Parts follow one another; one with nothing to add (r_j = 0) is left as it is.
    """
    function = _matmul_op if torch.compiler.is_compiling() else _matmul
    return function(a, a_scales, b, b_scales, dtype, bias, list(left), list(right))


def matmul_over_rows(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, out_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """A^T B (o, k) in ``dtype``, row j over ``out_scales`` (o), powers of two, for A (n, o) and B (n, k) as values with
    a scale for each row.

    The two scales of a row multiply each term of the sum. Relative to the largest product of both they are spread over
    the values of both, as powers of two: exact, but for terms some 2**-17 of the largest and smaller.

    No operator of its own, so that the compiler fuses its 30 small operations: launched one by one they were two of
    three launches of a step in which everything is trained.
    """
    if a.shape[0] == 0:
        return a_scales.new_zeros((a.shape[1], b.shape[1]), dtype=dtype)
    exponents = _exponent(a_scales) + _exponent(b_scales)
    top = exponents.amax()
    below = exponents - top
    half = below >> 1
    left, right = (
        transpose([a], _power_of_two(below - half), invert=False),
        transpose([b], _power_of_two(half), invert=False),
    )
    inverse = _power_of_two(-_exponent(out_scales.view(-1, 1)))  # a compiled quotient need not be exact
    scales = _power_of_two(top >> 1) * inverse * _power_of_two(top - (top >> 1))  # as 2**top may be no float
    return scaled_matmul(left, scales, right, None, dtype)


def transpose_stack(values: Tensor) -> Tensor:
    """The values (g, k, o) of each group's transpose, for values (g, o, k) whose sides are multiples of 16."""
    kernels = load_triton(values.device)[0]
    return kernels.transpose_stack(values) if kernels else transpose_stack_reference(values)


def multiply_groups(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    """A_g B_g^T (n, o) in ``dtype`` of the rows of each group, from values (n, k) and (g, o, k) and their scales (n, 1)
    and (g, o). No operator of its own.

    By ``torch._scaled_grouped_mm`` where it gives ``dtype``, which does not wait for ``ends``, else a loop.
    """
    in_one = dtype == torch.bfloat16 and len(a) > 0 and not why_no_group_mm(a.device)
    return (scaled_group_mm if in_one else group_matmul_reference)(a, a_scales, b, b_scales, ends, dtype)


def has_features(in_features: int, out_features: int) -> bool:
    """Whether a layer's matmuls, forward and backward, can be in fp8."""
    return in_features % ALIGNMENT == 0 and out_features % ALIGNMENT == 0 and in_features > 0 and out_features > 0


# -- what the operators do


def _rows(parts: list[Tensor], factors: Tensor | None) -> tuple[Tensor, Tensor]:
    kernels = load_triton(parts[0].device)[0]
    return kernels.quantize_rows(parts, factors) if kernels else rows_reference(parts, factors)


def _group_rows(x: Tensor, factors: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    kernels = load_triton(x.device)[0]
    return (kernels.quantize_group_rows if kernels else group_rows_reference)(x, factors, ends)


def _stacked(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    kernels = load_triton(parts[0].device)[0]
    return kernels.quantize_stacked(parts) if kernels else stacked_reference(parts)


def _transpose(parts: list[Tensor], factors: Tensor, invert: bool) -> Tensor:
    kernels = load_triton(parts[0].device)[0]
    return kernels.transpose(parts, factors, invert) if kernels else transpose_reference(parts, factors, invert)


def _gated(g: Tensor, u: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    kernels = load_triton(g.device)[0]
    return kernels.gated_rows(g, u, activation) if kernels else gated_reference(g, u, activation)


def _gated_backward(
    dh: Tensor, g: Tensor, u: Tensor, factors: Tensor, activation: str, with_h: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kernels = load_triton(g.device)[0]
    return (kernels.gated_rows_backward if kernels else gated_backward_reference)(dh, g, u, factors, activation, with_h)


def _matmul(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor | None,
    dtype: torch.dtype,
    bias: Tensor | None,
    left: list[Tensor],
    right: list[Tensor],
) -> Tensor:
    y = _multiply(a, a_scales, b, a_scales.new_ones((b.shape[0], 1)) if b_scales is None else b_scales, dtype, bias)
    start = 0
    for low, wide in zip(left, right, strict=True):
        if low.shape[1]:
            _add_low_rank(y[:, start : start + wide.shape[0]], low, wide)
        start += wide.shape[0]
    return y


def _add_low_rank(y: Tensor, low: Tensor, wide: Tensor) -> None:
    kernels = load_triton(y.device)[0]
    if kernels and low.shape[1] <= kernels.MAX_RANK and y.dtype in (torch.bfloat16, torch.float16):
        kernels.add_low_rank(y, low, wide)
    else:
        y.addmm_(low, wide.t())


def _exponent(scales: Tensor) -> Tensor:
    """Of powers of two that are no denormals."""
    return (scales.view(torch.int32) >> 23) - 127


def _power_of_two(exponents: Tensor) -> Tensor:
    """Exactly, in float32; 0 for what is below 2**-126."""
    return (exponents + 127).clamp(min=0).mul(2**23).to(torch.int32).view(torch.float32)


def _multiply(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    if a.shape[0] == 0:
        return a_scales.new_zeros((0, b.shape[0]), dtype=dtype)
    multiply: Callable[..., Tensor] = scaled_mm if has_scaled_mm(a.device) else matmul_reference
    return multiply(a, a_scales, b, b_scales, dtype, bias)


# -- the same as operators that torch.compile does not look into


def _rows_like(like, num_rows, width):  # type: ignore[no-untyped-def]
    return like.new_empty((num_rows, width), dtype=E4M3), like.new_empty((num_rows, 1), dtype=torch.float32)


def _fake_rows(parts, factors):  # type: ignore[no-untyped-def]
    return _rows_like(parts[0], parts[0].shape[0], sum(part.shape[1] for part in parts))


def _fake_stacked(parts):  # type: ignore[no-untyped-def]
    return _rows_like(parts[0], sum(part.shape[0] for part in parts), parts[0].shape[1])


def _fake_transpose(parts, factors, invert):  # type: ignore[no-untyped-def]
    num_rows = sum(part.shape[0] for part in parts)
    return parts[0].new_empty((parts[0].shape[1], (num_rows + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT), dtype=E4M3)


def _fake_gated(g, u, activation):  # type: ignore[no-untyped-def]
    return g.new_empty(g.shape), *_rows_like(g, *g.shape)


def _fake_gated_backward(dh, g, u, factors, activation, with_h):  # type: ignore[no-untyped-def]
    num_rows, width = g.shape
    return (
        g.new_empty((num_rows, 2 * width)),
        g.new_empty((num_rows if with_h else 0, width)),
        *_rows_like(g, num_rows, 2 * width),
    )


def _fake_matmul(a, a_scales, b, b_scales, dtype, bias, left, right):  # type: ignore[no-untyped-def]
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


_rows_op = operator(
    "fp8_rows",
    "(Tensor[] parts, Tensor? factors) -> (Tensor, Tensor)",
    _rows,
    _fake_rows,
)
_group_rows_op = operator(
    "fp8_group_rows",
    "(Tensor x, Tensor factors, Tensor ends) -> (Tensor, Tensor)",
    _group_rows,
    lambda x, factors, ends: _rows_like(x, *x.shape),
)
_stacked_op = operator(
    "fp8_stacked",
    "(Tensor[] parts) -> (Tensor, Tensor)",
    _stacked,
    _fake_stacked,
)
_transpose_op = operator(
    "fp8_transpose",
    "(Tensor[] parts, Tensor factors, bool invert) -> Tensor",
    _transpose,
    _fake_transpose,
)
_gated_op = operator(
    "fp8_gated",
    "(Tensor g, Tensor u, str activation) -> (Tensor, Tensor, Tensor)",
    _gated,
    _fake_gated,
)
_gated_backward_op = operator(
    "fp8_gated_backward",
    "(Tensor dh, Tensor g, Tensor u, Tensor factors, str activation, bool with_h) -> (Tensor, Tensor, Tensor, Tensor)",
    _gated_backward,
    _fake_gated_backward,
)
_matmul_op = operator(
    "fp8_matmul",
    "(Tensor a, Tensor a_scales, Tensor b, Tensor? b_scales, ScalarType dtype, Tensor? bias, Tensor[] left, "
    "Tensor[] right) -> Tensor",
    _matmul,
    _fake_matmul,
)
