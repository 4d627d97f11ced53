"""Kimi K2.5: images around DeepSeek-V3."""

from collections.abc import Mapping
from typing import Any

from manyhands.families.family import Family, ImageLayout
from manyhands.families.images import ImageShape, PatchRows


def _expand(image: ImageShape, processor: Mapping[str, Any]) -> str:
    return processor["image_token"] * (image.units // processor["merge_size"] ** 2)


KIMI_K25 = Family(
    name="Kimi K2.5",
    model_types=("kimi_k25",),
    text_model_type="deepseek_v3",  # published as kimi_k2, which transformers takes for it
    towers=("model.vision_tower",),
    projectors=("model.mm_projector",),
    images=ImageLayout(PatchRows(), _expand, {"image_token": "<|media_pad|>"}, keeps_features=False),
)

FAMILIES = (KIMI_K25,)
