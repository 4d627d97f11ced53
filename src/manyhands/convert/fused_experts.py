"""Experts with adapters as one function, in which no wide tensor is read or written for the adapters' sake.

Low-rank products are made where their input is gathered, gated or written (``kernels/experts``). Of a token's k experts
the backward pass keeps gate and up alone: (k, 2 w) values, and low-rank ones.

Shapes: n tokens of e values, of which each goes to k of E experts of width w; adapters of rank r.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.integrations.moe import _default_apply_gate
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from manyhands.convert.fused_modules import ACTIVATION_NAMES
from manyhands.convert.grouped import Rows, factors_of, multiply_stack
from manyhands.convert.lora import LoraGrouped
from manyhands.kernels.experts import ops
from manyhands.kernels.experts.reference import ALPHA, LIMIT
from manyhands.kernels.grouped import multiply_groups
from manyhands.model.weights import QuantizedLayer

ACTIVATIONS: dict[Any, str] = {type(ACT2FN[name]): own for name, own in ACTIVATION_NAMES.items()} | {F.silu: "silu"}


def can_fuse(experts: Any) -> bool:
    """Whether both stacks have plain adapters on a frozen weight and a gate that is known, and nothing else trains."""
    stacks = [experts._modules.get(name) for name in ("gate_up_proj", "down_proj")]
    return _gate(experts) is not None and all(isinstance(stack, LoraGrouped) and _is_plain(stack) for stack in stacks)


def _is_plain(stack: LoraGrouped) -> bool:
    drops = stack.dropout > 0 and stack.training
    trains = not isinstance(stack, QuantizedLayer) and stack.weight.requires_grad
    return stack.lora_magnitude_vector is None and not drops and not trains


def _gate(experts: Any) -> str | None:
    """Its name in ``kernels.experts.reference.GATES``."""
    if not experts.has_gate or (experts.has_bias and experts.gate_up_proj_bias.requires_grad):
        return None
    if type(experts)._apply_gate is _default_apply_gate and experts.is_concatenated:
        return ACTIVATIONS.get(experts.act_fn) or ACTIVATIONS.get(type(experts.act_fn))
    if type(experts)._apply_gate is GptOssExperts._apply_gate and (experts.alpha, experts.limit) == (ALPHA, LIMIT):
        return "clamped"
    return None


def compute_adapted(
    experts: Any, hidden: Tensor, weights: Tensor, order: Tensor, places: Tensor, ends: Tensor
) -> Tensor:
    """The sum over each token's experts, weighted, without the biases of ``down_proj``: (n, e) -> (n, e). ``order``
    sorts the n k rows by expert, whose rows end at ``ends``; ``places`` is its inverse.
    """
    up, down = experts.gate_up_proj, experts.down_proj
    scaling = up.scaling if up.adapts else 0.0
    factors = (up.lora_A.weight, up.lora_B.weight, down.lora_A.weight, down.lora_B.weight)
    frozen = [None if isinstance(stack, QuantizedLayer) else stack.weight for stack in (up, down)]
    bias = experts.gate_up_proj_bias.to(hidden.dtype) if experts.has_bias else None
    out: Tensor = _AdaptedExperts.apply(
        hidden, weights, order, places, ends, *frozen, *factors, bias, (up, down), scaling, _gate(experts)
    )
    return out


def _multiply(
    x: Tensor | Rows,
    frozen: Tensor | None,
    stack: Any,
    ends: Tensor,
    dtype: torch.dtype,
    *,
    in_fp8: bool,
    transposed: bool = False,
    low: Tensor | None = None,
    wide: Tensor | None = None,
) -> Tensor:
    """The product with the stack's weight, in fp8 or dequantized if it has to be, and with the product of low and wide
    added.
    """
    if frozen is None:
        return multiply_stack(stack, x, ends, transposed=transposed, in_fp8=in_fp8, dtype=dtype, low=low, wide=wide)
    assert isinstance(x, Tensor)
    weight = frozen.to(x.dtype).unflatten(0, (len(ends), -1))
    weight = weight.mT if transposed else weight
    out: Tensor = multiply_groups(x, weight, ends) if low is None else ops.multiply_and_add(x, weight, low, wide, ends)
    return out


def _gather(
    x: Tensor, tokens: Tensor, ends: Tensor, a: Tensor, scale: float, *, in_fp8: bool, factors: Tensor | None = None
) -> tuple[Tensor | Rows, Tensor]:
    """The rows that a stack multiplies, times the factors of their group if they are in fp8, and their low values."""
    if not in_fp8:
        rows, low = ops.gather_low(x, tokens, ends, a, scale)
        return rows, low
    *rows, low = ops.gather_low_rows(x, tokens, ends, a, scale, factors)
    return tuple(rows), low


class _AdaptedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weights: Tensor,
        order: Tensor,
        places: Tensor,
        ends: Tensor,
        frozen_up: Tensor | None,
        frozen_down: Tensor | None,
        a1: Tensor,
        b1: Tensor,
        a2: Tensor,
        b2: Tensor,
        bias: Tensor | None,
        stacks: tuple[Any, Any],
        scaling: float,
        gate: str,
    ) -> Tensor:
        dtype, num_groups, num_chosen = hidden.dtype, len(ends), weights.shape[1]
        up_a, up_b, down_a, down_b = (factor.to(dtype).unflatten(0, (num_groups, -1)) for factor in (a1, b1, a2, b2))
        up, down = stacks
        rows, low = _gather(hidden, order // num_chosen, ends, up_a, scaling, in_fp8=up.in_fp8)
        if up.observe is not None:
            up.observe(rows, ends)
        both = _multiply(rows, frozen_up, up, ends, dtype, in_fp8=up.in_fp8)
        *z, following = (ops.gate_low_rows if down.in_fp8 else ops.gate_low)(
            both, low, up_b, down_a, bias, ends, scaling, gate
        )
        z = tuple(z) if down.in_fp8 else z[0]
        if down.observe is not None:
            down.observe(z, ends)
        y = _multiply(z, frozen_down, down, ends, dtype, in_fp8=down.in_fp8, low=following, wide=down_b.mT)
        ctx.stacks, ctx.scaling, ctx.gate, ctx.in_fp8 = stacks, scaling, gate, (up.in_fp8, down.in_fp8)
        ctx.save_for_backward(
            hidden, weights, order, places, ends, frozen_up, frozen_down, a1, b1, a2, b2, bias, both, low, following
        )
        return ops.combine(y, places, num_chosen, weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weights, order, places, ends, frozen_up, frozen_down, a1, b1, a2, b2, bias, both, low, following = (
            ctx.saved_tensors
        )
        dtype, num_groups = hidden.dtype, len(ends)
        up_a, up_b, down_a, down_b = (factor.to(dtype).unflatten(0, (num_groups, -1)) for factor in (a1, b1, a2, b2))
        tokens, sorted_weights = order // weights.shape[1], weights.reshape(-1)[order]
        up, down = ctx.stacks
        up_fp8, down_fp8 = ctx.in_fp8
        factors = factors_of(down, ends) if down_fp8 else None
        rows, for_following = _gather(gradient, tokens, ends, down_b.mT, ctx.scaling, in_fp8=down_fp8, factors=factors)
        v = _multiply(rows, frozen_down, down, ends, dtype, in_fp8=down_fp8, transposed=True)
        for_both, for_weights, for_low, for_b1, for_a2 = ops.gate_low_backward(
            both, low, up_b, down_a, bias, v, for_following, sorted_weights, ends, ctx.scaling, ctx.gate
        )
        weighted = (following * sorted_weights[:, None]).to(dtype)
        for_b2 = ops.gathered_outer(gradient, tokens, weighted, ends, True)
        for_rows = _multiply(
            for_both, frozen_up, up, ends, dtype, in_fp8=up_fp8, transposed=True, low=for_low, wide=up_a
        )
        for_a1 = ops.gathered_outer(hidden, tokens, for_low, ends, False)
        for_hidden = ops.combine(for_rows, places, weights.shape[1], None)
        for_factors = (
            found.flatten(0, 1).to(factor.dtype)
            for found, factor in ((for_a1, a1), (for_b1, b1), (for_a2, a2), (for_b2, b2))
        )
        for_weights = for_weights[places].view_as(weights).to(weights.dtype)
        return for_hidden, for_weights, None, None, None, None, None, *for_factors, None, None, None, None
