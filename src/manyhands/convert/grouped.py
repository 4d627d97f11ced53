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
from manyhands.kernels.fp8.ops import multiply_groups, quantize_group_rows, quantize_rows, transpose_stack
from manyhands.kernels.grouped import compute_groups, grouped_matmul
from manyhands.kernels.operators import operator
from manyhands.model.weights import QuantizedLayer

IN_FP8 = "in fp8"  # in place of a storage: its values are multiplied as they are


class Grouped:
    """Mixed in before the class that holds the weight, in whatever form."""

    num_groups: int
    stored_transposed: bool  # model.weights.StackedLayer
    weight: Any
    has_fp8_products = False  # set for weights that are kept in fp8 where the device has them (convert/fp8.py)
    transposed_values: torch.Tensor | None = None  # of these, (g, i, o), where they are kept too; in no file
    observe: Callable[[torch.Tensor, torch.Tensor], None] | None = None  # gets x and ends of each product, if set
    training: bool
    uses_fp8: bool

    @property
    def in_fp8(self) -> bool:
        """Whether a forward pass would now compute in fp8."""
        return self.has_fp8_products and self.training and self.uses_fp8

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """(n, i) -> (n, o)"""
        if self.observe is not None:
            self.observe(x, ends)
        if isinstance(self, QuantizedLayer):
            pieces = [getattr(self, piece) for piece in self.weight_pieces]
            pieces += [self.transposed_values] * self.in_fp8
            shape = (len(ends), self.out_features // self.num_groups, self.in_features)
            return _QuantizedMatmul.apply(x, ends, IN_FP8 if self.in_fp8 else self.storage, shape, *pieces)
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
    weight = weight.mT if transposed else weight
    if low is None:
        return compute_groups(x, weight, ends)
    out: torch.Tensor = kernels_for(x, low.shape[1]).multiply_and_add(x, weight, low, wide, ends)
    return out


# Opaque to torch.compile: it would see that both directions dequantize the same weight, do it once and keep it.
multiply_quantized = operator(
    "multiply_quantized",
    "(Tensor x, Tensor ends, Tensor[] pieces, str storage, SymInt[] shape, bool transposed, Tensor? low, Tensor? wide) "
    "-> Tensor",
    _multiply_quantized,
    lambda x, ends, pieces, storage, shape, transposed, *_: x.new_empty(x.shape[0], shape[2 if transposed else 1]),
)


def _multiply_in_fp8(
    values: torch.Tensor,
    scales: torch.Tensor,
    ends: torch.Tensor,
    stack: torch.Tensor,
    stack_scales: torch.Tensor,
    kept: torch.Tensor | None,
    transposed: bool,
    dtype: torch.dtype,
    low: torch.Tensor | None,
    wide: torch.Tensor | None,
) -> torch.Tensor:
    stack, stack_scales = stack.unflatten(0, (len(ends), -1)), stack_scales.view(len(ends), -1)
    if transposed:
        stack = transpose_stack(stack) if kept is None else kept
        stack_scales = stack_scales.new_ones(stack.shape[:2])
    if low is None:
        return multiply_groups(values, scales, stack, stack_scales, ends, dtype)
    multiply_and_add = kernels_for(low, low.shape[1]).multiply_rows_and_add
    out: torch.Tensor = multiply_and_add(values, scales, stack, stack_scales, low, wide, ends, multiply_groups)
    return out


# Opaque to torch.compile for the same reason: where the transposed values of a stack are not ``kept``, they live as
# long as a product.
multiply_in_fp8 = operator(
    "multiply_in_fp8",
    "(Tensor values, Tensor scales, Tensor ends, Tensor stack, Tensor stack_scales, Tensor? kept, bool transposed, "
    "ScalarType dtype, Tensor? low, Tensor? wide) -> Tensor",
    _multiply_in_fp8,
    lambda values, scales, ends, stack, stack_scales, kept, transposed, dtype, *_: values.new_empty(
        values.shape[0], stack.shape[1] if transposed else stack.shape[0] // ends.shape[0], dtype=dtype
    ),
)

Rows = tuple[torch.Tensor, torch.Tensor]  # fp8 values (n, k) and scales (n, 1)


def factors_of(stack: Any, ends: torch.Tensor) -> torch.Tensor:
    """The scales (g, o) of a stack in fp8, which multiply what is multiplied with its transpose."""
    return computed_part(stack.weight_scales).view(len(ends), -1)


def multiply_stack(
    stack: Any,
    x: torch.Tensor | Rows,
    ends: torch.Tensor,
    *,
    transposed: bool,
    in_fp8: bool = False,
    dtype: torch.dtype | None = None,
    low: torch.Tensor | None = None,
    wide: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product with a quantized stack, of which nothing is kept, without gradients: (n, i) -> (n, o), or back. With
    low (n, r) and wide (g, r, o) their product is added (``kernels.experts.reference.multiply_and_add``).

    ``in_fp8``: of fp8 values of x, or of those given in its place and the ``dtype`` of the result; for the way back
    their rows were multiplied by ``factors_of`` the stack before.
    """
    pieces: list[Any] = [computed_part(getattr(stack, piece)) for piece in stack.weight_pieces]
    pieces += [stack.transposed_values] * in_fp8
    shape = [len(ends), stack.out_features // stack.num_groups, stack.in_features]
    return _multiply_pieces(x, ends, IN_FP8 if in_fp8 else stack.storage, shape, pieces, transposed, dtype, low, wide)


def _multiply_pieces(
    x: torch.Tensor | Rows,
    ends: torch.Tensor,
    storage: str,
    shape: list[int],
    pieces: list[torch.Tensor],
    transposed: bool,
    dtype: torch.dtype | None = None,
    low: torch.Tensor | None = None,
    wide: torch.Tensor | None = None,
) -> torch.Tensor:
    out: torch.Tensor
    if storage != IN_FP8:
        out = multiply_quantized(x, ends, pieces, storage, shape, transposed, low, wide)
        return out
    if isinstance(x, torch.Tensor):
        dtype = x.dtype
        x = quantize_group_rows(x, pieces[1].view(len(ends), -1), ends) if transposed else quantize_rows([x])
    out = multiply_in_fp8(*x, ends, *pieces, transposed, dtype, low, wide)
    return out


class _QuantizedMatmul(torch.autograd.Function):
    """Both directions take the weight from its pieces: it is not kept between them."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, ends: torch.Tensor, storage: str, shape: tuple[int, ...], *pieces: torch.Tensor
    ) -> torch.Tensor:
        ctx.storage, ctx.shape = storage, shape
        ctx.save_for_backward(ends, *pieces)
        return _multiply_pieces(x, ends, storage, list(shape), list(pieces), False)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ends, *pieces = ctx.saved_tensors
        for_x = _multiply_pieces(gradient, ends, ctx.storage, list(ctx.shape), pieces, True)
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
