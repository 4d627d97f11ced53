"""Known attention and MLP modules as one function each, over adapted or fp8 layers (``kernels/modules.py``)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from manyhands.convert.protocol import BaseConverter, Context
from manyhands.core.errors import UserError
from manyhands.families import known_modules
from manyhands.kernels.modules import FuseReport, fuse_lora


class FusedModules(BaseConverter):
    """What is fused, and what is left and why, is in the log."""

    name = "fused modules"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.report: FuseReport | None = None

    def on_meta(self, model: nn.Module) -> None:
        self.report = fuse_lora(model, known_modules())
        adapters = self.context.config.method.trains_adapters
        if adapters and self.context.config.kernels.lora == "fused" and not self.report.fused:
            raise UserError(
                "no adapted module can be fused",
                where="kernels.lora",
                why=str(self.report),
                fix="set kernels.lora: auto",
            )

    def describe(self) -> Sequence[str]:
        what = "adapters" if self.context.config.method.trains_adapters else "linear"
        return () if self.report is None else (f"{what}: {self.report}",)
