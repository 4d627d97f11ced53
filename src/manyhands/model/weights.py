"""A linear layer whose weight is held in another form than its own, or is stored in another shape, as those ask who
know neither form nor feature: loading, counting, adapters and export.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn

Storage = Literal["nf4", "nf4_single", "fp8", "mxfp4"]


@runtime_checkable
class QuantizedLayer(Protocol):
    """An ``nn.Linear`` that holds its weight in another form and makes that from the weight. Its ``forward`` multiplies
    with it, and ``weight`` is the dequantized weight, computed at each access.
    """

    in_features: int
    out_features: int
    storage: Storage
    weight_pieces: tuple[str, ...]  # its parameters that hold the weight
    weight_dtype: torch.dtype  # of the weight itself, in which it is drawn

    def fill(self, weight: Any) -> None:
        """Take ``weight`` (o, i), a tensor or a safetensors slice, of which each rank reads its part, or a
        ``StoredNf4`` or ``StoredMxfp4``. Every rank calls this.
        """

    @staticmethod
    def dequantize(pieces: Sequence[torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """The weight (o, i) of whole pieces, new."""

    def gather_weight(self) -> torch.Tensor:
        """The full weight (o, i), dequantized. A collective where it is sharded."""


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLayer]:
    """The quantized layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLayer)}


@runtime_checkable
class StackedLayer(Protocol):
    """An ``nn.Linear`` whose weight (g o, i) has those of g groups one above the other. Files hold it under the name of
    the layer itself: (g, o, i), or (g, i, o) where ``stored_transposed``.
    """

    in_features: int
    out_features: int  # of all groups
    num_groups: int
    stored_transposed: bool


def stacked_layers(model: nn.Module) -> dict[str, StackedLayer]:
    """The stacks by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, StackedLayer)}


def stored_names(model: nn.Module) -> dict[str, str]:
    """By the names of weights of stacks, what transformers' model calls them."""
    return {f"{name}.weight": name for name in stacked_layers(model)}


def stored_shape(layer: StackedLayer) -> tuple[int, int, int]:
    """Of the tensor in the files."""
    groups, size, inner = layer.num_groups, layer.out_features // layer.num_groups, layer.in_features
    return (groups, inner, size) if layer.stored_transposed else (groups, size, inner)


def stored_form(layer: StackedLayer, weight: torch.Tensor) -> torch.Tensor:
    """The tensor in the files of a full weight (g o, i)."""
    stacked = weight.unflatten(0, (layer.num_groups, -1))
    return stacked.mT.contiguous() if layer.stored_transposed else stacked


class StackedRows:
    """The weight (g o, i) of a stack that is stored in pieces of rows; only what a slice needs is read.

    Args:
        pieces: in order, the number of rows of each, and what reads a slice of its rows and a slice of its columns.
    """

    def __init__(self, pieces: Iterable[tuple[int, Callable[[slice, slice], torch.Tensor]]]) -> None:
        self.pieces = tuple(pieces)
        self.num_rows = sum(size for size, _ in self.pieces)

    def __getitem__(self, key: slice | tuple[slice, ...]) -> torch.Tensor:
        rows, columns = (*key, slice(None))[:2] if isinstance(key, tuple) else (key, slice(None))
        begin, end, _ = rows.indices(self.num_rows)
        found: list[torch.Tensor] = []
        start = 0
        for size, read in self.pieces:
            first, last = max(begin - start, 0), min(end - start, size)
            if first < last or (begin >= end and not found):  # an empty slice has a dtype and a width, too
                found.append(read(slice(first, max(first, last)), columns))
            start += size
        return torch.cat(found)

    @staticmethod
    def of_stored(layer: StackedLayer, stored: Any) -> StackedRows:
        """Of one tensor in the files, or of a slice of it."""

        def reader(group: int) -> Callable[[slice, slice], torch.Tensor]:
            own = slice(group, group + 1)
            if layer.stored_transposed:
                return lambda rows, columns: stored[own, columns, rows][0].T
            return lambda rows, columns: stored[own, rows, columns][0]

        size = layer.out_features // layer.num_groups
        return StackedRows((size, reader(group)) for group in range(layer.num_groups))
