"""The model's tensors one at a time, whole, in the dtype and under the names that the files will have. Collective."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from manyhands.checkpoint.tensors import reshard
from manyhands.model.lora import adapted_layers
from manyhands.model.shards import gather

FACTORS = ("lora_A.weight", "lora_B.weight")


def saved_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, tied ones once under their first name, adapter factors left out."""
    reshard(model)
    factors = {f"{layer}.{factor}" for layer in adapted_layers(model) for factor in FACTORS}
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())  # names a tied parameter once
    tensors |= {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if not isinstance(tensor, nn.Parameter)}
    return {name: tensor for name, tensor in tensors.items() if name not in factors}


@torch.no_grad()
def iterate_whole(model: nn.Module, dtype: torch.dtype, *, merge: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor on the CPU), floating ones cast to ``dtype``. Every rank must run it to its end.

    With ``merge`` adapted weights become W + alpha / r B A, summed in float64 (which no GPU rounds to TF32) and
    rounded once; without it adapters are left out.
    """
    layers = adapted_layers(model) if merge else {}
    for name, tensor in saved_tensors(model).items():
        whole = gather(tensor)
        layer = layers.get(name.removesuffix(".weight"))
        if layer is not None:
            a, b = gather(layer.lora_A.weight).double(), gather(layer.lora_B.weight).double()
            whole = whole.double() + layer.scaling * (b @ a)
        yield name, (whole.to(dtype) if whole.is_floating_point() else whole).cpu().contiguous()


def saved_bytes(model: nn.Module, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of each tensor in the files, in the order in which ``iterate_whole`` gives them."""
    return {
        name: tensor.numel() * (dtype.itemsize if tensor.is_floating_point() else tensor.element_size())
        for name, tensor in saved_tensors(model).items()
    }
