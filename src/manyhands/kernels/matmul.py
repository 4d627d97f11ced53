"""Matmuls that add to what is there, and that keep their float32 sums. Knows nothing of layers.

A GPU sums products of bfloat16 in float32 and rounds at the end; ``torch.mm(out_dtype=float32)`` hands the sum out
unrounded. Where the operator is missing (CPU, old builds) the same is done with a rounding in between, as autograd
does.

``mm_wide``, ``low_rank_linear`` and ``sum_of_matmuls`` are opaque to torch.compile, which would turn an in-place
matmul into one with a copy before it. They have no gradients: use them inside autograd functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from manyhands.kernels.operators import operator

HALF = (torch.bfloat16, torch.float16)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over ``dtype`` are kept in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def mm_wide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a b, (m, k) x (k, n) -> (m, n) in ``sum_dtype``; unrounded where the device can."""
    return _mm_wide_op(a, b) if torch.compiler.is_compiling() else _mm_wide(a, b)


def low_rank_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, low: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    """x weight^T + bias + low b^T for x (n, i), weight (o, i), low (n, r), b (o, r) -> (n, o).

    The narrow product is written, and the wide one adds to it while it stores: n o elements are written twice and read
    once, with no pass of their own for the sum, which is also rounded once less.
    """
    # Selective recomputation watches operators and refuses what is written in place after it was kept.
    as_one = torch.compiler.is_compiling() or is_in_torch_dispatch_mode()
    function = _low_rank_linear_op if as_one else _low_rank_linear
    return function(x, weight, bias, low, b)


def sum_of_matmuls(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> torch.Tensor:
    """sum_j left_j right_j for (n, k_j) x (k_j, i) -> (n, i), at least one: each product adds to the one before as it
    stores.
    """
    function = _sum_of_matmuls_op if torch.compiler.is_compiling() else _sum_of_matmuls
    return function(list(left), list(right))


def add_mm_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """total += a b in place, ``total`` (m, n) in ``sum_dtype`` of a and b; one pass over ``total`` where the device
    can.
    """
    if a.dtype == total.dtype:
        return total.addmm_(a, b)
    if has_mixed_mm(a.device, a.dtype):
        return torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    return total.add_(torch.mm(a, b))


@lru_cache
def has_mixed_mm(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ``mm`` and ``addmm`` on ``device`` take ``dtype`` operands and give float32, tried on 16 x 16 numbers."""
    if device.type != "cuda":
        return False
    a = (torch.arange(256, device=device).reshape(16, 16) % 7 - 3).to(dtype)
    expected = a.float() @ a.float()
    try:
        total = torch.mm(a, a, out_dtype=torch.float32)
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return bool(torch.equal(total, 2 * expected))


def _mm_wide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.dtype in HALF and has_mixed_mm(a.device, a.dtype):
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b).to(sum_dtype(a.dtype))


def _low_rank_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, low: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    return F.linear(low, b, bias).addmm_(x, weight.t())


def _sum_of_matmuls(left: list[torch.Tensor], right: list[torch.Tensor]) -> torch.Tensor:
    total = torch.mm(left[0], right[0])
    for a, b in zip(left[1:], right[1:], strict=True):
        total.addmm_(a, b)
    return total


# -- the same as operators that torch.compile does not look into


def _fake_mm_wide(a, b):  # type: ignore[no-untyped-def]
    return a.new_empty((a.shape[0], b.shape[1]), dtype=sum_dtype(a.dtype))


def _fake_low_rank_linear(x, weight, bias, low, b):  # type: ignore[no-untyped-def]
    return x.new_empty((x.shape[0], weight.shape[0]))


def _fake_sum_of_matmuls(left, right):  # type: ignore[no-untyped-def]
    return left[0].new_empty((left[0].shape[0], right[0].shape[1]))


_mm_wide_op = operator("mm_wide", "(Tensor a, Tensor b) -> Tensor", _mm_wide, _fake_mm_wide)
_low_rank_linear_op = operator(
    "low_rank_linear",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor low, Tensor b) -> Tensor",
    _low_rank_linear,
    _fake_low_rank_linear,
)
_sum_of_matmuls_op = operator(
    "sum_of_matmuls", "(Tensor[] left, Tensor[] right) -> Tensor", _sum_of_matmuls, _fake_sum_of_matmuls
)
