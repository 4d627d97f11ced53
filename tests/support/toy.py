"""A converter that the product does not know: it scales what one layer gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from manyhands.convert.protocol import BaseConverter, Finding, TrainedModel

LAYER, FACTOR = "model.layers.0.mlp", 0.5


class Scale(BaseConverter):
    """Multiplies the output of the first MLP, whose weights are halved once they are there."""

    def on_meta(self, model: Any) -> None:
        model.get_submodule(LAYER).register_forward_hook(lambda module, _, output: output / FACTOR)

    def after_load(self, model: nn.Module) -> None:
        with torch.no_grad():
            model.get_submodule(LAYER).down_proj.weight.mul_(FACTOR)

    def before_first_step(self, model: nn.Module, trained: TrainedModel, batch: Mapping[str, Any]) -> Finding:
        with torch.no_grad():
            loss, weight = trained.forward(batch)["lm"]
        return Finding(f"scale: the loss is {float(loss / weight):.3f}", {"scale_loss": float(loss / weight)})

    def describe(self) -> Sequence[str]:
        return (f"scale: {LAYER} by {FACTOR}",)
