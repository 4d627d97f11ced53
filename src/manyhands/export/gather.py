"""The model's tensors one at a time, whole, in the dtype and under the names that the files will have. Collective."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from manyhands.checkpoint.tensors import reshard
from manyhands.convert.adapter import added_parameters
from manyhands.convert.lora import LoraLinear, adapted_layers
from manyhands.convert.new_tokens import IDS, ROWS, token_modules
from manyhands.convert.quantize import gather_weight, quantised_layers, quantised_weights, stored_names
from manyhands.core.progress import advance
from manyhands.core.shards import gather


def saved_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, tied ones once under their first name, what adapters added left out.

    A weight in NF4 stands on meta under its own name: ``iterate_whole`` dequantises it.
    """
    reshard(model)
    added = added_parameters(model)
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())  # names a tied parameter once
    tensors |= {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if not isinstance(tensor, nn.Parameter)
    }
    named = {name: tensor for name, tensor in tensors.items() if name not in added}
    return _with_weights(model, named)


def _with_weights(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with a weight on meta in the place of what holds it in NF4."""
    names = {f"{name}.weight_codes": (f"{name}.weight", layer) for name, layer in quantised_layers(model).items()}
    held = stored_names(model)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name in names:
            weight, layer = names[name]
            found[weight] = torch.empty(layer.out_features, layer.in_features, dtype=tensor.dtype, device="meta")
        elif name not in held:
            found[name] = tensor
    return found


@torch.no_grad()
def iterate_whole(
    model: nn.Module, dtype: torch.dtype | Mapping[str, torch.dtype], *, merge: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor on the CPU), floating ones cast to ``dtype``, or to that of their name. Every rank must run
    it to its end.

    With ``merge`` adapted weights become W + s B A, with DoRA in their trained lengths, in float64 (which no GPU rounds
    to TF32) and rounded once, and trained rows of tokens take their place; without it what adapters added is left out.
    """
    layers, tokens = (adapted_layers(model), token_modules(model)) if merge else ({}, {})
    quantised = quantised_weights(model)
    for name, tensor in saved_tensors(model).items():
        whole = gather_weight(quantised[name]) if name in quantised else gather(tensor)
        layer = layers.get(name.removesuffix(".weight"))
        if layer is not None:
            whole = _merge(layer, whole)
        holder = tokens.get(name.removesuffix(".weight"))
        if holder is not None:
            rows = gather(holder.get_parameter(ROWS))
            whole = whole.to(rows.dtype).index_copy(0, torch.tensor(getattr(holder, IDS), device=rows.device), rows)
        wanted = dtype if isinstance(dtype, torch.dtype) else dtype[name]
        advance()
        yield name, (whole.to(wanted) if whole.is_floating_point() else whole).cpu().contiguous()


def _merge(layer: LoraLinear, weight: torch.Tensor) -> torch.Tensor:
    """W + s B A in float64; with DoRA its rows have the trained lengths. A collective where the layer is sharded."""
    a, b = gather(layer.lora_A.weight).double(), gather(layer.lora_B.weight).double()
    merged = weight.double() + layer.scaling * (b @ a)
    if layer.lora_magnitude_vector is not None:
        lengths = torch.linalg.vector_norm(merged, dim=1).clamp(min=torch.finfo(torch.float32).tiny)
        merged *= (gather(layer.lora_magnitude_vector).double() / lengths)[:, None]
    return merged
