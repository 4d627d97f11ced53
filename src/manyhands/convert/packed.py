"""Frozen linear layers whose weight is packed into 4 bits, and dequantized from the pieces at each access."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from manyhands.core.holding import gather


class PackedLinear(nn.Linear):
    """``model.weights.QuantizedLayer`` but for ``fill``; the first of ``weight_pieces`` are the codes."""

    weight_pieces: tuple[str, ...]
    weight_codes: nn.Parameter

    dequantize: Any  # (whole pieces, (o, i), dtype) -> the weight (o, i), new; static

    @property
    def weight_dtype(self) -> torch.dtype:
        """The compute dtype, as which the pieces are viewed."""
        return self.weight_codes.dtype

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """(o, i) in the compute dtype, a new tensor. Not for shards: gather them first."""
        shape = (self.out_features, self.in_features)
        if self.weight_codes.is_meta:
            return torch.empty(shape, dtype=self.weight_dtype, device="meta")
        pieces = [getattr(self, name).detach() for name in self.weight_pieces]
        found: torch.Tensor = self.dequantize(pieces, shape, self.weight_dtype)
        return found

    def gather_weight(self) -> torch.Tensor:
        pieces = [gather(getattr(self, name)) for name in self.weight_pieces]
        found: torch.Tensor = self.dequantize(pieces, (self.out_features, self.in_features), self.weight_dtype)
        return found
