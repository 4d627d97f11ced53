"""The definition of what is computed around the grouped products of experts, group by group in plain torch.

Shapes: n rows sorted by group, of g groups whose rows end at ``ends`` (g); tokens (n) are the rows' places among t
inputs; low-rank factors A (g, r, i), B (g, o, r); a gate of width w takes rows (n, 2 w), gate and up, to (n, w).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from manyhands.kernels.grouped import group_gradients, multiply_groups

ALPHA, LIMIT = 1.702, 7.0  # of gpt-oss's gate


def _gate(activation: Callable[[Tensor], Tensor], both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return activation(gate) * up


def _clamped_gate(both: Tensor) -> Tensor:
    """gpt-oss: gate and up take turns, both are clamped, up is moved by one."""
    gate, up = both[..., ::2].clamp(max=LIMIT), both[..., 1::2].clamp(-LIMIT, LIMIT)
    return (up + 1) * gate * torch.sigmoid(ALPHA * gate)


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": partial(_gate, F.silu),
    "gelu_tanh": partial(_gate, partial(F.gelu, approximate="tanh")),
    "gelu": partial(_gate, F.gelu),
    "clamped": _clamped_gate,
}


def gather_low(x: Tensor, tokens: Tensor, ends: Tensor, a: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The rows of x (t, i) that ``tokens`` names, (n, i), and scale x_g A_g^T, (n, r)."""
    rows = x[tokens]
    return rows, multiply_groups(rows, a, ends) * scale


def gate_low(
    both: Tensor, low: Tensor, b: Tensor, a: Tensor, bias: Tensor | None, ends: Tensor, scale: float, gate: str
) -> tuple[Tensor, Tensor]:
    """z = gate(both + low B^T + bias_g) (n, w), for both (n, 2 w) and bias (g, 2 w), and scale z A^T (n, r)."""
    z = GATES[gate](_sum(both, low, b, bias, ends))
    return z, multiply_groups(z, a, ends) * scale


def _sum(both: Tensor, low: Tensor, b: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    total = both + multiply_groups(low, b, ends)
    if bias is None:
        return total
    groups = torch.arange(len(ends), device=ends.device)
    counts = ends.diff(prepend=ends.new_zeros(1))
    return total + bias[groups.repeat_interleave(counts, output_size=len(both))]


def gate_low_backward(
    both: Tensor,
    low: Tensor,
    b: Tensor,
    a: Tensor,
    bias: Tensor | None,
    v: Tensor,
    following: Tensor,
    weights: Tensor,
    ends: Tensor,
    scale: float,
    gate: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of sum_n weights_n <v_n + following_n A, z_n>, for z of ``gate_low``.

    Returns those of both (n, 2 w); of weights (n), float32 or wider; of the rows x of low = scale x A'^T, before A',
    (n, r); of B (g, 2 w, r) and of A (g, r, w), where ``following`` stands for the gradient of z A^T before weights.
    """
    v = v + multiply_groups(following, a.mT, ends)
    total = _sum(both, low, b, bias, ends).detach()
    with torch.enable_grad():
        total.requires_grad_()
        z = GATES[gate](total)
        (for_both,) = torch.autograd.grad(z, total, v * weights[:, None].to(v.dtype))
    z = z.detach()
    for_low = multiply_groups(for_both, b.mT, ends) * scale
    for_a = group_gradients(following * weights[:, None].to(v.dtype), z, ends)
    return for_both, (z * v).sum(-1), for_low, group_gradients(for_both, low, ends), for_a


def gathered_outer(x: Tensor, tokens: Tensor, low: Tensor, ends: Tensor, *, transposed: bool) -> Tensor:
    """low_g^T x_g (g, r, i) of the rows of x (t, i) that ``tokens`` names; ``transposed`` (g, i, r)."""
    rows = x[tokens]
    return group_gradients(rows, low, ends) if transposed else group_gradients(low, rows, ends)


def add_low(y: Tensor, low: Tensor, wide: Tensor, ends: Tensor) -> None:
    """y += low_g wide_g in place, for y (n, o), low (n, r), wide (g, r, o)."""
    y += multiply_groups(low, wide.mT, ends)


def multiply_and_add(x: Tensor, weight: Tensor, low: Tensor, wide: Tensor, ends: Tensor) -> Tensor:
    """x_g W_g^T + low_g wide_g (n, o), for x (n, i), weight (g, o, i), low (n, r), wide (g, r, o)."""
    y: Tensor = multiply_groups(x, weight, ends)
    add_low(y, low, wide, ends)
    return y


def multiply_rows_and_add(
    values: Tensor,
    scales: Tensor,
    stack: Tensor,
    stack_scales: Tensor,
    low: Tensor,
    wide: Tensor,
    ends: Tensor,
    multiply: Callable[..., Tensor],
) -> Tensor:
    """The same in fp8 (n, o), in the dtype of low: values (n, i) and (g, o, i) with scales (n, 1) and (g, o), which
    ``multiply`` takes as ``kernels.fp8.ops.multiply_groups`` does.
    """
    y = multiply(values, scales, stack, stack_scales, ends, low.dtype)
    add_low(y, low, wide, ends)
    return y


def combine(y: Tensor, places: Tensor, num_chosen: int, weights: Tensor | None) -> Tensor:
    """The sum of a token's rows of y (t k, o), which stand at ``places`` (t k), times ``weights`` (t, k): (t, o)."""
    rows = y[places].unflatten(0, (-1, num_chosen))
    return (rows if weights is None else rows * weights[..., None]).sum(1).to(y.dtype)
