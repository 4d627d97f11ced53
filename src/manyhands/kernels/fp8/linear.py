"""Linear layers on one input, and gated MLPs, with matmuls in fp8, as autograd functions: adapted and frozen, or
trained.

What ``lora`` does in the compute dtype, with other numerics. Each wide matmul takes fp8 values of both operands
(``ops``), one scale a row: y = x W^T from rows of x and W; dX = dY W from rows of dY, multiplied by the scales of W,
and the same fp8 values of W; dW = dY^T X from the fp8 values of both that are there already. So every tensor is
rounded once. A group is one matmul in each direction: its weights stand one above the other, its outputs side by
side. What has low rank stays in the compute dtype, and so do biases, activations and sums.

Weights that are trained, or gathered from shards, are quantized at each use. Frozen ones that this rank holds in full
may be quantized once (``quantize_weights``). Layers that are trained keep the fp8 values of their inputs for the
backward pass, a byte an element. One source serves eager mode and torch.compile. Knows no modules, families or
dropout.

Shapes: n tokens, i inputs, o outputs, O the outputs of a group, R the sum of its ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from manyhands.kernels.fp8.ops import (
    MAX_PARTS,
    gated_rows,
    gated_rows_backward,
    matmul_over_rows,
    quantize_rows,
    quantize_stacked,
    scaled_matmul,
    transpose,
)
from manyhands.kernels.fp8.select import load_triton
from manyhands.kernels.lora import ACTIVATIONS, Layer, factor_columns, scaled_b, split_a, stack_a
from manyhands.kernels.matmul import mm_wide

Tensor = torch.Tensor


class QuantizedWeights(NamedTuple):
    """A group's weights in fp8: values (O, i), their scales (O, 1), and the same values transposed (i, O); without
    these the backward pass transposes them each time, at a byte read and a byte written a value.
    """

    values: Tensor
    scales: Tensor
    transposed: Tensor | None


@torch.no_grad()
def quantize_weights(weights: Sequence[Tensor]) -> QuantizedWeights:
    """Weights (o_j, i) of a group, quantized once: as many bytes as they have in 16 bits."""
    values, scales = quantize_stacked(weights)
    return QuantizedWeights(values, scales, transpose(weights, scales, invert=True))


def dequantize_rows(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Values (o, i) times the scales (o, 1) of their rows, which are powers of two: exact in any wider dtype."""
    if values.is_cuda and not torch.compiler.is_compiling():  # compiled code has one kernel for it anyway
        kernels, _ = load_triton(values.device)
        if kernels is not None:
            found: Tensor = kernels.dequantize_rows(values, scales, dtype)
            return found
    return values.to(dtype) * scales.to(dtype)


def stored_linear(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + bias in the dtype of x, (..., i) -> (..., o), where W is kept in fp8 alone. The backward pass makes W
    again; it has no gradient.
    """
    y: Tensor = _StoredLinear.apply(x, values, scales)
    return y if bias is None else y + bias


class _StoredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
        ctx.save_for_backward(values, scales)
        return torch.nn.functional.linear(x, dequantize_rows(values, scales, x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        values, scales = ctx.saved_tensors
        return gradient @ dequantize_rows(values, scales, gradient.dtype), None, None


def fp8_linears(x: Tensor, layers: Sequence[Layer], quantized: QuantizedWeights | None = None) -> tuple[Tensor, ...]:
    """Outputs (..., o) of each layer on the shared input x (..., i); ``base`` of each is its weight alone.

    Weights and biases that require gradients get them. ``quantized``: of the same weights, all frozen.
    """
    tensors, form = _flatten(layers, quantized)
    y = _Fp8Linears.apply(x.reshape(-1, x.shape[-1]), form, *tensors)
    return tuple(part.view(*x.shape[:-1], part.shape[-1]) for part in (y if isinstance(y, tuple) else (y,)))


def fp8_mlp(
    x: Tensor,
    gate: Layer,
    up: Layer,
    down: Layer,
    activation: str,
    quantized: QuantizedWeights | None = None,
    quantized_down: QuantizedWeights | None = None,
) -> Tensor:
    """down(act(gate(x)) * up(x)), (..., i) -> (..., o); ``quantized``: of gate and up, and of down."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is none of {', '.join(ACTIVATIONS)}")
    tensors, form = _flatten((gate, up), quantized)
    tensors_down, form_down = _flatten((down,), quantized_down)
    y = _Fp8Mlp.apply(x.reshape(-1, x.shape[-1]), (form, form_down, len(tensors)), activation, *tensors, *tensors_down)
    return y.view(*x.shape[:-1], y.shape[-1])


class _LayerForm(NamedTuple):
    """A layer without its tensors, which travel flat: weight, then bias, then A and B."""

    has_bias: bool
    adapted: bool
    scaling: float
    trained: bool
    trained_bias: bool


class _Form(NamedTuple):
    layers: tuple[_LayerForm, ...]
    is_quantized: bool  # the four tensors of ``QuantizedWeights`` come last


class _Group(NamedTuple):
    layers: list[Layer]
    forms: tuple[_LayerForm, ...]
    quantized: QuantizedWeights | None

    @property
    def weights(self) -> list[Tensor]:
        return [layer.base[0] for layer in self.layers]


def _flatten(layers: Sequence[Layer], quantized: QuantizedWeights | None) -> tuple[list[Tensor | None], _Form]:
    tensors: list[Tensor | None] = []
    forms = []
    for layer in layers:
        (weight,) = layer.base
        tensors.append(weight)
        if layer.bias is not None:
            tensors.append(layer.bias)
        adapted = layer.a is not None and layer.b is not None
        if layer.a is not None and layer.b is not None:
            tensors += [layer.a, layer.b]
        trained_bias = layer.bias is not None and layer.bias.requires_grad
        forms.append(_LayerForm(layer.bias is not None, adapted, layer.scaling, weight.requires_grad, trained_bias))
    return [*tensors, *(quantized or ())], _Form(tuple(forms), quantized is not None)


def _restore(tensors: Sequence[Any], form: _Form) -> _Group:
    rest = iter(tensors)
    layers = []
    for each in form.layers:
        base = (next(rest),)
        bias = next(rest) if each.has_bias else None
        a, b = (next(rest), next(rest)) if each.adapted else (None, None)
        layers.append(Layer(base, bias, a, b, each.scaling))
    return _Group(layers, form.layers, QuantizedWeights(*rest) if form.is_quantized else None)


# -- a group, forward and backward


class _QuantizedRows(NamedTuple):
    """fp8 values and scales of an input's rows."""

    values: Tensor
    scales: Tensor


def _forward(x: Tensor, rows: _QuantizedRows, group: _Group) -> tuple[Tensor, Tensor | None, Tensor]:
    """Outputs side by side (n, O), x A^T (n, R), and the scales of the weights (O, 1)"""
    layers = group.layers
    stacked = stack_a(layers, x.dtype)
    low = None if stacked is None else x @ stacked.t()
    left, right = [], []
    if low is not None:
        for layer, columns in zip(layers, factor_columns(layers), strict=True):
            left.append(low[:, columns])
            right.append(x.new_empty((layer.base[0].shape[0], 0)) if layer.b is None else scaled_b(layer, x.dtype))
    values, scales = quantize_stacked(group.weights) if group.quantized is None else group.quantized[:2]
    return scaled_matmul(*rows, values, scales, x.dtype, _stack_biases(layers, x.dtype), left, right), low, scales


def _stack_biases(layers: Sequence[Layer], dtype: torch.dtype) -> Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    parts = [layer.base[0].new_zeros(layer.base[0].shape[0]) if layer.bias is None else layer.bias for layer in layers]
    return torch.cat([part.to(dtype) for part in parts])


def _split(y: Tensor, layers: Sequence[Layer], dim: int = 1) -> tuple[Tensor, ...]:
    return y.split([layer.base[0].shape[0] for layer in layers], dim)


def _low_gradient(low: Tensor | None, group: _Group, gradients: Sequence[Tensor]) -> Tensor | None:
    """dL = [dY scaling B], (n, R)"""
    if low is None:
        return None
    lows = [
        dy @ scaled_b(layer, dy.dtype) for layer, dy in zip(group.layers, gradients, strict=True) if layer.b is not None
    ]
    return lows[0] if len(lows) == 1 else torch.cat(lows, 1)


def _quantize_gradients(gradients: Sequence[Tensor], scales: Tensor) -> _QuantizedRows:
    """Rows of dY, the group's side by side, columns multiplied by the scales of the weights."""
    parts = gradients if len(gradients) <= MAX_PARTS else [torch.cat(list(gradients), 1)]
    return _QuantizedRows(*quantize_rows(parts, scales.view(-1)))


def _input_gradient(
    rows: _QuantizedRows, group: _Group, scales: Tensor, dlow: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """dY W + dL A (n, i)"""
    held = group.quantized
    if held is None:
        transposed = transpose(group.weights, scales, invert=True)
    elif held.transposed is None:
        transposed = transpose([held.values], torch.ones_like(scales), invert=False)
    else:
        transposed = held.transposed
    stacked = stack_a(group.layers, dtype)
    left, right = ([], []) if dlow is None or stacked is None else ([dlow], [stacked.t()])
    return scaled_matmul(*rows, transposed, None, dtype, None, left, right)


def _parameter_gradients(
    kept: _Kept, group: _Group, gradients: Sequence[Tensor], rows: _QuantizedRows, dlow: Tensor | None
) -> list[Tensor | None]:
    """Of each layer's tensors, in the order of ``_flatten``: none for what is frozen. ``rows``: of the gradients."""
    layers = group.layers
    factors = [None] * len(layers) if kept.x is None else split_a(dlow, kept.x, layers)
    weights: Sequence[Tensor | None] = [None] * len(layers)
    if kept.values is not None and kept.value_scales is not None:  # dW = dY^T X
        whole = matmul_over_rows(*rows, kept.values, kept.value_scales, kept.scales, layers[0].base[0].dtype)
        weights = [dw if form.trained else None for dw, form in zip(_split(whole, layers, 0), group.forms, strict=True)]
    flat: list[Tensor | None] = []
    for layer, form, dy, columns, da, dw in zip(
        layers, group.forms, gradients, factor_columns(layers), factors, weights, strict=True
    ):
        flat.append(dw)
        if layer.bias is not None:
            flat.append(dy.sum(0, dtype=torch.float32).to(layer.bias.dtype) if form.trained_bias else None)
        if layer.b is not None:
            assert kept.low is not None
            flat += [da, (mm_wide(dy.t(), kept.low[:, columns]) * layer.scaling).to(layer.b.dtype)]
    return flat + [None] * (0 if group.quantized is None else len(group.quantized))


# -- autograd


class _Kept(NamedTuple):
    """What a group's backward pass needs of its forward pass: scales of the weights; of adapted layers the input and x
    A^T, of trained ones the values of the input.
    """

    scales: Tensor
    x: Tensor | None
    low: Tensor | None
    values: Tensor | None
    value_scales: Tensor | None


def _keep(x: Tensor, rows: _QuantizedRows, low: Tensor | None, scales: Tensor, group: _Group) -> _Kept:
    trained = any(form.trained for form in group.forms)
    return _Kept(scales, None if low is None else x, low, *(rows if trained else (None, None)))


class _Fp8Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, form: _Form, *tensors: Tensor) -> tuple[Tensor, ...]:
        group = _restore(tensors, form)
        rows = _QuantizedRows(*quantize_rows([x]))
        y, low, scales = _forward(x, rows, group)
        ctx.form = form
        ctx.save_for_backward(*_keep(x, rows, low, scales, group), *tensors)
        return _split(y, group.layers)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: recomputation gives them once
        kept, group = _Kept(*saved[:5]), _restore(saved[5:], ctx.form)
        rows = _quantize_gradients(gradients, kept.scales)
        dlow = _low_gradient(kept.low, group, gradients)
        dx = _input_gradient(rows, group, kept.scales, dlow, gradients[0].dtype) if ctx.needs_input_grad[0] else None
        return dx, None, *_parameter_gradients(kept, group, gradients, rows, dlow)


class _Fp8Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forms: tuple[_Form, _Form, int], activation: str, *tensors: Tensor) -> Tensor:
        first, down = _restore_mlp(tensors, forms)
        rows = _QuantizedRows(*quantize_rows([x]))
        y, low, scales = _forward(x, rows, first)
        g, u = _split(y, first.layers)
        h, values, value_scales = gated_rows(g, u, activation)
        h_rows = _QuantizedRows(values, value_scales)
        out, low_down, scales_down = _forward(h, h_rows, down)
        ctx.forms, ctx.activation = forms, activation
        kept_down = _keep(h, h_rows, low_down, scales_down, down)._replace(x=None)  # h is made again from y
        ctx.save_for_backward(y, *_keep(x, rows, low, scales, first), *kept_down, *tensors)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        y, *saved = ctx.saved_tensors
        kept, kept_down = _Kept(*saved[:5]), _Kept(*saved[5:10])
        first, down = _restore_mlp(saved[10:], ctx.forms)
        rows = _quantize_gradients([dy], kept_down.scales)
        dlow = _low_gradient(kept_down.low, down, [dy])
        dh = _input_gradient(rows, down, kept_down.scales, dlow, dy.dtype)
        with_h = kept_down.low is not None
        g, u = _split(y, first.layers)
        d, h, values, value_scales = gated_rows_backward(dh, g, u, kept.scales.view(-1), ctx.activation, with_h=with_h)
        of_down = _parameter_gradients(kept_down._replace(x=h if with_h else None), down, [dy], rows, dlow)
        rows, gradients = _QuantizedRows(values, value_scales), _split(d, first.layers)
        dlow = _low_gradient(kept.low, first, gradients)
        dx = _input_gradient(rows, first, kept.scales, dlow, dy.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, None, *_parameter_gradients(kept, first, gradients, rows, dlow), *of_down


def _restore_mlp(tensors: Sequence[Any], forms: tuple[_Form, _Form, int]) -> tuple[_Group, _Group]:
    form, form_down, num_first = forms
    return _restore(tensors[:num_first], form), _restore(tensors[num_first:], form_down)


def count_quantized_bytes(quantized: Iterable[QuantizedWeights]) -> int:
    return sum(tensor.numel() * tensor.element_size() for each in quantized for tensor in each if tensor is not None)
