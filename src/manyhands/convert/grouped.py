"""A stack of linear layers of one shape, such as a block's experts: each row of the input is multiplied with the weight
of its group.

Shapes: a stack of g groups is an ``nn.Linear`` whose weight (g o, i) has the groups' weights one above the other, so
that what holds, counts, shards and exports weights needs to know nothing of groups. Its input x (n, i) is sorted by
group; ``ends`` (g) is where the rows of each group end, as ``torch.nn.functional.grouped_mm`` has it. Where ranks
divide the groups, a forward pass has those of this rank: its parameters and ``ends`` are shorter than ``num_groups``
says.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from manyhands.core.holding import computed_part
from manyhands.kernels.experts.select import kernels_for
from manyhands.kernels.grouped import compute_groups, grouped_matmul
from manyhands.kernels.operators import operator
from manyhands.model.weights import QuantizedLayer


class Grouped:
    """Mixed in before the class that holds the weight, in whatever form."""

    num_groups: int
    stored_transposed: bool  # model.weights.StackedLayer
    weight: Any
    in_fp8 = False  # products of groups are in the compute dtype, also of weights that are kept in fp8

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """(n, i) -> (n, o)"""
        if isinstance(self, QuantizedLayer):
            pieces = [getattr(self, piece) for piece in self.weight_pieces]
            shape = (len(ends), self.out_features // self.num_groups, self.in_features)
            return _QuantizedMatmul.apply(x, ends, self.storage, shape, *pieces)
        return grouped_matmul(x, self.weight.to(x.dtype).unflatten(0, (len(ends), -1)), ends)


def _multiply_quantized(
    x: torch.Tensor,
    ends: torch.Tensor,
    pieces: list[torch.Tensor],
    storage: str,
    shape: list[int],
    transposed: bool,
    low: torch.Tensor | None,
    wide: torch.Tensor | None,
) -> torch.Tensor:
    groups, size, inner = shape
    weight = _dequantize[storage](pieces, (groups * size, inner), x.dtype).view(shape)
    y = compute_groups(x, weight.mT if transposed else weight, ends)
    if low is not None:
        kernels_for(y, low.shape[1]).add_low(y, low, wide, ends)
    return y


# Opaque to torch.compile: it would see that both directions dequantize the same weight, do it once and keep it.
multiply_quantized = operator(
    "multiply_quantized",
    "(Tensor x, Tensor ends, Tensor[] pieces, str storage, SymInt[] shape, bool transposed, Tensor? low, Tensor? wide) "
    "-> Tensor",
    _multiply_quantized,
    lambda x, ends, pieces, storage, shape, transposed, *_: x.new_empty(x.shape[0], shape[2 if transposed else 1]),
)


def multiply_stack(
    stack: Any,
    x: torch.Tensor,
    ends: torch.Tensor,
    *,
    transposed: bool,
    low: torch.Tensor | None = None,
    wide: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product with a quantized stack, of which nothing is kept, without gradients: (n, i) -> (n, o), or back. With
    low (n, r) and wide (g, r, o) their product is added (``kernels.experts.reference.add_low``).
    """
    pieces = [computed_part(getattr(stack, piece)) for piece in stack.weight_pieces]
    shape = [len(ends), stack.out_features // stack.num_groups, stack.in_features]
    out: torch.Tensor = multiply_quantized(x, ends, pieces, stack.storage, shape, transposed, low, wide)
    return out


class _QuantizedMatmul(torch.autograd.Function):
    """Both directions dequantize the weight: it is not kept between them."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, ends: torch.Tensor, storage: str, shape: tuple[int, ...], *pieces: torch.Tensor
    ) -> torch.Tensor:
        ctx.storage, ctx.shape = storage, shape
        ctx.save_for_backward(ends, *pieces)
        out: torch.Tensor = multiply_quantized(x, ends, list(pieces), storage, list(shape), False, None, None)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ends, *pieces = ctx.saved_tensors
        for_x = multiply_quantized(gradient, ends, pieces, ctx.storage, list(ctx.shape), True, None, None)
        return for_x, *[None] * (3 + len(pieces))


class GroupedLinear(Grouped, nn.Linear):  # type: ignore[misc]  # its forward takes the groups, too
    """A stack without biases in its own dtype."""

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        stored_transposed: bool = False,
        **options: Any,
    ) -> None:
        nn.Linear.__init__(self, in_features, num_groups * out_features, bias=False, **options)
        self.num_groups, self.stored_transposed = num_groups, stored_transposed


def sides_of(linear: nn.Linear) -> tuple[int, int]:
    """Inputs and outputs of one group."""
    return linear.in_features, linear.out_features // getattr(linear, "num_groups", 1)


_dequantize: dict[str, Callable[..., torch.Tensor]] = {}
"""By storage, what makes the weight (o, i) of pieces, its shape and a dtype."""


@cache
def _grouped_class(kind: Any) -> Any:
    return type(f"Grouped{kind.__name__}", (Grouped, kind), {})


def hold(linear: nn.Linear, kind: Any, *arguments: Any) -> nn.Linear:
    """What takes the place of ``linear`` and holds its weight as ``kind`` does; a stack remains one."""
    if not isinstance(linear, Grouped):
        held: nn.Linear = kind(linear, *arguments)
    else:
        held = _grouped_class(kind)(linear, *arguments)
        if isinstance(held, QuantizedLayer):
            _dequantize[held.storage] = held.dequantize
        held.num_groups, held.stored_transposed = linear.num_groups, linear.stored_transposed
    return held.train(linear.training)
