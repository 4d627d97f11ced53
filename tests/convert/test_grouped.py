"""A stack of weights, in any form and adapted or not, is a loop of linear layers over the rows of each group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from manyhands.config.schema import MethodSection
from manyhands.convert.fp8 import StoredFp8Linear
from manyhands.convert.grouped import GroupedLinear, hold
from manyhands.convert.lora import LoraLinear, initialize_adapters, lora_class
from manyhands.convert.nf4 import Nf4Linear
from manyhands.model.weights import QuantizedLayer

GROUPS, INPUTS, OUTPUTS, RANK = 5, 64, 48, 4
STORAGES: dict[str, tuple[Any, ...]] = {
    "dense": (),
    "nf4": (Nf4Linear,),
    "nf4 of one level": (Nf4Linear, False),
    "stored fp8": (StoredFp8Linear,),
    "products in fp8": (StoredFp8Linear,),
}


def make_stack(storage: str, method: MethodSection | None) -> Any:
    torch.manual_seed(0)
    stack: Any = GroupedLinear(GROUPS, INPUTS, OUTPUTS).requires_grad_(False)
    if storage != "dense":
        kind, *arguments = STORAGES[storage]
        weight, stack = stack.weight, hold(stack, kind, *arguments)
        if isinstance(stack, QuantizedLayer):
            stack.fill(weight)
        stack.has_fp8_products = storage == "products in fp8"
    if method is not None:
        stack = lora_class(type(stack))(stack, method)
        initialize_adapters(nn.ModuleDict({"stack": stack}), seed=0)
        nn.init.normal_(stack.lora_B.weight)
    return stack


def linear_of(stack: Any, group: int, method: MethodSection | None) -> nn.Linear:
    """The layer of one group, adapted like it, with a dense weight."""
    rows = slice(group * OUTPUTS, (group + 1) * OUTPUTS)
    linear: Any = nn.Linear(INPUTS, OUTPUTS, bias=False).requires_grad_(False)
    linear.weight.copy_(stack.weight[rows])
    if stack.has_fp8_products:
        weight, linear = linear.weight, StoredFp8Linear(linear)
        linear.fill(weight)
    if method is not None:
        linear = lora_class(type(linear))(linear, method)
        with torch.no_grad():
            linear.lora_A.weight.copy_(stack.lora_A.weight[group * RANK : (group + 1) * RANK])
            linear.lora_B.weight.copy_(stack.lora_B.weight[rows])
            if method.dora:
                linear.lora_magnitude_vector.copy_(stack.lora_magnitude_vector[rows])
    return linear.train(stack.training)


@pytest.mark.parametrize("adapter", ["none", "lora", "dora"])
@pytest.mark.parametrize("storage", STORAGES)
def test_a_stack_is_a_loop_of_linear_layers(storage: str, adapter: str) -> None:
    method = None
    if adapter != "none":
        method = MethodSection(name="lora", rank=RANK, alpha=8.0, dora=adapter == "dora")
    stack = make_stack(storage, method)
    draw = torch.Generator().manual_seed(1)
    sizes = torch.multinomial(torch.tensor([0.4, 0.3, 0.0, 0.2, 0.1]), 40, True, generator=draw).bincount(
        minlength=GROUPS
    )
    assert 0 in sizes
    x = torch.randn(40, INPUTS, generator=draw)
    weights = torch.randn(40, OUTPUTS, generator=draw)
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    found = stack(one, sizes.cumsum(0))
    (found * weights).sum().backward()
    linears = [linear_of(stack, group, method) for group in range(GROUPS)]
    parts = [linear(part) for linear, part in zip(linears, other.split(sizes.tolist()), strict=True) if len(part)]
    wanted = torch.cat(parts)
    (wanted * weights).sum().backward()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-5)
    if isinstance(stack, LoraLinear):
        for name in ("lora_A.weight", "lora_B.weight", *["lora_magnitude_vector"] * (adapter == "dora")):
            grads = [linear.get_parameter(name).grad for linear in linears]
            shape = next(grad.shape for grad in grads if grad is not None)
            theirs = torch.cat([torch.zeros(shape) if grad is None else grad for grad in grads])
            torch.testing.assert_close(stack.get_parameter(name).grad, theirs, rtol=1e-4, atol=1e-4)


def test_groups_are_told_apart() -> None:
    stack = make_stack("dense", None)
    x = torch.ones(2, INPUTS)
    first, second = stack(x, torch.tensor([1, 2, 2, 2, 2]))
    assert torch.allclose(first, F.linear(x[0], stack.weight[:OUTPUTS]))
    assert not torch.allclose(first, second)
