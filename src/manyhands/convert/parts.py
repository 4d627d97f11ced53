"""The converter of a model of text and more: which parts are left out, frozen or trained, by ``Plan.parts``.

Parts are left out where no image passes through them (see ``model/structure.py``); else images reach the language model
(``model/multimodal.py``). What is trained beside a part that is frozen is kept in float32 and cast as it is used, as
where weights are chosen by name (``convert/trainable.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from manyhands import families
from manyhands.convert.protocol import BaseConverter, Context
from manyhands.convert.trainable import train_parameters
from manyhands.core.errors import UserError
from manyhands.facts.towers import part_of
from manyhands.model.loss import LossModel
from manyhands.model.multimodal import OUTER_PARTS, Images, takes_images
from manyhands.model.structure import leave_out_towers


class ModalityParts(BaseConverter):
    """Vision tower, projector and language model, each left out, frozen or trained."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.left_out: list[str] = []
        self.images: Images | None = None
        self.family = families.UNKNOWN

    def on_meta(self, model: Any) -> None:
        self.family = families.find(model.config.to_dict())
        if not takes_images(self.context.plan):
            self.left_out = leave_out_towers(model)
        else:
            self.images = Images(model, self.family)  # UserError where images cannot be trained
            self.left_out = leave_out_towers(model, lambda name: part_of(name, self.family) not in OUTER_PARTS)
        if self.left_out and self.context.config.model.init == "random":
            raise UserError(
                "a multimodal model cannot start from new weights",
                where="model.init",
                why=f"text alone is trained, and {', '.join(self.left_out)} would stay random",
                fix="set model.init=pretrained, or name a text model",
            )

    def on_loss(self, loss_model: LossModel) -> None:
        """Freezes and trains parts, once adapters and patterns have chosen within the language model."""
        if self.images is None:
            return
        loss_model.images = self.images
        model, states = loss_model.model, self.context.plan.parts
        parameters = dict(model.named_parameters())
        trained = {
            name
            for part, names in self.images.parts.items()
            for name in names
            if states.get(part) == "trained" and name not in self.images.unused
        }
        outer = {name for names in self.images.parts.values() for name in names}
        if self.context.config.method.name == "full":
            text = parameters.keys() - outer if states.get("language", "trained") == "trained" else set()
            chosen = trained | text
            model.requires_grad_(False)
            if len(chosen) == len(parameters) - len(self.images.unused):  # everything: as a model of one part
                for name in chosen:
                    parameters[name].requires_grad_(True)
                return
            trained = chosen
        else:  # what PEFT saves beside adapters are modules: a parameter of the whole model is none
            own = {name for module in (model, model.base_model) for name in module._parameters}
            trained = {name for name in trained if name.rpartition(".")[2] not in own}
        train_parameters(model, {id(parameters[name]) for name in trained})

    def describe(self) -> Sequence[str]:
        lines = []
        if self.images is not None:
            states = self.context.plan.parts
            lines.append(
                "images: " + ", ".join(f"{part} {states.get(part, 'trained')}" for part in (*OUTER_PARTS, "language"))
            )
            if self.images.unused:
                lines.append(
                    f"images: {len(self.images.unused)} weights of the vision tower stay as they are, as no feature"
                    " depends on them"
                )
        elif self.left_out:
            parts = ", ".join(map(self._with_role, self.left_out))
            lines.append(f"text alone is trained: {parts} are not loaded, and are saved with the model unchanged")
        return tuple(lines)

    def _with_role(self, name: str) -> str:
        roles = {"tower": self.family.towers, "projector": self.family.projectors}
        return next((f"{name} ({role})" for role, names in roles.items() if name in names), name)
