"""What files call saved tensors: the source's names, shapes and dtypes. Writes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from manyhands.convert.adapter import added_parameters
from manyhands.convert.lora import LoraLinear, adapted_layers
from manyhands.convert.new_tokens import IDS, ROWS, token_modules
from manyhands.core.errors import UserError
from manyhands.core.holding import full_numel, gather, reshard
from manyhands.core.progress import advance
from manyhands.model.load import loaded_tensors
from manyhands.model.source import (
    Checkpoint,
    Conversion,
    StoredTensor,
    needs_conversion,
    read_checkpoint,
    read_stored,
    revert,
)
from manyhands.model.weights import quantized_layers, stacked_layers, stored_form, stored_names, stored_shape

MAX_NAMED = 20


@dataclass
class FileLayout:
    """Where the tensors of ``iterate_whole`` go, given to ``parts_of`` in its order."""

    model: Any
    names: dict[str, tuple[str, ...]]  # of a tied tensor every name that the source stores it under
    dtypes: dict[str, torch.dtype]  # by the model's names
    sizes: dict[str, int]  # bytes by names in the files, in the order in which they are written
    conversions: tuple[Conversion, ...] = ()
    copied: tuple[StoredTensor, ...] = ()  # that the model took no part of
    dtype: torch.dtype | None = None  # that these are cast to as well; None leaves each its own
    beyond: dict[str, float] = field(default_factory=dict)  # by name, the largest magnitude that the dtype cuts off
    _made: dict[str, dict[str, torch.Tensor]] = field(
        default_factory=dict
    )  # of each conversion, as far as it has arrived

    def read_copied(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in the files, tensor) of what is copied from the source."""
        for stored in self.copied:
            tensor = read_stored(stored)
            casts = self.dtype is not None and stored.torch_dtype is not None
            yield stored.name, narrow(stored.name, tensor, self.dtype, self.beyond) if casts else tensor  # type: ignore[arg-type]

    def parts_of(self, name: str, whole: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in the files, tensor) of everything that can be written now that ``name`` is there."""
        conversion = _conversion_of(name, self.conversions)
        if conversion is None:
            for index, stored_name in enumerate(self.names[name]):
                yield stored_name, whole.clone() if index else whole  # files do not share memory
            return
        made = self._made.setdefault(conversion.name, {})
        made[name] = whole
        if made.keys() == conversion.shapes.keys():
            parts = revert(self.model, conversion, self._made.pop(conversion.name))
            for part in conversion.parts:
                yield part.name, parts[part.name].contiguous()


def lay_out(model: nn.Module, source: Path, dtype: torch.dtype) -> FileLayout:
    """Names as in ``source``; where it has no weights, because the model started from new ones, as transformers saves
    it.

    If ``dtype`` is that of most of the source's weights, the few of another dtype (norms in float32, say) keep theirs.
    Otherwise everything has it, towers included, but for what is no weight (integers, 8 bits).
    """
    tensors = saved_tensors(model)
    if not any(source.glob("*.safetensors")):
        return _lay_out_new(model, tensors, dtype)
    checkpoint = read_checkpoint(model, loaded_tensors(model), source)
    names = _stored_names(model, tensors, checkpoint)
    keep = dtype == _main_dtype(checkpoint)
    dtypes = _own_dtypes(tensors, names, checkpoint, dtype) if keep else dict.fromkeys(tensors, dtype)
    sizes: dict[str, int] = {}
    left = {conversion.name: set(conversion.shapes) for conversion in checkpoint.conversions}
    for name, tensor in tensors.items():
        conversion = _conversion_of(name, checkpoint.conversions)
        if conversion is None:
            sizes |= {stored: _bytes(full_numel(tensor), dtypes[name], tensor) for stored in names[name]}
            continue
        left[conversion.name].discard(name)
        if not left[conversion.name]:
            sizes |= {part.name: _bytes(_count(part.shape), dtypes[name], tensor) for part in conversion.parts}
    for stored in checkpoint.untouched:
        cast = not keep and stored.torch_dtype is not None
        sizes[stored.name] = _count(stored.shape) * dtype.itemsize if cast else stored.num_bytes
    return FileLayout(
        model, names, dtypes, sizes, checkpoint.conversions, checkpoint.untouched, None if keep else dtype
    )


def _lay_out_new(model: nn.Module, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> FileLayout:
    stacks = stacked_layers(model)
    conversions = []
    for name, stack in stacks.items():
        shape = stored_shape(stack)
        written = revert_weight_conversion(model, {name: torch.empty(shape, device="meta")})  # type: ignore[arg-type]
        parts = tuple(StoredTensor(part, Path(), tuple(tensor.shape), "BF16") for part, tensor in written.items())
        conversions.append(Conversion(name, parts, (), None, {name: shape}))
    named = {name: torch.empty(0, device="meta") for name in tensors if name not in stacks}
    converts = needs_conversion(model) and not stacks
    written = dict(named) if converts else revert_weight_conversion(model, dict(named))  # type: ignore[arg-type]
    by_tensor = {id(tensor): name for name, tensor in written.items()}
    names: dict[str, tuple[str, ...]] = {name: (by_tensor[id(tensor)],) for name, tensor in named.items()}
    parts_of = {conversion.name: conversion.parts for conversion in conversions}
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        if name in parts_of:
            sizes |= {part.name: _bytes(_count(part.shape), dtype, tensor) for part in parts_of[name]}
        else:
            sizes[names[name][0]] = _bytes(full_numel(tensor), dtype, tensor)
    return FileLayout(model, names, dict.fromkeys(tensors, dtype), sizes, tuple(conversions))


def _stored_names(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], checkpoint: Checkpoint
) -> dict[str, tuple[str, ...]]:
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    aliases |= {id(tensors[name]): [name] for name in stacked_layers(model)}
    return {
        name: tuple(
            checkpoint.plain[alias].name for alias in aliases.get(id(tensor), [name]) if alias in checkpoint.plain
        )
        or (name,)
        for name, tensor in tensors.items()
    }


def _main_dtype(checkpoint: Checkpoint) -> torch.dtype | None:
    """The dtype of most of the source's values that the model has."""
    stored = {tensor.name: tensor for tensor in checkpoint.plain.values()}
    elements: dict[torch.dtype | None, int] = {}
    for part in (*stored.values(), *(part for conversion in checkpoint.conversions for part in conversion.parts)):
        elements[part.torch_dtype] = elements.get(part.torch_dtype, 0) + _count(part.shape)
    return max(elements, key=lambda key: elements[key])


def _own_dtypes(
    tensors: Mapping[str, torch.Tensor],
    names: Mapping[str, tuple[str, ...]],
    checkpoint: Checkpoint,
    dtype: torch.dtype,
) -> dict[str, torch.dtype]:
    """Each tensor's dtype in the source; ``dtype`` for what a conversion made."""
    stored = {tensor.name: tensor for tensor in checkpoint.plain.values()}
    own = {name: stored[names[name][0]].torch_dtype for name in tensors if names[name][0] in stored}
    return {name: own.get(name) or dtype for name in tensors}


def _conversion_of(name: str, conversions: tuple[Conversion, ...]) -> Conversion | None:
    return next((conversion for conversion in conversions if name in conversion.shapes), None)


def _bytes(num_elements: int, dtype: torch.dtype, like: torch.Tensor) -> int:
    return num_elements * (dtype.itemsize if like.is_floating_point() else like.element_size())


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def saved_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, tied ones once under their first name, what adapters added left out.

    A quantized weight stands on meta under its own name: ``iterate_whole`` dequantizes it. That of a stack has the name
    by which transformers' model has it, and its own shape.
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
    """The same with a weight on meta in the place of the first piece that holds it in another form."""
    weights: dict[str, torch.Tensor | None] = {}
    names: dict[str, str] = {}
    for name, layer in quantized_layers(model).items():
        first, *others = (f"{name}.{piece}" for piece in layer.weight_pieces)
        shape = layer.out_features, layer.in_features
        names[first] = f"{name}.weight"
        weights |= {first: torch.empty(shape, dtype=layer.weight_dtype, device="meta")} | dict.fromkeys(others)
    found = {names.get(name, name): weights.get(name, tensor) for name, tensor in tensors.items()}
    stored = stored_names(model)
    return {stored.get(name, name): tensor for name, tensor in found.items() if tensor is not None}


def narrow(name: str, tensor: torch.Tensor, dtype: torch.dtype, beyond: dict[str, float]) -> torch.Tensor:
    """``tensor`` in ``dtype``. Of finite values that overflow, ``beyond`` gets the largest under ``name``."""
    cast = tensor.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(tensor.dtype).max:
        lost = cast.isinf() & tensor.isfinite()
        if bool(lost.any()):
            beyond[name] = tensor[lost].abs().max().item()
    return cast


def refuse_beyond(beyond: Mapping[str, float], dtype: torch.dtype, where: str) -> None:
    """UserError that names the tensors whose values ``dtype`` does not reach; ``beyond`` as ``narrow`` fills it."""
    if not beyond:
        return
    shown = sorted(beyond, key=lambda name: -beyond[name])[:MAX_NAMED]
    more = [f"... and {len(beyond) - MAX_NAMED} more"] if len(beyond) > MAX_NAMED else []
    name = str(dtype).removeprefix("torch.")
    raise UserError(
        f"{len(beyond)} weights hold values that {name} does not reach",
        where=where,
        why=f"the largest number of {name} is {torch.finfo(dtype).max:.5g}; a larger one would be written as infinity",
        fix="save in bfloat16 or float32: `manyhands export RUN --dtype bfloat16`, or output.dtype in the run file",
        details=[f"{tensor}: up to {beyond[tensor]:.6g}" for tensor in shown] + more,
    )


@torch.no_grad()
def iterate_whole(
    model: nn.Module,
    dtype: torch.dtype | Mapping[str, torch.dtype],
    *,
    merge: bool = False,
    beyond: dict[str, float] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor on the CPU), floating ones cast to ``dtype``, or to that of their name. Every rank must run
    it to its end.

    With ``merge`` adapted weights become W + s B A, with DoRA in their trained lengths, in float64 (which no GPU rounds
    to TF32) and rounded once, and trained rows of tokens take their place; without it what adapters added is left out.
    ``beyond`` gets what the dtype does not reach, as ``narrow`` fills it.
    """
    beyond = {} if beyond is None else beyond
    layers, tokens = (adapted_layers(model), token_modules(model)) if merge else ({}, {})
    stacks, renamed = stacked_layers(model), stored_names(model)
    quantized = {
        renamed.get(weight, weight): layer
        for name, layer in quantized_layers(model).items()
        for weight in (f"{name}.weight",)
    }
    for name, tensor in saved_tensors(model).items():
        whole = quantized[name].gather_weight() if name in quantized else gather(tensor)
        layer = layers.get(name.removesuffix(".weight"))
        if layer is not None:
            whole = _merge(layer, whole)
        holder = tokens.get(name.removesuffix(".weight"))
        if holder is not None:
            rows = gather(holder.get_parameter(ROWS))
            whole = whole.to(rows.dtype).index_copy(0, torch.tensor(getattr(holder, IDS), device=rows.device), rows)
        if name in stacks:
            whole = stored_form(stacks[name], whole)
        wanted = dtype if isinstance(dtype, torch.dtype) else dtype[name]
        advance()
        yield name, (narrow(name, whole, wanted, beyond) if whole.is_floating_point() else whole).cpu().contiguous()


def _merge(layer: LoraLinear, weight: torch.Tensor) -> torch.Tensor:
    """W + s B A in float64; with DoRA its rows have the trained lengths. A collective where the layer is sharded."""
    a, b = gather(layer.lora_A.weight).double(), gather(layer.lora_B.weight).double()
    merged = layer.merge(weight.double(), a, b)
    if layer.lora_magnitude_vector is not None:
        lengths = torch.linalg.vector_norm(merged, dim=1).clamp(min=torch.finfo(torch.float32).tiny)
        merged *= (gather(layer.lora_magnitude_vector).double() / lengths)[:, None]
    return merged
