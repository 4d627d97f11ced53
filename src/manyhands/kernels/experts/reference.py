"""The definition of what is computed around the grouped products of experts, group by group in plain torch.

Shapes: n rows sorted by group, of g groups whose rows end at ``ends`` (g); tokens (n) are the rows' places among t
inputs; low-rank factors A (g, r, i), B (g, o, r); a gate of width w takes rows (n, 2 w), gate and up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from manyhands.kernels.grouped import group_gradients, multiply_groups

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
}


def gather_low(x: Tensor, tokens: Tensor, ends: Tensor, a: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The rows of x (t, i) that ``tokens`` names, (n, i), and scale x_g A_g^T, (n, r)."""
    rows = x[tokens]
    return rows, multiply_groups(rows, a, ends) * scale


def gate_low(
    both: Tensor, low: Tensor, b: Tensor, a: Tensor, ends: Tensor, scale: float, activation: str
) -> tuple[Tensor, Tensor]:
    """z = act(gate) up (n, w) of both + low B^T (n, 2 w), and scale z A^T (n, r)."""
    gate, up = (both + multiply_groups(low, b, ends)).chunk(2, -1)
    z = ACTIVATIONS[activation](gate) * up
    return z, multiply_groups(z, a, ends) * scale


def gate_low_backward(
    both: Tensor,
    low: Tensor,
    b: Tensor,
    a: Tensor,
    v: Tensor,
    following: Tensor,
    weights: Tensor,
    ends: Tensor,
    scale: float,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of sum_n weights_n <v_n + following_n A, z_n>, for z of ``gate_low``.

    Returns those of both (n, 2 w); of weights (n), float32 or wider; of the rows x of low = scale x A'^T, before A',
    (n, r); of B (g, 2 w, r) and of A (g, r, w), where ``following`` stands for the gradient of z A^T before weights.
    """
    gate, up = (both + multiply_groups(low, b, ends)).detach().chunk(2, -1)
    v = v + multiply_groups(following, a.mT, ends)
    with torch.enable_grad():
        active = ACTIVATIONS[activation](gate.requires_grad_())
        z = active.detach() * up
        weighted = v * weights[:, None].to(v.dtype)
        (for_gate,) = torch.autograd.grad(active, gate, weighted * up)
    for_both = torch.cat((for_gate, weighted * active.detach()), -1)
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


def combine(y: Tensor, places: Tensor, num_chosen: int, weights: Tensor | None) -> Tensor:
    """The sum of a token's rows of y (t k, o), which stand at ``places`` (t k), times ``weights`` (t, k): (t, o)."""
    rows = y[places].unflatten(0, (-1, num_chosen))
    return (rows if weights is None else rows * weights[..., None]).sum(1).to(y.dtype)
