"""The converter that leaves out what text never passes through in a multimodal model (see ``model/structure.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from manyhands import families
from manyhands.convert.protocol import BaseConverter, Context
from manyhands.core.errors import UserError
from manyhands.model.structure import leave_out_towers


class TextOnly(BaseConverter):
    """Vision and audio towers of a multimodal model stay on disk."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.left_out: list[str] = []
        self.family = families.UNKNOWN

    def on_meta(self, model: Any) -> None:
        self.left_out = leave_out_towers(model)
        self.family = families.find(model.config.model_type)
        if self.left_out and self.context.config.model.init == "random":
            raise UserError(
                "a multimodal model cannot start from new weights",
                where="model.init",
                why=f"text alone is trained, and {', '.join(self.left_out)} would stay random",
                fix="set model.init=pretrained, or name a text model",
            )

    def describe(self) -> Sequence[str]:
        if not self.left_out:
            return ()
        parts = ", ".join(map(self._with_role, self.left_out))
        return (f"text alone is trained: {parts} are not loaded, and are saved with the model unchanged",)

    def _with_role(self, name: str) -> str:
        roles = {"tower": self.family.towers, "projector": self.family.projectors}
        return next((f"{name} ({role})" for role, names in roles.items() if name in names), name)
