"""The fastest attention kernels that pass a self-test on this device: for packs, and for samples of one length."""

from __future__ import annotations

from typing import Any

from manyhands.convert.protocol import BaseConverter
from manyhands.model.attention import choose_attention_kernels


class FastAttention(BaseConverter):
    """Kernels for the process, chosen by the heads of the model's configuration."""

    def on_meta(self, model: Any) -> None:
        context, layout = self.context, self.context.plan.layout
        kernels = choose_attention_kernels(
            model.config,
            context.device,
            context.dtype,
            one_length=layout.pack_tokens is not None,
            num_ranks=layout.mesh.context if layout.exchanges_heads else 1,
        )
        self.lines.append(f"attention: {kernels.describe()}")
