"""Muse Glimmer: images around a text model with windows, layers without positions, and gates behind attention."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from manyhands.families.family import Config, Family, ImageLayout, Shapes
from manyhands.families.gemma2 import NORMS
from manyhands.families.hybrids import attention, mlp, norms
from manyhands.families.images import PIXELS, ImageShape, PatchRows


def _block(config: Config, index: int, dense: bool) -> Shapes:
    shapes = attention(config, config.get("head_dim") or 128)
    shapes["self_attn.gate_proj.weight"] = shapes["self_attn.q_proj.weight"]
    return shapes | mlp(config, config["intermediate_size"], "mlp") | norms(config, *NORMS)


@dataclass(frozen=True)
class Frames(PatchRows):
    """The forward pass takes a patch as a vector (frame, channel, row, column), all frames alike."""

    num_frames: int = 2

    def inputs(self, entries: dict[str, Any]) -> dict[str, Any]:
        return entries | {PIXELS: entries[PIXELS].flatten(1).repeat(1, self.num_frames)}


def _expand(image: ImageShape, processor: Mapping[str, Any]) -> str:
    features = processor["patch"] * (image.units // processor["merge_size"] ** 2)
    return f"<|image_start|>{features}<|image_end|>"


MUSE_GLIMMER_TEXT = Family(
    name="Muse Glimmer",
    model_types=("muse_glimmer_text",),
    head_dim=128,
    norms=NORMS,
    block=_block,
)
MUSE_GLIMMER = Family(
    name="Muse Glimmer",
    model_types=("muse_glimmer",),
    towers=("model.vision_tower",),
    projectors=("model.vision_adapter", "model.vision_projection"),
    images=ImageLayout(
        Frames(), _expand, {"patch": "<|patch|>"}, placeholder="patch", token="patch", keeps_features=False
    ),
)

FAMILIES = (MUSE_GLIMMER_TEXT, MUSE_GLIMMER)
