"""Put the products of a model's blocks in fp8: which layers, when, and what of them is coded once. Must not know ranks.

A layer keeps its weight, the same parameter under the same name in the same dtype; training passes alone compute in fp8
with it. What is evaluated, generated, exported or verified are plain products of the same weights: the model that will
be used. The head, embeddings, and layers whose sides are no multiples of 16 stay plain.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from manyhands.core.errors import UserError
from manyhands.core.holding import is_full
from manyhands.kernels.fp8 import (
    ALIGNMENT,
    QuantizedWeights,
    count_quantized_bytes,
    fp8_linears,
    has_features,
    quantize_weights,
)
from manyhands.kernels.lora import Layer
from manyhands.kernels.modules import FusedAttention, FusedMlp
from manyhands.model.structure import block_linears


class Fp8Linear(nn.Linear):
    """A linear layer whose products are in fp8 while it is trained: x W^T, and backward dY W and dY^T X."""

    uses_fp8 = True  # the layer's own attribute is set by ``set_matmuls``
    coded: QuantizedWeights | None = None  # its frozen weight, coded once

    def __init__(self, base: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        for name, parameter in base._parameters.items():
            self.register_parameter(name, parameter)

    @property
    def in_fp8(self) -> bool:
        """Whether a forward pass would now compute in fp8."""
        return self.training and self.uses_fp8

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., i) -> (..., o)"""
        if not self.in_fp8:
            return F.linear(x, self.weight, self.bias)
        return fp8_linears(x, [Layer((self.weight,), self.bias)], self.coded)[0]


def use_fp8(model: nn.Module) -> tuple[list[str], list[str]]:
    """Put an ``Fp8Linear`` in the place of the blocks' linear layers; names of those, and of those whose sides do not
    fit.

    For a model on meta, before adapters. UserError where there is no layer that fits.
    """
    swapped, left = [], []
    for name, linear in block_linears(model).items():
        if not has_features(linear.in_features, linear.out_features):
            left.append(name)
            continue
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, Fp8Linear(linear).train(linear.training))
        swapped.append(name)
    if not swapped:
        raise UserError(
            "No linear layer of the blocks can compute in fp8.",
            where="kernels.linear: fp8",
            why=f"inputs and outputs must be multiples of {ALIGNMENT}",
            fix="set kernels.linear: compute_dtype",
            details=left[:20],
        )
    return swapped, left


def fp8_layers(model: nn.Module) -> dict[str, Fp8Linear]:
    """The layers that can compute in fp8, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Fp8Linear)}


def set_matmuls(model: nn.Module, kind: str) -> None:
    """``fp8`` or ``plain`` products in training passes to come."""
    for layer in fp8_layers(model).values():
        layer.uses_fp8 = kind == "fp8"


@torch.no_grad()
def quantize_frozen(model: nn.Module) -> int:
    """Code weights once that are frozen and whole on this rank, group by group; the bytes that this takes.

    What is sharded or trained is coded at each use. For a model that holds its weights already.
    """
    coded: list[QuantizedWeights] = []
    grouped: set[int] = set()
    for module in model.modules():
        groups: list[tuple[Any, str, list[Any]]] = []
        if isinstance(module, (FusedAttention, FusedMlp)):
            groups = [(module.coded, names[0], [getattr(module, name) for name in names]) for names in module.GROUPS]
        elif isinstance(module, Fp8Linear) and id(module) not in grouped:
            groups = [(module.__dict__, "coded", [module])]
        for holder, key, layers in groups:
            grouped.update(map(id, layers))
            if all(isinstance(layer, Fp8Linear) and _is_still(layer.weight) for layer in layers):
                holder[key] = quantize_weights([layer.weight for layer in layers])
                coded.append(holder[key])
    return count_quantized_bytes(coded)


def _is_still(weight: torch.Tensor) -> bool:
    return not weight.requires_grad and is_full(weight)
