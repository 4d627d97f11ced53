"""Mixtures of experts: the experts of a block as two stacks of linear layers, and one forward pass for all families.

transformers holds a block's experts as 3-D parameters of a module that ``use_experts_implementation`` decorates, whose
forward pass is looked up by name. Here each of these parameters becomes a ``GroupedLinear`` of the same name, so that
adapters, NF4, fp8, sharding and counting reach experts as any linear layer, and the name is that of
``compute_experts``. Routers are the families' own.

Shapes: n tokens of e values, of which each goes to k of E experts; index (n, k), weights (n, k).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from manyhands import families
from manyhands.convert.fused_experts import can_fuse, compute_adapted
from manyhands.convert.grouped import GroupedLinear, hold
from manyhands.convert.protocol import BaseConverter
from manyhands.convert.routing import declare_routing
from manyhands.core.errors import UserError
from manyhands.kernels.experts import ops, select
from manyhands.model.loss import LossModel
from manyhands.model.structure import find_experts
from manyhands.model.weights import QuantizedLayer, stored_form

NAME = "manyhands"  # of the forward pass, in transformers' registry


def compute_experts(experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum over each token's experts, weighted: (n, e) -> (n, e).

    Tokens are sorted by expert, so that each projection of all experts is one product. Nothing waits for a GPU, and
    nothing is added up in an order that changes.
    """
    num_chosen = index.shape[-1]
    chosen, order = torch.sort(index.reshape(-1).short(), stable=True)  # 2 bytes are sorted in fewer passes than 8
    numbers = torch.arange(experts.num_experts, device=index.device, dtype=chosen.dtype)
    ends = torch.searchsorted(chosen, numbers, right=True, out_int32=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=index.device))
    if can_fuse(experts):
        sums = compute_adapted(experts, hidden, weights, order, places, ends)
        if not experts.has_bias:
            return sums
        of_all = weights.new_zeros(len(weights), experts.num_experts).scatter(1, index, weights)
        return sums + of_all.to(sums.dtype) @ experts.down_proj_bias.to(sums.dtype)
    x = _Dispatch.apply(hidden, order, places, num_chosen)
    first, _ = projections(experts)
    x = getattr(experts, first)(x, ends)
    if experts.has_bias:
        x = x + getattr(experts, f"{first}_bias").to(x.dtype)[chosen.int()]
    x = experts.down_proj(experts._apply_gate(x) if experts.has_gate else experts.act_fn(x), ends)
    if experts.has_bias:
        x = x + experts.down_proj_bias.to(x.dtype)[chosen.int()]
    out: torch.Tensor = _Combine.apply(x, weights, order, places)
    return out.to(hidden.dtype)


class _Dispatch(torch.autograd.Function):
    """The rows of tokens, sorted by expert, (n, e) -> (n k, e). Both directions gather."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, places: torch.Tensor, num_chosen: int) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.num_chosen = num_chosen
        return x[order // num_chosen]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return ops.combine(gradient, places, ctx.num_chosen, None), None, None, None


class _Combine(torch.autograd.Function):
    """The weighted sum over a token's experts, (n k, e), (n, k) -> (n, e)."""

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, weights: torch.Tensor, order: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(y, weights, order, places)
        out: torch.Tensor = ops.combine(y, places, weights.shape[1], weights)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        y, weights, order, places = ctx.saved_tensors
        rows = gradient[order // weights.shape[1]]
        for_y = (rows * weights.reshape(-1)[order][:, None]).to(y.dtype)
        return for_y, (rows * y).sum(-1)[places].view_as(weights).to(weights.dtype), None, None


def projections(experts: Any) -> tuple[str, str]:
    """Names of the experts' two parameters, in the order in which a token passes them."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def make_stack(experts: Any, parameter: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """A stack on meta for a parameter of experts, and the parameter as (E, out, in)."""
    rows = parameter.mT if experts.is_transposed else parameter
    num_groups, size, inner = rows.shape
    transposed = experts.is_transposed
    return GroupedLinear(num_groups, inner, size, stored_transposed=transposed, device="meta", dtype=rows.dtype), rows


ALL_EXPERTS_FUNCTIONS.register(NAME, compute_experts)


def stack_experts(model: Any) -> list[str]:
    """Put stacks in the place of the experts' 3-D parameters, on meta or loaded; their names. UserError where there is
    none.
    """
    found = find_experts(model)
    if not found:
        raise UserError(
            f"the experts of {type(model).__name__} cannot be trained here",
            where="model.name",
            why="their forward pass cannot be replaced: transformers' class does not use use_experts_implementation",
            fix=f"use another mixture, such as {families.EXPERT_EXAMPLES}",
        )
    names = []
    for name, experts in found.items():
        for key in projections(experts):
            parameter = experts._parameters.pop(key)
            stack, rows = make_stack(experts, parameter.detach())
            if not parameter.is_meta:
                stack.weight = nn.Parameter(rows.flatten(0, 1))
            stack.weight.requires_grad_(parameter.requires_grad)
            setattr(experts, key, stack.train(experts.training))
            names.append(f"{name}.{key}")
    model.set_experts_implementation(NAME)
    return names


@torch.no_grad()
def round_experts(model: Any, kind: Any, *arguments: Any) -> None:
    """Give the experts of a transformers model the values that a layer of ``kind`` holds of them, in place."""
    for experts in find_experts(model).values():
        for key in projections(experts):
            parameter = experts.get_parameter(key)
            stack, rows = make_stack(experts, parameter)
            held = hold(stack.to_empty(device=rows.device), kind, *arguments)
            assert isinstance(held, QuantizedLayer)
            held.fill(rows.contiguous().flatten(0, 1))
            parameter.copy_(stored_form(stack, held.gather_weight()))


class Experts(BaseConverter):
    """Stacks in the place of a model's experts."""

    def on_meta(self, model: Any) -> None:
        names = stack_experts(model)
        for module in model.modules():  # what corrects a router is small, exact, and never trained
            for key, buffer in module._buffers.items():
                if key not in module._non_persistent_buffers_set and buffer is not None and buffer.is_floating_point():
                    module._buffers[key] = buffer.float()
        num_experts = {experts.num_experts for experts in find_experts(model).values()}
        backend = select.choose_backend(self.context.device)
        select.use(backend)
        stacks = f"{len(names)} stacks of {'/'.join(map(str, sorted(num_experts)))}"
        self.lines.append(f"experts: {stacks}, {select.describe(backend)}")

    def on_loss(self, loss_model: LossModel) -> None:
        declare_routing(loss_model, self.context.config.moe.balance)
