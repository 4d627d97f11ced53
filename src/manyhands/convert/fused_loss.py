"""Cross-entropy fused with the head (``kernels/loss``), where the head is one that can be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from manyhands.convert.protocol import BaseConverter, TrainedModel
from manyhands.core.errors import UserError
from manyhands.model.loss import LossModel


class FusedLoss(BaseConverter):
    """Whether the head can be fused is known after the first forward pass, which compares logits."""

    loss_model: LossModel

    def on_loss(self, loss_model: LossModel) -> None:
        self.loss_model = loss_model
        loss_model.fuse_head()

    def before_first_step(self, model: nn.Module, trained: TrainedModel, batch: Mapping[str, Any]) -> None:
        if self.context.config.kernels.loss == "fused" and self.loss_model.why_chunked:
            raise UserError(
                "the loss cannot be fused",
                where="kernels.loss",
                why=self.loss_model.why_chunked,
                fix="set kernels.loss: auto",
            )
