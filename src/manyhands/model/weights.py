"""A linear layer whose weight is held in another form than its own, as those ask who know neither form nor feature:
loading, counting, adapters and export.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn

Storage = Literal["nf4", "nf4_single", "fp8"]


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
        ``StoredNf4``. Every rank calls this.
        """

    def gather_weight(self) -> torch.Tensor:
        """The full weight (o, i), dequantized. A collective where it is sharded."""


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLayer]:
    """The quantized layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLayer)}
