"""The operators around and with the grouped products of experts, opaque to torch.compile; ``reference`` defines them.

Shapes as there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from manyhands.kernels.experts import reference
from manyhands.kernels.experts.select import kernels_for
from manyhands.kernels.fp8.ops import quantize_group_rows, quantize_rows
from manyhands.kernels.matmul import sum_dtype
from manyhands.kernels.operators import operator


def _gather_low(x: Tensor, tokens: Tensor, ends: Tensor, a: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = kernels_for(x, a.shape[1]).gather_low(x, tokens, ends, a, scale)
    return out


def _gate_low(*arguments: Any) -> tuple[Tensor, Tensor]:
    both, low = arguments[:2]
    out: tuple[Tensor, Tensor] = kernels_for(both, low.shape[1]).gate_low(*arguments)
    return out


def _gather_low_rows(
    x: Tensor, tokens: Tensor, ends: Tensor, a: Tensor, scale: float, factors: Tensor | None
) -> tuple[Tensor, ...]:
    """``gather_low`` with the rows as fp8 values (n, i) and scales (n, 1), multiplied before by the float32 ``factors``
    (g, i) of their group.
    """
    kernels = kernels_for(x, a.shape[1])
    if kernels is not reference:
        out: tuple[Tensor, ...] = kernels.gather_low_rows(x, tokens, ends, a, scale, factors)
        return out
    rows, low = reference.gather_low(x, tokens, ends, a, scale)
    return *(quantize_rows([rows]) if factors is None else quantize_group_rows(rows, factors, ends)), low


def _gate_low_rows(*arguments: Any) -> tuple[Tensor, ...]:
    """``gate_low`` with z as fp8 values (n, w) and scales (n, 1)."""
    both, low = arguments[:2]
    kernels = kernels_for(both, low.shape[1])
    if kernels is not reference:
        out: tuple[Tensor, ...] = kernels.gate_low_rows(*arguments)
        return out
    z, following = reference.gate_low(*arguments)
    return *quantize_rows([z]), following


def _gate_low_backward(*arguments: Any) -> tuple[Tensor, ...]:
    both, low = arguments[:2]
    for_both, for_weights, for_low, for_b, for_a = kernels_for(both, low.shape[1]).gate_low_backward(*arguments)
    wide = sum_dtype(both.dtype)
    return for_both, for_weights.to(wide), for_low, for_b.to(wide), for_a.to(wide)


def _gathered_outer(x: Tensor, tokens: Tensor, low: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    out: Tensor = kernels_for(x, low.shape[1]).gathered_outer(x, tokens, low, ends, transposed=transposed)
    return out.to(sum_dtype(x.dtype))


def _multiply_and_add(x: Tensor, weight: Tensor, low: Tensor, wide: Tensor, ends: Tensor) -> Tensor:
    out: Tensor = kernels_for(x, low.shape[1]).multiply_and_add(x, weight, low, wide, ends)
    return out


def _combine(y: Tensor, places: Tensor, num_chosen: int, weights: Tensor | None) -> Tensor:
    out: Tensor = kernels_for(y, 1).combine(y, places, num_chosen, weights)
    return out


def _fake_gate_backward(both: Tensor, low: Tensor, b: Tensor, a: Tensor, *others: Any) -> tuple[Tensor, ...]:
    wide = sum_dtype(both.dtype)
    return (
        torch.empty_like(both),
        both.new_empty(both.shape[0], dtype=wide),
        torch.empty_like(low),
        b.new_empty(b.shape, dtype=wide),
        a.new_empty(a.shape, dtype=wide),
    )


def _fake_rows(like, num_rows, width):  # type: ignore[no-untyped-def]
    values = like.new_empty(num_rows, width, dtype=torch.float8_e4m3fn)
    return values, like.new_empty(num_rows, 1, dtype=torch.float32)


gather_low = operator(
    "gather_low",
    "(Tensor x, Tensor tokens, Tensor ends, Tensor a, float scale) -> (Tensor, Tensor)",
    _gather_low,
    lambda x, tokens, ends, a, scale: (
        x.new_empty(tokens.shape[0], x.shape[1]),
        x.new_empty(tokens.shape[0], a.shape[1]),
    ),
)
gate_low = operator(
    "gate_low",
    "(Tensor both, Tensor low, Tensor b, Tensor a, Tensor? bias, Tensor ends, float scale, str gate) "
    "-> (Tensor, Tensor)",
    _gate_low,
    lambda both, low, *others: (both.new_empty(both.shape[0], both.shape[1] // 2), torch.empty_like(low)),
)
gather_low_rows = operator(
    "gather_low_rows",
    "(Tensor x, Tensor tokens, Tensor ends, Tensor a, float scale, Tensor? factors) -> (Tensor, Tensor, Tensor)",
    _gather_low_rows,
    lambda x, tokens, ends, a, *others: (
        *_fake_rows(x, tokens.shape[0], x.shape[1]),
        x.new_empty(tokens.shape[0], a.shape[1]),
    ),
)
gate_low_rows = operator(
    "gate_low_rows",
    "(Tensor both, Tensor low, Tensor b, Tensor a, Tensor? bias, Tensor ends, float scale, str gate) "
    "-> (Tensor, Tensor, Tensor)",
    _gate_low_rows,
    lambda both, low, *others: (
        *_fake_rows(both, both.shape[0], both.shape[1] // 2),
        torch.empty_like(low),
    ),
)
gate_low_backward = operator(
    "gate_low_backward",
    "(Tensor both, Tensor low, Tensor b, Tensor a, Tensor? bias, Tensor v, Tensor following, Tensor weights, "
    "Tensor ends, float scale, str gate) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _gate_low_backward,
    _fake_gate_backward,
)
gathered_outer = operator(
    "gathered_outer",
    "(Tensor x, Tensor tokens, Tensor low, Tensor ends, bool transposed) -> Tensor",
    _gathered_outer,
    lambda x, tokens, low, ends, transposed: x.new_empty(
        (ends.shape[0], x.shape[1], low.shape[1]) if transposed else (ends.shape[0], low.shape[1], x.shape[1]),
        dtype=sum_dtype(x.dtype),
    ),
)
multiply_and_add = operator(
    "multiply_and_add",
    "(Tensor x, Tensor weight, Tensor low, Tensor wide, Tensor ends) -> Tensor",
    _multiply_and_add,
    lambda x, weight, low, wide, ends: x.new_empty(x.shape[0], weight.shape[1]),
)
combine = operator(
    "combine",
    "(Tensor y, Tensor places, int num_chosen, Tensor? weights) -> Tensor",
    _combine,
    lambda y, places, num_chosen, weights: y.new_empty(places.shape[0] // num_chosen, y.shape[1]),
)
