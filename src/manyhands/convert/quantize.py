"""Put the blocks of a model into NF4: which layers, and what their weights are called in files. Must not know ranks.

Every linear layer of the blocks is quantized, adapted or not; embeddings, head, norms and biases stay in the compute
dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from manyhands.convert.nf4 import Nf4Linear, bitsandbytes, dequantize
from manyhands.convert.protocol import BaseConverter, Context
from manyhands.core.holding import gather
from manyhands.kernels import nf4 as kernels_nf4
from manyhands.kernels.backend import Backend
from manyhands.model.structure import block_linears


def quantize_blocks(model: nn.Module) -> list[str]:
    """Put an ``Nf4Linear`` in the place of every linear layer of the blocks; returns their names.

    For a model on meta: ``materialize`` fills the layers. UserError where bitsandbytes is missing.
    """
    bitsandbytes()
    linears = block_linears(model)
    for name, linear in linears.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, Nf4Linear(linear).train(linear.training))
    return list(linears)


@torch.no_grad()
def round_to_nf4(model: nn.Module) -> None:
    """Give every linear layer of the blocks the values that NF4 keeps of its weight, in place and in its dtype."""
    bitsandbytes()
    for linear in block_linears(model).values():
        held = Nf4Linear(linear)
        held.fill(linear.weight.detach())
        linear.weight.copy_(held.weight)


def nf4_layers(model: nn.Module) -> dict[str, Nf4Linear]:
    """The layers in NF4 by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Nf4Linear)}


def nf4_weights(model: nn.Module) -> dict[str, Nf4Linear]:
    """The layers in NF4 by the name that their weight has in files."""
    return {f"{name}.weight": layer for name, layer in nf4_layers(model).items()}


def stored_names(model: nn.Module) -> set[str]:
    """Names of the parameters that hold weights in NF4, and that no file of a model knows."""
    return {f"{name}.{kind}" for name in nf4_layers(model) for kind in Nf4Linear.weight_pieces}


def gather_weight(layer: Nf4Linear) -> torch.Tensor:
    """The full weight (o, i), dequantized. A collective where it is sharded."""
    shape, codes = (layer.out_features, layer.in_features), gather(layer.weight_codes)
    return dequantize(codes, gather(layer.weight_statistics), shape, codes.dtype)


def count_parameters(model: nn.Module) -> int:
    """Parameters of the model; those in NF4 count as the weights that they hold."""
    stored = stored_names(model)
    others = sum(parameter.numel() for name, parameter in model.named_parameters() if name not in stored)
    return others + sum(layer.in_features * layer.out_features for layer in nf4_layers(model).values())


class Nf4Blocks(BaseConverter):
    """Weights of the blocks' linear layers in NF4, and what dequantizes them in this process."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.backend: Backend | None = None

    def on_meta(self, model: nn.Module) -> None:
        quantize_blocks(model)
        context = self.context
        if context.config.kernels.nf4 == "reference":
            self.backend = Backend("bitsandbytes", "as asked")
        else:
            self.backend = kernels_nf4.choose_backend(context.device, context.dtype)
        kernels_nf4.use(self.backend, context.dtype)

    def describe(self) -> Sequence[str]:
        return () if self.backend is None else (f"nf4: weights dequantized by {kernels_nf4.describe(self.backend)}",)
