"""Linear layers with LoRA adapters, several on one input, and gated MLPs, as autograd functions of our own.

Against one layer after the other in autograd:

- the A of a group are one matrix, so its input is read once for x A^T and once for dA, not once a layer;
- the narrow matmul with B (in dX: with A) is written first and the wide one adds to it as it stores its result
  (``matmul.low_rank_linear``, ``sum_of_matmuls``): no kernel reads the outputs again to add. The scaling is folded into
  B;
- an MLP keeps the outputs of gate and up alone; their product, the input of down, is computed again. (Compiled, the
  partitioner sees one graph and decides: it keeps all three, which is faster. ``activation_memory_budget`` moves it.)
- gradients of A and B leave in float32, unrounded where the device can (``matmul.mm_wide``).

Frozen weights get no gradient and are taken as they come: a tensor, or the pieces of a quantized one with its
``Matmuls``. One source serves eager mode and torch.compile, which traces forward and backward into the block's graph.
Knows no modules, families or dropout.

Bytes spared in a layer of an 8B model (4,096 wide), 8,192 tokens, r 16, all linear layers, bfloat16, against eager
matmuls and adds: outputs (43,008 wide) 6 in place of 10 bytes an element, 1.4 GB; dX 2.1 GB (q, k, v: 4 matmuls that
add in place of 6 matmuls and 5 adds); inputs read four times in place of seven for each of x A^T and dA, 0.4 GB. Over
32 layers that is 124 GB, 29 ms at 4.3 TB/s; the compiler had fused a part of it before. Operations are the same.
``benchmarks/kernels.py`` measures it.

Shapes: n tokens, i inputs, o outputs, r rank, R the sum of the group's ranks; weight (o, i), A (r, i), B (o, r).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from manyhands.kernels.matmul import low_rank_linear, mm_wide, sum_of_matmuls

Tensor = torch.Tensor
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


class Matmuls(Protocol):
    """The two matmuls of weights that are held in pieces. Both write what is narrow first and let the wide matmuls add
    to it.

    Compiled graphs merge equal calls and would keep a dequantized weight from the forward to the backward pass: let
    both be operators of their own (``torch.library.custom_op``).
    """

    def linear(
        self, x: Tensor, pieces: Sequence[Tensor], bias: Tensor | None, low: Tensor | None, b: Tensor | None
    ) -> Tensor:
        """x W^T + bias + low b^T (n, o), for low (n, r) and b (o, r), or for neither."""

    def input_gradient(
        self,
        gradients: Sequence[Tensor],
        pieces: Sequence[Sequence[Tensor]],
        left: Sequence[Tensor],
        right: Sequence[Tensor],
    ) -> Tensor:
        """sum_j dY_j W_j + sum_k left_k right_k (n, i), over the layers of a group that are held in pieces and over
        A (n, r_k), (r_k, i), of which there may be none.
        """


class Layer(NamedTuple):
    """One linear layer: x W^T + bias + scaling (x A^T) B^T. Only A and B get gradients, in their own dtype.

    ``base`` holds the frozen weight, or the pieces that stand for it and that ``matmuls`` multiplies; all such layers
    on one input stand in pieces of one kind.
    """

    base: tuple[Tensor, ...]
    bias: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    scaling: float = 1.0
    matmuls: Matmuls | None = None


def lora_linears(x: Tensor, layers: Sequence[Layer]) -> tuple[Tensor, ...]:
    """Outputs (..., o) of each layer on the shared input x (..., i). A layer without factors is a frozen linear
    layer.
    """
    tensors, forms = _flatten(layers)
    outputs = _LoraLinears.apply(x.reshape(-1, x.shape[-1]), forms, *tensors)
    return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in outputs)


def lora_mlp(x: Tensor, gate: Layer, up: Layer, down: Layer, activation: str) -> Tensor:
    """down(act(gate(x)) * up(x)), (..., i) -> (..., o); ``activation`` one of ``ACTIVATIONS``."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is none of {', '.join(ACTIVATIONS)}")
    tensors, forms = _flatten((gate, up, down))
    y = _LoraMlp.apply(x.reshape(-1, x.shape[-1]), forms, activation, *tensors)
    return y.view(*x.shape[:-1], y.shape[-1])


class _LoraForm(NamedTuple):
    """A layer without its tensors, which travel flat: base pieces, then bias, then A and B."""

    num_pieces: int
    has_bias: bool
    adapted: bool
    scaling: float
    matmuls: Matmuls | None


def _flatten(layers: Sequence[Layer]) -> tuple[list[Tensor], tuple[_LoraForm, ...]]:
    tensors: list[Tensor] = []
    forms = []
    for layer in layers:
        tensors += layer.base
        if layer.bias is not None:
            tensors.append(layer.bias)
        adapted = layer.a is not None and layer.b is not None
        if layer.a is not None and layer.b is not None:
            tensors += [layer.a, layer.b]
        forms.append(_LoraForm(len(layer.base), layer.bias is not None, adapted, layer.scaling, layer.matmuls))
    return tensors, tuple(forms)


def _restore(tensors: Sequence[Tensor], forms: Sequence[_LoraForm]) -> list[Layer]:
    layers = []
    start = 0
    for form in forms:
        base = tuple(tensors[start : start + form.num_pieces])
        start += form.num_pieces
        bias = a = b = None
        if form.has_bias:
            bias = tensors[start]
            start += 1
        if form.adapted:
            a, b = tensors[start], tensors[start + 1]
            start += 2
        layers.append(Layer(base, bias, a, b, form.scaling, form.matmuls))
    return layers


# -- a group, forward and backward


def stack_a(layers: Sequence[Layer], dtype: torch.dtype) -> Tensor | None:
    """The factors A of a group as one matrix (R, i)"""
    factors = [layer.a.to(dtype) for layer in layers if layer.a is not None]
    if not factors:
        return None
    return factors[0] if len(factors) == 1 else torch.cat(factors)


def scaled_b(layer: Layer, dtype: torch.dtype) -> Tensor:
    """scaling B (o, r), rounded once"""
    assert layer.b is not None
    return (layer.b * layer.scaling).to(dtype)


def factor_columns(layers: Sequence[Layer]) -> list[slice]:
    """Each layer's columns among the R of the group; empty for a layer without factors."""
    slices = []
    start = 0
    for layer in layers:
        rank = 0 if layer.a is None else layer.a.shape[0]
        slices.append(slice(start, start + rank))
        start += rank
    return slices


def _forward(x: Tensor, layers: Sequence[Layer]) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Outputs (n, o) of a group, and x A^T (n, R)"""
    stacked = stack_a(layers, x.dtype)
    low = None if stacked is None else x @ stacked.t()
    outputs = []
    for layer, columns in zip(layers, factor_columns(layers), strict=True):
        own = (None, None) if low is None or layer.b is None else (low[:, columns], scaled_b(layer, x.dtype))
        outputs.append(_output(x, layer, *own))
    return tuple(outputs), low


def _output(x: Tensor, layer: Layer, low: Tensor | None, b: Tensor | None) -> Tensor:
    """x W^T + bias + low b^T (n, o), for the layer's own x A^T (n, r) and scaled B (o, r), or for neither."""
    if layer.matmuls is not None:
        return layer.matmuls.linear(x, layer.base, layer.bias, low, b)
    if low is None or b is None:
        return F.linear(x, layer.base[0], layer.bias)
    return low_rank_linear(x, layer.base[0], layer.bias, low, b)


def _backward(
    low: Tensor | None, layers: Sequence[Layer], gradients: Sequence[Tensor], wants_x: bool
) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:
    """From dY of each layer: dX (n, i), dL = [dY scaling B] (n, R), and each layer's dB.

    dA is left to ``split_a``, since an MLP has the input of ``down`` only later.
    """
    dtype = gradients[0].dtype
    lows: list[Tensor] = []
    for_b: list[Tensor | None] = []
    for layer, columns, dy in zip(layers, factor_columns(layers), gradients, strict=True):
        if layer.b is None or low is None:
            for_b.append(None)
            continue
        lows.append(dy @ scaled_b(layer, dtype))
        for_b.append((mm_wide(dy.t(), low[:, columns]) * layer.scaling).to(layer.b.dtype))
    dlow = None
    if lows:
        dlow = lows[0] if len(lows) == 1 else torch.cat(lows, 1)
    return _input_gradient(layers, gradients, dlow) if wants_x else None, dlow, for_b


def _input_gradient(layers: Sequence[Layer], gradients: Sequence[Tensor], dlow: Tensor | None) -> Tensor:
    """sum_j dY_j W_j + dL A, (n, i)"""
    stacked = stack_a(layers, gradients[0].dtype)
    # narrow first: the wide matmuls then add to it while they run
    left, right = ([], []) if dlow is None or stacked is None else ([dlow], [stacked])
    in_pieces = []
    for dy, layer in zip(gradients, layers, strict=True):
        if layer.matmuls is None:
            left.append(dy)
            right.append(layer.base[0])
        else:
            in_pieces.append((dy, layer.base, layer.matmuls))
    if not in_pieces:
        return sum_of_matmuls(left, right)
    matmuls = in_pieces[0][2]
    return matmuls.input_gradient([dy for dy, _, _ in in_pieces], [base for _, base, _ in in_pieces], left, right)


def split_a(dlow: Tensor | None, x: Tensor, layers: Sequence[Layer]) -> list[Tensor | None]:
    """Each layer's dA = dL^T x, from one product (R, n) x (n, i)"""
    if dlow is None:
        return [None] * len(layers)
    whole = mm_wide(dlow.t(), x)
    pairs = zip(layers, factor_columns(layers), strict=True)
    return [None if layer.a is None else whole[columns].to(layer.a.dtype) for layer, columns in pairs]


def _flat_gradients(
    forms: Sequence[_LoraForm], for_a: Sequence[Tensor | None], for_b: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients in the order of ``_flatten``: none for what is frozen."""
    flat: list[Tensor | None] = []
    for form, da, db in zip(forms, for_a, for_b, strict=True):
        flat += [None] * (form.num_pieces + form.has_bias)
        if form.adapted:
            flat += [da, db]
    return flat


# -- autograd


class _LoraLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forms: tuple[_LoraForm, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs, low = _forward(x, _restore(tensors, forms))
        ctx.forms = forms
        ctx.save_for_backward(x, low, *tensors)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, low, *tensors = ctx.saved_tensors
        layers = _restore(tensors, ctx.forms)
        dx, dlow, for_b = _backward(low, layers, gradients, ctx.needs_input_grad[0])
        return dx, None, *_flat_gradients(ctx.forms, split_a(dlow, x, layers), for_b)


class _LoraMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forms: tuple[_LoraForm, ...], activation: str, *tensors: Tensor) -> Tensor:
        gate, up, down = _restore(tensors, forms)
        (g, u), low = _forward(x, (gate, up))
        (y,), low_down = _forward(activate(g, activation) * u, (down,))
        ctx.forms, ctx.activation = forms, activation
        ctx.save_for_backward(x, g, u, low, low_down, *tensors)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, g, u, low, low_down, *tensors = ctx.saved_tensors
        gate, up, down = _restore(tensors, ctx.forms)
        dh, dlow_down, for_b_down = _backward(low_down, (down,), (dy,), True)
        assert dh is not None
        active = activate(g, ctx.activation)
        for_a_down = split_a(dlow_down, active * u, (down,))
        du = dh * active
        dg = activate_back(dh * u, g, ctx.activation)
        dx, dlow, for_b = _backward(low, (gate, up), (dg, du), ctx.needs_input_grad[0])
        for_a = split_a(dlow, x, (gate, up))
        return dx, None, None, *_flat_gradients(ctx.forms, for_a + for_a_down, for_b + for_b_down)


def activate(g: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(g)
    return F.gelu(g, approximate="tanh" if activation == "gelu_tanh" else "none")


def activate_back(gradient: Tensor, g: Tensor, activation: str) -> Tensor:
    """gradient * act'(g), computed in float32 for half precision"""
    if activation == "silu":
        return torch.ops.aten.silu_backward(gradient, g)
    return torch.ops.aten.gelu_backward(gradient, g, approximate="tanh" if activation == "gelu_tanh" else "none")
