"""The fastest attention kernels that pass a self-test on this device: for packs, and for samples of one length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from manyhands.convert.protocol import BaseConverter, Context
from manyhands.model.attention import AttentionKernels, choose_attention_kernels


class FastAttention(BaseConverter):
    """Kernels for the process, chosen by the heads of the model's configuration."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.kernels: AttentionKernels | None = None

    def on_meta(self, model: Any) -> None:
        context = self.context
        one_length = context.plan.layout.pack_tokens is not None
        self.kernels = choose_attention_kernels(model.config, context.device, context.dtype, one_length=one_length)

    def describe(self) -> Sequence[str]:
        return () if self.kernels is None else (f"attention: {self.kernels.describe()}",)
