"""Mixtures of experts: the experts of a block as two stacks of linear layers, and one forward pass for all families.

transformers holds a block's experts as 3-D parameters of a module that ``use_experts_implementation`` decorates, whose
forward pass is looked up by name. Here each of these parameters becomes a ``GroupedLinear`` of the same name, so that
adapters, NF4, fp8, sharding and counting reach experts as any linear layer, and the name is that of
``compute_experts``. Routers are the families' own.

Shapes: n tokens of e values, of which each goes to k of E experts; index (n, k), weights (n, k).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from manyhands import families
from manyhands.convert.fused_experts import can_fuse, compute_adapted
from manyhands.convert.grouped import GroupedLinear, hold
from manyhands.convert.protocol import BaseConverter
from manyhands.convert.routing import declare_routing
from manyhands.core.errors import UserError
from manyhands.core.holding import own_part
from manyhands.kernels.experts import ops, select
from manyhands.model.loss import LossModel
from manyhands.model.structure import find_experts, with_class
from manyhands.model.weights import QuantizedLayer, stored_form

NAME = "manyhands"  # of the forward pass, in transformers' registry


def compute_experts(experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum over each token's experts, weighted: (n, e) -> (n, e).

    Tokens are sorted by expert, so that each projection of all experts is one product. Nothing waits for a GPU, unless
    ranks divide the experts (``engine/experts.py``), and nothing is added up in an order that changes.
    """
    if getattr(experts, "expert_group", None) is not None:
        return _compute_divided(experts, hidden, index, weights)
    return _compute_own(experts, hidden, index, weights, experts.num_experts)


def _sort(index: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The choices of tokens (n, k) sorted, which of the n k each is, the inverse of that, and where those of each
    expert end.
    """
    chosen, order = torch.sort(index.reshape(-1).short(), stable=True)  # 2 bytes are sorted in fewer passes than 8
    numbers = torch.arange(num_experts, device=index.device, dtype=chosen.dtype)
    ends = torch.searchsorted(chosen, numbers, right=True, out_int32=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=index.device))
    return chosen, order, places, ends


def _compute_own(
    experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, num_experts: int
) -> torch.Tensor:
    """The same sum over ``num_experts`` experts whose parameters this rank holds."""
    num_chosen = index.shape[-1]
    chosen, order, places, ends = _sort(index, num_experts)
    if can_fuse(experts):
        sums = compute_adapted(experts, hidden, weights, order, places, ends)
        if not experts.has_bias:
            return sums
        of_all = weights.new_zeros(len(weights), num_experts).scatter(1, index, weights)
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


@torch.compiler.disable
def _compute_divided(experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute experts that the ranks of a group divide: a row for each choice is sent to the expert's rank, computed
    there as a token with one expert, and sent back. Collective, also for a rank that receives no row.

    The host reads the numbers of rows, so this waits for a GPU once a block, and compiled blocks break here: what is
    before and after are graphs of their own.
    """
    group, size = experts.expert_group, experts.expert_group.size()
    num_own = experts.num_experts // size
    _, order, places, ends = _sort(index, experts.num_experts)
    given = ends.diff(prepend=ends.new_zeros(1))
    taken = torch.empty_like(given)
    dist.all_to_all_single(taken, given, group=group)  # (size num_own): rows of each rank for each expert that is here
    sent, received = torch.stack([given, taken]).view(2, size, num_own).sum(2).tolist()
    rows = _Exchange.apply(_Dispatch.apply(hidden, order, places, index.shape[-1]), sent, received, group)
    numbers = torch.arange(num_own, device=index.device).repeat(size)
    own = numbers.repeat_interleave(taken.long(), output_size=sum(received))[:, None]
    if not len(own):  # a kernel wants a row
        rows, own = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), own.new_zeros(1, 1)
    with _own_parameters(experts):
        y = _compute_own(experts, rows, own, weights.new_ones(own.shape), num_own)
    y = _Exchange.apply(y[: sum(received)], received, sent, group)
    out: torch.Tensor = _Combine.apply(y, weights, order, places)
    return out.to(hidden.dtype)


@contextmanager
def _own_parameters(experts: Any) -> Iterator[None]:
    """Replace each parameter by this rank's part of it, within the context."""
    held = [(module._parameters, dict(module._parameters)) for module in experts.modules()]
    try:
        for parameters, whole in held:
            parameters.update({key: each if each is None else own_part(each) for key, each in whole.items()})
        yield
    finally:
        for parameters, whole in held:
            parameters.update(whole)


class _Exchange(torch.autograd.Function):
    """Send ``sent[r]`` rows to each rank r of a group, and receive as many as each sends here: (n, e) -> (m, e). The
    backward pass returns the rows' gradients.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(rows: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
    found = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
    return found


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


class InputWeightedExperts(nn.Module):
    """Experts into which a token goes times its weight: (n, e), (n, k), (n, k) -> (n, e)."""

    has_gate, has_bias, is_concatenated, is_transposed = True, False, True, True
    exchanges_factors = True  # PEFT cannot know that they are transposed
    _apply_gate = _default_apply_gate

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = (hidden[:, None] * weights[..., None]).flatten(0, 1)  # a token for each choice
        out = compute_experts(self, rows, index.reshape(-1, 1), weights.new_ones(len(rows), 1))
        return out.unflatten(0, index.shape).sum(1)


class InputWeightedBlock(nn.Module):
    """A router, such experts and a shared one: (b, t, e) -> (b t, e), and the router's logits (b t, E)."""

    top_k: int
    router: nn.Module
    experts: nn.Module
    shared_expert: nn.Module

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = hidden.flatten(0, -2)
        logits = self.router(hidden)
        largest, index = logits.topk(self.top_k, dim=1)
        weights = largest.float().sigmoid().to(logits.dtype)
        return self.shared_expert(hidden) + self.experts(hidden, index, weights), logits


def adopt_experts(model: Any) -> dict[str, Any]:
    """The experts of a transformers model by name, those of a class without ``use_experts_implementation`` as modules
    that go through ``compute_experts`` and share all parameters.
    """
    for name, experts in find_experts(model).items():
        if type(experts).__name__ in families.weighing_inputs():
            path = name.rpartition(".")[0]
            block = with_class(model.get_submodule(path), InputWeightedBlock)
            block.router = with_class(block.router, nn.Linear)  # type: ignore[arg-type]
            block.experts = with_class(experts, InputWeightedExperts)
            model.set_submodule(path, block)
    return find_experts(model)


def stack_experts(model: Any) -> list[str]:
    """Put stacks in the place of the experts' 3-D parameters, on meta or loaded; their names. UserError where there is
    none.
    """
    found = adopt_experts(model)
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
    if not all(isinstance(experts, InputWeightedExperts) for experts in found.values()):
        model.set_experts_implementation(NAME)
    return names


@torch.no_grad()
def round_experts(model: Any, kind: Any, *arguments: Any) -> None:
    """Give the experts of a transformers model the values that a layer of ``kind`` holds of them, in place."""
    for experts in adopt_experts(model).values():
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
        if self.context.plan.layout.cuda_graphs and backend.name != "triton":
            raise UserError(
                "blocks with experts cannot be launched as CUDA graphs",
                where="parallel.cuda_graphs",
                why=f"experts are computed in plain torch, which waits for the GPU: {backend.reason}",
                fix="remove parallel.cuda_graphs, or set it to auto",
            )
        stacks = f"{len(names)} stacks of {'/'.join(map(str, sorted(num_experts)))}"
        self.lines.append(f"experts: {stacks}, {select.describe(backend)}")

    def on_loss(self, loss_model: LossModel) -> None:
        declare_routing(loss_model, self.context.config.moe.balance)
